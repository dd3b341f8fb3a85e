"""The latent prediction loss: by hand, over pairs within documents only."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import flops, losses
from efx.configs import common
from efx.models.latent import loss as latent_loss
from efx.models.latent.config import LatentLossConfig
from efx.models.latent.loss import LatentPrediction

B, T, D = 3, 7, 6
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 0, 0, 0], [1] * 7])


def module(kind="cosine", target_gradient=False, candidates="row"):
    return LatentPrediction(
        LatentLossConfig(kind=kind, target_gradient=target_gradient, candidates=candidates),
        0.5,
        jnp.float32,
    )


def params_of(module):
    tree = nn.unbox(jax.jit(module.init)(jax.random.key(0), latents()))["params"]
    return tree | {
        name: np.float32(value)
        for name, value in (("log_temperature", 0.7), ("bias", -1.3))
        if name in tree
    }


def latents(seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=(B, T, D)))


@functools.cache
def compiled(module):
    def run(params, x_BTD, segment_ids_BT):
        _, sown = module.apply({"params": params}, x_BTD, segment_ids_BT, mutable=["losses"])
        return losses.collect_sown(sown["losses"])["latent_prediction"]

    return jax.jit(run)


def loss(module, params, x_BTD, segment_ids_BT=None):
    return compiled(module)(params, x_BTD, segment_ids_BT)


def unit(x):
    return x / np.linalg.norm(x)


def pairs(segments):
    """The (row, t) that count, one by one."""
    for b in range(B):
        for t in range(T - 1):
            if segments is None or segments[b, t] == segments[b, t + 1] != 0:
                yield b, t


of_documents = pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["none", "documents"])


@of_documents
def test_cosine_by_hand(segments):
    m, x = module(), np.asarray(latents(), np.float64)
    params = params_of(m)
    w = np.asarray(params["predict"]["kernel"], np.float64)
    chosen = list(pairs(segments))
    assert len(chosen) == (18 if segments is None else 13)
    expected = np.mean([1 - unit(x[b, t] @ w) @ unit(x[b, t + 1]) for b, t in chosen])
    np.testing.assert_allclose(loss(m, params, latents(), segments), expected, rtol=1e-5)


@pytest.mark.parametrize("candidates", ["row", "batch"])
@of_documents
def test_siglip_by_hand(segments, candidates):
    m, x = module("siglip", candidates=candidates), np.asarray(latents(), np.float64)
    params = params_of(m)
    w = np.asarray(params["predict"]["kernel"], np.float64)
    chosen = list(pairs(segments))
    total = 0.0
    for b, t in chosen:
        for c, s in chosen:
            if candidates == "row" and c != b:
                continue
            logit = math.exp(0.7) * (unit(x[b, t] @ w) @ unit(x[c, s + 1])) - 1.3
            total += math.log1p(math.exp(-logit if (b, t) == (c, s) else logit))
    np.testing.assert_allclose(loss(m, params, latents(), segments), total / len(chosen), rtol=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "siglip"])
def test_gradients(kind):
    """Every parameter learns; the last latent, which is only ever predicted, moves if asked to."""
    for target_gradient in (False, True):
        m = module(kind, target_gradient)
        params = params_of(m)
        gradient = jax.jit(jax.grad(lambda p, x, m=m: loss(m, p, x), argnums=(0, 1)))
        d_params, d_x = jax.device_get(gradient(params, latents()))
        assert all(np.abs(d).max() > 1e-4 for d in jax.tree.leaves(d_params))
        assert (np.abs(d_x[:, -1]).max() > 1e-4) == target_gradient
        assert np.abs(d_x[:, 0]).max() > 1e-4


def test_rows_do_not_count_twice():
    """Of the forms that see a row at a time: twice the batch, the same value."""
    for kind in ("cosine", "siglip"):
        m = module(kind)
        twice = np.concatenate([latents(), latents()])
        np.testing.assert_allclose(
            loss(m, params_of(m), latents()), loss(m, params_of(m), twice), rtol=1e-6
        )


def test_one_latent_and_zeros_are_no_trouble():
    for kind in ("cosine", "siglip"):
        m = module(kind)
        assert loss(m, params_of(m), latents()[:, :1]) == 0.0
        params = params_of(m)
        value, grad = jax.jit(jax.value_and_grad(lambda x, m=m, p=params: loss(m, p, x)))(
            np.zeros((B, T, D), np.float32)
        )
        assert np.isfinite(value) and np.isfinite(grad).all()
    nothing = loss(m, params_of(m), latents(), np.zeros((B, T), int))
    assert nothing == 0.0


@pytest.mark.parametrize(
    "kind, candidates",
    [
        ("cosine", "row"),
        ("siglip", "row"),
        ("siglip", "batch"),
        ("none", "row"),
    ],
)
def test_costs(kind, candidates):
    c = LatentLossConfig(kind=kind, candidates=candidates)
    counted = latent_loss.loss_flops(c, D, T)
    if kind == "none":
        assert counted == {}
        return
    m = LatentPrediction(c, 0.5, jnp.float32)
    params = params_of(m)
    for batch in (1, B):
        traced = flops.jaxpr_flops(lambda p, x: loss(m, p, x), params, latents()[:batch])
        expected = batch * counted["latent_prediction"]
        if candidates == "batch":  # every latent meets those of the other sequences, too
            expected += batch * (batch - 1) * flops.matmul(T - 1, D, T - 1)
        assert traced == expected


def test_its_weight_may_rise():
    """The published schedule: linearly to 0.003 within the first fifth."""
    config = common.base()
    assert latent_loss.LOSS in config.losses
    config.losses.latent_prediction = dict(schedule="linear", c_start=0.0, c_end=0.003, steps=200)
    weights = [
        float(losses.coefficient(config.losses.latent_prediction, step, 1000))
        for step in (0, 100, 200, 999)
    ]
    np.testing.assert_allclose(weights, [0.0, 0.0015, 0.003, 0.003], rtol=1e-6)
