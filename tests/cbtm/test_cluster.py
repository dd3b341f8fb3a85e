"""Clusters of documents: found without labels, balanced, the same every time, stored safely."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra compose)")
pytest.importorskip("k_means_constrained", reason="not installed (extra compose)")

from efx import main as main_lib
from efx.cbtm import CLUSTERS, cluster, documents_file
from efx.cbtm import clustering as lib
from efx.configs import common
from efx.data.subset import Subset
from efx.errors import UsageError

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


def test_topics_are_found_without_labels():
    pairs = texts_of()
    found, labels = lib.fit_clustering([text for _, text in pairs], settings(), seed=0)
    assert lib.purity(labels, [topic for topic, _ in pairs]) == 1.0
    assert np.bincount(labels).tolist() == [30, 30, 30]
    # A text that was not there, and the beginning of one, go where their topic is.
    names = [pairs[labels.tolist().index(k)][0] for k in range(3)]
    new = {topic: f"the {words[3]} and the {words[5]}" for topic, words in TOPICS.items()}
    nearest = found.distances(new.values()).argmin(1)
    assert [names[j] for j in nearest] == list(new)


@pytest.mark.parametrize("count, sizes", [(2, [10, 10]), (3, [6, 7, 7]), (4, [5] * 4), (7, None)])
def test_clusters_are_balanced(count, sizes):
    texts = [text for topic, text in texts_of(20) if topic == "sea"]
    _, labels = lib.fit_clustering(texts, settings(count=count), seed=1)
    found = sorted(np.bincount(labels, minlength=count).tolist())
    assert found == (sizes or found) and max(found) - min(found) <= 1


def test_unbalanced_topics_are_cut_to_one_size():
    pairs = [p for p in texts_of(24) if p[0] != "code"]
    pairs = [p for i, p in enumerate(pairs) if p[0] == "sea" or i % 3 == 0]
    _, labels = lib.fit_clustering([text for _, text in pairs], settings(count=2), seed=0)
    assert abs(np.diff(np.bincount(labels))[0]) <= 1


def test_one_cluster_and_random_clusters():
    texts = [text for _, text in texts_of()]
    found, labels = lib.fit_clustering(texts, settings(count=1), seed=0)
    assert not labels.any() and found.count == 1
    found, labels = lib.fit_clustering(texts, settings(method="random"), seed=0)
    assert np.bincount(labels).tolist() == [30, 30, 30]
    assert lib.purity(labels, [topic for topic, _ in texts_of()]) < 0.6
    other = lib.fit_clustering(texts, settings(method="random"), seed=1)[1]
    assert (labels != other).any()


def test_documents_beyond_those_fitted_on_go_to_the_nearest():
    pairs = texts_of()
    texts = [text for _, text in pairs]
    found, labels = lib.fit_clustering(texts, settings(fit_documents=40), seed=0)
    assert len(labels) == 90
    assert lib.purity(labels, [topic for topic, _ in pairs]) > 0.95
    assert (labels == found.distances(texts).argmin(1)).mean() > 0.9


def test_the_same_every_time_and_after_saving(tmp_path):
    texts = [text for _, text in texts_of()]
    first, labels = lib.fit_clustering(texts, settings(), seed=3)
    again, same = lib.fit_clustering(texts, settings(), seed=3)
    assert first.fingerprint == again.fingerprint and (labels == same).all()
    other, _ = lib.fit_clustering(texts, settings(method="random"), seed=4)
    assert other.fingerprint != first.fingerprint
    first.save(tmp_path)
    loaded = lib.Clustering.load(tmp_path)
    assert loaded.fingerprint == first.fingerprint
    np.testing.assert_array_equal(loaded.distances(texts), first.distances(texts))
    assert not list(tmp_path.glob("*.pkl")) and len(list(tmp_path.iterdir())) == 2


def test_embeddings_have_length_one_and_unknown_texts_are_at_the_origin():
    texts = [text for _, text in texts_of()]
    found, _ = lib.fit_clustering(texts, settings(), seed=0)
    embedded = found.embed([texts[0], "", "zebra 12 of the"])
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), [1, 0, 0], atol=1e-6)
    expected = np.square(found.centres).sum(1)
    np.testing.assert_allclose(found.distances([""])[0], expected, rtol=1e-5)
    by_hand = np.square(embedded[:1] - found.centres).sum(1)
    np.testing.assert_allclose(found.distances(texts[:1])[0], by_hand, atol=1e-5)


def test_words():
    assert lib.words("The Ship had 3 masts, 17 sails and x_1 = 0xff2") == [
        "ship", "masts", lib._NUMBER, "sails", "x_1", lib._NUMBER,
    ]  # fmt: skip


def test_purity_by_hand():
    assert lib.purity([0, 0, 0, 1, 1], ["a", "a", "b", "b", "b"]) == 0.8


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(count=0), "config.cluster.count=0"),
        (dict(count=91), "config.cluster.count=91: must be at most 90 different"),
        (dict(fit_documents=2), "config.cluster.fit_documents=2"),
        (dict(method="randm"), "did you mean 'random'"),
        (dict(seed_fraction=1.0), "config.cluster.seed_fraction=1.0"),
        (dict(dimensions=0), "config.cluster.dimensions=0"),
        (dict(features=1), "config.cluster.features=1: must be at least 2"),
    ],
)
def test_bad_settings_are_one_line(changes, words):
    with pytest.raises(UsageError, match=words) as error:
        lib.fit_clustering([text for _, text in texts_of()], settings(**changes), seed=0)
    assert "\n" not in str(error.value)


def test_documents_without_a_word_in_common():
    with pytest.raises(UsageError, match="config.cluster.min_documents=2: no word occurs"):
        lib.fit_clustering(["apple", "pear", "plum", "quince"], settings(), seed=0)
    with pytest.raises(UsageError, match="config.cluster.min_documents=2: only one word occurs"):
        lib.fit_clustering(["fruit pear", "fruit", "fruit plum", "fruit"], settings(), seed=0)


def test_damage_is_noticed(tmp_path):
    found, _ = lib.fit_clustering([text for _, text in texts_of()], settings(), seed=0)
    found.save(tmp_path)
    path = tmp_path / lib.ABOUT
    about = json.loads(path.read_text())
    about["vocabulary"][0], about["vocabulary"][1] = about["vocabulary"][1::-1]
    path.write_text(json.dumps(about))
    with pytest.raises(UsageError, match="is damaged"):
        lib.Clustering.load(tmp_path)
    found.save(tmp_path)
    arrays = bytearray((tmp_path / lib.ARRAYS).read_bytes())
    arrays[-5] ^= 1
    (tmp_path / lib.ARRAYS).write_bytes(arrays)
    with pytest.raises(UsageError, match="is damaged"):
        lib.Clustering.load(tmp_path)
    (tmp_path / lib.ARRAYS).write_bytes(arrays[:100])
    with pytest.raises(UsageError, match="is damaged"):
        lib.Clustering.load(tmp_path)
    with pytest.raises(UsageError, match="has no clustering"):
        lib.Clustering.load(tmp_path / "nowhere")


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


def test_the_command_writes_a_clustering_and_repeats_itself(root, source, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert command(root, source, workdir) == 0
    out = capsys.readouterr().out
    folder = workdir / CLUSTERS
    about = lib.Clustering.load(folder).about
    members = [Subset.load(documents_file(workdir, j)).digests for j in range(3)]
    sizes = list(map(len, members))
    assert max(sizes) - min(sizes) <= 1 and len(set.union(*map(set, members))) == sum(sizes)
    assert [row["documents"] for row in about["clusters"]] == sizes
    assert len(list(folder.glob("cluster_*.json"))) == 3
    assert about["purity"] > about["purity_of_one_cluster"]
    assert f"purity {about['purity']:.3f}" in out and "balance" in out
    assert (folder / "clusters.png").read_bytes()[:4] == b"\x89PNG"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert command(root, source, workdir) == 0  # done already
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert main_lib.main(["efx", f"--workdir={workdir}"]) == 2  # which would train
    assert "has a clustering" in capsys.readouterr().err
    assert not (workdir / "checkpoints").exists()
    assert command(root, source, tmp_path / "other") == 0
    others = {p.name: p.read_bytes() for p in (tmp_path / "other" / CLUSTERS).iterdir()}
    assert {k: v for k, v in others.items() if k != "clusters.png"} == {
        k: v for k, v in before.items() if k != "clusters.png"
    }


def test_bad_commands_write_nothing(root, source, tmp_path, capsys):
    workdir = tmp_path / "run"

    def refuse(words, **changes):
        assert command(root, source, workdir, **changes) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        assert not (workdir / CLUSTERS).exists()

    refuse("config.cluster.count=99: must be at most", **{"cluster.count": 99})
    refuse("config.cluster.count=0", **{"cluster.count": 0})
    refuse("config.data.split='tail'", **{"data.split": "tail"})
    assert not workdir.exists()
    assert command(root, source, workdir) == 0
    assert command(root, source, workdir, **{"cluster.count": 2}) == 2
    assert "config.cluster.count: 3 in the run, 2 here" in capsys.readouterr().err
    (tmp_path / "prose/0.txt").write_text("changed " * 40)
    assert command(root, source, workdir) == 2
    assert "the files may have changed" in capsys.readouterr().err


def test_corpora_that_cannot_be_clustered(root, tmp_path, capsys):
    one = tmp_path / "one.txt"
    one.write_text("short text")
    assert command(root, f"text:{one}", tmp_path / "run") == 2
    assert "has 1 different documents" in capsys.readouterr().err
    assert command(root, "tokens:nowhere", tmp_path / "run", **{"data.document_bytes": 0}) == 2
    assert "clustering needs a source of text" in capsys.readouterr().err


def test_the_table_by_hand():
    facts = {
        "clusters": [
            {"documents": 3, "bytes": 30, "held_out": 1, "parts": {"a": 3, "b": 0}},
            {"documents": 4, "bytes": 50, "held_out": 0, "parts": {"a": 1, "b": 3}},
        ],
        "balance": 0.75,
        "purity": 6 / 7,
        "purity_of_one_cluster": 4 / 7,
    }
    text = cluster.markdown(facts, "balanced")
    assert "| 1 | 4 | 50 | 0 | 1 | 3 |" in text
    assert "balance 0.750" in text and "purity 0.857 (all in one cluster: 0.571)" in text


def test_several_processes_are_refused(monkeypatch, tmp_path):
    """Each would write the same files."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UsageError, match="--mode=cluster runs in one process"):
        cluster.run(common.base(), tmp_path / "x")
    assert not (tmp_path / "x").exists()
