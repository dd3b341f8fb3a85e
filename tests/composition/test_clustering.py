"""Clusters of documents: found without labels, balanced, reproducible, refused where impossible."""

import dataclasses

import numpy as np
import pytest
from refusals import refused

pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra studies)")
pytest.importorskip("k_means_constrained", reason="not installed (extra studies)")

from efx import main
from efx.composition import CLUSTERS, cluster, documents_file
from efx.composition import clustering as lib
from efx.config.run import ClusterConfig, DataConfig
from efx.data.held_out import Subset

TOPICS = {
    "sea": "ship sailor harbour anchor storm captain deck wave island whale".split(),
    "farm": "barn plough wheat horse harvest tractor field seed cattle hay".split(),
    "code": "compile variable pointer function loop stack thread parser token syntax".split(),
}


def texts_of(count=30, length=40):
    """Return (topics, texts): `count` texts of each topic, in a random order."""
    rng = np.random.default_rng(0)
    pairs = [
        (topic, " ".join(rng.choice(vocabulary, length)))
        for topic, vocabulary in TOPICS.items()
        for _ in range(count)
    ]
    topics, texts = zip(*(pairs[i] for i in rng.permutation(len(pairs))), strict=True)
    return np.array(topics), list(texts)


def fit(texts, seed=0, **changes):
    settings = dataclasses.replace(ClusterConfig(), **{"count": 3, **changes})
    return lib.fit_clustering(texts, settings, seed=seed)


def purity(topics, labels):
    """Return the fraction of texts that are of their cluster's most frequent topic."""
    counts = [np.unique(topics[labels == j], return_counts=True)[1].max() for j in set(labels)]
    return sum(counts) / len(labels)


def test_topics_are_found_and_new_texts_join_theirs(monkeypatch):
    topics, texts = texts_of()
    found, labels = fit(texts)
    assert purity(topics, labels) == 1
    new = {topic: f"the {words[3]} and the {words[5]}" for topic, words in TOPICS.items()}
    for topic, nearest in zip(new, found.distances(new.values()).argmin(1), strict=True):
        assert set(topics[labels == nearest]) == {topic}
    # Texts beyond the fitted ones join the nearest cluster.
    monkeypatch.setattr(lib, "FIT_DOCUMENTS", 40)
    _, labels = fit(texts)
    assert len(labels) == 90 and purity(topics, labels) > 0.95
    monkeypatch.setattr(lib, "FIT_DOCUMENTS", 2)
    refused(lambda: fit(texts), "config.cluster.count=3")


@pytest.mark.parametrize("changes", [{"count": 7}, {"count": 1}, {"method": "random"}])
def test_clusters_have_equal_sizes(changes):
    """Also where topics have different sizes."""
    topics, texts = texts_of()
    texts = [text for topic, text in zip(topics, texts, strict=True) if topic == "sea"]
    texts += texts_of(3)[1]
    _, labels = fit(texts, seed=1, **changes)
    sizes = np.bincount(labels, minlength=changes.get("count", 3))
    assert sizes.max() - sizes.min() <= 1 and sizes.sum() == len(texts)


def test_random_clusters_ignore_topics():
    topics, texts = texts_of()
    _, labels = fit(texts, method="random")
    assert purity(topics, labels) < 0.6
    assert (labels != fit(texts, method="random", seed=1)[1]).any()


def test_a_clustering_is_reproducible_and_stored_whole(tmp_path):
    texts = texts_of(10)[1]
    (first, labels), (again, same) = fit(texts, seed=3), fit(texts, seed=3)
    assert (labels == same).all() and (first.centres == again.centres).all()
    first.save(tmp_path)
    loaded = lib.Clustering.load(tmp_path)
    np.testing.assert_array_equal(loaded.distances(texts), first.distances(texts))
    (tmp_path / lib.ARRAYS).write_bytes((tmp_path / lib.ARRAYS).read_bytes()[:100])
    refused(lambda: lib.Clustering.load(tmp_path), str(tmp_path), "--mode=cluster")


def test_texts_have_length_one_and_unknown_words_length_zero():
    texts = texts_of(2)[1]
    found, labels = fit(texts, count=len(texts))  # so each text is a centre
    np.testing.assert_allclose(np.linalg.norm(found.centres, axis=1), 1, atol=1e-6)
    distances = found.distances([*texts, "the zebra"])
    np.testing.assert_allclose(distances[np.arange(len(texts)), labels], 0, atol=1e-5)
    np.testing.assert_allclose(distances[-1], 1, atol=1e-5)


def test_all_numbers_are_one_word():
    words = lib.words("The Ship had 3 masts, 17 sails and x_1 = 0xff2")
    assert words == ["ship", "masts", words[2], "sails", "x_1", words[2]]


@pytest.mark.parametrize("texts, changes, key", [
    (texts_of(3)[1], {"count": 10}, "config.cluster.count=10"),
    (["apple", "pear", "plum", "quince"], {}, "config.data.source"),
    (["fruit pear", "fruit", "fruit plum"], {}, "config.data.source"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_documents_are_refused(texts, changes, key):
    refused(lambda: fit(texts, **changes), key)


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """A mixture of two directories of texts."""
    for i, (topic, text) in enumerate(zip(*texts_of(12), strict=True)):
        folder = tmp_path / ("code" if topic == "code" else "prose")
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text(text)
    return f"mix:text:{tmp_path}/prose,text:{tmp_path}/code"


def command(root, source, workdir, **changes):
    changes = {"cluster.count": 3, "data.source": source, "data.max_bytes": 0, **changes}
    settings = [f"--config.{key}={value}" for key, value in changes.items()]
    config = f"--config={root}/configs/cbtm.py:smoke"
    return main.main(["efx", config, "--mode=cluster", f"--workdir={workdir}", *settings])


def contents(workdir):
    return {path.name: path.read_bytes() for path in (workdir / CLUSTERS).iterdir()}


def test_a_document_that_held_out_text_is_cut_out_of_is_clustered(tmp_path):
    text = "".join(f"line {i}\n" for i in range(40))
    for name, content in (("all", text), ("part", text[100:200])):
        (tmp_path / f"{name}.txt").write_text(content)
    sources = {"source": f"text:{tmp_path}/all.txt", "eval_source": f"text:{tmp_path}/part.txt"}
    train, heldout, _ = cluster.split_documents(
        DataConfig(**sources, cache_dir=str(tmp_path / "cache"))
    )
    assert [document.text for document in train] == [text[:100], text[200:]]
    assert [document.text for document in heldout] == [text[100:200]]


def test_the_command_writes_the_same_clusters_again_and_keeps_them(root, source, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert command(root, source, workdir) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()[:5]
    members = [Subset.load(documents_file(workdir, j)).digests for j in range(3)]
    assert [int(row.split("|")[2]) for row in rows] == [len(digests) for digests in members]
    assert len(set.union(*map(set, members))) == sum(map(len, members))
    assert f"text:{tmp_path}/prose" in header
    before = contents(workdir)
    assert command(root, source, workdir) == 0 and contents(workdir) == before
    assert command(root, source, tmp_path / "other") == 0 and contents(tmp_path / "other") == before
    assert main.main(["efx", f"--workdir={workdir}"]) == 2  # no training beside the clusters
    capsys.readouterr()
    assert command(root, source, workdir, **{"cluster.count": 2}) == 2
    assert "config.cluster" in capsys.readouterr().err
    next((tmp_path / "prose").iterdir()).write_text("changed " * 40)
    assert command(root, source, workdir) == 2
    assert str(workdir) in capsys.readouterr().err
    assert contents(workdir) == before and not (workdir / "checkpoints").exists()


def test_corpora_that_cannot_be_clustered_are_refused(root, source, tmp_path, capsys):
    for given, changes, key in (
        (source, {"cluster.count": 99}, "config.cluster.count=99"),
        (source, {"data.split": "tail"}, "config.data.split='tail'"),
        ("tokens:nowhere", {"data.document_bytes": 0}, "config.data.source"),
    ):
        assert command(root, given, tmp_path / "run", **changes) == 2
        error = capsys.readouterr().err
        assert key in error and error.count("\n") == 1 and not (tmp_path / "run").exists()
