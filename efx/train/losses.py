"""The training objective: cross-entropy, distillation, the weighted sum of sown losses.

All arithmetic is float32 whatever the input. Cross-entropy is a sum over tokens, never a mean: the
train step divides once, by the weight of the whole (accumulated, sharded) batch.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from efx.config.run import loss_weight
from efx.errors import UsageError, nearest
from efx.layers import batch_means


class LossSums(NamedTuple):
    """Weighted sums over the tokens of a batch; float32 scalars.

    Only `total` carries a gradient; the others are logged.
    """

    total: jax.Array  # objective: loss + z_loss * z + distill * distance
    loss: jax.Array  # cross-entropy in nats
    z: jax.Array  # logsumexp(logits)^2
    weights: jax.Array
    correct: jax.Array  # tokens whose target has strictly the largest logit
    distance: jax.Array  # KL(teacher || model) in nats; 0 without a teacher


class Teacher(NamedTuple):
    """Features of the teacher of a distillation, and its output layer."""

    head_fn: Callable  # pure function (head_params, x_ND) -> logits_NV
    head_params: dict
    x_BTD: jax.Array


def cross_entropy(
    logits_BTV,
    targets_BT,
    weights_BT,
    z_loss=0.0,
    vocab_size=None,
    teacher_logits_BTV=None,
    distill=0.0,
):
    """Softmax cross-entropy of integer targets, as `LossSums`.

    Args:
      logits_BTV: any float dtype, any number of leading axes.
      targets_BT: integers < vocab_size; arbitrary where the weight is 0.
      weights_BT: 0 for tokens that are not scored.
      z_loss: coefficient of logsumexp^2 (arXiv 2204.02311, section 5), may be traced.
      vocab_size: later columns are padding and get no probability; None: no padding.
      teacher_logits_BTV: of the same shape as the logits, or None.
      distill: coefficient of KL(teacher || model) (arXiv 1503.02531 at temperature 1), may be
        traced.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    weights_BT = weights_BT.astype(jnp.float32)
    column_BTV = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, logits_BTV.ndim - 1)

    def without_padding(logits_BTV):
        if vocab_size is None or vocab_size == logits_BTV.shape[-1]:
            return logits_BTV
        return jnp.where(column_BTV < vocab_size, logits_BTV, -jnp.inf)

    logits_BTV = without_padding(logits_BTV)
    scored_BT = weights_BT != 0
    # Comparing column numbers, not indexing: a sharded vocabulary stays in place, and the gradient
    # is elementwise instead of a scatter.
    hit_BTV = column_BTV == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), axis=-1)
    best_other_BT = jnp.max(
        jnp.where(hit_BTV, -jnp.inf, jax.lax.stop_gradient(logits_BTV)), axis=-1
    )
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)

    def summed(value_BT):
        # value * weight would be nan where an unscored value is infinite.
        return jnp.sum(jnp.where(scored_BT, value_BT * weights_BT, 0.0))

    loss, z = summed(lse_BT - target_BT), summed(jnp.square(lse_BT))
    weights, correct = jnp.sum(weights_BT), summed(target_BT > best_other_BT)
    total, distance = loss + z_loss * z, jnp.zeros((), jnp.float32)
    if teacher_logits_BTV is not None:
        teacher_BTV = jax.lax.stop_gradient(teacher_logits_BTV.astype(jnp.float32))
        log_p_BTV = jax.nn.log_softmax(without_padding(teacher_BTV))
        p_BTV = jnp.exp(log_p_BTV)
        # Where the teacher's probability is 0, both logarithms may be infinite.
        gap_BTV = jnp.where(p_BTV > 0, log_p_BTV - (logits_BTV - lse_BT[..., None]), 0.0)
        distance = summed(jnp.sum(p_BTV * gap_BTV, axis=-1))
        total += distill * distance
    return LossSums(total, *jax.lax.stop_gradient((loss, z, weights, correct, distance)))


def chunked_cross_entropy(
    head_fn,
    head_params,
    x_BTD,
    targets_BT,
    weights_BT,
    *,
    chunk,
    z_loss=0.0,
    vocab_size=None,
    groups=1,
    sum_groups=None,
    teacher=None,
    distill=0.0,
):
    """`cross_entropy(head_fn(head_params, x), ...)` without the logits of all tokens in memory.

    A scan over slices of `chunk` positions. Under differentiation each slice computes its gradients
    in x and head_params (the latter accumulated in float32) while its logits exist, so logits are
    neither stored nor recomputed; the backward pass only scales these gradients. Reverse mode only,
    first derivatives only.

    Slices run over T, not over B * T, so that every device works on its own rows in every slice.

    Args:
      head_fn: pure function (head_params, x_ND) -> logits_NV, token by token; must not close over
        traced values.
      head_params: tree of float arrays. On a mesh no mesh axis of the batch may split them;
        otherwise every slice communicates.
      x_BTD: final hidden states, any float dtype; their gradient has the same dtype.
      targets_BT, weights_BT, z_loss, vocab_size, distill: as in `cross_entropy`.
      chunk: positions a slice; B * chunk tokens have logits at a time. T need not be a multiple.
      groups: groups of rows with a gradient accumulator of the head parameters each, such as the
        shards of the batch: the accumulators stay on their devices, which sum them once at the end
        and not once every slice. Must divide B.
      sum_groups: sums the tree of accumulators [groups, ...] over groups; None: plain sums.
      teacher: `Teacher` of the same rows, or None; it gets no gradient.

    Returns:
      `LossSums`; only `total` carries a gradient.
    """
    batch, length = targets_BT.shape
    if chunk < 1:
        raise UsageError(f"config.train.loss_chunk={chunk}: must be at least 1")
    if batch % groups:
        raise ValueError(f"{batch} rows: must be a multiple of the {groups} groups")

    def split(a):
        return a.reshape(groups, batch // groups, *a.shape[1:])

    chunk = min(chunk, length)
    sum_groups = sum_groups or _sum_groups
    static = _Static(head_fn, chunk, vocab_size, teacher and teacher.head_fn, sum_groups)
    rows = targets_BT, weights_BT.astype(jnp.float32), teacher and teacher.x_BTD
    rates = jnp.asarray(z_loss, jnp.float32), jnp.asarray(distill, jnp.float32)
    fixed = teacher and teacher.head_params, *rates
    return _chunked(static, head_params, split(x_BTD), jax.tree.map(split, rows), fixed)


class _Static(NamedTuple):
    head_fn: Callable
    chunk: int
    vocab_size: int | None
    teacher_head_fn: Callable | None
    sum_groups: Callable


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, head_params, x, rows, fixed):
    """`LossSums`.

    Args:
      x: [groups, B/groups, T, D].
      rows: (targets, weights, features of the teacher or None), [groups, B/groups, T, ...].
      fixed: (head parameters of the teacher or None, z_loss, distill).
    """
    sums, _, _ = _scan_slices(static, head_params, x, rows, fixed, with_gradients=False)
    return _sum_groups(sums)


def _chunked_forward(static, head_params, x, rows, fixed):
    sums, d_head, d_x = _scan_slices(static, head_params, x, rows, fixed, with_gradients=True)
    # An empty slice of each parameter carries its dtype to the backward pass.
    dtypes = jax.tree.map(lambda p: jnp.zeros((0,), p.dtype), head_params)
    return _sum_groups(sums), (static.sum_groups(d_head), d_x, dtypes)


def _chunked_backward(static, residuals, cotangent):
    d_head, d_x, dtypes = residuals
    scale = cotangent.total
    d_head = jax.tree.map(lambda d, like: (d * scale).astype(like.dtype), d_head, dtypes)
    d_x = (d_x.astype(jnp.float32) * scale).astype(d_x.dtype)
    return d_head, d_x, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _scan_slices(static, head_params, x, rows, fixed, with_gradients):
    """(LossSums, gradients of `total` in head_params and in x) of each group [groups, ...].

    The gradients are None unless `with_gradients`.
    """
    num_slices = math.ceil(x.shape[2] / static.chunk)

    def total(head_params, x_slice, rows_slice):
        sums = _slice_sums(static, head_params, x_slice, rows_slice, fixed)
        return sums.total, sums

    def one_group(x, rows):
        def step(carry, index):
            sums, d_head, d_x = carry
            start, x_slice, rows_slice = _slice(static.chunk, x, rows, index)
            if with_gradients:
                gradients, slice_sums = jax.grad(total, argnums=(0, 1), has_aux=True)(
                    head_params, x_slice, rows_slice
                )
                d_head_slice, d_x_slice = gradients
                d_head = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), d_head, d_head_slice)
                # Added, not set: the last slice may overlap the one before, with gradients 0 there.
                d_x_slice += jax.lax.dynamic_slice_in_dim(d_x, start, static.chunk, axis=1)
                d_x = jax.lax.dynamic_update_slice_in_dim(d_x, d_x_slice, start, axis=1)
            else:
                _, slice_sums = total(head_params, x_slice, rows_slice)
            return (jax.tree.map(jnp.add, sums, slice_sums), d_head, d_x), None

        sums, d_head, d_x = LossSums(*[jnp.zeros((), jnp.float32)] * 6), None, None
        if with_gradients:
            d_head = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), head_params)
            d_x = jnp.zeros_like(x)
        carry, _ = jax.lax.scan(step, (sums, d_head, d_x), jnp.arange(num_slices))
        return carry

    return jax.vmap(one_group)(x, rows)


def _slice(chunk, x, rows, index):
    """Start, x and rows of slice `index` of one group, [B/groups, chunk, ...].

    The last slice ends at T; positions that the slice before it has too get weight 0.
    """
    start = jnp.minimum(index * chunk, x.shape[1] - chunk)
    x, (targets, weights, teacher_x) = jax.tree.map(
        lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk, axis=1), (x, rows)
    )
    is_new = start + jnp.arange(chunk)[None, :] >= index * chunk
    return start, x, (targets, jnp.where(is_new, weights, 0.0), teacher_x)


def _slice_sums(static, head_params, x, rows, fixed):
    targets, weights, teacher_x = rows
    teacher_params, z_loss, distill = fixed
    logits, teacher_logits = static.head_fn(head_params, x.reshape(-1, x.shape[-1])), None
    if teacher_x is not None:
        flat = teacher_x.reshape(-1, teacher_x.shape[-1])
        teacher_logits = static.teacher_head_fn(teacher_params, flat)
    return cross_entropy(
        logits,
        targets.reshape(-1),
        weights.reshape(-1),
        z_loss,
        static.vocab_size,
        teacher_logits,
        distill,
    )


def _sum_groups(tree):
    return jax.tree.map(lambda a: jnp.sum(a, axis=0), tree)


# ---- sown losses ---------------------------------------------------------------------------------


def coefficient(spec, step, total_steps, name="<name>"):
    """Weight of a loss at `step` (may be traced); float32 scalar.

    Args:
      spec: a number, or a mapping with `schedule` and the keys of `run_blocks.COEFFICIENTS`.
        constant(value); linear and cosine(c_start, c_end, steps): from c_start at step 0 to c_end
        at `steps` (0: total_steps), then c_end; exponential(rate, c_min, c_max):
        min(exp(rate * step) - 1 + c_min, c_max).
      name: of the loss, for the error message.
    Raises:
      UsageError: unknown schedule, missing or unknown key, negative `steps`.
    """
    spec = loss_weight(spec, f"config.losses.{name}")
    if isinstance(spec, float):
        return jnp.asarray(spec, jnp.float32)
    kind = spec["schedule"]
    step = jnp.asarray(step, jnp.float32)
    if kind == "constant":
        return jnp.asarray(spec["value"], jnp.float32)
    if kind == "exponential":
        # expm1, because rate * step may be far below float32's resolution around 1.
        return jnp.minimum(jnp.expm1(spec["rate"] * step) + spec["c_min"], spec["c_max"])
    progress = jnp.clip(step / max(1, spec["steps"] or total_steps), 0.0, 1.0)
    if kind == "cosine":
        progress = 0.5 - 0.5 * jnp.cos(jnp.pi * progress)
    return spec["c_start"] + (spec["c_end"] - spec["c_start"]) * progress


def collect_sown(sown, whole=None):
    """{name: mean over all values sown under that name}, whatever module sowed them.

    Every layer counts once: linen's tuples (one entry a call) and the leading axis of a scanned
    stack are flattened together, so scanned and unrolled models agree. A layer whose Mean is over
    no token, such as the masks of a routed block that routed none, is skipped; 0 if all are.

    Args:
      sown: a tree of values, or of `means.Mean`.
      whole: None, or the tree of Means of the whole batch if `sown` is of one micro-batch. Then the
        whole batch decides which layers are skipped, and the results are the contributions of the
        micro-batch, see `Mean.contribution`.
    """
    whole_means, entries = dict(batch_means.leaves(whole)), {}
    for path, value in batch_means.leaves(sown):
        has_tokens = True
        if isinstance(value, batch_means.Mean):
            batch_mean = whole_means[path] if whole_means else value
            has_tokens = batch_mean.count > 0
            value = value.contribution(batch_mean) if whole_means else value.value()
        value = jnp.asarray(value, jnp.float32)
        name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]
        values, counts = entries.setdefault(name, ([], []))
        values.append(jnp.ravel(jnp.where(has_tokens, value, 0.0)))
        counts.append(jnp.ravel(jnp.broadcast_to(has_tokens, value.shape)))
    collected = {}
    for name, (values, counts) in sorted(entries.items()):
        num_layers = jnp.sum(jnp.concatenate(counts), dtype=jnp.float32)
        collected[name] = jnp.sum(jnp.concatenate(values)) / jnp.maximum(num_layers, 1.0)
    return collected


def check_names(sown_names, config_losses):
    """Sorted names of `config.losses` that nothing sows.

    These are no error, since a config may have weights for options that are off.

    Raises:
      UsageError: a sown loss has no weight, perhaps because the name of the weight is misspelt.
    """
    unused = sorted(set(config_losses) - set(sown_names))
    for name in sorted(sown_names):
        if name not in config_losses:
            close = nearest(name, unused).replace("did you mean", "misspelt as")
            raise UsageError(
                f"the model sows a loss {name!r} without a weight: set config.losses.{name} "
                f"(0.0 only records it){close}"
            )
    return unused


def weighted_sum(sown, config_losses, step, total_steps):
    """Sum of coefficient(step) * loss over the sown losses.

    Args:
      sown: result of `collect_sown`.
      config_losses: {name: weight}, `config.losses` as a mapping.
    Raises:
      UsageError: a sown loss has no weight.
    """
    check_names(sown, config_losses)
    total = jnp.zeros((), jnp.float32)
    for name, value in sown.items():
        spec = config_losses[name]
        # A loss whose weight is the constant 0 is left out, so its gradient costs nothing.
        if not isinstance(spec, int | float) or spec:
            total += coefficient(spec, step, total_steps, name) * value
    return total


def bits_per_byte(nats_per_token, bytes_per_token):
    """Cross-entropy in bits per byte of the text, comparable across tokenizers."""
    return nats_per_token / (math.log(2) * bytes_per_token)
