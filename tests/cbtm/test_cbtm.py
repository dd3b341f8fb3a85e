"""cBTM: clusters and experts that really train, evaluation, the driver, bad input."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from data_helpers import same
from run_files import edit, forget, move
from test_hosts import free_port

from efx import api, run_settings, runfolder
from efx import main as main_lib
from efx.cbtm import documents_file
from efx.config import config_of_run
from efx.data.sources import Document, document_digest
from efx.data.subset import Subset
from efx.data.tokenizers import CharTokenizer

CONFIG = """
from efx.configs import cbtm, common

def get_config(arg=""):
    config = cbtm.get_config("smoke")
    return common.apply(config, {changes})
"""
TINY = {
    "steps": 24,
    "data.source": "mix:stdlib,pydoc",
    "data.max_bytes": 40_000,
    "data.document_bytes": 512,
    "data.eval_fraction": 0.1,
    "model.depth": 1,
    "data.seq_len": 64,
    "data.batch_size": 8,
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


def libraries():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra compose)")
    pytest.importorskip("k_means_constrained", reason="not installed (extra compose)")


def run(job, *more):
    return main_lib.main(["efx", *job.arguments, *more])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    libraries()
    path = tmp_path_factory.mktemp("config") / "tiny_cbtm.py"
    path.write_text(CONFIG.replace("{changes}", repr(TINY)))
    return str(path)


def run_here(title, arguments, log, cpus=None):
    """In place of `jobs.run_main`: the same command in this process."""
    return main_lib.main(["efx", *arguments]), "above"


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory, one_device):
    """(folder, Stages) after the driver, each of whose commands ran for real, in this process."""
    from efx.cbtm import run as cbtm

    folder = tmp_path_factory.mktemp("cbtm") / "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cbtm.jobs_lib, "run_main", run_here)
        assert cbtm.main(["--config", recipe, "--workdir", str(folder)]) == 0
    return folder, cbtm.make_stages(recipe, folder)


def moved(trained, copy, name):
    """A file of the copy names the folders of the copy: a run keeps the config that it has."""
    move(copy / name, trained[0], copy)


@pytest.fixture
def copy(trained, tmp_path):
    """A folder of one's own to spoil. Experts name it by contents, not by path."""
    shutil.copytree(trained[0], tmp_path / "copy")
    return tmp_path / "copy"


def evaluation(folder):
    """{name: summary} of all mixtures and models."""
    result = json.loads((pathlib.Path(folder) / "evaluation.json").read_text())
    return result["mixtures"] | result["models"]


def last_params(folder):
    from efx import build

    return build.finished(config_of_run(folder), folder)[2]


def test_the_budget_is_shared_and_experts_start_from_the_seed(trained):
    folder, plan = trained
    assert [job.steps for job in plan.seed + plan.experts] == [12, 6, 6]
    record = [runfolder.run_record(job.folder) for job in plan.experts]
    assert record[0]["origin"] == record[1]["origin"]
    assert record[0]["origin"]["step"] == 12
    for j, job in enumerate(plan.experts):
        assert record[j]["subset"] == Subset.load(documents_file(folder, j)).key
        command = job.command()
        assert f"--config.init.run={folder}/seed" in command
        assert f"--config.data.subset={folder}/clusters/cluster_{j}.json" in command


def test_evaluation_agrees_with_the_ordinary_one_and_with_its_parts(trained):
    from efx import use

    folder, plan = trained
    result = evaluation(folder)
    for name, run_folder in (("expert 1", folder / "expert_1"), ("seed model", folder / "seed")):
        ordinary = use.evaluate(config_of_run(run_folder), run_folder)
        np.testing.assert_allclose(result[name]["loss"], ordinary["eval/loss"], rtol=1e-5)
        np.testing.assert_allclose(
            result[name]["bits_per_byte"], ordinary["eval/bits_per_byte"], rtol=1e-5
        )
        assert result[name]["tokens"] == ordinary["eval/tokens"]
    # Every expert is better at its own cluster than the other one, and the oracle is made of that.
    own = [result[f"expert {j}"]["clusters"][j] for j in range(2)]
    assert own[0] < result["expert 1"]["clusters"][0] and own[1] < result["expert 0"]["clusters"][1]
    np.testing.assert_allclose(result["oracle cluster"]["clusters"], own, rtol=1e-6)
    assert result["top 2"]["experts"] == 2 and result["top 1"]["experts"] == 1
    assert result["uniform"]["loss"] <= np.mean([result[f"expert {j}"]["loss"] for j in range(2)])
    assert set(result["top 2"]["parts"]) == {"stdlib", "pydoc"}
    text = (folder / "evaluation.md").read_text()
    assert f"| top 2 | 2 | {result['top 2']['loss']:.4f} |" in text


def test_the_ensemble_of_one_is_the_single_model(trained, recipe, tmp_path):
    from efx.cbtm import run as cbtm

    extra = ["--config.cluster.count=1", "--config.ensemble.top_k=1"]
    plan = cbtm.make_stages(recipe, tmp_path / "one", extra, trained[0] / "seed")
    for job in plan.jobs():
        assert run(job) == 0, job.title
    result = evaluation(tmp_path / "one")
    for name in ("uniform", "oracle cluster", "oracle domain", "expert 0"):
        np.testing.assert_allclose(result[name]["loss"], result["top 1"]["loss"], rtol=1e-6)


def held_out_of(texts, config, tmp_path, packing=True):
    """(Data whose held-out split is these texts, evaluation.HeldOut)."""
    import efx.data
    from efx.cbtm import evaluation

    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text)
    texts_only = {"eval_source": f"text:{tmp_path}/*.txt", "packing": packing}
    block = dataclasses.replace(config.data, **texts_only)
    data = efx.data.load(block, seed=0, splits=("eval",))
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    return evaluation.HeldOut(data, documents, config.ensemble.every, config.evaluate)


def test_no_probability_depends_on_later_text(trained, tmp_path):
    """Held-out text is changed from one byte on, in the middle of a block and of a piece."""
    from efx.cbtm import evaluation
    from efx.cbtm.ensemble import Ensemble

    folder, _ = trained
    config = run_settings.check(config_of_run(folder))
    ensemble = Ensemble(config, folder)
    rng = np.random.default_rng(0)
    data, place = (b"import os\ndef parse(self, argument): return self.argument\n" * 6)[:300], 201
    later = bytes(rng.choice(list(b"the expression is evaluated "), len(data) - place).tolist())
    restored = [ensemble.load_expert(j) for j in range(2)]

    def log_probs(data):
        held = held_out_of([data], config, tmp_path)
        weights = evaluation.weights_of_mixtures(held, np.zeros(1, int), ensemble, [],
                                                 config.ensemble)  # fmt: skip
        log_w = dict(weights)["top 2"]
        each = np.stack([held.log_probs(r) for r in restored], -1)
        mixed = np.log(np.sum(np.exp(each + log_w), -1))
        in_order = np.argsort(
            np.concatenate([x[x >= 0] for x in held.batches().target_positions()])
        )
        return mixed[in_order], log_w[in_order]

    (first, weights), (second, others) = log_probs(data), log_probs(data[:place] + later)
    assert len(first) == len(data) + 1  # the end of the document is scored too
    np.testing.assert_allclose(first[:place], second[:place], atol=1e-5)
    # Weights are those of the last multiple of 16: token 208 is the first to see the change.
    np.testing.assert_array_equal(weights[:208], others[:208])
    assert np.abs(weights[208:] - others[208:]).max() > 1e-3
    assert np.abs(first[place:] - second[place:]).max() > 1e-3
    assert np.unique(weights[:, 0]).size > 5  # they do follow the text


def test_an_interrupted_expert_goes_on_to_the_same_parameters(trained, copy, recipe):
    """Expert 1 is back at step 3, and expert 0 has not begun: neither needs the other."""
    from efx.cbtm import run as cbtm

    folder, _ = trained
    plan = cbtm.make_stages(recipe, copy)
    shutil.rmtree(copy / "expert_0")
    shutil.rmtree(copy / "expert_1/checkpoints/6")
    moved(trained, copy, "expert_1/config.json")
    for job in reversed(plan.experts):
        assert not cbtm.is_finished(job)
        assert run(job) == 0
        assert cbtm.is_finished(job)
        same_tree(last_params(job.folder), last_params(folder / job.folder.name))
    assert run(plan.evaluate[0]) == 0
    assert evaluation(copy) == evaluation(folder)


def same_tree(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    same(*({str(i): x for i, x in enumerate(side)} for side in zip(*leaves, strict=True)))


def test_the_driver_runs_processes_and_passes_over_what_is_finished(
    trained, copy, recipe, root, monkeypatch, capfd
):
    """Expert 1 is missing; it is the one command that is started for real."""
    from efx.cbtm import run as cbtm

    monkeypatch.chdir(root)
    arguments = ["--config", recipe, "--workdir", str(copy), "--jobs", "2"]
    assert cbtm.main([*arguments, "--commands"]) == 0
    commands = capfd.readouterr().out.splitlines()[1::2]
    assert len(commands) == 5 and all(line.startswith("python -m efx.main") for line in commands)
    shutil.rmtree(copy / "expert_1")
    moved(trained, copy, "expert_0/config.json")
    run_main, started = cbtm.jobs_lib.run_main, []

    def start(title, arguments, log, cpus=None):
        started.append(title)
        real = run_main if title == "expert 1 of 2" else run_here
        return real(title, arguments, log, cpus)

    monkeypatch.setattr(cbtm.jobs_lib, "run_main", start)
    assert cbtm.main(arguments) == 0, capfd.readouterr()
    out = capfd.readouterr().out
    assert started == ["clusters", "expert 1 of 2", "evaluation"]
    assert out.count("finished already") == 2 and commands[3] in out
    # Of another process the same up to rounding.
    ours, theirs = evaluation(copy), evaluation(trained[0])
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name]["loss"], theirs[name]["loss"], rtol=1e-3)


def test_sampling_from_the_command_line(trained, capsys):
    folder, _ = trained
    command = ["efx", "--mode=sample", f"--workdir={folder}", "--prompt=def parse(self):"]
    command += ["--config.sample.max_new_tokens=40", "--config.ensemble.every=8"]
    assert main_lib.main(command) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def parse(self):") and len(first.out) > 30
    assert "experts used, of 2: 0 for 100%, 1 for 100%" in first.err
    assert main_lib.main(command) == 0
    assert capsys.readouterr().out == first.out
    assert main_lib.main([*command, "--config.ensemble.top_k=1"]) == 0
    assert "0 for 100%, 1 for 100%" not in capsys.readouterr().err
    changes = {"sample.max_new_tokens": 40, "ensemble.every": 8}
    assert api.sample(folder, "def parse(self):", changes) + "\n" == first.out


def test_evaluating_from_python(trained):
    folder, _ = trained
    before, scores = evaluation(folder), api.evaluate(folder)
    assert scores["mixtures"] | scores["models"] == before == evaluation(folder)


def test_two_processes_that_share_the_experts_sample_as_one(trained, root, capfd):
    folder, _ = trained
    command = ["--mode=sample", f"--workdir={folder}", "--prompt=def parse(self):"]
    command += ["--config.sample.max_new_tokens=24", "--config.ensemble.every=8"]
    assert main_lib.main(["efx", *command]) == 0
    alone = capfd.readouterr().out
    port = free_port()
    command += [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
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
    said = ["".join(x for x in text.splitlines(True) if "[Gloo]" not in x) for text in outputs]
    assert said == [alone, ""]


def test_the_map_of_tokens_is_of_what_the_evaluation_mixes(trained, capsys):
    """Loss and weights of the first held-out tokens, token by token."""
    from efx.cbtm import evaluation as evaluations
    from efx.cbtm.documents import SplitDocuments
    from efx.cbtm.ensemble import Ensemble, mix
    from efx.studies import token_map

    folder, _ = trained
    config = run_settings.check(config_of_run(folder))
    ensemble = Ensemble(config, folder)
    made, ids, _, _ = token_map.made_of(folder, None)
    loaded = [ensemble.load_expert(j, splits=("eval",)) for j in range(2)]
    documents = SplitDocuments(config.data).held_out
    held_out = evaluations.HeldOut(loaded[0][0].data, documents, 16, config.evaluate)
    assert (held_out.document_N[: len(ids)] == held_out.document_N[0]).all()
    distances = ensemble.clustering.distances(held_out.contexts)
    settings = config.ensemble
    log_w_CE = np.asarray(evaluations.log_weights(distances, settings.tau, settings.top_k))
    log_w_TE = log_w_CE[held_out.context_N][: len(ids)]
    log_p_TE = np.stack([held_out.log_probs(of)[: len(ids)] for of in loaded], axis=1)
    np.testing.assert_allclose(made.loss_T, -np.asarray(mix(log_p_TE, log_w_TE)), rtol=1e-4)
    weight = made.of("weight")
    for j in range(2):
        np.testing.assert_allclose(weight[f"expert {j}"], np.exp(log_w_TE[:, j]), rtol=1e-4)
    assert len(np.unique(weight["expert 0"])) > 1  # they change on the way
    np.testing.assert_allclose(made.flops_T, made.of("experts")["experts"] * made.dense_T)
    # The command, and what it refuses.
    out = folder / "map.html"
    text = ["--workdir", str(folder), "--out", str(out), "--text"]
    assert token_map.main([*text, "def f(x):"]) == 0 and out.exists()
    assert "2 experts" in capsys.readouterr().out
    assert token_map.main([*text, "x" * 65]) == 2
    assert "65 tokens; must have from 1 to 64" in capsys.readouterr().err
    assert token_map.main([*text, "x", "--step", "3"]) == 2
    assert "--step=" in capsys.readouterr().err


def test_a_fingerprint_is_of_names_and_values_and_not_of_where_they_lie():
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from efx.checkpoint import fingerprint

    value = np.arange(16, dtype=np.float32).reshape(8, 2)
    params = {"a": {"kernel": value}, "b": {"kernel": value + 1}}
    first = fingerprint(params, 5)
    mesh = Mesh(np.array(jax.local_devices()), "x")  # all eight: runs here take one of them
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
    assert fingerprint(placed, 5) == first
    swapped = value.copy()
    swapped[[0, 1]] = swapped[[1, 0]]  # the same numbers in another order
    for other in (
        {"a": {"kernel": swapped}, "b": params["b"]},
        {"a": params["b"], "b": params["a"]},
        {"a": {"kernel": value.reshape(2, 8)}, "b": params["b"]},
        {"a": {"kernel": np.nextafter(value, 99)}, "b": params["b"]},
    ):
        assert fingerprint(other, 5) != first
    tables = [
        {
            "embed": {"embedding": np.pad(value[:5], ((0, more), (0, 0)))},
            "head": {"kernel": np.pad(value[:5].T, ((0, 0), (0, more)))},
        }
        for more in (0, 3)
    ]
    assert fingerprint(tables[0], 5) == fingerprint(tables[1], 5)  # padded for another mesh


def test_what_does_not_belong_together_is_one_line(copy, capsys):
    """What a run recorded of itself in run.json is changed, as if it were another run."""
    evaluate = ["efx", "--mode=evaluate", f"--workdir={copy}"]

    def refuse(*words, command=evaluate, more=()):
        capsys.readouterr()
        assert main_lib.main([*command, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words), error

    refuse("config.ensemble.top_k=3", "at most 2", more=["--config.ensemble.top_k=3"])
    refuse("config.ensemble.top_k=0", more=["--config.ensemble.top_k=0"])
    refuse("config.ensemble.tau=0.0", more=["--config.ensemble.tau=0.0"])
    refuse("config.ensemble.every=0", more=["--config.ensemble.every=0"])
    refuse("--step=3", more=["--step=3"])
    refuse("of other documents", more=["--config.data.max_bytes=30000"])
    shutil.move(copy / "expert_1", copy / "away")
    refuse("expert 1 of 2 is missing", "efx.cbtm.run")
    # The other expert in its place.
    shutil.copytree(copy / "expert_0", copy / "expert_1")
    refuse("expert 1 of 2", "was not trained on cluster 1")
    shutil.rmtree(copy / "expert_1")
    shutil.move(copy / "away", copy / "expert_1")
    paths = [copy / f"expert_{j}/run.json" for j in range(2)]
    for path in paths:
        edit(path, lambda record: record)
        forget(path.parent)
    records = [json.loads(path.read_text()) for path in paths]

    def record(j, **changes):
        paths[j].write_text(json.dumps({k: v for k, v in (records[j] | changes).items() if v}))

    record(1, origin=None)
    refuse("was not started from a seed model")
    other = {"run": "other_seed", "step": 2, "parameters": "another hash"}
    record(1, origin=other)
    refuse("expert 1 of 2", "seed model (other_seed at step 2) differs", "other_seed at step 2")
    record(0, origin=other)  # the right experts, and another seed model beside them
    refuse("is not the seed model of the experts")
    record(0), record(1)
    tokenizer = (copy / "expert_1/tokenizer.json").read_bytes()
    CharTokenizer("ab").save(copy / "expert_1/tokenizer.json")
    refuse("vocabulary differs from that of expert 0")
    (copy / "expert_1/tokenizer.json").write_bytes(tokenizer)
    config = copy / "expert_1/config.json"  # parameters have the same shapes with a window
    whole = config.read_bytes()
    contents = json.loads(whole)
    contents["model"]["attention"]["window"] = 2
    config.write_text(json.dumps({k: v for k, v in contents.items() if k != "checksum"}))
    refuse(
        "expert 1 of 2",
        "model differs from that of expert 0",
        "config.model.attention.window=2 instead of 0",
    )
    config.write_bytes(whole)
    shutil.rmtree(copy / "seed")
    record(0, origin=records[0]["origin"] | {"run": "elsewhere"})
    assert main_lib.main(evaluate) == 0  # without the seed model on this machine
    assert "seed model" not in evaluation(copy)


def test_a_run_stays_on_its_clustering(trained, copy, recipe, capsys):
    folder, plan = trained
    command = [arg.replace(str(folder), str(copy)) for arg in plan.cluster[0].arguments]
    assert main_lib.main(["efx", *command, "--config.cluster.method=random"]) == 2
    assert "config.cluster.method" in capsys.readouterr().err
    shutil.rmtree(copy / "clusters")  # without it the folder is free for another one
    assert main_lib.main(["efx", *command, "--config.cluster.method=random"]) == 0
    moved(trained, copy, "expert_1/config.json")
    capsys.readouterr()
    expert = [arg.replace(str(folder), str(copy)) for arg in plan.experts[1].arguments]
    assert main_lib.main(["efx", *expert]) == 2
    assert "was trained on other documents than those of" in capsys.readouterr().err


def test_bad_budgets_and_commands(tmp_path, root, monkeypatch, capsys):
    from efx.cbtm import run as cbtm
    from efx.cbtm import table

    monkeypatch.chdir(root)
    base = ["--config", "configs/cbtm.py:smoke", "--workdir", str(tmp_path / "w")]

    def refuse(words, *arguments, main=cbtm.main):
        assert main([*base, *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
        assert not (tmp_path / "w").exists()

    refuse("--jobs=0", "--jobs", "0")
    refuse("config.steps=4: too few", "--", "--config.steps=4", "--config.cluster.count=8")
    refuse("config.cluster.seed_fraction=1.5", "--", "--config.cluster.seed_fraction=1.5")
    refuse("did you mean 'count'", "--", "--config.cluster.coun=2")
    refuse("--seeds=,: expected different numbers", "--seeds", ",", main=table.main)


def test_what_max_batches_leaves_of_the_held_out_documents_is_told(tmp_path):
    from efx.cbtm import evaluation
    from efx.configs import cbtm, common

    def config(most):
        changes = {"data.seq_len": 32, "evaluate.batch_size": 2, "evaluate.max_batches": most}
        return run_settings.check(common.apply(cbtm.get_config("smoke"), TINY | changes))

    texts = [name.encode() * 63 for name in "abcd"]  # two rows each, with the end of the document
    whole, half = (held_out_of(texts, config(most), tmp_path) for most in (0, 2))
    assert (whole.fraction, half.fraction) == (1.0, 0.5)
    assert len(half.document_N) / len(whole.document_N) == half.fraction
    row = {"loss": 1.0, "bits_per_byte": 1.0, "experts": 1, "parts": {}, "clusters": []}
    rows = {"top 1": row | {"fraction": half.fraction}}
    text = evaluation.markdown({"mixtures": rows, "models": {}})
    assert text.endswith("\n\nScored: 50% of the held-out split.\n")


@pytest.mark.parametrize("component, known", [("b", True), ("c", False), ("", False)])
def test_a_component_that_is_held_out_as_a_whole_leaves_the_oracle_out(component, known):
    """Whether it is of the mixture, or an eval_source, which has none."""
    from efx.cbtm import evaluation

    train = [Document(name, name.encode(), name) for name in "ab"]
    digests = [[document_digest(document.data).hex()] for document in train]
    ensemble = SimpleNamespace(
        count=2,
        clustering=SimpleNamespace(distances=lambda texts: np.ones((len(texts), 2))),
        members=[SimpleNamespace(digests=each) for each in digests],
    )
    held = SimpleNamespace(
        documents=[Document("held out", b"x", component)],
        document_N=np.zeros(3, int),
        contexts=["x"],
        context_N=np.zeros(3, int),
    )
    settings = SimpleNamespace(top_k=2, tau=0.1)
    names = dict(evaluation.weights_of_mixtures(held, np.zeros(1, int), ensemble, train, settings))
    assert ("oracle domain" in names) == known and "oracle cluster" in names


@pytest.mark.parametrize("packing", [True, False])
def test_what_decides_on_the_weights_of_a_token(tmp_path, packing):
    """The document so far, cut to whole blocks, whatever the rows are."""
    from efx.configs import cbtm, common

    config = common.apply(cbtm.get_config("smoke"), TINY | {"data.seq_len": 24})
    config = run_settings.check(config)
    texts = [b"abcdefghij" * 5, b"klm", b"0123456789" * 4]
    held = held_out_of(texts, config, tmp_path, packing)
    order = np.argsort(np.concatenate([x[x >= 0] for x in held.batches().target_positions()]))
    found = [(held.document_N[i], held.contexts[held.context_N[i]]) for i in order]
    expected = [(d, text[: n // 16 * 16].decode()) for d, text in enumerate(texts)
                for n in range(len(text) + 1)]  # fmt: skip
    # Windows score neither the first token nor the end of the last document.
    assert found == (expected if packing else expected[1:-1])


@pytest.mark.parametrize(
    "steps, fraction, count, expected", [(100, 0.25, 4, (25, 18)), (60, 0.25, 1, (15, 45))]
)
def test_any_number_of_experts_costs_the_same(tmp_path, root, steps, fraction, count, expected):
    from efx.cbtm import run as cbtm

    extra = [f"--config.steps={steps}", f"--config.cluster.count={count}"]
    extra += [f"--config.cluster.seed_fraction={fraction}"]
    plan = cbtm.make_stages(f"{root}/configs/cbtm.py:smoke", tmp_path, extra)
    assert (plan.seed[0].steps, plan.experts[0].steps) == expected
    assert plan.seed[0].steps + sum(job.steps for job in plan.experts) <= steps
    # What the driver decides comes after what the user says: the last one wins.
    assert plan.experts[0].config().steps == expected[1]
