"""Learned dropout: masks, roundings and penalties by hand, each site, what is reported."""

import dataclasses
import functools
import itertools
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import changes as changes_lib
from efx import flops, losses, main, means, models, optim, sharding
from efx.changes import Changes
from efx.config import load_config
from efx.configs import common
from efx.errors import UsageError
from efx.evaluate import Evaluator, describe
from efx.layers.blocks import Block
from efx.layers.config import ElementwiseConfig, MaskAttentionConfig
from efx.layers.info import CacheView, CallInfo, Mode, Tokens
from efx.layers.mask_dropout import modules as ld
from efx.layers.stack import Layer
from efx.step import by_layer

PI = np.pi


def elementwise_config(**changes):
    defaults = common.base().model.dropout.elementwise.to_dict()
    return ElementwiseConfig(**{**defaults, **changes})


def info(length, batch=1, selection="causal", cache=None, **changes):
    positions_BT = np.tile(np.arange(length)[None], (batch, 1))
    return CallInfo(Tokens(positions_BT, **changes), Mode(selection=selection), cache)


@functools.cache
def compiled(mask, *mutable):
    """`mask.apply`; with `mutable`, what is sown, too."""
    return families.jit(functools.partial(mask.apply, mutable=list(mutable) or False))


# ---- masks by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, a, b, m",
    [
        (5.0, 0.0, 0.0, 1.0),
        (5.0, 0.0, PI, 0.0),
        (2.0, PI / 4, 0.0, 0.5),
        (1.0, PI / 3, 0.0, 0.75),
        (-1.0, PI / 3, PI, 0.25),
        (3.0, PI, PI, 1.0),
        (0.0, 7.0, PI / 2, 0.5),
    ],
)
def test_elementwise_by_hand(x, a, b, m):
    variables = {"params": {"mask_frequency": np.float32([a]), "mask_phase": np.float32([b])}}
    mask = ld.ElementwiseMask(elementwise_config())
    got = compiled(mask)(variables, np.full((1, 1, 1), x, np.float32), info(1))
    np.testing.assert_allclose(got, [[[x * m]]], atol=1e-6)


SIGMOID_15 = 1 / (1 + np.exp(-15.0))


@pytest.mark.parametrize(
    "rounding, uniform, values, slopes",
    [
        ("none", None, [0, 0.25, 0.5, 0.75, 1], [1, 1, 1, 1, 1]),
        ("stochastic", None, [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]),
        ("stochastic", [0.0, 0.2, 0.6, 0.8, 0.999], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]),
        (
            "sigmoid",
            None,
            [0, 1 - SIGMOID_15, 0.5, SIGMOID_15, 1],
            [0, 60 * SIGMOID_15 * (1 - SIGMOID_15), 15, 60 * SIGMOID_15 * (1 - SIGMOID_15), 0],
        ),
        ("sigmoid_straight_through", None, [0, 1 - SIGMOID_15, 0.5, SIGMOID_15, 1], [1] * 5),
    ],
)
def test_roundings_by_hand(rounding, uniform, values, slopes):
    uniform = None if uniform is None else np.float32(uniform)

    @families.jit
    def rounded(m):
        got, pull = jax.vjp(lambda m: ld.rounded(m, rounding, uniform, 60.0), m)
        return got, pull(jnp.ones(5))[0]

    got, slope = rounded(np.linspace(0, 1, 5, dtype=np.float32))
    np.testing.assert_allclose(got, values, atol=1e-6)
    np.testing.assert_allclose(slope, slopes, atol=1e-5)


def test_rounded_values_are_exactly_zero_and_one():
    m = np.float32(np.random.default_rng(0).uniform(size=5000))
    uniform = np.float32(np.random.default_rng(1).uniform(size=5000))
    rounded = families.jit(lambda m, given: ld.rounded(m, "stochastic", given))
    for given in (None, uniform):
        assert set(np.unique(rounded(m, given))) == {0.0, 1.0}


def test_stochastic_rounding_keeps_the_share_m():
    uniform = np.random.default_rng(0).uniform(size=20_000).astype(np.float32)
    rounded = families.jit(lambda m: ld.rounded(m, "stochastic", uniform))
    for m in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = np.asarray(rounded(np.full(20_000, m, np.float32)))
        np.testing.assert_allclose(kept.mean(), m, atol=0.0 if m in (0, 1) else 0.012)


def test_straight_through_is_the_gradient_of_the_expectation():
    """Of sum(w x m_hat) over all 2^6 outcomes, by finite differences in the phase: the estimate is
    exact for what is linear in m_hat, whichever outcome was drawn."""
    rng = np.random.default_rng(0)
    u, w_x, b = (rng.normal(size=6) for _ in range(3))

    def expectation(b):
        m = 0.5 * np.cos(u + b) + 0.5
        return sum(
            np.prod(np.where(outcome, m, 1 - m)) * np.sum(w_x * outcome)
            for outcome in itertools.product((0, 1), repeat=6)
        )

    differences = [
        (expectation(b + 1e-5 * unit) - expectation(b - 1e-5 * unit)) / 2e-5 for unit in np.eye(6)
    ]

    def sample(b, uniform):
        m_hat = ld.rounded(ld.cosine_mask(jnp.float32(u) + b), "stochastic", uniform)
        return jnp.sum(jnp.float32(w_x) * m_hat)

    estimate = families.jit(jax.grad(sample))
    for seed in range(3):
        uniform = np.float32(np.random.default_rng(seed).uniform(size=6))
        np.testing.assert_allclose(estimate(np.float32(b), uniform), differences, atol=1e-4)


def test_mean_of_sampled_gradients_through_a_model():
    """The gradient in x has the mask that was drawn: its mean is that of the expectation, m."""
    m, x = np.float32([0.2, 0.7]), np.float32([3.0, -1.0])
    uniforms = np.random.default_rng(0).uniform(size=(20_000, 2)).astype(np.float32)
    gradient = jax.grad(lambda x, u: jnp.sum(x * ld.rounded(m, "stochastic", u)))
    grads = families.jit(jax.vmap(lambda u: gradient(x, u)))(uniforms)
    np.testing.assert_allclose(np.mean(grads, axis=0), m, atol=0.02)


@pytest.mark.parametrize("detach", [True, False])
def test_detach(detach):
    mask = ld.ElementwiseMask(elementwise_config(detach=detach))
    params = {"mask_frequency": np.float32([0.7]), "mask_phase": np.float32([0.3])}
    x = np.full((1, 1, 1), 1.5, np.float32)
    gradient = jax.grad(lambda x, info: mask.apply({"params": params}, x, info)[0, 0, 0])
    grad = np.asarray(families.jit(gradient)(x, info(1)))
    angle = 0.7 * 1.5 + 0.3
    expected = 0.5 * np.cos(angle) + 0.5 - (0 if detach else 1.5 * 0.5 * np.sin(angle) * 0.7)
    np.testing.assert_allclose(grad[0, 0, 0], expected, rtol=1e-5)


# Two heads, three tokens of four features: against the formulas with plain numpy.
ATTENTION = ld.MaskAttention(2, False, 0, 0, "auto", 0.02, jnp.float32, parent=None)
MATRICES = ("mask_query", "mask_key", "mask_value")


def attention_by_hand(x_TD, p):
    """u [T, D], without output projection."""
    u_TD = np.zeros_like(x_TD)
    q, k, v = (np.float64(p[name]) for name in MATRICES)
    for head in (slice(0, 2), slice(2, 4)):
        for t in range(len(x_TD)):
            score = (x_TD[t] @ q[:, head]) @ (x_TD[: t + 1] @ k[:, head]).T / np.sqrt(2)
            weight = np.exp(score) / np.exp(score).sum()
            u_TD[t, head] = weight @ (x_TD[: t + 1] @ v[:, head])
    return u_TD


def attention_config(**changes):
    defaults = common.base().model.dropout.attention.to_dict()
    return MaskAttentionConfig(**{**defaults, "num_heads": 2, **changes})


def matrices(seed, *names):
    rng = np.random.default_rng(seed)
    return {name: np.float32(rng.normal(size=(4, 4))) for name in names}


def test_attention_mask_by_hand():
    rng = np.random.default_rng(0)
    x, b = rng.normal(size=(1, 3, 4)), rng.normal(size=4)
    params = {"attention": matrices(1, *MATRICES), "mask_shift": np.float32(b)}
    m = 0.5 * np.cos(attention_by_hand(x[0], params["attention"]) + b) + 0.5
    for rounding, applied in (("none", m), ("stochastic", m >= 0.5)):
        mask = ld.AttentionMask(attention_config(rounding=rounding), ATTENTION)
        got, sown = compiled(mask, "losses")({"params": params}, np.float32(x), info(3))
        np.testing.assert_allclose(got, x * applied[None], atol=1e-5)
        # Penalties look at the mask before rounding.
        np.testing.assert_allclose(sown["losses"]["dropout_l1"][0], m.mean(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["embedding", "embedding_linear"])
def test_masks_of_the_embedding_by_hand(kind):
    """E' = Linear(Attn(emb)); then each mask's own attention over E', not over x. Or the cheaper
    form, in which a mask is a linear layer of Attn(emb)."""
    rng = np.random.default_rng(0)
    x, emb, b = rng.normal(size=(1, 3, 4)), rng.normal(size=(1, 3, 4)), rng.normal(size=4)
    config, linear = attention_config(input=kind, rounding="none"), ("mask_linear",)
    own = kind == "embedding"
    shared = {"attention": matrices(1, *MATRICES), **matrices(2, *linear * own)}
    mask = {"mask_shift": np.float32(b), **matrices(4, *linear * (not own))}
    if own:
        mask["attention"] = matrices(3, *MATRICES)
    # No parameters but these.
    for module, params, given in (
        (ld.MaskInput(config, ATTENTION), shared, ()),
        (ld.AttentionMask(config, ATTENTION), mask, (x,)),
    ):
        made = jax.eval_shape(
            module.init,
            jax.random.key(0),
            np.float32(emb),
            info(3, mask_input_BTD=np.float32(x) if given else None),
        )["params"]
        assert jax.tree.structure(nn.unbox(made)) == jax.tree.structure(params)
    read = attention_by_hand(emb[0], shared["attention"])
    u = read @ np.float64((shared if own else mask)["mask_linear"])
    if own:
        u = attention_by_hand(u, mask["attention"])
    read_BTD = compiled(ld.MaskInput(config, ATTENTION))(
        {"params": shared}, np.float32(emb), info(3)
    )
    got = compiled(ld.AttentionMask(config, ATTENTION))(
        {"params": mask}, np.float32(x), info(3, mask_input_BTD=read_BTD)
    )
    np.testing.assert_allclose(got, x * (0.5 * np.cos(u + b) + 0.5)[None], atol=1e-4)


@pytest.mark.parametrize("kind", ["hidden", "embedding", "embedding_linear"])
def test_detach_of_what_attention_masks_read(kind):
    """A loss of the masks alone then reaches the masks' parameters, the shared ones too, and no
    other; else it reaches the embedding."""
    for detach in (False, True):
        model = one_site(
            "attention",
            "embedding",
            **{"dropout.attention.input": kind, "dropout.attention.detach": detach},
        )

        def penalty(params, model=model):
            tokens_BT = families.tokens(batch=1, length=6)
            state = model.apply({"params": params}, tokens_BT, mutable=["losses"])[1]
            return losses.collect_sown(state["losses"])["dropout_l1"]

        grads = families.jit(jax.grad(penalty))(families.random_params(model))
        for path, grad in optim.param_paths(grads).items():
            reached = "mask_" in path.rsplit("/", 1)[-1] or (
                path == "embed/embedding" and not detach
            )
            assert (np.abs(grad).max() > 0) == reached, (path, detach)


def test_the_sigmoids_scale_is_a_setting():
    x, phase = np.full((1, 1, 2), 2.0, np.float32), np.full(2, 1.5, np.float32)
    for scale in (60.0, 5.0):
        config = elementwise_config(sharpen=True, sharpen_scale=scale)
        params = {"mask_frequency": np.zeros(2, np.float32), "mask_phase": phase}
        m = 0.5 * np.cos(1.5) + 0.5
        rounded = 1 / (1 + np.exp(-scale * (m - 0.5)))
        got = compiled(ld.ElementwiseMask(config))({"params": params}, x, info(1))
        np.testing.assert_allclose(got, np.full((1, 1, 2), 2 * rounded), rtol=1e-5)
        for rounding in ("sigmoid", "sigmoid_straight_through"):
            config = attention_config(rounding=rounding, sigmoid_scale=scale)
            params = {
                "attention": {name: np.zeros((2, 2), np.float32) for name in MATRICES},
                "mask_shift": phase,
            }
            got = compiled(ld.AttentionMask(config, ATTENTION))({"params": params}, x, info(1))
            np.testing.assert_allclose(got, np.full((1, 1, 2), 2 * rounded), rtol=1e-5)


# ---- penalties and statistics ------------------------------------------------------------------


def test_penalties_by_hand():
    m = np.float32([0.25, 0.5, 1.0, 0.0])
    got = jax.device_get(families.jit(ld.penalties)(m))
    np.testing.assert_allclose(got["dropout_entropy"], [0.5, 0.5, 0.0, 0.0], atol=1e-6)
    alternate = [-0.75 * np.log2(0.75), 0.5, 0.0, 0.0]
    np.testing.assert_allclose(got["dropout_alternate_entropy"], alternate, atol=1e-6)
    np.testing.assert_allclose(got["dropout_l1"], m)
    np.testing.assert_allclose(got["dropout_squared_l1"], [1 / 32, 1 / 8, 0.5, 0.0])
    assert sorted(got) == sorted(families.PENALTIES)


cosine_mask = families.jit(ld.cosine_mask)


@pytest.mark.parametrize("reach", [4.0, 100.0])
def test_the_cosine_of_a_mask_is_the_cosine(reach):
    """The polynomial and its gradient, over many turns; every mask lies in [0, 1]."""
    u = np.linspace(-reach, reach, 20_001, dtype=np.float32)
    m, slope = map(np.asarray, families.jit(jax.vmap(jax.value_and_grad(ld.cosine_mask)))(u))
    np.testing.assert_allclose(m, 0.5 * np.cos(np.float64(u)) + 0.5, atol=2e-7)
    np.testing.assert_allclose(slope, -0.5 * np.sin(np.float64(u)), atol=2e-7)
    assert m.min() >= 0 and m.max() <= 1
    for bad in (np.inf, np.nan):
        assert np.isnan(cosine_mask(np.float32(bad)))


def test_penalties_are_finite_at_zero_and_one():
    m = np.float32([0.0, 1.0, 1e-45, 1e-30, np.nextafter(np.float32(1), np.float32(0))])

    @families.jit
    def of_masks(m):
        def both(name):
            return jax.vmap(jax.value_and_grad(lambda m: ld.penalties(m)[name]))(m)

        return {name: both(name) for name in families.PENALTIES}

    @families.jit
    def of_phase(b):
        def slope(name):
            return jax.grad(lambda b: ld.penalties(ld.cosine_mask(b))[name])(b)

        return {name: slope(name) for name in families.PENALTIES}

    for name, (value, grad) in of_masks(m).items():
        assert np.isfinite(value).all() and np.isfinite(grad).all(), name
        assert np.abs(np.asarray(grad)).max() < 200, name
    # Of masks that are exactly 0 and 1, down to the phase that makes them so.
    for b in (0.0, PI):
        angle = np.float32(b)
        assert float(cosine_mask(angle)) == pytest.approx(float(b == 0), abs=1e-12)
        for name, grad in of_phase(angle).items():
            assert np.isfinite(grad), (name, b)


def test_statistics_by_hand():
    m = np.float32([0.95, 0.05, 0.6, 0.4, 0.5])

    @families.jit
    def statistics(m, uniform):
        return ld.statistics(m, ld.rounded(m, "stochastic", uniform))

    got = statistics(m, np.float32([0.99, 0.0, 0.7, 0.1, 0.2]))
    means = {name: np.mean(value) for name, value in jax.device_get(got).items()}
    assert means["dropout/near_one"] == means["dropout/near_zero"] == pytest.approx(0.2)
    assert means["dropout/kept"] == pytest.approx(3 / 5)  # what was drawn, not what is likely
    entropy = np.mean([-p * np.log2(p) for p in m])
    assert means["dropout/entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("site", ["mlp_output", "attention_probs"])
def test_padding_does_not_count(site):
    """Padding of a packed row, and empty places of a routed block, in no mean."""
    model = families.make({"dropout.kind": "elementwise", "dropout.sites": (site,), "depth": 1})
    params = families.random_params(model)
    tokens_BT = np.asarray(families.tokens(batch=2, length=10))

    @families.jit
    def sown(tokens_BT, segments_BT):
        return model.apply(
            {"params": params}, tokens_BT, None, segments_BT, mutable=["losses", "stats"]
        )[1]

    whole = sown(tokens_BT[:, :6], np.ones((2, 6), int))
    segments_BT = np.tile(np.where(np.arange(10) < 6, 1, 0)[None], (2, 1))
    families.assert_trees_close(whole, sown(tokens_BT, segments_BT), rtol=1e-5)
    assert whole["losses"]["layers"]


def test_empty_places_do_not_count():
    """A mask over gathered tokens, of which some places hold none."""
    mask = ld.ElementwiseMask(elementwise_config(a_std=1.0))
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(1, 5, 4)))
    made = families.jit(mask.init)(jax.random.key(0), x_BTD, info(5))
    variables = {"params": nn.unbox(made["params"])}
    empty = CallInfo(Tokens(np.array([[0, 1, 2, -1, -1]])))
    both = [
        compiled(mask, "losses", "stats")(variables, x, i)[1]
        for x, i in ((x_BTD[:, :3], info(3)), (x_BTD, empty))
    ]
    families.assert_trees_close(*both, rtol=1e-5)


@pytest.mark.parametrize("kind", ["none", "standard"])
def test_other_kinds_sow_nothing(kind):
    model = families.make({"dropout.kind": kind, "depth": 1})
    params = families.random_params(model)
    _, sown = jax.eval_shape(
        lambda: model.apply(
            {"params": params},
            families.tokens(batch=1),
            train=True,
            mutable=["losses", "stats"],
            rngs={"dropout": jax.random.key(0)},
        )
    )
    assert not jax.tree.leaves(sown)


# ---- in a model --------------------------------------------------------------------------------


def one_site(kind, site, **changes):
    return families.make({"dropout.kind": kind, "dropout.sites": (site,), "depth": 1, **changes})


@pytest.mark.parametrize(
    "kind, site",
    [
        *(("elementwise", site) for site in families.ALL_SITES),
        *(("attention", site) for site in families.NO_PROBS),
    ],
)
def test_each_site(kind, site):
    """The mask is where the site says, changes the logits and stays on at inference."""
    model = one_site(kind, site)
    params, tokens_BT = families.random_params(model), families.tokens(batch=2)
    paths = [p for p in optim.param_paths(params) if "/mask_" in p or p.startswith("mask_")]
    place = {"embedding": "dropout_embedding/", "attention_probs": "attention/probs_dropout/"}
    assert paths and all(place.get(site, f"dropout_{site}/") in path for path in paths)
    plain = models.changed(model, dropout=dataclasses.replace(model.config.dropout, kind="none"))
    run = families.jit(lambda m_hat: model.apply({"params": m_hat}, tokens_BT))
    masked, without = map(
        np.asarray, (run(params), families.jit(plain.apply)({"params": params}, tokens_BT))
    )
    assert np.abs(masked - without).max() > 1e-2
    # With everything kept the model is the one without masks.

    def opened(path, leaf):
        return np.zeros_like(leaf) if path[-1].key.startswith("mask_") else leaf

    opened = jax.tree_util.tree_map_with_path(opened, params)
    np.testing.assert_allclose(run(opened), without, atol=1e-5)


@pytest.mark.parametrize("kind", ["elementwise", "attention"])
def test_training_and_inference(kind):
    """Elementwise masks are the same in both; stochastic rounding is drawn by the key in one and
    fixed in the other."""
    model = one_site(kind, "mlp_output")
    params, tokens_BT = families.random_params(model), families.tokens(batch=2)
    train = families.jit(
        lambda key: model.apply({"params": params}, tokens_BT, train=True, rngs={"dropout": key})
    )
    # Also where a key is at hand, as it is in training.
    inference = families.jit(
        lambda key: model.apply({"params": params}, tokens_BT, rngs={"dropout": key})
    )(jax.random.key(5))
    np.testing.assert_allclose(
        inference, families.jit(model.apply)({"params": params}, tokens_BT), atol=1e-5
    )
    one, same, other = (np.asarray(train(jax.random.key(seed))) for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    if kind == "elementwise":
        np.testing.assert_allclose(one, inference, atol=1e-5)
    else:
        assert np.abs(one - inference).max() > 1e-2 and np.abs(one - other).max() > 1e-2


def test_every_mask_and_every_row_is_rounded_by_itself():
    """Where all m are a half: of any two rows of masks half of the entries agree, also of two rows
    of the batch that hold the same tokens."""
    model = one_site("attention", "mlp_output", depth=2)

    def at_half(path, leaf):
        return {"mask_value": 0 * leaf, "mask_shift": 0 * leaf + PI / 2}.get(path[-1].key, leaf)

    params = jax.tree_util.tree_map_with_path(at_half, families.random_params(model))
    tokens_BT = np.tile(families.tokens(batch=1), (3, 1))
    rngs, options = {"dropout": jax.random.key(0)}, dict(train=True, mutable=["masks"])
    run = families.jit(
        lambda rngs: model.apply({"params": params}, tokens_BT, rngs=rngs, **options)
    )
    rounded = [np.reshape(mask, (3, -1)) for mask in jax.tree.leaves(run(rngs)[1]["masks"])]
    rows = np.concatenate(rounded)
    agree = np.mean(rows[:, None] == rows[None], axis=-1)[~np.eye(len(rows), dtype=bool)]
    assert len(rows) == 6 and np.all(np.abs(agree - 0.5) < 0.1)


def test_probabilities_are_masked_by_the_position_of_the_key():
    """A mask that closes the key of position 2 in a cache whose slots lie in another order."""
    phase = np.float32(np.where(np.arange(8) == 2, PI, 0))
    mask = ld.ElementwiseProbsMask(elementwise_config(), 8)
    variables = {"params": {"mask_frequency": np.zeros(8, np.float32), "mask_phase": phase}}
    probs = np.full((1, 1, 1, 1, 4), 0.25, np.float32)
    order = np.array([[3, 2, 0, -1]])
    allowed = np.ones((1, 1, 4), bool)

    def run(probs, k_start, positions_BS):
        @families.jit
        def run(variables, probs, info, positions_BS):
            probs_fn = mask.bind(variables).probs_fn(info, positions_BS)
            return probs_fn(probs, 0, k_start, allowed)[0]

        view = info(1, cache=CacheView(1))
        return np.asarray(run(variables, probs, view, positions_BS))[0, 0, 0, 0]

    np.testing.assert_allclose(run(probs, 0, order), [0.25, 0, 0.25, 0.25], atol=1e-6)
    # A chunk of keys that starts at place 1.
    chunk = run(probs[..., :3], 1, np.arange(4)[None])
    np.testing.assert_allclose(chunk, [0.25, 0, 0.25], atol=1e-6)


def test_masks_are_float32_in_bfloat16_models():
    """1000 x rounded to bfloat16 would turn the cosine by more than a circle."""
    mask = ld.ElementwiseMask(elementwise_config())
    x = np.full((1, 1, 1), 1.0078125, jnp.bfloat16)
    params = {"mask_frequency": np.float32([1000.3]), "mask_phase": np.float32([0.2])}
    got, sown = jax.device_get(compiled(mask, "losses")({"params": params}, x, info(1)))
    m = 0.5 * np.cos(np.float32(1000.3) * 1.0078125 + 0.2) + 0.5
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(sown["losses"]["dropout_l1"][0], m, atol=1e-3)
    assert sown["losses"]["dropout_l1"][0].dtype == jnp.float32
    np.testing.assert_allclose(np.float32(got[0, 0, 0]), 1.0078125 * m, rtol=0.01)


@pytest.mark.parametrize(
    "kind, attentions, linears",
    [
        ("hidden", 8, 0),
        ("embedding", 9, 1),
        ("embedding_linear", 1, 8),
    ],
)
def test_the_shared_pass_is_computed_once(kind, attentions, linears):
    """Four layers with two masks each: what they share counts once, the rest eight times."""
    model = families.make(
        {
            "dropout.kind": "attention",
            "dropout.attention.input": kind,
            "dropout.sites": ("attention_output", "mlp_output"),
            "depth": 4,
        }
    )
    params = families.random_params(model)
    paths = optim.param_paths(params)
    assert sum(path.endswith("mask_query") for path in paths) == attentions
    assert sum(path.endswith("mask_linear") for path in paths) == linears
    width, length = model.config.width, 16
    ledger = model.ledger(length).nominal
    projections = (3 * attentions + linears) * 2 * length * width * width
    assert ledger["mask_projections"] == projections
    # Two products a pair, over the whole width.
    assert ledger["mask_scores"] == attentions * length * (length + 1) / 2 * 4 * width
    # Executed are all pairs of the one chunk, those of the four blocks' own attentions, too.
    pairs = (attentions + 4) * length * (length - 1) / 2
    padding = flops.matmul(length, width, model.padded_vocab - model.vocab_size)
    assert flops.executed(model, length) == sum(ledger.values()) + pairs * 4 * width + padding
    cache = models.init_cache(model, 1, 24)
    keys = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
        if path[-1].key in ("cached_key", "cached_value")
    ]
    assert len(keys) == 2 * (attentions + 4)


def test_a_routed_mask_attends_over_the_embedding_of_routed_tokens():
    """A routed block is the block on the routed tokens, each with its own row of E'."""
    model = families.make(
        {
            "dropout.kind": "attention",
            "dropout.attention.input": "embedding",
            "dropout.attention.rounding": "none",
            "dropout.sites": ("attention_output", "mlp_output"),
            "depth_routing.kind": "mod",
            "depth_routing.capacity": 0.5,
        }
    )
    spec = model.specs()[1]
    params = families.random_params(model)["layers"]["block_1"]
    rng = np.random.default_rng(0)
    x_BTD, read_BTD = (np.float32(rng.normal(size=(1, 8, 32))) for _ in range(2))
    whole = info(8, selection="train", mask_input_BTD=read_BTD)
    got_BTD = families.jit(Layer(spec).apply)({"params": params}, x_BTD, whole)
    score_T = x_BTD[0] @ np.asarray(params["router"])
    routed = np.sort(np.argsort(score_T)[-4:])
    inner = {name: leaf for name, leaf in params.items() if name != "router"}

    @families.jit
    def delta(read_BTD):
        some = CallInfo(Tokens(jnp.asarray(routed)[None], mask_input_BTD=read_BTD))
        return Block(spec.block).apply({"params": inner}, x_BTD[:, routed], some)

    delta_BTD = np.asarray(delta(read_BTD[:, routed]))
    expected_BTD = np.array(x_BTD)
    expected_BTD[0, routed] += delta_BTD[0] / (1 + np.exp(-score_T[routed, None]))
    np.testing.assert_allclose(got_BTD, expected_BTD, atol=1e-5)
    # And that depends on which rows of E' these are.
    assert np.abs(np.asarray(delta(read_BTD[:, :4])) - delta_BTD).max() > 1e-2


# ---- what an evaluation says -------------------------------------------------------------------


class Held:
    """Two batches of a held-out split; the last four places of a row are padding."""

    def eval_batches(self, batch_size, max_batches, rows):
        for seed in (0, 1):
            tokens = np.asarray(families.tokens(seed))
            weights = np.ones(tokens.shape, np.float32)
            segments = np.where(np.arange(families.LENGTH) < families.LENGTH - 4, 1, 0)
            batch = {
                "inputs": tokens,
                "targets": np.roll(tokens, -1, 1),
                "weights": weights,
                "segment_ids": np.tile(segments, (len(tokens), 1)).astype(np.int32),
            }
            yield {name: x[rows] for name, x in batch.items()}

    def bytes_per_token(self, split):
        return 1.0

    def scored_tokens(self, split):
        return 2 * families.BATCH * families.LENGTH


@pytest.mark.parametrize("scan", [False, True])
def test_evaluation_reports_masks_by_layer_and_what_changed(scan):
    """Between two evaluations one of two layers turns over all of its mask of the MLP's output."""
    model = families.make(
        {
            "dropout.kind": "attention",
            "scan_layers": scan,
            "dropout.sites": ("embedding", "mlp_output"),
        }
    )
    params = families.random_params(model)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    rules = sharding.DEFAULT_RULES
    config = common.base()
    config.evaluate.batch_size = families.BATCH
    evaluator = Evaluator(model, config, Held(), mesh, rules)

    def turned(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        if "mlp_output" not in path or not path.endswith("mask_shift"):
            return leaf
        if scan:
            return np.asarray(leaf) + np.float32([[0], [PI]])
        return np.asarray(leaf) + np.float32(PI) if "block_1" in path else leaf

    with sharding.use(mesh, rules):
        first = evaluator(params, {})
        second = evaluator(params, {})
        third = evaluator(jax.tree_util.tree_map_with_path(turned, params), {})
    kept = [first[f"eval/dropout/kept/block_{i}"] for i in (0, 1)]
    assert 0 < min(kept) and max(kept) < 1
    assert "eval/dropout/changed" not in first and "masks keep" in describe(1, first)
    assert second["eval/dropout/changed"] == 0
    assert third["eval/dropout/changed/block_0"] == 0
    assert third["eval/dropout/changed/block_1"] == pytest.approx(1)
    assert third["eval/dropout/changed"] == pytest.approx(1 / 3)  # of three masks, one


def turned_over(chunk, *sites):
    """What changes of the masks at these sites as random parameters replace others."""
    model = families.make(
        {"dropout.kind": "elementwise", "dropout.sites": sites, "attention.chunk": chunk}
    )
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    rules, batch = sharding.DEFAULT_RULES, {"inputs": np.asarray(families.tokens())}
    with sharding.use(mesh, rules):
        changes = Changes(model, "masks", mesh, rules, np.uint32(0))
        batch = {name: x[changes.placement.rows] for name, x in batch.items()}
        for seed in (0, 1):
            changed = changes(families.random_params(model, seed), {}, batch)
    return changed


@pytest.mark.parametrize("others", [(), ("mlp_output",)], ids=["alone", "beside another"])
def test_what_changes_of_masks_of_probabilities_counts_each_pair_once(others):
    """However the kernel cuts a row, and beside another mask as one: chunks of 5 of 32 queries, of
    which the first has 15 pairs and later ones up to 150, counted alike and each as a mask."""
    cut, whole = (turned_over(chunk, "attention_probs", *others) for chunk in (5, 32))
    assert cut == pytest.approx(whole, rel=1e-6) and 0 < cut["dropout/changed"] < 1


def test_what_was_empty_either_time_has_not_changed():
    """A slot of a routed block that holds a token in one of the evaluations alone."""
    old, new = (
        {"x": ((np.int8([entries]),),)} for entries in ([1, -1, 0, 1, 0], [0, 1, -1, 1, -1])
    )
    (changed,) = changes_lib._changes(old, new)["x"]
    assert (changed.total, changed.count) == (1, 2)


def test_masks_of_a_block_that_routes_nothing_say_nothing():
    """Losses, statistics and what changes are those of the other block's masks."""
    changes = {
        "depth_routing.kind": "mod",
        "depth_routing.train_selection": "threshold",
        "depth_routing.causal": "threshold",
        "depth_routing.every": 1,
        "depth_routing.capacity": 0.5,
        "dropout.kind": "elementwise",
        "dropout.sites": ("mlp_output",),
    }
    model = families.make(changes)
    params, state = families.random_params(model), families.random_state(model)["state"]
    (at,) = (path for path in optim.param_paths(state) if path.endswith("block_1/quantile"))
    state = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jnp.float32(1e9) if jax.tree_util.keystr(path, simple=True, separator="/") == at else x
        ),
        state,
    )

    @families.jit
    def sow(params):
        variables, collections = {"params": params, "state": state}, ["losses", "stats", "masks"]
        collections.append(means.COLLECTION)
        return model.apply(variables, families.tokens(), mutable=collections)[1]

    sown = sow(params)
    for collection in ("losses", "stats"):
        of_masks = by_layer(means.sown(sown, collection), model)
        names = [name for name in of_masks if re.fullmatch("dropout(?!.*/block_).*", name)]
        assert len(names) == 4
        for name in names:
            assert of_masks[f"{name}/block_1"] == 0 < of_masks[f"{name}/block_0"], name
            assert of_masks[name] == of_masks[f"{name}/block_0"], name


# ---- config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "attention"}, r"dropout\.sites has 'attention_probs'.*leave that site out"),
        ({"attention.shift_init": 4.0}, r"attention\.shift_init=4\.0: must be in \[0, pi\]"),
        ({"elementwise.b_std": -1.0}, r"dropout\.elementwise\.b_std=-1\.0: must be at least 0"),
        ({"elementwise.sharpen_scale": 0.0}, r"elementwise\.sharpen_scale=0\.0: must be more"),
        ({"attention.sigmoid_scale": -1.0}, r"attention\.sigmoid_scale=-1\.0: must be more than 0"),
        (
            {"kind": "attention", "sites": ("mlp_output",), "attention.num_heads": 5},
            r"width=32 is not divisible by config\.model\.dropout\.attention\.num_heads=5",
        ),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        families.make({f"dropout.{key}": value for key, value in changes.items()})


def test_initial_values():
    model = one_site("attention", "mlp_output", **{"dropout.attention.shift_init": PI / 2})
    params = families.initial(model)["params"]["layers"]["block_0"]["dropout_mlp_output"]
    np.testing.assert_allclose(params["mask_shift"], PI / 2)
    model = one_site(
        "elementwise",
        "mlp_output",
        width=512,
        **{
            "dropout.elementwise.a_mean": 2.0,
            "dropout.elementwise.a_std": 0.5,
            "dropout.elementwise.b_mean": -1.0,
            "dropout.elementwise.b_std": 0.1,
        },
    )
    made = families.initial(model)["params"]["layers"]["block_0"]["dropout_mlp_output"]
    params = jax.device_get(made)
    for name, mean, std in (("mask_frequency", 2.0, 0.5), ("mask_phase", -1.0, 0.1)):
        assert abs(params[name].mean() - mean) < 0.2 * std
        assert params[name].std() == pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("variant", ["", ":embedding", ":embedding_linear", ":elementwise"])
def test_one_pattern_is_all_masks_and_they_are_not_decayed(variant, root, monkeypatch):
    monkeypatch.chdir(root)
    config = load_config(f"configs/learned_dropout.py{variant}")
    config.optim.lr_multipliers = ((r".*/mask_[a-z]+", 3.0),)
    model = models.build(config.model, vocab_size=9, context=8, dtype="float32")
    shapes = models.unboxed_shapes(model)["params"]
    groups = optim.parameter_groups(config.optim, shapes)
    masks = {path for path in groups if "mask_" in path.rsplit("/", 1)[-1]}
    assert masks
    for path, group in groups.items():
        assert group.multiplier == (3.0 if path in masks else 1.0), path
        assert not (path in masks and group.decayed)


def test_penalties_follow_schedules(root, monkeypatch):
    monkeypatch.chdir(root)
    config = load_config("configs/learned_dropout.py:rising")
    weight = [losses.coefficient(config.losses["dropout_squared_l1"], s, 9, "x") for s in (0, 1e6)]
    np.testing.assert_allclose(weight, [0.0, 0.1], rtol=1e-6)
    flags = main.parse(
        [
            "efx",
            "--config=configs/learned_dropout.py",
            "--workdir=w",
            "--config.losses.dropout_entropy={'schedule': 'linear', 'c_start': 0.0, "
            "'c_end': 1.0, 'steps': 10}",
        ]
    )
    spec = flags.config.losses["dropout_entropy"]
    np.testing.assert_allclose(losses.coefficient(spec, 5, 99, "x"), 0.5)
