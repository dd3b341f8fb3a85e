"""Text that is already tokenised: folders of raw token files.

A folder written by `write_token_shards` holds

    meta.json         {"format": "efx-tokens", "version": 1, "dtype": "uint16" or "uint32",
                       "vocab_size": n, "eot": id or null,
                       "shards": [{"file": name, "split": "train" or "eval", "tokens": n}, ...]}
    tokenizer.json    the tokenizer that made them
    *.bin             token ids, little-endian, nothing else

nanoGPT's folders are read too: `train.bin` and `val.bin`, uint16, no meta.json. So are the shards
of llm.c and modded-nanogpt, by a folder or a pattern: each file begins with 256 int32 (magic,
version, number of tokens), and its name says `train` or `val`.

Shards that say which split they belong to decide the split (config.data.split and eval_fraction
are then not used); if none is for evaluation, the tail of the training shards is held out.
"""

import dataclasses
import glob
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

from efx import atomic, reading, storage
from efx.data.disk_cache import content_key, fetched, file_digests, remember, remember_for_file
from efx.data.sources import matching
from efx.data.stream import Stream, TokenSplit
from efx.errors import UsageError

FORMAT, VERSION = "efx-tokens", 1
_DTYPES = ("uint16", "uint32")
_HEADER = np.dtype(("<i4", 256))  # of llm.c
# By the magic number of the header: version, type of a token.
_MAGIC = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_SPLIT_OF_WORD = {"train": "train", "val": "eval", "valid": "eval", "validation": "eval"}


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file of tokens: `count` of them, or with None all that it holds, after `offset` bytes."""

    path: Path
    split: str
    dtype: np.dtype
    count: int | None = None
    offset: int = 0

    @property
    def size(self):
        return self.offset + self.count * self.dtype.itemsize

    @property
    def ids(self):
        return np.memmap(self.path, self.dtype, "r", self.offset, self.count)


def token_dtype(vocab_size):
    """The smallest of the two types on disk that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_token_shards(folder, tokenizer, train, heldout=(), shard_tokens=1 << 28):
    """Writes documents as token shards that `config.data.source=tokens:FOLDER` reads.

    Args:
      folder: made if it does not exist; must hold no meta.json yet.
      tokenizer: an efx tokenizer; each document ends with its end-of-document id if it has one.
      train, heldout: iterables of documents: str, bytes, or arrays of ids.
      shard_tokens: a new file is begun after so many tokens.

    Returns:
      The contents of meta.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "meta.json").exists():
        raise UsageError(f"{folder} already has token shards; use a new folder")
    dtype, shards = token_dtype(tokenizer.vocab_size), []
    for split, documents in (("train", train), ("eval", heldout)):
        file, room, count = None, 0, 0
        for document in documents:
            ids = document
            if isinstance(document, str | bytes):
                ids = [*tokenizer.start, *tokenizer.encode(document)]
            end = [] if tokenizer.eot is None else [tokenizer.eot]
            ids = np.concatenate([np.asarray(ids, np.int64), np.asarray(end, np.int64)])
            if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                raise UsageError(f"{folder}: a token id is outside 0..{tokenizer.vocab_size - 1}")
            if file is None or room <= 0:
                if file:
                    file.close()
                name = f"{split}-{count:05d}.bin"
                file, room, count = open(folder / name, "wb"), shard_tokens, count + 1
                shards.append({"file": name, "split": split, "tokens": 0})
            file.write(ids.astype(dtype).tobytes())
            room -= len(ids)
            shards[-1]["tokens"] += len(ids)
        if file:
            file.close()
    tokenizer.save(folder / "tokenizer.json")
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "shards": shards,
    }
    # Written last: a folder without it is not mistaken for a finished one.
    atomic.write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    return meta


class TokenShards:
    """The shards of a folder, or those that a pattern names, memory-mapped."""

    def __init__(self, name, where, max_bytes, root):
        self.name, self._root = name, root
        # Who names the shards by a pattern may leave some out.
        self._may_lack, pattern = glob.has_magic(where), None
        self._folder = Path(os.path.expanduser(where))
        if storage.is_remote(where):
            self._folder = fetched(name, where, root)
        elif not self._folder.is_dir():
            pattern = str(self._folder)
            self._folder = self._folder.parent
        self._shards = []
        remaining = max_bytes or sys.maxsize
        for shard in self._list(pattern):
            shard = self._measured(shard)
            # max_bytes limits what is trained on; the held-out shards stay whole.
            if shard.split == "train":
                count = min(shard.count, remaining // shard.dtype.itemsize)
                remaining -= count * shard.dtype.itemsize
                shard = dataclasses.replace(shard, count=count)
            if shard.count:
                self._shards.append(shard)
        if not self._shards:
            raise UsageError(f"{name}: the shards have no tokens")

    def _measured(self, shard):
        """`shard` with its count, which fits the size of its file."""
        size, itemsize = self._size(shard.path), shard.dtype.itemsize
        count = (size - shard.offset) // itemsize if shard.count is None else shard.count
        measured = dataclasses.replace(shard, count=count)
        if measured.size != size:
            expected = "even" if shard.count is None else f"{measured.size} bytes"
            of_header = " by its header" if shard.offset else ""
            raise UsageError(
                f"{self.name}: {shard.path} has {size} bytes, expected {expected}{of_header}: "
                "it may be truncated"
            )
        return measured

    def _size(self, path):
        try:
            reading.check_regular(path)
            return path.stat().st_size
        except OSError as error:
            raise UsageError(f"{self.name}: cannot read {path} ({error.strerror})") from error
        except ValueError as error:
            raise UsageError(f"{self.name}: cannot read {path}: {error}") from error

    def _list(self, pattern):
        """The shards that meta.json lists, or the files themselves."""
        if pattern is not None:
            return self._files(matching(self.name, pattern))
        if (self._folder / "meta.json").exists():
            return self._of_meta()
        paths = sorted(self._folder.glob("*.bin"))
        headed = [path for path in paths if self._header(path)[0] in _MAGIC]
        nanogpt = {"train.bin": "train", "val.bin": "eval"}
        if not headed and any(path.name in nanogpt for path in paths):
            plain = [path for path in paths if path.name in nanogpt]
            return [_Shard(path, nanogpt[path.name], np.dtype("<u2")) for path in plain]
        if not paths:
            raise UsageError(
                f"{self.name}: the folder has neither meta.json nor a shard (*.bin); write "
                "token shards with efx.data.write_token_shards, nanoGPT (train.bin, val.bin) "
                "or llm.c"
            )
        if not self._may_lack:
            self._refuse_gaps(paths)
        return self._files(paths)

    def _refuse_gaps(self, paths):
        """UsageError if a number is left out where the files of a folder are numbered."""
        numbers = {}
        for path in paths:
            if match := re.fullmatch(r"(.*\D)(\d+)", path.stem):
                numbers.setdefault(match[1], {})[int(match[2])] = len(match[2])
        for prefix, found in numbers.items():
            missing = [i for i in range(min(found), max(found)) if i not in found]
            if missing:
                file = f"{prefix}{missing[0]:0{found[min(found)]}d}.bin"
                more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
                raise UsageError(
                    f"{self.name}: {file}{more} missing between {prefix}{min(found)} and "
                    f"{max(found)}; to skip missing shards, select shards with a pattern"
                )

    def _header(self, path):
        """The 256 numbers that a file of llm.c begins with; zeros for a shorter file."""
        try:
            with open(path, "rb") as file:
                data = file.read(_HEADER.itemsize)
        except OSError as error:
            raise UsageError(f"{self.name}: cannot read {path} ({error.strerror})") from error
        return np.frombuffer(data.ljust(_HEADER.itemsize, b"\0"), "<i4").tolist()

    def _files(self, paths):
        """llm.c's shards; each has to be one."""
        shards = []
        for path in map(Path, paths):
            magic, version, count = self._header(path)[:3]
            known, dtype = _MAGIC.get(magic, (None, None))
            if known is None:
                raise UsageError(
                    f"{self.name}: {path} starts with {magic}, not with llm.c's magic number "
                    f"{' or '.join(map(str, _MAGIC))}; name shards without a header train.bin "
                    "and val.bin, or list them in meta.json"
                )
            if version != known or count < 0:
                raise UsageError(
                    f"{self.name}: the header of {path} has version {version} and {count} "
                    f"tokens; efx reads version {known}"
                )
            words = re.split(r"[^a-z]+", path.stem.lower())
            splits = {_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD}
            if len(splits) != 1:
                raise UsageError(
                    f"{self.name}: the file name {path} must contain either train or val, as "
                    "in fineweb_train_000001.bin"
                )
            shards.append(_Shard(path, splits.pop(), dtype, count, _HEADER.itemsize))
        return shards

    def _of_meta(self):
        meta_path = self._folder / "meta.json"
        try:
            meta = reading.read_json(meta_path)
            if meta["format"] != FORMAT or meta["version"] != VERSION:
                raise ValueError(f"format {meta['format']!r} version {meta['version']!r}")
            if meta["dtype"] not in _DTYPES:
                raise ValueError(f"dtype {meta['dtype']!r}")
            dtype = np.dtype(meta["dtype"]).newbyteorder("<")
            for shard in meta["shards"]:
                if not reading.is_plain_name(shard["file"]):
                    raise ValueError(f"{shard['file']!r} is not the name of a file in this folder")
                if type(shard["tokens"]) is not int or shard["tokens"] < 0:
                    raise ValueError(f"{shard['tokens']!r} is not a number of tokens")
                if shard["split"] not in ("train", "eval"):
                    raise ValueError("a split that is neither train nor eval")
            shards = [
                _Shard(self._folder / shard["file"], shard["split"], dtype, shard["tokens"])
                for shard in meta["shards"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.name}: {meta_path} is not an {FORMAT} version {VERSION} description"
                f" ({type(error).__name__}: {error})"
            ) from error
        return shards

    def tokenizer_path(self):
        """Path of the folder's tokenizer.json, or None."""
        path = self._folder / "tokenizer.json"
        return path if path.exists() else None

    def identity(self):
        """Hash of the tokens and of their splits."""
        return self._identity(("train", "eval"))

    def _identity(self, splits):
        shards = [shard for shard in self._shards if shard.split in splits]
        digests = file_digests(self._root, [(shard.path, shard.size) for shard in shards])
        return content_key(
            "tokens",
            [
                (shard.split, shard.count, digest)
                for shard, digest in zip(shards, digests, strict=True)
            ],
        )

    def trained_on_in(self, source):
        """The name of a shard that is also one of the training shards of `source`, other
        TokenShards, or None. Whole files are compared, even if not all of one is used."""
        training = [shard for shard in source._shards if shard.split == "train"]
        digests = set(source._digests_of_files(training))
        for shard, digest in zip(self._shards, self._digests_of_files(self._shards), strict=True):
            if digest in digests:
                return shard.path.name
        return None

    def _digests_of_files(self, shards):
        return file_digests(self._root, [(shard.path, self._size(shard.path)) for shard in shards])

    def check_ids(self, tokenizer, tokenizer_name):
        """Raises UsageError if some id is not in the vocabulary of `tokenizer`."""
        for shard in self._shards:
            ids = shard.ids
            largest = remember_for_file(
                self._root,
                shard.path,
                ["largest", shard.count],
                lambda ids=ids: max(
                    int(ids[i : i + (1 << 22)].max()) for i in range(0, len(ids), 1 << 22)
                ),
            )
            if largest >= tokenizer.vocab_size:
                usual = ""
                if shard.offset:
                    usual = " (usually GPT-2's: its path, or config.data.tokenizer=hf:gpt2)"
                raise UsageError(
                    f"{self.name}: {shard.path.name} has token id {largest}, but the tokenizer "
                    f"{tokenizer_name} has only {tokenizer.vocab_size} ids; use the "
                    f"tokenizer.json of these tokens{usual}"
                )

    def stream(self, split=""):
        """Stream of the shards of a split; of all shards without one."""
        return Stream([shard.ids for shard in self._shards if split in ("", shard.split)])

    def decide(self, kind, eval_fraction):
        """What is held out, as plain data that a run keeps (compare `held_out.decide`):
        {"shards": hash of those for evaluation}, or {"tokens": [from, to], "sum": their hash}."""
        if len(self.stream("eval")):
            return {"shards": self._identity(("eval",))}
        if kind == "documents":
            raise UsageError(
                f"config.data.split='documents': {self.name} is one stream of tokens without "
                "documents; use config.data.split=tail, or write shards with a held-out split"
            )
        count = len(self.stream("train"))
        cut = int((1 - eval_fraction) * count)
        return {"tokens": [cut, count], "sum": self._sum(cut, count)}

    def all_shards(self):
        """The `TokenSplit` of all shards."""
        return TokenSplit(self.name, self.stream())

    def splits(self, decision):
        """{"train" or "eval": TokenSplit} by a decision, which has to fit these tokens; without one
        the training shards alone."""
        train, heldout = self.stream("train"), self.stream("eval")
        if not len(train):
            raise UsageError(f"{self.name}: no shard has training tokens")
        streams = {"train": train, "eval": heldout}
        if not decision:
            del streams["eval"]
        elif "shards" in decision:
            if self._identity(("eval",)) != decision["shards"]:
                self._refuse_changed("the evaluation shards have changed")
        else:
            start, stop = decision["tokens"]
            if len(heldout) or len(train) < stop or self._sum(start, stop) != decision["sum"]:
                self._refuse_changed(f"its held-out tokens {start} to {stop} have changed")
            ends = [*train.cut(0, start).arrays(), *train.cut(stop, len(train)).arrays()]
            streams = {"train": Stream(ends), "eval": train.cut(start, stop)}
        return {split: TokenSplit(self.name, stream) for split, stream in streams.items()}

    def _sum(self, start, stop):
        def compute():
            digest = hashlib.blake2b(digest_size=16)
            for array in self.stream("train").cut(start, stop).arrays():
                digest.update(np.ascontiguousarray(array).data.cast("B"))
            return digest.hexdigest()

        return remember(self._root, content_key("sum", self.identity(), start, stop), compute)

    def _refuse_changed(self, problem):
        raise UsageError(
            f"{self.name}: the earlier split cannot be kept: {problem}. Only append training "
            "tokens to the old ones; restore the old tokens, or use another --workdir"
        )
