"""One step of training and of evaluation, as pure functions: no I/O, no clock, no global state.

Randomness is a function of (seed, step, micro-batch), in evaluation of (seed, batch): nothing
random is stored, so a resumed run draws what the uninterrupted one would have drawn.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from efx import losses, models, optim, sharding

EVALUATION = np.uint32(2**32 - 1)  # in the place of a step, of which there are never so many


@struct.dataclass
class TrainState:
    """Everything that a checkpoint has to hold of a run, apart from the data's position.

    Attributes:
      step: int32, optimiser steps done (skipped ones included).
      params: float32 parameters.
      opt_state: optax state.
      variables: {"state": ...} running averages of layers that have them, else {}.
      nonfinite_total, nonfinite_run: int32, steps skipped for a non-finite loss or gradient, in
        all and since the last good one.
    """

    step: jax.Array
    params: dict
    opt_state: tuple
    variables: dict
    nonfinite_total: jax.Array
    nonfinite_run: jax.Array


def init_state(model, optimizer, seed):
    """The state of step 0, parameters unboxed."""
    variables = dict(nn.unbox(models.init(model, jax.random.key(seed))))
    params = variables.pop("params")
    kept = {"state": variables["state"]} if "state" in variables else {}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), kept, zero, zero)


def init_state_params(model):
    """Unboxed parameters of step 0 of some seed: for shapes."""
    return nn.unbox(models.init(model, jax.random.key(0)))["params"]


def state_shardings(model, optimizer, mesh, rules):
    """Shardings of a TrainState: parameters by their logical axes, moments like their parameter."""
    boxed = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    by_path = {}
    specs = sharding.tree_shardings(boxed["params"], mesh, rules)
    shapes = nn.unbox(boxed["params"])
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True
    ):
        by_path[_names(path)] = (leaf.shape, spec)
    longest = max(len(path) for path in by_path)

    def place(path, leaf):
        names = _names(path)
        for size in range(min(longest, len(names)), 0, -1):
            shape, spec = by_path.get(names[-size:], (None, None))
            if shape == leaf.shape:
                return spec
        return sharding.replicated(mesh)

    state = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    return jax.tree_util.tree_map_with_path(place, state)


def _names(path):
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def make_train_step(model, optimizer, schedule, config, *, total_steps, groups=1):
    """train_step(state, batch, seed) -> (state, metrics), to be jitted with the state donated.

    The seed is an argument, not a constant, so that runs of several seeds share one compilation.

    The objective is  sum(weight * cross-entropy) / sum(weight)  over the whole batch plus the
    weighted mean of every sown loss. With `config.train.accumulation` = A, A micro-batches of
    every A-th row each contribute their share of the same sums: the gradient is that of the big
    batch.

    A step whose loss or gradient is not finite leaves parameters and optimiser state alone and is
    counted.

    Args:
      groups: over how many shards the batch axis is split (see `losses.chunked_cross_entropy`).
    """
    accumulation = config.train.accumulation

    def micro_loss(params, variables, batch, total_weight, keys, step):
        sums, mutated = _forward(
            model,
            params,
            variables,
            batch,
            keys,
            config,
            train=True,
            groups=groups,
            z_loss=losses.coefficient(config.losses["z_loss"], step, total_steps, "z_loss"),
        )
        sown = losses.collect_sown(mutated["losses"])
        extra, sown = losses.weighted_sum(sown, config.losses, step, total_steps)
        objective = sums.total / total_weight + extra / accumulation
        metrics = {
            "train/loss": sums.loss / total_weight,
            "train/accuracy": sums.correct / total_weight,
            **{f"losses/{name}": value / accumulation for name, value in sown.items()},
            **{
                name: value / accumulation
                for name, value in losses.collect_sown(mutated["stats"]).items()
            },
        }
        return objective, (metrics, {k: mutated[k] for k in variables})

    gradient = jax.value_and_grad(micro_loss, has_aux=True)

    def train_step(state, batch, seed):
        total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        base = jax.random.fold_in(jax.random.key(seed), state.step)

        def one(variables, batch, index):
            key = jax.random.fold_in(base, index)
            keys = {"dropout": jax.random.fold_in(key, 0), "routing": jax.random.fold_in(key, 1)}
            (objective, (metrics, variables)), grads = gradient(
                state.params, variables, batch, total_weight, keys, state.step
            )
            return variables, {"train/objective": objective, **metrics}, grads

        if accumulation == 1:
            variables, metrics, grads = one(state.variables, batch, 0)
        else:
            variables, metrics, grads = _accumulate(one, state.variables, batch, accumulation)
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
        taken = state.step - state.nonfinite_total
        metrics["train/learning_rate"] = jnp.asarray(schedule(taken), jnp.float32)
        metrics["train/nonfinite_total"] = new_state.nonfinite_total
        metrics["train/nonfinite_run"] = new_state.nonfinite_run
        return new_state, metrics

    return train_step


def _accumulate(one, variables, batch, accumulation):
    """Mean of the variables, sums of metrics and gradients over micro-batches, with a scan.

    Every micro-batch starts from the same variables: running averages then move as far as they
    would by the big batch.
    """

    def split(x):
        # Micro-batch i takes rows i, i + A, ...: every device keeps its own rows.
        micro = x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:])
        return sharding.constrain(jnp.swapaxes(micro, 0, 1), None, "batch", "length")

    batches = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(lambda v, b: one(v, b, 0), variables, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(totals, item):
        index, micro = item
        return jax.tree.map(jnp.add, totals, one(variables, micro, index)), None

    (sums, metrics, grads), _ = jax.lax.scan(body, zeros, (jnp.arange(accumulation), batches))
    means = jax.tree.map(lambda x: (x / accumulation).astype(x.dtype), sums)
    return means, metrics, grads


def _forward(model, params, variables, batch, keys, config, *, train, groups, z_loss):
    """(LossSums, mutated collections) of one batch; logits of `loss_chunk` positions at a time."""
    x_BTD, mutated = model.apply(
        {"params": params, **variables},
        batch["inputs"],
        batch.get("positions"),
        batch.get("segment_ids"),
        train=train,
        method="features",
        rngs=keys,
        mutable=("losses", "stats", "state"),
    )
    mutated = {"losses": {}, "stats": {}, **mutated}
    head = model.head_params(params)
    chunk = config.train.loss_chunk
    if chunk and chunk < x_BTD.shape[1]:
        sums = losses.chunked_cross_entropy(
            model.head_fn,
            head,
            x_BTD,
            batch["targets"],
            batch["weights"],
            chunk=chunk,
            z_loss=z_loss,
            groups=groups,
        )
    else:
        logits_BTV = model.head_fn(head, x_BTD)
        logits_BTV = sharding.constrain(logits_BTV, "batch", "length", "act_vocab")
        sums = losses.cross_entropy(logits_BTV, batch["targets"], batch["weights"], z_loss)
    return sums, mutated


def evaluation_keys(seed, index):
    """Keys of batch number `index` of an evaluation, as `rngs` of a model: what training draws
    afresh for every batch (places of stochastic routing) is drawn here too, and the same ones at
    every evaluation."""
    key = jax.random.fold_in(jax.random.key(seed), EVALUATION)
    return {"routing": jax.random.fold_in(key, index)}


def make_eval_step(model, config, *, groups=1):
    """eval_step(params, variables, batch, seed, index) -> {"loss", "correct", "weights",
    statistics: sums}; `index` is the number of the batch.

    Losses are sums over tokens; statistics are means, weighted by the batch's scored tokens, so
    that sums over batches divided by the sum of "weights" are means over the split.
    """

    def eval_step(params, variables, batch, seed, index):
        keys = evaluation_keys(seed, index)
        sums, mutated = _forward(
            model, params, variables, batch, keys, config, train=False, groups=groups, z_loss=0.0
        )
        result = {"loss": sums.loss, "correct": sums.correct, "weights": sums.weights}
        for name, value in by_layer(mutated["stats"], model).items():
            result[name] = value * sums.weights
        return result

    return eval_step


def by_layer(stats, model):
    """Statistics by name: the mean over layers, and each layer's own as `name/block_<i>`."""
    result = losses.collect_sown(stats)
    # Masks of the embedding lie outside of the layers.
    layers = {**stats["layers"]} if "layers" in stats else {}
    if "units" in layers:
        from efx.layers.stack import unroll_params

        layers = unroll_params(layers, model.specs())
    for block, entries in layers.items():
        for name, value in losses.collect_sown(entries).items():
            result[f"{name}/{block}"] = value
    return result
