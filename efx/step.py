"""One step of training and of evaluation, as pure functions: no I/O, no clock, no global state.

Randomness is a function of (seed, step, micro-batch), in evaluation of (seed, batch): nothing
random is stored, so a resumed run draws what the uninterrupted one would have drawn.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from efx import losses, means, models, optim, sharding
from efx.layers.stack import label, layer_of
from efx.routing.calibrate import reset_threshold_steps
from efx.settings import as_dict

EVALUATION = np.uint32(2**32 - 1)  # folded into a key in place of a step; no run is as long


@struct.dataclass
class TrainState:
    """Everything of a run that a checkpoint has to hold, except the position in the data.

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


def state_shardings(boxed_params, state, mesh, rules):
    """Shardings of a TrainState: parameters by their logical axes, moments like their parameter.

    Args:
      boxed_params: shapes of the parameters with their logical axes. state: a TrainState's shapes.
    """
    by_path = {}
    specs = sharding.tree_shardings(boxed_params, mesh, rules)
    shapes = nn.unbox(boxed_params)
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True
    ):
        by_path[sharding.path_names(path)] = (leaf.shape, spec)
    longest = max(len(path) for path in by_path)

    def sharding_of(path, leaf):
        names = sharding.path_names(path)
        for size in range(min(longest, len(names)), 0, -1):
            shape, spec = by_path.get(names[-size:], (None, None))
            if shape == leaf.shape:
                return spec
        return sharding.replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def make_train_step(
    model, optimizer, schedule, config, *, total_steps, groups=1, teacher=None, start=0
):
    """train_step(state, batch, seed, teacher_variables=None) -> (state, metrics), to be jitted with
    the state donated.

    The seed is an argument, not a constant, so that runs of several seeds share one compilation.

    The objective is  sum(weight * cross-entropy) / sum(weight)  over the whole batch plus the
    weighted sown losses of the whole batch, and with a teacher plus the weighted mean of
    KL(teacher || model). With `config.train.accumulation` = A it is summed over
    A micro-batches of every A-th row, and the gradient is that of the whole batch: for
    cross-entropy because the weight of the whole batch is known; for sown losses because a first
    pass over the micro-batches adds up the Means that these need. The compiler reduces that pass to
    almost nothing for a loss that is one mean over tokens (the batch alone decides how many tokens
    count, unless a router does), and to a forward pass without the output layer for a loss that is
    not linear in means (`load_balance`). Logged statistics are those of the whole batch, too.

    Random numbers (dropout, stochastic masks) are drawn for each micro-batch.

    A step whose loss or gradient is not finite changes neither parameters nor optimiser state, and
    is counted.

    Args:
      groups: number of shards of the batch axis (see `losses.chunked_cross_entropy`).
      teacher: the model whose distribution `config.losses.distill` follows, on the same tokens and
        as it is in evaluation; its variables, an argument of the step, are neither trained nor part
        of the state. None: no such loss, and nothing of it in the program.
      start: the first step of the model's stage of the capacity; thresholds start again there,
        since earlier ones belong to another capacity.
    """
    accumulation, weights = config.train.accumulation, as_dict(config.losses)

    def forward(params, variables, batch, keys):
        return _features(model, params, variables, batch, keys, train=True)

    def weighted(sown, step):
        return losses.weighted_sum(sown, weights, step, total_steps)

    def taught(teacher_variables, batch, keys):
        """`losses.Teacher` of a batch, or None."""
        if teacher is None:
            return None
        params = teacher_variables["params"]
        averages = {name: tree for name, tree in teacher_variables.items() if name != "params"}
        x_BTD, _ = _features(teacher, params, averages, batch, keys, train=False)
        return losses.Teacher(teacher.head_fn, teacher.head_params(params), x_BTD)

    def micro_loss(params, variables, batch, total_weight, keys, step, totals, teacher_variables):
        x_BTD, mutated = forward(params, variables, batch, keys)
        z_loss, distill = (
            losses.coefficient(weights[name], step, total_steps, name)
            for name in ("z_loss", "distill")
        )
        follow = taught(teacher_variables, batch, keys)
        sums = _loss_sums(model, params, x_BTD, batch, config, groups, z_loss, follow, distill)
        reports = {name: means.sown(mutated, name) for name in ("losses", "stats")}
        extra = weighted(losses.collect_sown(reports["losses"], totals), step)
        averages = {name: mutated[name] for name in variables}
        return sums.total / total_weight + extra, ((sums, reports), averages)

    gradient = jax.grad(micro_loss, has_aux=True)

    def train_step(state, batch, seed, teacher_variables=None):
        if start:
            variables = reset_threshold_steps(state.variables, state.step == start)
            state = state.replace(variables=variables)
        total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        base = jax.random.fold_in(jax.random.key(seed), state.step)

        def keys(index):
            key = jax.random.fold_in(base, index)
            return {"dropout": jax.random.fold_in(key, 0), "routing": jax.random.fold_in(key, 1)}

        def micro_gradients(batch, index, totals=None):
            grads, aux = gradient(
                state.params,
                state.variables,
                batch,
                total_weight,
                keys(index),
                state.step,
                totals,
                teacher_variables,
            )
            added, kept = aux
            return (grads, *added), kept

        def needed_means(batch, index):
            _, mutated = forward(state.params, state.variables, batch, keys(index))
            sown = means.sown(mutated, "losses")
            return jax.tree.map(means.Mean.for_contribution, sown, is_leaf=means.is_mean)

        if accumulation == 1:
            (grads, sums, reports), variables = micro_gradients(batch, 0)
        else:
            batches = _micro_batches(batch, accumulation)
            totals, _ = _over_micro_batches(
                lambda batch, index: (needed_means(batch, index), None), batches
            )
            (grads, sums, reports), variables = _over_micro_batches(
                lambda batch, index: micro_gradients(batch, index, totals), batches
            )
            variables = _of_whole_batch(variables, batches)
        sown, stats = (losses.collect_sown(reports[name]) for name in ("losses", "stats"))
        metrics = {
            "train/objective": sums.total / total_weight + weighted(sown, state.step),
            "train/loss": sums.loss / total_weight,
            "train/accuracy": sums.correct / total_weight,
            **{f"losses/{name}": value for name, value in sown.items()},
            **stats,
        }
        if teacher is not None:
            metrics["losses/distill"] = sums.distance / total_weight
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.params, updates)
        norm = optim.grad_norm(opt_state)
        good = jnp.isfinite(metrics["train/objective"]) & jnp.isfinite(norm)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        bad = jnp.where(good, 0, 1).astype(jnp.int32)
        new_state = TrainState(
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            variables=keep(variables, state.variables),
            nonfinite_total=state.nonfinite_total + bad,
            nonfinite_run=(state.nonfinite_run + 1) * bad,
        )
        metrics["train/grad_norm"] = norm
        # The optimiser counts only the steps that it took.
        steps_taken = state.step - state.nonfinite_total
        metrics["train/learning_rate"] = jnp.asarray(schedule(steps_taken), jnp.float32)
        metrics["train/nonfinite_total"] = new_state.nonfinite_total
        metrics["train/nonfinite_run"] = new_state.nonfinite_run
        return new_state, metrics

    return train_step


def batch_shapes(config, rows, mesh, rules):
    """Shapes and layout of a batch of so many rows, as the data pipeline makes and places it."""
    shape, layout = (rows, config.data.seq_len), sharding.batch_sharding(mesh, rules)
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if config.data.packing:
        dtypes |= {"positions": jnp.int32, "segment_ids": jnp.int32}
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for name, dtype in dtypes.items()
    }


def _micro_batches(batch, count):
    """Arrays [B, T] as [count, B / count, T]. Micro-batch i has the rows i, i + count, ..., so that
    every device keeps its own rows."""

    def split(x):
        micro = x.reshape(x.shape[0] // count, count, *x.shape[1:])
        return sharding.constrain(jnp.swapaxes(micro, 0, 1), None, "batch", "length")

    return jax.tree.map(split, batch)


def _over_micro_batches(function, batches):
    """With a scan over micro-batches, of function(batch, index) = (to add, to keep): the sum of the
    former, and the latter of all of them along one more axis, the last."""
    count = len(jax.tree.leaves(batches)[0])
    first = jax.tree.map(lambda x: x[0], batches)
    # The shapes of its result and the body of the scan are one trace of it, which is kept here.
    function = jax.jit(function, inline=True)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(function, first, jnp.zeros((), jnp.int32))[0],
    )

    def body(totals, item):
        index, batch = item
        added, kept = function(batch, index)
        return jax.tree.map(jnp.add, totals, added), kept

    totals, kept = jax.lax.scan(body, zeros, (jnp.arange(count), batches))
    return totals, jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), kept)


def _of_whole_batch(variables, batches):
    """Running averages after a batch, from those after each of its micro-batches, the last axis.

    Each of them starts from the same ones and adds a mean over its own tokens, of which packed rows
    have now more, now fewer. What is no average, such as a number of steps, is the same in all; so
    is what does not move, as in frozen models, and keeps every bit.
    """
    documents = batches.get("segment_ids")
    real_ABT = jnp.ones_like(batches["inputs"], bool) if documents is None else documents > 0
    # Where there is nothing but padding, all count alike.
    tokens_A = jnp.maximum(jnp.sum(real_ABT, axis=(1, 2), dtype=jnp.float32), 1e-6)

    def whole(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[..., 0]
        same = jnp.all(x == x[..., :1], axis=-1)
        return jnp.where(same, x[..., 0], jnp.average(x, axis=-1, weights=tokens_A))

    return jax.tree.map(whole, variables)


def _features(model, params, variables, batch, keys, *, train):
    """(input of the output layer [B, T, D], mutated collections) of one batch."""
    return model.apply(
        {"params": params, **variables},
        batch["inputs"],
        batch.get("positions"),
        batch.get("segment_ids"),
        train=train,
        method="features",
        rngs=keys,
        mutable=("losses", "stats", means.COLLECTION) + (("state",) if train else ()),
    )


def _loss_sums(model, params, x_BTD, batch, config, groups, z_loss, teacher=None, distill=0.0):
    """LossSums of features [B, T, D]; logits of `loss_chunk` positions at a time.

    teacher: `losses.Teacher` or None.
    """
    head = model.head_params(params)
    chunk = config.train.loss_chunk
    if chunk and chunk < x_BTD.shape[1]:
        # Devices that share a sequence go over their own part of it, as if it were a row.
        parts = sharding.ways("length")
        rows = [_as_rows(y, groups, parts) for y in (x_BTD, batch["targets"], batch["weights"])]
        if teacher is not None:
            teacher = teacher._replace(x_BTD=_as_rows(teacher.x_BTD, groups, parts))
        return losses.chunked_cross_entropy(
            model.head_fn,
            head,
            *rows,
            chunk=chunk,
            z_loss=z_loss,
            groups=groups * parts,
            sum_groups=model.sum_head_gradients,
            teacher=teacher,
            distill=distill,
        )

    def logits(head_fn, head, x_BTD):
        return sharding.constrain(head_fn(head, x_BTD), "batch", "length", "act_vocab")

    return losses.cross_entropy(
        logits(model.head_fn, head, x_BTD),
        batch["targets"],
        batch["weights"],
        z_loss,
        teacher_logits_BTV=None if teacher is None else logits(*teacher),
        distill=distill,
    )


def logits_bytes(model, config, mesh, rules, rows):
    """Bytes on each device of the logits that are in memory at once, for a batch of so many rows:
    at least these."""
    length = config.data.seq_len
    positions = min(config.train.loss_chunk or length, length)
    axes = ("batch", "length", "act_vocab")
    split = math.prod(sharding.shard_count(mesh, rules, axis) for axis in axes)
    return 4 * rows * positions * model.vocab_size // split


def _as_rows(x_BT, groups, parts):
    """[B, T, ...] -> [B * parts, T / parts, ...]: for each of the groups of rows one part of all
    its rows after the other, as devices hold them."""
    batch, length, *rest = x_BT.shape
    x = x_BT.reshape(groups, batch // groups, parts, length // parts, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(batch * parts, length // parts, *rest)


def evaluation_keys(seed, index):
    """Keys of batch number `index` of an evaluation, as `rngs` of a model. Stochastic routing draws
    tokens for every batch as in training, but the same ones at every evaluation."""
    key = jax.random.fold_in(jax.random.key(seed), EVALUATION)
    return {"routing": jax.random.fold_in(key, index)}


def make_eval_step(model, config, *, groups=1):
    """eval_step(params, variables, batch, seed, index) -> {"loss", "correct", "weights", "stats"}:
    sums over the batch's tokens, which add up over batches; `index` is the number of the batch.
    "stats" is the tree of Means that was sown.

    Without packing nothing marks rows past the end of the split as padding and they are computed
    like others, so the Means of a batch, which holds its own rows once more there, are weighted by
    its fraction of scored tokens.
    """

    def eval_step(params, variables, batch, seed, index):
        keys = evaluation_keys(seed, index)
        x_BTD, mutated = _features(model, params, variables, batch, keys, train=False)
        sums = _loss_sums(model, params, x_BTD, batch, config, groups, 0.0)
        real_tokens = batch["weights"].size
        if "segment_ids" in batch:
            real_tokens = jnp.maximum(jnp.sum(batch["segment_ids"] > 0), 1)
        stats = jax.tree.map(
            lambda x: x * (sums.weights / real_tokens), means.sown(mutated, "stats")
        )
        return {"loss": sums.loss, "correct": sums.correct, "weights": sums.weights, "stats": stats}

    return eval_step


def by_layer(stats, model):
    """Statistics by name: the mean over layers, and that of each layer as `name/<layer>`, by what
    `stack.label` calls it.

    Args:
      stats: a tree of values or Means by module.
    """
    named, layers = losses.collect_sown(stats), {}
    if "units" in stats.get("layers", {}):
        stats = models.unroll_variables(model, {"stats": stats})["stats"]
    for path, value in means.leaves(stats):
        *modules, name = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        layers.setdefault(layer_of("/".join(modules)), []).append({name: value})
    for layer, of_layer in layers.items():
        for name, value in losses.collect_sown(of_layer).items():
            named[f"{name}/{label(layer)}"] = value
    return named
