"""The latent prediction loss: by hand, over pairs within documents, and its gradients."""

import functools
import math

import families
import jax
import numpy as np
import pytest
from latent_helpers import NONE, make

from efx import flops, losses

SEGMENTS = np.repeat([[1, 2, 0], [1, 2, 3], [1, 1, 1]], [5, 9, 10], axis=1)
POSITIONS = np.repeat([[0, 5, 14]], [5, 9, 10], axis=1)
POSITIONS = np.where(SEGMENTS == 1, 0, POSITIONS)
POSITIONS = np.arange(24)[None] - POSITIONS
ROWS, LATENTS = 3, 12  # two of each group of 4 tokens
VARIANTS = {
    "cosine": {"kind": "cosine"},
    "siglip": {"kind": "siglip"},
    "siglip, target": {"kind": "siglip", "target_gradient": True},
}


def model_of(latents=2, **loss):
    """A small model whose levels have no blocks."""
    levels = {"group_size": 4, "latents": (latents,), "level_widths": (8,), "level_heads": (2,)}
    return make({**levels, **NONE, **{f"latent_loss.{k}": v for k, v in loss.items()}})


def tokens():
    """The last token of each row occurs nowhere else."""
    tokens_BT = np.asarray(families.tokens(batch=ROWS, length=24)) % 44
    tokens_BT[:, -1] = 44
    return tokens_BT


@functools.cache
def computed(name):
    """(parameters, compiled function from them, tokens and documents to the loss, its gradients and
    the latents that it is of)"""
    model = model_of(**VARIANTS[name])
    params = jax.device_get(families.random_params(model))
    if "siglip" in name:
        params["prediction"] |= {"log_temperature": np.float32(0.7), "bias": np.float32(-1.3)}

    def loss(params, tokens_BT, *documents):
        _, sown = model.apply(
            {"params": params},
            tokens_BT,
            *documents,
            capture_intermediates=lambda module, _: module.name == "layers",
            mutable=["losses", "intermediates"],
        )
        latents_BTD = sown["intermediates"]["layers"]["__call__"][-1]
        return losses.collect_sown(sown["losses"])["latent_prediction"], latents_BTD

    return params, jax.jit(jax.value_and_grad(loss, has_aux=True))


def unit(x):
    return x / np.linalg.norm(x)


def pairs(segments):
    """The (row, latent) that count: it and the next are of one document."""
    of_latent = segments[:, np.arange(24) % 4 >= 2]
    for b in range(ROWS):
        for t in range(LATENTS - 1):
            if of_latent[b, t] == of_latent[b, t + 1] != 0:
                yield b, t


@pytest.mark.parametrize("segments", [np.ones((ROWS, 24), int), SEGMENTS], ids=["one", "several"])
@pytest.mark.parametrize("name", ["cosine", "siglip"])
def test_the_loss_by_hand(name, segments):
    params, run = computed(name)
    positions = POSITIONS if segments is SEGMENTS else np.tile(np.arange(24), (ROWS, 1))
    (loss, x), _ = run(params, tokens(), np.int32(positions), np.int32(segments))
    x, w = np.float64(x), np.float64(params["prediction"]["predict"]["kernel"])
    counted = list(pairs(segments))
    assert x.shape[:2] == (ROWS, LATENTS) and 0 < len(counted) <= ROWS * (LATENTS - 1)
    total = 0.0
    for b, t in counted:
        if name == "cosine":
            total += 1 - unit(x[b, t] @ w) @ unit(x[b, t + 1])
            continue
        for c, s in counted:
            if c == b:
                logit = math.exp(0.7) * (unit(x[b, t] @ w) @ unit(x[c, s + 1])) - 1.3
                total += math.log1p(math.exp(-logit if (b, t) == (c, s) else logit))
    np.testing.assert_allclose(loss, total / len(counted), rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_reach_the_predicted_latent_only_on_request(name):
    """The last latent is predicted and predicts nothing; it alone sees the last token. The
    predictor's parameters learn, and gradients are finite where all latents are zero."""
    params, run = computed(name)
    documents = np.tile(np.arange(24, dtype=np.int32), (ROWS, 1)), np.ones((ROWS, 24), np.int32)
    (_, _), grads = run(params, tokens(), *documents)
    table = np.abs(grads["embed"]["embedding"]).max(axis=-1)
    assert (table[44] > 1e-6) == ("target" in name) and table[: tokens().max()].max() > 1e-4
    assert all(np.abs(grad).max() > 1e-4 for grad in jax.tree.leaves(grads["prediction"]))
    (value, _), grads = run(jax.tree.map(np.zeros_like, params), tokens(), *documents)
    assert np.isfinite(value) and all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))


def test_one_latent_has_no_loss():
    model, tokens_BT = model_of(1, kind="siglip"), families.tokens(length=4)
    params = families.random_params(model)
    _, sown = families.jit(lambda p: model.apply({"params": p}, tokens_BT, mutable=["losses"]))(
        params
    )
    assert losses.collect_sown(sown["losses"])["latent_prediction"] == 0.0


def test_the_ledger_counts_pairs_of_latents():
    plain, model = model_of(), model_of(**VARIANTS["siglip"])
    counted = model.ledger(24).nominal["latent_prediction"]
    assert flops.executed(model, 24) - flops.executed(plain, 24) == counted
