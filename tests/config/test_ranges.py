"""Every setting has its range: each value of it makes an experiment whose step can be computed, or
is refused in one line, with nothing made in the run folder.

One generator walks over the settings of all families and gives for each, by its declared type,
values of another type, of both signs, zero, huge ones, nan, inf, nothing, names of no choice, and
the ends of its range. Then what was once taken without a word, or ended in a traceback, each by
itself.
"""

import functools
import json
import math
import subprocess
import sys
import types
import typing
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import pytest
import test_cli

from efx import build, memory, optim, run_settings, settings, train
from efx import step as step_lib
from efx.configs import common
from efx.data.tokenizers import ByteTokenizer
from efx.errors import UsageError
from efx.models.families import FAMILIES

NOT_FINITE = (math.nan, math.inf, -math.inf)
# Of each type: values of other types, and those that a number, name or text may not be.
HOSTILE = {
    int: ("many", 1.5, True, (), None, -1, 0, 2**31, 10**400, *NOT_FINITE),
    float: ("much", True, (), None, -1.0, 0.0, 1e39, 10**400, *NOT_FINITE),
    bool: (1, "yes", (), None),
    str: (3, (), None, "", "nothing", "(", "\ud800", "\0"),
}
HOSTILE[object] = (*(value for values in HOSTILE.values() for value in values), {})
LARGEST = {int: 2**31 - 1, float: 3e38}  # what a range without an end has

TINY = {
    "steps": 20,
    "data.seq_len": 8,
    "data.batch_size": 8,
    "optim.schedule.warmup_steps": 1,
    "evaluate.batch_size": 8,
    "log.tensorboard": False,
    "model.depth": 1,
    "model.width": 8,
    "model.depth_routing.every": 1,
    "model.attention.num_heads": 2,
}
# What is walked over: a family, what is changed of it, so that the settings say something, and the
# beginnings of their names.
CASES = {
    "run": (
        "decoder",
        {},
        "seed steps train_flops data init losses train optim mesh rules checkpoint log evaluate"
        " sample cluster ensemble",
    ),
    "adapter": ("decoder", {"adapter.kind": "lora", "init.run": "MEMBER"}, "adapter"),
    "decoder": ("decoder", {}, "model"),
    "mod": ("decoder", {"depth_routing.kind": "mod"}, "model.depth_routing"),
    "recursion": (
        "decoder",
        {"depth_routing.kind": "recursion", "depth": 3},
        "model.depth_routing.recursions model.depth_routing.capacity",
    ),
    "moe": ("decoder", {"mlp.kind": "moe"}, "model.mlp.moe"),
    "soft_experts": ("decoder", {"soft_experts.num": 2}, "model.soft_experts"),
    "dense_former": ("decoder", {"dense_former.on": True}, "model.dense_former"),
    "dropout": ("decoder", {"dropout.kind": "elementwise"}, "model.dropout"),
    "masks": (
        "decoder",
        {"dropout.kind": "attention", "dropout.sites": ("embedding", "mlp_output")},
        "model.dropout.attention",
    ),
    "encoder_decoder": ("encoder_decoder", {"depth": 2}, "model"),
    "latent": (
        "latent",
        {
            "group_size": 4,
            "latents": (2,),
            "level_widths": (8,),
            "latent_loss.kind": "siglip",
            "decoder_local": 0,
            "decoder_global": 0,
        },
        "model",
    ),
    "bridged": ("bridged", {"anchor": "MEMBER", "augment": ("MEMBER",), "pairs": 1}, "model"),
}
# What has a case of its own; what the families have in common, which the decoder's cases walk over.
OWN_CASE = ("depth_routing", "mlp.moe", "soft_experts", "dense_former", "dropout")
COMMON = (*OWN_CASE, "attention", "mlp", "mup", "norm_eps", "init_std", "logit_softcap")


def hostile(hint):
    """Values to try of a setting of this declared type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [value for option in arguments for value in hostile(option)]
    if origin is Annotated:
        kind, allowed = arguments
        # More pieces than these are traced for minutes.
        ends = [x for x in (allowed.least, allowed.most) if x is not None and x < 100]
        return [*HOSTILE[kind], *map(kind, ends), *([LARGEST[kind]] if allowed.is_open else [])]
    if origin is Literal:
        return HOSTILE[str]
    if origin is tuple:
        return [(), 5, "text", None, *((value,) for value in hostile(arguments[0]))]
    return HOSTILE.get(hint, ())


def walked(case, config):
    """{name: type} of the settings that a case walks over."""
    family, _, beginnings = CASES[case]
    left = () if beginnings != "model" else OWN_CASE if family == "decoder" else COMMON
    found = {}
    for name, hint, _ in settings.leaves(config):
        key = name.removeprefix("config.")
        begins = any(f"{key}.".startswith(f"{beginning}.") for beginning in beginnings.split())
        if begins and not any(f"{key}.".startswith(f"model.{name}.") for name in left):
            found[key] = hint
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and what another run needs to be a member of a model: its config and tokenizer."""
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "member").mkdir()
    member = settings.as_dict(configured("decoder", {}, folder))
    (folder / "member/config.json").write_text(json.dumps(member))
    ByteTokenizer().save(folder / "member/tokenizer.json")
    return folder


def configured(family, changes, folder):
    """A tiny `Config`; MEMBER in the changes is the folder of another run."""
    config, member = common.base(family), str(folder / "member")
    tiny = {**TINY, "data.source": f"text:{folder / 'text.txt'}", "data.cache_dir": str(folder)}
    if family == "bridged":
        tiny = {key: value for key, value in tiny.items() if not key.startswith("model.")}
    changes = {
        key if key.partition(".")[0] in config else f"model.{key}": (member,)
        if value == ("MEMBER",)
        else member
        if value == "MEMBER"
        else value
        for key, value in changes.items()
    }
    return run_settings.check(common.apply(config, {**tiny, **changes}))


@pytest.fixture
def remembered(monkeypatch):
    """Texts are read, models are initialised and steps are traced once for equal settings."""
    texts, load = {}, build.load

    def load_once(config_data, **options):
        key = config_data, repr(options)
        if key not in texts:
            texts[key] = load(config_data, **options)
        return texts[key]

    monkeypatch.setattr(build, "load", load_once)
    monkeypatch.setattr(build, "_variables", functools.cache(build._variables))


def trace_step(launch, traced):
    """Trace a training step of a launch, unless that was done; of one with a new model its forward
    pass alone, which is a third of the work."""
    e, c, t = launch.experiment, launch.config, launch.training
    step = c.train, c.optim, c.data.batch_size, c.data.seq_len
    if {e.model, step} <= traced:
        return
    is_new = e.model not in traced
    traced.update((e.model, step))
    if is_new:
        tokens_BT = jax.ShapeDtypeStruct((8, 8), jnp.int32)
        keys = dict.fromkeys(("params", "dropout", "routing"), jax.random.key(0))
        jax.eval_shape(lambda tokens_BT: e.model.init(keys, tokens_BT, train=True), tokens_BT)
        return
    function = step_lib.make_train_step(e.model, t.optimizer, t.schedule, c, total_steps=e.steps)
    shape = (c.data.batch_size, c.data.seq_len)
    dtypes = dict(inputs=jnp.int32, targets=jnp.int32, weights=jnp.float32)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    jax.eval_shape(function, t.shapes, batch, jax.ShapeDtypeStruct((), jnp.uint32))


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
    ({"model.depth": 10**6}, "config.model.depth=1000000: must be at most 10000"),
    ({"model.depth_routing.every": 3}, "depth_routing.every=3: the stack has 2 blocks, so none"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.every": 3}, "moe.every=3: the stack has 2 blocks"),
    ({"steps": 0, "train_flops": "inf"}, "config.train_flops=inf: must be finite and at least 0"),
    ({"steps": 0, "train_flops": "nan"}, "config.train_flops=nan: must be finite and at least 0"),
    ({"steps": 0, "train_flops": 1e38}, "steps are counted in an int32"),
    ({"optim.learning_rate": 1e39}, "must be at most 3.4028235e+38 in size, the largest float32"),
    ({"optim.schedule.decay_steps": 1, "optim.schedule.warmup_steps": 2}, "decay_steps=1"),
    ({"rules": "5"}, "config.rules[0]=5: must be a pair"),
    ({"rules": "(5,)"}, "config.rules[0]=5: must be a pair (logical axis, mesh axis"),
    ({"rules": "(('mlp', 5),)"}, "config.rules[0]=('mlp', 5): must be a pair"),
    ({"losses.router_bce": "'much'"}, "config.losses.router_bce='much' must be a number or a dict"),
    ({"losses.z_loss": "nan"}, "config.losses.z_loss="),
    ({"checkpoint.best_metric": "eval/los"}, "no evaluation of this model gives it (did you mean"),
    ({"data.packing": True}, "is one document, and packing fills rows with several"),
    ({"adapter.kind": "lora"}, "config.init.run is empty: config.adapter.kind='lora' needs there"),
    ({"sample.prompt": "\udcff"}, "config.sample.prompt='\\udcff': has half of a surrogate pair"),
    ({"data.cache_dir": "\ud800"}, "config.data.cache_dir='\\ud800': has half of a surrogate pair"),
    ({"model.width": 10**7}, "config.model.width=10000000, the largest number of the model and"),
    ({"model.context": 10**9, "model.positions": "learned"}, "embedding, float32[1000000000, 16]"),
    ({"data.batch_size": 8 * 10**8}, "config.data.batch_size=800000000, the largest number"),
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
    ({"schedule": "expo", "rate": 1.0}, "config.losses.z_loss.schedule='expo' is none of constant"),
    ({"schedule": ["linear"]}, "config.losses.z_loss.schedule=['linear'] is none of constant"),
    ({"schedule": "constant", "value": "1"}, "config.losses.z_loss.value='1': expected float"),
    ({"schedule": "linear", "c_start": 0.0, "c_end": math.inf, "steps": 1}, "z_loss.c_end=inf"),
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
    (["--process_id=0"], "--coordinator_address, --num_processes and --process_id go together"),
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


def test_distributed_without_a_cluster():
    code = "from efx import hosts; hosts.connect(preemption=False)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    last = ended.stderr.splitlines()[-1]
    assert "UsageError: --distributed finds no cluster: no Slurm job" in last


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
    with pytest.raises(UsageError, match="this needs at least .* which has .*: all of it"):
        memory.check("this", {"all of it": total // 8 + 1, "nothing": 0})
    assert [memory.in_words(n) for n in (1, 1536, 2**40)] == ["1 bytes", "1.5 KiB", "1 TiB"]


def test_the_least_of_many_settings_trains(folder, root, tmp_path, monkeypatch):
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
