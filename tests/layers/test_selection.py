"""Selection, admission and compaction of tokens, against brute force in numpy."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from routing_reference import np_admit, np_topk

from efx.layers import selection
from efx.layers.token_context import TokenContext

T, RATES = 12, (0.1, 0.3, 0.5)
masks = hnp.arrays(bool, (2, T))
rates = st.sampled_from(RATES)
few_scores = hnp.arrays(np.float32, (2, T), elements=st.sampled_from([-2.0, -1.0, 0.5, 3.0]))
by_hypothesis = settings(deadline=None, max_examples=30)


@st.composite
def packed_rows(draw):
    """(positions, segment ids) of two rows of documents and padding."""
    starts_BT = draw(masks)
    segments_BT = np.cumsum(starts_BT, axis=1) + 1
    segments_BT[:, draw(st.integers(1, T)) :] = 0
    begin_BT = np.diff(segments_BT, axis=1, prepend=-1) != 0
    start_BT = np.maximum.accumulate(np.where(begin_BT, np.arange(T), 0), axis=1)
    return np.int32(np.arange(T) - start_BT), np.int32(segments_BT)


def rows_of(batch=1, length=T):
    return np.tile(np.arange(length, dtype=np.int32), (batch, 1))


# ---- how many tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fraction, length, slots",
    [(0.125, 12, 2), (0.1, 30, 3), (0.07, 100, 7), (0.71, 10, 8), (0.001, 7, 1), (2.0, 7, 7)],
)
def test_capacity(fraction, length, slots):
    """ceil(c T), not one more by rounding; at least 1, at most T."""
    assert selection.num_slots(fraction, length) == slots


@pytest.mark.parametrize("rate", [0.03, 0.07, 0.125, 0.3, 0.9])
def test_causal_limit_is_exact_and_has_as_many_slots(rate):
    """The limit in float32 is that of exact arithmetic; if all tokens are selected, all slots of
    `num_causal_slots` are used."""
    lengths = np.arange(1, 2049)
    exact = [math.ceil(Fraction(str(rate)) * int(n)) for n in lengths]
    np.testing.assert_array_equal(selection.causal_limit(np, rate, lengths), exact)
    np.testing.assert_array_equal(jax.jit(selection.causal_limit, static_argnums=(0, 1))(
        jnp, rate, lengths), exact)  # fmt: skip
    for n in (1, 5, 40):
        all_BT = selection.admit(np.ones((1, n), bool), rate, TokenContext(rows_of(length=n)))
        assert all_BT.sum() == selection.num_causal_slots(rate, n)


# ---- which tokens ------------------------------------------------------------------------------

topk = jax.jit(selection.select_topk, static_argnums=1)
admit = jax.jit(selection.admit, static_argnums=1)


@by_hypothesis
@given(few_scores, masks, rates)
def test_topk_is_a_stable_sort(scores_BT, valid_BT, rate):
    """Of equal scores the earlier; only valid tokens."""
    slots = selection.num_slots(rate, T)
    whole_BT, part_BT = (topk(scores_BT, rate, mask) for mask in (scores_BT > -9, valid_BT))
    for b in range(2):
        np.testing.assert_array_equal(whole_BT[b], np_topk(scores_BT[b], slots))
        np.testing.assert_array_equal(part_BT[b], np_topk(scores_BT[b], slots, valid_BT[b]))


@by_hypothesis
@given(few_scores, packed_rows(), masks, rates)
def test_topk_of_each_document(scores_BT, rows, valid_BT, rate):
    """Documents get all ceil(c T) slots of their row, [ceil(c s), ceil(c e)) for places [s, e)."""
    segments_BT = rows[1]
    valid_BT = valid_BT & (segments_BT > 0)
    got_BT = np.asarray(topk(scores_BT, rate, valid_BT, segments_BT))
    shares = [math.ceil(Fraction(str(rate)) * t) for t in range(T + 1)]
    for b in range(2):
        for document in np.unique(segments_BT[b]):
            inside = np.flatnonzero(segments_BT[b] == document)
            slots = shares[inside[-1] + 1] - shares[inside[0]]
            expected = np_topk(scores_BT[b, inside], slots, valid_BT[b, inside])
            np.testing.assert_array_equal(got_BT[b, inside], expected)
    assert not np.any(got_BT & (segments_BT == 0))


@by_hypothesis
@given(few_scores, masks, rates)
def test_threshold_lies_between_the_kth_score_and_the_next(scores_BT, valid_BT, rate):
    """The mean over rows of the midpoint. A row with exactly k valid tokens uses its k-th score - 1
    as the next; a row with fewer does not count."""
    slots, middles = selection.num_slots(rate, T), []
    for score_T, valid_T in zip(scores_BT, valid_BT, strict=True):
        falling = np.sort(score_T[valid_T])[::-1]
        falling = np.append(falling, falling[-1:] - 1)
        middles += [falling[slots - 1 : slots + 1].mean()] if len(falling) > slots else []
    tokens_B = np.full(2, T)
    got = selection.topk_threshold(scores_BT, rate, valid_BT, tokens_B)
    np.testing.assert_allclose(got, np.mean(middles) if middles else np.nan, rtol=1e-6)
    assert np.all(scores_BT > selection.topk_threshold(scores_BT, 1.0, valid_BT, tokens_B))


@by_hypothesis
@given(masks, rates, st.integers(0, 6), st.integers(0, 20))
def test_admission_is_one_token_after_another(selected_BT, rate, admitted, before):
    """Also after `before` tokens of which `admitted` were, with a limit for each expert, and of
    tokens whose count is not their position."""
    admitted = min(admitted, int(selection.causal_limit(np, rate, before)) + selection.HEADROOM)
    call, counts_T = TokenContext(rows_of(2) + before), before + np.arange(T) + 1
    expected_BT = [np_admit(row_T, rate, counts_T, admitted) for row_T in selected_BT]
    admitted_B = np.full(2, admitted, np.int32)
    np.testing.assert_array_equal(admit(selected_BT, rate, call, admitted_B), expected_BT)
    of_count = TokenContext(rows_of(2) * 7, count_BT=rows_of(2) + before + 1)
    np.testing.assert_array_equal(admit(selected_BT, rate, of_count, admitted_B), expected_BT)
    experts_BTE = np.stack([selected_BT, ~selected_BT], axis=2)
    experts_BE = np.stack([admitted_B, admitted_B // 2], axis=1)
    got_BTE = admit(experts_BTE, rate, call, experts_BE)
    np.testing.assert_array_equal(got_BTE[..., 0], expected_BT)
    np.testing.assert_array_equal(
        got_BTE[0, :, 1], np_admit(~selected_BT[0], rate, counts_T, admitted // 2)
    )


@by_hypothesis
@given(masks, packed_rows(), rates)
def test_admission_in_packed_rows_counts_each_document(selected_BT, rows, rate):
    """Without headroom, so that few documents never need more slots than the row has; of many the
    first tokens get the slots."""
    positions_BT, segments_BT = rows
    selected_BT = selected_BT & (segments_BT > 0)
    got_BT = np.asarray(admit(selected_BT, rate, TokenContext(positions_BT, segments_BT)))
    got_BTE = admit(
        np.stack([~selected_BT, selected_BT], 2), rate, TokenContext(positions_BT, segments_BT)
    )
    np.testing.assert_array_equal(got_BTE[..., 1], got_BT)
    for b in range(2):
        for document in np.unique(segments_BT[b]):
            inside = segments_BT[b] == document
            expected = np_admit(selected_BT[b, inside], rate, positions_BT[b, inside] + 1, 0, 0)
            np.testing.assert_array_equal(got_BT[b, inside], expected)
        if len(np.unique(segments_BT[b])) <= selection.HEADROOM + 1:
            assert got_BT[b].sum() <= selection.num_causal_slots(rate, T)
    for most_rate in (rate, 1.0):
        call = TokenContext(positions_BT, segments_BT)
        every_BT, first_BT = (admit(selected_BT, most_rate, call, slots=s) for s in (None, 2))
        np.testing.assert_array_equal(first_BT, every_BT & (np.cumsum(every_BT, axis=1) <= 2))


@by_hypothesis
@given(masks, rates, st.sampled_from([1, 7]))
def test_admission_in_chunks_is_that_of_the_whole(selected_BT, rate, cut):
    whole_BT = admit(selected_BT, rate, TokenContext(rows_of(2)))
    first_BT = admit(selected_BT[:, :cut], rate, TokenContext(rows_of(2)[:, :cut]))
    rest = TokenContext(rows_of(2)[:, cut:])
    rest_BT = admit(selected_BT[:, cut:], rate, rest, np.int32(first_BT.sum(axis=1)))
    np.testing.assert_array_equal(whole_BT, np.concatenate([first_BT, rest_BT], axis=1))


# ---- gather and scatter ------------------------------------------------------------------------


@jax.jit
def moved(selected_BT, x_BT, y_BC):
    index_BC = selection.compact(selected_BT, 4)
    added_BT, put_BT = (
        f(x_BT, index_BC, y_BC) for f in (selection.scatter_add, selection.scatter_set)
    )
    return index_BC, selection.gather(x_BT, index_BC, fill=-5), added_BT, put_BT


@by_hypothesis
@given(masks, few_scores)
def test_the_first_selected_tokens_are_gathered_and_put_back(selected_BT, x_BT):
    """Unused slots hold distinct positions out of range, are filled, and change nothing."""
    y_BC = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]])
    index_BC, taken_BC, added_BT, put_BT = map(np.asarray, moved(selected_BT, x_BT, y_BC))
    assert np.all(np.diff(index_BC, axis=1) > 0)
    for b in range(2):
        first = np.flatnonzero(selected_BT[b])[:4]
        used = len(first)
        np.testing.assert_array_equal(index_BC[b, :used], first)
        assert np.all(index_BC[b, used:] >= T)
        np.testing.assert_array_equal(taken_BC[b], [*x_BT[b, first], *[-5] * (4 - used)])
        expected_T = x_BT[b].copy()
        expected_T[first] += y_BC[b, :used]
        np.testing.assert_array_equal(added_BT[b], expected_T)
        expected_T[first] = y_BC[b, :used]
        np.testing.assert_array_equal(put_BT[b], expected_T)


def test_gathered_calls_keep_positions_documents_and_counts():
    call = TokenContext(np.array([[0, 1, 2, 0, 1]]), np.array([[1, 1, 1, 2, 2], [3, 3, 3, 3, 0]]))
    call = call.for_rows(2).replace(count_BT=np.array([[1, 1, 2, 1, 1], [1, 2, 2, 3, 3]]))
    got = call.gather(np.array([[2, 3], [1, 5]]))
    np.testing.assert_array_equal(got.positions_BT, [[2, 0], [1, -1]])
    np.testing.assert_array_equal(got.segment_ids_BT, [[1, 2], [3, 0]])
    np.testing.assert_array_equal(got.count_BT, [[2, 1], [2, 0]])
    assert got.has_gaps and not call.has_gaps


class Rounds(nn.Module):
    """x + 1 for the selected tokens, two of each row at a time; counts the rounds."""

    @nn.compact
    def __call__(self, selected_BT, x_BT):
        self.variable("cache", "rounds", jnp.zeros, (), jnp.int32)

        def body(module, index, out_BT):
            module.put_variable("cache", "rounds", module.get_variable("cache", "rounds") + 1)
            for index_BC in index if index.ndim == 3 else [index]:
                out_BT = selection.scatter_add(out_BT, index_BC, jnp.ones(index_BC.shape))
            return out_BT

        return selection.loop_over_selected(self, selected_BT, 2, x_BT, body, carries="cache")


@pytest.mark.parametrize("most", [0, 1, 4, 5])
def test_rounds_compute_every_selected_token_once(most):
    selected_BT = np.arange(T)[None] % 2 < np.array([[1], [0]])
    selected_BT = selected_BT & (np.cumsum(selected_BT, axis=1) <= most)
    cache = {"cache": {"rounds": jnp.int32(0)}}
    for mask in (selected_BT, np.stack([selected_BT, selected_BT[::-1]], axis=2)):
        out_BT, state = Rounds().apply(cache, mask, jnp.zeros((2, T)), mutable=["cache"])
        np.testing.assert_array_equal(out_BT, mask if mask.ndim == 2 else mask.sum(axis=2))
        assert state["cache"]["rounds"] == -(-most // 2)
