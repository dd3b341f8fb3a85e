"""Deciding which tokens are computed, apart from computing them.

A router turns activations into a `Plan`; a layer gathers, computes and scatters by it. All
scores, gates and masks are float32, all shapes static.

Gather and scatter are vmapped over the batch: on a mesh with a sharded batch this adds no
collectives, whereas fancy indexing over batch and time at once does.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

# What is dropped goes to places out of range, each to its own (`apart`), so that every scatter of
# rows can say that no two go to one place. With jax 0.11.2 on an H100 those of several rows that
# say nothing of it came out wrong under --xla_gpu_deterministic_ops=true.
NO_TWO_ALIKE = dict(mode="drop", unique_indices=True)


def apart(index, size):
    """The indices [..., C], of which those out of range (`size` and more) are made to differ."""
    own = jnp.arange(index.shape[-1], dtype=index.dtype)
    return jnp.where(index < size, index, size + own)


@struct.dataclass
class Plan:
    """C slots a row for tokens that are computed together.

    Attributes:
      indices_BC: int32, ascending in time; empty slots point past the end (distinct values >= T),
        so that gathering fills and scattering drops them.
      mask_BC: bool, which slots hold a token.
      ascending: whether empty slots come last, and not after the tokens of each document.
    """

    indices_BC: jax.Array
    mask_BC: jax.Array
    ascending: bool = struct.field(pytree_node=False, default=True)

    def take(self, x_BT, fill=0):
        """Rows of x [B, T, ...] that are computed, [B, C, ...]; empty slots get `fill`."""
        return gather(x_BT, self, fill)

    def add(self, x_BT, y_BC):
        """x with y [B, C, ...] added to the tokens of the plan; the others are untouched."""
        return scatter_add(x_BT, y_BC, self)

    def put(self, x_BT, y_BC):
        """x with y [B, C, ...] in the place of the tokens of the plan."""
        return scatter(x_BT, y_BC, self)

    def call(self, call, budget=None):
        """What the block inside is told: every token keeps its position and its document. All of
        them are computed: layers inside ask no more who is alive.

        Args:
          call: `Call` of all tokens, `full`.
          budget: what the plan was made by; needed where there may be documents.
        """
        if call.segment_ids_BT is not None:
            documents = call.documents()
            call = call.replace(
                segment_ids_BT=self.take(call.segment_ids_BT),
                begin_BT=self.take(budget.shares(documents.begin_BT)),
                end_BT=self.take(budget.shares(documents.end_BT)),
            )
        mask_input = call.mask_input_BTD
        return call.replace(
            positions_BT=self.take(call.positions_BT, fill=-1),
            has_gaps=True,
            selectable_BT=None,
            token_places=None,
            mask_input_BTD=None if mask_input is None else self.take(mask_input),
        )


@struct.dataclass
class RowPlan:
    """The same of rows with one new token each: of these, the rows that are computed.

    Attributes:
      rows: `Plan` of a single sequence, the batch's rows.
    """

    rows: Plan

    def take(self, x_B1, fill=0):
        return jnp.swapaxes(self.rows.take(jnp.swapaxes(x_B1, 0, 1), fill), 0, 1)

    def add(self, x_B1, y_C1):
        out = self.rows.add(jnp.swapaxes(x_B1, 0, 1), jnp.swapaxes(y_C1, 0, 1))
        return jnp.swapaxes(out, 0, 1)

    def call(self, call, budget=None):
        return Plan.call(self, call).with_cache(rows_B=self.rows.indices_BC[0])


@struct.dataclass
class WholePlan:
    """The same of tokens that are computed as they lie, with those beside them: nothing moves.

    Attributes:
      run_BT: bool, those whose result is wanted.
    """

    run_BT: jax.Array

    def take(self, x_BT, fill=0):
        return x_BT

    def add(self, x_BT, y_BT):
        run_BT = self.run_BT.reshape(*self.run_BT.shape, *(1,) * (y_BT.ndim - 2))
        return x_BT + jnp.where(run_BT, y_BT, 0)

    def call(self, call, budget=None):
        return call.replace(positions_BT=jnp.where(self.run_BT, call.positions_BT, -1))


@struct.dataclass
class Documents:
    """What each token of a packed row [B, T] has to know of its document.

    Attributes:
      first_BT: where it begins in the sequence at hand. count_BT: how many tokens it has there.
      begin_BT, end_BT: the part [begin, end) of the sequence's places that it has to itself: of a
        whole row where it lies, with the padding after it, of a routed subsequence the slots that
        its share comes to. They follow from the lengths of documents, and never from what a router
        does with another one.
    """

    first_BT: jax.Array
    count_BT: jax.Array
    begin_BT: jax.Array
    end_BT: jax.Array


def documents(segment_ids_BT):
    """`Documents` of whole rows; padding (0) belongs to the document before it."""
    length = segment_ids_BT.shape[1]
    place_T = jnp.arange(length, dtype=jnp.int32)
    changes_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    changes_BT = changes_BT & (segment_ids_BT[:, 1:] != 0)
    starts_BT = jnp.pad(changes_BT, ((0, 0), (1, 0)), constant_values=True)
    ends_BT = jnp.pad(changes_BT, ((0, 0), (0, 1)), constant_values=True)
    first_BT = jax.lax.cummax(jnp.where(starts_BT, place_T, 0), axis=1)
    stop_BT = jax.lax.cummin(jnp.where(ends_BT, place_T + 1, length), axis=1, reverse=True)
    before_BT = _before(segment_ids_BT != 0)
    count_BT = _at(before_BT, stop_BT) - _at(before_BT, first_BT)
    return Documents(first_BT, count_BT, first_BT, stop_BT)


def _before(selected_BT):
    """[B, T + 1]: how many are selected before each place."""
    return jnp.pad(jnp.cumsum(selected_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _at(values_BT, places_BT):
    return jax.vmap(lambda values, places: values[places])(values_BT, places_BT)


@struct.dataclass
class Budget:
    """Room for a fraction f of a sequence, or of each document of a packed one.

    A document that has the places [s, e) of its row to itself gets the slots [ceil(f s),
    ceil(f e)) of the buffer: its share up to rounding, ceil(f T) in all, and the same ones whatever
    the documents beside it hold. What it leaves empty is not given to others.

    Attributes:
      documents: None: one document a row.
    """

    fraction: float = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)
    documents: Documents | None = None

    @property
    def size(self):
        """C, the slots of a row."""
        return capacity(self.fraction, self.length)

    def shares(self, place_BT):
        """ceil(f n) of places n from 0 to T."""
        return jnp.asarray([share(self.fraction, n) for n in range(self.length + 1)])[place_BT]

    def first(self, selected_BT):
        """Plan of the selected tokens of each document that come first, as far as there is room
        (causal: depends on earlier tokens only)."""
        return self._first(selected_BT)[0]

    def fits(self, selected_BT):
        """bool [B, T]: the tokens of that plan."""
        return self._first(selected_BT)[1]

    def top(self, scores_BT, valid_BT=None):
        """Plan of the largest scores of each document, as many as the fraction of its tokens comes
        to (looks ahead: not causal). Without `valid_BT` padding is of the document before it."""
        if self.documents is None:
            return topk_plan(scores_BT, self.size, valid_BT)
        d, place_T = self.documents, jnp.arange(self.length, dtype=jnp.int32)
        stop_BT = d.end_BT
        if valid_BT is None:
            valid_BT = jnp.ones(scores_BT.shape, bool)
        else:  # not a part of the padding's
            stop_BT = jnp.minimum(stop_BT, d.begin_BT + d.count_BT)
        # By document, then by falling score; sorting is stable, so of equals the earlier comes
        # first.
        order_BT = jnp.lexsort((-jnp.where(valid_BT, scores_BT, -jnp.inf), d.first_BT), axis=1)
        rank_BT = jax.vmap(
            lambda order: jnp.zeros_like(place_T).at[order].set(place_T, unique_indices=True)
        )(order_BT)
        quota_BT = self.shares(stop_BT) - self.shares(d.begin_BT)
        return self.first(valid_BT & (rank_BT - d.first_BT < quota_BT))

    def _first(self, selected_BT):
        before_BT, d = _before(selected_BT), self.documents
        if d is None:
            run_BT = selected_BT & (before_BT[:, :-1] < self.size)
            return first_plan(selected_BT, self.size), run_BT
        place_BT = self.shares(d.begin_BT) + before_BT[:, :-1] - _at(before_BT, d.first_BT)
        run_BT = selected_BT & (place_BT < self.shares(d.end_BT))
        place_BT = jnp.where(run_BT, place_BT, self.size)
        return _at_slots(place_BT, self.size, ascending=False), run_BT


def capacity(fraction, length):
    """ceil(fraction * length), at least 1 and at most length."""
    return max(1, share(fraction, length))


def share(fraction, length):
    """ceil(fraction * length), at most length."""
    # Rounding first: 0.07 * 100 must be 7 slots, not 8.
    return min(length, math.ceil(round(fraction * length, 6)))


def topk_plan(scores_BT, size, valid_BT=None):
    """The `size` largest scores of each row, in time order (looks ahead: not causal).

    Invalid tokens are taken only when fewer than `size` are valid, and then as empty slots.
    """
    length = scores_BT.shape[1]
    if valid_BT is not None:
        scores_BT = jnp.where(valid_BT, scores_BT, -jnp.inf)
    _, indices_BC = jax.lax.top_k(scores_BT, size)
    indices_BC = jnp.sort(indices_BC, axis=1)
    if valid_BT is None:
        return Plan(indices_BC, jnp.ones(indices_BC.shape, bool))
    chosen = jax.vmap(lambda valid, index: valid[index])(valid_BT, indices_BC)
    return first_plan(
        jax.vmap(
            lambda index, keep: jnp.zeros(length, bool).at[index].set(keep, unique_indices=True)
        )(indices_BC, chosen),
        size,
    )


def best(scores, count):
    """Indices [..., count] of the `count` largest of the last axis, largest first, ties in order.

    A few passes of argmax, which split over the rows of a mesh; a sort does not everywhere.
    """
    indices = []
    for _ in range(count):
        index = jnp.argmax(scores, axis=-1)
        indices.append(index)
        scores = jnp.where(jax.nn.one_hot(index, scores.shape[-1], dtype=bool), -jnp.inf, scores)
    return jnp.stack(indices, axis=-1)


def first_plan(selected_BT, size):
    """The first `size` selected tokens of each row (causal: depends on earlier tokens only)."""
    rank_BT = jnp.cumsum(selected_BT, axis=1) - 1
    return _at_slots(jnp.where(selected_BT & (rank_BT < size), rank_BT, size), size)


def _at_slots(place_BT, size, ascending=True):
    """Plan of the tokens at their slots; those at slot `size` are left out."""
    length = place_BT.shape[1]
    empty_C = length + jnp.arange(size, dtype=jnp.int32)
    time_T = jnp.arange(length, dtype=jnp.int32)
    indices_BC = jax.vmap(lambda slot: empty_C.at[slot].set(time_T, **NO_TWO_ALIKE))(
        apart(place_BT, size)
    )
    return Plan(indices_BC, indices_BC < length, ascending)


def selected(plan, length):
    """[B, T] bool: which tokens the plan computes."""
    return jax.vmap(lambda index: jnp.zeros(length, bool).at[index].set(True, **_scattered(plan)))(
        plan.indices_BC
    )


def for_each_expert(make_plan, values_BTE, *rest):
    """What `make_plan` (values [B, T], *rest) makes for each expert: a plan of arrays [E, B, C]."""
    return jax.vmap(lambda values_BT: make_plan(values_BT, *rest), in_axes=2)(values_BTE)


def selected_by_experts(plan, length):
    """bool [B, T, E]: the tokens of each expert, of a plan [E, B, C]."""
    return jax.vmap(lambda of_one: selected(of_one, length), out_axes=2)(plan)


def slots_of_choices(plan, choices_BTK, length):
    """Where the K choices of each token are computed, of a plan [E, B, C]: int32 [B, T, K], slot c
    of expert e as e * C + c; E * C where there was no room, and for a choice that is no expert."""
    num_experts, _, size = plan.indices_BC.shape
    nowhere = num_experts * size

    def of_expert(of_one, expert):
        own_C = expert * size + jnp.arange(size, dtype=jnp.int32)
        return jax.vmap(
            lambda index: jnp.full(length, nowhere).at[index].set(own_C, **_scattered(of_one))
        )(of_one.indices_BC)

    slots_BTE = jax.vmap(of_expert, out_axes=2)(plan, jnp.arange(num_experts, dtype=jnp.int32))
    chosen_BTKE = jax.nn.one_hot(choices_BTK, num_experts, dtype=bool)
    return jnp.min(jnp.where(chosen_BTKE, slots_BTE[:, :, None], nowhere), axis=-1)


@jax.custom_vjp
def take_for_experts(x_BTD, plan, slots_BTK=None):
    """Rows of x at the slots of a plan [E, B, C]: [E, B, C, D]; 0 in empty ones.

    A token may have several slots, so its gradient is a sum, and that is made as `add_weighed`
    makes one, from `slots_BTK` where each token has so many at the most.
    """
    return jax.vmap(gather, in_axes=(None, 0))(x_BTD, plan)


def _take_forward(x_BTD, plan, slots_BTK):
    # An empty slice carries the shape and type of x.
    return take_for_experts(x_BTD, plan, slots_BTK), (x_BTD[..., :0], plan.indices_BC, slots_BTK)


def _take_backward(residuals, gradient_EBCD):
    empty_BT0, indices_EBC, slots_BTK = residuals
    start_BTD = jnp.zeros((*empty_BT0.shape[:2], gradient_EBCD.shape[-1]), empty_BT0.dtype)
    return add_weighed(start_BTD, indices_EBC, gradient_EBCD, None, slots_BTK), None, None


take_for_experts.defvjp(_take_forward, _take_backward)


def gather(x_BT, plan, fill=0):
    """Rows of x [B, T, ...] at the plan's slots -> [B, C, ...]; empty slots get `fill`."""
    return jax.vmap(
        lambda x, index: x.at[index].get(
            mode="fill",
            fill_value=fill,
            indices_are_sorted=plan.ascending,
            unique_indices=True,
        )
    )(x_BT, plan.indices_BC)


def scatter_add(x_BT, y_BC, plan):
    """x with y [B, C, ...] added at the plan's slots; the other rows are untouched."""
    return jax.vmap(lambda x, index, y: x.at[index].add(y.astype(x.dtype), **_scattered(plan)))(
        x_BT, plan.indices_BC, y_BC
    )


def scatter(x_BT, y_BC, plan):
    """x with y [B, C, ...] at the plan's slots; the other rows are untouched."""
    return jax.vmap(lambda x, index, y: x.at[index].set(y.astype(x.dtype), **_scattered(plan)))(
        x_BT, plan.indices_BC, y_BC
    )


def _scattered(plan):
    return NO_TWO_ALIKE | dict(indices_are_sorted=plan.ascending)


@functools.partial(jax.checkpoint, prevent_cse=False)
def weighed(y, weight):
    """float32 y [..., D] * weight [...], whatever the type of y: of a weight in bfloat16 8 bits
    would be left.

    The gradient is computed from y as it came, so that layers which are scanned keep nothing wider
    for the backward pass.
    """
    return y.astype(jnp.float32) * weight[..., None]


@jax.custom_vjp
def add_weighed(start_BTD, indices_EBC, y_EBCD, weight_EBC=None, slots_BTK=None):
    """start plus the sum of weight * y at the slots of a plan [E, B, C]; without weights, of y.

    In float32, rounded once, to the type of `start`: a sum in bfloat16 is rounded once for each of
    its terms. And in one order, which a scatter of all terms has not on a GPU: with
    `slots_of_choices` each token fetches its K terms, otherwise experts add theirs in turns. What
    would be wide for longer is not: y is kept for the backward pass as it came, and gradients are
    gathered in the type that they have, not in that of the sum.
    """
    wide_BTD = start_BTD.astype(jnp.float32)
    if slots_BTK is not None:
        sums_BTD = jax.vmap(_sum_of_slots, in_axes=(1, 1, 0))(y_EBCD, weight_EBC, slots_BTK)
        return (wide_BTD + sums_BTD).astype(start_BTD.dtype)

    def add(wide_BTD, expert):
        index_BC, y_BCD, weight_BC = expert
        wide_BCD = y_BCD.astype(jnp.float32)
        if weight_BC is not None:
            wide_BCD = wide_BCD * weight_BC[..., None]
        return jax.vmap(lambda x, index, y: x.at[index].add(y, **NO_TWO_ALIKE))(
            wide_BTD, index_BC, wide_BCD
        ), None

    wide_BTD, _ = jax.lax.scan(add, wide_BTD, (indices_EBC, y_EBCD, weight_EBC))
    return wide_BTD.astype(start_BTD.dtype)


def _sum_of_slots(y_ECD, weight_EC, slots_TK):
    """float32 [T, D] of a row: the sum over the slots of each token of weight * y."""
    terms = []
    for slot_T in slots_TK.T:  # K gathers that are fused into the sum, and no array of K rows
        place = jnp.divmod(slot_T, y_ECD.shape[1])
        term_TD = y_ECD.at[place].get(mode="fill", fill_value=0).astype(jnp.float32)
        if weight_EC is not None:
            term_TD = term_TD * weight_EC.at[place].get(mode="fill", fill_value=0)[:, None]
        terms.append(term_TD)
    return sum(terms)


def _add_weighed_forward(start_BTD, indices_EBC, y_EBCD, weight_EBC, slots_BTK):
    # An empty slice carries the type of y where y itself is not needed.
    kept = y_EBCD[..., :0] if weight_EBC is None else y_EBCD
    residuals = indices_EBC, kept, weight_EBC
    return add_weighed(start_BTD, indices_EBC, y_EBCD, weight_EBC, slots_BTK), residuals


def _add_weighed_backward(residuals, gradient_BTD):
    indices_EBC, y_EBCD, weight_EBC = residuals
    of_rows = jax.vmap(_filled)
    of_terms_EBCD = jax.vmap(of_rows, in_axes=(None, 0))(gradient_BTD, indices_EBC)
    if weight_EBC is None:
        return gradient_BTD, None, of_terms_EBCD.astype(y_EBCD.dtype), None, None
    wide_EBCD = of_terms_EBCD.astype(jnp.float32)
    of_weight_EBC = jnp.sum(wide_EBCD * y_EBCD.astype(jnp.float32), axis=-1)
    of_y_EBCD = (wide_EBCD * weight_EBC[..., None]).astype(y_EBCD.dtype)
    return gradient_BTD, None, of_y_EBCD, of_weight_EBC, None


def _filled(x_TD, indices_C):
    """Rows of x, 0 from T on."""
    return x_TD.at[indices_C].get(mode="fill", fill_value=0)


add_weighed.defvjp(_add_weighed_forward, _add_weighed_backward)


def in_rounds(module, selected_BT, size, start, body, carries=False):
    """What `body` makes of `start` once it has computed all that is selected, `size` a row a time.

    How many are selected is not known when a program is compiled, so a loop takes the next `size`
    of each row until no row has more, ceil(most / size) times: shapes are static, the cost follows
    what is selected, nothing is left out, and where nothing is selected nothing is computed. It is
    a loop and not a conditional because XLA updates what a loop carries in place, but copies the
    caches that a conditional returns. A loop of unknown length has no reverse mode.

    Args:
      module: the module that computes, passed on to `body`; it is initialised elsewhere.
      selected_BT: bool [B, T], or [B, T, E] for plans [E, B, C], of each expert one.
      body: (module, plan, out) -> out.
      carries: the collections that `module` changes, False for none.
    """
    rank_BT = jnp.cumsum(selected_BT, axis=1)
    most = jnp.max(rank_BT)

    def any_left(module, carry):
        return carry[0] < most

    def round_of(module, carry):
        done, out = carry
        left_BT = selected_BT & (rank_BT > done)
        if left_BT.ndim == 3:
            plan = for_each_expert(first_plan, left_BT, size)
        else:
            plan = first_plan(left_BT, size)
        return done + size, body(module, plan, out)

    start = (jnp.int32(0), start)
    return nn.while_loop(any_left, round_of, module, start, carry_variables=carries)[1]
