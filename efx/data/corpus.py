"""From documents to token arrays on disk: tokenise what `split` gives out, keep it."""

import json
import logging

import numpy as np

from efx.data import bpe, tokenizers
from efx.data.cache import content_key, entry
from efx.data.shards import token_dtype
from efx.data.stream import Part, Stream
from efx.errors import UsageError

log = logging.getLogger(__name__)

# Raised whenever the same input would come to other tokens than before.
_VERSION = 1
PART_NAMES = {"train": "training split", "eval": "held-out split"}
PARTS = tuple(PART_NAMES)


def make_tokenizer(spec, name, key, pieces, root):
    """The tokenizer that `config.data.tokenizer` (`spec`) names, trained on a text if need be.

    Args:
      name, key, pieces: of that text, as for `load_corpus`. BPE is trained on its part for
        training; `chars` takes the characters of all of it.
    """
    kind, argument = tokenizers.parse(spec)
    if kind == "bytes":
        return tokenizers.ByteTokenizer()
    if kind == "file":
        return tokenizers.load_tokenizer(argument)

    def build(folder):
        log.info("making the tokenizer %s of %s", spec, name)
        wanted = PARTS if kind == "chars" else ("train",)
        texts = _texts(((where, data) for part, where, data in pieces() if part in wanted), kind)
        if kind == "chars":
            tokenizer = tokenizers.CharTokenizer(tokenizers.characters_of(texts))
        else:
            tokenizer = bpe.train_bpe(texts, argument)
        tokenizer.save(folder / "tokenizer.json")

    key = content_key(kind, _VERSION, key, argument)
    return tokenizers.load_tokenizer(entry(root, "tokenizers", key, build) / "tokenizer.json")


def _texts(documents, kind):
    for name, data in documents:
        try:
            yield tokenizers.text_of(data, kind)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error


def load_corpus(name, key, pieces, tokenizer, root, parts=PARTS):
    """{"train" or "eval": Part} of a text, made on the first call and read back after that.

    Args:
      name: of the text, for messages.
      key: hash of everything that `pieces` depends on.
      pieces: function without arguments: ("train" or "eval", name, bytes) of each document or piece
        of one. It is called when there is something to make.
      parts: which of the two it gives out.
    """
    key = content_key("tokens", _VERSION, key, tokenizer.fingerprint)

    def build(folder):
        log.info("tokenising %s", name)
        _tokenise(folder, name, pieces(), tokenizer, parts)

    folder = entry(root, "tokens", key, build)
    info = json.loads((folder / "info.json").read_text())
    return {
        part: Part(
            name,
            Stream([np.memmap(folder / f"{part}.bin", info["dtype"], "r")]),
            np.load(folder / f"{part}_spans.npy"),
            info["text_bytes"][part],
        )
        for part in parts
    }


def _tokenise(folder, source_name, pieces, tokenizer, parts):
    dtype = token_dtype(tokenizer.vocab_size)
    text_bytes, spans = dict.fromkeys(parts, 0), {part: [] for part in parts}
    written, sides = dict.fromkeys(parts, 0), []

    def documents():
        for part, name, data in pieces:
            sides.append(part)
            text_bytes[part] += len(data)
            yield name, data

    files = {part: open(folder / f"{part}.bin", "wb") for part in parts}
    try:
        for i, ids in enumerate(tokenizer.encode_documents(documents())):
            part = sides[i]
            if not len(ids):
                continue
            if spans[part] and tokenizer.eot is not None:
                files[part].write(np.array(tokenizer.eot, dtype).tobytes())
                written[part] += 1
            files[part].write(ids.astype(dtype))
            spans[part].append((written[part], written[part] + len(ids)))
            written[part] += len(ids)
    finally:
        for file in files.values():
            file.close()
    for part in parts:
        if not written[part]:
            raise UsageError(f"{source_name}: the {PART_NAMES[part]} comes to no tokens")
        np.save(folder / f"{part}_spans.npy", np.array(spans[part], np.int64))
    info = {"dtype": dtype.str, "text_bytes": text_bytes}
    (folder / "info.json").write_text(json.dumps(info))
