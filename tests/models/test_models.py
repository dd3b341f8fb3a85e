"""Building decoders: presets, parameters and their initial values, parts against their formulas."""

import families
import jax
import jax.numpy as jnp
import latent_helpers
import numpy as np
import pytest
from flax import linen as nn

from efx import models
from efx.configs import common
from efx.layers import norms

# ---- from config to model ----------------------------------------------------------------------


def build(changes, context=8):
    """A decoder with the defaults of a config but for these changes of `config.model`."""
    config = common.base()
    common.apply(config, {f"model.{key}": value for key, value in changes.items()})
    return models.build(config.model, vocab_size=16, context=context, dtype="float32")


PRESETS = {
    "gpt2": {
        "norm": "layernorm", "use_bias": True, "positions": "learned", "tied": True,
        "mlp.activation": "gelu", "mlp.hidden_size": 4 * 128, "attention.rope_theta": 0.0,
    },
    "llama": {
        "norm": "rmsnorm", "use_bias": False, "positions": "rope", "tied": False,
        # 8 / 3 of the width, rounded up to a multiple of 32
        "mlp.activation": "swiglu", "mlp.hidden_size": 352, "attention.rope_theta": 10000.0,
    },
}  # fmt: skip
SHARED = {"norm_eps": 1e-5, "attention.num_kv_heads": 4, "attention.head_dim": 32}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_published_architecture(preset):
    config = build({"preset": preset}).config
    for name, expected in {**PRESETS[preset], **SHARED}.items():
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        assert (value(128) if callable(value) else value) == expected, name


def test_settings_win_over_the_preset():
    changes = {"use_bias": False, "tied": False, "positions": "none", "mlp.activation": "swiglu"}
    model = build({"preset": "gpt2", "norm": "rmsnorm", **changes})
    names = paths(families.variable_shapes(model)["params"])
    assert {"head/kernel", "layers/block_0/mlp/gate/kernel"} <= set(names)
    assert not any("bias" in name or "positions" in name for name in names)


ROUTED = [
    ({}, {1: 0.125, 3: 0.125, 5: 0.125}),
    ({"every": 1, "capacity": 0.5}, dict.fromkeys(range(6), 0.5)),
    ({"blocks": (0, 4)}, {0: 0.125, 4: 0.125}),
    ({"capacity": (0.5, 0.25, 1.0)}, {1: 0.5, 3: 0.25, 5: 1.0}),
    ({"blocks": (2, 3), "capacity": (0.5, 0.25)}, {2: 0.5, 3: 0.25}),
]


def test_which_blocks_are_routed_and_their_capacities():
    for changes, expected in ROUTED:
        changes = {f"depth_routing.{key}": value for key, value in changes.items()}
        specs = build({"depth": 6, "depth_routing.kind": "mod", **changes}).specs()
        routed = {i: s.capacity for i, s in enumerate(specs) if s.routing is not None}
        assert routed == expected, changes


# ---- parameters --------------------------------------------------------------------------------


def paths(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def test_parameter_paths():
    """Regexes of optimisers, checkpoints and the Hugging Face export rely on them."""
    shapes = {name: leaf.shape for name, leaf in paths(families.params_of("mod")).items()}
    block = {
        **{f"attention/{name}/kernel": (32, 32) for name in ("query", "key", "value", "out")},
        "mlp/gate/kernel": (32, 96),
        "mlp/up/kernel": (32, 96),
        "mlp/down/kernel": (96, 32),
        "norm_attention/scale": (32,),
        "norm_mlp/scale": (32,),
    }
    assert shapes == {
        "embed/embedding": (48, 32),
        "head/kernel": (32, 48),
        "norm_final/scale": (32,),
        "layers/block_1/router": (32,),
        **{f"layers/block_{i}/{name}": shape for i in (0, 1) for name, shape in block.items()},
    }
    gpt2 = paths(families.params_of("gpt2"))
    assert {
        "positions_embed/embedding",
        "norm_final/bias",
        "layers/block_0/attention/query/bias",
        "layers/block_0/mlp/down/bias",
        "layers/block_1/norm_mlp/bias",
    } <= set(gpt2)
    assert "head/kernel" not in gpt2


def test_initial_values():
    """N(0, 0.02), residual outputs N(0, 0.02 / sqrt(2 L)), biases 0 and scales 1, all float32;
    other ones in each layer and for each key."""
    model = families.make({"preset": "gpt2", "width": 64, "init_std": 0.02})
    draw = families.jit(lambda seed: nn.unbox(models.init(model, jax.random.key(seed)))["params"])
    first, second = (paths(draw(np.uint32(seed))) for seed in (0, 1))
    for name, leaf in first.items():
        assert leaf.dtype == jnp.float32, name
        if name.endswith("bias"):
            assert np.all(leaf == 0), name
        elif name.endswith("scale"):
            assert np.all(leaf == 1), name
        else:
            out = name.endswith(("attention/out/kernel", "mlp/down/kernel"))
            std = 0.02 / 4**0.5 if out else 0.02
            assert abs(np.std(leaf) / std - 1) < 0.06, name
            assert abs(np.mean(leaf)) < 0.1 * std, name
            assert np.mean(leaf != second[name]) > 0.9, name  # padding of the vocabulary is 0
    layers = [np.asarray(first[f"layers/block_{i}/mlp/up/kernel"]).ravel() for i in (0, 1)]
    assert abs(np.corrcoef(layers)[0, 1]) < 0.1


# ---- parts against formulas --------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "gpt2"},
        {"family": "encoder_decoder", "order": "cross_only"},
        {**latent_helpers.SMALL, **latent_helpers.LEVELS[1], **latent_helpers.NONE},
    ],
    ids=["decoder", "encoder_decoder", "latent"],
)
def test_dropout_is_on_in_training_only_and_depends_on_the_key(changes):
    """At each site alone."""
    tokens_BT = families.tokens(batch=2, length=8)

    def dropping(*sites):
        dropout = {"dropout.kind": "standard", "dropout.rate": 0.5, "dropout.sites": sites}
        return families.make({"depth": 1, **changes, **(dropout if sites else {})})

    params = families.random_params(dropping())

    @families.jit
    def run(key):
        everything = dropping(*families.ALL_SITES).apply({"params": params}, tokens_BT)
        noisy = [
            dropping(site).apply({"params": params}, tokens_BT, train=True, rngs={"dropout": key})
            for site in families.ALL_SITES
        ]
        return dropping().apply({"params": params}, tokens_BT), everything, noisy

    plain, off, noisy = jax.device_get(run(jax.random.key(0)))
    np.testing.assert_allclose(off, plain, atol=1e-5)
    again, other = (jax.device_get(run(jax.random.key(seed)))[2] for seed in (0, 1))
    for site, a, same, b in zip(families.ALL_SITES, noisy, again, other, strict=True):
        assert np.abs(a - plain).max() > 0.1, site
        assert np.array_equal(a, same) and not np.array_equal(a, b), site


def test_norms_of_large_values_do_not_overflow():
    layer, x = norms.LayerNorm(use_scale=False, use_bias=False), 1e18 * np.float32([[1, -2, 5]])
    assert np.isfinite(jax.jit(layer.apply)({}, x)).all()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_float32_products_and_their_gradients_bfloat16_ones(name):
    """Of a tied table and of an output layer, in a model that computes in bfloat16."""
    model = families.build(name, "bfloat16")
    jaxpr = jax.make_jaxpr(jax.grad(families.loss_fn(model)))(
        families.params_of(name), families.tokens()
    )
    products = []
    for equation in families.equations(jaxpr.jaxpr):
        arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        of_vocabulary = any(48 in getattr(array, "shape", ()) for array in arrays)
        if equation.primitive.name == "dot_general" and of_vocabulary:
            products.append(tuple(array.dtype.name for array in arrays))
    half = "bfloat16"
    assert sorted(products) == [(half, half, half)] * 2 + [(half, half, "float32")]


def test_a_batch_is_applied_with_its_positions_and_documents():
    model, names = families.build("llama"), ("inputs", "positions", "segment_ids")
    packed = dict(zip(names, np.arange(3), strict=True)) | {"targets": 9}
    got = model.apply_to_batch({}, packed, method=lambda model, *arguments: arguments)
    assert got == (0, 1, 2)
    got = model.apply_to_batch({}, {"inputs": 0}, method=lambda model, *arguments: arguments)
    assert got == (0, None, None)
