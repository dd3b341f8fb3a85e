"""Mixtures, pieces of documents, and a part of the training documents that a file lists."""

import json
import pathlib

import numpy as np
import pytest
from data_helpers import make_config, open_data, split_documents, usage_error, write_folder

from efx.data import sources
from efx.data.sources import document_digest
from efx.data.subset import Subset
from efx.errors import UsageError


def documents(source, tmp_path, **changes):
    config = make_config(source, tmp_path, **changes)
    return list(sources.open_source(config, tmp_path / "cache").documents())


@pytest.fixture
def two_folders(tmp_path):
    """A mixture of a folder of letters and a folder of digits."""
    write_folder(tmp_path)
    digits = tmp_path / "digits"
    digits.mkdir()
    for i in range(10):
        (digits / f"{i}.txt").write_text(f"{i} " * (8 + i))
    return f"mix:text:{tmp_path}/texts,text:{digits}"


def test_a_mixture_is_the_documents_of_its_parts(two_folders, tmp_path):
    mixed = documents(two_folders, tmp_path)
    parts = two_folders.removeprefix("mix:").split(",")
    assert [(d.name, d.data) for d in mixed] == [
        (d.name, d.data) for part in parts for d in documents(part, tmp_path)
    ]
    assert {d.component for d in mixed} == set(parts) and mixed[0].component == parts[0]


def test_max_bytes_is_of_each_part(two_folders, tmp_path):
    for part in two_folders.removeprefix("mix:").split(","):
        of = [d for d in documents(two_folders, tmp_path, max_bytes=50) if d.component == part]
        assert sum(len(d.data) for d in of) == 50


def test_a_mixture_with_the_language_reference_has_it_once(tmp_path):
    mixed = documents("mix:stdlib,pydoc", tmp_path)
    assert any("pydoc_data" in d.name for d in documents("stdlib", tmp_path))
    assert not any("pydoc_data" in d.name for d in mixed)
    text = b"A class definition defines a class object"
    assert {d.component for d in mixed if text in d.data} == {"pydoc"}
    assert {d.component for d in mixed} == {"stdlib", "pydoc"}


def test_pieces_are_the_document(tmp_path):
    texts = ["line of text\n" * 40, "é" * 70, "x" * 16, "y" * 17]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    found = documents(f"text:{tmp_path}/*.txt", tmp_path, document_bytes=64)
    assert max(len(d.data) for d in found) <= 64
    assert b"".join(d.data for d in found).decode() == "".join(texts)
    for piece in found:
        piece.data.decode()  # no character is cut
    lines = [d for d in found if d.name.endswith("0.txt") or "0.txt from" in d.name]
    assert len(lines) > 1 and all(d.data.endswith(b"\n") for d in lines)
    assert documents(f"text:{tmp_path}/2.txt", tmp_path, document_bytes=16)[0].data == b"x" * 16


@pytest.mark.parametrize(
    "source, words",
    [
        ("mix:stdlib", ["two or more"]),
        ("mix:stdlib,stdlib", ["different parts"]),
        ("mix:", ["expected mix:A,B"]),
        ("mix:stdlib,tokens:x", ["'tokens:x' cannot be part"]),
        ("mix:stdlib,nowhere:x", ["'nowhere:x': unknown kind"]),
        ("pydoc:x", ["expected pydoc"]),
    ],
)
def test_bad_mixtures(tmp_path, source, words):
    config = make_config(source, tmp_path, split="documents")
    usage_error(*words, config_data=config)


def test_bad_settings(two_folders, tmp_path):
    def refuse(*words, source=two_folders, **changes):
        usage_error(*words, config_data=make_config(source, tmp_path, **changes))

    refuse("config.data.split='tail'", "a mixture needs config.data.split=documents")
    refuse("config.data.document_bytes=-1", split="documents", document_bytes=-1)
    refuse("config.data.document_bytes=8", split="documents", document_bytes=8)
    refuse("there is no such file", split="documents", subset=str(tmp_path))
    refuse("config.data.subset='x': needs text", source="tokens:x", subset="x", split="documents")
    refuse("config.data.subset needs", source=f"text:{tmp_path}/texts", subset="x")
    refuse("has only tokens", source="tokens:x", document_bytes=64)


SETTINGS = dict(split="documents", seq_len=4, batch_size=2)


def by_first_byte(two_folders, tmp_path):
    """[file that lists the training documents of letters, of digits]."""
    config = make_config(two_folders, tmp_path, **SETTINGS)
    source = sources.open_source(config, tmp_path / "cache")
    pieces = split_documents(source, "documents", config.eval_fraction)
    digests = [[], []]
    for part, _, data in pieces:
        if part == "train":
            digests[data[:1].isdigit()].append(document_digest(data).hex())
    for i in range(2):
        (tmp_path / f"{i}.json").write_text(Subset(digests[i]).to_json())
    return [str(tmp_path / f"{i}.json") for i in range(2)]


def text_of(data, part):
    stream = data._streams[part]
    return data.tokenizer.decode(stream.windows([0], len(stream))[0])


def test_a_subset_is_trained_on_alone_and_held_out_text_is_the_same(two_folders, tmp_path):
    whole, letters, digits = (
        open_data(make_config(two_folders, tmp_path, **SETTINGS, subset=path))
        for path in ("", *by_first_byte(two_folders, tmp_path))
    )
    assert letters.train_tokens + digits.train_tokens + 1 == whole.train_tokens  # one divider
    assert not any(c.isdigit() for c in text_of(letters, "train"))
    assert not any(c.isalpha() for c in text_of(digits, "train"))
    assert text_of(letters, "eval") == text_of(digits, "eval") == text_of(whole, "eval")
    assert len({data.fingerprint for data in (whole, letters, digits)}) == 3
    assert letters.subset == Subset.load(tmp_path / "0.json").key != digits.subset
    assert whole.subset is None


def test_a_list_of_other_documents_or_a_damaged_one(two_folders, tmp_path):
    path, _ = by_first_byte(two_folders, tmp_path)

    def refuse(*words, **changes):
        config = make_config(two_folders, tmp_path, **SETTINGS, subset=path, **changes)
        usage_error(*words, config_data=config)

    refuse("are not training documents here", eval_fraction=0.4)
    refuse("are not training documents here", document_bytes=32)
    text = pathlib.Path(path).read_text()
    stored = json.loads(text)
    for damaged in (json.dumps(stored | {"documents": stored["documents"][1:]}), "{", "[]"):
        pathlib.Path(path).write_text(damaged)
        refuse("0.json' is damaged")
    with pytest.raises(UsageError, match="damaged"):
        Subset.load(path)


@pytest.mark.parametrize("packing", [False, True])
def test_places_of_what_is_scored(two_folders, tmp_path, packing):
    """Every target lies where it is said to be, in each batch, also where only some are taken."""
    config = make_config(two_folders, tmp_path, **SETTINGS, packing=packing)
    data, places = open_data(config), []
    stream = [*data.tokens("eval", 0, data.eval_tokens), data.tokenizer.eot]
    for most in (0, 2):
        batches = data.eval_batches(3, most)
        for batch, places_BT in zip(batches, batches.target_positions(), strict=True):
            scored = batch["weights"] > 0
            np.testing.assert_array_equal(places_BT >= 0, scored)
            assert [stream[i] for i in places_BT[scored]] == batch["targets"][scored].tolist()
            places += [] if most else places_BT[scored].tolist()
    first = 0 if packing else 1
    assert sorted(places) == list(range(first, data.eval_tokens + packing))
    for start, stop in data.documents("eval"):
        assert data.tokenizer.eot not in data.tokens("eval", start, stop)
