"""cBTM: experts that are trained, their evaluation, sampling, and experts that do not belong."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from refusals import refused
from run_files import edit_record
from study_helpers import make_runs_here

pytest.importorskip("pandas", reason="the extra `studies` is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra studies)")
pytest.importorskip("k_means_constrained", reason="not installed (extra studies)")

import pandas as pd

import efx.data
from efx import api, run_dir
from efx import main as main_lib
from efx.checkpoint import fingerprint
from efx.composition import cbtm, documents_file, evaluation
from efx.composition.ensemble import Ensemble, log_weights
from efx.config.load import config_of_run, to_config
from efx.configs import cbtm as cbtm_config
from efx.configs import common
from efx.data.held_out import Subset
from efx.train import inference

CONFIG = """
from efx.configs import cbtm, common

def get_config(arg=""):
    return common.apply(cbtm.get_config("smoke"), {settings})
"""
TOPICS = {
    "sea": "ship sailor harbour anchor storm captain deck wave island whale".split(),
    "code": "compile variable pointer function loop stack thread parser token syntax".split(),
}
TINY = {
    "steps": 24,
    "data.document_bytes": 0,
    "data.eval_fraction": 0.15,
    "model.depth": 1,
    "model.width": 16,
    "data.seq_len": 64,
    "cluster.seed_fraction": 0.5,
    "ensemble.every": 16,
    "evaluate.every": 0,
    "evaluate.max_batches": 0,
    "sample.every": 0,
    "checkpoint.every": 3,
    "checkpoint.keep_last": 3,
    "log.tensorboard": False,
    "log.every": 1,
}


def text_of(topic, rng, words=50):
    return " ".join(rng.choice(TOPICS[topic], words))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A config file with a mixture of two topics as its corpus."""
    path, rng = tmp_path_factory.mktemp("config"), np.random.default_rng(0)
    for topic in TOPICS:
        (path / topic).mkdir()
        for i in range(30):
            (path / topic / f"{i}.txt").write_text(text_of(topic, rng))
    source = "mix:" + ",".join(f"text:{path / topic}" for topic in TOPICS)
    settings = TINY | {"data.source": source}
    (path / "tiny_cbtm.py").write_text(CONFIG.replace("{settings}", repr(settings)))
    return str(path / "tiny_cbtm.py")


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory, one_device):
    """The working directory of a finished study."""
    folder = tmp_path_factory.mktemp("cbtm") / "all"
    with pytest.MonkeyPatch.context() as patch:
        make_runs_here(patch)
        assert cbtm.main(["--config", recipe, "--workdir", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def table_of(folder):
    return pd.read_csv(folder / "evaluation.csv", index_col="name")


def test_experts_divide_the_budget_and_start_from_the_seed_model(trained):
    records = [run_dir.RunDir(trained / f"expert_{j}").record for j in range(2)]
    assert records[0]["origin"] == records[1]["origin"] and records[0]["origin"]["step"] == 12
    for j, record in enumerate(records):
        assert record["subset"] == Subset.load(documents_file(trained, j)).key
        assert run_dir.RunDir(trained / f"expert_{j}").setting("steps") == 6


def test_any_number_of_experts_costs_the_same(tmp_path, root):
    source = f"{root}/configs/cbtm.py:smoke"
    for steps, count, expected in ((100, 4, (25, 18)), (60, 1, (15, 45))):
        extra = [f"--config.steps={steps}", f"--config.cluster.count={count}"]
        stages = cbtm.make_stages(source, tmp_path, [*extra, "--config.cluster.seed_fraction=0.25"])
        found = [run.config().steps for run in (*stages[1], *stages[2])]
        assert found == [expected[0], *[expected[1]] * count] and sum(found) <= steps
    extra = ["--config.steps=4", "--config.cluster.count=8"]
    refused(lambda: cbtm.make_stages(source, tmp_path, extra), "config.steps=4")


def test_evaluation_agrees_with_that_of_runs_and_with_its_parts(trained):
    table = table_of(trained)
    ordinary = inference.evaluate(config_of_run(trained / "expert_1"), trained / "expert_1")
    for name in ("loss", "bits_per_byte"):
        np.testing.assert_allclose(table[name]["expert 1"], ordinary[f"eval/{name}"], rtol=1e-5)
    # Each expert is the better one on its own cluster; the oracle combines these.
    losses = table.loc[["expert 0", "expert 1"], ["cluster 0", "cluster 1"]].to_numpy()
    assert losses[0, 0] < losses[1, 0] and losses[1, 1] < losses[0, 1]
    oracle = table.loc["oracle cluster", ["cluster 0", "cluster 1"]].to_numpy(float)
    np.testing.assert_allclose(oracle, losses.diagonal(), rtol=1e-6)
    assert table.experts["top 2"] == 2 and table.experts["top 1"] == 1
    assert table.loss["uniform"] <= table.loss[["expert 0", "expert 1"]].mean()
    assert {"oracle domain", "seed model"} <= set(table.index)


def held_out_of(texts, config, tmp_path, packing=True):
    """Return (Data, batches) of a held-out split with these texts."""
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text)
    source = f"text:{tmp_path}/*.txt"
    block = dataclasses.replace(config.data, eval_source=source, packing=packing)
    data = efx.data.load(block, seed=0, splits=("eval",))
    return data, data.eval_batches(config.evaluate.batch_size, 0)


def token_order(batches):
    """Return indices that sort scored tokens by their positions in the split."""
    return np.argsort(np.concatenate([x[x >= 0] for x in batches.target_positions()]))


def test_no_probability_depends_on_later_text(trained, tmp_path):
    """Held-out text is changed from one byte on, within a block of 16 tokens and within a row."""
    config, rng = to_config(config_of_run(trained)), np.random.default_rng(0)
    ensemble = Ensemble(config, trained)
    text, place = (f"{text_of('sea', rng, 20)} {text_of('code', rng)}".encode())[:300], 201
    later = text_of("sea", rng).encode()[: 300 - place]
    experts = [ensemble.load_expert(j) for j in range(2)]

    def log_probs(text):
        data, batches = held_out_of([text], config, tmp_path)
        _, context_N, contexts = evaluation.token_contexts(data, batches, config.ensemble.every)
        log_w = log_weights(ensemble.clustering.distances(contexts), 0.1, 2)[context_N]
        each = np.stack([evaluation.log_probs(expert, batches) for expert in experts], -1)
        order = token_order(batches)
        return np.log(np.sum(np.exp(each + log_w), -1))[order], log_w[order]

    (first, weights), (second, others) = log_probs(text), log_probs(text[:place] + later)
    assert len(first) == len(text) + 1  # the end of the document is scored too
    np.testing.assert_allclose(first[:place], second[:place], atol=1e-5)
    # Weights are those of the last multiple of 16: token 208 is the first to see the change.
    np.testing.assert_array_equal(weights[:208], others[:208])
    assert np.abs(weights[208:] - others[208:]).max() > 1e-3
    assert np.abs(first[place:] - second[place:]).max() > 1e-3


@pytest.mark.parametrize("packing", [True, False])
def test_weights_depend_on_the_document_so_far_in_whole_blocks(tmp_path, packing):
    source = {"data.source": "stdlib", "data.max_bytes": 20_000, "data.seq_len": 24}
    config = to_config(common.apply(cbtm_config.get_config("smoke"), TINY | source))
    texts = [b"abcdefghij" * 5, b"klm", b"0123456789" * 4]
    data, batches = held_out_of(texts, config, tmp_path, packing)
    document_N, context_N, contexts = evaluation.token_contexts(data, batches, interval=16)
    found = [(document_N[i], contexts[context_N[i]]) for i in token_order(batches)]
    expected = [
        (document, text[: n // 16 * 16].decode())
        for document, text in enumerate(texts)
        for n in range(len(text) + 1)
    ]
    # Windows score neither the first token nor the end of the last document.
    assert found == (expected if packing else expected[1:-1])


def test_sampling_by_command_and_api(trained, capfd):
    changes = {"sample.max_new_tokens": 24, "ensemble.every": 8}
    command = ["--mode=sample", f"--workdir={trained}", "--prompt=ship deck"]
    command += [f"--config.{key}={value}" for key, value in changes.items()]
    assert main_lib.main(["efx", *command]) == 0
    first = capfd.readouterr()
    assert first.out.startswith("ship deck") and len(first.out) > 20
    assert "0 for 100%, 1 for 100%" in first.err
    assert api.sample(trained, "ship deck", changes) + "\n" == first.out


def test_experts_that_do_not_belong_together_are_refused(copy, capsys):
    """The records of experts are changed, as if they were of other runs."""

    def refuse(*names, more=()):
        capsys.readouterr()
        assert main_lib.main(["efx", "--mode=evaluate", f"--workdir={copy}", *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(name in error for name in names), error

    refuse("config.ensemble.top_k=3", more=["--config.ensemble.top_k=3"])
    refuse("--step=3", more=["--step=3"])
    refuse("config.data", more=["--config.data.max_bytes=9000"])
    shutil.move(copy / "expert_1", copy / "away")
    refuse("expert 1 of 2", "missing")
    shutil.copytree(copy / "expert_0", copy / "expert_1")
    refuse("expert 1 of 2", "cluster 1")
    shutil.rmtree(copy / "expert_1")
    shutil.move(copy / "away", copy / "expert_1")
    record = run_dir.RunDir(copy / "expert_1").meta["record"]
    longer = record["config"] | {"data": record["config"]["data"] | {"seq_len": 65}}
    edit_record(copy / "expert_1", lambda record: record | {"config": longer})
    refuse("expert 1 of 2", "config.data.seq_len=65")
    other = {"run": "other_seed", "step": 12, "parameters": "another hash"}
    edit_record(copy / "expert_1", lambda _: record | {"origin": other})
    refuse("expert 1 of 2", "seed model")
    edit_record(copy / "expert_0", lambda record: record | {"origin": other})
    shutil.rmtree(copy / "seed")
    rows = api.evaluate(copy)  # without the seed model on this machine
    assert "seed model" not in rows and rows["top 1"]["loss"] > 0


def test_fingerprints_are_of_names_and_values_and_not_of_placement():
    value = np.arange(16, dtype=np.float32).reshape(8, 2)
    params = {"a": {"kernel": value}, "b": {"kernel": value + 1}}
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), "x")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    first = fingerprint(params, 5)
    assert fingerprint(jax.device_put(params, rows), 5) == first
    for other in (
        {"a": {"kernel": value[::-1]}, "b": params["b"]},  # the same numbers in another order
        {"a": params["b"], "b": params["a"]},
        {"a": {"kernel": np.nextafter(value, 99)}, "b": params["b"]},
    ):
        assert fingerprint(other, 5) != first
    tables = ({"embed": {"embedding": np.pad(value[:5], ((0, n), (0, 0)))}} for n in (0, 3))
    assert len({fingerprint(table, 5) for table in tables}) == 1  # padded for another mesh
