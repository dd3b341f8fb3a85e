"""Every setting of depth routing can be imported, converted and exported, or is refused."""

import dataclasses
import functools
import re
import typing

import families
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from test_export import load, logits_of  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx import models
from efx.errors import UsageError
from efx.interop import convert_run, hf
from efx.interop.weights import SINGLE
from efx.layers.config import DepthRoutingConfig
from efx.layers.routing import parameters

BASE = DepthRoutingConfig(kind="mod", gate="twice_sigmoid", causal="threshold", capacity=0.5)
# Values of settings without a list of choices in their type, and the settings that they need.
VALUES = {
    "recursions": (3,),
    "every": (1,),
    "blocks": ((0,), (0, 1)),
    "capacity": (0.25, (0.3, 0.7)),
    "capacity_stages": (((0.5, 1.0),),),
    "also_train": (("aux_loss",), ("predictor",), ("threshold",)),
    "predictor_hidden": (3,),
    "threshold_decay": (0.5,),
    "threshold_warmup": (3,),
    "slack": (1.0,),
    "skip_mlp": (8,),
}
NEEDS = {
    "recursions": {"kind": "recursion"},
    ("capacity", (0.3, 0.7)): {"blocks": (0, 1)},
    "predictor_hidden": {"causal": "predictor"},
    "threshold_warmup": {"train_selection": "threshold"},
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


def test_every_setting_has_a_case():
    assert {name for name, _ in CASES} == set(NAMES)


@functools.cache
def dense_model():
    return families.make({"depth": 3, "width": 16, "attention.num_heads": 2}, context=16)


@functools.cache
def dense_params():
    return families.random_params(dense_model())


def routed_model(name, value):
    changes = NEEDS.get(name, {}) | NEEDS.get((name, value), {}) | {name: value}
    return models.changed(dense_model(), depth_routing=dataclasses.replace(BASE, **changes))


def paths_of(tree):
    return set(flatten_dict(tree, sep="/"))


def logits(model, variables, selection):
    model = model.clone(selection=selection)
    return model.apply(variables, families.tokens(batch=2, length=16), rngs=families.keys())


@functools.cache
def dense_logits():
    return logits(dense_model(), {"params": dense_params()}, "train")


@pytest.mark.parametrize("name, value", CASES)
def test_a_setting_is_imported_converted_and_exported(name, value, tmp_path, load):  # noqa: F811
    dense, routed = dense_model(), routed_model(name, value)
    routing, before = routed.config.depth_routing, dense_params()
    trained = {"params": families.random_params(routed), **families.random_state(routed)}

    # The table has every new array.
    new = paths_of(trained["params"]) - paths_of(before)
    assert all(re.fullmatch(parameters.params_pattern(), path) for path in new), new
    new |= paths_of(trained.get("state", {}))
    rows = [row for row in parameters.TABLE if row.exists(routing)]
    assert set(map(parameters.find, new)) == set(rows)

    dense_arrays, _ = hf.params_to_hf(before, dense)
    imported = hf.params_from_hf(dense_arrays, routed, jax.random.key(0))
    assert paths_of(imported) == paths_of(trained["params"])

    if routing.kind == "mod":
        blocks = range(dense.config.depth)
        converted = convert_run.convert_variables({"params": before}, trained, blocks, routing)
        if routing.control or routing.gate in convert_run._GATES:
            whole = models.changed(routed, **{"depth_routing.capacity": 1.0})
            found = logits(whole, converted, "train")
            np.testing.assert_allclose(found, dense_logits(), atol=1e-5)

    key = "kind" if routing.kind == "recursion" else name
    is_unknown = any(row.exported is None for row in rows)
    if routing.kind == "recursion" or routing.control or is_unknown:
        with pytest.raises(UsageError, match=rf"^config\.model\.depth_routing\.{key}=.*$"):
            hf.save_hf(tmp_path / "new", trained["params"], routed, state=trained.get("state"))
        return
    hf.save_hf(tmp_path / "new", trained["params"], routed, state=trained.get("state"))
    found, _ = logits_of(load(tmp_path / "new"), families.tokens(batch=2, length=16))
    np.testing.assert_allclose(found, logits(routed, trained, "causal"), atol=1e-4)


@pytest.mark.parametrize("kind", ["none", "mod"])
def test_an_unknown_or_missing_array_is_not_exported(kind, tmp_path):
    model = routed_model("kind", kind)
    params = families.random_params(model)
    state = families.random_state(model).get("state", {})
    block = {**params["layers"]["block_1"], "new_norm": {"scale": np.ones(16)}}
    unknown = {**params, "layers": {**params["layers"], "block_1": block}}
    with pytest.raises(UsageError, match=r"^config\.model\..*=.*layers/block_1/new_norm/scale$"):
        hf.save_hf(tmp_path / "unknown", unknown, model, state=state)
    if kind == "mod":
        words = r"depth_routing\.causal='threshold': .* lacks quantile$"
        with pytest.raises(UsageError, match=words):
            hf.save_hf(tmp_path / "missing", params, model)


def test_an_export_with_other_arrays_is_not_loaded(tmp_path, load):  # noqa: F811
    model = routed_model("kind", "mod")
    params, state = families.random_params(model), families.random_state(model)["state"]
    hf.save_hf(tmp_path / "new", params, model, state=state)
    path = tmp_path / "new" / SINGLE
    arrays = load_file(path)
    router = arrays.pop("layers.1.router")
    save_file(arrays, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys: layers\.1\.router$"):
        load(tmp_path / "new")
    arrays |= {"layers.1.router": router, "layers.1.new_norm.weight": router}
    save_file(arrays, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected_keys: layers\.1\.new_norm\.weight$"):
        load(tmp_path / "new")
