"""Token shards: all tokens that efx reads are in such files.

A folder written by `prepare` or `write_token_shards` holds

    meta.json         {"format": "efx-tokens", "version": 2, "dtype": "uint16" or "uint32",
                       "vocab_size": n, "eot": id or null, "shards": [{"file": name, "split":
                       "train", "eval" or null (undecided), "tokens": n, "rows": n, "ends": whether
                       a document ends with it, "lost": description of the first text that the
                       tokenizer loses, or "", "records": two `disk_cache.file_record`s}, ...],
                       "is_cut": whether config.data.max_bytes left out text}
    tokenizer.json    the tokenizer that made them
    NAME.bin          token ids, little-endian, nothing else; the end-of-document id, if the
                      tokenizer has one, follows each document
    NAME.rows         a ROW for each document, or piece of a long one

Shards of other projects have neither rows nor meta.json: nanoGPT's folders (`train.bin` and
`val.bin`, uint16), and the shards of llm.c and modded-nanogpt (256 int32, the first three are magic
number, version and number of tokens, then the ids; `train` or `val` in the file name).
"""

import bisect
import dataclasses
import functools
import json
import os
import re
from pathlib import Path

import numpy as np

from efx import io
from efx.data.disk_cache import (
    content_key,
    file_digests,
    file_record,
    is_unchanged,
    remember_for_files,
)
from efx.data.sources import document_digest, find_files, readable
from efx.data.tokenizers import find_loss, load_tokenizer
from efx.errors import UsageError

FORMAT, VERSION = "efx-tokens", 2
_HEADER_BYTES = 256 * 4  # llm.c
# {magic number of llm.c: (version, dtype)}
_MAGIC = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_NANOGPT = {"train.bin": "train", "val.bin": "eval"}
_SPLIT_OF_WORD = {"train": "train", "val": "eval", "valid": "eval", "validation": "eval"}
ENDS, LOST, NO_TEXT = 1, 2, 8
# A document, or a piece of a long one: its tokens, and those in the file, with the end-of-document
# id; bytes and characters of its text; its `document_digest`; flags: ENDS (the document ends here),
# LOST (the tokenizer loses some of the text), NO_TEXT (only ids are known: they are counted and
# hashed in place of bytes and characters).
ROW = np.dtype(
    [("tokens", "<i8"), ("stored", "<i8"), ("bytes", "<i8"), ("characters", "<i8"),
     ("digest", "V16"), ("flags", "u1")]
)  # fmt: skip


def token_dtype(vocab_size):
    """The smaller of the two types on disk that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def text_row(data, ends=True):
    """The ROW of a text without tokens."""
    characters = count_characters(data)
    return np.array((0, 0, len(data), characters, document_digest(data), ENDS * ends), ROW)


def count_characters(data):
    """Bytes that do not continue a character, so that text which is not UTF-8 counts as well."""
    return int(np.count_nonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80))


# ---- writing -------------------------------------------------------------------------------------


class ShardWriter:
    """Collects documents and writes them as shards of a folder.

    Attributes:
      rows, tokens: list of ROW and number of tokens that are collected and not written yet.
    """

    def __init__(self, folder, tokenizer, begins=True):
        self._folder, self._tokenizer = folder, tokenizer
        # Whether the next piece begins a document.
        self._dtype, self._begins = token_dtype(tokenizer.vocab_size), begins
        self.rows, self._ids, self.tokens, self._lost = [], [], 0, ""

    def add(self, ids, row, name="", data=None):
        """Add a document, or a piece of one: its encoding, without the tokenizer's `start`, and its
        ROW. Its name and bytes are to find text that the tokenizer loses."""
        ids = np.asarray(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            vocab_size = self._tokenizer.vocab_size
            raise UsageError(f"{self._folder}: a token id is outside 0..{vocab_size - 1}")
        loss = "" if data is None else find_loss(self._tokenizer, name, data, ids)
        if loss:
            self._lost = self._lost or loss
            row["flags"] |= LOST
        if self._begins and len(ids) and self._tokenizer.start:
            ids = np.concatenate([self._tokenizer.start, ids])
        self._begins = bool(row["flags"] & ENDS)
        row["tokens"] = len(ids)
        if self._begins and len(ids) and self._tokenizer.eot is not None:
            ids = np.append(ids, self._tokenizer.eot)
        row["stored"] = len(ids)
        self._ids.append(ids.astype(self._dtype))
        self.rows.append(row)
        self.tokens += len(ids)

    def write(self, stem, split=None):
        """Write what was collected; return its entry of meta.json."""
        path = self._folder / f"{stem}.bin"
        for target, arrays in ((path.with_suffix(".rows"), self.rows), (path, self._ids)):
            with io.replacing(target) as temporary:
                np.hstack(arrays).tofile(temporary)
        entry = {"file": path.name, "split": split, "tokens": self.tokens}
        entry |= {"rows": len(self.rows), "ends": self._begins, "lost": self._lost}
        entry["records"] = [file_record(path), file_record(path.with_suffix(".rows"))]
        self.rows, self._ids, self.tokens, self._lost = [], [], 0, ""
        return entry


def is_intact(folder, entry):
    """Whether the files of an entry of meta.json are those that were written."""
    path = folder / entry["file"]
    pairs = zip((path, path.with_suffix(".rows")), entry["records"], strict=True)
    return all(is_unchanged(file, record) for file, record in pairs)


def write_meta(folder, tokenizer, shards, is_cut=False):
    """Write tokenizer.json, then meta.json: an unfinished folder has none. Return the latter."""
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "shards": shards,
        "is_cut": is_cut,
    }
    tokenizer.save(folder / "tokenizer.json")
    io.write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    return meta


def write_token_shards(folder, tokenizer, train, heldout=(), shard_tokens=1 << 28):
    """Write documents as token shards that `config.data.source=tokens:FOLDER` reads.

    Args:
      folder: must not contain a meta.json.
      train, heldout: iterables of documents: str, bytes, or arrays of ids.
      shard_tokens: a document that starts after this many tokens starts a new file.

    Returns:
      The contents of meta.json.
    """
    folder, shards = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "meta.json").exists():
        raise UsageError(f"{folder} already has token shards; use a new folder")
    writer = ShardWriter(folder, tokenizer)
    for split, documents in (("train", train), ("eval", heldout)):
        first = len(shards)
        for number, document in enumerate(documents):
            if writer.tokens >= shard_tokens:
                shards.append(writer.write(f"{split}-{len(shards) - first:05d}", split))
            if isinstance(document, str | bytes):
                ids = tokenizer.encode(document)
                data = document if isinstance(document, bytes) else document.encode()
                writer.add(ids, text_row(data), f"document {number}", data)
            else:
                ids = np.asarray(document, np.int64)
                digest = document_digest(ids.tobytes())
                flags = ENDS | NO_TEXT
                writer.add(ids, np.array((0, 0, len(ids), len(ids), digest, flags), ROW))
        if writer.tokens:
            shards.append(writer.write(f"{split}-{len(shards) - first:05d}", split))
    return write_meta(folder, tokenizer, shards)


# ---- reading -------------------------------------------------------------------------------------


class Stream:
    """Token ids in one or more arrays (memory-mapped, as a rule), read as if they were one."""

    def __init__(self, arrays):
        # As plain arrays: slicing a np.memmap makes another np.memmap, which is much slower.
        self.arrays = [np.asarray(array) for array in arrays if len(array)]
        self.ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64).tolist()

    def __len__(self):
        return self.ends[-1] if self.ends else 0

    def cut(self, start, stop):
        """List of arrays with the tokens start..stop-1; shares the memory."""
        arrays, index = [], bisect.bisect_right(self.ends, start)
        while start < stop:
            array, end = self.arrays[index], self.ends[index]
            arrays.append(array[len(array) - (end - start) :][: stop - start])
            start, index = end, index + 1
        return arrays

    def windows(self, starts, length):
        """int32[len(starts), length]: the tokens from each start on, all inside the stream."""
        rows = np.empty((len(starts), length), np.int32)
        for row, start in zip(rows, starts, strict=True):
            position = 0
            for array in self.cut(int(start), int(start) + length):
                row[position : position + len(array)] = array
                position += len(array)
        return rows

    def framed(self, start, stop, fill):
        """int32[stop - start]: tokens start..stop-1, `fill` before the first and after the last."""
        row = np.full(stop - start, fill, np.int32)
        first, last = max(start, 0), min(stop, len(self))
        row[first - start : last - start] = self.windows([first], last - first)[0]
        return row


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """A split of a text as tokens."""

    name: str  # of its source, for messages
    stream: Stream
    # int64[n, 2], first and last-plus-one token of each document, or piece of one; bool[n], whether
    # a document begins with it. None if unknown.
    spans: object = None
    begins: object = None
    # "" if decoding the tokens gives the text back, else a description of the first lost text; None
    # if there is no text to compare.
    loss: str | None = None

    def documents(self, eot):
        """int64[n, 2]: spans of the documents. If they are unknown, documents end at the token
        `eot`, or without one (None) where an array of the stream ends."""
        if self.spans is not None:
            first = np.flatnonzero(self.begins)
            last = np.append(first[1:], len(self.spans)) - 1
            return np.stack([self.spans[first, 0], self.spans[last, 1]], 1)
        begins = np.array([0, *self.stream.ends])
        if eot is None:
            return np.stack([begins[:-1], begins[1:]], 1)
        arrays = zip(self.stream.arrays, begins, strict=False)
        ends = [np.flatnonzero(array == eot) + begin for array, begin in arrays]
        edges = np.concatenate([[-1], *ends, [len(self.stream)]])
        spans = np.stack([edges[:-1] + 1, edges[1:]], 1)
        return spans[spans[:, 0] < spans[:, 1]]


def joined(splits, eot):
    """One TokenSplit of several; eot: the end-of-document id between them, or None."""
    if len(splits) == 1:
        return splits[0]
    arrays, spans, length = [], [], 0
    for split in splits:
        if arrays and eot is not None:
            arrays.append(np.array([eot], np.int32))
            length += 1
        arrays += split.stream.arrays
        spans.append(None if split.spans is None else split.spans + length)
        length += len(split.stream)
    name, losses = ", ".join(split.name for split in splits), [split.loss for split in splits]
    loss = None if None in losses else next(filter(None, losses), "")
    if any(each is None for each in spans):
        return TokenSplit(name, Stream(arrays), loss=loss)
    begins = np.concatenate([split.begins for split in splits])
    return TokenSplit(name, Stream(arrays), np.concatenate(spans), begins, loss)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file with `count` token ids after `offset` bytes."""

    path: Path
    split: str | None
    dtype: np.dtype
    count: int
    offset: int = 0

    @functools.cached_property
    def ids(self):
        return np.memmap(self.path, self.dtype, "r", self.offset, self.count)


class TokenShards:
    """The shards of a folder, or those that match a pattern, memory-mapped.

    Attributes:
      rows: ROW[n] of all documents, in order; of shards of other projects, each is one row.
      tokenizer: the one that made them, None if it is unknown; it is in `tokenizer_path`.
      is_cut: whether config.data.max_bytes left out text when they were made.
    """

    def __init__(self, name, where, root):
        self.name, self._root = name, root
        path = Path(os.path.expanduser(where))
        is_folder = path.is_dir() or io.is_remote(where)
        if path.is_dir():
            paths = sorted(path.glob("*.bin"))
            self.folder = path
        else:
            paths = [Path(file) for file in find_files(name, where, root)]
            self.folder = paths[0].parent
            paths = [file for file in paths if not is_folder or file.suffix == ".bin"]
        self._meta = self._read_meta() if is_folder else None
        shards = self._listed_shards() if self._meta else self._found_shards(paths, is_folder)
        for shard in shards:
            with readable(name):
                size = os.path.getsize(shard.path)
            if size != shard.offset + shard.count * shard.dtype.itemsize:
                raise UsageError(
                    f"{name}: {shard.path} has {size} bytes, not those of {shard.count} tokens: it "
                    "may be truncated"
                )
        # A copy of a shard, or a link to one, is left out.
        shards = [shard for shard in shards if shard.count]
        distinct, digests = {}, file_digests(root, [shard.path for shard in shards])
        for shard, digest in zip(shards, digests, strict=True):
            distinct.setdefault((shard.split, digest), shard)
        self._shards, self._digests = list(distinct.values()), [key[1] for key in distinct]
        if not self._shards:
            raise UsageError(f"{name}: the shards have no tokens")
        self.stream = Stream([shard.ids for shard in self._shards])
        self.rows = self._read_rows() if self._meta else self._rows_of_shards()
        self.is_cut = bool(self._meta and self._meta.get("is_cut"))
        self.tokenizer_path, self.tokenizer = self.folder / "tokenizer.json", None
        if self.tokenizer_path.exists():
            self.tokenizer = load_tokenizer(self.tokenizer_path)

    def _read_meta(self):
        """The contents of meta.json, None without one."""
        path = self.folder / "meta.json"
        if not path.exists():
            return None
        try:
            meta = io.parse_json(path.read_text())  # not limited in size
            np.dtype(meta["dtype"])
            if (meta["format"], meta["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {meta['format']!r} version {meta['version']!r}")
            for shard in meta["shards"]:
                if not io.stays_below(shard["file"]):
                    raise ValueError(f"{shard['file']!r} is not the name of a file in this folder")
                if shard["split"] not in ("train", "eval", None) or int(shard["tokens"]) < 0:
                    raise ValueError(f"shard {shard}")
            return meta
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.name}: {path} is not an {FORMAT} version {VERSION} description"
                f" ({type(error).__name__}: {error})"
            ) from error

    def _listed_shards(self):
        dtype = np.dtype(self._meta["dtype"]).newbyteorder("<")
        return [
            _Shard(self.folder / shard["file"], shard["split"], dtype, int(shard["tokens"]))
            for shard in self._meta["shards"]
        ]

    def _found_shards(self, paths, is_folder):
        """The shards of other projects."""
        if not paths:
            raise UsageError(
                f"{self.name}: the folder has neither meta.json nor a shard (*.bin); write "
                "token shards with efx.data.write_token_shards, nanoGPT (train.bin, val.bin) "
                "or llm.c"
            )
        headers = {path: self._read_header(path) for path in paths}
        nanogpt = [path for path in paths if path.name in _NANOGPT]
        if is_folder and nanogpt and not any(magic in _MAGIC for magic, *_ in headers.values()):
            dtype = np.dtype("<u2")
            return [
                _Shard(path, _NANOGPT[path.name], dtype, path.stat().st_size // dtype.itemsize)
                for path in nanogpt
            ]
        return [self._llm_c_shard(path, *header) for path, header in headers.items()]

    def _read_header(self, path):
        """Magic number, version and number of tokens of an llm.c shard; zeros past its end."""
        with readable(self.name):
            return [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]

    def _llm_c_shard(self, path, magic, version, count):
        known_version, dtype = _MAGIC.get(magic, (None, None))
        if version != known_version:
            raise UsageError(
                f"{self.name}: {path} has magic number {magic} and version {version}, not "
                "llm.c's; name shards without a header train.bin and val.bin, or list them "
                "in meta.json"
            )
        words = re.split(r"[^a-z]+", path.stem.lower())
        splits = {_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD}
        if len(splits) != 1:
            raise UsageError(
                f"{self.name}: the file name {path} must contain either train or val, as "
                "in fineweb_train_000001.bin"
            )
        return _Shard(path, splits.pop(), dtype, count, _HEADER_BYTES)

    def _read_rows(self):
        """The rows of all shards."""
        parts = []
        for shard in self._shards:
            with readable(self.name):
                rows = np.fromfile(shard.path.with_suffix(".rows"), ROW)
            if rows["stored"].sum() != shard.count:
                raise UsageError(f"{self.name}: {shard.path} has other tokens than its .rows")
            parts.append(rows)
        return np.concatenate(parts)

    def _rows_of_shards(self):
        rows = np.zeros(len(self._shards), ROW)
        for key in ("tokens", "stored", "bytes", "characters"):
            rows[key] = [shard.count for shard in self._shards]
        rows["digest"] = np.frombuffer(bytes.fromhex("".join(self._digests)), "V16")
        rows["flags"] = ENDS | NO_TEXT
        return rows

    # ---- content ---------------------------------------------------------------------------------

    @property
    def identity(self):
        """Hash of the tokens and of their splits."""
        shards = [(shard.split, shard.count) for shard in self._shards]
        return content_key("tokens", self._digests, shards)

    @property
    def has_text(self):
        """Whether the text of all tokens is known."""
        return not np.any(self.rows["flags"] & NO_TEXT)

    def is_evaluation(self):
        """bool[n]: whether a row is in a shard for evaluation."""
        ends = np.cumsum([shard.count for shard in self._shards])
        number = np.searchsorted(ends, self._first, side="right").clip(max=len(ends) - 1)
        return np.array([shard.split == "eval" for shard in self._shards])[number]

    @functools.cached_property
    def _first(self):
        """int64[n]: the first token of each row."""
        return np.cumsum(self.rows["stored"]) - self.rows["stored"]

    def ids(self, row, count=None):
        """int32[n]: the first `count` ids of a row; None: all, with its end-of-document id."""
        count = int(self.rows["stored"][row]) if count is None else count
        return self.stream.windows([self._first[row]], count)[0]

    def count_in_ids(self):
        """Let "bytes" and "characters" of rows be the numbers of their ids."""
        for key in ("bytes", "characters"):
            self.rows[key] = self.rows["stored"]

    def cut_at(self, offsets):
        """Cut rows in two at some positions in all ids, after `count_in_ids`."""
        for offset in sorted(offsets):
            ends = np.cumsum(self.rows["stored"])
            row = int(np.searchsorted(ends, offset))
            if row == len(ends) or ends[row] == offset:
                continue
            ids, after = self.ids(row), int(ends[row]) - offset
            pair = np.repeat(self.rows[row], 2)
            for half, part in zip(pair, (ids[:-after], ids[-after:]), strict=True):
                for key in ("stored", "bytes", "characters", "tokens"):
                    half[key] = len(part)
                half["digest"] = np.void(document_digest(part))
                half["flags"] |= ENDS | NO_TEXT
            pair["tokens"][1] -= self.rows["stored"][row] - self.rows["tokens"][row]
            self.rows = np.concatenate([self.rows[:row], pair, self.rows[row + 1 :]])
            del self._first  # computed anew

    def check_ids(self, tokenizer, tokenizer_name):
        """Raise UsageError for an id outside of the vocabulary of `tokenizer`."""
        largest_ids = remember_for_files(
            self._root,
            [shard.path for shard in self._shards],
            ["largest", [shard.count for shard in self._shards]],
            lambda: [int(shard.ids.max()) for shard in self._shards],
        )
        for shard, largest in zip(self._shards, largest_ids, strict=True):
            if largest >= tokenizer.vocab_size:
                gpt2 = " (GPT-2's is config.data.tokenizer=hf:gpt2)" if shard.offset else ""
                raise UsageError(
                    f"{self.name}: {shard.path.name} has token id {largest}, but the tokenizer "
                    f"{tokenizer_name} has only {tokenizer.vocab_size} ids; use the "
                    f"tokenizer.json of these tokens{gpt2}"
                )

    # ---- splits ----------------------------------------------------------------------------------

    def select(self, is_selected):
        """The TokenSplit of some rows, without the end-of-document id after the last one."""
        rows = self.rows
        chosen = np.flatnonzero(is_selected & (rows["tokens"] > 0))
        if not len(chosen):
            return TokenSplit(self.name, Stream([]))
        first, breaks = self._first, np.flatnonzero(np.diff(chosen) != 1) + 1
        arrays = []
        for run in np.split(chosen, breaks):
            last = rows[run[-1]]
            length = last["tokens"] if run[-1] == chosen[-1] else last["stored"]
            arrays += self.stream.cut(int(first[run[0]]), int(first[run[-1]] + length))
        if not self._meta:
            return TokenSplit(self.name, Stream(arrays))
        selected = rows[chosen]
        begins = np.cumsum(selected["stored"]) - selected["stored"]
        spans = np.stack([begins, begins + selected["tokens"]], 1)
        flags = np.bitwise_or.reduce(selected["flags"])
        lost = next(filter(None, (shard.get("lost") for shard in self._meta["shards"])), "")
        loss = None if flags & NO_TEXT else lost if flags & LOST else ""
        is_first = np.append(True, selected["flags"][:-1] & ENDS > 0)
        return TokenSplit(self.name, Stream(arrays), spans, is_first, loss)
