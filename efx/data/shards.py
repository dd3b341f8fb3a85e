"""Token shards: text that is already tokenised.

A folder written by `write_token_shards` holds

    meta.json         {"format": "efx-tokens", "version": 1, "dtype": "uint16" or "uint32",
                       "vocab_size": n, "eot": id or null,
                       "shards": [{"file": name, "split": "train" or "eval", "tokens": n}, ...]}
    tokenizer.json    the tokenizer that made them
    *.bin             token ids, little-endian, nothing else

Two other formats are read: nanoGPT's folders (`train.bin` and `val.bin`, uint16, no meta.json), and
the shards of llm.c and modded-nanogpt (256 int32, the first three are magic number, version and
number of tokens, then the ids; `train` or `val` in the file name).

The shards decide the split (config.data.split and eval_fraction are not used), unless none is for
evaluation: then the tail of the training shards is held out.
"""

import dataclasses
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

from efx import io
from efx.data.disk_cache import content_key, file_digests, remember, remember_for_files
from efx.data.sources import find_files, readable
from efx.data.stream import Stream, TokenSplit
from efx.errors import UsageError

FORMAT, VERSION = "efx-tokens", 1
_HEADER_BYTES = 256 * 4  # llm.c
# {magic number of llm.c: (version, dtype)}
_MAGIC = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_NANOGPT = {"train.bin": "train", "val.bin": "eval"}
_SPLIT_OF_WORD = {"train": "train", "val": "eval", "valid": "eval", "validation": "eval"}


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file with `count` token ids after `offset` bytes."""

    path: Path
    split: str
    dtype: np.dtype
    count: int
    offset: int = 0

    @property
    def ids(self):
        return np.memmap(self.path, self.dtype, "r", self.offset, self.count)


def token_dtype(vocab_size):
    """The smaller of the two types on disk that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_token_shards(folder, tokenizer, train, heldout=(), shard_tokens=1 << 28):
    """Write documents as token shards that `config.data.source=tokens:FOLDER` reads.

    Args:
      folder: created if it does not exist; must not contain a meta.json.
      tokenizer: an efx tokenizer; its end-of-document id, if any, follows each document.
      train, heldout: iterables of documents: str, bytes, or arrays of ids.
      shard_tokens: a document that starts after this many tokens starts a new file.

    Returns:
      The contents of meta.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "meta.json").exists():
        raise UsageError(f"{folder} already has token shards; use a new folder")
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "shards": [
            *_write_split(folder, tokenizer, "train", train, shard_tokens),
            *_write_split(folder, tokenizer, "eval", heldout, shard_tokens),
        ],
    }
    tokenizer.save(folder / "tokenizer.json")
    # Last, so that an unfinished folder has none, also after a crash.
    io.flush(folder)
    io.write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    return meta


def _write_split(folder, tokenizer, split, documents, shard_tokens):
    """Write the files of a split; return their entries of meta.json."""
    shards = []
    end = [] if tokenizer.eot is None else [tokenizer.eot]
    for document in documents:
        if isinstance(document, str | bytes):
            document = [*tokenizer.start, *tokenizer.encode(document)]
        ids = np.concatenate([np.asarray(document, np.int64), np.array(end, np.int64)])
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise UsageError(f"{folder}: a token id is outside 0..{tokenizer.vocab_size - 1}")
        if not shards or shards[-1]["tokens"] >= shard_tokens:
            shards.append({"file": f"{split}-{len(shards):05d}.bin", "split": split, "tokens": 0})
            (folder / shards[-1]["file"]).write_bytes(b"")
        with open(folder / shards[-1]["file"], "ab") as file:
            file.write(ids.astype(token_dtype(tokenizer.vocab_size)).tobytes())
        shards[-1]["tokens"] += len(ids)
    return shards


class TokenShards:
    """The shards of a folder, or those that match a pattern, memory-mapped.

    Args:
      name: the setting and its value, for messages.
      where: folder or pattern, on a disk or in an object store.
      max_bytes: limit of the training shards, 0 for none; held-out shards stay whole.
      root: cache folder.
    """

    def __init__(self, name, where, max_bytes, root):
        self.name, self._root = name, root
        path = Path(os.path.expanduser(where))
        is_folder = path.is_dir() or io.is_remote(where)
        if path.is_dir():
            paths = sorted(path.glob("*.bin"))
            self._folder = path
        else:
            paths = [Path(file) for file in find_files(name, where, root)]
            self._folder = paths[0].parent
            paths = [file for file in paths if not is_folder or file.suffix == ".bin"]
        shards = []
        remaining = max_bytes or sys.maxsize
        for shard in self._read_headers(paths, is_folder):
            with readable(name):
                size = os.path.getsize(shard.path)
            if size != shard.offset + shard.count * shard.dtype.itemsize:
                raise UsageError(
                    f"{name}: {shard.path} has {size} bytes, not those of {shard.count} tokens: it "
                    "may be truncated"
                )
            if shard.split == "train":
                count = min(shard.count, remaining // shard.dtype.itemsize)
                remaining -= count * shard.dtype.itemsize
                shard = dataclasses.replace(shard, count=count)
            if shard.count:
                shards.append(shard)
        if not shards:
            raise UsageError(f"{name}: the shards have no tokens")
        # A copy of a shard, or a link to one, is left out.
        distinct, digests = {}, file_digests(root, [shard.path for shard in shards])
        for shard, digest in zip(shards, digests, strict=True):
            distinct.setdefault((shard.split, digest), shard)
        self._shards = list(distinct.values())

    def _read_headers(self, paths, is_folder):
        """The `_Shard`s of all files."""
        if is_folder and (self._folder / "meta.json").exists():
            return self._listed_shards()
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

    def _listed_shards(self):
        """The shards that meta.json lists."""
        path = self._folder / "meta.json"
        try:
            meta = io.read_json(path)
            dtype = np.dtype(meta["dtype"]).newbyteorder("<")
            if (meta["format"], meta["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {meta['format']!r} version {meta['version']!r}")
            for shard in meta["shards"]:
                if not io.stays_below(shard["file"]):
                    raise ValueError(f"{shard['file']!r} is not the name of a file in this folder")
                if shard["split"] not in ("train", "eval") or int(shard["tokens"]) < 0:
                    raise ValueError(f"shard {shard}")
            return [
                _Shard(self._folder / shard["file"], shard["split"], dtype, int(shard["tokens"]))
                for shard in meta["shards"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.name}: {path} is not an {FORMAT} version {VERSION} description"
                f" ({type(error).__name__}: {error})"
            ) from error

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

    def tokenizer_path(self):
        """Path of the folder's tokenizer.json, or None."""
        path = self._folder / "tokenizer.json"
        return path if path.exists() else None

    def identity(self):
        """Hash of the tokens and of their splits."""
        return self._identity_of(self._shards)

    def _identity_of(self, shards):
        digests = file_digests(self._root, [shard.path for shard in shards])
        return content_key("tokens", digests, [(shard.split, shard.count) for shard in shards])

    def _shards_of(self, split):
        return [shard for shard in self._shards if shard.split == split]

    def find_training_shard_of(self, source):
        """The name of a held-out shard that is a training shard of the TokenShards `source`, or
        None.

        Whole files are compared, even if max_bytes drops a part of one. The held-out shards of the
        `source` itself are those for evaluation, of others all.
        """
        training = [shard.path for shard in source._shards_of("train")]
        digests = set(file_digests(self._root, training))
        heldout = self._shards_of("eval") if self is source else self._shards
        paths = [shard.path for shard in heldout]
        pairs = zip(paths, file_digests(self._root, paths), strict=True)
        return next((path.name for path, digest in pairs if digest in digests), None)

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

    def _stream(self, split):
        return Stream([shard.ids for shard in self._shards_of(split)])

    def all_tokens(self):
        """The TokenSplit of all shards."""
        return TokenSplit(self.name, Stream([shard.ids for shard in self._shards]))

    def decide(self, split, eval_fraction):
        """Decide the held-out part, for the run's record (compare `held_out.decide`).

        Returns:
          {"shards": hash of the evaluation shards}, or {"tokens": [start, stop], "sum": hash of
          these tokens}.
        """
        if self._shards_of("eval"):
            return {"shards": self._identity_of(self._shards_of("eval"))}
        if split == "documents":
            raise UsageError(
                f"config.data.split='documents': {self.name} is one stream of tokens without "
                "documents; use config.data.split=tail, or write shards with a held-out split"
            )
        count = len(self._stream("train"))
        start = int((1 - eval_fraction) * count)
        return {"tokens": [start, count], "sum": self._token_digest(start, count)}

    def token_splits(self, decision):
        """{"train" or "eval": TokenSplit}; only "train" if `decision` (see `decide`) is None."""
        train, heldout = self._stream("train"), self._stream("eval")
        if not len(train):
            raise UsageError(f"{self.name}: no shard has training tokens")
        streams = {"train": train}
        if decision and "shards" in decision:
            if self._identity_of(self._shards_of("eval")) != decision["shards"]:
                self._refuse_changed("the evaluation shards have changed")
            streams["eval"] = heldout
        elif decision:
            start, stop = decision["tokens"]
            is_kept = not len(heldout) and stop <= len(train)
            if not is_kept or self._token_digest(start, stop) != decision["sum"]:
                self._refuse_changed(f"its held-out tokens {start} to {stop} have changed")
            ends = [*train.cut(0, start).arrays(), *train.cut(stop, len(train)).arrays()]
            streams = {"train": Stream(ends), "eval": train.cut(start, stop)}
        return {split: TokenSplit(self.name, stream) for split, stream in streams.items()}

    def _token_digest(self, start, stop):
        def compute():
            digest = hashlib.blake2b(digest_size=16)
            for array in self._stream("train").cut(start, stop).arrays():
                digest.update(np.ascontiguousarray(array).data.cast("B"))
            return digest.hexdigest()

        return remember(self._root, content_key("sum", self.identity(), start, stop), compute)

    def _refuse_changed(self, problem):
        raise UsageError(
            f"{self.name}: the earlier split cannot be kept: {problem}. Only append training "
            "tokens to the old ones; restore the old tokens, or use another --workdir"
        )
