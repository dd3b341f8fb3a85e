"""A run in lm-eval: what is likely and what is generated, for every family; the scores are those
that lm-eval's own model for transformers has on the same weights.

What lm-eval is not needed for is tested without it.
"""

import json

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_import import TEXT, folder, run  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx import build, means, sharding, step
from efx.data.tokenizers import ByteTokenizer
from efx.errors import UsageError
from efx.interop import lm_eval, scoring
from efx.layers.routing import reports

T = families.LENGTH


def answering(model, params, state=(), mesh=None, **options):
    mesh = mesh or sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    setup = build.Setup(None, ByteTokenizer(), model, mesh, sharding.DEFAULT_RULES)
    options = {"batch_size": 4, **options}
    return scoring.Answering(setup, {"params": params, **dict(state)}, **options)


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Rows of 16 and 32 tokens."""
    monkeypatch.setattr(scoring, "SHORTEST", 16)


# ---- without lm-eval -----------------------------------------------------------------------------

# (row of the tokens, where the continuation begins, where it ends); after the last token of the
# row, which is read, comes its first again.
CUTS = ((0, 3, 8), (1, 1, 6), (2, 20, 32), (3, 1, 2), (4, 7, 9), (5, 1, T + 1))


def expected_scores(logits_BTV, tokens_BT):
    """[(log-probability, whether each is the most likely)] by logits of whole rows."""
    logits_BTV = np.asarray(logits_BTV, np.float64)
    logprob_BTV = logits_BTV - np.logaddexp.reduce(logits_BTV, axis=-1, keepdims=True)
    for b, start, end in CUTS:
        rows, chosen = logprob_BTV[b, start - 1 : end - 1], tokens_BT[b, start:end]
        yield rows[np.arange(end - start), chosen].sum(), (rows.argmax(-1) == chosen).all()


def measured_flops(model, params, state, row_T):
    """What an evaluation says that a row as long as the context costs."""
    sown = families.jit(
        lambda params, tokens_BT: model.apply(
            {"params": params, **state}, tokens_BT, mutable=("stats", means.COLLECTION)
        )[1]
    )(params, jnp.asarray(row_T)[None])
    stats = {k: float(v) for k, v in step.by_layer(means.sown(sown, "stats"), model).items()}
    if reports.routing_of(model) is None:
        return T * reports._as_measured(model, stats).ledger(T, "causal").nominal_per_token
    return T * reports._routed(model, T, "router", stats)["eval/router/flops_per_token"]


@pytest.mark.parametrize(
    "name", ["llama_options", "mod_options", "moe", "streams_mod", "latent_mod"]
)
def test_scores_and_flops_are_those_of_the_whole_row(name):
    """Of rows in the whole context, although each is computed in one that is hardly longer than
    itself, where routed blocks and experts would have room for less."""
    model, params, state = families.build(name), families.params_of(name), families.state_of(name)
    logits_BTV = families.logits_of(name, families.tokens())
    tokens_BT = np.array(families.tokens())
    tokens_BT = np.concatenate([tokens_BT, tokens_BT[:, :1]], axis=1)
    tokens_BT[3, 1] = logits_BTV[3, 0].argmax()
    found = answering(model, params, state).scores(
        [(tokens_BT[b, :i].tolist(), tokens_BT[b, i:j].tolist()) for b, i, j in CUTS]
    )
    expected = list(expected_scores(logits_BTV, tokens_BT))
    np.testing.assert_allclose([s.logprob for s in found], [e[0] for e in expected], atol=2e-4)
    assert [s.is_greedy for s in found] == [e[1] for e in expected] and found[3].is_greedy
    assert [s.tokens for s in found] == [end - 1 for _, _, end in CUTS]
    at_most = [sum(model.ledger(s.tokens, "causal").nominal.values()) for s in found]
    if not scoring.has_room(model):
        assert [s.flops for s in found] == at_most
        return
    whole = measured_flops(model, params, state, tokens_BT[5, :T])
    assert found[5].flops == pytest.approx(whole, rel=1e-6) and whole < 0.99 * at_most[5]
    assert all(s.flops != whole for s in found[:5])
