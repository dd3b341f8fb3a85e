"""Every setting has its range: each value of it makes an experiment whose step can be traced, or is
refused in one line, with nothing made in the run directory.

benchmarks/hostile_settings.py makes the values, for the settings of all families.
"""

import jax
import jax.numpy as jnp
import pytest
import test_cli
from refusals import refused

from benchmarks import hostile_settings
from benchmarks.hostile_settings import CASES, configured, hostile, trace_step, walked, write_folder
from efx.config import schema
from efx.config.run import Config
from efx.errors import UsageError
from efx.models import FAMILIES
from efx.train import memory, trainer


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


QUICK = "masks", "mod", "soft_experts"


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_any_value_of_any_setting(case, folder, tmp_path, remembered, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some values are names of folders
    family, changes, _ = CASES[case]
    config, workdir = configured(family, changes, folder), tmp_path / "run"
    counts, wrong, traced = {"made": 0, "refused": 0}, [], set()
    traced.add(trainer.Trainer(config, workdir, (), 0.0, None).experiment.model)
    for key, hint in walked(case, config).items():
        for value in hostile(hint):
            try:
                changed = schema.replaced(config, {key: value})
                trace_step(trainer.Trainer(changed, workdir, (), 0.0, None), traced)
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
    refused(lambda: memory.check("this", {"all of it": total // 8 + 1, "nothing": 0}), "all of it")
    assert [memory.in_words(n) for n in (1, 1536, 2**40)] == ["1 bytes", "1.5 KiB", "1 TiB"]


@pytest.mark.slow
def test_a_run_with_many_settings_at_their_least_ends(
    folder, root, tmp_path, monkeypatch, one_device
):
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
        config = Config(model=FAMILIES[family].config())
        every |= {name.removeprefix("config.") for name, _, _ in schema.leaves(config)}
    for case, (family, changes, _) in CASES.items():
        seen |= set(walked(case, configured(family, changes, folder)))
    assert every == seen
