"""Text that is already tokenised: folders of raw token files.

A folder written by `write_token_shards` holds

    meta.json         {"format": "efx-tokens", "version": 1, "dtype": "uint16" or "uint32",
                       "vocab_size": n, "eot": id or null,
                       "shards": [{"file": name, "split": "train" or "eval", "tokens": n}, ...]}
    tokenizer.json    the tokenizer that made them
    *.bin             token ids, little-endian, nothing else

nanoGPT's folders are read too: `train.bin` and `val.bin`, uint16, no meta.json. Shards that say
which split they belong to decide the split (config.data.split and eval_fraction are then not
used); if none is for evaluation, the tail of the training shards is held out.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from efx import atomic, reading, storage
from efx.data.disk_cache import content_key, fetched, file_digests, remember, remember_for_file
from efx.data.stream import Stream, TokenSplit
from efx.errors import UsageError

FORMAT, VERSION = "efx-tokens", 1
_DTYPES = ("uint16", "uint32")


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
        raise UsageError(f"{folder} already holds token shards; name a new folder")
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
    """The shards of a folder, memory-mapped."""

    def __init__(self, name, folder, max_bytes, root):
        is_remote = storage.is_remote(folder)
        self.name, self._root = name, root
        self._folder = fetched(name, folder, root) if is_remote else Path(folder).expanduser()
        if not self._folder.is_dir():
            raise UsageError(f"{name}: no such folder")
        shards, dtype = self._list()
        self._shards = []
        remaining = max_bytes or float("inf")
        for path, split, tokens in shards:
            size = self._size(path)
            if size % dtype.itemsize or (tokens is not None and size != tokens * dtype.itemsize):
                expected = f"{tokens * dtype.itemsize} bytes" if tokens is not None else "even"
                raise UsageError(f"{name}: {path} has {size} bytes, not {expected}: cut short?")
            # max_bytes limits what is trained on; the held-out shards stay whole.
            take = size if split == "eval" else min(size, remaining)
            remaining -= take if split == "train" else 0
            if count := int(take // dtype.itemsize):
                self._shards.append((path, split, np.memmap(path, dtype, "r")[:count]))
        if not any(split == "train" for _, split, _ in self._shards):
            raise UsageError(f"{name}: the folder holds no training tokens")

    def _size(self, path):
        try:
            reading.check_regular(path)
            return path.stat().st_size
        except OSError as error:
            raise UsageError(f"{self.name}: cannot read {path} ({error.strerror})") from error
        except ValueError as error:
            raise UsageError(f"{self.name}: cannot read {path}: {error}") from error

    def _list(self):
        """[(path, split, tokens or None)], dtype: from meta.json or the names of the files."""
        meta_path = self._folder / "meta.json"
        if not meta_path.exists():
            pairs = (("train.bin", "train"), ("val.bin", "eval"))
            shards = [
                (self._folder / file, split, None)
                for file, split in pairs
                if (self._folder / file).exists()
            ]
            if not shards:
                raise UsageError(
                    f"{self.name}: the folder has neither meta.json nor train.bin; token shards"
                    " are written by efx.data.write_token_shards"
                )
            return shards, np.dtype("<u2")
        try:
            meta = reading.read_json(meta_path)
            if meta["format"] != FORMAT or meta["version"] != VERSION:
                raise ValueError(f"format {meta['format']!r} version {meta['version']!r}")
            if meta["dtype"] not in _DTYPES:
                raise ValueError(f"dtype {meta['dtype']!r}")
            for shard in meta["shards"]:
                if not reading.is_plain_name(shard["file"]):
                    raise ValueError(f"{shard['file']!r} is no name of a file in this folder")
                if type(shard["tokens"]) is not int:
                    raise ValueError(f"{shard['tokens']!r} is no number of tokens")
                if shard["split"] not in ("train", "eval"):
                    raise ValueError("a split that is neither train nor eval")
            shards = [
                (self._folder / shard["file"], shard["split"], shard["tokens"])
                for shard in meta["shards"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.name}: {meta_path} is not an {FORMAT} version {VERSION} description"
                f" ({type(error).__name__}: {error})"
            ) from error
        return shards, np.dtype(meta["dtype"]).newbyteorder("<")

    def tokenizer_path(self):
        """Path of the folder's tokenizer.json, or None."""
        path = self._folder / "tokenizer.json"
        return path if path.exists() else None

    def identity(self):
        """Hash of the tokens and of their splits."""
        return self._identity(("train", "eval"))

    def _identity(self, splits):
        shards = [shard for shard in self._shards if shard[1] in splits]
        files = [(path, len(ids) * ids.itemsize) for path, _, ids in shards]
        digests = file_digests(self._root, files)
        return content_key(
            "tokens",
            [
                (split, len(ids), digest)
                for (_, split, ids), digest in zip(shards, digests, strict=True)
            ],
        )

    def check_ids(self, tokenizer, tokenizer_name):
        """Raises UsageError if some id is not in the vocabulary of `tokenizer`."""
        for path, _, ids in self._shards:
            largest = remember_for_file(
                self._root,
                path,
                ["largest", len(ids)],
                lambda ids=ids: max(
                    int(ids[i : i + (1 << 22)].max()) for i in range(0, len(ids), 1 << 22)
                ),
            )
            if largest >= tokenizer.vocab_size:
                raise UsageError(
                    f"{self.name}: {path.name} holds token id {largest}, but the tokenizer"
                    f" {tokenizer_name} has only {tokenizer.vocab_size} ids;"
                    " name the tokenizer.json that these tokens were made with"
                )

    def stream(self, split=""):
        """Stream of the shards of a split; of all shards without one."""
        return Stream([ids for _, shard_split, ids in self._shards if split in ("", shard_split)])

    def decide(self, kind, eval_fraction):
        """What is held out, as plain data that a run keeps (compare `held_out.decide`):
        {"shards": hash of those for evaluation}, or {"tokens": [from, to], "sum": their hash}."""
        if len(self.stream("eval")):
            return {"shards": self._identity(("eval",))}
        if kind == "documents":
            raise UsageError(
                f"config.data.split='documents' needs documents, and {self.name} holds one stream"
                " of tokens; use config.data.split=tail, or write shards with a held-out part"
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
        streams = {"train": train, "eval": heldout}
        if not decision:
            del streams["eval"]
        elif "shards" in decision:
            if self._identity(("eval",)) != decision["shards"]:
                self._refuse_changed("the shards for evaluation are others now")
        else:
            start, stop = decision["tokens"]
            if len(heldout) or len(train) < stop or self._sum(start, stop) != decision["sum"]:
                self._refuse_changed(f"its tokens {start} to {stop}, once held out, are others now")
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
            f"{self.name}: the split of before cannot be kept: {problem}. Training tokens may"
            " be added behind the old ones; put the old ones back, or use another --workdir"
        )
