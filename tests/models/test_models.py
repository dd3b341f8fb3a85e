"""Building models: presets, settings and their mistakes, parameters, scanning, the output layer."""

import dataclasses

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx import models
from efx.configs import common
from efx.errors import UsageError
from efx.layers import attend, norms, stack
from efx.layers.mlp import MLP

# ---- from config to model ----------------------------------------------------------------------


def config_model(**changes):
    """`config.model` of the default config as a plain dict, dotted changes applied."""
    config = common.base()
    common.apply(config, {f"model.{key.replace('__', '.')}": v for key, v in changes.items()})
    return config.model.to_dict()


def build(block, vocab_size=16, context=8, dtype="float32"):
    return models.build(block, vocab_size=vocab_size, context=context, dtype=dtype)


def test_presets():
    gpt2, llama = (build(config_model(preset=preset)) for preset in ("gpt2", "llama"))
    for model, norm, bias, positions, tied, activation, hidden in (
        (gpt2, "layernorm", True, "learned", True, "gelu", 4 * 128),
        (llama, "rmsnorm", False, "rope", False, "swiglu", 352),  # 8 * 128 / 3, up to 32s
    ):
        assert (
            model.config.norm,
            model.config.use_bias,
            model.config.positions,
            model.config.tied,
        ) == (norm, bias, positions, tied)
        assert model.config.mlp.activation == activation and model.config.norm_eps == 1e-5
        assert model.config.mlp.hidden_size(128) == hidden
        assert model.config.attention.num_kv_heads == 4 and model.config.attention.head_dim == 32
    assert not gpt2.config.attention.rope_theta and llama.config.attention.rope_theta == 10000.0


def test_settings_win_over_the_preset():
    model = build(
        config_model(
            preset="gpt2",
            norm="rmsnorm",
            use_bias=False,
            tied=False,
            positions="none",
            norm_eps=1e-6,
            mlp__activation="swiglu",
        )
    )
    assert (
        model.config.norm,
        model.config.use_bias,
        model.config.tied,
        model.config.positions,
        model.config.norm_eps,
    ) == ("rmsnorm", False, False, "none", 1e-6)
    assert model.config.mlp.activation == "swiglu"
    names = paths(families.random_params(model))
    assert "head/kernel" in names and "layers/block_0/mlp/gate/kernel" in names
    assert not any("bias" in name or "positions" in name for name in names)


def test_context_of_the_config_wins():
    assert build(config_model(), context=8).context == 8
    assert build(config_model(context=24), context=8).context == 24


def changed(*path, value):
    block = node = config_model()
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return block


def removed(*path):
    block = node = config_model()
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return block


@pytest.mark.parametrize(
    "block, message",
    [
        (changed("family", value="decodre"), r"config\.model\.family='decodre'.*mean 'decoder'"),
        (
            changed("depth_routing", "capactiy", value=1.0),
            r"config\.model\.depth_routing\.capactiy is not a setting.*'capacity'",
        ),
        (removed("mlp", "hidden"), r"config\.model\.mlp\.hidden is missing"),
        (changed("width", value=-4), r"config\.model\.width=-4: must be at least 1"),
        (
            changed("width", value=130),
            r"width=130 is not divisible by config\.model\.attention\.num_heads=4",
        ),
        (
            changed("attention", "num_kv_heads", value=3),
            r"num_heads=4 is not divisible by .*num_kv_heads=3",
        ),
        (
            changed("attention", "head_dim", value=3),
            r"config\.model\.attention\.head_dim=3: rope needs an even",
        ),
        (changed("dropout", "rate", value=1.0), r"config\.model\.dropout\.rate=1\.0: must be in"),
        (changed("depth_routing", "capacity", value=0.0), r"capacity=0\.0: must be in \(0, 1\]"),
        (changed("depth_routing", "capacity", value=1.5), r"capacity=1\.5: must be in \(0, 1\]"),
        (
            changed("depth_routing", "capacity", value=(0.5, 2)),
            r"capacity=\(0\.5, 2\): must be in",
        ),
        (changed("depth_routing", "slack", value=0.5), r"depth_routing\.slack=0\.5"),
        (changed("depth_routing", "every", value=0), r"depth_routing\.every=0"),
        (changed("depth_routing", "blocks", value=(1, 4)), r"blocks=\(1, 4\).*between 0 and 3"),
        (changed("depth_routing", "blocks", value=(2, 1)), r"blocks=\(2, 1\).*ascending"),
    ],
)
def test_bad_settings_are_named(block, message):
    with pytest.raises(UsageError, match=message) as error:
        build(block)
    assert "\n" not in str(error.value)


def test_a_bad_dtype_is_named():
    with pytest.raises(UsageError, match=r"config\.train\.dtype='float16': expected float32 or"):
        build(config_model(), dtype="float16")


def test_integers_will_do_for_floats():
    model = build(changed("depth_routing", "slack", value=2))
    assert model.config.depth_routing.slack == 2.0 and isinstance(
        model.config.depth_routing.slack, float
    )


# ---- layers of a stack -------------------------------------------------------------------------


def capacities(**changes):
    block = config_model()
    block["depth_routing"].update(kind="mod", **changes)
    block["depth"] = 6
    specs = build(block).specs()
    return {i: spec.capacity for i, spec in enumerate(specs) if spec.routing is not None}


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(), {1: 0.125, 3: 0.125, 5: 0.125}),
        (dict(every=1, capacity=0.5), dict.fromkeys(range(6), 0.5)),
        (dict(every=3), {2: 0.125, 5: 0.125}),
        (dict(every=6), {5: 0.125}),
        (dict(blocks=(0, 4)), {0: 0.125, 4: 0.125}),
        (dict(capacity=(0.5, 0.25, 1.0)), {1: 0.5, 3: 0.25, 5: 1.0}),
        (dict(blocks=(2, 3), capacity=(0.5, 0.25)), {2: 0.5, 3: 0.25}),
    ],
)
def test_which_blocks_are_routed(changes, expected):
    assert capacities(**changes) == expected


def test_a_list_of_capacities_must_fit():
    with pytest.raises(
        UsageError, match=r"capacity=\(0\.5, 0\.25\): expected one value, or one for"
    ):
        capacities(capacity=(0.5, 0.25))


def test_period():
    a, b = stack.LayerSpec(None), stack.LayerSpec(None, capacity=0.5)
    assert stack.period((a, a, a)) == 1
    assert stack.period((a, b, a, b)) == 2
    assert stack.period((a, a, b, a, a, b)) == 3
    for specs in ((a, b), (a, b, a), (a, b, b, a)):
        with pytest.raises(UsageError, match=r"config\.model\.scan_layers=True: the \d layers"):
            stack.period(specs)


def test_scanned_and_unrolled_parameters_are_each_other():
    """Also of stacks whose pattern is longer than one layer, and of other collections."""
    rng = np.random.default_rng(0)
    a, b = stack.LayerSpec(None), stack.LayerSpec(None, capacity=0.5)
    specs = (a, b, a, b, a, b)
    layers = {f"block_{i}": {"w": rng.normal(size=3).astype(np.float32)} for i in range(6)}
    for i in (1, 3, 5):
        layers[f"block_{i}"]["r"] = rng.normal(size=2).astype(np.float32)
    stacked = stack.scan_params(layers, specs)
    assert stacked["units"]["block_1"]["r"].shape == (3, 2)
    np.testing.assert_array_equal(stacked["units"]["block_0"]["w"][2], layers["block_4"]["w"])
    jax.tree.map(np.testing.assert_array_equal, stack.unroll_params(stacked, specs), layers)
    only_routed = {name: layer for name, layer in layers.items() if "r" in layer}
    stacked = stack.scan_params(only_routed, specs)
    assert set(stacked["units"]) == {"block_1"}
    jax.tree.map(np.testing.assert_array_equal, stack.unroll_params(stacked, specs), only_routed)


def test_unroll_leaves_unrolled_models_alone():
    model, params = families.build("llama"), families.params_of("llama")
    assert models.unroll(model, params) == (model, params)


# ---- parameters --------------------------------------------------------------------------------


def paths(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def test_parameter_paths():
    """Others rely on them: regexes of optimisers, checkpoints, Hugging Face."""
    shapes = {name: leaf.shape for name, leaf in paths(families.params_of("mod")).items()}
    assert shapes == {
        "embed/embedding": (48, 32),
        "head/kernel": (32, 48),
        "norm_final/scale": (32,),
        "layers/block_1/router": (32,),
        **{
            f"layers/block_{i}/{name}": shape
            for i in (0, 1)
            for name, shape in {
                "attention/query/kernel": (32, 32),
                "attention/key/kernel": (32, 32),
                "attention/value/kernel": (32, 32),
                "attention/out/kernel": (32, 32),
                "mlp/gate/kernel": (32, 96),
                "mlp/up/kernel": (32, 96),
                "mlp/down/kernel": (96, 32),
                "norm_attention/scale": (32,),
                "norm_mlp/scale": (32,),
            }.items()
        },
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


@pytest.fixture(scope="module")
def initial():
    """{path: value} of a new gpt2 model, 4 layers."""
    model = families.make({"preset": "gpt2", "depth": 4, "width": 64, "init_std": 0.02})
    return [paths(families.initial(model, seed)["params"]) for seed in (0, 1)]


def test_initialisation(initial):
    """N(0, 0.02), residual outputs N(0, 0.02 / sqrt(2 L)), float32; biases 0, scales 1."""
    for name, leaf in initial[0].items():
        assert leaf.dtype == jnp.float32, name
        if name.endswith("bias"):
            assert np.all(leaf == 0), name
        elif name.endswith("scale"):
            assert np.all(leaf == 1), name
        else:
            out = name.endswith(("attention/out/kernel", "mlp/down/kernel"))
            std = 0.02 / 8**0.5 if out else 0.02
            assert abs(np.std(leaf) / std - 1) < 0.06, name
            assert abs(np.mean(leaf)) < 0.1 * std, name


def test_initialisation_depends_on_the_key_and_differs_between_layers(initial):
    first, second = initial
    kernels = [name for name in first if name.endswith("kernel")]
    assert all(np.all(first[name] != second[name]) for name in kernels)
    alike = [np.asarray(first[f"layers/block_{i}/mlp/up/kernel"]) for i in range(4)]
    assert np.abs(np.corrcoef([a.ravel() for a in alike]) - np.eye(4)).max() < 0.1


# ---- the two halves of a call ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_features_and_logits_are_the_call(name):
    model, params = families.build(name), families.params_of(name)
    tokens_BT = families.tokens()

    @families.jit
    def halves(params):
        x_BTD = model.apply({"params": params}, tokens_BT, method="features")
        flat_ND = x_BTD.reshape(-1, model.config.width)
        return model.head_fn(model.head_params(params), flat_ND)

    logits_NV = halves(params)
    assert set(model.head_params(params)) == {"embed" if model.config.tied else "head"}
    assert logits_NV.shape[1] == model.padded_vocab == 48 and logits_NV.dtype == jnp.float32
    padding = np.asarray(logits_NV[:, families.VOCAB :])
    assert np.all(padding == attend.MASKED)  # no probability, and a loss that stays finite
    whole = logits_NV[:, : families.VOCAB].reshape(*tokens_BT.shape, -1)
    np.testing.assert_allclose(whole, families.logits_of(name, tokens_BT), atol=1e-5)


def test_logit_softcap():
    capped, free = families.build("llama_options"), families.build("llama_options")
    free = models.changed(free, logit_softcap=0.0)
    params, x_ND = (
        families.params_of("llama_options"),
        5 * jax.random.normal(jax.random.key(0), (7, 32)),
    )
    raw = free.head_fn(free.head_params(params), x_ND)[:, : families.VOCAB]
    got = capped.head_fn(capped.head_params(params), x_ND)[:, : families.VOCAB]
    assert np.abs(raw).max() > 8
    np.testing.assert_allclose(got, 8 * np.tanh(raw / 8), rtol=1e-5)


def test_positions_count_from_what_is_given():
    """Learned positions are looked up; of rotary ones only the differences matter."""
    tokens_BT = families.tokens(batch=2, length=8)
    shifted_BT = jnp.arange(8)[None] + 3

    def both(name):
        model, params = families.build(name), families.params_of(name)
        apply = families.jit(
            lambda positions_BT: model.apply({"params": params}, tokens_BT, positions_BT)
        )
        return apply(jnp.arange(8)[None]), apply(shifted_BT)

    start, shifted = both("llama")
    np.testing.assert_allclose(start, shifted, atol=1e-4)
    start, shifted = both("gpt2")
    assert np.abs(start - shifted).max() > 0.1


def test_mup_scales_scores_by_the_head_width():
    model = families.make({"attention.scale": "mup", "depth": 1, "attention.num_heads": 4})  # H = 8
    params = families.random_params(model)
    query = params["layers"]["block_0"]["attention"]["query"]
    scaled = jax.tree.map(lambda x: x, params)
    scaled["layers"]["block_0"]["attention"]["query"] = {"kernel": query["kernel"] / 8**0.5}
    plain = models.changed(
        model, attention=dataclasses.replace(model.config.attention, scale="sqrt")
    )
    tokens_BT = families.tokens(batch=2)
    np.testing.assert_allclose(
        families.jit(model.apply)({"params": params}, tokens_BT),
        families.jit(plain.apply)({"params": scaled}, tokens_BT),
        atol=2e-5,
    )


def test_dropout_only_in_training():
    model = families.make({"depth": 1, "preset": "gpt2", "dropout.kind": "standard"})
    variables, tokens_BT = {"params": families.random_params(model)}, families.tokens(batch=2)

    @families.jit
    def run(key):
        plain = model.apply(variables, tokens_BT)
        return plain, model.apply(variables, tokens_BT, train=True, rngs={"dropout": key})

    without = models.changed(model, dropout=dataclasses.replace(model.config.dropout, kind="none"))
    plain, dropped = run(jax.random.key(0))
    np.testing.assert_allclose(plain, families.jit(without.apply)(variables, tokens_BT), atol=1e-5)
    assert np.abs(plain - dropped).max() > 0.1
    assert np.array_equal(dropped, run(jax.random.key(0))[1])
    assert not np.array_equal(dropped, run(jax.random.key(1))[1])


@pytest.mark.parametrize("site", ["embedding", "attention_output", "mlp_output"])
def test_each_dropout_site_counts(site):
    model = families.make({"depth": 1, "dropout.kind": "standard", "dropout.sites": (site,)})
    text = str(
        jax.make_jaxpr(
            lambda params, key: model.apply(
                {"params": params}, families.tokens(batch=1), train=True, rngs={"dropout": key}
            )
        )(families.random_params(model), jax.random.key(0))
    )
    assert text.count("random_bits") == 1


# ---- small layers against formulas -------------------------------------------------------------


def test_norms():
    x = np.random.default_rng(0).normal(2, 3, size=(2, 5, 16)).astype(np.float32)
    scale, bias = np.linspace(0.5, 2, 16), np.linspace(-1, 1, 16)
    layer = norms.LayerNorm(eps=1e-2)
    got = layer.apply({"params": {"scale": jnp.float32(scale), "bias": jnp.float32(bias)}}, x)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-2)
    np.testing.assert_allclose(got, expected * scale + bias, rtol=1e-4, atol=1e-5)
    got = norms.RMSNorm(eps=1e-2).apply({"params": {"scale": jnp.float32(scale)}}, x)
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-2) * scale
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    half = norms.RMSNorm(dtype=jnp.bfloat16).apply({"params": {"scale": jnp.ones(16)}}, x)
    assert half.dtype == jnp.bfloat16  # computed in float32: large values do not overflow
    huge = norms.LayerNorm(use_scale=False, use_bias=False).apply({}, 1e18 * x)
    assert np.isfinite(huge).all()


def test_swiglu_multiplies_the_gate():
    layer = MLP(
        hidden=3, activation="swiglu", use_bias=False, std=1.0, std_out=1.0, dtype=jnp.float32
    )
    x = jnp.array([[[1.0, -2.0]]])
    gate, up = np.array([[1.0, 2, 3], [0, 1, 1]]), np.array([[2.0, 0, 1], [1, 1, 0]])
    params = {
        name: {"kernel": jnp.float32(kernel)}
        for name, kernel in (("gate", gate), ("up", up), ("down", np.eye(3)[:, :2]))
    }
    g, u = x[0, 0] @ gate, x[0, 0] @ up
    np.testing.assert_allclose(
        layer.apply({"params": params}, x)[0, 0], (g / (1 + np.exp(-g)) * u)[:2], rtol=1e-5
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_float32_products_whose_gradients_are_not(name):
    """Of a tied table and of an output layer, in a model that computes in bfloat16."""
    model = families.build(name, "bfloat16")
    jaxpr = jax.make_jaxpr(jax.grad(families.loss_fn(model)))(
        families.params_of(name), families.tokens()
    )
    products = [
        tuple(variable.aval.dtype.name for variable in (*equation.invars, *equation.outvars))
        for equation in families.equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        and any(
            model.padded_vocab in variable.aval.shape
            for variable in (*equation.invars, *equation.outvars)
        )
    ]
    half = "bfloat16"
    assert sorted(products) == [(half, half, half)] * 2 + [(half, half, "float32")]
