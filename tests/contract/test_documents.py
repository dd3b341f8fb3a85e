"""Documents of a packed row: what one holds changes no bit of what is computed of another.

All static capacity is counted by document: of routed blocks under every decision, of experts, of
adapters that may be left out, and of each of these inside another. At the slack and the capacity
of each row of FAMILIES, which is scarce for most of them.
"""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, LENGTH

from efx.layers.call import Call
from efx.routing import plans

MOD = {"depth_routing.kind": "mod"}  # as a config has it: capacity 0.125, slack 2
MODELS = {
    "defaults": MOD,
    # Without memory tokens, which belong to no document.
    "latent_mod": {**FAMILIES["latent_mod"].changes, "memory_global": 0, "group_size": 4},
}
SIZES = 13, 11, 3  # and padding; none begins with a group
STARTS = np.cumsum([0, *SIZES])
SEGMENTS_T = np.repeat([1, 2, 3, 0], [*SIZES, LENGTH - sum(SIZES)])
POSITIONS_T = np.arange(LENGTH) - np.append(STARTS, 0)[SEGMENTS_T - 1]


def packed(row_T, batch):
    return jnp.asarray(np.tile(row_T, (batch, 1)), jnp.int32)


def moved(model, selection, rows=5):
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


SELECTIONS = [
    ("defaults", "causal"),
    ("defaults", "train"),
    ("mod_threshold", "train"),
    ("mod_stochastic", "causal"),
    ("recursion", "train"),
    ("moe", "causal"),
    ("moe_expert_choice", "train"),
    ("mode_staged", "causal"),
    ("mode_staged", "train"),
    ("latent_mod", "train"),
    ("adapter_inclusion", "train"),
]
SLOW = {
    *("defaults", "mod_threshold", "mod_stochastic", "recursion", "moe", "latent_mod"),
    "adapter_inclusion",
}


@pytest.mark.parametrize("name, selection", families.rows(SELECTIONS, SLOW))
def test_a_document_changes_no_bit_of_the_next(name, selection):
    model = families.make(MODELS[name] if name in MODELS else FAMILIES[name].changes)
    first, *others = moved(model, selection)
    assert first > 0.1 and others == [0, 0]


@pytest.mark.slow
def test_a_document_changes_no_bit_of_the_next_through_a_bridge():
    first, *others = moved(families.bridge(MOD, FAMILIES["moe"].changes), None, rows=3)
    assert first > 0.1 and others == [0, 0]


# ---- by hand -----------------------------------------------------------------------------------


def info_of(segments_BT):
    segments_BT = np.int32(segments_BT)
    return Call(np.arange(segments_BT.shape[1])[None], segments_BT)


def test_slots_of_documents_by_hand():
    call = info_of([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3], [4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0]])
    all_BT = np.ones((2, 12), bool)
    late_BT = np.array([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1]] * 2, bool)
    scores_BT = np.tile(np.arange(12, dtype=np.float32), (2, 1))

    @families.jit
    def run(call, all_BT, late_BT, scores_BT):
        budget = plans.Budget(0.5, 12, call.documents())
        valid_BT = call.segment_ids_BT > 0
        best = budget.top(scores_BT, valid_BT)
        # An unsorted plan is gathered and scattered like any other.
        back_BT = plans.scatter_add(jnp.zeros((2, 12)), plans.gather(scores_BT + 1, best), best)
        return (
            budget.first(all_BT),
            budget.first(late_BT & valid_BT),
            budget.fits(late_BT),
            best,
            (back_BT, plans.selected(best, 12)),
        )

    whole, late, fits_BT, best, (back_BT, selected_BT) = jax.device_get(
        run(call, all_BT, late_BT, scores_BT)
    )
    # Three, two and one; the slots of the padding are those of the document before it.
    np.testing.assert_array_equal(whole.indices_BC, [[0, 1, 2, 6, 7, 10], [0, 1, 2, 3, 4, 5]])
    # Every document begins at its slot, however many the one before has left empty.
    np.testing.assert_array_equal(late.indices_BC[0], [5, 13, 14, 6, 7, 11])
    np.testing.assert_array_equal(late.mask_BC, [[1, 0, 0, 1, 1, 1], [0] * 6])
    np.testing.assert_array_equal(fits_BT[0], [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1])
    # The largest: as many as the tokens of a document, not its places, come to.
    np.testing.assert_array_equal(best.mask_BC, [[1] * 6, [1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(best.indices_BC[0], [3, 4, 5, 8, 9, 11])
    np.testing.assert_array_equal(best.indices_BC[1][:3], [2, 3, 4])
    np.testing.assert_array_equal(back_BT > 0, selected_BT)


def test_slots_inside_of_slots_by_hand():
    """Experts in a routed block: a document's slots there follow from its own tokens alone."""
    outer = info_of([[1] * 8 + [2] * 8] * 2)

    @families.jit
    def run(outer, selected_BT):
        budget = plans.Budget(0.5, 16, outer.documents())
        inner = budget.first(selected_BT).call(outer.for_rows(2), budget).tokens
        return inner, plans.Budget(0.5, 8, inner.documents()).first(inner.segment_ids_BT > 0)

    selected_BT = np.zeros((2, 16), bool)
    # One and four of document 1.
    selected_BT[0, 3] = selected_BT[:, 8:12] = selected_BT[1, :8] = True
    inner, expert = jax.device_get(run(outer, selected_BT))
    np.testing.assert_array_equal(inner.segment_ids_BT, [[1, 0, 0, 0] + [2] * 4, [1] * 4 + [2] * 4])
    np.testing.assert_array_equal(expert.mask_BC, [[1, 0, 1, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(expert.indices_BC[:, 2:], [[4, 5], [4, 5]])
    # A document without routed tokens leaves nothing to the one before it, either.
    inner, expert = jax.device_get(run(outer, selected_BT & (np.arange(16) < 8)))
    np.testing.assert_array_equal(expert.mask_BC, [[1, 0, 0, 0], [1, 1, 0, 0]])
