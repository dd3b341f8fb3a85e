"""Mixtures, pieces of documents, and the documents of one cluster."""

import json

import pytest
from data_helpers import make_config, open_data, usage_error, write_folder

from efx.data import clusters, sources, split
from efx.data.sources import document_digest
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
    assert {d.part for d in mixed} == set(parts) and mixed[0].part == parts[0]


def test_max_bytes_is_of_each_part(two_folders, tmp_path):
    for part in two_folders.removeprefix("mix:").split(","):
        of = [d for d in documents(two_folders, tmp_path, max_bytes=50) if d.part == part]
        assert sum(len(d.data) for d in of) == 50


def test_a_mixture_with_the_language_reference_has_it_once(tmp_path):
    mixed = documents("mix:stdlib,pydoc", tmp_path)
    assert any("pydoc_data" in d.name for d in documents("stdlib", tmp_path))
    assert not any("pydoc_data" in d.name for d in mixed)
    text = b"A class definition defines a class object"
    assert {d.part for d in mixed if text in d.data} == {"pydoc"}
    assert {d.part for d in mixed} == {"stdlib", "pydoc"}


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
        ("mix:", ["should read mix:A,B"]),
        ("mix:stdlib,tokens:x", ["'tokens:x' cannot be a part"]),
        ("mix:stdlib,nowhere:x", ["'nowhere:x' is of an unknown kind"]),
        ("pydoc:x", ["should read pydoc"]),
    ],
)
def test_bad_mixtures(tmp_path, source, words):
    config = make_config(source, tmp_path, split="documents")
    usage_error(*words, config_data=config)


def test_bad_settings(two_folders, tmp_path):
    def refuse(*words, source=two_folders, **changes):
        usage_error(*words, config_data=make_config(source, tmp_path, **changes))

    refuse("config.data.split='tail'", "a mixture needs config.data.split=documents")
    refuse("config.data.cluster=0 needs config.data.clusters", split="documents", cluster=0)
    refuse("config.data.cluster=-2", split="documents", cluster=-2)
    refuse("config.data.document_bytes=-1", split="documents", document_bytes=-1)
    refuse("config.data.document_bytes=8", split="documents", document_bytes=8)
    refuse("holds no clustering", split="documents", cluster=0, clusters=str(tmp_path))
    refuse("holds tokens", source="tokens:x", document_bytes=64)


def clustered(two_folders, tmp_path, count=2):
    """(folder of a clustering by the first byte, its settings)."""
    settings = dict(split="documents", seq_len=4, batch_size=2)
    config = make_config(two_folders, tmp_path, **settings)
    source = sources.open_source(config, tmp_path / "cache")
    pieces = split.split_documents(source, "documents", config.eval_fraction)
    found = {
        document_digest(data).hex(): int(data[:1].isdigit())
        for part, _, data in pieces
        if part == "train"
    }
    folder = tmp_path / "clusters"
    folder.mkdir()
    key = clusters.corpus_key({"source": source.identity()}, config)
    written = clusters.Documents(folder, "fingerprint", key, count, found)
    (folder / clusters.FILE).write_text(written.to_json())
    return folder, settings | {"clusters": str(folder)}


def text_of(data, part):
    stream = data._streams[part]
    return data.tokenizer.decode(stream.windows([0], len(stream))[0])


def test_a_cluster_is_trained_on_alone_and_held_out_text_is_the_same(two_folders, tmp_path):
    _, settings = clustered(two_folders, tmp_path)
    whole, letters, digits = (
        open_data(make_config(two_folders, tmp_path, **settings, cluster=j)) for j in (-1, 0, 1)
    )
    assert letters.train_tokens + digits.train_tokens + 1 == whole.train_tokens  # one divider
    assert not any(c.isdigit() for c in text_of(letters, "train"))
    assert not any(c.isalpha() for c in text_of(digits, "train"))
    assert text_of(letters, "eval") == text_of(digits, "eval") == text_of(whole, "eval")
    assert len({data.fingerprint for data in (whole, letters, digits)}) == 3
    assert letters.members.origin == {"clustering": "fingerprint", "cluster": 0}
    assert whole.members is None


def test_a_clustering_of_other_documents_or_a_damaged_one(two_folders, tmp_path):
    folder, settings = clustered(two_folders, tmp_path)

    def refuse(*words, **changes):
        config = make_config(two_folders, tmp_path, **settings | changes)
        usage_error(*words, config_data=config)

    refuse("config.data.cluster=2", "has 2 clusters, from 0", cluster=2)
    refuse("a clustering of other documents", cluster=0, eval_fraction=0.4)
    refuse("a clustering of other documents", cluster=0, document_bytes=32)
    path = folder / clusters.FILE
    stored = json.loads(path.read_text())
    first = next(iter(stored["clusters"]))
    stored["clusters"][first] = 1 - stored["clusters"][first]
    path.write_text(json.dumps(stored))
    refuse("its checksum differs", cluster=0)
    path.write_text("{")
    refuse("documents.json is damaged", cluster=0)
    with pytest.raises(UsageError, match="damaged"):
        path.write_text("[]")
        clusters.Documents.load(folder)
