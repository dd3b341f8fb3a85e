"""Learned dropout: masks and penalties by hand, each site in a model, skipping, evaluation."""

import dataclasses
import functools
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import models
from efx.config.load import load_config
from efx.configs import common
from efx.layers import learned_dropout as ld
from efx.layers.config import ElementwiseConfig
from efx.layers.token_context import TokenContext
from efx.train import losses, optim

PI = np.pi


def elementwise(**changes):
    defaults = common.base().model.dropout.elementwise.to_dict()
    return ld.ElementwiseMask(ElementwiseConfig(**{**defaults, **changes}))


@functools.cache
def attention_block(**changes):
    """The config of a block that is 4 wide, with two heads."""
    changes = {f"dropout.attention.{key}": value for key, value in changes.items()}
    sites = {"dropout.kind": "attention", "dropout.sites": ("mlp_output",)}
    return families.make({"width": 4, "attention.num_heads": 2, **sites, **changes}).block_config()


def one_site(kind, site, **changes):
    return families.make({"dropout.kind": kind, "dropout.sites": (site,), "depth": 1, **changes})


def call(length, **changes):
    return TokenContext(np.arange(length)[None], **changes)


def apply(mask, params, x, call, *mutable):
    """`mask.apply`; with `mutable`, (output, sown values)."""
    run = families.jit(functools.partial(mask.apply, mutable=list(mutable) or False))
    return jax.device_get(run({"params": params}, x, call))


# ---- masks by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("detach", [True, False])
def test_elementwise_mask_by_hand(detach):
    """Values and gradients of x; a detached mask counts as a constant factor."""
    x = np.float32([[[5.0, 5.0, 2.0, 1.0, -1.0, 3.0, 0.5]]])
    a = np.float32([0.0, 0.0, PI / 4, PI / 3, PI / 3, PI, 7.0])
    b = np.float32([0.0, PI, 0.0, 0.0, PI, PI, PI / 2])
    m = 0.5 * np.cos(a * x + b) + 0.5
    slope = m if detach else m - x * 0.5 * a * np.sin(a * x + b)
    params = {"mask_frequency": a, "mask_phase": b}
    mask = elementwise(detach=detach)
    np.testing.assert_allclose(apply(mask, params, x, call(1)), x * m, atol=1e-5)
    grad = jax.grad(lambda x: mask.apply({"params": params}, x, call(1)).sum())(x)
    np.testing.assert_allclose(grad, slope, atol=1e-4)
    sharp = apply(elementwise(sharpen=True), params, x, call(1))
    np.testing.assert_allclose(sharp, x / (1 + np.exp(-60 * (m - 0.5))), atol=1e-4)


def test_roundings_by_hand():
    """Values and slopes; straight-through roundings have slope 1."""
    sigmoid_15 = 1 / (1 + np.exp(-15.0))
    steep = 60 * sigmoid_15 * (1 - sigmoid_15)
    sharp = [0, 1 - sigmoid_15, 0.5, sigmoid_15, 1]
    uniform = np.float32([0.0, 0.2, 0.6, 0.8, 0.999])
    expected = {
        ("none", None): ([0, 0.25, 0.5, 0.75, 1], [1] * 5),
        ("stochastic", None): ([0, 0, 1, 1, 1], [1] * 5),
        ("stochastic", "uniform"): ([0, 1, 0, 0, 1], [1] * 5),
        ("sigmoid", None): (sharp, [0, steep, 15, steep, 0]),
        ("sigmoid_straight_through", None): (sharp, [1] * 5),
    }
    m = np.linspace(0, 1, 5, dtype=np.float32)
    for (name, draws), (values, slopes) in expected.items():
        rounding = functools.partial(ld.round_mask, rounding=name)
        rounded = jax.vmap(jax.value_and_grad(lambda m, u, f=rounding: f(m, uniform=u)))
        got, slope = rounded(m, uniform if draws else None)
        np.testing.assert_allclose(got, values, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(slope, slopes, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("reach", [4.0, 100.0])
def test_cosine_mask_is_the_cosine(reach):
    """Values in [0, 1] and slopes, over many turns."""
    u = np.append(np.linspace(-reach, reach, 20_001), [np.inf, np.nan]).astype(np.float32)
    m, slope = map(np.asarray, families.jit(jax.vmap(jax.value_and_grad(ld.cosine_mask)))(u))
    assert np.all(np.isnan(m[-2:]))
    u, m, slope = u[:-2], m[:-2], slope[:-2]
    np.testing.assert_allclose(m, 0.5 * np.cos(np.float64(u)) + 0.5, atol=2e-7)
    np.testing.assert_allclose(slope, -0.5 * np.sin(np.float64(u)), atol=2e-7)
    assert m.min() >= 0 and m.max() <= 1


def attention_by_hand(x_TD, params):
    """u [T, D], without output projection."""
    u_TD = np.zeros_like(x_TD)
    q, k, v = (np.float64(params[f"mask_{name}"]) for name in ("query", "key", "value"))
    for head in (slice(0, 2), slice(2, 4)):
        for t in range(len(x_TD)):
            score = (x_TD[t] @ q[:, head]) @ (x_TD[: t + 1] @ k[:, head]).T / np.sqrt(2)
            weight = np.exp(score) / np.exp(score).sum()
            u_TD[t, head] = weight @ (x_TD[: t + 1] @ v[:, head])
    return u_TD


def matrices(seed, *names):
    rng = np.random.default_rng(seed)
    return {f"mask_{name}": np.float32(rng.normal(size=(4, 4))) for name in names}


QKV = ("query", "key", "value")


@pytest.mark.parametrize(
    "kind, rounding",
    [
        ("hidden", "none"),
        ("hidden", "stochastic"),
        ("hidden", "sigmoid"),
        ("embedding", "none"),
        ("embedding_linear", "none"),
    ],
)
def test_attention_mask_by_hand(kind, rounding):
    """Penalties are of the mask before rounding."""
    rng = np.random.default_rng(0)
    x, emb, b = rng.normal(size=(1, 3, 4)), rng.normal(size=(1, 3, 4)), rng.normal(size=4)
    shared, params = {"attention": matrices(1, *QKV)}, {"mask_shift": np.float32(b)}
    e = attention_by_hand(emb[0], shared["attention"])
    if kind == "embedding":
        shared |= matrices(2, "linear")
        e = e @ np.float64(shared["mask_linear"])
    if kind == "embedding_linear":
        params |= matrices(4, "linear")
        u = e @ np.float64(params["mask_linear"])
    else:
        params["attention"] = matrices(3, *QKV)
        u = attention_by_hand(x[0] if kind == "hidden" else e, params["attention"])
    m = 0.5 * np.cos(u + b) + 0.5
    sharp = 1 / (1 + np.exp(-5 * (m - 0.5)))
    rounded = {"none": m, "stochastic": m >= 0.5, "sigmoid": sharp}[rounding]
    block = attention_block(input=kind, rounding=rounding, sigmoid_scale=5.0)
    e_BTD = None
    if kind != "hidden":
        e_BTD = apply(ld.MaskInput(block), shared, np.float32(emb), call(3))
    arguments = np.float32(x), call(3, mask_input_BTD=e_BTD)
    got, sown = apply(ld.AttentionMask(block), params, *arguments, "losses")
    np.testing.assert_allclose(got, x * rounded, atol=1e-4)
    np.testing.assert_allclose(sown["losses"]["dropout_l1"][0], m.mean(), rtol=1e-4)
    init = functools.partial(ld.AttentionMask(block).init, jax.random.key(0))
    made = nn.unbox(jax.eval_shape(init, *arguments)["params"])
    assert jax.tree.structure(made) == jax.tree.structure(params)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("kind", ["hidden", "embedding"])
def test_losses_of_detached_masks_train_masks_alone(kind, detach):
    """The shared input of masks, too; without `detach` the embedding as well."""
    settings = {"dropout.attention.input": kind, "dropout.attention.detach": detach}
    model = one_site("attention", "embedding", **settings)

    def penalty(params):
        tokens_BT = families.tokens(batch=1, length=6)
        state = model.apply({"params": params}, tokens_BT, mutable=["losses"])[1]
        return losses.collect_sown(state["losses"])["dropout_l1"]

    grads = families.jit(jax.grad(penalty))(families.random_params(model))
    for path, grad in optim.param_paths(grads).items():
        trained = "mask_" in path.rsplit("/", 1)[-1]
        trained |= path == "embed/embedding" and not detach
        assert (np.abs(grad).max() > 0) == trained, path


def test_masks_are_float32_in_bfloat16_models():
    """In bfloat16 the angle 1000 x would be off by more than a turn."""
    x = np.full((1, 1, 1), 1.0078125, jnp.bfloat16)
    params = {"mask_frequency": np.float32([1000.3]), "mask_phase": np.float32([0.2])}
    got, sown = apply(elementwise(), params, x, call(1), "losses")
    m = 0.5 * np.cos(np.float32(1000.3) * 1.0078125 + 0.2) + 0.5
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(sown["losses"]["dropout_l1"][0], m, atol=1e-3)
    np.testing.assert_allclose(np.float32(got[0, 0, 0]), 1.0078125 * m, rtol=0.01)


def test_initial_values():
    x, key = np.zeros((1, 1, 512), np.float32), jax.random.key(0)
    mask = elementwise(a_mean=2.0, a_std=0.5, b_mean=-1.0, b_std=0.1)
    params = nn.unbox(mask.init(key, x, call(1))["params"])
    for name, mean, std in (("mask_frequency", 2.0, 0.5), ("mask_phase", -1.0, 0.1)):
        assert abs(params[name].mean() - mean) < 0.2 * std
        assert params[name].std() == pytest.approx(std, rel=0.15)
    mask = ld.AttentionMask(attention_block(shift_init=PI / 2))
    params = nn.unbox(mask.init(key, x[..., :4], call(1))["params"])
    np.testing.assert_allclose(params["mask_shift"], PI / 2)


# ---- penalties and statistics ------------------------------------------------------------------


def test_penalties_by_hand():
    m = np.float32([0.25, 0.5, 1.0, 0.0])
    got = ld.penalties(m)
    np.testing.assert_allclose(got["dropout_entropy"], [0.5, 0.5, 0.0, 0.0], atol=1e-6)
    alternate = [-0.75 * np.log2(0.75), 0.5, 0.0, 0.0]
    np.testing.assert_allclose(got["dropout_alternate_entropy"], alternate, atol=1e-6)
    np.testing.assert_allclose(got["dropout_l1"], m)
    np.testing.assert_allclose(got["dropout_squared_l1"], [1 / 32, 1 / 8, 0.5, 0.0])
    assert sorted(got) == sorted(families.PENALTIES)


def test_penalties_are_finite_at_zero_and_one():
    """Values and gradients, of the mask and of the phases 0 and pi, where the mask is 1 and 0."""
    m = np.float32([0.0, 1.0, 1e-45, 1e-30, np.nextafter(np.float32(1), np.float32(0))])
    for name in families.PENALTIES:
        of_mask = jax.vmap(jax.value_and_grad(lambda m, name=name: ld.penalties(m)[name]))
        of_phase = jax.grad(lambda b, name=name: ld.penalties(ld.cosine_mask(b))[name].sum())
        for values in (*of_mask(m), of_phase(np.float32([0.0, PI]))):
            assert np.isfinite(values).all() and np.abs(values).max() < 200, name


def test_statistics_by_hand():
    m = np.float32([0.95, 0.05, 0.6, 0.4, 0.5])
    rounded = ld.round_mask(m, "stochastic", np.float32([0.99, 0.0, 0.7, 0.1, 0.7]))
    mean = {name: np.mean(value) for name, value in ld.statistics(m, rounded).items()}
    assert mean["dropout/near_one"] == mean["dropout/near_zero"] == pytest.approx(0.2)
    assert mean["dropout/kept"] == pytest.approx(2 / 5)  # of the drawn mask; 3 / 5 of m
    entropy = np.mean([-p * np.log2(p) for p in m])
    assert mean["dropout/entropy"] == pytest.approx(entropy, rel=1e-5)


def test_padding_and_empty_slots_do_not_count():
    sites = ("mlp_output", "attention_probs")
    model = families.make({"dropout.kind": "elementwise", "dropout.sites": sites, "depth": 1})
    params, tokens_BT = families.random_params(model), families.tokens(batch=2, length=10)

    @families.jit
    def sown(tokens_BT, *call):
        collections = ["losses", "stats"]
        return model.apply({"params": params}, tokens_BT, *call, mutable=collections)[1]

    whole = sown(tokens_BT[:, :6])
    segments_BT = np.tile(np.arange(10) < 6, (2, 1)).astype(np.int32)
    families.assert_trees_close(whole, sown(tokens_BT, None, segments_BT), rtol=1e-5)
    assert whole["losses"]["layers"]
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(1, 5, 1)))
    mask = {"mask_frequency": np.float32([2]), "mask_phase": np.zeros(1, np.float32)}
    calls = (x_BTD[:, :3], call(3)), (x_BTD, TokenContext(np.array([[0, 1, 2, -1, -1]])))
    both = [apply(elementwise(), mask, x, c, "losses", "stats")[1] for x, c in calls]
    families.assert_trees_close(*both, rtol=1e-5)


# ---- in a model --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, sites", [("elementwise", families.ALL_SITES), ("attention", families.NO_PROBS)]
)
def test_masks_act_at_their_site_at_inference(kind, sites):
    """A model whose masks are 1 is the model without masks."""
    place = {"embedding": "dropout_embedding/", "attention_probs": "attention/probs_dropout/"}
    tokens_BT = families.tokens(batch=2)

    def opened(path, leaf):
        return 0 * leaf if path[-1].key.startswith("mask_") else leaf

    for site in sites:
        model = one_site(kind, site)
        dropout = dataclasses.replace(model.config.dropout, kind="none")
        plain, params = models.changed(model, dropout=dropout), families.random_params(model)
        open_params = jax.tree_util.tree_map_with_path(opened, params)
        forward, without = families.jit(model.apply), families.jit(plain.apply)
        expected = without({"params": params}, tokens_BT)
        assert np.abs(forward({"params": params}, tokens_BT) - expected).max() > 1e-2, site
        got = forward({"params": open_params}, tokens_BT)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=site)
        paths = [p for p in optim.param_paths(params) if re.search("(^|/)mask_", p)]
        assert paths and all(place.get(site, f"dropout_{site}/") in path for path in paths)


def test_stochastic_rounding_is_random_in_training_alone():
    """With all m = 1/2, any two rows of masks agree in half of the entries, and at inference all
    entries are kept, whatever the key."""
    model = one_site("attention", "mlp_output", depth=2)

    def at_half(path, leaf):
        return {"mask_value": 0 * leaf, "mask_shift": 0 * leaf + 1.57}.get(path[-1].key, leaf)

    params = jax.tree_util.tree_map_with_path(at_half, families.random_params(model))
    tokens_BT = np.tile(families.tokens(batch=1), (3, 1))

    @functools.partial(families.jit, static_argnums=1)
    def masks(key, train):
        """The mask of each layer, [B, T, D]."""
        layer_masks = []

        def record(next_function, args, kwargs, context):
            y = next_function(*args, **kwargs)
            if context.method_name == "__call__" and isinstance(context.module, ld.AttentionMask):
                layer_masks.append(y / args[0])
            return y

        with nn.intercept_methods(record):
            model.apply({"params": params}, tokens_BT, rngs={"dropout": key}, train=train)
        return layer_masks

    drawn = [jax.tree.leaves(masks(jax.random.key(seed), True)) for seed in (0, 1)]
    rows = np.reshape(np.array(drawn), (12, -1))
    agree = np.mean(rows[:, None] == rows[None], axis=-1)[~np.eye(len(rows), dtype=bool)]
    assert np.all(np.abs(agree - 0.5) < 0.1)
    for mask in jax.tree.leaves(masks(jax.random.key(0), False)):
        np.testing.assert_array_equal(mask, 1)


@pytest.mark.parametrize("variant", ["", ":embedding", ":elementwise"])
def test_one_pattern_matches_all_masks_and_they_are_not_decayed(variant, root, monkeypatch):
    monkeypatch.chdir(root)
    config = load_config(f"configs/learned_dropout.py{variant}")
    config.optim.lr_multipliers = ((r".*/mask_[a-z]+", 3.0),)
    model = models.build(config.model, vocab_size=9, context=8, dtype="float32")
    groups = optim.parameter_groups(config.optim, models.unboxed_shapes(model)["params"])
    masks = {path for path in groups if "mask_" in path.rsplit("/", 1)[-1]}
    assert masks
    for path, group in groups.items():
        assert group.multiplier == (3.0 if path in masks else 1.0), path
        assert not (path in masks and group.decayed)
