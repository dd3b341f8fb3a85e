"""Bits per byte: the bytes are those of the scored targets, and tokenizers that lose text are
refused."""

import json

import numpy as np
import pytest
from data_helpers import make_config, open_data, refuse_data

from efx.data import bpe, load_tokenizer, write_token_shards

library = pytest.importorskip("tokenizers")
ENGLISH = "The quick brown fox.\n  It jumps over a dog: yes! "
# The middle is of characters of three and four bytes, so no part has the mean of the whole.
DOCUMENTS = [ENGLISH * 3, "日本語の 文章、だ。😀 " * 9, "naïve é\t" + ENGLISH, "x", ENGLISH + "😀é"]
BYTES = {f"<0x{i:02X}>": i + 3 for i in range(256)}


def save(inner, tmp_path):
    path = tmp_path / "made" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    inner.save(str(path))
    return str(path)


def sentence_pieces(tmp_path):
    """As Llama 2 has it: a space before each document, and bytes for unknown characters."""
    words = ["▁", *sorted({c for c in ENGLISH if c not in " \n"}), "▁q", "▁T"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | BYTES
    vocabulary |= {word: i for i, word in enumerate(words, 259)}
    model = library.models.BPE(
        vocabulary, [("▁", "q"), ("▁", "T")], byte_fallback=True, unk_token="<unk>"
    )
    inner = library.Tokenizer(model)
    inner.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    inner.decoder = library.decoders.Sequence(
        [
            library.decoders.Replace("▁", " "),
            library.decoders.ByteFallback(),
            library.decoders.Fuse(),
            library.decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return save(inner, tmp_path)


def metaspace(tmp_path):
    """A space before each word is part of it, and none is before the first."""
    letters = sorted({c for text in DOCUMENTS for c in text} - {" "} | {"▁"})
    inner = library.Tokenizer(library.models.Unigram([(c, -5.0) for c in ["<unk>", *letters]], 0))
    inner.pre_tokenizer = library.pre_tokenizers.Metaspace()
    inner.decoder = library.decoders.Metaspace()
    inner.add_special_tokens(["<unk>"])
    return save(inner, tmp_path)


def normalised_bpe(tmp_path):
    """Byte-level with composed characters, as Pythia and Qwen have it."""
    inner = library.Tokenizer.from_str(bpe.train_bpe(DOCUMENTS, 300).to_json())
    inner.normalizer = library.normalizers.NFC()
    return save(inner, tmp_path)


KINDS = {
    "bytes": lambda tmp_path: "bytes",
    "chars": lambda tmp_path: "chars",
    "bpe": lambda tmp_path: "bpe:300",
    "sentence_pieces": sentence_pieces,
    "metaspace": metaspace,
    "normalised_bpe": normalised_bpe,
}


def held_out(spec, tmp_path, texts=DOCUMENTS, **changes):
    """Config of a run whose held-out documents are `texts`."""
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(text.encode())
    (tmp_path / "train.txt").write_text("train " * 40 + "".join(map(str, texts)), "utf-8")
    changes = {"eval_source": f"text:{folder}", "tokenizer": spec} | changes
    return make_config(f"text:{tmp_path}/train.txt", tmp_path, **changes)


def bytes_of_tokens(data, texts):
    """Bytes of each token of the held-out stream, by offsets of the library or token by token.

    A character of several tokens counts for the last one."""
    tokenizer, sizes = data.tokenizer, []
    for text in texts:
        if tokenizer.kind == "bytes":
            document = [1] * len(text.encode())
        elif tokenizer.kind == "chars":
            document = [len(c.encode()) for c in text]
        elif tokenizer.token_bytes() is not None:
            ids = tokenizer.encode(text)
            document = [len(tokenizer.decode_bytes([i])) for i in ids]
            assert sum(document) == len(text.encode())
        else:
            inner = library.Tokenizer.from_str(tokenizer.to_json())
            inner.encode_special_tokens = True
            starts = [a for a, _ in inner.encode(text, add_special_tokens=False).offsets]
            edges = zip(starts, [*starts[1:], len(text)], strict=True)
            document = [0] * len(tokenizer.start) + [len(text[a:b].encode()) for a, b in edges]
        sizes += ([0] if sizes and tokenizer.eot is not None else []) + document
    return np.array(sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_scored_targets(kind, tmp_path):
    spec = KINDS[kind](tmp_path)
    for packing in (False, True):
        config = held_out(spec, tmp_path, packing=packing)
        data = open_data(config)
        sizes = bytes_of_tokens(data, DOCUMENTS)
        assert len(sizes) == data.eval_tokens
        totals = []
        for limit in (0, 1, 3):
            batches, expected = data.eval_batches(4, limit), 0
            for batch, positions_BT in zip(batches, batches.target_positions(), strict=True):
                positions = positions_BT[batch["weights"] > 0]
                expected += sizes[positions[positions < len(sizes)]].sum()
            assert data.scored_bytes(4, limit) == expected
            totals.append(expected)
        whole = sum(len(text.encode()) for text in DOCUMENTS)
        if packing and data.tokenizer.eot is not None:
            assert totals[0] == whole  # each first token is a target, too
        elif not packing:
            assert totals[0] == whole - sizes[0]


def test_rows_of_a_split_are_counted_once_wherever_characters_end(tmp_path):
    """Cuts inside a character of four tokens, also one that spells the replacement character."""
    texts = ["é😀\ufffd" * 20 + "\ufffd", "\ufffda\ufffd"]
    spec = sentence_pieces(tmp_path)
    for seq_len in (1, 2, 3, 7):
        data = open_data(held_out(spec, tmp_path, texts, packing=True, seq_len=seq_len))
        assert data.scored_bytes(4) == sum(len(text.encode()) for text in texts)


def test_partial_batches_count_no_row_twice(tmp_path):
    data = open_data(held_out("bytes", tmp_path, ["a" * 21], batch_size=4))
    assert [data.scored_bytes(4), data.scored_bytes(2, 1), data.scored_bytes(1, 2)] == [20, 16, 16]


def test_shards_without_text_count_bytes_only_where_ids_have_fixed_bytes(tmp_path):
    """Else nothing shows whether their text was kept."""
    for kind, is_counted in (("bpe", True), ("sentence_pieces", False)):
        spec = KINDS[kind](tmp_path)
        tokenizer = bpe.train_bpe(DOCUMENTS, 300) if kind == "bpe" else load_tokenizer(spec)
        ids = [tokenizer.encode(text) for text in DOCUMENTS]
        write_token_shards(tmp_path / kind, tokenizer, [tokenizer.encode(ENGLISH * 9)], ids)
        config = make_config(f"tokens:{tmp_path / kind}", tmp_path, tokenizer=spec)
        data = open_data(config)
        expected = sum(len(text.encode()) for text in DOCUMENTS)
        expected -= len(tokenizer.decode_bytes(data.tokens("eval", 0, 1)))  # not scored
        assert data.scored_bytes(4) == (expected if is_counted else None)


# ---- tokenizers that lose text -------------------------------------------------------------------


def of_words(pre_tokenizer, normalizer=None):
    words = ["[UNK]", *dict.fromkeys(w for w in ENGLISH.split()), "the", "it"]
    inner = library.Tokenizer(
        library.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizer, library.decoders.Metaspace()
    if normalizer is not None:
        inner.normalizer = normalizer
    return inner


def of_characters():
    inner = library.Tokenizer(library.models.BPE({c: i for i, c in enumerate("The quick")}, []))
    inner.decoder = library.decoders.Fuse()
    return inner


def without_spaces():
    """Byte-level with all bytes, of text between spaces."""
    inner = library.Tokenizer.from_str(bpe.train_bpe(DOCUMENTS, 300).to_json())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    removed = library.pre_tokenizers.Split(" ", "removed")
    inner.pre_tokenizer = library.pre_tokenizers.Sequence([removed, byte_level])
    return inner


def with_prefix():
    """Byte-level, with a space before each text."""
    inner = library.Tokenizer.from_str(bpe.train_bpe(DOCUMENTS, 300).to_json())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    return inner


def without_q():
    """Byte-level, with a token for unknown bytes."""
    contents = json.loads(bpe.train_bpe(["x"], 257).to_json())
    del contents["model"]["vocab"]["q"]
    contents["model"]["unk_token"] = bpe.END_OF_TEXT
    return library.Tokenizer.from_str(json.dumps(contents))


LOSSY = {
    "a missing byte": (without_q, "'quick brown fox.\\n  I' at 4"),
    "a space too many": (with_prefix, "is decoded as ' The quick brown fox'"),
    "unknown characters": (of_characters, "'brown fox.\\n  It jump' at 10"),
    "unknown words": (lambda: of_words(library.pre_tokenizers.Metaspace()), "The quick"),
    "spaces": (lambda: of_words(library.pre_tokenizers.WhitespaceSplit()), "' quick"),
    "byte-level": (without_spaces, "' quick brown fox.\\n  ' at 3"),
    "case": (
        lambda: of_words(library.pre_tokenizers.Metaspace(), library.normalizers.Lowercase()),
        "'The quick brown fox.' at 0",
    ),
}


@pytest.mark.parametrize("name", LOSSY)
def test_a_tokenizer_that_loses_text_is_refused_with_the_first_lost_text(name, tmp_path):
    make, lost = LOSSY[name]
    config = held_out(save(make(), tmp_path), tmp_path, [ENGLISH] * 5, seq_len=1)
    for _ in range(2):  # from the cache, too
        refuse_data(config, lost, "0.txt", "config.data.lossy_tokenizer=True")
    config.lossy_tokenizer = True
    data = open_data(config)
    assert data.eval_tokens and not data.counts_bytes() and data.scored_bytes(4) is None
    # Shards of its tokens have no text that could show it.
    write_token_shards(tmp_path / "shards", data.tokenizer, [ENGLISH * (i + 1) for i in range(5)])
    config.source, config.eval_source = f"tokens:{tmp_path}/shards", ""
    assert open_data(config).scored_bytes(4) is None


def test_the_compared_part_of_a_text_ends_at_a_character(tmp_path):
    count = 400_000  # 1 MiB is not a multiple of 3 bytes
    data = open_data(held_out("chars", tmp_path, ["日" * count]))
    assert data.scored_bytes(512) == 3 * (count - 1)
