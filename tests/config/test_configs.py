"""Every config file builds, has a smoke variant, and mentions only settings that exist."""

import pathlib
import re
import typing

import pytest

from efx import main, models, optim, sharding
from efx.config import load_config
from efx.configs import common, mod
from efx.errors import UsageError
from efx.layers.config import DepthRoutingConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted(
    p.name for p in (ROOT / "configs").glob("*.py") if p.name not in ("common.py", "__init__.py")
)


def keys(config, prefix=""):
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("variant", ["", ":smoke"])
@pytest.mark.parametrize("name", FILES)
def test_a_config_builds(name, variant):
    config = load_config(f"configs/{name}{variant}")
    whole = common.base(config.model.family)
    assert set(keys(config)) == set(keys(whole)), "a config adds or loses no key"
    sharding.check_rules(config.rules)
    model = models.build(
        config.model, vocab_size=300, context=config.data.seq_len, dtype=config.train.dtype
    )
    shapes = models.unboxed_shapes(model)["params"]
    optim.make_optimizer(config.optim, config.steps, shapes)
    assert config.data.batch_size % config.train.accumulation == 0
    if variant:
        per_step = model.ledger(config.data.seq_len).train_flops(
            config.data.batch_size * config.data.seq_len
        )
        assert config.steps * per_step < 1e12, "a smoke run takes about a minute on a CPU"


@pytest.mark.parametrize("name", ["gate", "train_selection", "causal"])
def test_the_knobs_of_mod_have_every_choice(name):
    """A gate was missing among them."""
    choices = typing.get_args(typing.get_type_hints(DepthRoutingConfig)[name])
    assert choices and not [one for one in choices if f'"{one}"' not in mod.__doc__]


@pytest.mark.parametrize(
    "name", ["mod", "mode", "latent:mod", "convert_mod", "shakespeare_char:mod"]
)
def test_what_is_routed_by_depth_decides_by_the_threshold(name):
    """The least loss of what small models were tried with (results/mod_table.json); one of the
    configs was left with the auxiliary loss, by which such models route next to nothing."""
    routing = load_config(name).model.depth_routing
    assert (routing.kind, routing.causal) == ("mod", "threshold")


def test_docstrings_count_the_micro_batches_that_there_are():
    """GPT-2's said 32 of its 20."""
    told = {
        name: re.findall(r"in (\d+)\s+micro-batches", (ROOT / "configs" / name).read_text())
        for name in FILES
    }
    assert told["gpt2.py"]
    for name, counts in told.items():
        accumulation = load_config(f"configs/{name}").train.accumulation
        assert all(int(count) == accumulation for count in counts), name


@pytest.mark.parametrize("name", FILES)
def test_every_variant_loads(name):
    namespace = {}
    exec((ROOT / "configs" / name).read_text(), namespace)  # its VARIANTS
    for variant in namespace["VARIANTS"]:
        assert load_config(f"configs/{name}:{variant}")
        assert variant in namespace["__doc__"] or variant == "smoke"


def test_a_misspelt_variant_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'dense'"):
        load_config("configs/mod.py:dens")


@pytest.mark.parametrize("given, built", [("0.25", 0.25), ("(0.125,0.5)", (0.125, 0.5))])
def test_capacity_on_the_command_line_is_a_number_or_a_list(given, built):
    flags = main.parse(
        [
            "efx",
            "--config=configs/mod.py",
            "--workdir=w",
            "--config.model.depth=4",
            f"--config.model.depth_routing.capacity={given}",
            "--config.model.depth_routing.also_train=('predictor',)",
            "--config.model.depth_routing.capacity_stages=((0.5,1.0),)",
        ]
    )
    model = models.build(flags.config.model, vocab_size=9, context=8, dtype="float32")
    assert model.config.depth_routing.capacity == built
    assert model.config.depth_routing.also_train == ("predictor",)
    assert model.config.depth_routing.capacity_stages == ((0.5, 1.0),)
