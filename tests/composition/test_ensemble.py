"""The ensemble of cBTM: the mixture by hand, sampling with the caches of the experts in use."""

import functools
from types import SimpleNamespace

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx import models
from efx.composition import ensemble as mixtures
from efx.composition.sampling import WeighedExperts
from efx.data.tokenizers import CharTokenizer
from efx.sampling import Sampler

# ---- the mixture -------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k, tau", [(1, 0.3), (2, 0.3), (3, 0.3), (2, 1e-6), (3, 1e6)])
def test_weights_by_hand(top_k, tau):
    """Of equally near experts the first are chosen."""
    distances = np.array([[0.1, 0.4, 0.2], [0.5, 0.5, 0.9], [0.0, 40.0, 0.0]], np.float32)
    found = np.exp(np.asarray(mixtures.log_weights(jnp.asarray(distances), tau, top_k)))
    for row, weights in zip(distances, found, strict=True):
        order = np.argsort(row, kind="stable")[:top_k]
        expected = np.zeros(3)
        shares = np.exp((row.min() - row[order]) / tau)
        expected[order] = shares / shares.sum()
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-30)


def test_the_mixture_by_hand():
    rng = np.random.default_rng(0)
    logits_BEV = rng.normal(size=(2, 3, 5)).astype(np.float32) * 4
    probs_BEV = np.exp(logits_BEV) / np.exp(logits_BEV).sum(-1, keepdims=True)
    weights_BE = np.array([[0.2, 0.0, 0.8], [1.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        log_w = np.log(weights_BE).astype(np.float32)
    expected = np.einsum("BEV,BE->BV", probs_BEV, weights_BE)
    got = np.exp(np.asarray(jax.jit(mixtures.mix_logits)(logits_BEV, log_w)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-5)
    one = jax.jit(mixtures.mix)(np.log(probs_BEV[:, :, 3]), log_w)
    np.testing.assert_allclose(np.exp(np.asarray(one)), expected[:, 3], rtol=1e-5)


# ---- sampling ----------------------------------------------------------------------------------

CONTEXT, EXPERTS = 24, 4
LETTERS = CharTokenizer("\nabcdefghijklmnopqrstuvwxyz")


@functools.cache
def experts(**changes):
    """(model, variables of each of the experts): one small architecture, several parameters."""
    changes = changes or {"depth": 1}
    model = families.make(changes, vocab_size=LETTERS.vocab_size, context=CONTEXT)
    return model, [{"params": families.random_params(model, seed=j)} for j in range(EXPERTS)]


# With room for every token, whatever the length of the text.
MOD = {
    "depth_routing.kind": "mod",
    "depth_routing.capacity": 0.5,
    "depth_routing.causal": "aux_loss",
}


class Wandering:
    """Distances that change with the text, so that experts come and go."""

    def __init__(self):
        self.seen = []

    def distances(self, texts):
        self.seen += texts
        rngs = [np.random.default_rng(list(text.encode())) for text in texts]
        return np.array([rng.random(EXPERTS) for rng in rngs], np.float32)


def settings(**changes):
    return SimpleNamespace(**{"tau": 0.2, "top_k": 2, "every": 5, **changes})


def sampled(prompt="abcab", n=40, seed=0, options=None, model_changes=None, **changes):
    """(ids of prompt and continuation, sampler, WeighedExperts, clustering)."""
    model, variables = experts(**(model_changes or {}))
    clustering = Wandering()
    weighed = WeighedExperts(model, variables, clustering, LETTERS, settings(**changes))
    sampler = Sampler(weighed.model, **({"temperature": 0.0} | (options or {})))
    ids = LETTERS.encode(prompt).tolist()
    for (new,) in sampler.tokens(weighed, [ids], max_new_tokens=n, seeds=[seed]):
        ids = ids + new
    return ids, sampler, weighed, clustering


def mixture_logits(model, forward, variables, text, log_w):
    """log p of the next token by the full forward pass of every expert, over a padded text."""
    padded = np.int32([text + [0] * (CONTEXT - len(text))])
    logits = [np.asarray(forward(own, padded))[0, len(text) - 1] for own in variables]
    logits = np.stack(logits)[:, : model.vocab_size]
    with np.errstate(divide="ignore"):
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return np.log(np.exp(log_w) @ probs)


@pytest.mark.parametrize("changes, n", [({}, 50), (MOD, 18)])
def test_cached_decoding_is_the_full_forward_pass(changes, n):
    """Greedy tokens of the caches against those of every expert reading the text anew, while
    experts come and go. A text that outgrows the context continues from its last half."""
    ids, sampler, weighed, _ = sampled("abcab", n, every=4, model_changes=changes)
    model, variables = experts(**changes)
    model, begin = model.clone(selection="causal"), 0
    forward = jax.jit(model.apply)
    for end in range(5, 5 + n):
        if end - begin > CONTEXT:
            begin = end - CONTEXT // 2
        log_w = weighed.log_weights(ids[: end - (end - 5) % 4])
        expected = mixture_logits(model, forward, variables, ids[begin:end], log_w)
        assert expected[ids[end]] > expected.max() - 1e-4, end
    assert weighed.usage(n)[1] > 0 and sampler.stats["new_tokens"] == n
    assert len(set(ids)) > 3  # not one token over and over


def test_weights_are_computed_from_the_text_so_far_every_so_many_tokens():
    ids, _, weighed, clustering = sampled("abcab", 12, every=5)
    text = LETTERS.decode(ids)
    assert clustering.seen == [text[:5], text[:10], text[:15]]
    assert sum(weighed.usage(12)[0].values()) == 2 * 12


def test_only_the_experts_in_use_have_a_cache():
    model, _ = experts()
    one = sum(x.nbytes for x in jax.tree.leaves(models.init_cache(model, 1, CONTEXT)))
    _, sampler, weighed, _ = sampled()
    assert sampler.stats["cache_bytes"] == 2 * one
    tokens, switches = weighed.usage(40)
    assert len(tokens) > 2 and switches > 0


def test_seeds_and_stop_tokens():
    options = dict(temperature=1.0)
    first, again = (sampled(n=20, seed=7, options=options)[0] for _ in range(2))
    assert first == again and first != sampled(n=20, seed=8, options=options)[0]
    stopped, *_ = sampled(n=20, seed=7, options=options | {"stop_ids": (first[12],)})
    assert stopped == first[: first.index(first[12], 5)]
