"""Every setting of depth routing can be imported, converted and exported, or is refused."""

import dataclasses
import functools
import typing

import families
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from refusals import refused
from test_export import checks, load, logits_of  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx import models
from efx.interop import hf_export, new_run
from efx.routing.config import DepthRoutingConfig

BASE = DepthRoutingConfig(
    kind="mod", gate="twice_sigmoid", causal_decision="threshold", capacity=0.5
)
# Values of settings without a list of choices in their type, and the settings that they need.
VALUES = {
    "recursions": (3,),
    "every": (1,),
    "blocks": ((0,), (0, 1)),
    "capacity": ((0.3, 0.7),),
    "capacity_stages": (((0.5, 1.0),),),
    "extra_decisions": (("aux_loss",), ("predictor",), ("threshold",)),
    "predictor_hidden": (3,),
    "threshold_decay": (0.5,),
    "threshold_warmup": (3,),
    "slack": (1.0,),
    "skip_mlp": (8,),
}
NEEDS = {
    "recursions": {"kind": "recursion"},
    ("capacity", (0.3, 0.7)): {"blocks": (0, 1)},
    "predictor_hidden": {"causal_decision": "predictor"},
    "threshold_warmup": {"train_selection": "threshold"},
    "score": {"gate": "one"},
}
TYPES = typing.get_type_hints(DepthRoutingConfig)
NAMES = [field.name for field in dataclasses.fields(DepthRoutingConfig)]


def values_of(name):
    if TYPES[name] is bool:
        return (False, True)
    return VALUES.get(name) or [v for v in typing.get_args(TYPES[name]) if v != "none"]


CASES = [
    (name, value)
    for name in NAMES
    for value in values_of(name)
    if name == "kind" or value != getattr(BASE, name)
]
# One of each branch; the others are slow.
DEFAULT = (
    ("kind", "mod"),
    ("kind", "recursion"),
    ("gate", "tanh"),
    ("score", "stochastic"),
    ("causal_decision", "predictor"),
)


def test_every_setting_has_a_case():
    assert {name for name, _ in CASES} == set(NAMES)


@functools.cache
def dense():
    """(model, its parameters)"""
    model = families.make({"depth": 3, "width": 16, "attention.num_heads": 2}, context=16)
    return model, families.random_params(model)


def routed_model(name, value):
    changes = NEEDS.get(name, {}) | NEEDS.get((name, value), {}) | {name: value}
    return models.changed(dense()[0], depth_routing=dataclasses.replace(BASE, **changes))


def logits(model, variables, selection):
    model = model.clone(selection=selection)
    return model.apply(variables, families.tokens(batch=2, length=16), rngs=families.keys())


@pytest.mark.parametrize(
    "name, value",
    [pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow) for case in CASES],
)
def test_a_setting_is_imported_converted_and_exported(name, value, tmp_path, load):  # noqa: F811
    (model, before), routed = dense(), routed_model(name, value)
    routing = routed.config.depth_routing
    trained = {"params": families.random_params(routed), **families.random_state(routed)}

    imported = new_run.with_dense(trained, {"params": before})
    assert flatten_dict(imported["params"]).keys() == flatten_dict(trained["params"]).keys()

    if routing.kind == "mod":
        converted = new_run.with_dense(trained, {"params": before}, routing)
        has_attention = routing.target != "mlp_only"
        if routing.gate in ("twice_sigmoid", "one") and has_attention:
            whole = models.changed(routed, **{"depth_routing.capacity": 1.0})
            found = logits(whole, converted, "train")
            expected = logits(model, {"params": before}, "train")
            np.testing.assert_allclose(found, expected, atol=1e-5)

    def export():
        hf_export.write_model(tmp_path / "new", routed, trained)

    is_extra = routing.target != "block" or routing.skip_mlp
    if routing.kind == "recursion" or routing.score != "router" or is_extra:
        key = "kind" if routing.kind == "recursion" else name
        refused(export, f"config.model.depth_routing.{key}=")
        return
    export()
    found = logits_of(load(tmp_path / "new"), families.tokens(batch=2, length=16))
    np.testing.assert_allclose(found, logits(routed, trained, "causal"), atol=1e-4)


def test_an_unknown_array_is_not_exported(tmp_path):
    model = routed_model("kind", "mod")
    params, state = families.random_params(model), families.random_state(model)
    params["layers"]["block_1"]["new_norm"] = {"scale": np.ones(16)}
    variables = {"params": params, **state}
    name = "layers/block_1/new_norm/scale"
    refused(lambda: hf_export.write_model(tmp_path / "new", model, variables), name)
