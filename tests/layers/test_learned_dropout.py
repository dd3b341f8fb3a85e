"""Learned dropout: masks, roundings and penalties by hand, each site, evaluation."""

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
from test_moe import Held

from efx import losses, models, optim, sharding
from efx.changes import Changes
from efx.config import load_config
from efx.configs import common
from efx.evaluate import Evaluator
from efx.layers import learned_dropout as ld
from efx.layers.block import Block
from efx.layers.call import Call
from efx.layers.config import ElementwiseConfig, MaskAttentionConfig
from efx.layers.stack import Layer

PI = np.pi


def elementwise_config(**changes):
    defaults = common.base().model.dropout.elementwise.to_dict()
    return ElementwiseConfig(**{**defaults, **changes})


def attention_config(**changes):
    defaults = common.base().model.dropout.attention.to_dict()
    return MaskAttentionConfig(**{**defaults, "num_heads": 2, **changes})


def call(length, batch=1, selection="causal", **changes):
    positions_BT = np.tile(np.arange(length)[None], (batch, 1))
    return Call(positions_BT, **changes, selection=selection)


@functools.cache
def compiled(mask, *mutable):
    """`mask.apply`; with `mutable`, the sown values, too."""
    return families.jit(functools.partial(mask.apply, mutable=list(mutable) or False))


# ---- masks by hand -----------------------------------------------------------------------------


def test_elementwise_mask_by_hand():
    """m = 0.5 cos(a x + b) + 0.5, sharpened if so configured."""
    x = np.float32([[[5.0, 5.0, 2.0, 1.0, -1.0, 3.0, 0.0]]])
    a = np.float32([0.0, 0.0, PI / 4, PI / 3, PI / 3, PI, 7.0])
    b = np.float32([0.0, PI, 0.0, 0.0, PI, PI, PI / 2])
    params = {"mask_frequency": a, "mask_phase": b}
    m = np.array([1.0, 0.0, 0.5, 0.75, 0.25, 1.0, 0.5])
    got = compiled(ld.ElementwiseMask(elementwise_config()))({"params": params}, x, call(1))
    np.testing.assert_allclose(got, x * m, atol=1e-6)
    sharp = ld.ElementwiseMask(elementwise_config(sharpen=True, sharpen_scale=5.0))
    got = compiled(sharp)({"params": params}, x, call(1))
    np.testing.assert_allclose(got, x / (1 + np.exp(-5 * (m - 0.5))), atol=1e-5)


SIGMOID_15 = 1 / (1 + np.exp(-15.0))


def test_roundings_by_hand():
    """Values, and slopes: those of straight-through roundings are 1."""
    steep = 60 * SIGMOID_15 * (1 - SIGMOID_15)
    sharp = [0, 1 - SIGMOID_15, 0.5, SIGMOID_15, 1]
    uniform = np.float32([0.0, 0.2, 0.6, 0.8, 0.999])
    expected = {
        ("none", False): ([0, 0.25, 0.5, 0.75, 1], [1] * 5),
        ("stochastic", False): ([0, 0, 1, 1, 1], [1] * 5),
        ("stochastic", True): ([0, 1, 0, 0, 1], [1] * 5),
        ("sigmoid", False): (sharp, [0, steep, 15, steep, 0]),
        ("sigmoid_straight_through", False): (sharp, [1] * 5),
    }

    @families.jit
    def rounded(m):
        return [
            jax.vmap(jax.value_and_grad(lambda m, u, how=how: ld.rounded(m, how, u, 60.0)))(
                m, uniform if drawn else None
            )
            for how, drawn in expected
        ]

    results = rounded(np.linspace(0, 1, 5, dtype=np.float32))
    for (name, (values, slopes)), (got, slope) in zip(expected.items(), results, strict=True):
        np.testing.assert_allclose(got, values, atol=1e-6, err_msg=f"{name}")
        np.testing.assert_allclose(slope, slopes, atol=1e-5, err_msg=f"{name}")


def test_stochastic_rounding_keeps_a_fraction_m():
    """By zeros and ones exactly."""
    uniform = np.random.default_rng(0).uniform(size=20_000).astype(np.float32)
    rounded = families.jit(lambda m: ld.rounded(m, "stochastic", uniform))
    for m in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = np.asarray(rounded(np.for_rows(20_000, m, np.float32)))
        assert set(np.unique(kept)) <= {0.0, 1.0}
        np.testing.assert_allclose(kept.mean(), m, atol=0.0 if m in (0, 1) else 0.012)


def test_straight_through_is_the_gradient_of_the_expectation():
    """Of sum(w x m_hat) over all 2^6 outcomes, by finite differences in the phase: the estimate is
    exact for a sum that is linear in m_hat, for every drawn outcome."""
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


@pytest.mark.parametrize("detach", [True, False])
def test_detached_masks_pass_no_gradient_to_their_input(detach):
    mask = ld.ElementwiseMask(elementwise_config(detach=detach))
    params = {"mask_frequency": np.float32([0.7]), "mask_phase": np.float32([0.3])}
    x = np.for_rows((1, 1, 1), 1.5, np.float32)
    gradient = jax.grad(lambda x, call: mask.apply({"params": params}, x, call)[0, 0, 0])
    grad = np.asarray(families.jit(gradient)(x, call(1)))
    angle = 0.7 * 1.5 + 0.3
    expected = 0.5 * np.cos(angle) + 0.5 - (0 if detach else 1.5 * 0.5 * np.sin(angle) * 0.7)
    np.testing.assert_allclose(grad[0, 0, 0], expected, rtol=1e-5)


# Two heads, three tokens of four features: against the formulas in plain numpy.
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


def matrices(seed, *names):
    rng = np.random.default_rng(seed)
    return {name: np.float32(rng.normal(size=(4, 4))) for name in names}


@pytest.mark.parametrize("rounding", ["none", "stochastic", "sigmoid"])
def test_attention_mask_by_hand(rounding):
    """m = 0.5 cos(u + b) + 0.5; penalties read the mask before rounding."""
    rng = np.random.default_rng(0)
    x, b = rng.normal(size=(1, 3, 4)), rng.normal(size=4)
    params = {"attention": matrices(1, *MATRICES), "mask_shift": np.float32(b)}
    m = 0.5 * np.cos(attention_by_hand(x[0], params["attention"]) + b) + 0.5
    sharp = 1 / (1 + np.exp(-5 * (m - 0.5)))
    applied = {"none": m, "stochastic": m >= 0.5, "sigmoid": sharp}[rounding]
    mask = ld.AttentionMask(attention_config(rounding=rounding, sigmoid_scale=5.0), ATTENTION)
    got, sown = compiled(mask, "losses")({"params": params}, np.float32(x), call(3))
    np.testing.assert_allclose(got, x * applied[None], atol=1e-5)
    np.testing.assert_allclose(sown["losses"]["dropout_l1"][0], m.mean(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["embedding", "embedding_linear"])
def test_masks_of_the_embedding_by_hand(kind):
    """E' = Linear(Attn(emb)), and each mask attends over E', not over x. In the cheaper form a mask
    is a linear layer of Attn(emb)."""
    rng = np.random.default_rng(0)
    x, emb, b = rng.normal(size=(1, 3, 4)), rng.normal(size=(1, 3, 4)), rng.normal(size=4)
    config = attention_config(input=kind, rounding="none")
    shared, mask = {"attention": matrices(1, *MATRICES)}, {"mask_shift": np.float32(b)}
    if kind == "embedding":
        shared |= matrices(2, "mask_linear")
        mask["attention"] = matrices(3, *MATRICES)
        e = attention_by_hand(emb[0], shared["attention"]) @ np.float64(shared["mask_linear"])
        u = attention_by_hand(e, mask["attention"])
    else:
        mask |= matrices(4, "mask_linear")
        e = attention_by_hand(emb[0], shared["attention"])
        u = e @ np.float64(mask["mask_linear"])

    @families.jit
    def run(shared, mask, emb, x):
        e_BTD = ld.MaskInput(config, ATTENTION).apply({"params": shared}, emb, call(3))
        given = call(3, mask_input_BTD=e_BTD)
        module = ld.AttentionMask(config, ATTENTION)
        made = jax.eval_shape(module.init, jax.random.key(0), x, given)["params"]
        assert jax.tree.structure(nn.unbox(made)) == jax.tree.structure(mask)
        return module.apply({"params": mask}, x, given)

    got = run(shared, mask, np.float32(emb), np.float32(x))
    np.testing.assert_allclose(got, x * (0.5 * np.cos(u + b) + 0.5)[None], atol=1e-4)


@pytest.mark.parametrize("kind", ["hidden", "embedding"])
def test_losses_of_detached_masks_reach_parameters_of_masks_alone(kind):
    """The shared ones, too; with `detach=False` they reach the embedding."""
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
            reached = "mask_" in path.rsplit("/", 1)[-1]
            reached |= path == "embed/embedding" and not detach
            assert (np.abs(grad).max() > 0) == reached, (path, detach)


def test_masks_are_float32_in_bfloat16_models():
    """1000 x rounded to bfloat16 would turn the cosine by more than a circle."""
    mask = ld.ElementwiseMask(elementwise_config())
    x = np.for_rows((1, 1, 1), 1.0078125, jnp.bfloat16)
    params = {"mask_frequency": np.float32([1000.3]), "mask_phase": np.float32([0.2])}
    got, sown = jax.device_get(compiled(mask, "losses")({"params": params}, x, call(1)))
    m = 0.5 * np.cos(np.float32(1000.3) * 1.0078125 + 0.2) + 0.5
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(sown["losses"]["dropout_l1"][0], m, atol=1e-3)
    assert sown["losses"]["dropout_l1"][0].dtype == jnp.float32
    np.testing.assert_allclose(np.float32(got[0, 0, 0]), 1.0078125 * m, rtol=0.01)


@pytest.mark.parametrize("reach", [4.0, 100.0])
def test_the_cosine_of_a_mask_is_the_cosine(reach):
    """The polynomial and its gradient, over many turns; every mask lies in [0, 1]."""
    u = np.append(np.linspace(-reach, reach, 20_001), [np.inf, np.nan]).astype(np.float32)
    m, slope = map(np.asarray, families.jit(jax.vmap(jax.value_and_grad(ld.cosine_mask)))(u))
    assert np.all(np.isnan(m[-2:]))
    u, m, slope = u[:-2], m[:-2], slope[:-2]
    np.testing.assert_allclose(m, 0.5 * np.cos(np.float64(u)) + 0.5, atol=2e-7)
    np.testing.assert_allclose(slope, -0.5 * np.sin(np.float64(u)), atol=2e-7)
    assert m.min() >= 0 and m.max() <= 1


def test_initial_values():
    x = np.zeros((1, 1, 512), np.float32)
    elementwise = ld.ElementwiseMask(
        elementwise_config(a_mean=2.0, a_std=0.5, b_mean=-1.0, b_std=0.1)
    )
    attention = ld.AttentionMask(attention_config(shift_init=PI / 2), ATTENTION)

    @families.jit
    def initial(key):
        masks = (elementwise, x), (attention, x[..., :4])
        return [nn.unbox(mask.init(key, y, call(1))["params"]) for mask, y in masks]

    params, of_attention = jax.device_get(initial(jax.random.key(0)))
    np.testing.assert_allclose(of_attention["mask_shift"], PI / 2)
    for name, mean, std in (("mask_frequency", 2.0, 0.5), ("mask_phase", -1.0, 0.1)):
        assert abs(params[name].mean() - mean) < 0.2 * std
        assert params[name].std() == pytest.approx(std, rel=0.15)


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


def test_penalties_are_finite_at_zero_and_one():
    """Of masks close to these, and down to the phases 0 and pi, which make masks 1 and 0."""
    m = np.float32([0.0, 1.0, 1e-45, 1e-30, np.nextafter(np.float32(1), np.float32(0))])

    def each(function, values):
        return {
            name: jax.vmap(jax.value_and_grad(lambda x, name=name: function(x)[name]))(values)
            for name in families.PENALTIES
        }

    @families.jit
    def run(m, b):
        return each(ld.penalties, m), each(lambda b: ld.penalties(ld.cosine_mask(b)), b)

    for results in run(m, np.float32([0.0, PI])):
        for name, (value, grad) in results.items():
            assert np.isfinite(value).all() and np.isfinite(grad).all(), name
            assert np.abs(np.asarray(grad)).max() < 200, name


def test_statistics_by_hand():
    m = np.float32([0.95, 0.05, 0.6, 0.4, 0.5])

    @families.jit
    def statistics(m, uniform):
        return ld.statistics(m, ld.rounded(m, "stochastic", uniform))

    got = statistics(m, np.float32([0.99, 0.0, 0.7, 0.1, 0.2]))
    mean = {name: np.mean(value) for name, value in jax.device_get(got).items()}
    assert mean["dropout/near_one"] == mean["dropout/near_zero"] == pytest.approx(0.2)
    assert mean["dropout/kept"] == pytest.approx(3 / 5)  # of the drawn mask
    entropy = np.mean([-p * np.log2(p) for p in m])
    assert mean["dropout/entropy"] == pytest.approx(entropy, rel=1e-5)


def test_padding_does_not_count():
    """Padding of a packed row, in no mean."""
    sites = ("mlp_output", "attention_probs")
    model = families.make({"dropout.kind": "elementwise", "dropout.sites": sites, "depth": 1})
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


def test_empty_slots_do_not_count():
    """A mask over gathered tokens, of which some slots hold none."""
    mask = ld.ElementwiseMask(elementwise_config())
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(1, 5, 4)))
    params = {"mask_frequency": np.float32([1, 2, 3, 4]), "mask_phase": np.zeros(4, np.float32)}
    empty = Call(np.array([[0, 1, 2, -1, -1]]))
    both = [
        compiled(mask, "losses", "stats")({"params": params}, x, i)[1]
        for x, i in ((x_BTD[:, :3], call(3)), (x_BTD, empty))
    ]
    families.assert_trees_close(*both, rtol=1e-5)


# ---- in a model --------------------------------------------------------------------------------


def one_site(kind, site, **changes):
    return families.make({"dropout.kind": kind, "dropout.sites": (site,), "depth": 1, **changes})


@pytest.mark.parametrize(
    "kind, sites", [("elementwise", families.ALL_SITES), ("attention", families.NO_PROBS)]
)
def test_a_mask_acts_at_its_site_and_at_inference(kind, sites):
    """Masks change the logits; with everything kept the model is the one without masks."""
    place = {"embedding": "dropout_embedding/", "attention_probs": "attention/probs_dropout/"}
    tokens_BT, models_of = families.tokens(batch=2), {site: one_site(kind, site) for site in sites}
    params = {site: families.random_params(model) for site, model in models_of.items()}

    def opened(path, leaf):
        return 0 * leaf if path[-1].key.startswith("mask_") else leaf

    @families.jit
    def run(params):
        results = {}
        for site, model in models_of.items():
            dropout = dataclasses.replace(model.config.dropout, kind="none")
            plain = models.changed(model, dropout=dropout)
            open_params = jax.tree_util.tree_map_with_path(opened, params[site])
            results[site] = [
                m.apply({"params": p}, tokens_BT)
                for m, p in ((model, params[site]), (model, open_params), (plain, params[site]))
            ]
        return results

    for site, (masked, all_kept, without) in run(params).items():
        paths = [p for p in optim.param_paths(params[site]) if re.search("(^|/)mask_", p)]
        assert paths and all(place.get(site, f"dropout_{site}/") in path for path in paths)
        assert np.abs(masked - without).max() > 1e-2, site
        np.testing.assert_allclose(all_kept, without, atol=1e-5, err_msg=site)


@pytest.mark.parametrize("kind", ["elementwise", "attention"])
def test_only_stochastic_rounding_differs_between_training_and_inference(kind):
    """A key draws the rounding in training alone; at inference one at hand has no effect."""
    model = one_site(kind, "mlp_output")
    params, tokens_BT = families.random_params(model), families.tokens(batch=2)

    @families.jit
    def run(key):
        apply = functools.partial(model.apply, {"params": params}, tokens_BT)
        rngs = {"dropout": key}
        return apply(), apply(rngs=rngs), apply(train=True, rngs=rngs)

    inference, with_key, one = map(np.asarray, run(jax.random.key(0)))
    other = np.asarray(run(jax.random.key(1))[2])
    np.testing.assert_array_equal(inference, with_key)
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
    whole = call(8, selection="train", mask_input_BTD=read_BTD)
    got_BTD = families.jit(Layer(spec).apply)({"params": params}, x_BTD, whole)
    score_T = x_BTD[0] @ np.asarray(params["router"])
    routed = np.sort(np.argsort(score_T)[-4:])
    inner = {name: leaf for name, leaf in params.items() if name != "router"}

    @families.jit
    def delta(read_BTD):
        some = Call(jnp.asarray(routed)[None], mask_input_BTD=read_BTD)
        return Block(spec.block).apply({"params": inner}, x_BTD[:, routed], some)

    delta_BTD = np.asarray(delta(read_BTD[:, routed]))
    expected_BTD = np.array(x_BTD)
    expected_BTD[0, routed] += delta_BTD[0] / (1 + np.exp(-score_T[routed, None]))
    np.testing.assert_allclose(got_BTD, expected_BTD, atol=1e-5)
    # The result depends on which rows of E' these are.
    assert np.abs(np.asarray(delta(read_BTD[:, :4])) - delta_BTD).max() > 1e-2


# ---- evaluation --------------------------------------------------------------------------------


class Padded(Held):
    """The last four positions of a row are padding."""

    def eval_batches(self, *arguments):
        for batch in super().eval_batches(*arguments):
            segments = np.ones(batch["inputs"].shape, np.int32)
            segments[:, -4:] = 0
            yield {**batch, "segment_ids": segments}


def one_device_mesh():
    return sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluation_reports_masks_by_layer_and_how_many_changed(scan):
    """Between two evaluations one of two layers inverts its mask of the MLP's output."""
    model = families.make(
        {
            "dropout.kind": "attention",
            "scan_layers": scan,
            "dropout.sites": ("embedding", "mlp_output"),
        }
    )
    params, mesh = families.random_params(model), one_device_mesh()
    config = common.base()
    config.evaluate.batch_size = families.BATCH
    evaluator = Evaluator(model, config, Padded(), mesh, sharding.DEFAULT_RULES)

    def inverted(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        if "mlp_output" not in path or not path.endswith("mask_shift"):
            return leaf
        if scan:
            return np.asarray(leaf) + np.float32([[0], [PI]])
        return np.asarray(leaf) + np.float32(PI) if "block_1" in path else leaf

    with sharding.use(mesh, sharding.DEFAULT_RULES):
        first = evaluator(params, {})
        second = evaluator(params, {})
        third = evaluator(jax.tree_util.tree_map_with_path(inverted, params), {})
    kept = [first[f"eval/dropout/kept/block_{i}"] for i in (0, 1)]
    assert 0 < min(kept) and max(kept) < 1
    assert "eval/dropout/changed" not in first
    assert second["eval/dropout/changed"] == 0
    assert third["eval/dropout/changed/block_0"] == 0
    assert third["eval/dropout/changed/block_1"] == pytest.approx(1)
    assert third["eval/dropout/changed"] == pytest.approx(1 / 3)  # one of three masks


def test_changed_masks_of_probabilities_count_each_pair_once():
    """However attention cuts a row, and beside another mask as one mask: chunks of 5 of 32 queries,
    of which the first has 15 pairs and later ones up to 150."""
    mesh, results = one_device_mesh(), []
    for chunk in (5, 32):
        model = families.make(
            {
                "dropout.kind": "elementwise",
                "dropout.sites": ("attention_probs", "mlp_output"),
                "attention.chunk": chunk,
                "depth": 1,
            }
        )
        with sharding.use(mesh, sharding.DEFAULT_RULES):
            changes = Changes(model, "masks", mesh, sharding.DEFAULT_RULES, np.uint32(0))
            batch = {"inputs": np.asarray(families.tokens())[changes.placement.rows]}
            for seed in (0, 1):
                changed = changes(families.random_params(model, seed), {}, batch)
        results.append(changed)
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert 0 < results[0]["dropout/changed"] < 1


def test_slots_that_are_empty_either_time_have_not_changed():
    """A slot of a routed block that holds a token in one of the evaluations alone."""

    class Preset:
        """A model whose sown masks are its parameters."""

        def apply(self, variables, *_, **__):
            return None, {"masks": {"x": ((variables["params"],),)}}

    mesh = one_device_mesh()
    changes = Changes(Preset(), "masks", mesh, sharding.DEFAULT_RULES, np.uint32(0))
    batch = {"inputs": np.asarray(families.tokens())[changes.placement.rows]}
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        assert changes(np.int8([[1, -1, 0, 1, 0]]), {}, batch) == {}
        changed = changes(np.int8([[0, 1, -1, 1, -1]]), {}, batch)
    assert changed["x"] == pytest.approx(1 / 2)


# ---- config ------------------------------------------------------------------------------------


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
