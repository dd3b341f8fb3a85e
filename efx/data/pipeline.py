"""Batches: from `config.data` to the input of `train_step`, a function of (seed, step) alone."""

import functools

import numpy as np

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import corpus, held_out, tokenizers
from efx.data.corpus import SPLITS
from efx.data.disk_cache import content_key
from efx.data.growing import GrowingTokens
from efx.data.opened import OpenedTexts
from efx.data.packing import Packing
from efx.errors import UsageError


def load(
    config_data,
    *,
    seed,
    tokenizer_path=None,
    splits=SPLITS,
    recorded_origin=None,
    is_recorded_text=True,
):
    """Open the data that `config_data` describes; tokenise it if it is not in the cache.

    Args:
      config_data: the `data` block of a config.
      seed: with the step, determines every batch; `config.seed` as a rule.
      tokenizer_path: tokenizer.json of a run, used in place of `config_data.tokenizer`.
      splits: which of "train" and "eval" to load. With a `tokenizer_path`, a text that they do not
        need is not opened.
      recorded_origin: `Data.origin` that a run recorded; None for a new run. Text that it held out
        is held out again; a text that has changed is refused, but see config.data.on_change.
      is_recorded_text: whether `config_data` names the text of that run. If not, its text is split
        anew, unless its content is the run's.

    Returns:
      Data.

    Raises:
      UsageError: one line that names the key, value or file at fault.
    """
    c = make(DataConfig, config_data)
    opened = OpenedTexts(c, splits if tokenizer_path else SPLITS, recorded_origin, is_recorded_text)
    tokenizer = opened.tokenizer(tokenizer_path)
    token_splits = {
        split: tokens for split, tokens in opened.token_splits(tokenizer).items() if split in splits
    }
    for split, tokens in token_splits.items():
        if tokens.loss and not c.lossy_tokenizer:
            raise UsageError(
                f"{tokens.name}: config.data.tokenizer={c.tokenizer!r} loses text: {tokens.loss}; "
                "use another tokenizer, or set config.data.lossy_tokenizer=True (then no bits per "
                "byte are logged)"
            )
        # The length of a growing text is checked when it ends. A text that is held out as a whole
        # may be shorter than a row.
        if split == "eval" or not opened.grows:
            seq_len = 1 if split == "eval" and c.eval_source else c.seq_len
            corpus.check_length(seq_len, split, tokens.name, len(tokens.stream))
    key = content_key(opened.key(), tokenizer.fingerprint)
    data = Data(c, seed, tokenizer, token_splits, key)
    data.origin, data.subset = opened.origin, opened.subset and opened.subset.key
    data.is_cut = "train" in splits and opened.is_source_cut()
    return data


_FEW_TOKENS = 10_000  # held-out tokens that give a noisy loss


class Data:
    """A tokenised text, split, and the batches made of it. Made by `load`.

    A batch is a dict of rows: inputs, targets int32[B, T]; weights float32[B, T], 0 where nothing
    is scored; with packing also positions and segment_ids int32[B, T] (0: padding). With `rows`,
    numbers from 0 to B - 1, only those rows are read: the content of row i of step n depends
    neither on the number of processes nor on which of them reads it.

    Attributes:
      tokenizer: an efx tokenizer.
      vocab_size: number of token ids.
      eval_tokens: tokens of the held-out split; 0 if it was not loaded.
      fingerprint: hash of the text, of how it is split, and of the tokenizer.
      subset: hash of the list that the training split is limited to, or None.
      origin: a run's record of its text, see `opened.OpenedTexts`.
      is_cut: whether config.data.max_bytes leaves out a part of the training text.
    """

    subset = origin = None
    is_cut = False

    def __init__(self, config, seed, tokenizer, token_splits, fingerprint):
        """token_splits: {"train" or "eval": TokenSplit}."""
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.fingerprint = fingerprint
        self._config, self._splits = config, token_splits
        self._streams = {split: tokens.stream for split, tokens in token_splits.items()}
        self.eval_tokens = len(self._streams.get("eval", ()))
        self._packings, self._scored_bytes = {}, {}
        # 32 bits for grain; hashed, so that neighbouring seeds have nothing in common (grain
        # derives the order of epoch e from seed + e).
        self._seed = int(content_key("order", int(seed))[:8], 16)

    @property
    def train_tokens(self):
        """Tokens in the training split; those so far while it `grows`; 0 if it was not loaded."""
        return len(self._streams.get("train", ()))

    @property
    def grows(self):
        """Whether the training split is still being tokenised, so that a batch may have to wait."""
        tokens = self._streams.get("train")
        return isinstance(tokens, GrowingTokens) and not tokens.finished

    def documents(self, split):
        """int64[n, 2]: the first and last-plus-one token of each document of `split`."""
        return self._splits[split].documents(self.tokenizer.eot)

    def tokens(self, split, start, stop):
        """int32[stop - start]: the tokens of `split` from `start` on."""
        return self._streams[split].windows([start], stop - start)[0]

    def describe_held_out(self):
        """A description of the held-out split for people."""
        c = self._config
        if c.eval_source:
            return f"all of config.data.eval_source={c.eval_source!r}"
        if "shards" in self.origin["held_out"]:
            return f"the evaluation shards of config.data.source={c.source!r}"
        description = f"split={c.split!r}, eval_fraction={c.eval_fraction}"
        if self.origin["of"] != self.origin["source"]:
            description += ", as at the start of the run"
        limit = f" of the first {c.max_bytes:,} bytes" if c.max_bytes else ""
        if c.shuffle == "buffer":
            first = min(c.max_bytes or held_out.HEAD_BYTES, held_out.HEAD_BYTES)
            limit = f" of the documents that start in the first {first:,} bytes"
        return f"the held-out part ({description}){limit} of config.data.source={c.source!r}"

    def remarks(self):
        """Lines for people about limits of the text and of the tokenizer."""
        c, lines = self._config, []
        if self.is_cut:
            lines.append(
                f"config.data.max_bytes={c.max_bytes}: only the first {c.max_bytes:,} bytes of "
                f"config.data.source={c.source!r} are used; set it to 0 to use all"
            )
        # Not parsed otherwise: the file that a setting names may be gone.
        is_bpe = c.tokenizer.startswith("bpe:")
        if is_bpe and self.vocab_size < tokenizers.parse(c.tokenizer)[1]:
            lines.append(
                f"config.data.tokenizer={c.tokenizer!r}: the tokenizer has only "
                f"{self.vocab_size:,} ids; train it on a longer text for more"
            )
        if "eval" in self._streams and self.eval_tokens < _FEW_TOKENS:
            remedy = "use a longer config.data.eval_source"
            if not c.eval_source:
                remedy = "use a longer text, or raise config.data.eval_fraction"
            lines.append(
                f"the held-out split has only {self.eval_tokens:,} tokens, so its loss is noisy; "
                f"{remedy}"
            )
        return lines

    # ---- packing ---------------------------------------------------------------------------------

    def check_packing(self):
        """UsageError if the training split is one document."""
        if "train" in self._streams and len(self.documents("train")) < 2:
            raise UsageError(
                "config.data.packing=True: the training split of "
                f"config.data.source={self._config.source!r} is one document; set "
                "config.data.packing=False"
            )

    def _packing(self, split):
        if split not in self._packings:
            self._packings[split] = Packing(
                self._streams[split],
                self.documents(split),
                self.tokenizer.eot,
                self._config.seq_len,
                {"train": "length", "eval": "document"}[split],
                self._seed,
            )
        return self._packings[split]

    # ---- bits per byte ---------------------------------------------------------------------------

    def scored_tokens(self, split):
        """Number of targets with weight 1 in one pass over `split` ("train" or "eval")."""
        if self._config.packing:
            return self._packing(split).pairs
        return len(self._streams[split]) - 1

    @property
    def counts_bytes(self):
        """Whether the bytes of text that held-out tokens stand for are known.

        Not if the tokenizer loses text. Token shards have no text to compare, so they need a
        tokenizer whose ids each stand for fixed bytes.
        """
        loss = self._splits["eval"].loss
        return loss == "" or (loss is None and self.tokenizer.token_bytes() is not None)

    def scored_bytes(self, batch_size, max_batches=0):
        """Bytes of text that the targets of `eval_batches` stand for; None unless `counts_bytes`.

        nats of the targets / (ln 2 * bytes) = bits per byte. Ends of documents are targets and
        stand for no bytes.
        """
        key = batch_size, max_batches
        # Every evaluation calls this, and devices would wait until a long split is counted.
        if key not in self._scored_bytes and self.counts_bytes:
            batches, lengths = self.eval_batches(*key), self.tokenizer.byte_lengths()
            if lengths is not None:
                counts = (lengths[b["targets"]][b["weights"] > 0].sum() for b in batches)
            else:
                every = batches.target_positions()
                positions = (x[(0 <= x) & (x < self.eval_tokens)] for x in every)
                counts = (self._added_bytes[x].sum() for x in positions)
            self._scored_bytes[key] = int(sum(counts))
        return self._scored_bytes.get(key)

    @functools.cached_property
    def _added_bytes(self):
        """int32[eval_tokens]: bytes of text that each token adds to its document."""
        added = np.zeros(self.eval_tokens, np.int32)
        for start, stop in self.documents("eval"):
            added[start:stop] = self.tokenizer.added_bytes(self.tokens("eval", start, stop))
        return added

    def epochs(self, steps):
        """How often `steps` steps read the training text; None while it `grows`."""
        if self.grows:
            return None
        c = self._config
        rows = len(self._packing("train")) if c.packing else self.train_tokens / c.seq_len
        return steps * c.batch_size / rows

    # ---- batches ---------------------------------------------------------------------------------

    def train_iterator(self, start_step=0, rows=None):
        """Endless batches from step `start_step` on (0: the first): all rows of each, or `rows`."""
        # Imports grain and with it jax, which reading text in a notebook does not need.
        from efx.data import windows

        c, seed, stream = self._config, self._seed, self._streams["train"]
        rows = np.arange(c.batch_size) if rows is None else np.asarray(rows)
        if c.packing:
            packing = self._packing("train")
            order = windows.shuffled_order(len(packing), seed)
        elif c.shuffle == "windows":
            starts = windows.ShuffledStarts(len(stream), c.seq_len, seed)
        elif c.shuffle == "buffer":
            name = self._splits["train"].name
            starts = windows.BufferedStarts(stream, c.seq_len, seed, c.buffer_tokens, name)
        else:
            starts = windows.random_starts(len(stream), c.seq_len, seed, c.batch_size)

        def batch_of_step(step):
            indices = (step * c.batch_size + rows).tolist()
            if c.packing:
                return packing.rows(order(indices))
            return _batch(stream.windows(starts(indices), c.seq_len + 1))

        return TrainIterator(batch_of_step, start_step)

    def eval_batches(self, batch_size, max_batches=0, rows=None):
        """Batches over the whole held-out split, in order; can be iterated over repeatedly.

        Rows are windows of seq_len that do not overlap (with packing: packed rows), so every target
        has weight 1 exactly once. The last batch is filled up with rows of weight 0: its own rows
        and tokens once more, since statistics that layers report include all of a batch; with
        packing padding, which they leave out.

        Args:
          max_batches: limits their number (0: no limit); the rows are then spread evenly over the
            split.
          rows: limits each batch to these rows.
        """
        return EvalBatches(self, batch_size, max_batches, rows)

    def repeated_batches(self, count, batch_size, rows=None):
        """Batches for the copying probe: the second half of each row repeats the first.

        The tokens of a row are drawn one by one from all over the held-out split, so that only the
        repetition can be predicted. They are the same at every call.

        Args:
          count: number of rows; later rows of the last batch have weight 0.
          rows: limits each batch to these rows.

        Yields:
          {"first", "second": the batch with weights for the targets of this half of its rows}. The
          first token of a row is no target, and the first of its repetition counts in neither half.
        """
        stream, length = self._streams["eval"], self._config.seq_len
        half = length // 2
        rows = np.arange(batch_size) if rows is None else np.asarray(rows)
        place_T = np.arange(length)
        is_second_T = (half <= place_T) & (place_T < 2 * half - 1)
        halves = {"first": place_T < half - 1, "second": is_second_T}
        for start in range(0, count, batch_size):
            tokens = np.zeros((len(rows), length + 1), np.int32)
            for b, row in enumerate((start + rows).tolist()):
                # Seeded by the number of the row, so that it does not depend on the host.
                places = np.random.default_rng(row).integers(len(stream), size=half)
                tokens[b] = np.resize(stream.windows(places, 1)[:, 0], length + 1)
            batch = _batch(tokens)
            if self._config.packing:
                batch["positions"] = np.broadcast_to(place_T.astype(np.int32), (len(rows), length))
                batch["segment_ids"] = np.ones((len(rows), length), np.int32)
            is_row_B1 = (start + rows < count)[:, None]
            yield {
                name: batch | {"weights": (is_row_B1 & half_T).astype(np.float32)}
                for name, half_T in halves.items()
            }


class EvalBatches:
    """See `Data.eval_batches`."""

    def __init__(self, data, batch_size, max_batches, rows):
        self._stream, self._seq_len = data._streams["eval"], data._config.seq_len
        self._packing = data._packing("eval") if data._config.packing else None
        self._total = -(-(len(self._stream) - 1) // self._seq_len)  # rows of the split
        if self._packing:
            self._total = len(self._packing)
        self._rows = np.arange(batch_size) if rows is None else np.asarray(rows)
        self._batch_size, batches = batch_size, -(-self._total // batch_size)
        self._count = min(batches, max_batches) if max_batches else batches

    def __len__(self):
        return self._count

    def _row_numbers(self):
        """Yield the numbers of the rows of each batch."""
        chosen = min(self._count * self._batch_size, self._total)
        for i in range(self._count):
            # Past the last chosen row they are past the last row.
            yield (i * self._batch_size + self._rows) * self._total // chosen

    def __iter__(self):
        for row_numbers in self._row_numbers():
            yield self._packing.rows(row_numbers) if self._packing else self._windows(row_numbers)

    def target_positions(self):
        """For each batch int64[B, T]: position of each target in the split's tokens, -1: padding.

        A target that only ends the last document lies behind the last token.
        """
        for row_numbers in self._row_numbers():
            if self._packing:
                yield self._packing.target_positions(row_numbers)
            else:
                positions_BT = row_numbers[:, None] * self._seq_len + 1 + np.arange(self._seq_len)
                yield np.where(positions_BT < len(self._stream), positions_BT, -1)

    def _windows(self, row_numbers):
        tokens = np.empty((len(row_numbers), self._seq_len + 1), np.int32)
        weights_BT = np.zeros((len(row_numbers), self._seq_len), np.float32)
        for b, row in enumerate(row_numbers.tolist()):
            # Rows past the end repeat the rows of their batch.
            first = row // self._batch_size * self._batch_size
            start = (first + (row - first) % (self._total - first)) * self._seq_len
            count = min(self._seq_len + 1, len(self._stream) - start)
            tokens[b] = np.resize(self._stream.windows([start], count)[0], self._seq_len + 1)
            weights_BT[b, : count - 1] = row < self._total
        return _batch(tokens, weights_BT)


class TrainIterator:
    """Endless training batches. The only state is the number of the next step."""

    def __init__(self, batch_of_step, start_step):
        self._batch_of_step, self._step = batch_of_step, start_step

    def __iter__(self):
        return self

    def __next__(self):
        batch = self._batch_of_step(self._step)
        self._step += 1
        return batch

    def get_state(self):
        """{"step": number of the step that the next batch is for}; the same on every host."""
        return {"step": self._step}

    def set_state(self, state):
        """Continue from `state`, which may come from a run on another number of hosts."""
        self._step = int(state["step"])


def _batch(tokens, weights_BT=None):
    inputs_BT = np.ascontiguousarray(tokens[:, :-1])
    targets_BT = np.ascontiguousarray(tokens[:, 1:])
    if weights_BT is None:
        weights_BT = np.ones(inputs_BT.shape, np.float32)
    return {"inputs": inputs_BT, "targets": targets_BT, "weights": weights_BT}
