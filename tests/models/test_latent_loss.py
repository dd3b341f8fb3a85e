"""The latent prediction loss: by hand, over pairs within documents, and its gradients."""

import functools

import families
import jax
import numpy as np
import pytest
from latent_helpers import NONE, make

from efx.train import losses

ROWS, LENGTH = 3, 24
SEGMENTS = np.repeat([[1, 2, 0], [1, 2, 3], [1, 1, 1]], [5, 9, 10], axis=1)
STARTS = np.where(SEGMENTS == 1, 0, np.repeat([[0, 5, 14]], [5, 9, 10], axis=1))
ONE = np.ones((ROWS, LENGTH), np.int32)
POSITIONS = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))


def model_of(latents=2, **loss):
    """A small model whose levels have no blocks."""
    levels = {"group_size": 4, "latents": (latents,), "level_widths": (8,), "level_heads": (2,)}
    return make({**levels, **NONE, **{f"latent_loss.{k}": v for k, v in loss.items()}})


def tokens():
    """The last token of each row occurs nowhere else."""
    tokens_BT = np.asarray(families.tokens(batch=ROWS, length=LENGTH)) % 44
    tokens_BT[:, -1] = 44
    return tokens_BT


@functools.cache
def computed():
    """(parameters, compiled function from them and documents to ((loss, latents), gradients))"""
    model = model_of(kind="cosine")

    def run(params, *documents):
        _, sown = model.apply(
            {"params": params},
            tokens(),
            *documents,
            capture_intermediates=lambda module, _: module.name == "layers",
            mutable=["losses", "intermediates"],
        )
        latents_BTD = sown["intermediates"]["layers"]["__call__"][-1]
        return losses.collect_sown(sown["losses"])["latent_prediction"], latents_BTD

    return families.random_params(model), jax.jit(jax.value_and_grad(run, has_aux=True))


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("segments", [ONE, SEGMENTS], ids=["one", "several"])
def test_the_loss_by_hand(segments):
    params, run = computed()
    positions = POSITIONS if segments is ONE else POSITIONS - STARTS
    (loss, x), _ = run(params, np.int32(positions), np.int32(segments))
    x, w = np.float64(x), np.float64(params["prediction"]["predict"]["kernel"])
    documents = segments[:, np.arange(LENGTH) % 4 >= 2]  # of the latents
    pairs = [
        1 - unit(x[b, t] @ w) @ unit(x[b, t + 1])
        for b, t in np.ndindex(ROWS, documents.shape[1] - 1)
        if documents[b, t] == documents[b, t + 1] != 0
    ]
    np.testing.assert_allclose(loss, np.mean(pairs), rtol=1e-5)


def test_the_predicted_latent_gets_no_gradient():
    """The last latent is predicted and predicts nothing; it alone sees the last token. Gradients
    are finite where all latents are zero."""
    params, run = computed()
    _, grads = run(params, POSITIONS, ONE)
    table = np.abs(grads["embed"]["embedding"]).max(axis=-1)
    assert table[44] < 1e-6 and table[:44].max() > 1e-4
    assert np.abs(grads["prediction"]["predict"]["kernel"]).max() > 1e-4
    (value, _), grads = run(jax.tree.map(np.zeros_like, params), POSITIONS, ONE)
    assert np.isfinite(value) and all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))


def test_one_latent_has_no_loss():
    model, tokens_BT = model_of(1, kind="cosine"), families.tokens(length=4)
    run = families.jit(lambda p: model.apply({"params": p}, tokens_BT, mutable=["losses"]))
    _, sown = run(families.random_params(model))
    assert losses.collect_sown(sown["losses"])["latent_prediction"] == 0.0
