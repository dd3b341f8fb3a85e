"""Every config file builds, has a smoke variant, and mentions only settings that exist."""

import importlib
import itertools
import pathlib
import typing

import pytest
from refusals import refused

from efx import main, models
from efx.config.load import load_config
from efx.configs import common, mod
from efx.errors import UsageError
from efx.parallel import sharding
from efx.routing.config import DepthRoutingConfig
from efx.train import optim

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
def test_the_docstring_of_mod_lists_every_choice(name):
    choices = typing.get_args(typing.get_type_hints(DepthRoutingConfig)[name])
    assert choices and all(f'"{choice}"' in mod.__doc__ for choice in choices)


def test_depth_routing_decides_by_the_threshold():
    """The least loss in results/mod_table.json."""
    for name in ("mod", "mode", "latent:mod", "convert_mod", "shakespeare_char:mod"):
        routing = load_config(name).model.depth_routing
        assert (routing.kind, routing.causal) == ("mod", "threshold"), name


# ---- variants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_variant_loads_and_is_documented(name):
    namespace = {}
    exec((ROOT / "configs" / name).read_text(), namespace)  # its VARIANTS
    for variant in namespace["VARIANTS"]:
        assert load_config(f"configs/{name}:{variant}")
        assert variant in namespace["__doc__"] or variant == "smoke"


def loaded(name, variants):
    """The config of variants in this order, or the message that refuses them."""
    try:
        return load_config(f"configs/{name}:{','.join(variants)}")
    except UsageError as error:
        return str(error).replace(",".join(variants), "")


@pytest.mark.parametrize("name", FILES)
def test_variants_do_not_depend_on_their_order(name):
    """Any two give one config in both orders, or are refused in both; with smoke, a small one."""
    variants = list(importlib.import_module(f"efx.configs.{name[:-3]}").VARIANTS)
    for pair in itertools.combinations(variants, 2):
        config = loaded(name, pair)
        assert config == loaded(name, pair[::-1]), pair
        if isinstance(config, str):
            assert "smoke" not in pair and "\n" not in config and repr(pair[0]) in config, config
        elif "smoke" in pair and config.model.family != "bridged":  # which is made from runs
            assert_is_small(config)


def assert_is_small(config):
    length = config.data.seq_len
    model = models.build(config.model, vocab_size=257, context=length, dtype=config.train.dtype)
    cost = model.ledger(length).train_flops(config.data.batch_size * length)
    assert config.steps <= 60 and config.steps * cost < 5e11
    assert config.data.tokenizer in ("bytes", "chars")


def test_variants_that_contradict_each_other_are_refused():
    refused(lambda: load_config("shakespeare_char:gpu,cpu"), "'cpu'", "'gpu'")
    refused(lambda: load_config("encoder_decoder:serial,same_layer"), "config.model.cross_source")
    published = load_config("encoder_decoder:serial,published")  # a detail of the recipe changes
    assert published.model.cross_source == "final" and published.model.depth == 13
    assert load_config("latent:one_level,smoke").model.level_widths == (32,)
    assert load_config("shakespeare_char:mod").data.batch_size == 12  # the default recipe


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
    routing = models.build(flags.config.model, vocab_size=9, context=8, dtype="float32").config
    routing = routing.depth_routing
    assert routing.capacity == built
    assert routing.also_train == ("predictor",)
    assert routing.capacity_stages == ((0.5, 1.0),)
