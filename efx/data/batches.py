"""Batches: the input of `train_step`, a function of (seed, step) alone."""

import sys

import numpy as np

from efx.data import mixture, tokenizers
from efx.data.disk_cache import content_key
from efx.data.packing import Packing
from efx.errors import UsageError

_FEW_TOKENS = 10_000  # held-out tokens that give a noisy loss


def state_at(step):
    """The state of a `Data.train_iterator` whose next batch is for a step."""
    return {"next_index": step}


class Data:
    """Tokenised texts, split, and the batches made of them. Made by `texts.load`.

    A batch is a dict of rows: inputs, targets int32[B, T]; weights float32[B, T], 0 where nothing
    is scored; with packing also positions and segment_ids int32[B, T] (0: padding). With `rows`,
    numbers from 0 to B - 1, only those rows are read: the content of row i of step n depends
    neither on the number of processes nor on which of them reads it.

    A split is "train", or "train/NAME" for each part of config.data.mixture; "eval", all held-out
    text; and "eval/NAME" for each set in config.data.eval_sets and each part that is split.

    Attributes:
      eval_sets: names of the held-out sets besides all held-out text.
      fingerprint: hash of the texts, of how they are split, and of the tokenizer.
      subset: hash of the list that the training split is limited to, or None.
      text_record: a run's record of its text, see `texts`.
      is_cut: whether config.data.max_bytes leaves out a part of the training text.
    """

    subset = text_record = None
    is_cut = False

    def __init__(self, config, seed, tokenizer, token_splits, fingerprint):
        """token_splits: {split: TokenSplit}."""
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.fingerprint = fingerprint
        self._config, self._splits = config, token_splits
        self._streams = {split: tokens.stream for split, tokens in token_splits.items()}
        self._parts = [split for split in token_splits if split.startswith("train")]
        self.eval_sets = [split[5:] for split in token_splits if split.startswith("eval/")]
        self._packings, self._scored_bytes = {}, {}
        self._training_text = f"config.data.source={config.source!r}"
        if config.mixture:
            self._training_text = "each part of config.data.mixture"
        # Hashed, so that neighbouring seeds have nothing in common.
        self._seed = int(content_key("order", int(seed))[:15], 16)
        self._mixture = None
        if config.mixture and self._parts:
            schedules = [schedule for _, schedule in config.mixture.values()]
            self._mixture = mixture.Mixture(schedules, config.batch_size, self._seed)

    @property
    def train_tokens(self):
        """Tokens to train on; 0 if they were not loaded."""
        return sum(len(self._streams[part]) for part in self._parts)

    @property
    def eval_tokens(self):
        """Tokens of all held-out text; 0 if it was not loaded."""
        return len(self._streams.get("eval", ()))

    def documents(self, split):
        """int64[n, 2]: the first and last-plus-one token of each document of a split."""
        return self._splits[split].documents(self.tokenizer.eot)

    def tokens(self, split, start, stop):
        """int32[stop - start]: the tokens of `split` from `start` on."""
        return self._streams[split].windows([start], stop - start)[0]

    def describe_held_out(self):
        """A description of the held-out split for people."""
        c, text = self._config, self._training_text
        if c.eval_source:
            return f"all of config.data.eval_source={c.eval_source!r}"
        if any("shards" in each["held_out"] for each in self.text_record["train"].values()):
            return f"the evaluation shards of {text}"
        description = f"split={c.split!r}, eval_fraction={c.eval_fraction}"
        if self.keeps_earlier_split:
            description += ", as at the start of the run"
        is_limited = c.max_bytes and not c.source.startswith("tokens:")
        limit = f" of the first {c.max_bytes:,} bytes" if is_limited else ""
        return f"the held-out part ({description}){limit} of {text}"

    @property
    def keeps_earlier_split(self):
        """Whether the held-out split was made from an earlier version of the text."""
        records = self.text_record["train"].values()
        return any(r["held_out"] and r["split_made_for"] != r["content"] for r in records)

    def remarks(self):
        """Lines for people about limits of the text and of the tokenizer."""
        c, lines = self._config, []
        if self.is_cut:
            lines.append(
                f"config.data.max_bytes={c.max_bytes}: only the first {c.max_bytes:,} bytes of "
                f"{self._training_text} are used; set it to 0 to use all"
            )
        # Not parsed otherwise: the file that a setting names may be gone.
        is_bpe = c.tokenizer.startswith("bpe:")
        if is_bpe and self.vocab_size < tokenizers.parse(c.tokenizer)[1]:
            lines.append(
                f"config.data.tokenizer={c.tokenizer!r}: the tokenizer has only "
                f"{self.vocab_size:,} ids; train it on a longer text for more"
            )
        if "eval" in self._streams and self.eval_tokens < _FEW_TOKENS:
            remedy = "use a longer text, or raise config.data.eval_fraction"
            lines.append(
                f"the held-out split has only {self.eval_tokens:,} tokens, so its loss is noisy; "
                + ("use a longer config.data.eval_source" if c.eval_source else remedy)
            )
        return lines

    # ---- packing ---------------------------------------------------------------------------------

    def check_packing(self):
        """UsageError if a training split is one document."""
        for part in self._parts:
            if len(self.documents(part)) < 2:
                raise UsageError(
                    f"config.data.packing=True: the training split of {self._splits[part].name} "
                    "is one document; set config.data.packing=False"
                )

    def _packing(self, split):
        if split not in self._packings:
            order = "length" if split in self._parts else "document"
            spans, stream, eot = self.documents(split), self._streams[split], self.tokenizer.eot
            self._packings[split] = Packing(
                stream, spans, eot, self._config.seq_len, order, self._seed
            )
        return self._packings[split]

    # ---- bits per byte ---------------------------------------------------------------------------

    def scored_tokens(self, split="eval"):
        """Number of targets with weight 1 in one pass over `split`."""
        if self._config.packing:
            return self._packing(split).pairs
        return len(self._streams[split]) - 1

    def counts_bytes(self, split="eval"):
        """Whether the bytes of text that held-out tokens stand for are known: the tokenizer loses
        no text, or without text to compare, its ids each stand for fixed bytes."""
        loss = self._splits[split].loss
        return loss == "" or (loss is None and self.tokenizer.token_bytes() is not None)

    def scored_bytes(self, batch_size, max_batches=0, split="eval"):
        """Bytes of text that the targets of `eval_batches` stand for; None unless `counts_bytes`.

        nats of the targets / (ln 2 * bytes) = bits per byte. Ends of documents are targets and
        stand for no bytes.
        """
        key = batch_size, max_batches, split
        # Every evaluation calls this, and devices would wait until a long split is counted.
        if key not in self._scored_bytes and self.counts_bytes(split):
            batches = self.eval_batches(batch_size, max_batches, split=split)
            lengths, count = self.tokenizer.byte_lengths(), len(self._streams[split])
            if lengths is not None:
                counts = (lengths[b["targets"]][b["weights"] > 0].sum() for b in batches)
            else:
                added = self._added_bytes(split)
                every = batches.target_positions()
                counts = (added[x[(0 <= x) & (x < count)]].sum() for x in every)
            self._scored_bytes[key] = int(sum(counts))
        return self._scored_bytes.get(key)

    def _added_bytes(self, split):
        """int32[tokens of a held-out split]: bytes of text that each token adds to its document."""
        added = np.zeros(len(self._streams[split]), np.int32)
        for start, stop in self._splits[split].spans:
            added[start:stop] = self.tokenizer.added_bytes(self.tokens(split, start, stop))
        return added

    # ---- batches ---------------------------------------------------------------------------------

    def rows_read(self, steps):
        """{part: rows of it in the first `steps` steps}; without a mixture the part is "train"."""
        rows = steps * self._config.batch_size
        counts = [rows] if self._mixture is None else self._mixture.rows(rows).tolist()
        return dict(zip(self._parts, counts, strict=True))

    def epochs(self, steps):
        """{part: how often `steps` steps read its text}."""
        c = self._config
        return {
            part: rows
            / (len(self._packing(part)) if c.packing else len(self._streams[part]) / c.seq_len)
            for part, rows in self.rows_read(steps).items()
        }

    def train_iterator(self, start_step=0, rows=None):
        """Endless batches from step `start_step` on (0: the first): all rows of each, or `rows`.

        The state of this iterator of grain is the same on every host, and continues a run also on
        another number of hosts.
        """
        # Imports jax, which reading text in a notebook does not need.
        import grain

        rows = np.arange(self._config.batch_size) if rows is None else np.asarray(rows)
        # Threads would only wait for each other: the tokens are memory-mapped.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        batches = grain.MapDataset.source(_TrainBatches(self, rows)).to_iter_dataset(options)
        iterator = iter(batches)
        iterator.set_state(state_at(start_step))
        return iterator

    def _reader(self, part, number):
        """Function from the numbers of rows in the order of a part to a batch of them."""
        c, seed, stream = self._config, (self._seed, number), self._streams[part]
        if c.packing:
            packing = self._packing(part)
            order = mixture.shuffled_rows(len(packing), seed)
            return lambda indices: packing.rows(order(indices))
        kind = {"windows": mixture.shuffled_starts, "random": mixture.random_starts}[c.shuffle]
        starts = kind(len(stream), c.seq_len, seed)
        return lambda indices: _batch(stream.windows(starts(indices), c.seq_len + 1))

    def eval_batches(self, batch_size, max_batches=0, rows=None, split="eval"):
        """Batches over a whole held-out split, in order; can be iterated over repeatedly.

        Rows are windows of seq_len that do not overlap (with packing: packed rows), so every target
        has weight 1 exactly once. The last batch is filled up with rows of weight 0: its own rows
        and tokens once more, since statistics that layers report include all of a batch; with
        packing padding, which they leave out.

        Args:
          max_batches: limits their number (0: no limit); the rows are then spread evenly over the
            split.
          rows: limits each batch to these rows.
        """
        return EvalBatches(self, batch_size, max_batches, rows, split)

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
            # Seeded by the number of the row, so that it does not depend on the host.
            drawn = mixture.mixed((start + rows)[:, None], np.arange(half)) % np.uint64(len(stream))
            tokens = stream.windows(drawn.ravel(), 1).reshape(drawn.shape)
            batch = _batch(np.tile(tokens, (1, 4))[:, : length + 1])
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

    def __init__(self, data, batch_size, max_batches, rows, split):
        self._stream, self._seq_len = data._streams[split], data._config.seq_len
        self._packing = data._packing(split) if data._config.packing else None
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


class _TrainBatches:
    """The batch of each step, for grain."""

    def __init__(self, data, rows):
        self._rows, self._batch_size = rows, data._config.batch_size
        self._mixture = data._mixture
        self._readers = [data._reader(part, i) for i, part in enumerate(data._parts)]

    def __len__(self):
        return sys.maxsize // self._batch_size

    def __getitem__(self, step):
        indices = step * self._batch_size + self._rows
        if self._mixture is None:
            return self._readers[0](indices)
        parts, numbers = self._mixture(indices)
        batch = {}
        for part in np.unique(parts):
            at = parts == part
            for key, value in self._readers[part](numbers[at]).items():
                shape = (len(indices), *value.shape[1:])
                batch.setdefault(key, np.empty(shape, value.dtype))[at] = value
        return batch


def _batch(tokens, weights_BT=None):
    inputs_BT = np.ascontiguousarray(tokens[:, :-1])
    targets_BT = np.ascontiguousarray(tokens[:, 1:])
    if weights_BT is None:
        weights_BT = np.ones(inputs_BT.shape, np.float32)
    return {"inputs": inputs_BT, "targets": targets_BT, "weights": weights_BT}
