"""cBTM: clusters and experts that are trained, their evaluation, the driver, refusals."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from data_helpers import same
from refusals import refused
from run_files import edit_record, move
from test_hosts import free_port

import efx.data
from efx import api, run_dir
from efx import main as main_lib
from efx.checkpoint import fingerprint
from efx.composition import cbtm, documents_file, evaluation
from efx.composition.documents import SplitDocuments
from efx.composition.ensemble import Ensemble
from efx.config.load import config_of_run, to_config
from efx.configs import cbtm as cbtm_config
from efx.configs import common
from efx.data.sources import Document
from efx.data.subset import Subset
from efx.data.tokenizers import CharTokenizer
from efx.train import finished_run, setup

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
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra studies)")
    pytest.importorskip("k_means_constrained", reason="not installed (extra studies)")
    path, rng = tmp_path_factory.mktemp("config"), np.random.default_rng(0)
    for topic in TOPICS:
        (path / topic).mkdir()
        for i in range(30):
            (path / topic / f"{i}.txt").write_text(text_of(topic, rng))
    source = "mix:" + ",".join(f"text:{path / topic}" for topic in TOPICS)
    settings = TINY | {"data.source": source}
    (path / "tiny_cbtm.py").write_text(CONFIG.replace("{settings}", repr(settings)))
    return str(path / "tiny_cbtm.py")


def run_here(run, cpus, processes):
    """In place of `runs.start`: the same command in this process."""
    assert main_lib.main(["efx", *run.arguments]) == 0


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory, one_device):
    """(folder, Stages) after the driver has run its commands in this process."""
    folder = tmp_path_factory.mktemp("cbtm") / "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cbtm.runs_lib, "start", run_here)
        assert cbtm.main(["--config", recipe, "--workdir", str(folder)]) == 0
    return folder, cbtm.make_stages(recipe, folder)


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of that folder. Experts name it by contents, not by path."""
    shutil.copytree(trained[0], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def ensemble(trained):
    return Ensemble(to_config(config_of_run(trained[0])), trained[0])


def evaluated(folder):
    """{name: summary} of all mixtures and models."""
    result = json.loads((folder / "evaluation.json").read_text())
    return result["mixtures"] | result["models"]


def test_experts_share_the_budget_and_start_from_the_seed_model(trained):
    folder, plan = trained
    assert [run.config().steps for run in plan.seed + plan.experts] == [12, 6, 6]
    records = [run_dir.run_record(job.folder) for job in plan.experts]
    assert records[0]["origin"] == records[1]["origin"]
    assert records[0]["origin"]["step"] == 12
    for j, job in enumerate(plan.experts):
        assert records[j]["subset"] == Subset.load(documents_file(folder, j)).key
        assert f"--config.init.run={folder}/seed" in job.command()


def test_evaluation_agrees_with_that_of_runs_and_with_its_parts(trained):
    folder, _ = trained
    result = evaluated(folder)
    ordinary = finished_run.evaluate(config_of_run(folder / "expert_1"), folder / "expert_1")
    for name in ("loss", "bits_per_byte", "tokens"):
        np.testing.assert_allclose(result["expert 1"][name], ordinary[f"eval/{name}"], rtol=1e-5)
    # Every expert is better at its own cluster than the other one, and the oracle is made of that.
    own = [result[f"expert {j}"]["clusters"][j] for j in range(2)]
    assert own[0] < result["expert 1"]["clusters"][0] and own[1] < result["expert 0"]["clusters"][1]
    np.testing.assert_allclose(result["oracle cluster"]["clusters"], own, rtol=1e-6)
    assert result["top 2"]["experts"] == 2 and result["top 1"]["experts"] == 1
    assert result["uniform"]["loss"] <= np.mean([result[f"expert {j}"]["loss"] for j in range(2)])
    assert len(result["top 2"]["parts"]) == 2 and {"oracle domain", "seed model"} <= result.keys()


def held_out_of(texts, config, tmp_path, packing=True):
    """The HeldOut of a split that is these texts."""
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text)
    source = f"text:{tmp_path}/*.txt"
    block = dataclasses.replace(config.data, eval_source=source, packing=packing)
    data = efx.data.load(block, seed=0, splits=("eval",))
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    return evaluation.HeldOut(data, documents, config.ensemble.every, config.evaluate)


def token_order(held_out):
    """Sorts scored tokens by their positions in the split."""
    positions = held_out.batches().target_positions()
    return np.argsort(np.concatenate([x[x >= 0] for x in positions]))


def test_no_probability_depends_on_later_text(trained, ensemble, tmp_path):
    """Held-out text is changed from one byte on, in the middle of a block and of a piece."""
    config, rng = to_config(config_of_run(trained[0])), np.random.default_rng(0)
    text, place = (f"{text_of('sea', rng, 20)} {text_of('code', rng)}".encode())[:300], 201
    later = text_of("sea", rng).encode()[: 300 - place]
    experts = [ensemble.load_expert(j) for j in range(2)]
    train = SplitDocuments(config.data).train

    def log_probs(text):
        held = held_out_of([text], config, tmp_path)
        mixtures = dict(
            evaluation.weights_of_mixtures(held, np.zeros(1, int), ensemble, train, config.ensemble)
        )
        # No component of the training documents tells the clusters of this text.
        assert "oracle cluster" in mixtures and "oracle domain" not in mixtures
        log_w = mixtures["top 2"]
        each = np.stack([held.log_probs(expert) for expert in experts], -1)
        mixed = np.log(np.sum(np.exp(each + log_w), -1))
        return mixed[token_order(held)], log_w[token_order(held)]

    (first, weights), (second, others) = log_probs(text), log_probs(text[:place] + later)
    assert len(first) == len(text) + 1  # the end of the document is scored too
    np.testing.assert_allclose(first[:place], second[:place], atol=1e-5)
    # Weights are those of the last multiple of 16: token 208 is the first to see the change.
    np.testing.assert_array_equal(weights[:208], others[:208])
    assert np.abs(weights[208:] - others[208:]).max() > 1e-3
    assert np.abs(first[place:] - second[place:]).max() > 1e-3
    assert np.unique(weights[:, 0]).size > 5  # they do follow the text


@pytest.mark.slow
def test_the_driver_resumes_unfinished_experts_in_processes(
    trained, copy, recipe, root, monkeypatch, capfd
):
    """Expert 0 starts again, bit for bit; expert 1 resumes at step 3 in a process of its own."""
    monkeypatch.chdir(root)
    shutil.rmtree(copy / "expert_0")
    shutil.rmtree(copy / "expert_1/checkpoints/6")
    move(copy / "expert_1", trained[0], copy)
    real, started = cbtm.runs_lib.start, []

    def start(run, cpus, processes):
        started.append(run.folder.name)
        return (real if run.folder.name == "expert_1" else run_here)(run, cpus, processes)

    monkeypatch.setattr(cbtm.runs_lib, "start", start)
    assert cbtm.main(["--config", recipe, "--workdir", str(copy)]) == 0, capfd.readouterr()
    assert started == [copy.name, "expert_0", "expert_1", copy.name]
    leaves = (
        jax.tree.leaves(setup.finished(config_of_run(folder), folder)[2])
        for folder in (copy / "expert_0", trained[0] / "expert_0")
    )
    same(*({str(i): leaf for i, leaf in enumerate(each)} for each in leaves))
    ours, theirs = evaluated(copy), evaluated(trained[0])
    assert ours.keys() == theirs.keys()
    for name in ours:  # another process rounds differently
        np.testing.assert_allclose(ours[name]["loss"], theirs[name]["loss"], rtol=1e-3)


@pytest.mark.slow
def test_sampling_by_command_and_api_and_on_two_hosts_that_share_the_experts(trained, root, capfd):
    folder, _ = trained
    changes = {"sample.max_new_tokens": 24, "ensemble.every": 8}
    command = ["--mode=sample", f"--workdir={folder}", "--prompt=ship deck"]
    command += [f"--config.{key}={value}" for key, value in changes.items()]
    assert main_lib.main(["efx", *command]) == 0
    first = capfd.readouterr()
    assert first.out.startswith("ship deck") and len(first.out) > 20
    assert "experts used, of 2: 0 for 100%, 1 for 100%" in first.err
    assert api.sample(folder, "ship deck", changes) + "\n" == first.out
    command += [f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    command += ["--config.mesh.data=1", "--config.mesh.fsdp=2"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "efx.main", *command, f"--process_id={rank}"],
            cwd=root,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    printed = ["".join(x for x in text.splitlines(True) if "[Gloo]" not in x) for text in outputs]
    assert printed == [first.out, ""]


@pytest.mark.slow
def test_experts_that_do_not_belong_together_are_refused(copy, capsys):
    """Records in run.json are changed, as if they were of other runs."""
    command = ["efx", "--mode=evaluate", f"--workdir={copy}"]

    def refuse(*names, more=()):
        capsys.readouterr()
        assert main_lib.main([*command, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(name in error for name in names), error

    def record(j, **changes):
        edit_record(copy / f"expert_{j}", lambda record: record | changes)

    refuse("config.ensemble.top_k=3", more=["--config.ensemble.top_k=3"])
    refuse("--step=3", more=["--step=3"])
    refuse("config.data", more=["--config.data.max_bytes=9000"])
    shutil.move(copy / "expert_1", copy / "away")
    refuse("expert 1 of 2", "missing")
    shutil.copytree(copy / "expert_0", copy / "expert_1")
    refuse("expert 1 of 2", "cluster 1")
    shutil.rmtree(copy / "expert_1")
    shutil.move(copy / "away", copy / "expert_1")
    tokenizer = (copy / "expert_1/tokenizer.json").read_bytes()
    CharTokenizer("ab").save(copy / "expert_1/tokenizer.json")
    refuse("expert 1 of 2", "vocabulary")
    (copy / "expert_1/tokenizer.json").write_bytes(tokenizer)
    other = {"run": "other_seed", "step": 2, "parameters": "another hash"}
    record(1, origin=other)
    refuse("expert 1 of 2", "other_seed at step 2")
    record(0, origin=other)  # the right experts, and another seed model beside them
    refuse(str(copy / "seed"))
    shutil.rmtree(copy / "seed")
    assert main_lib.main(command) == 0  # without the seed model on this machine
    assert "seed model" not in evaluated(copy)


@pytest.mark.slow
def test_experts_stay_on_their_clustering(trained, copy, capsys):
    folder, plan = trained

    def run(job, *more):
        capsys.readouterr()
        arguments = [argument.replace(str(folder), str(copy)) for argument in job.arguments]
        return main_lib.main(["efx", *arguments, *more])

    assert run(plan.cluster[0], "--config.cluster.method=random") == 2
    assert "config.cluster.method" in capsys.readouterr().err
    shutil.rmtree(copy / "clusters")  # without it another one may be made
    assert run(plan.cluster[0], "--config.cluster.method=random") == 0
    move(copy / "expert_1", folder, copy)
    assert run(plan.experts[1]) == 2
    assert "documents" in capsys.readouterr().err


# ---- without training ----------------------------------------------------------------------------


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


def test_any_number_of_experts_costs_the_same(tmp_path, root):
    source = f"{root}/configs/cbtm.py:smoke"
    for steps, count, expected in ((100, 4, (25, 18)), (60, 1, (15, 45))):
        extra = [f"--config.steps={steps}", f"--config.cluster.count={count}"]
        extra.append("--config.cluster.seed_fraction=0.25")
        plan = cbtm.make_stages(source, tmp_path, extra)
        found = [run.config().steps for run in (*plan.seed, *plan.experts)]
        assert tuple(found[:2]) == expected and sum(found) <= steps
    extra = ["--config.steps=4", "--config.cluster.count=8"]
    refused(lambda: cbtm.make_stages(source, tmp_path, extra), "config.steps=4")


@pytest.mark.parametrize("packing", [True, False])
def test_weights_depend_on_the_document_so_far_in_whole_blocks(tmp_path, packing):
    """However documents are cut into rows."""
    source = {"data.source": "stdlib", "data.max_bytes": 20_000, "data.seq_len": 24}
    config = to_config(common.apply(cbtm_config.get_config("smoke"), TINY | source))
    texts = [b"abcdefghij" * 5, b"klm", b"0123456789" * 4]
    held = held_out_of(texts, config, tmp_path, packing)
    order = token_order(held)
    found = [(held.document_N[i], held.contexts[held.context_N[i]]) for i in order]
    expected = [
        (document, text[: n // 16 * 16].decode())
        for document, text in enumerate(texts)
        for n in range(len(text) + 1)
    ]
    # Windows score neither the first token nor the end of the last document.
    assert found == (expected if packing else expected[1:-1])
