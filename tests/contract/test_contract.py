"""Every family keeps the contract of models, and nobody asks more of a model than that."""

import ast
import functools
import inspect
import pathlib

import families
import jax
import numpy as np
import pytest
from test_calm import CASES, bridged

from efx import means, models, sharding
from efx.changes import Changes
from efx.models.contract import Model, Settings
from efx.models.reports import REPORTS
from efx.step import by_layer

# What linen gives to every module.
LINEN = {"apply", "init", "init_with_output", "clone", "path"}
MEMBERS = {name for name in (*vars(Model), *Model.__annotations__) if not name.startswith("_")}
# Where models are used, not made.
SPINE = [*pathlib.Path("efx").glob("*.py"), *pathlib.Path("efx/checkpoint").glob("*.py")]


def made():
    first = {}
    for name, row in families.FAMILIES.items():
        first.setdefault((row.changes.get("family"), "adapter.kind" in row.changes), name)
    return [*first.values(), "bridged"]


@pytest.mark.parametrize("name", made())
def test_a_family_keeps_it(name):
    case = next(iter(CASES.values()))
    model = bridged(*case) if name == "bridged" else families.build(name)
    assert isinstance(model.config, Settings) and isinstance(model, Model)
    assert model.config.family in models.FAMILIES
    for method in ("__call__", "features", "logits", "head_params", "head_fn",
                   "sum_head_gradients", "specs", "blocks", "ledger", "check_packing"):  # fmt: skip
        wanted = inspect.signature(getattr(Model, method)).parameters
        given = inspect.signature(getattr(type(model), method)).parameters
        kinds = {parameter.kind for parameter in given.values()}
        if inspect.Parameter.VAR_POSITIONAL in kinds:  # hands on what it is given
            continue
        assert [(p.name, p.default) for p in given.values()] == [
            (p.name, p.default) for p in wanted.values()
        ], method


def test_every_config_resolves_to_itself():
    """What `build` made out is complete: making it out again changes nothing."""
    for name in families.NAMES:
        config = families.build(name).config
        assert config.resolved() == config, name


def asked(path):
    """{attribute: line} of what is read from something that is called a model."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            outer = getattr(getattr(owner, "value", None), "id", "")
            # `config.model` is a block of settings, not a model.
            if name.strip("_") == "model" and "config" not in outer and outer != "c":
                found[node.attr] = f"{path}:{node.lineno}"
    return found


def test_the_rest_of_efx_asks_nothing_else(root, monkeypatch):
    monkeypatch.chdir(root)
    assert len(SPINE) > 25
    asks = [asked(path) for path in SPINE]
    assert {"ledger", "head_params", "context"} <= {name for found in asks for name in found}
    beyond = {where: name for found in asks for name, where in found.items()
              if name not in MEMBERS | LINEN}  # fmt: skip
    assert not beyond


def test_the_rest_of_efx_asks_for_no_feature_by_name(root, monkeypatch):
    """What evaluation reports of a feature is said beside the feature."""
    monkeypatch.chdir(root)
    rows = [name for report in REPORTS for name in (*report.words, *report.statistics)]
    features = {name.partition("/")[0] for name in rows}
    assert features >= {"router", "moe", "adapter", "dropout", "mlp"}
    for path in SPINE:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "\n" not in text:  # a docstring may give an example
                first, slash, _ = text.removeprefix("eval/").partition("/")
                assert not slash or first not in features, f"{path}:{node.lineno}"


# ---- statistics, layer by layer ----------------------------------------------------------------

STREAMS = ("block_0/encoder_0", "block_0/decoder", "last/block_0/decoder")
LEVELS = [
    f"{level}/blocks/{kind}/block_0"
    for level in ("encoder_0", "decoder_0")
    for kind in ("local_0", "global_1")
]
# {name: {statistic: the layers that report it}}
REPORTING = {
    "dropout_elementwise_mod": {
        "dropout/kept": ["embedding", "block_0", "block_1"],
        "router/accuracy": ["block_0", "block_1"],
    },
    "mode_staged": {"moe/max_load": ["block_0", "block_1"]},
    "recursion": {"router/recall": ["recursion_1", "recursion_2"]},
    "soft_mod": {"dropout/kept": ["block_0", "block_1"]},
    "streams_masks": {"dropout/kept": ["embedding", *STREAMS]},
    "streams_mod": {"router/accuracy": ["block_0/decoder", "block_1/encoder_0", "block_2/decoder"]},
    "streams_moe": {
        "dropout/kept": ["embedding", *STREAMS[:2], "block_1/encoder_0", "block_1/decoder"],
        "moe/entropy": ["block_1/encoder_0", "block_1/decoder"],
    },
    "adapter_streams": {"adapter/experts_per_token": [*STREAMS]},
    # What of a level is in none of its blocks: where it compresses, the attention that spreads.
    "latent_masks": {
        "dropout/kept": [
            *("embedding", "block_0", "block_1", "encoder_0/compress", *LEVELS, "decoder_0")
        ]
    },
    "latent_hidden_masks": {
        "dropout/kept": [
            *("embedding", "block_0", "block_1", "encoder_0/compress", *LEVELS),
            "encoder_0/compress/blocks/block_0",
        ]
    },
    "scanned": {
        "dropout/kept": ["embedding", *STREAMS, "block_1/encoder_0", "block_1/decoder"],
    },
    "bridged": {"router/accuracy": ["augment_models_1/block_1"]},
}


@functools.cache
def reported(name):
    """(model, its variables, all that a pass sows)."""
    if name == "bridged":
        model = bridged(*CASES["decoder_reads_two"])
    elif name == "scanned":
        changes = {"depth": 3, "scan_layers": True}
        model = families.make({**families.FAMILIES["streams_masks"].changes, **changes})
    else:
        model = families.build(name)
    variables = {"params": families.random_params(model), **families.random_state(model)}

    @families.jit
    def sow(variables):
        wanted = ["stats", means.COLLECTION]
        return model.apply(variables, families.tokens(), rngs=families.keys(), mutable=wanted)[1]

    return model, variables, jax.device_get(sow(variables))


@pytest.mark.parametrize("name", REPORTING)
def test_each_layer_reports_for_itself(name):
    """Whatever a family is made of: all that decides has its row, of what changes in masks, too."""
    model, variables, sown = reported(name)
    rows, changed = by_layer(means.sown(sown, "stats"), model), {}
    if model.config.dropout.learned:
        mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
        with sharding.use(mesh, sharding.DEFAULT_RULES):
            changes = Changes(model, "masks", mesh, sharding.DEFAULT_RULES, np.uint32(0))
            state = {key: tree for key, tree in variables.items() if key != "params"}
            batch = {"inputs": families.tokens()}
            changed = changes.names(variables["params"], state, batch)
    for statistic, layers in REPORTING[name].items():
        of_layers = {row for row in rows if row.startswith(f"{statistic}/")}
        assert of_layers == {f"{statistic}/{layer}" for layer in layers}
        if statistic == "dropout/kept":
            changing = {row.replace("kept", "changed") for row in (statistic, *of_layers)}
            assert set(changed) == changing


def test_the_row_of_a_layer_is_the_mean_over_what_it_sows():
    """Here of three masks."""
    model, _, sown = reported("streams_masks")
    rows = by_layer(means.sown(sown, "stats"), model)
    masks = sown["stats"]["last"]["block_0"]["decoder"]
    kept = [
        masks[f"dropout_{site}_output"]["dropout/kept"][0] for site in ("attention", "cross", "mlp")
    ]
    assert rows["dropout/kept/last/block_0/decoder"] == pytest.approx(np.mean(kept), rel=1e-6)
    assert rows["dropout/kept/embedding"] == sown["stats"]["dropout_embedding"]["dropout/kept"][0]
