"""Every config file builds, has a smoke variant, and mentions only settings that exist."""

import importlib
import json
import pathlib
import re
import typing

import pytest
from refusals import refused

from efx import models
from efx.config.flags import parse
from efx.config.load import config_of_run, described_configs, load_config, to_config
from efx.configs import common, mod
from efx.errors import nearest
from efx.layers import flops
from efx.parallel import sharding
from efx.routing.config import DepthRoutingConfig
from efx.train import optim

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py") if path.stem != "common")


def build(config):
    """(model, training FLOPs of a run) of a config."""
    c = config.data
    model = models.build(config.model, vocab_size=300, context=c.seq_len, dtype=config.train.dtype)
    return model, config.steps * model.ledger(c.seq_len).train_flops(c.batch_size * c.seq_len)


@pytest.mark.parametrize("variant", ["", ":smoke"])
@pytest.mark.parametrize("name", NAMES)
def test_a_config_builds(name, variant):
    config = load_config(f"{FOLDER / name}.py{variant}")
    sharding.check_rules(config.rules)
    model, cost = build(config)
    optim.make_optimizer(config.optim, config.steps, models.unboxed_shapes(model)["params"])
    assert config.data.batch_size % config.train.accumulation == 0
    assert not variant or cost < 1e12, "a smoke run takes about a minute on a CPU"


@pytest.mark.parametrize("name", ["score", "gate", "train_selection", "causal_decision"])
def test_the_docstring_of_mod_lists_every_choice(name):
    choices = typing.get_args(typing.get_type_hints(DepthRoutingConfig)[name])
    assert choices and all(f'"{choice}"' in mod.__doc__ for choice in choices)


def test_depth_routing_decides_by_the_threshold():
    """The least loss in results/mod_table.json."""
    for name in ("mod", "mode", "latent:mod", "convert_mod", "shakespeare_char:mod"):
        routing = load_config(name).model.depth_routing
        assert (routing.kind, routing.causal_decision) == ("mod", "threshold"), name


@pytest.mark.parametrize("name", NAMES)
def test_variants_are_documented_and_small_with_smoke(name):
    module = importlib.import_module(f"efx.configs.{name}")
    assert {*described_configs()[name][1]} == {*module.VARIANTS}
    for variant in module.VARIANTS:
        assert load_config(f"{name}:{variant}")
        config = load_config(f"{name}:smoke,{variant}")
        assert config.steps <= 60 and config.data.tokenizer in ("bytes", "chars")
        if config.model.family != "bridged":  # made from runs
            assert build(config)[1] < 5e11


@pytest.mark.parametrize("size", common.SIZES)
def test_the_guide_has_recipe_and_hours_of_a_size(size):
    guide = (FOLDER.parent / "docs/guide.md").read_text()
    (row,) = re.findall(rf"(?m)^\| `llama:{size}` \|.*$", guide)
    _, parameters, shape, steps, rate, warmup, *times = [x.strip() for x in row.split("|")[1:-1]]
    hours = []
    for name in ("llama", "mod"):
        config = load_config(f"{name}:{size}")
        c, model = (
            config.data,
            models.build(config.model, vocab_size=32_000, context=2048, dtype=config.train.dtype),
        )
        cost = config.steps * model.ledger(c.seq_len).train_flops(c.batch_size * c.seq_len)
        hours.append(cost / (0.4 * 989e12) / 3600)
        count = flops.count_params(models.unboxed_shapes(model)["params"])
        assert f"{count / 1e6:,.0f}M" == parameters
        assert f"{config.model.width:,}, {config.model.depth}" == shape
        assert f"{config.steps:,} of {c.batch_size * c.seq_len:,}" == steps
        assert config.optim.learning_rate == float(rate.strip("`"))
        assert f"{config.optim.schedule.warmup_steps:,} steps" == warmup
        assert abs(config.steps * c.batch_size * c.seq_len / count - 20) < 0.5
    words = [f"{60 * h:.0f} minutes" if h < 1 else f"{h:.0f} hours" for h in hours]
    assert words == times


def test_variants_combine_in_any_order_unless_they_disagree():
    assert load_config("encoder_decoder:masks,published") == load_config("encoder_decoder:seed")
    refused(lambda: load_config("mod:dense,recursion"), "'dense'", "'recursion'", "kind")
    refused(lambda: load_config("mod:recursion,dense"), "'dense'", "'recursion'", "kind")


# ---- mistakes in a config file -----------------------------------------------------------------

WRONG_LINES = [  # a line of a config file, what is named
    ('c.optim.schedule.kindd = "wsd"', "config.optim.schedule.kindd", "'kind'"),
    ("c.learning_rate = 1.0", "'config.optim.learning_rate'"),
    ("c.optim = dict(name='lion')", "config.optim.learning_rate"),
    ("del c.sample.top_p", "config.sample.top_p"),
    ("del c.log; c.log = 3", "config.log=3"),
    ("common.apply(c, {'modle.width': 3})", "config.modle", "'model'"),
    ("common.variant(c, 'x', x={'model.widht': 3})", "'x'", "'width'"),
    ("c = None", "ConfigDict"),
]


@pytest.mark.parametrize("line, named", [(line, named) for line, *named in WRONG_LINES])
def test_mistakes_in_a_config_file_are_refused(tmp_path, line, named):
    path = tmp_path / "mine.py"
    path.write_text(
        "from efx.configs import common\n\n\ndef get_config():\n    c = common.base()\n"
        f"    {line}\n    return c\n"
    )
    refused(lambda: load_config(str(path)), str(path), *named)


def test_misspelt_keys_are_refused_in_a_notebook_and_in_a_run_directory(tmp_path):
    config = common.base()
    config.data.packng = True
    refused(lambda: to_config(config), "config.data.packng", "'packing'")
    plain = common.base().to_dict()
    plain["log"]["evry"] = 5
    path = tmp_path / "config.json"
    path.write_text(json.dumps(plain))
    refused(lambda: config_of_run(tmp_path), str(path), "config.log.evry", "'every'")
    argv = ["efx", "--mode=sample", f"--workdir={tmp_path}"]
    refused(lambda: parse(argv), str(path), "config.log.evry", "'every'")


def test_only_close_names_are_suggested():
    assert not nearest("load", ["mod"]) and "evaluate" in nearest("eval", ["train", "evaluate"])
    assert not nearest("h100", ["h100", "h200"]) and "'mod'" in nearest("MoD", ["none", "mod"])
