"""Tokenizers: text round-trips, saved files give the same ids, bad files raise UsageError."""

import json
import os

import numpy as np
import pytest
from data_helpers import few_examples
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from efx.data import bpe, load_tokenizer, tokenizers
from efx.data.sources import Document

SAMPLE = "def f(x):\n    return x + 1\n\n\nclass Ä:\n    '''naïve Ω'''\n" * 20
TEXT = st.text(st.characters(codec="utf-8"))
# The corner cases of byte-level splitting: runs of white space, contractions, rare spaces.
TRICKY = st.text(" \n\t\r\x0b\x1c\x85\xa0\u3000a'sZ9!é_漢", max_size=60)


@pytest.fixture(scope="module")
def bpe_280():
    return bpe.train_bpe([SAMPLE], 280)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A file of the tokenizers library that adds special tokens, truncates and pads."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "▁hello": 3, "▁wörld": 4, "!": 5}
    inner = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = library.pre_tokenizers.Metaspace()
    inner.decoder = library.decoders.Metaspace()
    inner.add_special_tokens(["<s>", "</s>", "<unk>"])
    inner.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    inner.save(str(path))
    return path


# ---- bytes and characters ------------------------------------------------------------------------


@few_examples
@given(st.binary(), TEXT.filter(bool))
def test_bytes_and_characters_round_trip(data, text):
    by_byte, by_character = tokenizers.ByteTokenizer(), tokenizers.CharTokenizer(text)
    assert by_byte.encode(data).tolist() == list(data)
    assert by_byte.decode_bytes(by_byte.encode(data)) == data
    assert by_character.characters == "".join(sorted(set(text)))
    assert by_character.decode(by_character.encode(text)) == text
    assert by_byte.encode(data).dtype == by_character.encode(text).dtype == np.int32


def test_bytes_that_are_not_utf8_are_encoded_with_one_warning(caplog):
    texts = ["Zürich, 東京".encode(), "Zürich, ü".encode("latin-1"), b"", b"end \xe2\x82"]
    documents = [Document(f"document {i}", text) for i, text in enumerate(texts)]
    tokenizer = tokenizers.ByteTokenizer()
    list(tokenizer.encode_documents(documents[:1]))
    assert not caplog.records
    assert [bytes(ids.tolist()) for _, ids in tokenizer.encode_documents(documents)] == texts
    (record,) = caplog.records
    assert "document 1" in record.message
    assert tokenizer.encode("a\udcff").tolist() == [97, 255]  # as in sys.argv


def test_an_unknown_character_is_refused_by_its_position():
    tokenizer = tokenizers.CharTokenizer("abc")
    for text, wrong in (("abxc", "'x' at 2"), ("ab\U0001f600", "'😀' at 2"), ("A", "'A' at 0")):
        refused(lambda: tokenizer.encode(text), wrong)  # noqa: B023


# ---- BPE -----------------------------------------------------------------------------------------


@few_examples
@given(TEXT | TRICKY)
def test_bpe_round_trips_any_text(bpe_280, text):
    ids = bpe_280.encode(text)
    assert ids.dtype == np.int32 and (not len(ids) or ids.max() < bpe_280.vocab_size)
    assert bpe_280.decode(ids) == text
    assert bpe_280.byte_lengths()[ids].sum() == len(text.encode())


def test_bpe_of_the_same_text_is_the_same_and_has_the_configured_size(bpe_280):
    assert bpe_280.vocab_size == 280 and len(bpe_280.encode(SAMPLE)) < 0.6 * len(SAMPLE)
    assert bpe.train_bpe([SAMPLE], 280).fingerprint == bpe_280.fingerprint
    assert bpe.train_bpe([SAMPLE], 279).fingerprint != bpe_280.fingerprint
    assert bpe.train_bpe(["abab"], 280).vocab_size < 260  # no more pairs to merge
    # In every version.
    ids = [266, 70, 221, 268, 273, 8, 88, 262, 221, 270, 271, 221, 88]
    assert bpe_280.encode("def naïve(x): return x").tolist() == ids


def test_pre_tokens_of_trained_bpe_are_bounded():
    """So that the time to encode does not grow with the length of words."""
    tokenizer = bpe.train_bpe(["é" * 5000], 300)
    assert 256 <= max(map(len, tokenizer.token_bytes())) <= 257
    ids = tokenizer.encode("é" * 999)
    assert tokenizer.decode(ids) == "é" * 999
    library = pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    assert library.encode("é" * 999).ids == ids.tolist()  # the file alone bounds them


def test_documents_of_several_threads_keep_their_order(bpe_280, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.setattr(bpe, "_BATCH", 50)
    monkeypatch.setattr(bpe, "_CHUNK", 20)
    texts = [SAMPLE[i : i + i % 90] for i in range(0, 400)]
    documents = [Document(str(i), text.encode()) for i, text in enumerate(texts)]
    encoded = list(bpe_280.encode_documents(documents))
    assert [bpe_280.decode(ids) for _, ids in encoded] == texts
    assert [document for document, _ in encoded] == documents
    # The error names the first document.
    documents[300], documents[310] = Document("first", b"\xff"), Document("second", b"\xff")
    refused(lambda: list(bpe_280.encode_documents(documents)), "first")


@pytest.fixture(scope="module")
def greedy_bpe():
    """Merges all pairs that may be merged: each pre-token that occurs is one token."""
    letters = "".join(chr(c) for c in range(128)) + "\x85\xa0\u3000é漢"
    rng = np.random.default_rng(0)
    spaces = rng.choice(list(" \n\t\x1c\r'!a"), (4000, 6))
    others = rng.choice(list(letters), (4000, 4))
    return bpe.train_bpe(["".join(t) for t in (*spaces, *others)], 3000)


@few_examples
@given(st.lists(TRICKY, min_size=5, max_size=10))
def test_cutting_long_texts_does_not_change_their_ids(greedy_bpe, texts):
    whole = [greedy_bpe.encode(t).tolist() for t in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_CHUNK", 3)
        patch.setattr(bpe, "_BATCH", 20)
        assert [greedy_bpe.encode(t).tolist() for t in texts] == whole
        documents = [Document("name", t.encode()) for t in texts]
        assert [ids.tolist() for _, ids in greedy_bpe.encode_documents(documents)] == whole


# ---- special tokens ------------------------------------------------------------------------------


def test_the_end_of_a_document_is_an_id_without_text(bpe_280):
    for tokenizer, eot in ((tokenizers.ByteTokenizer(), 256), (bpe_280, 0)):
        assert tokenizer.eot == eot
        ids = np.array([*tokenizer.encode("a"), eot, *tokenizer.encode("b")])
        assert tokenizer.decode(ids) == "ab"
        assert tokenizer.byte_lengths()[eot] == 0


def test_a_file_of_the_users_own_neither_adds_nor_truncates_nor_pads(words, bpe_280):
    tokenizer = load_tokenizer(words)
    assert (tokenizer.vocab_size, tokenizer.eot) == (6, 1)
    assert tokenizer.start == (0,) and bpe_280.start == ()
    text = "hello wörld hello wörld hello"
    assert tokenizer.encode(text).tolist() == [3, 4, 3, 4, 3]
    assert tokenizer.decode([0, 3, 0, 4, 1]) == "hello wörld"
    assert tokenizer.byte_lengths() is None  # the space before a word depends on its predecessor
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder.feed(i) for i in tokenizer.encode(text)) + decoder.finish() == text


def test_text_that_spells_a_special_token_does_not_become_one(bpe_280, words):
    ids = bpe_280.encode(f"a{bpe.END_OF_TEXT}b")
    assert bpe_280.eot not in ids
    assert bpe_280.decode(ids) == f"a{bpe.END_OF_TEXT}b"
    assert 1 not in load_tokenizer(words).encode("hello</s>")


# ---- files ---------------------------------------------------------------------------------------


def changed(tokenizer, change):
    """The tokenizer of another one's file after `change(contents)`."""
    contents = json.loads(tokenizer.to_json())
    change(contents)
    return bpe.LibraryTokenizer(json.dumps(contents))


def test_a_byte_level_file_without_all_bytes_is_refused_and_dropout_is_off(bpe_280):
    """The library would drop the text that it has no token for."""

    def without_q(contents):
        del contents["model"]["vocab"]["q"]
        merges = contents["model"]["merges"]
        merges[:] = [pair for pair in merges if "q" not in "".join(pair)]

    refused(lambda: changed(bpe_280, without_q), "1 of the 243 bytes")
    random = changed(bpe_280, lambda contents: contents["model"].update(dropout=0.5))
    assert random.encode(SAMPLE).tolist() == bpe_280.encode(SAMPLE).tolist()


def test_ids_whose_bytes_are_not_those_of_the_text_have_no_byte_lengths(bpe_280):
    """A space before each text, and spaces that an added token consumes."""
    token = dict(id=280, content="<sep>", single_word=False, normalized=False, special=False)
    token |= dict(lstrip=False, rstrip=False)
    plain = changed(bpe_280, lambda c: c["added_tokens"].append(token))
    text = "return <sep>é   x"
    ids = plain.encode(text)
    assert plain.byte_lengths()[ids].sum() == len(text.encode()) and plain.decode(ids) == text
    prefixed = changed(
        bpe_280, lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(add_prefix_space=True)
    )
    stripping = changed(bpe_280, lambda c: c["added_tokens"].append(token | {"rstrip": True}))
    for tokenizer, decoded in ((prefixed, " def naïve"), (stripping, "def naïve")):
        ids = tokenizer.encode("def naïve").tolist()
        assert tokenizer.byte_lengths() is None and tokenizer.decode(ids) == decoded
        assert tokenizer.decode_bytes([*ids, tokenizer.eot]) == decoded.encode()
        decoder = tokenizer.stream_decoder()
        assert "".join(map(decoder.feed, ids)) + decoder.finish() == decoded


def test_saved_and_loaded_a_tokenizer_is_the_same_and_no_other(bpe_280, words, tmp_path):
    every = [
        tokenizers.ByteTokenizer(),
        tokenizers.CharTokenizer(SAMPLE + '"\\'),
        tokenizers.CharTokenizer(SAMPLE),
        bpe_280,
        load_tokenizer(words),
    ]
    for tokenizer in every:
        tokenizer.save(tmp_path / "tokenizer.json")
        again = load_tokenizer(tmp_path / "tokenizer.json")
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint
        assert (again.vocab_size, again.eot) == (tokenizer.vocab_size, tokenizer.eot)
        assert again.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
        assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert len({tokenizer.fingerprint for tokenizer in every}) == len(every)


@few_examples
@given(TEXT)
def test_streamed_text_is_the_text_and_never_half_a_character(bpe_280, text):
    for tokenizer in (tokenizers.ByteTokenizer(), bpe_280):
        decoder, so_far = tokenizer.stream_decoder(), ""
        for i in tokenizer.encode(text):
            so_far += decoder.feed(i)
            assert text.startswith(so_far)
        assert so_far + decoder.finish() == text
    decoder = tokenizers.ByteTokenizer().stream_decoder()
    assert [decoder.feed(b) for b in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert decoder.feed(0xE2) == "" and decoder.finish() == "\ufffd"


def test_unknown_words_without_a_token_for_them_are_refused():
    library = pytest.importorskip("tokenizers")
    words = {"the": 0, "fox": 1}
    inner = library.Tokenizer(library.models.WordPiece(words, unk_token="[UNK]"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer = bpe.LibraryTokenizer(inner.to_str())
    assert tokenizer.encode("the fox").tolist() == [0, 1]
    refused(lambda: tokenizer.encode("the quick fox"), "UNK")
    documents = [Document("first", b"the fox"), Document("second", b"a quick fox")]
    refused(lambda: list(tokenizer.encode_documents(documents)), "config.data.tokenizer", "second")


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    refused(lambda: load_tokenizer(path), str(path))
    no_ids = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    for content in ("{", "[]", '{"kind": "chars", "characters": ""}', no_ids):
        path.write_text(content)
        refused(lambda: load_tokenizer(path), str(path))


def test_text_that_is_not_utf8_is_refused(bpe_280):
    for tokenizer in (bpe_280, tokenizers.CharTokenizer("ab")):
        refused(lambda: tokenizer.encode(b"a\xffb"), "0xff at 1")  # noqa: B023
    for tokenizer in (bpe_280, tokenizers.CharTokenizer("ab"), tokenizers.ByteTokenizer()):
        refused(lambda: tokenizer.encode("a\ud800"))  # noqa: B023
