"""Batches: from `config.data` to what `train_step` takes, a function of (seed, step) alone."""

import functools
import operator

import numpy as np

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import corpus, held_out
from efx.data.corpus import SPLITS
from efx.data.disk_cache import content_key
from efx.data.growing import GrowingTokens
from efx.data.opened import OpenedTexts
from efx.data.packing import Packing
from efx.data.stream import count_bytes, documents_between
from efx.errors import UsageError

# Longer than any run: the training data never ends.
_STEPS = 1 << 40


def load(
    config_data,
    *,
    seed,
    tokenizer_path=None,
    splits=SPLITS,
    run_origin=None,
    same_text=True,
):
    """Opens the data that `config_data` describes; tokenises it if that is not in the cache.

    Args:
      config_data: the `data` block of a config.
      seed: with the step, determines every batch; `config.seed` as a rule.
      tokenizer_path: tokenizer.json of a run, used in place of `config_data.tokenizer`.
      splits: which of "train" and "eval" to load. What they do not need is not opened: for "eval"
        alone no source beside an eval_source, for neither no text at all, unless the tokenizer has
        to be made of it.
      run_origin: `Data.origin` of the run whose data this is, None for a new one. What it held out
        is held out again; a text that has changed is refused, but see config.data.on_change.
      same_text: whether `config_data` names the text of that run. If not, its text gets a split of
        its own, unless its content is the run's.

    Returns:
      Data.

    Raises:
      UsageError: one line that names the key, value or file at fault.
    """
    c = make(DataConfig, config_data)
    opened = OpenedTexts(c, splits if tokenizer_path else SPLITS, run_origin, same_text)
    tokenizer = opened.tokenizer(tokenizer_path)
    token_splits = {
        split: token_split
        for split, token_split in opened.streams(tokenizer).items()
        if split in splits
    }
    for split, token_split in token_splits.items():
        if split == "train" and opened.grows:  # how long it is shows when it ends
            continue
        # A text that is held out as a whole may be shorter than a row.
        shortest = 2 if split == "eval" and c.eval_source else c.seq_len + 1
        if len(token_split.stream) < shortest:
            raise _too_short(c.seq_len, split, token_split.name, len(token_split.stream))
    streams = {split: token_split.stream for split, token_split in token_splits.items()}
    with_spans = {
        split: tokens for split, tokens in token_splits.items() if tokens.spans is not None
    }
    spans = {split: token_split.spans for split, token_split in with_spans.items()}
    text_bytes = {split: token_split.text_bytes for split, token_split in with_spans.items()}
    key = content_key(opened.key(), tokenizer.fingerprint)
    data = Data(c, seed, tokenizer, streams, spans, text_bytes, key)
    data.subset, data.origin = opened.subset and opened.subset.key, opened.origin
    return data


def _too_short(seq_len, split, name, tokens):
    return UsageError(
        f"config.data.seq_len={seq_len}: the {corpus.SPLIT_NAMES[split]} of {name} has {tokens}"
        f" tokens, and one row needs {seq_len + 1} (seq_len + 1); lower config.data.seq_len, or"
        " use a longer text"
    )


class Data:
    """A tokenised text, split, and the batches made of it. Made by `load`.

    A batch is a dict of rows: inputs, targets int32[B, T]; weights float32[B, T], 0 where nothing
    is scored; with packing also positions and segment_ids int32[B, T] (0: padding). With `rows`,
    numbers from 0 to B - 1, only those rows are read: the content of row i of step n depends
    neither on the number of processes nor on which of them reads it.

    Attributes:
      tokenizer: an efx tokenizer.
      vocab_size: number of token ids.
      train_tokens, eval_tokens: tokens in the two splits, which have no text in common; 0 for a
        split that was not loaded.
      fingerprint: hash of the text, of how it is split, and of the tokenizer.
      subset: hash of the list that the training split is limited to, or None.
      origin: what a run records about its text, see `opened.OpenedTexts`.
    """

    subset = origin = None

    def __init__(self, config, seed, tokenizer, streams, spans, text_bytes, key):
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.eval_tokens = len(streams.get("eval", ()))
        self.fingerprint = key
        self._config, self._streams, self._packings = config, streams, {}
        self._spans, self._text_bytes = spans or {}, text_bytes or {}
        self._bytes_per_token = {}
        # 32 bits, which is what grain takes; hashed, so that neighbouring seeds have nothing in
        # common (grain derives the order of epoch e from seed + e).
        self._seed = int(content_key("order", int(seed))[:8], 16)

    @property
    def train_tokens(self):
        """Tokens in the training split; those so far while it `grows`."""
        return len(self._streams.get("train", ()))

    @property
    def grows(self):
        """Whether the training split is still being tokenised: then the next batch may have to be
        waited for."""
        tokens = self._streams.get("train")
        return isinstance(tokens, GrowingTokens) and not tokens.finished

    def documents(self, split):
        """int64[n, 2]: the first and last-plus-one token of each document of `split`."""
        if split in self._spans:
            return self._spans[split]
        return documents_between(self._streams[split], self.tokenizer.eot)

    def check_packing(self):
        """UsageError if what is trained on, or scored, is nothing to pack."""
        if "train" in self._streams and len(self.documents("train")) < 2:
            raise UsageError(
                "config.data.packing=True: the training split of "
                f"config.data.source={self._config.source!r} is one document; set "
                "config.data.packing=False"
            )
        for split in self._streams:
            self._packing(split)

    def _packing(self, split):
        if split not in self._packings:
            order = {"train": "length", "eval": "document"}[split]
            packing = Packing(
                self._streams[split],
                self.documents(split),
                self.tokenizer.eot,
                self._config.seq_len,
                order,
                self._seed,
            )
            if not len(packing):
                raise UsageError(
                    f"config.data.packing=True: no document of the {corpus.SPLIT_NAMES[split]} "
                    "has two tokens, the least for one prediction"
                )
            self._packings[split] = packing
        return self._packings[split]

    def tokens(self, split, start, stop):
        """int32[stop - start]: the tokens of `split` from `start` on."""
        return self._streams[split].windows([start], stop - start)[0]

    def held_out_of(self):
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

    def scored_tokens(self, split):
        """Number of targets with weight 1 in one pass over `split` ("train" or "eval")."""
        if self._config.packing:
            return self._packing(split).pairs
        return len(self._streams[split]) - 1

    def bytes_per_token(self, split):
        """Bytes of text that a scored token of `split` stands for, on average.

        nats per token / (ln 2 * bytes per token) = bits per byte. Ends of documents are scored and
        stand for no bytes. If the tokenizer does not know the bytes of an id, the bytes of the
        whole split are counted.
        """
        scored = self.scored_tokens(split)
        # Every evaluation asks, and devices would wait until all of a long split is counted.
        if (split, scored) not in self._bytes_per_token:
            self._bytes_per_token[split, scored] = self._scored_bytes(split) / scored
        return self._bytes_per_token[split, scored]

    def _scored_bytes(self, split):
        """Bytes of text that the scored tokens of `split` stand for together."""
        stream, lengths = self._streams[split], self.tokenizer.byte_lengths()
        if lengths is None:
            if split in self._text_bytes:
                return self._text_bytes[split]
            texts = (
                self.tokenizer.decode(array[i : i + (1 << 20)])
                for array in stream.arrays()
                for i in range(0, len(array), 1 << 20)
            )
            return sum(len(t.encode("utf-8", "replace")) for t in texts)
        if not self._config.packing:
            return count_bytes(stream, lengths, start=1)
        total = count_bytes(stream, lengths)
        if self.tokenizer.eot is None:  # then nothing predicts a document's first token
            firsts = stream.windows(self.documents(split)[:, 0], 1)
            total -= int(lengths[firsts].sum())
        return total

    def train_iterator(self, start_step=0, rows=None):
        """Endless batches from step `start_step` on (0: the first): all rows of each, or `rows`."""
        # Before a text that grows has a thread: a library that grain imports replaces Python's
        # import for a moment, and another thread's imports would then be no modules.
        import grain  # noqa: F401

        config, stream = self._config, self._streams["train"]
        if config.packing:
            rows_of_step = _ShuffledRows(self._packing("train"), self._seed)
        elif config.shuffle == "windows":
            rows_of_step = _ShuffledWindows(stream, config.seq_len, self._seed)
        elif config.shuffle == "buffer":
            rows_of_step = _BufferedWindows(
                stream, config.seq_len, self._seed, config.buffer_tokens, config.source
            )
        else:
            rows_of_step = _RandomWindows(stream, config.seq_len, self._seed)
        rows = np.arange(config.batch_size) if rows is None else np.asarray(rows)

        def batch(step):
            return rows_of_step(step, config.batch_size, rows)

        return TrainIterator(batch, start_step)

    def eval_batches(self, batch_size, max_batches=0, rows=None):
        """Batches over the whole held-out split, in order; can be iterated over repeatedly.

        Rows are windows of seq_len that do not overlap (with packing: packed rows), so every target
        has weight 1 exactly once; the last batch is filled up with weight 0: with its own rows and
        tokens once more, since what layers report of a batch is of all that it holds (with packing
        with padding, which they leave out). `max_batches` limits their number: then the rows are
        spread evenly over the split. `rows` limits each batch to these rows.
        """
        return EvalBatches(self, batch_size, max_batches, rows)

    def repeated_batches(self, count, batch_size, rows=None):
        """Batches of `count` rows of tokens of the held-out split, drawn one by one from all over
        it, which are repeated in the same order from the middle of the row on; the same ones at
        every call. Nothing but the repetition can be predicted of them. `rows` limits each batch
        to these rows; after the last of `count` their weights are 0.

        Yields:
          {"first", "second": the batch with weights for the targets of this half of its rows}. The
          first token of a row is no target, and the first of its repetition counts in neither half.
        """
        stream, length = self._streams["eval"], self._config.seq_len
        half = length // 2
        rows = np.arange(batch_size) if rows is None else np.asarray(rows)
        place_T = np.arange(length)
        second_T = (half <= place_T) & (place_T < 2 * half - 1)
        halves = {"first": place_T < half - 1, "second": second_T}
        for start in range(0, count, batch_size):
            tokens = np.zeros((len(rows), length + 1), np.int32)
            for b, row in enumerate((start + rows).tolist()):
                # By the number of the row, so that hosts draw only what they read.
                places = np.random.default_rng(row).integers(len(stream), size=half)
                drawn = stream.windows(places, 1)[:, 0]
                tokens[b] = np.resize(drawn, length + 1)
            batch = _batch(tokens)
            if self._config.packing:
                batch["positions"] = np.broadcast_to(place_T.astype(np.int32), (len(rows), length))
                batch["segment_ids"] = np.ones((len(rows), length), np.int32)
            there_B1 = (start + rows < count)[:, None]
            yield {
                name: batch | {"weights": (there_B1 & half_T).astype(np.float32)}
                for name, half_T in halves.items()
            }


class EvalBatches:
    """See `Data.eval_batches`."""

    def __init__(self, data, batch_size, max_batches, rows):
        self._rows = np.arange(batch_size) if rows is None else np.asarray(rows)
        self._size, self._limit = batch_size, max_batches
        self._stream, self._seq_len = data._streams["eval"], data._config.seq_len
        self._packing = data._packing("eval") if data._config.packing else None
        pairs = len(self._stream) - 1
        self._total = len(self._packing) if self._packing else -(-pairs // self._seq_len)

    def __len__(self):
        count = -(-self._total // self._size)
        return min(count, self._limit) if self._limit else count

    def __iter__(self):
        for row_numbers in self._chosen():
            yield self._packing.rows(row_numbers) if self._packing else self._windows(row_numbers)

    def target_positions(self):
        """For each batch int64[B, T]: position of each target in the split's tokens, -1: padding.

        A target that only ends the last document lies behind the last token.
        """
        for row_numbers in self._chosen():
            if self._packing:
                yield self._packing.target_positions(row_numbers)
            else:
                target_positions_BT = (
                    row_numbers[:, None] * self._seq_len + 1 + np.arange(self._seq_len)
                )
                yield np.where(target_positions_BT < len(self._stream), target_positions_BT, -1)

    def _chosen(self):
        """The numbers of the rows of each batch."""
        count = len(self)
        chosen = min(count * self._size, self._total)
        for i in range(count):
            row_numbers = i * self._size + self._rows
            yield row_numbers * self._total // chosen  # past the last chosen row: past the last row

    def _windows(self, row_numbers):
        tokens = np.empty((len(row_numbers), self._seq_len + 1), np.int32)
        weights_BT = np.zeros((len(row_numbers), self._seq_len), np.float32)
        for b, row in enumerate(row_numbers.tolist()):
            first = row // self._size * self._size  # of the batch, if rows of it are past the end
            start = (first + (row - first) % (self._total - first)) * self._seq_len
            count = min(self._seq_len + 1, len(self._stream) - start)
            tokens[b] = np.resize(self._stream.windows([start], count)[0], self._seq_len + 1)
            weights_BT[b, : count - 1] = row < self._total
        return _batch(tokens, weights_BT)


class TrainIterator:
    """Training batches. Their only state is the number of the next step."""

    def __init__(self, batch, start_step):
        import grain  # imports jax, which reading data in a notebook does not need

        # What is read is memory-mapped and the system's page cache reads ahead: grain's threads
        # and processes only make it slower (benchmarks/data_loading.py).
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = grain.MapDataset.range(_STEPS).map(batch)
        self._inner = iter(dataset.to_iter_dataset(options))
        self.set_state({"step": start_step})

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._inner)

    def get_state(self):
        """{"step": number of the step that the next batch is for}; the same on every host."""
        return {"step": self._inner.get_state()["next_index"]}

    def set_state(self, state):
        """Continues from `state`, which may come from a run on another number of hosts."""
        self._inner.set_state({"next_index": operator.index(state["step"])})


class _Permutation:
    """Numbers 0..count-1 in a new random order every epoch, with random access."""

    def __init__(self, count, seed):
        import grain

        self.count = count
        self._order = grain.MapDataset.range(count).seed(seed).shuffle().repeat(None)

    def __call__(self, indices):
        return np.array([self._order[i] for i in indices], np.int64)


class _ShuffledWindows:
    """Adjacent windows, each once an epoch, laid out from another offset every epoch."""

    def __init__(self, stream, seq_len, seed):
        self._stream, self._seq_len, self._seed = stream, seq_len, seed
        # One window fewer than would fit, so that every offset up to seq_len is possible.
        self.count = max(1, len(stream) // seq_len - 1)
        self._offsets = min(seq_len, len(stream) - self.count * seq_len)
        self._order = _Permutation(self.count, seed)
        self._offset = functools.lru_cache(maxsize=4)(self._offset)

    def _offset(self, epoch):
        return int(np.random.default_rng([self._seed, epoch]).integers(self._offsets))

    def starts(self, indices):
        """First token of each of the windows number `indices` since the start of training."""
        offsets = np.array([self._offset(i // self.count) for i in indices], np.int64)
        return offsets + self._order(indices) * self._seq_len

    def __call__(self, step, batch_size, rows):
        starts = self.starts((step * batch_size + rows).tolist())
        return _batch(self._stream.windows(starts, self._seq_len + 1))


class _BufferedWindows:
    """Windows of a text that is still being tokenised (`growing.GrowingTokens`).

    In the first epoch they come in the order of the text, mixed within blocks of `buffer_tokens`,
    so that which one comes when depends on no later text; after that as `_ShuffledWindows`.
    """

    def __init__(self, tokens, seq_len, seed, buffer_tokens, source):
        self._tokens, self._seq_len, self._seed, self._source = tokens, seq_len, seed, source
        self._in_block = max(1, buffer_tokens // seq_len)
        self._all = None  # the _ShuffledWindows, once the whole text is there
        tokens.begin()
        self._mixed = functools.lru_cache(maxsize=4)(functools.partial(_permutation, seed))

    def _start(self, index):
        block, position = divmod(index, self._in_block)
        first, count = block * self._in_block, self._in_block
        if self._all is None:
            # A window more than the block has: the last of a text is left out, as by
            # _ShuffledWindows, and this one may be the last.
            needed = (first + count + 1) * self._seq_len
            if self._tokens.wait(needed) < needed:
                if len(self._tokens) <= self._seq_len:
                    name = f"config.data.source={self._source!r}"
                    raise _too_short(self._seq_len, "train", name, len(self._tokens))
                self._all = _ShuffledWindows(self._tokens, self._seq_len, self._seed)
        if self._all is not None:
            if index >= self._all.count:
                return self._all.starts([index])[0]
            count = min(count, self._all.count - first)
        return (first + self._mixed(block, count)[position]) * self._seq_len

    def __call__(self, step, batch_size, rows):
        starts = [self._start(i) for i in (step * batch_size + rows).tolist()]
        return _batch(self._tokens.windows(starts, self._seq_len + 1))


def _permutation(seed, block, count):
    return np.random.default_rng([seed, block]).permutation(count)


class _RandomWindows:
    """Windows that start anywhere, drawn anew for every step (as nanoGPT does)."""

    def __init__(self, stream, seq_len, seed):
        self._stream, self._seq_len, self._seed = stream, seq_len, seed

    def __call__(self, step, batch_size, rows):
        # The starts of all rows are drawn, so that a row does not depend on which others are read.
        rng = np.random.default_rng([self._seed, step])
        starts = rng.integers(len(self._stream) - self._seq_len, size=batch_size)[rows]
        return _batch(self._stream.windows(starts, self._seq_len + 1))


class _ShuffledRows:
    """Packed rows, each once an epoch."""

    def __init__(self, packing, seed):
        self._packing, self._order = packing, _Permutation(len(packing), seed)

    def __call__(self, step, batch_size, rows):
        return self._packing.rows(self._order((step * batch_size + rows).tolist()))


def _batch(tokens, weights_BT=None):
    inputs_BT = np.ascontiguousarray(tokens[:, :-1])
    targets_BT = np.ascontiguousarray(tokens[:, 1:])
    if weights_BT is None:
        weights_BT = np.ones(inputs_BT.shape, np.float32)
    return {"inputs": inputs_BT, "targets": targets_BT, "weights": weights_BT}
