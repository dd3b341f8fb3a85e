"""Parameters: their shapes are checked, and traced without values where nobody takes any."""

import families
import jax
import numpy as np
import pytest
from flax import errors

from efx import means, models
from efx.layers.routing import decisions, moe
from efx.parameter import only_shapes


def test_another_shape_is_an_error():
    model, params = families.build("llama"), families.params_of("llama")
    mlp = {**params["layers"]["block_1"]["mlp"], "up": {"kernel": np.zeros((32, 5), np.float32)}}
    block = {**params["layers"]["block_1"], "mlp": mlp}
    wrong = {**params, "layers": {**params["layers"], "block_1": block}}
    with pytest.raises(errors.ScopeParamShapeError, match=r"layers/block_1/mlp/up.*\(32, 5\)"):
        jax.eval_shape(lambda: model.apply({"params": wrong}, families.tokens()))


@pytest.mark.parametrize("name", ["mode_staged", "streams_masks", "latent_parts", "adapter_mod"])
def test_shapes_are_those_of_an_initialisation(name):
    """Boxes of logical axes and averages beside the parameters included."""
    model = families.build(name)
    expected = jax.eval_shape(lambda key: models.init(model, key), jax.random.key(0))
    found = models.variable_shapes(model)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert str(found) == str(expected)


def test_nothing_is_drawn_for_shapes():
    """And drawing is as before after it."""
    model = families.build("llama")

    def program():
        return str(jax.make_jaxpr(lambda: models.init(model, jax.random.key(0)))())

    drawn = program()
    with only_shapes():
        shapes = program()
    assert "random_bits" in drawn and "random_bits" not in shapes
    assert program() == drawn


@pytest.mark.parametrize("name", ["mode_staged", "moe_expert_choice"])
def test_reports_are_made_for_those_who_take_them(name, monkeypatch):
    reported = []

    def watch(module, function):
        real = getattr(module, function)

        def called(*arguments):
            reported.append(function)
            return real(*arguments)

        monkeypatch.setattr(module, function, called)

    watch(decisions, "statistics")
    watch(moe, "_surplus")
    watch(means, "sow")
    model = families.build(name)

    def trace(**options):
        reported.clear()
        variables = families.variables_of(name)
        jax.eval_shape(lambda: model.apply(variables, families.tokens(), **options))
        return set(reported)

    assert trace() == set()
    routed = any(spec.routing is not None for spec in model.blocks().values())
    for collection in ("losses", "stats", means.COLLECTION):
        wanted = {"_surplus", "sow", *(["statistics"] if routed else [])}
        assert trace(mutable=[collection]) == wanted
