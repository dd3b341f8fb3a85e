"""The training objective: cross-entropy, distillation, the weighted sum of sown losses.

All arithmetic is float32 whatever the input. Cross-entropy is a sum over tokens, never a mean: the
train step divides once, by the weight of the whole (accumulated, sharded) batch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

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
    logits_BTV, targets_BT, weights_BT, z_loss=0.0, teacher_logits_BTV=None, distill=0.0
):
    """Softmax cross-entropy of integer targets, as `LossSums`.

    Args:
      logits_BTV: any float dtype, any number of leading axes.
      targets_BT: integers < V; arbitrary where the weight is 0.
      weights_BT: 0 for tokens that are not scored.
      z_loss: coefficient of logsumexp^2 (arXiv 2204.02311, section 5), may be traced.
      teacher_logits_BTV: of the same shape as the logits, or None.
      distill: coefficient of KL(teacher || model) (arXiv 1503.02531 at temperature 1), may be
        traced.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    weights_BT = weights_BT.astype(jnp.float32)
    # Comparing column numbers, not indexing: a sharded vocabulary stays in place, and the gradient
    # is elementwise instead of a scatter.
    column_BTV = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, logits_BTV.ndim - 1)
    is_target_BTV = column_BTV == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    others_BTV = jnp.where(is_target_BTV, -jnp.inf, jax.lax.stop_gradient(logits_BTV))
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)

    def weighted_sum(value_BT):
        # value * weight would be nan where an unscored value is infinite.
        return jnp.sum(jnp.where(weights_BT != 0, value_BT * weights_BT, 0.0))

    loss, z = weighted_sum(lse_BT - target_BT), weighted_sum(jnp.square(lse_BT))
    correct = weighted_sum(target_BT > jnp.max(others_BTV, axis=-1))
    total, distance = loss + z_loss * z, jnp.zeros((), jnp.float32)
    if teacher_logits_BTV is not None:
        teacher_BTV = jax.lax.stop_gradient(teacher_logits_BTV.astype(jnp.float32))
        log_p_BTV = jax.nn.log_softmax(teacher_BTV)
        p_BTV = jnp.exp(log_p_BTV)
        # Where the teacher's probability is 0, both logarithms may be infinite.
        gap_BTV = jnp.where(p_BTV > 0, log_p_BTV - (logits_BTV - lse_BT[..., None]), 0.0)
        distance = weighted_sum(jnp.sum(p_BTV * gap_BTV, axis=-1))
        total += distill * distance
    logged = loss, z, jnp.sum(weights_BT), correct, distance
    return LossSums(total, *jax.lax.stop_gradient(logged))


def chunked_cross_entropy(
    head_fn,
    head_params,
    x_BTD,
    targets_BT,
    weights_BT,
    *,
    chunk,
    z_loss=0.0,
    groups=1,
    sum_groups=None,
    teacher=None,
    distill=0.0,
    with_gradients=True,
):
    """`cross_entropy(head_fn(head_params, x), ...)` without the logits of all tokens in memory.

    A scan over slices of `chunk` positions. Each slice also computes its gradients in x
    and head_params (the latter accumulated in float32) while its logits exist, so logits are
    neither stored nor recomputed; the backward pass only scales these gradients.

    Slices run over T, not over B * T, so that every device works on its own rows in every slice.

    Args:
      head_fn: pure function (head_params, x_ND) -> logits_NV, token by token.
      head_params: tree of float arrays. On a mesh no mesh axis of the batch may split them;
        otherwise every slice communicates.
      x_BTD: final hidden states, any float dtype; their gradient has the same dtype.
      targets_BT, weights_BT, z_loss, distill: as in `cross_entropy`.
      chunk: positions a slice; B * chunk tokens have logits at a time. T need not be a multiple.
      groups: groups of rows with a gradient accumulator of the head parameters each, such as the
        shards of the batch: the accumulators stay on their devices, which sum them once at the end
        and not once every slice. Must divide B.
      sum_groups: sums the tree of accumulators [groups, ...] over groups; None: plain sums.
      teacher: `Teacher` of the same rows, or None; it gets no gradient.
      with_gradients: False in evaluation, which needs none.

    Returns:
      `LossSums`; only `total` carries a gradient, a first derivative in reverse mode.
    """

    def slice_sums(head_params, x, targets, weights, teacher_x):
        """`LossSums` of a slice [B, chunk, ...]."""

        def logits_of(head_fn, head_params, x):
            return head_fn(head_params, x.reshape(-1, x.shape[-1]))

        logits, teacher_logits = logits_of(head_fn, head_params, x), None
        if teacher is not None:
            teacher_logits = logits_of(teacher.head_fn, teacher.head_params, teacher_x)
        return cross_entropy(
            logits, targets.reshape(-1), weights.reshape(-1), z_loss, teacher_logits, distill
        )

    def sums_of_group(x, *rows):
        return _sum_slices(slice_sums, head, x, rows, min(chunk, x.shape[1]), with_gradients)

    # The gradients that slices compute are constants of the differentiation outside.
    inputs = head_params, x_BTD
    head, x_BTD = jax.lax.stop_gradient(inputs) if with_gradients else inputs
    rows = targets_BT, weights_BT.astype(jnp.float32), teacher and teacher.x_BTD
    by_group = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), (x_BTD, *rows))
    sums, gradients = jax.vmap(sums_of_group)(*by_group)
    sums = _sum_groups(sums)
    if not with_gradients:
        return sums
    d_head, d_x = gradients
    gradients = (sum_groups or _sum_groups)(d_head), d_x.reshape(x_BTD.shape)
    return sums._replace(total=_attach_gradients(sums.total, inputs, gradients))


def _sum_slices(slice_sums, head_params, x, rows, chunk, with_gradients):
    """(LossSums, gradients of `total` in (head_params, x) or None) of a group of rows.

    Args:
      slice_sums: function (head_params, x, *rows) -> LossSums of a slice.
      x, rows: [B, T, ...].
    """
    length = x.shape[1]

    def total(head_params, x, rows):
        sums = slice_sums(head_params, x, *rows)
        return sums.total, sums

    def add_slice(carry, index):
        sums, gradients = carry
        # The last slice ends at T; positions that the slice before it has too get weight 0.
        start = jnp.minimum(index * chunk, length - chunk)
        x_slice, (targets, weights, teacher_x) = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk, axis=1), (x, rows)
        )
        is_new = start + jnp.arange(chunk)[None, :] >= index * chunk
        rows_slice = targets, jnp.where(is_new, weights, 0.0), teacher_x
        if with_gradients:
            new_gradients, new_sums = jax.grad(total, argnums=(0, 1), has_aux=True)(
                head_params, x_slice, rows_slice
            )
            (d_head, d_x), (new_d_head, new_d_x) = gradients, new_gradients
            d_head = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), d_head, new_d_head)
            # Added, not set, because the last slice may overlap the one before.
            new_d_x += jax.lax.dynamic_slice_in_dim(d_x, start, chunk, axis=1)
            d_x = jax.lax.dynamic_update_slice_in_dim(d_x, new_d_x, start, axis=1)
            gradients = d_head, d_x
        else:
            _, new_sums = total(head_params, x_slice, rows_slice)
        return (jax.tree.map(jnp.add, sums, new_sums), gradients), None

    sums, gradients = LossSums(*[jnp.zeros((), jnp.float32)] * 6), None
    if with_gradients:
        d_head = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), head_params)
        gradients = d_head, jnp.zeros_like(x)
    carry, _ = jax.lax.scan(add_slice, (sums, gradients), jnp.arange(math.ceil(length / chunk)))
    return carry


@jax.custom_vjp
def _attach_gradients(total, inputs, gradients):
    """`total`, as a function of `inputs` with these gradients."""
    return total


def _attach_forward(total, inputs, gradients):
    # An empty slice of each input carries its dtype to the backward pass.
    return total, (gradients, jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), inputs))


def _attach_backward(residuals, cotangent):
    gradients, dtypes = residuals

    def scaled(gradient, like):
        return (gradient.astype(jnp.float32) * cotangent).astype(like.dtype)

    return None, jax.tree.map(scaled, gradients, dtypes), None


_attach_gradients.defvjp(_attach_forward, _attach_backward)


def _sum_groups(tree):
    return jax.tree.map(lambda a: jnp.sum(a, axis=0), tree)


# ---- sown losses ---------------------------------------------------------------------------------


def coefficient(spec, step, total_steps, name="<name>"):
    """Weight of a loss at `step` (may be traced); float32 scalar.

    Args:
      spec: a number, or a mapping with `schedule` and its keys in `config.run.COEFFICIENTS`.
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
    if kind == "constant":
        return jnp.asarray(spec["value"], jnp.float32)
    if kind == "exponential":
        # expm1, because rate * step may be far below float32's resolution around 1.
        growth = jnp.expm1(spec["rate"] * jnp.asarray(step, jnp.float32))
        return jnp.minimum(growth + spec["c_min"], spec["c_max"])
    steps = max(1, spec["steps"] or total_steps)
    if kind == "cosine":
        remaining = optax.cosine_decay_schedule(1.0, steps)(step)
    else:
        remaining = optax.linear_schedule(1.0, 0.0, steps)(step)
    return spec["c_end"] + (spec["c_start"] - spec["c_end"]) * jnp.asarray(remaining, jnp.float32)


def collect_sown(sown, whole=None):
    """{name: mean over all values sown under that name}, whatever module sowed them.

    Every layer counts once: linen's tuples (one entry a call) and the leading axis of a scanned
    stack are flattened together, so scanned and unrolled models agree. A layer whose Mean is over
    no token, such as the masks of a routed block that routed none, is skipped; 0 if all are.

    Args:
      sown: a tree of values, or of `batch_means.Mean`.
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


def weighted_sum(sown, config_losses, step, total_steps):
    """Sum of coefficient(step) * loss over the sown losses.

    Args:
      sown: result of `collect_sown`.
      config_losses: {name: weight}, `config.losses` as a mapping.
    Raises:
      UsageError: a sown loss has no weight, perhaps because the name of the weight is misspelt.
    """
    total = jnp.zeros((), jnp.float32)
    for name, value in sown.items():
        if name not in config_losses:
            raise UsageError(
                f"the model sows a loss {name!r} without a weight: set config.losses.{name} "
                f"(0.0 only records it){nearest(name, config_losses)}"
            )
        spec = config_losses[name]
        # A loss whose weight is the constant 0 is left out, so its gradient costs nothing.
        if not isinstance(spec, int | float) or spec:
            total += coefficient(spec, step, total_steps, name) * value
    return total


def bits_per_byte(nats_per_token, bytes_per_token):
    """Cross-entropy in bits per byte of the text, comparable across tokenizers."""
    return nats_per_token / (math.log(2) * bytes_per_token)
