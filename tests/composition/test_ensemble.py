"""The ensemble of cBTM: the mixture by hand, and sampling with the KV caches of experts in use."""

import functools
from types import SimpleNamespace

import families
import jax
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra studies)")

from efx import models
from efx.composition import ensemble as lib
from efx.composition.sampling import WeightedExperts, mix_logits
from efx.data.tokenizers import CharTokenizer
from efx.sampling import Sampler


@pytest.mark.parametrize("top_k, tau", [(1, 0.3), (2, 0.3), (3, 0.3), (2, 1e-6), (3, 1e6)])
def test_weights_by_hand(top_k, tau):
    """Of equally near experts the first are chosen."""
    distances = np.array([[0.1, 0.4, 0.2], [0.5, 0.5, 0.9], [0.0, 40.0, 0.0]], np.float32)
    found = np.exp(lib.log_weights(distances, tau, top_k))
    for row, weights in zip(distances, found, strict=True):
        order = np.argsort(row, kind="stable")[:top_k]
        parts, expected = np.exp((row.min() - row[order]) / tau), np.zeros(3)
        expected[order] = parts / parts.sum()
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-30)


def test_the_mixture_by_hand():
    rng = np.random.default_rng(0)
    logits_BEV = rng.normal(size=(2, 3, 5)).astype(np.float32) * 4
    probs_BEV = np.exp(logits_BEV) / np.exp(logits_BEV).sum(-1, keepdims=True)
    weights_E = np.array([0.2, 0.0, 0.8])
    with np.errstate(divide="ignore"):
        log_w_E = np.log(weights_E).astype(np.float32)
    expected = np.einsum("BEV,E->BV", probs_BEV, weights_E)
    found = np.exp(np.asarray(jax.jit(mix_logits)(logits_BEV, log_w_E)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---- sampling ----------------------------------------------------------------------------------

CONTEXT, EXPERTS = 24, 4
LETTERS = CharTokenizer("\nabcdefghijklmnopqrstuvwxyz")
# Capacity for every token, whatever the length of the text.
MOD = {
    "depth_routing.kind": "mod",
    "depth_routing.capacity": 0.5,
    "depth_routing.causal_decision": "aux_loss",
}


@functools.cache
def experts(**changes):
    """Return (model, variables of each expert): one architecture, several parameters."""
    changes = changes or {"depth": 1}
    model = families.make(changes, vocab_size=LETTERS.vocab_size, context=CONTEXT)
    return model, [{"params": families.random_params(model, seed=j)} for j in range(EXPERTS)]


class RandomDistances:
    """Distances that change with the text, so that experts come and go."""

    def __init__(self):
        self.seen = []

    def distances(self, texts):
        self.seen += texts
        rngs = [np.random.default_rng(list(text.encode())) for text in texts]
        return np.array([rng.random(EXPERTS) for rng in rngs], np.float32)


def sampled(n, every=5, seed=0, options=None, **changes):
    """Return (ids of "abcab" and its continuation, sampler, WeightedExperts, clustering)."""
    model, variables = experts(**changes)
    clustering = RandomDistances()
    settings = SimpleNamespace(tau=0.2, top_k=2, every=every)
    weighted = WeightedExperts(model, variables.__getitem__, clustering, LETTERS, settings)
    sampler = Sampler(weighted.model, **(options or {"temperature": 0.0}))
    ids = LETTERS.encode("abcab").tolist()
    for (new,) in sampler.tokens(weighted, [ids], max_new_tokens=n, seeds=[seed]):
        ids = ids + new
    return ids, sampler, weighted, clustering


@pytest.mark.parametrize("changes, n", [({}, 50), (MOD, 18)])
def test_cached_decoding_is_the_full_forward_pass(changes, n):
    """Greedy tokens have the largest probability in the mixture of all experts' forward passes,
    while experts come and go. A text that outgrows the context continues from its last half."""
    ids, sampler, weighted, _ = sampled(n, every=4, **changes)
    model, variables = experts(**changes)
    model, start = model.clone(selection="causal"), 0
    forward = jax.jit(model.apply)
    for end in range(5, 5 + n):
        if end - start > CONTEXT:
            start = end - CONTEXT // 2
        text = ids[start:end]
        tokens_BT = np.int32([text + [0] * (CONTEXT - len(text))])
        logits = [np.asarray(forward(own, tokens_BT))[0, len(text) - 1] for own in variables]
        log_w = weighted.log_weights(ids[: end - (end - 5) % 4])
        mixed = mix_logits(np.stack(logits)[None, :, : model.vocab_size], log_w)[0]
        assert mixed[ids[end]] > mixed.max() - 1e-4, end
    assert np.count_nonzero(weighted.used) > 2 and sampler.stats["new_tokens"] == n
    assert len(set(ids)) > 3  # not one token over and over


def test_weights_follow_the_text_and_only_experts_in_use_have_a_cache():
    ids, sampler, weighted, clustering = sampled(14)
    text = LETTERS.decode(ids)
    assert clustering.seen == [text[:5], text[:10], text[:15]]
    assert weighted.used.sum() == 3 * 2
    one = sum(x.nbytes for x in jax.tree.leaves(models.init_cache(experts()[0], 1, CONTEXT)))
    assert sampler.stats["cache_bytes"] == 2 * one


def test_seeds_and_stop_tokens():
    options = dict(temperature=1.0)
    first, again = (sampled(20, seed=7, options=options)[0] for _ in range(2))
    assert first == again and first != sampled(20, seed=8, options=options)[0]
    stopped, *_ = sampled(20, seed=7, options=options | {"stop_ids": (first[12],)})
    assert stopped == first[: first.index(first[12], 5)]
