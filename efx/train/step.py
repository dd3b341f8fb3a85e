"""One step of training as a pure function: no I/O, no clock, no global state.

Randomness is a function of (seed, step, micro-batch): nothing random is stored, so a resumed run
draws what the uninterrupted one would have drawn.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from efx import models
from efx.config.schema import as_dict
from efx.layers import batch_means
from efx.parallel import sharding
from efx.routing.calibrate import reset_threshold_steps
from efx.train import losses, optim


@struct.dataclass
class TrainState:
    """The state of a run in a checkpoint, except the position in the data.

    Attributes:
      step: int32, number of optimiser steps (skipped ones included).
      params: float32 parameters.
      opt_state: optax state.
      variables: {"state": ...} running averages of layers that have them, else {}.
      nonfinite_total, nonfinite_run: int32, steps skipped for a non-finite loss or gradient: all of
        them, and those since the last finite one.
    """

    step: jax.Array
    params: dict
    opt_state: tuple
    variables: dict
    nonfinite_total: jax.Array
    nonfinite_run: jax.Array


def init_state(model, optimizer, seed):
    """The state of step 0, parameters unboxed."""
    return state_of(nn.unbox(models.init(model, jax.random.key(seed))), optimizer)


def state_of(variables, optimizer):
    """The state of step 0 of a model's variables, unboxed."""
    params = variables["params"]
    averages = {"state": variables["state"]} if "state" in variables else {}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), averages, zero, zero)


def batch_shapes(config, rows, mesh, rules):
    """Shapes and shardings of a batch of `rows` rows of the data pipeline."""
    shape, layout = (rows, config.data.seq_len), sharding.batch_sharding(mesh, rules)
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if config.data.packing:
        dtypes |= {"positions": jnp.int32, "segment_ids": jnp.int32}
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for name, dtype in dtypes.items()
    }


# ---- training ------------------------------------------------------------------------------------


def make_train_step(
    model, optimizer, schedule, config, *, total_steps, groups=1, teacher=None, start=0
):
    """train_step(state, batch, seed, teacher_variables=None) -> (state, metrics), to be jitted with
    the state donated.

    The objective is  sum(weight * cross-entropy) / sum(weight)  over the whole batch plus the
    weighted sown losses of the whole batch, and with a teacher plus the weighted mean of
    KL(teacher || model). With `config.train.accumulation` = A it is summed over A micro-batches of
    every A-th row, and gradient and metrics are those of the whole batch: a first pass over the
    micro-batches adds up the Means that the sown losses need. That pass costs almost nothing for a
    loss that is one mean over tokens, whose number the batch alone decides, and a forward pass
    without the output layer for a loss that is not linear in means (`load_balance`).

    A step whose loss or gradient is not finite changes neither parameters nor optimiser state, and
    is counted. The seed is an argument, so that runs of several seeds share one compilation.

    Args:
      groups: number of shards of the batch axis (see `losses.chunked_cross_entropy`).
      teacher: the model of `config.losses.distill`, in evaluation mode on the same tokens; its
        variables are an argument of the step, neither trained nor part of the state. None: no such
        loss.
      start: the first step of the current stage of capacity. Thresholds are reset there: earlier
        ones belong to another capacity.
    """
    loss_weights = as_dict(config.losses)

    def train_step(state, batch, seed, teacher_variables=None):
        if start:
            variables = reset_threshold_steps(state.variables, state.step == start)
            state = state.replace(variables=variables)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        z_loss, distill = (
            losses.coefficient(loss_weights[name], state.step, total_steps, name)
            for name in ("z_loss", "distill")
        )

        def keys(index):
            key = jax.random.fold_in(step_key, index)
            return {"dropout": jax.random.fold_in(key, 0), "routing": jax.random.fold_in(key, 1)}

        def weighted(sown):
            return losses.weighted_sum(sown, loss_weights, state.step, total_steps)

        def forward(params, batch, index):
            variables = {"params": params, **state.variables}
            return features(model, variables, batch, keys(index), train=True)

        def teacher_outputs(batch, index):
            x_BTD, _ = features(teacher, teacher_variables, batch, keys(index), train=False)
            head = teacher.head_params(teacher_variables["params"])
            return losses.Teacher(teacher.head_fn, head, x_BTD)

        def objective(params, batch, index, totals):
            """(objective of a micro-batch, ((its sums, its sown Means), running averages))."""
            x_BTD, mutated = forward(params, batch, index)
            options = dict(z_loss=z_loss, distill=distill)
            if teacher is not None:
                options["teacher"] = teacher_outputs(batch, index)
            sums = loss_sums(model, params, x_BTD, batch, config, groups, **options)
            sown = {name: batch_means.sown(mutated, name) for name in ("losses", "stats")}
            extra = weighted(losses.collect_sown(sown["losses"], totals))
            averages = {name: mutated[name] for name in state.variables}
            return sums.total / total_weight + extra, ((sums, sown), averages)

        def gradients(batch, index, totals=None):
            grads, (added, averages) = jax.grad(objective, has_aux=True)(
                state.params, batch, index, totals
            )
            return (grads, *added), averages

        def means_of_losses(batch, index):
            _, mutated = forward(state.params, batch, index)
            return batch_means.sown(mutated, "losses"), None

        if config.train.accumulation == 1:
            (grads, sums, sown), variables = gradients(batch, 0)
        else:
            batches = _micro_batches(batch, config.train.accumulation)
            totals, _ = _sum_over_micro_batches(means_of_losses, batches)
            (grads, sums, sown), variables = _sum_over_micro_batches(
                lambda batch, index: gradients(batch, index, totals), batches
            )
            variables = _average_variables(variables, batches)

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        sown_losses, norm = losses.collect_sown(sown["losses"]), optim.grad_norm(opt_state)
        value = sums.total / total_weight + weighted(sown_losses)
        is_finite = jnp.isfinite(value) & jnp.isfinite(norm)
        is_skipped = (~is_finite).astype(jnp.int32)

        def if_finite(new, old):
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        new_state = TrainState(
            step=state.step + 1,
            params=if_finite(optax.apply_updates(state.params, updates), state.params),
            opt_state=if_finite(opt_state, state.opt_state),
            variables=if_finite(variables, state.variables),
            nonfinite_total=state.nonfinite_total + is_skipped,
            nonfinite_run=(state.nonfinite_run + 1) * is_skipped,
        )
        # The optimiser counts only the steps that it took.
        rate = schedule(state.step - state.nonfinite_total)
        metrics = {
            "train/objective": value,
            "train/loss": sums.loss / total_weight,
            "train/accuracy": sums.correct / total_weight,
            "train/grad_norm": norm,
            "train/learning_rate": jnp.asarray(rate, jnp.float32),
            "train/nonfinite_total": new_state.nonfinite_total,
            "train/nonfinite_run": new_state.nonfinite_run,
            **{f"losses/{name}": loss for name, loss in sown_losses.items()},
            **losses.collect_sown(sown["stats"]),
        }
        if teacher is not None:
            metrics["losses/distill"] = sums.distance / total_weight
        return new_state, metrics

    return train_step


def _micro_batches(batch, count):
    """Arrays [B, T] as [count, B / count, T]. Micro-batch i has the rows i, i + count, ..., so that
    every device keeps its own rows."""

    def split(x):
        micro = x.reshape(x.shape[0] // count, count, *x.shape[1:])
        return sharding.constrain(jnp.swapaxes(micro, 0, 1), None, "batch", "length")

    return jax.tree.map(split, batch)


def _sum_over_micro_batches(function, batches):
    """Apply function(batch, index) -> (added, stacked) to each micro-batch.

    Returns: (the sum of `added`, `stacked` of all micro-batches along a new last axis).
    """
    function = jax.jit(function, inline=True)  # so that `eval_shape` and the scan trace it once
    count, first = len(batches["inputs"]), jax.tree.map(lambda x: x[0], batches)
    shapes, _ = jax.eval_shape(function, first, jnp.zeros((), jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(totals, item):
        added, stacked = function(*item)
        return jax.tree.map(jnp.add, totals, added), stacked

    totals, stacked = jax.lax.scan(body, zeros, (batches, jnp.arange(count)))
    return totals, jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), stacked)


def _average_variables(variables, batches):
    """Running averages after a batch: the mean over its micro-batches, weighted by real tokens.

    Integers, such as numbers of updates, are equal in all micro-batches. So are the averages of a
    frozen model, which must keep every bit.

    Args:
      variables: those after each micro-batch, along the last axis; all start from the same values.
    """
    documents = batches.get("segment_ids", jnp.ones_like(batches["inputs"]))
    # A batch of padding alone weights all micro-batches equally.
    tokens_A = jnp.maximum(jnp.sum(documents > 0, axis=(1, 2), dtype=jnp.float32), 1e-6)

    def average(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[..., 0]
        is_equal = jnp.all(x == x[..., :1], axis=-1)
        return jnp.where(is_equal, x[..., 0], jnp.average(x, axis=-1, weights=tokens_A))

    return jax.tree.map(average, variables)


# ---- forward pass and loss -----------------------------------------------------------------------


def features(model, variables, batch, rngs, *, train):
    """(input of the output layer [B, T, D], mutated collections) of one batch."""
    return model.apply_to_batch(
        variables,
        batch,
        train=train,
        method="features",
        rngs=rngs,
        mutable=("losses", "stats", batch_means.COLLECTION) + (("state",) if train else ()),
    )


def loss_sums(
    model,
    params,
    x_BTD,
    batch,
    config,
    groups,
    *,
    teacher=None,
    with_gradients=True,
    **coefficients,
):
    """LossSums of features [B, T, D]; logits of `loss_chunk` positions at a time.

    Args:
      teacher: `losses.Teacher` or None. coefficients: z_loss, distill.
    """
    head, chunk = model.head_params(params), config.train.loss_chunk
    if not chunk or chunk >= x_BTD.shape[1]:

        def logits(head_fn, head, x_BTD):
            return sharding.constrain(head_fn(head, x_BTD), "batch", "length", "act_vocab")

        if teacher is not None:
            coefficients["teacher_logits_BTV"] = logits(*teacher)
        logits_BTV = logits(model.head_fn, head, x_BTD)
        return losses.cross_entropy(logits_BTV, batch["targets"], batch["weights"], **coefficients)
    # Devices that share a sequence go over their own part of it, as if it were a row.
    parts = sharding.shard_count("length")
    rows = [_as_rows(y, groups, parts) for y in (x_BTD, batch["targets"], batch["weights"])]
    if teacher is not None:
        teacher = teacher._replace(x_BTD=_as_rows(teacher.x_BTD, groups, parts))
    return losses.chunked_cross_entropy(
        model.head_fn,
        head,
        *rows,
        chunk=chunk,
        groups=groups * parts,
        sum_groups=model.sum_head_gradients,
        teacher=teacher,
        with_gradients=with_gradients,
        **coefficients,
    )


def _as_rows(x_BT, groups, parts):
    """[B, T, ...] -> [B * parts, T / parts, ...], in the order in which devices hold the parts of
    sequences: within each group of rows, the first part of every row, then the second."""
    batch, length, *rest = x_BT.shape
    x = x_BT.reshape(groups, batch // groups, parts, length // parts, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(batch * parts, length // parts, *rest)
