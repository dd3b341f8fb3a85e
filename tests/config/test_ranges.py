"""Every setting has its range: each value of it makes an experiment whose step can be computed, or
is refused in one line, with nothing made in the run folder.

One generator (benchmarks/hostile_settings.py) walks over the settings of all families. Then what
was once taken without a word, or ended in a traceback, each by itself.
"""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import test_cli
from test_cli import one_of_eight  # noqa: F401 (a fixture)

from benchmarks import hostile_settings
from benchmarks.hostile_settings import CASES, configured, hostile, trace_step, walked, write_folder
from efx import hosts, main, memory, optim, run_settings, settings, storage, train
from efx.config import run_file
from efx.errors import UsageError
from efx.models.families import FAMILIES
from efx.sharding import DEFAULT_RULES
from efx.studies import report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and what another run needs to be a member of a model: its config and tokenizer."""
    folder = tmp_path_factory.mktemp("ranges")
    write_folder(folder)
    return folder


@pytest.fixture
def remembered():
    with hostile_settings.remembered():
        yield


@pytest.mark.parametrize("case", CASES)
def test_any_value_of_any_setting(case, folder, tmp_path, remembered, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some values are names of folders
    family, changes, _ = CASES[case]
    config, workdir = configured(family, changes, folder), tmp_path / "run"
    counts, wrong, traced = {"made": 0, "refused": 0}, [], set()
    traced.add(train._Launch(config, workdir, (), 0.0, None).model)
    for key, hint in walked(case, config).items():
        for value in hostile(hint):
            try:
                changed = settings.replaced(config, {key: value})
                trace_step(train._Launch(changed, workdir, (), 0.0, None), traced)
                counts["made"] += 1
            except UsageError as error:
                counts["refused"] += 1
                if "\n" in str(error) or "config." not in str(error):
                    wrong.append((key, value, str(error)))
            except Exception as error:
                wrong.append((key, value, repr(error)))
            assert not workdir.exists(), (key, value)
    assert not wrong, "\n".join(ascii(line)[:300] for line in wrong)
    assert min(counts.values()) > 1, counts


# ---- seen as tracebacks, or taken without a word ------------------------------------------------

# Settings of `test_cli.SETTINGS` that are changed, and what is said.
SEEN = [
    ({"seed": -1}, "config.seed=-1: must be in [0, 4294967296)"),
    ({"seed": 2**32}, "config.seed=4294967296: must be in [0, 4294967296)"),
    ({"steps": 2**31}, "config.steps=2147483648: must be at most 2147483647 in size"),
    ({"log.every": 0}, "config.log.every=0: must be at least 1"),
    ({"log.profile_at": -1}, "config.log.profile_at=-1: must be at least 0"),
    ({"evaluate.max_batches": -1}, "config.evaluate.max_batches=-1: must be at least 0"),
    ({"train.max_nonfinite": 0}, "config.train.max_nonfinite=0: must be at least 1"),
    ({"model.attention.window": -1}, "config.model.attention.window=-1: must be at least 0"),
    ({"model.attention.chunk": -1}, "config.model.attention.chunk=-1: must be at least 0"),
    ({"model.attention.softcap": -1.0}, "config.model.attention.softcap=-1.0: must be at least 0"),
    ({"model.attention.rope_theta": -1.0}, "config.model.attention.rope_theta=-1.0: must be"),
    ({"model.attention.rope_theta": 0.0}, "rope_theta=0.0: must be more than 0 with rope"),
    ({"model.mlp.multiple_of": 0}, "config.model.mlp.multiple_of=0: must be at least 1"),
    ({"model.mlp.hidden": -1}, "config.model.mlp.hidden=-1: must be at least 0"),
    ({"model.norm_eps": -1e-5}, "config.model.norm_eps=-1e-05: must be more than 0"),
    ({"model.init_std": -1.0}, "config.model.init_std=-1.0: must be at least 0"),
    ({"model.logit_softcap": -1.0}, "config.model.logit_softcap=-1.0: must be at least 0"),
    ({"optim.eps": 0.0}, "config.optim.eps=0.0: must be more than 0"),
    ({"losses.z_loss": -1000.0}, "config.losses.z_loss=-1000.0: must be at least 0"),
    ({"init.missing": ".*"}, "config.init.missing='.*': config.init.run is empty"),
    ({"model.depth": 10**6}, "config.model.depth=1000000: must be at most 10000"),
    ({"model.depth": 1001}, "config.model.depth=1001: each of 1001 blocks would be compiled"),
    ({"model.depth_routing.every": 3}, "depth_routing.every=3: the stack has 2 blocks, so none"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.every": 3}, "moe.every=3: the stack has 2 blocks"),
    ({"steps": 0, "train_flops": "inf"}, "config.train_flops=inf: must be finite and at least 0"),
    ({"steps": 0, "train_flops": "nan"}, "config.train_flops=nan: must be finite and at least 0"),
    ({"steps": 0, "train_flops": 1e38}, "are more than 2^31 - 1"),
    ({"optim.learning_rate": 1e39}, "must be at most 3.4028235e+38 in size, the largest float32"),
    ({"optim.schedule.decay_steps": 1, "optim.schedule.warmup_steps": 2}, "decay_steps=1"),
    ({"rules": "5"}, "config.rules[0]=5: must be a pair"),
    ({"rules": "(5,)"}, "config.rules[0]=5: must be a pair (logical axis, mesh axis"),
    ({"rules": "(('mlp', 5),)"}, "config.rules[0]=('mlp', 5): must be a pair"),
    ({"losses.router_bce": "'much'"}, "router_bce='much': must be a number, or a dict"),
    ({"losses.z_loss": "nan"}, "config.losses.z_loss="),
    ({"checkpoint.best_metric": "eval/los"}, "this model does not log it (did you mean"),
    ({"checkpoint.best_metric": "eval/accuracy"}, "must be a metric to minimise"),
    ({"log.profile_at": 2}, "config.log.profile_at=2: the run has 2 steps"),
    ({"rules": repr((*DEFAULT_RULES, ("mpl", None)))}, "'mpl' is not a logical axis (did you"),
    ({"data.packing": True}, "is one document; set config.data.packing=False"),
    ({"adapter.kind": "lora"}, "config.adapter.kind='lora': config.init.run is empty"),
    ({"sample.prompt": "\udcff"}, "config.sample.prompt='\\udcff': has half of a surrogate pair"),
    ({"data.cache_dir": "\ud800"}, "config.data.cache_dir='\\ud800': has half of a surrogate pair"),
    ({"model.width": 10**7}, "config.model.width=10000000: training needs"),
    ({"model.context": 10**9, "model.positions": "learned"}, "embedding, float32[1000000000, 16]"),
    ({"data.batch_size": 8 * 10**8}, "config.data.batch_size=800000000: training needs"),
    ({"evaluate.batch_size": 8 * 10**8}, "config.evaluate.batch_size=800000000: evaluation needs"),
    ({"sample.every": 1, "model.context": 10**9}, "config.model.context=1000000000: sampling"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", SEEN)
def test_seen_as_a_traceback_or_taken_without_a_word(
    changes, words, folder, root, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(root)
    workdir = tmp_path / "run"
    given = {**test_cli.SETTINGS, "data.source": f"text:{folder / 'text.txt'}", **changes}
    given["data.cache_dir"] = given.get("data.cache_dir", folder)
    assert test_cli.call(f"--workdir={workdir}", **given) == 2
    line = test_cli.error_line(capsys)
    assert words in line, line
    assert not workdir.exists()


@pytest.mark.parametrize("weight, words", [
    ({"schedule": "expo", "rate": 1.0}, "z_loss.schedule='expo': expected one of constant"),
    ({"schedule": ["linear"]}, "z_loss.schedule=['linear']: expected one of constant"),
    ({"schedule": "constant", "value": "1"}, "config.losses.z_loss.value='1': expected float"),
    ({"schedule": "linear", "c_start": 0.0, "c_end": math.inf, "steps": 1}, "z_loss.c_end=inf"),
    ({"schedule": "constant", "value": -1.0}, "config.losses.z_loss.value=-1.0: must be at least"),
    ({"schedule": "exponential", "rate": -1.0, "c_min": 0, "c_max": 1}, "z_loss.rate=-1.0: must"),
    ({"schedule": "exponential", "rate": 1.0, "c_min": 7, "c_max": 5}, "c_min=7.0: must be at mo"),
    ({"schedule": "cosine", "c_start": 0, "c_end": 1, "steps": -1}, "z_loss.steps=-1: must be at"),
])  # fmt: skip
def test_schedules_of_losses_that_nothing_sows_were_not_looked_at(weight, words):
    config = run_settings.Config()
    with pytest.raises(UsageError) as error:
        settings.replaced(config, {"losses.z_loss": weight})
    assert words in str(error.value)


@pytest.mark.parametrize("flags, words", [
    (["--cpu_devices=-1"], "--cpu_devices=-1: must be at least 0"),
    (["--cpu_devices=1000000000"], "--cpu_devices=1000000000: must be at most 4096"),
    (["--process_id=0"], "--coordinator_address, --num_processes and --process_id: set all"),
    (["--coordinator_address=a:1", "--num_processes=2", "--process_id=2"], "--process_id=2: m"),
    (["--coordinator_address=a:1", "--num_processes=2", "--process_id=-1"], "--process_id=-1: m"),
    (["--coordinator_address=a:1", "--num_processes=0", "--process_id=0"], "--num_processes=0: m"),
    (["--coordinator_address=a", "--num_processes=1", "--process_id=0"], "expected the host and"),
    (["--coordinator_address=a:99999", "--num_processes=1", "--process_id=0"], "the host and port"),
    (["--mode=sample", "--topology=v5e:1x1"], "--topology goes with --mode=compile"),
    (["--mode=compose", "--step=1"], "--step goes with --mode=evaluate or sample"),
    (["--mode=evaluate", "--prompt=x"], "--prompt goes with --mode=sample"),
])  # fmt: skip
def test_flags_that_cannot_be_so(flags, words, root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(root)
    assert test_cli.call(f"--workdir={tmp_path / 'run'}", *flags) == 2
    assert words in test_cli.error_line(capsys)
    assert not (tmp_path / "run").exists()


# ---- names of files and folders ------------------------------------------------------------------

BRIDGE = "--config=configs/calm.py:bridge"
DOCUMENTS = ["--config.data.split=documents", "--config.data.document_bytes=64"]
# What names a file or folder (NAME), with what goes with it, and how the message calls it.
NAMED = [
    (["--workdir=NAME"], "--workdir="),
    (["--workdir=NAME", "--mode=evaluate", "--config="], "--workdir="),
    (["--config=NAME"], "--config="),
    (["--config=folder/NAME.py"], "--config="),
    (["--mode=import", "--from=NAME"], "--from="),
    (["--mode=convert", "--from=NAME", "--to=mod", "--config="], "--from="),
    (["--config.data.tokenizer=NAME"], "config.data.tokenizer="),
    (["--config.data.source=text:NAME"], "config.data.source="),
    (["--config.data.subset=NAME", *DOCUMENTS], "config.data.subset="),
    (["--config.init.run=NAME"], "config.init.run="),
    (["--config.losses.distill=1.0", "--config.train.teacher=NAME"], "config.train.teacher="),
    ([BRIDGE, "--config.model.anchor=NAME"], "config.model.anchor="),
]  # fmt: skip


def named_flags(arguments, workdir, text, name):
    """A command line with `arguments`, in which NAME is `name`, and the others that it needs."""
    given = [argument.replace("NAME", name) for argument in arguments]
    flags = {argument.partition("=")[0] for argument in given}
    rest = {"--config": "configs/mod.py", "--workdir": workdir, "--config.data.source": text}
    rest |= {"--config.data.seq_len": 8}
    given += [f"{flag}={value}" for flag, value in rest.items() if flag not in flags]
    return [flag for flag in given if flag != "--config="]


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"], ids=["long", "zero"])
@pytest.mark.parametrize("arguments, words", NAMED)
def test_a_name_that_no_file_can_have(
    arguments, words, name, folder, root, tmp_path, capsys, monkeypatch
):
    """A traceback of the system's OSError, or of Python's ValueError."""
    monkeypatch.chdir(root)
    workdir = tmp_path / "run"
    text = f"text:{folder / 'text.txt'}"
    assert main.main(["efx", *named_flags(arguments, workdir, text, name)]) == 2
    line = test_cli.error_line(capsys)
    assert words in line and ascii(name)[1:-1] in line, line
    assert not workdir.exists()


@pytest.mark.parametrize("arguments, words", [
    (["--config.init.run=NAME"], "config.init.run='NAME': not a run folder: it"),
    ([BRIDGE, "--config.model.anchor=NAME"], "config.model.anchor='NAME': not a run folder"),
    (["--mode=convert", "--from=NAME", "--to=mod", "--config="], "--from=NAME is not a run folder"),
    (["--config.data.tokenizer=NAME"], "tokenizer='NAME': the folder has no tokenizer.json"),
    (["--config.data.tokenizer=/dev/null"], "tokenizer='/dev/null': it is not a file"),
])  # fmt: skip
def test_a_folder_of_another_kind(arguments, words, folder, root, tmp_path, capsys, monkeypatch):
    """The message named --workdir, or said that there is no such file."""
    monkeypatch.chdir(root)
    workdir, text, name = tmp_path / "run", f"text:{folder / 'text.txt'}", str(tmp_path)
    assert main.main(["efx", *named_flags(arguments, workdir, text, name)]) == 2
    assert words.replace("NAME", name) in test_cli.error_line(capsys)
    assert not workdir.exists()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"], ids=["long", "zero"])
def test_a_name_that_no_file_can_have_of_other_commands(name, tmp_path):
    for named, call in (
        ("--sweep=", lambda: run_file("sweep", name, "sweeps")),
        ("RUN=", lambda: report.collect([name])),
        ("--workdir=", lambda: storage.folder(tmp_path / "not there" / name)),
        ("--to=", lambda: storage.local_folder(name, "--to")),
    ):
        with pytest.raises(UsageError, match=named):
            call()


def test_a_home_that_no_shell_has_put_in(tmp_path, monkeypatch):
    """--workdir=~/x, of which shells leave the ~ as it is, made a folder of this name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for function in (storage.folder, storage.local_folder):
        with pytest.raises(UsageError, match=f"--workdir=~/x: .* such as {tmp_path}/x"):
            function("~/x")
        assert str(function("~x/~")) == "~x/~"
    assert storage.local_path("~/x.json", "config.data.tokenizer") == tmp_path / "x.json"


def test_distributed_without_a_cluster():
    code = "from efx import hosts; hosts.connect(preemption=False)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    last = ended.stderr.splitlines()[-1]
    assert "UsageError: --distributed found no cluster (Slurm job" in last


@pytest.mark.parametrize("address, status", [(None, 75), ("nowhere:1", 2)])
def test_processes_that_do_not_come(monkeypatch, capsys, address, status):
    """A machine that is lost at the start is no bad input: the same command goes on. An address
    that somebody gave may be wrong."""

    def unreached(*arguments, **options):
        raise RuntimeError("DEADLINE_EXCEEDED: 3 of 4 tasks")

    monkeypatch.setattr(jax.distributed, "initialize", unreached)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(main, "run", lambda argv: hosts.connect(address, preemption=False))
    assert main.main([]) == status
    assert "could not connect" in capsys.readouterr().err


def test_a_decay_past_the_end_is_told(caplog):
    """It is right for a run that goes on later with more steps, so it is no error."""
    params = {"kernel": jnp.zeros((2, 2))}
    for decay_steps, said in ((19, 0), (20, 0), (21, 1)):
        caplog.clear()
        changes = {"schedule.decay_steps": decay_steps, "schedule.warmup_steps": 1}
        optim.make_optimizer(settings.replaced(run_settings.Config().optim, changes), 20, params)
        assert len(caplog.records) == said
    assert "decay_steps=21 is past the last step, config.steps=20" in caplog.text


def test_memory_is_counted_by_device():
    """Of a sharded array each device has its part; a number of devices has an equal part of the
    main memory."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    whole = jax.ShapeDtypeStruct((8, 5), jnp.float32)
    split = jax.ShapeDtypeStruct((8, 5), jnp.bfloat16, sharding=sharded)
    assert memory.on_each_device({"whole": whole, "split": split}) == 8 * 5 * 4 + 2 * 5 * 2
    assert memory.largest({"x": {"whole": whole}, "split": split}) == "x/whole, float32[8, 5]"
    total = memory.host_memory()
    assert memory.available() == total // 8 and 2**28 < total < 2**50
    memory.check("this", {"all of it": total // 8})
    with pytest.raises(UsageError, match="this needs at least .* is available .*all of it"):
        memory.check("this", {"all of it": total // 8 + 1, "nothing": 0})
    assert [memory.in_words(n) for n in (1, 1536, 2**40)] == ["1 bytes", "1.5 KiB", "1 TiB"]


def test_the_least_of_many_settings_trains(
    folder,
    root,
    tmp_path,
    monkeypatch,
    one_of_eight,  # noqa: F811
):
    """What is at the end of its range is not only taken: a run with it comes to its end."""
    monkeypatch.chdir(root)
    least = {
        **dict.fromkeys(("steps", "data.seq_len", "model.depth", "log.every"), 1),
        **dict.fromkeys(("checkpoint.every", "checkpoint.keep_last", "evaluate.every"), 1),
        **dict.fromkeys(("sample.every", "sample.max_new_tokens", "train.loss_chunk"), 1),
        **dict.fromkeys(("model.attention.num_heads", "model.attention.window"), 1),
        **dict.fromkeys(("model.mlp.hidden", "model.depth_routing.every"), 1),
        **dict.fromkeys(("optim.b1", "optim.clip_norm", "optim.weight_decay"), 0.0),
        **dict.fromkeys(("optim.learning_rate", "sample.temperature", "model.init_std"), 0.0),
        **dict.fromkeys(("optim.schedule.warmup_steps", "checkpoint.keep_best"), 0),
        "model.width": 2,
        "model.depth_routing.capacity": 1e-30,
        "model.depth_routing.slack": 1.0,
        "sample.top_p": 1e-30,
        "sample.prompt": "",
        "data.source": f"text:{folder / 'text.txt'}",
        "data.cache_dir": folder,
    }
    workdir = tmp_path / "run"
    assert test_cli.call(f"--workdir={workdir}", **{**test_cli.SETTINGS, **least}) == 0
    assert (workdir / "checkpoints/1").is_dir()


def test_every_setting_is_walked_over(folder):
    """A new block of settings has to be in a case."""
    every, seen = set(), set()
    for family in FAMILIES:
        config = run_settings.Config(model=FAMILIES[family].config())
        every |= {name.removeprefix("config.") for name, _, _ in settings.leaves(config)}
    for case, (family, changes, _) in CASES.items():
        seen |= set(walked(case, configured(family, changes, folder)))
    assert every == seen
