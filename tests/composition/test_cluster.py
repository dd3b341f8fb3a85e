"""Clusters of documents: found without labels, balanced, the same every time, stored whole."""

import numpy as np
import pytest
from refusals import refused

pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra studies)")
pytest.importorskip("k_means_constrained", reason="not installed (extra studies)")

from efx import main as main_lib
from efx.composition import CLUSTERS, documents_file
from efx.composition import clustering as lib
from efx.configs import common
from efx.data.subset import Subset

TOPICS = {
    "sea": "ship sailor harbour anchor storm captain deck wave island whale".split(),
    "farm": "barn plough wheat horse harvest tractor field seed cattle hay".split(),
    "code": "compile variable pointer function loop stack thread parser token syntax".split(),
}


def texts_of(count=30, length=40, seed=0):
    """[(topic, text)]: `count` texts of each topic, in a random order."""
    rng = np.random.default_rng(seed)
    pairs = [
        (topic, " ".join(rng.choice(vocabulary, length)))
        for topic, vocabulary in TOPICS.items()
        for _ in range(count)
    ]
    return [pairs[i] for i in rng.permutation(len(pairs))]


def settings(**changes):
    block = common.base().cluster
    block.update({"count": 3, **changes})
    return block


def fit(texts, seed=0, **changes):
    return lib.fit_clustering(texts, settings(**changes), seed=seed)


def test_topics_are_found_without_labels():
    pairs = texts_of()
    found, labels = fit([text for _, text in pairs])
    assert lib.purity(labels, [topic for topic, _ in pairs]) == 1.0
    assert np.bincount(labels).tolist() == [30, 30, 30]
    # A new text goes where its topic is.
    names = [pairs[labels.tolist().index(k)][0] for k in range(3)]
    new = {topic: f"the {words[3]} and the {words[5]}" for topic, words in TOPICS.items()}
    nearest = found.distances(new.values()).argmin(1)
    assert [names[j] for j in nearest] == list(new)


@pytest.mark.parametrize("count", [3, 7])
def test_clusters_have_equal_sizes(count):
    """One topic, and two topics with one three times as large as the other."""
    sea = [text for topic, text in texts_of(20) if topic == "sea"]
    farm = [text for topic, text in texts_of(20) if topic == "farm"]
    for texts in (sea, sea + farm[:7]):
        sizes = np.bincount(fit(texts, seed=1, count=count)[1], minlength=count)
        assert sizes.max() - sizes.min() <= 1


def test_one_cluster_and_random_clusters():
    topics, texts = zip(*texts_of(), strict=True)
    found, labels = fit(texts, count=1)
    assert not labels.any() and found.count == 1
    _, labels = fit(texts, method="random")
    assert np.bincount(labels).tolist() == [30, 30, 30]
    assert lib.purity(labels, topics) < 0.6
    assert (labels != fit(texts, method="random", seed=1)[1]).any()


def test_documents_beyond_those_fitted_on_go_to_the_nearest():
    topics, texts = zip(*texts_of(), strict=True)
    found, labels = fit(texts, fit_documents=40)
    assert len(labels) == 90 and lib.purity(labels, topics) > 0.95
    assert (labels == found.distances(texts).argmin(1)).mean() > 0.9


def test_a_clustering_is_a_function_of_texts_settings_and_seed(tmp_path):
    """Stored and loaded too."""
    texts = [text for _, text in texts_of()]
    first, labels = fit(texts, seed=3)
    again, same = fit(texts, seed=3)
    assert first.fingerprint == again.fingerprint and (labels == same).all()
    assert fit(texts, method="random", seed=4)[0].fingerprint != first.fingerprint
    first.save(tmp_path)
    loaded = lib.Clustering.load(tmp_path)
    assert loaded.fingerprint == first.fingerprint
    np.testing.assert_array_equal(loaded.distances(texts), first.distances(texts))


def test_embeddings_have_length_one_and_unknown_texts_are_at_the_origin():
    texts = [text for _, text in texts_of()]
    found, _ = fit(texts)
    embedded = found.embed([texts[0], "", "zebra 12 of the"])
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), [1, 0, 0], atol=1e-6)
    expected = np.square(found.centres).sum(1)
    np.testing.assert_allclose(found.distances([""])[0], expected, rtol=1e-5)


def test_numbers_are_one_word_and_stop_words_are_none():
    words = lib.words("The Ship had 3 masts, 17 sails and x_1 = 0xff2")
    number = words[2]
    assert words == ["ship", "masts", number, "sails", "x_1", number]


def test_settings_that_do_not_fit_the_documents_are_refused():
    texts = [text for _, text in texts_of(3)]
    refused(lambda: fit(texts, count=10), "config.cluster.count=10")
    refused(lambda: fit(texts, fit_documents=2), "config.cluster.fit_documents=2")
    for others in (["apple", "pear", "plum", "quince"], ["fruit pear", "fruit", "fruit plum"]):
        refused(lambda texts=others: fit(texts), "config.cluster.min_documents=2")


def test_damage_is_noticed(tmp_path):
    refused(lambda: lib.Clustering.load(tmp_path), str(tmp_path))
    fit([text for _, text in texts_of(10)])[0].save(tmp_path)
    arrays = bytearray((tmp_path / lib.ARRAYS).read_bytes())
    arrays[-5] ^= 1
    for data in (arrays, arrays[:100]):
        (tmp_path / lib.ARRAYS).write_bytes(data)
        refused(lambda: lib.Clustering.load(tmp_path), "damaged")


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """Two folders of texts as a mixture."""
    for topic, text in texts_of(12):
        folder = tmp_path / ("prose" if topic != "code" else "code")
        folder.mkdir(exist_ok=True)
        (folder / f"{len(list(folder.iterdir()))}.txt").write_text(text)
    return f"mix:text:{tmp_path}/prose,text:{tmp_path}/code"


def command(root, source, workdir, **changes):
    changes = {"cluster.count": 3, "data.source": source, "data.max_bytes": 0, **changes}
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    config = f"--config={root}/configs/cbtm.py:smoke"
    return main_lib.main(["efx", config, "--mode=cluster", f"--workdir={workdir}", *overrides])


def contents(workdir):
    paths = (workdir / CLUSTERS).iterdir()
    return {path.name: path.read_bytes() for path in paths if path.suffix != ".png"}


def test_the_command_writes_the_same_clustering_again(root, source, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert command(root, source, workdir) == 0
    about = lib.Clustering.load(workdir / CLUSTERS).about
    members = [Subset.load(documents_file(workdir, j)).digests for j in range(3)]
    sizes = list(map(len, members))
    assert max(sizes) - min(sizes) <= 1 and len(set.union(*map(set, members))) == sum(sizes)
    assert [row["documents"] for row in about["clusters"]] == sizes
    assert about["purity"] > about["purity_of_one_cluster"]
    before = contents(workdir)
    assert main_lib.main(["efx", f"--workdir={workdir}"]) == 2  # training
    assert not (workdir / "checkpoints").exists()
    assert command(root, source, tmp_path / "other") == 0
    assert contents(tmp_path / "other") == before
    # Another clustering, and other documents.
    capsys.readouterr()
    assert command(root, source, workdir, **{"cluster.count": 2}) == 2
    assert "config.cluster.count" in capsys.readouterr().err
    (tmp_path / "prose/0.txt").write_text("changed " * 40)
    assert command(root, source, workdir) == 2
    assert str(workdir) in capsys.readouterr().err
    assert contents(workdir) == before


def test_corpora_that_cannot_be_clustered_are_refused(root, source, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("short text")
    for given, changes, name in (
        (source, {"cluster.count": 99}, "config.cluster.count=99"),
        (source, {"data.split": "tail"}, "config.data.split='tail'"),
        (f"text:{tmp_path}/one.txt", {}, "1 different documents"),
        ("tokens:nowhere", {"data.document_bytes": 0}, "config.data.source"),
    ):
        assert command(root, given, tmp_path / "run", **changes) == 2
        error = capsys.readouterr().err
        assert name in error and error.count("\n") == 1
        assert not (tmp_path / "run").exists()
