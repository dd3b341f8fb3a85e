"""Documents of a packed row: the tokens of one do not change what is computed of another.

The limits of routed blocks under every decision, of experts, of adapters that select tokens, and of
each of these inside another count within a document.
"""

import functools

import families
import jax.numpy as jnp
import numpy as np
import pytest
from families import BATCH, FAMILIES, LENGTH, Grain, every_row

SIZES = 13, 11, 3  # and padding; none begins with a group
STARTS = np.cumsum([0, *SIZES])
SEGMENTS_T = np.repeat([1, 2, 3, 0], [*SIZES, LENGTH - sum(SIZES)])
POSITIONS_T = np.arange(LENGTH) - np.append(STARTS, 0)[SEGMENTS_T - 1]


def packed(row_T, batch):
    return jnp.asarray(np.tile(row_T, (batch, 1)), jnp.int32)


def documents_moved(model, selection, rows=5):
    """[document]: how far the logits of each move when the first one holds something else."""
    if selection is not None:
        model = model.clone(selection=selection)
    tokens_BT = families.tokens(batch=rows)
    other_BT = jnp.where(SEGMENTS_T == 1, families.tokens(seed=9, batch=rows), tokens_BT)
    run = families.jit(functools.partial(model.apply, rngs=families.keys()))
    variables = {"params": families.random_params(model), **families.random_state(model)}
    shape = packed(POSITIONS_T, rows), packed(SEGMENTS_T, rows)
    a, b = (np.asarray(run(variables, tokens, *shape)) for tokens in (tokens_BT, other_BT))
    return [np.abs(a - b)[:, SEGMENTS_T == document].max() for document in (1, 2, 3)]


def assert_first_document_alone_moves(model, selection, rows=5):
    first, *others = documents_moved(model, selection, rows)
    assert first > 0.1 and max(others) < 1e-5


@every_row(whole=Grain.KINDS)
def test_a_document_does_not_change_the_next(name):
    assert_first_document_alone_moves(families.build(name), "causal")


@every_row(families.selects_tokens)
def test_a_document_does_not_change_the_next_in_training(name):
    assert_first_document_alone_moves(families.build(name), "train")


@pytest.mark.slow
def test_a_document_does_not_change_the_next_through_a_bridge():
    routed = {"depth_routing.kind": "mod", "depth_routing.causal_decision": "aux_loss"}
    model = families.bridge(routed, FAMILIES["moe"].changes)
    assert_first_document_alone_moves(model, None, rows=3)


@every_row(whole=Grain.KINDS)
def test_packed_documents_are_as_if_alone(name):
    """Two documents and padding in a row, positions restarted, against the documents alone."""
    model = families.with_capacity(families.build(name), slack=100.0)
    # A document begins with a group of latents.
    group = getattr(model.config, "group_size", 1)
    size = 12 // group * group
    starts = np.repeat([0, size], size)
    positions_T = np.append(np.arange(2 * size) - starts, np.zeros(LENGTH - 2 * size, int))
    segments_T = np.repeat([1, 2, 0], [size, size, LENGTH - 2 * size])
    run = families.jit(functools.partial(model.apply, rngs=families.keys()))
    tokens_BT, variables = families.tokens(), families.variables_of(name)
    logits_BTV = run(variables, tokens_BT, packed(positions_T, BATCH), packed(segments_T, BATCH))
    # The first document is alone, as far as its own logits go: models are causal.
    first = run(variables, tokens_BT)[:, :size]
    second = run(variables, jnp.roll(tokens_BT, -size, axis=1))[:, :size]
    np.testing.assert_allclose(logits_BTV[:, :size], first, atol=2e-5)
    np.testing.assert_allclose(logits_BTV[:, size : 2 * size], second, atol=2e-5)
    assert np.isfinite(logits_BTV).all()
