"""Tokenizers: any text comes back, ids mean the same after saving, errors are one line."""

import json
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efx.data import bpe, load_tokenizer, tokenizers
from efx.errors import UsageError

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

SAMPLE = "def f(x):\n    return x + 1\n\n\nclass Ä:\n    '''naïve Ω'''\n" * 20
TEXT = st.text(st.characters(codec="utf-8"))
# Where byte-level splitting has its corners: runs of white space, contractions, rare spaces.
TRICKY = st.text(" \n\t\r\x0b\x1c\x85\xa0\u3000a'sZ9!é_漢", max_size=60)


@pytest.fixture(scope="module")
def bpe_280():
    return bpe.train_bpe([SAMPLE], 280)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A file of the tokenizers library of another make, with everything that must be switched off:
    a template that adds special tokens, truncation, padding."""
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


@given(TEXT)
def test_bytes_bring_any_text_back(text):
    tokenizer = tokenizers.ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and list(ids) == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(st.binary())
def test_bytes_bring_any_bytes_back(data):
    tokenizer = tokenizers.ByteTokenizer()
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_bytes_take_what_a_command_line_may_hold():
    assert tokenizers.ByteTokenizer().encode("a\udcff").tolist() == [97, 255]


def test_end_of_document_is_an_id_of_its_own_and_no_text(bpe_280):
    for tokenizer, eot in ((tokenizers.ByteTokenizer(), 256), (bpe_280, 0)):
        assert tokenizer.eot == eot
        ids = np.array([*tokenizer.encode("a"), eot, *tokenizer.encode("b")])
        assert tokenizer.decode(ids) == "ab"
        assert tokenizer.byte_lengths()[eot] == 0


@given(TEXT.filter(bool))
def test_characters_bring_their_own_text_back(text):
    tokenizer = tokenizers.CharTokenizer(text)
    assert tokenizer.characters == "".join(sorted(set(text)))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.max() < tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text


def test_an_unseen_character_is_named(monkeypatch):
    tokenizer = tokenizers.CharTokenizer("abc")
    for text, wrong in (("abxc", "'x' at 2"), ("ab\U0001f600", "'😀' at 2"), ("A", "'A' at 0")):
        with pytest.raises(UsageError, match=wrong):
            tokenizer.encode(text)
    with pytest.raises(UsageError, match="'b' at 1"):
        tokenizers.CharTokenizer("\0a").encode("ab")
    monkeypatch.setattr(tokenizers, "_STRIDE", 4)  # long texts go in strides
    assert tokenizer.encode("abcabcabca").tolist() == [0, 1, 2] * 3 + [0]
    with pytest.raises(UsageError, match="'!' at 9"):
        tokenizer.encode("abcabcabc!")


def test_characters_of_finds_all():
    assert tokenizers.characters_of(["b\U0010ffff", "aéb"]) == "abé\U0010ffff"


@given(TEXT | TRICKY)
def test_bpe_brings_any_text_back(bpe_280, text):
    ids = bpe_280.encode(text)
    assert ids.dtype == np.int32 and (not len(ids) or ids.max() < bpe_280.vocab_size)
    assert bpe_280.decode(ids) == text
    assert bpe_280.byte_lengths()[ids].sum() == len(text.encode())


def test_bpe_compresses_and_has_the_size_asked_for(bpe_280):
    assert bpe_280.vocab_size == 280
    assert len(bpe_280.encode(SAMPLE)) < 0.6 * len(SAMPLE)
    assert bpe.train_bpe(["abab"], 280).vocab_size < 260  # no more to merge


def test_bpe_of_the_same_text_is_the_same(bpe_280):
    assert bpe.train_bpe([SAMPLE], 280).fingerprint == bpe_280.fingerprint
    assert bpe.train_bpe([SAMPLE], 279).fingerprint != bpe_280.fingerprint


def test_time_of_bpe_does_not_depend_on_the_length_of_words():
    """Training and encoding of text without spaces; the file alone gives the same ids."""
    characters = "".join(np.random.default_rng(0).choice(list("あいうえおかき"), 30_000))
    lines = "\n".join(characters[i : i + 60] for i in range(0, len(characters), 60))
    seconds = {}
    for text in (lines, characters):
        start = time.process_time()
        tokenizer = bpe.train_bpe([text], 2000)
        ids = tokenizer.encode(text)
        seconds[text] = time.process_time() - start
    assert seconds[characters] < 10 * seconds[lines]
    assert tokenizer.decode(ids) == characters
    library = pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    assert library.encode(characters).ids == ids.tolist()


def test_a_template_begins_documents(words, bpe_280):
    """The special tokens before a text are of every document, not of `encode`."""
    tokenizer = load_tokenizer(words)
    assert tokenizer.start == (0,) and bpe_280.start == ()
    documents = [("a", b"hello!"), ("b", b""), ("c", "wörld".encode())]
    ids = [list(each) for each in tokenizer.encode_documents(documents)]
    assert ids == [[0, *tokenizer.encode("hello!")], [], [0, *tokenizer.encode("wörld")]]
    assert tokenizer.decode([0, 3, 0, 4]) == "hello wörld"


@pytest.mark.parametrize("threads", ["1", "3"])
def test_documents_of_several_threads_come_in_their_order(bpe_280, monkeypatch, threads):
    monkeypatch.setenv("RAYON_NUM_THREADS", threads)
    monkeypatch.setattr(bpe, "_BATCH", 50)
    monkeypatch.setattr(bpe, "_CHUNK", 20)
    texts = [SAMPLE[i : i + i % 90] for i in range(0, 400)]
    names = iter(map(str, range(400)))
    coming = bpe_280.encode_documents((next(names), text.encode()) for text in texts)
    assert [bpe_280.decode(ids) for ids in coming] == texts


def test_of_several_threads_the_first_wrong_document_is_told(words, monkeypatch):
    monkeypatch.setattr(bpe, "_BATCH", 1)
    tokenizer, texts = load_tokenizer(words), [b"hello!"] * 9 + [b"\xff"] + [b"hello!"] * 9
    documents = [(str(i), text) for i, text in enumerate(texts)]
    with pytest.raises(UsageError, match="^9: "):
        list(tokenizer.encode_documents(documents))


@pytest.mark.parametrize("before", [None, "true", "false"])
def test_how_the_library_shares_its_work_is_said_again_afterwards(bpe_280, monkeypatch, before):
    """Also if several texts are tokenised at a time, and one not to its end."""
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    first, second = (bpe_280.encode_documents([("a", b"x"), ("b", b"y")]) for _ in "ab")
    next(first)
    next(second)
    first.close()
    assert os.environ[name] == "false"
    with bpe._OneThreadACall() as call:
        assert call.threads == (1 if before == "false" else 5)
        assert os.environ[name] == "false"
    assert len(list(second)) == 1
    assert os.environ.get(name) == before


def test_text_that_spells_a_special_token_does_not_become_one(bpe_280, words):
    ids = bpe_280.encode(f"a{bpe.END_OF_TEXT}b")
    assert bpe_280.eot not in ids
    assert bpe_280.decode(ids) == f"a{bpe.END_OF_TEXT}b"
    assert 1 not in load_tokenizer(words).encode("hello</s>")


def with_special_tokens(kind, letters, special, whole_text=False):
    """A tokenizer of the library, of single letters, whose model has the special tokens in its own
    vocabulary: that of Unigram at the best score, as files made of sentencepiece's have it."""
    library = pytest.importorskip("tokenizers")
    if kind == "Unigram":
        model = library.models.Unigram(
            [(token, 0.0) for token in ["<unk>", *special]] + [(c, -3.0 - i) for i, c in
                                                               enumerate(letters)], unk_id=0
        )  # fmt: skip
    else:
        vocabulary = {token: i for i, token in enumerate(["<unk>", *special, *letters])}
        model = getattr(library.models, kind)(vocabulary, unk_token="<unk>")
    inner = library.Tokenizer(model)
    if not whole_text:
        inner.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<unk>", *special])
    return inner


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "WordPiece"])
def test_special_tokens_in_the_vocabulary_of_the_model_are_not_found_in_text(kind):
    """The library looks for them no more, but the model found them in its own vocabulary."""
    letters = ["a", "b", "c", "/", "s", ">", "##b", "##c"]  # and no <, as many files have none
    inner = with_special_tokens(kind, letters, ["<s>", "</s>", "(s"], whole_text=kind == "Unigram")
    tokenizer = bpe.LibraryTokenizer(inner.to_str())
    assert tokenizer.eot == 2
    for text in ("</s>", "a</s>b", "a </s> b", "<<s>", "</s></s><s>", "<unk>", "((s>"):
        assert not {1, 2, 3} & set(tokenizer.encode(text).tolist()), text
    inner.encode_special_tokens = True
    for text in ("a b c", "abc bca", "a < s >/", "s></ <", "x", " a  "):
        assert tokenizer.encode(text).tolist() == inner.encode(text).ids
    again = bpe.LibraryTokenizer(tokenizer.to_json())
    assert (again.to_json(), again.fingerprint) == (tokenizer.to_json(), tokenizer.fingerprint)


def test_text_that_spells_a_special_token_comes_back_of_unigram():
    inner = with_special_tokens("Unigram", "ab</s>", ["</s>"], whole_text=True)
    tokenizer = bpe.LibraryTokenizer(inner.to_str())
    assert tokenizer.encode("a</s>b").tolist() == [2, 4, 5, 6, 7, 3]
    assert tokenizer.decode([2, 4, 1, 5, 3]).split() == ["a", "<", "/", "b"]


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_a_special_token_of_one_character_is_one_clear_line(kind):
    """No text that has it could come back."""
    tokenizer = bpe.LibraryTokenizer(with_special_tokens(kind, "ab", ["§"]).to_str())
    assert tokenizer.encode("a b").tolist() == [2, 3]
    with pytest.raises(UsageError, match="the character '§', a special token"):
        tokenizer.encode("a § b")
    message = "^config.data.tokenizer, for the text second: the text has the character '§'"
    with pytest.raises(UsageError, match=message):
        list(tokenizer.encode_documents([("first", b"a"), ("second", "b §".encode())]))


def changed(tokenizer, change):
    """A tokenizer whose file is that of another one after `change(contents)`."""
    contents = json.loads(tokenizer.to_json())
    change(contents)
    return bpe.LibraryTokenizer(json.dumps(contents))


def test_dropout_of_a_file_is_left_out(bpe_280):
    tokenizer = changed(bpe_280, lambda contents: contents["model"].update(dropout=0.5))
    assert tokenizer.encode(SAMPLE).tolist() == bpe_280.encode(SAMPLE).tolist()
    assert tokenizer.fingerprint == bpe_280.fingerprint


def test_a_byte_level_file_without_all_bytes_is_one_clear_line(bpe_280):
    """The library left out of a text what it had no token for, without a word."""

    def without(characters):
        def change(contents):
            for character in characters:
                del contents["model"]["vocab"][character]
            merges = contents["model"]["merges"]
            merges[:] = [pair for pair in merges if not set(characters) & set("".join(pair))]

        return change

    with pytest.raises(UsageError, match="no token for 2 of the 243 bytes of UTF-8 text"):
        changed(bpe_280, without("zq"))
    never = [c for c, byte in bpe.byte_of_character().items() if byte in b"\xc0\xf5\xff"]
    assert changed(bpe_280, without(never)).decode(bpe_280.encode("zq")) == "zq"

    def with_unknown(contents):
        without("zq")(contents)
        contents["model"]["unk_token"] = bpe.END_OF_TEXT

    assert len(changed(bpe_280, with_unknown).encode("zq")) == 2


def test_bytes_are_not_counted_by_ids_that_have_others_than_the_text(bpe_280):
    """A space before each text, and spaces that an added token takes in."""
    with_prefix = dict(add_prefix_space=True)
    prefixed = changed(
        bpe_280, lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(with_prefix)
    )
    token = dict(id=280, content="<sep>", single_word=False, normalized=False, special=False)
    token |= dict(lstrip=False, rstrip=False)
    plain = changed(bpe_280, lambda c: c["added_tokens"].append(token))
    stripping = changed(bpe_280, lambda c: c["added_tokens"].append(token | {"rstrip": True}))
    assert prefixed.byte_lengths() is None and stripping.byte_lengths() is None
    text = "return <sep>é   x"
    ids = plain.encode(text)
    assert plain.byte_lengths()[ids].sum() == len(text.encode()) and plain.decode(ids) == text
    for tokenizer, decoded in ((prefixed, " def naïve"), (stripping, "def naïve")):
        ids = tokenizer.encode("def naïve").tolist()
        assert tokenizer.decode(ids) == decoded
        assert tokenizer.decode_bytes([*ids, tokenizer.eot]) == decoded.encode()
        decoder = tokenizer.stream_decoder()
        assert "".join(map(decoder.feed, ids)) + decoder.finish() == decoded


@pytest.fixture(scope="module")
def greedy_bpe():
    """Merges whatever may be merged: each piece of splitting that occurs is one token."""
    letters = "".join(chr(c) for c in range(128)) + "\x85\xa0\u3000é漢"
    rng = np.random.default_rng(0)
    spaces = rng.choice(list(" \n\t\x1c\r'!a"), (4000, 6))
    others = rng.choice(list(letters), (4000, 4))
    return bpe.train_bpe(["".join(t) for t in (*spaces, *others)], 3000)


@settings(max_examples=300)
@given(st.lists(TRICKY, max_size=4))
def test_cutting_long_texts_does_not_change_their_ids(greedy_bpe, texts):
    whole = [greedy_bpe._inner.encode(t, add_special_tokens=False).ids for t in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_CHUNK", 3)
        patch.setattr(bpe, "_BATCH", 20)
        assert [greedy_bpe.encode(t).tolist() for t in texts] == whole
        documents = [("name", t.encode()) for t in texts]
        assert [ids.tolist() for ids in greedy_bpe.encode_documents(documents)] == whole


def test_long_texts_are_cut(bpe_280, monkeypatch):
    monkeypatch.setattr(bpe, "_CHUNK", 10)
    assert len(list(bpe_280._cut(SAMPLE))) > 50


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe", "words"])
def test_saved_and_loaded_it_is_the_same(kind, bpe_280, words, tmp_path):
    tokenizer = {
        "bytes": tokenizers.ByteTokenizer,
        "chars": lambda: tokenizers.CharTokenizer(SAMPLE + '"\\'),
        "bpe": lambda: bpe_280,
        "words": lambda: load_tokenizer(words),
    }[kind]()
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(again) is type(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.eot) == (tokenizer.vocab_size, tokenizer.eot)
    assert again.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_fingerprints_tell_tokenizers_apart(bpe_280, words):
    every = [
        tokenizers.ByteTokenizer(),
        tokenizers.CharTokenizer("ab"),
        tokenizers.CharTokenizer("abc"),
        bpe_280,
        load_tokenizer(words),
    ]
    assert len({t.fingerprint for t in every}) == len(every)


@given(TEXT)
def test_streamed_text_is_the_text_and_never_half_a_character(bpe_280, text):
    for tokenizer in (tokenizers.ByteTokenizer(), bpe_280):
        decoder, so_far = tokenizer.stream_decoder(), ""
        for i in tokenizer.encode(text):
            so_far += decoder.feed(i)
            assert text.startswith(so_far)
        assert so_far + decoder.finish() == text


def test_a_character_is_streamed_with_its_last_byte():
    decoder = tokenizers.ByteTokenizer().stream_decoder()
    assert [decoder.feed(b) for b in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert decoder.feed(0xE2) == "" and decoder.finish() == "\ufffd"


def test_a_file_of_the_users_own(words):
    tokenizer = load_tokenizer(words)
    assert (tokenizer.vocab_size, tokenizer.eot) == (6, 1)
    text = "hello wörld hello wörld hello"
    # Of the template only what begins a document; neither truncation nor padding.
    assert tokenizer.encode(text).tolist() == [3, 4, 3, 4, 3]
    assert next(tokenizer.encode_documents([("", text.encode())])).tolist() == [0, 3, 4, 3, 4, 3]
    assert tokenizer.decode([0, 3, 4, 1]) == "hello wörld"
    assert tokenizer.byte_lengths() is None  # the space before a word depends on what precedes it
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder.feed(i) for i in tokenizer.encode(text)) + decoder.finish() == text


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
def test_a_vocabulary_without_a_token_for_unknown_words_is_one_clear_line(kind):
    """The library raises a bare Exception at the first word that is not in it."""
    library = pytest.importorskip("tokenizers")
    words = {"the": 0, "fox": 1}
    inner = library.Tokenizer(getattr(library.models, kind)(words, unk_token="[UNK]"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer = bpe.LibraryTokenizer(inner.to_str())
    assert tokenizer.encode("the fox").tolist() == [0, 1]
    message = (
        r"the tokenizer cannot encode this text \(.*(unk|UNK).*needs a token for unknown words"
    )
    with pytest.raises(UsageError, match=message):
        tokenizer.encode("the quick fox")
    documents = [("first", b"the fox"), ("second", b"a quick fox")]
    with pytest.raises(UsageError, match=f"^config.data.tokenizer, for the text second: {message}"):
        list(tokenizer.encode_documents(documents))


def test_bytes_that_are_no_text_are_told_once(caplog, monkeypatch):
    """Text in another encoding was trained on without a word."""
    monkeypatch.setattr(tokenizers, "_STRIDE", 3)  # which cuts characters
    texts = ["Zürich, 東京".encode(), "Zürich, ü".encode("latin-1"), b"", b"plain", b"end \xe2\x82"]
    documents = [(str(i), text) for i, text in enumerate(texts)]
    tokenizer = tokenizers.ByteTokenizer()
    encoded = [bytes(ids.tolist()) for ids in tokenizer.encode_documents(documents)]
    assert encoded == texts
    (record,) = caplog.records
    assert record.message.startswith("4 bytes are not UTF-8 text, the first in 1: conf")
    caplog.clear()
    list(tokenizer.encode_documents(documents[:1]))
    assert not caplog.records


def test_bytes_written_as_characters_agree_with_the_library():
    library = pytest.importorskip("tokenizers")
    assert set(bpe.byte_of_character()) == set(library.pre_tokenizers.ByteLevel.alphabet())
    pieces = library.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é ~\x00")
    spelt = "".join(piece for piece, _ in pieces)
    assert bytes(bpe.byte_of_character()[c] for c in spelt) == "é ~\x00".encode()


@pytest.mark.parametrize("ids", [[257], [-1], [1, 2, 10**6]])
def test_ids_outside_the_vocabulary_are_refused(ids, bpe_280):
    for tokenizer in (tokenizers.ByteTokenizer(), tokenizers.CharTokenizer("ab")):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byte", "did you mean 'bytes'"),
        ("char", "did you mean 'chars'"),
        ("bpe", "as in bpe:8192"),
        ("bpe:", "as in bpe:8192"),
        ("bpe:many", "as in bpe:8192"),
        ("bpe:256", "from 257 to 1000000, as in bpe:8192"),
        ("bpe:1000001", "from 257 to 1000000"),
        ("bpe:4000000000", "from 257 to 1000000"),
        ("bpe:" + 5000 * "9", "from 257 to 1000000"),
        ("bpee:512", "did you mean 'bpe'"),
        ("no/such.json", "no such file"),
    ],
)
def test_a_wrong_tokenizer_is_one_clear_line(spec, message):
    with pytest.raises(UsageError, match=message) as error:
        tokenizers.parse(spec)
    assert f"config.data.tokenizer={spec!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_path_may_be_that_of_its_folder(words):
    assert tokenizers.parse(str(words)) == tokenizers.parse(str(words.parent)) == ("file", words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the tokenizer"),
        ("{", "is not valid JSON"),
        ("[]", "neither 'kind' nor 'model'"),
        ("{}", "neither 'kind' nor 'model'"),
        (json.dumps({"kind": "chart"}), "did you mean 'chars'"),
        (json.dumps({"kind": "chars"}), "is not a tokenizer"),
        (json.dumps({"kind": "chars", "characters": ""}), "at least one character"),
        (json.dumps({"model": {"type": "BPE"}}), "not a file of the tokenizers library"),
        (
            json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}),
            "vocabulary is empty",
        ),
    ],
)
def test_a_damaged_file_is_one_clear_line(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_text_that_is_not_utf8_is_one_clear_line(bpe_280):
    for tokenizer in (bpe_280, tokenizers.CharTokenizer("ab")):
        with pytest.raises(UsageError, match=r"byte 0xff at 1.*tokenizer=bytes"):
            tokenizer.encode(b"a\xffb")
        with pytest.raises(UsageError, match="surrogate"):
            tokenizer.encode("a\ud800")
