"""--mode=convert: a dense run's model with routed blocks, which begins as its parent."""

import json
import re
import shutil

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import forget

from efx import build, flops, main, models, optim, runfolder, sharding, use
from efx.checkpoint import arrays
from efx.config import config_of_run
from efx.data import bpe
from efx.errors import UsageError
from efx.interop import convert_run, hf
from efx.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_device")
# Four layers, 32 wide, for a few steps.
SMALL = {
    "data.seq_len": 16,
    "data.batch_size": 4,
    "log.tensorboard": False,
    "log.every": 1,
    "evaluate.every": 0,
    "evaluate.batch_size": 4,
    "evaluate.max_batches": 1,
    "sample.every": 0,
    "sample.max_new_tokens": 8,
    "optim.schedule.warmup_steps": 1,
}
MODEL = {
    "model.width": 32,
    "model.depth": 4,
    "model.attention.num_heads": 2,
    "model.init_std": 0.3,
}
ROUTING = "config.model.depth_routing"


def run(*arguments, **changes):
    given = [f"--config.{key}={value}" for key, value in changes.items()]
    return main.main(["efx", *map(str, arguments), *given])


def converted(parent, workdir, *arguments, to="mod", **changes):
    flags = ("--mode=convert", "--from", parent, "--to", to, "--workdir", workdir)
    changes = {"optim.schedule.warmup_steps": 1, **changes}
    assert run(*flags, *arguments, **changes) == 0
    return workdir


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """{"trained": a run with scanned layers, "imported": one without}, both dense."""
    folder = tmp_path_factory.mktemp("parents")
    text = "The quick brown fox jumps over the lazy dog. " * 90
    (folder / "text.txt").write_text(text)
    small = {**SMALL, "data.source": f"text:{folder / 'text.txt'}"}
    trained, imported = folder / "trained", folder / "imported"
    dense = {"model.depth_routing.kind": "none", "model.scan_layers": True, "steps": 2}
    assert run("--config", "mod", "--workdir", trained, **small, **MODEL, **dense) == 0
    changes = {"depth": 4, "tied": True, "vocab_multiple": 1}
    model = families.make(changes, vocab_size=280)
    hf.save_hf(folder / "hf", families.random_params(model), model)
    bpe.train_bpe([text, *map(chr, range(300))], 280).save(folder / "hf" / "tokenizer.json")
    assert run("--mode=import", "--from", folder / "hf", "--workdir", imported, **small) == 0
    return {"trained": trained, "imported": imported}


@pytest.fixture(scope="module")
def children(parents, tmp_path_factory):
    """Their conversions, to routed blocks as by default."""
    folder = tmp_path_factory.mktemp("children")
    return {name: converted(parent, folder / name) for name, parent in parents.items()}


def read(workdir):
    """(unrolled model, {"params": ..., "state": ...}) of a run."""
    e, step, params, averages = build.finished(config_of_run(workdir), workdir)
    assert step == 0 or workdir.parent.name != "children"
    variables = models.unroll_variables(e.model, {"params": params, **averages})
    return models.unrolled(e.model), variables


@pytest.mark.parametrize("name", ["trained", "imported"])
def test_at_capacity_1_it_is_its_parent(parents, children, name):
    """Bit for bit, operation by operation, as training selects and as evaluation decides."""
    (dense, before), (routed, after) = read(parents[name]), read(children[name])
    whole = models.changed(routed, **{"depth_routing.capacity": 1.0})
    assert [spec.capacity for spec in routed.specs() if spec.routing] == [0.125, 0.125]
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, dense.vocab_size, (2, 16)), jnp.int32)
    with jax.disable_jit():
        logits = dense.apply(before, tokens_BT)
        for selection in ("train", "causal"):
            got = whole.clone(selection=selection).apply(after, tokens_BT)
            np.testing.assert_array_equal(got, logits)
    if name == "imported":
        return
    loss = {}  # as evaluation is compiled, and with the layers as they are stored
    for folder, changes in ((parents[name], ()), (children[name], (f"--{ROUTING}.capacity=1.0",))):
        values = main.parse(["efx", "--mode=evaluate", f"--workdir={folder}", *changes])
        loss[folder] = use.evaluate(values.config, folder)["eval/loss"]
    assert loss[parents[name]] == pytest.approx(loss[children[name]], abs=1e-6)


def test_the_run_says_what_it_is_of(parents, children, capsys):
    for name, folder in children.items():
        config, record = config_of_run(folder), runfolder.run_record(folder)
        routing = config.model.depth_routing
        assert (routing.kind, routing.gate, routing.causal) == ("mod", "twice_sigmoid", "threshold")
        assert config.train.teacher == str(parents[name]) and config.losses.distill == 0
        assert record["converted"]["to"] == "mod" and "teacher" not in record
        assert record["converted"]["step"] == {"trained": 2, "imported": 0}[name]
        parent = runfolder.run_record(parents[name])
        assert record["tokenizer"] == parent["tokenizer"]
        if name == "trained":  # and what is held out there is here
            assert record["text"] == parent["text"]
            held_out = runfolder.HELD_OUT_FILE
            assert (folder / held_out).read_text() == (parents[name] / held_out).read_text()
    assert run("--mode=sample", "--workdir", children["imported"], "--prompt", "The") == 0
    assert "The" in capsys.readouterr().out


def test_every_second_block_left_out(parents, tmp_path):
    """The blocks that stay are the parent's, and so is all around them; not a routed block."""
    folder = converted(parents["trained"], tmp_path / "drop", to="layer_drop")
    (dense, before), (half, after) = read(parents["trained"]), read(folder)
    assert half.config.depth == 2 and half.config.depth_routing.kind == "none"
    whole = dict(before["params"], layers={})
    for number, i in enumerate((0, 2)):
        whole["layers"][f"block_{number}"] = before["params"]["layers"][f"block_{i}"]
    families.assert_trees_close(after["params"], whole, rtol=0, atol=0)
    assert dense.config.depth == 4


def test_what_depends_on_a_blocks_number_is_not_left_out(parents):
    dense, _ = read(parents["imported"])
    for every, fits in ((2, False), (4, True)):
        parent = models.changed(dense, **{"attention.no_rope_every": every})
        half = models.changed(parent, depth=2)
        if fits:
            convert_run._check_blocks(parent, half, range(0, 4, 2))
            continue
        with pytest.raises(UsageError, match="block 2 of the parent would become block 1"):
            convert_run._check_blocks(parent, half, range(0, 4, 2))


DISTILL = {"losses.distill": 0.5, "steps": 4, "model.depth_routing.capacity_stages": "()"}


@pytest.fixture(scope="module")
def distilled(parents, tmp_path_factory):
    """A conversion that has followed its parent for four steps."""
    start = converted(parents["trained"], tmp_path_factory.mktemp("d") / "start", **DISTILL)
    folder = start.parent / "run"
    shutil.copytree(start, folder)
    assert run("--workdir", folder, **{"checkpoint.every": 2}) == 0
    return start, folder


def test_it_follows_its_parent(parents, distilled):
    """The distance is logged, the teacher's FLOPs are counted, it is in no checkpoint."""
    start, folder = distilled
    rows = [row for row in read_metrics(folder) if "train/loss" in row]
    assert all(row["losses/distill"] > 0 for row in rows)
    objective = rows[-1]["train/loss"] + 0.5 * rows[-1]["losses/distill"]
    np.testing.assert_allclose(rows[-1]["train/objective"], objective, rtol=1e-5)
    c = build.experiment(config_of_run(folder), folder)
    ledger = c.teacher.model.ledger(16, "causal").nominal_per_token * c.tokens_per_step
    own = c.ledger.train_flops(c.tokens_per_step)
    assert rows[-1]["flops"] == 4 * (own + ledger)
    forward = flops.executed(c.teacher.model, 16, 4, train=False)
    own = 3 * flops.executed(c.model, 16, 4)
    assert rows[-1]["flops_realised"] == 4 * (own + forward)
    assert rows[-1]["flops_teacher"] == 4 * forward
    taught, untaught = (
        arrays.read_metadata(run / "checkpoints" / step).keys()
        for run, step in ((folder, "4"), (start, "0"))
    )
    assert taught == untaught
    record = runfolder.run_record(folder)["teacher"]
    assert record["run"] == str(parents["trained"]) and record["step"] == 2


def test_it_goes_on_bit_for_bit(distilled, tmp_path):
    _, folder = distilled
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    shutil.rmtree(part / "checkpoints" / "4")
    assert run("--workdir", part) == 0
    (_, straight), (_, parts) = read(folder), read(part)
    families.assert_trees_close(parts, straight, rtol=0, atol=0)


def dot_flops(config, vocab_size):
    """FLOPs of the traced training step of a config."""
    e = build.without_text(config, vocab_size)
    training = build.Training(e)
    with sharding.use(e.mesh, e.rules):
        return flops._walk(training.trace_step(e.model).jaxpr.jaxpr), e


def test_without_a_weight_nothing_of_the_teacher_is_computed(children):
    folder = children["trained"]
    config = config_of_run(folder)
    vocab_size = build.setup(config, folder).tokenizer.vocab_size
    off, e = dot_flops(config, vocab_size)
    assert e.teacher is None
    config.train.teacher = ""
    assert dot_flops(config, vocab_size)[0] == off
    config.train.teacher = config_of_run(folder).train.teacher
    config.losses.distill = 1.0
    on, e = dot_flops(config, vocab_size)
    assert on - off == e.teacher_flops(nominal=False) > 0


def refused(capsys, words, *arguments, **changes):
    assert run(*arguments, **changes) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert re.search(words, line), line
    assert "Traceback" not in captured.err


def test_the_teacher_stays_the_same(parents, children, distilled, tmp_path, capsys):
    start, _ = distilled
    other, run_of = tmp_path / "other", tmp_path / "run"
    shutil.copytree(start, run_of)
    # A folder that has moved is taken, another model of the same step is not.
    shutil.copytree(parents["trained"], other)
    teacher = {"train.teacher": other}
    record = json.loads((run_of / "run.json").read_text())
    record["teacher"]["parameters"] = "0" * 32
    del record["checksum"]
    (run_of / "run.json").write_text(json.dumps(record))
    forget(run_of)
    words = r"config\.train\.teacher=.*other: its parameters at step 2 are not those of the teacher"
    refused(capsys, words, "--workdir", run_of, **teacher)
    words = r"config\.train\.teacher=/nowhere: there is no run with a checkpoint"
    refused(capsys, words, "--workdir", run_of, **{"train.teacher": "/nowhere"})
    words = r"config\.train\.teacher=.*imported: its tokenizer differs"
    refused(capsys, words, "--workdir", run_of, **{"train.teacher": children["imported"]})
    new = ("--config", parents["trained"], "--workdir", tmp_path / "new")
    words = r"config\.losses\.distill=1\.0: config\.train\.teacher is empty"
    refused(capsys, words, *new, **{"losses.distill": 1.0})
    assert not (tmp_path / "new").exists()


BAD = {
    "no parent": (dict(parent=""), r"--from is missing: .*dense"),
    "no run": (dict(parent="nothing"), r"--from=nothing is not a run folder"),
    "to nothing": (dict(to=""), r"--to is missing: mod or layer_drop"),
    "to what is not": (dict(to="mode"), r"--to=mode: expected mod or layer_drop \(did you mean"),
    "a routed parent": (
        dict(recorded={"model.depth_routing.kind": "mod"}),
        r"has config\.model\.depth_routing\.kind='mod': the parent already has routed blocks",
    ),
    "an adapted parent": (
        dict(recorded={"adapter.kind": "lora"}),
        r"has config\.adapter\.kind='lora': convert its base model",
    ),
    "no checkpoint": (dict(without="checkpoints"), r"no finished checkpoint|no such step|holds no"),
    "another gate": (
        {"model.depth_routing.gate": "sigmoid"},
        rf"{ROUTING}\.gate='sigmoid': .*twice_sigmoid",
    ),
    "recursion": (
        {"model.depth_routing.kind": "recursion"},
        rf"{ROUTING}\.kind='recursion': --to=mod writes 'mod'",
    ),
    "another width": ({"model.width": 64}, r"config\.model\.width=64: the model of --from has 32"),
    "another tokenizer": (
        {"data.tokenizer": "bpe:300"},
        r"config\.data\.tokenizer='bpe:300': --from=.* was trained with 'bytes'",
    ),
    "longer rows": ({"data.seq_len": 32}, r"config\.model\.context=16: must be at least"),
    "another family": (
        dict(config="latent:smoke"),
        r"config\.model\.family='latent': --mode=convert writes a decoder",
    ),
    "blocks that are none": (
        {"model.depth_routing.blocks": "(1,9)"},
        rf"{ROUTING}\.blocks=\(1, 9\): expected ascending block numbers between 0 and 3",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_converted_is_one_line(parents, tmp_path, capsys, monkeypatch, what):
    changes, words = BAD[what]
    changes = dict(changes)
    monkeypatch.chdir(tmp_path)
    parent, to = changes.pop("parent", parents["trained"]), changes.pop("to", "mod")
    recorded, without = changes.pop("recorded", None), changes.pop("without", None)
    config = changes.pop("config", None)
    if recorded or without:
        parent = tmp_path / "parent"
        shutil.copytree(parents["trained"], parent)
    if recorded:
        plain = config_of_run(parent)
        plain.update_from_flattened_dict(recorded)
        (parent / "config.json").write_text(plain.to_json())
    if without:
        shutil.rmtree(parent / without)
    flags = ["--mode=convert", f"--from={parent}", f"--to={to}", "--workdir", tmp_path / "run"]
    refused(capsys, words, *flags, *(["--config", config] if config else []), **changes)
    assert not (tmp_path / "run").exists()


def test_other_refusals(parents, children, capsys):
    flags = ("--mode=convert", "--from", parents["trained"], "--to", "mod")
    words = r"has a run; use a new folder"
    refused(capsys, words, *flags, "--workdir", children["trained"])
    flags = ("--to", "mod", "--workdir", children["trained"])
    refused(capsys, "--to goes with --mode=convert or export, not train", *flags)


@pytest.mark.parametrize("variant", ["routers", "adapters"])
def test_only_what_is_new_is_to_be_trained(parents, tmp_path, variant):
    """By a config of its own, whose model becomes the parent's."""
    config = ("--config", f"convert_mod:{variant}")
    changes = {"data.seq_len": 16, "adapter.sites": ".*/(query|up)"}
    folder = converted(parents["trained"], tmp_path / "run", *config, **changes)
    config, (_, variables) = config_of_run(folder), read(folder)
    assert config.init.run == (str(parents["trained"]) if variant == "adapters" else "")
    assert config.model.width == 32 and config.data.source == "stdlib"
    groups = optim.parameter_groups(config.optim, variables["params"])
    trained = {path for path, group in groups.items() if not group.frozen}
    ends = ("/router", *(("/adapter/down", "/adapter/up") if variant == "adapters" else ()))
    assert trained == {path for path in groups if path.endswith(ends)}
    assert all(any(path.endswith(end) for path in trained) for end in ends)
