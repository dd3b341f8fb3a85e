"""Optimisers, learning-rate schedules and parameter groups, built on optax.

- A parameter is named by its path, such as "block_0/attention/query/kernel". Patterns of the config
  (`decay`, `frozen`, `lr_multipliers`) are regular expressions that must match a whole path
  (`re.fullmatch`): "block_1/.*" is not block 10. An empty pattern matches nothing; a pattern
  without a match is an error. Rank decides nothing, because norm scales of scanned layers are 2-D.
- Weight decay is decoupled for every optimiser (Loshchilov and Hutter 2019, arXiv 1711.05101, as in
  PyTorch): the update of a decayed parameter p is -lr(step) * m * (direction + wd * p), with its lr
  multiplier m.
- Matrices are stored as [..., in, out] under the name "kernel"; leading axes are stacks (scanned
  layers, experts). Muon orthogonalises each matrix of a stack separately.
- Gradients of frozen parameters count in neither the norm nor the clipping, so the compiler may
  drop the work of computing them.
"""

import functools
import logging
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from flax.core import meta

from efx.config.run import OptimConfig
from efx.config.schema import make
from efx.errors import UsageError
from efx.layers import mup

_log = logging.getLogger(__name__)
# Modules whose kernels are not hidden matrices: AdamW trains them, as in the authors' Muon.
NOT_HIDDEN = frozenset({"embed", "positions", "head", "router", "predictor"})
# Muon's orthogonal updates are scaled by 0.2 sqrt(max(in, out)), the size of AdamW's (arXiv
# 2502.16982, section 2.2), so that one learning rate and one decay serve both.
MUON_UPDATE_RMS = 0.2


class GradNormState(NamedTuple):
    """Global norm of the last gradient, before clipping, over the trained parameters."""

    norm: jax.Array


class Group(NamedTuple):
    """How one parameter is trained."""

    frozen: bool
    decayed: bool
    multiplier: float
    pattern: str  # the pattern of the multiplier, "" without one
    muon: bool
    mup: float  # factor of muP on the update, excluding weight decay


def param_paths(params):
    """{path: leaf} of a parameter tree; boxed leaves are unboxed."""
    return traverse_util.flatten_dict(meta.unbox(params), sep="/")


def make_optimizer(config_optim, total_steps, params_shapes, mup_ratio=1.0):
    """(gradient transformation, learning-rate schedule) of a run.

    schedule(step) is the rate of the update of zero-based `step` for parameters without a
    multiplier. The transformation's `update` needs `params`.

    Args:
      config_optim: the `config.optim` block.
      total_steps: steps of the run; the length of the schedule if `decay_steps` is 0.
      params_shapes: parameter tree of arrays or `jax.ShapeDtypeStruct`s.
      mup_ratio: `config.model.mup_ratio`, see `efx.layers.mup`.
    Raises:
      UsageError: a value or a pattern of config.optim is wrong.
    """
    config_optim = _checked(config_optim)
    _warn_about_schedule(config_optim.schedule, total_steps)
    schedule = make_schedule(config_optim, total_steps)
    groups = parameter_groups(config_optim, params_shapes, mup_ratio)
    shapes = meta.unbox(params_shapes)

    def per_leaf(value):
        return traverse_util.path_aware_map(lambda keys, _: value(groups["/".join(keys)]), shapes)

    direction, step = [_direction(config_optim, per_leaf)], []
    if mup_ratio != 1.0:
        direction.append(_scale_leaves(per_leaf(lambda group: group.mup)))
    if config_optim.weight_decay:
        decayed = per_leaf(lambda group: group.decayed)
        step.append(optax.add_decayed_weights(config_optim.weight_decay, mask=decayed))
    step.append(optax.scale_by_learning_rate(schedule))
    if any(group.multiplier != 1.0 for group in groups.values()):
        step.append(_scale_leaves(per_leaf(lambda group: group.multiplier)))
    rule = optax.chain(*direction, optax.chain(*step))
    if config_optim.name == "schedule_free_adamw":
        # optax calls this schedule with a count that starts from 1, the inner one from 0.
        rule = optax.contrib.schedule_free(
            rule, lambda count: schedule(count - 1), b1=config_optim.b1
        )
    transformation = optax.partition(
        {"trained": optax.chain(_clip(config_optim.clip_norm), rule), "frozen": _zero_updates()},
        per_leaf(lambda group: "frozen" if group.frozen else "trained"),
    )
    return transformation, schedule


def make_schedule(config_optim, total_steps):
    """Learning rate as a function of the zero-based step, from `config.optim.schedule`.

    With end E (`decay_steps`, or total_steps if 0), warm-up W (the larger of `_warmup_steps` and
    `warmup_fraction` of E), peak p and f = `final_fraction`: p (step + 1) / (W + 1) for step < W,
    so that no step has rate 0; then `constant` p; `cosine` and `linear` from p at step W to f p at
    step E; `wsd` p, and over the last `decay_fraction` of E linearly to f p. From E on f p.
    """
    config_optim = make(OptimConfig, config_optim)
    peak, shape = config_optim.learning_rate, config_optim.schedule
    if total_steps < 1:
        raise UsageError(f"config.steps={total_steps}: must be at least 1")
    end = shape.decay_steps or total_steps
    end_name = "config.optim.schedule.decay_steps" if shape.decay_steps else "config.steps"
    warmup_steps = _warmup_steps(shape, total_steps)
    if warmup_steps > end:
        raise UsageError(
            f"config.optim.schedule.warmup_steps={shape.warmup_steps}: must be at most "
            f"{end_name}={end}"
        )
    warmup = max(warmup_steps, round(shape.warmup_fraction * end))
    decay = _wsd_decay_steps(shape, end)
    if decay and warmup + decay > end:
        raise UsageError(
            f"config.optim.schedule: {warmup} steps of warm-up "
            f"(warmup_steps={shape.warmup_steps}, warmup_fraction={shape.warmup_fraction}) "
            f"and {decay} steps of decay (decay_fraction={shape.decay_fraction}) are more "
            f"than {end_name}={end}"
        )
    final, after_warmup = shape.final_fraction, max(1, end - warmup)
    schedules, boundaries = [], []
    if warmup:
        schedules.append(optax.linear_schedule(peak / (warmup + 1), peak, warmup))
        boundaries.append(warmup)
    if shape.kind == "constant":
        schedules.append(optax.constant_schedule(peak))
    elif shape.kind == "cosine":
        schedules.append(optax.cosine_decay_schedule(peak, after_warmup, alpha=final))
    elif shape.kind == "linear":
        schedules.append(optax.linear_schedule(peak, peak * final, after_warmup))
    else:
        schedules.append(optax.constant_schedule(peak))
        boundaries.append(end - decay)
        schedules.append(optax.linear_schedule(peak, peak * final, decay))
    return optax.join_schedules(schedules, boundaries)


def _warmup_steps(shape, total_steps):
    """`warmup_steps`, or a tenth of the run (at least one step) if these do not fit into it."""
    longest = total_steps
    if not shape.decay_steps:
        longest -= _wsd_decay_steps(shape, total_steps)
    if shape.warmup_steps <= longest:
        return shape.warmup_steps
    return min(longest, max(1, total_steps // 10))


def _wsd_decay_steps(shape, end):
    """Number of decay steps of a `wsd` schedule that ends at step `end`; 0 for other kinds."""
    return max(1, round(shape.decay_fraction * end)) if shape.kind == "wsd" else 0


@functools.cache  # once a process
def _warn_about_schedule(schedule, total_steps):
    warmup = _warmup_steps(schedule, total_steps)
    if warmup != schedule.warmup_steps:
        _log.warning(
            "config.optim.schedule.warmup_steps=%d does not fit into the run of %d steps: warming"
            " up for %d",
            schedule.warmup_steps,
            total_steps,
            warmup,
        )
    if schedule.decay_steps > total_steps:  # right for a run that is to be extended
        _log.warning(
            "config.optim.schedule.decay_steps=%d is past the last step, config.steps=%d: the "
            "learning rate will not reach its final value",
            schedule.decay_steps,
            total_steps,
        )


def parameter_groups(config_optim, params_shapes, mup_ratio=1.0):
    """{path: `Group`}. `frozen` overrides other patterns; the first matching lr multiplier wins."""
    paths = param_paths(params_shapes)
    frozen = _matching("frozen", config_optim.frozen, paths)
    decayed = _matching("decay", config_optim.decay, paths)
    multipliers = {}
    for i, (pattern, factor) in enumerate(config_optim.lr_multipliers):
        for path in _matching(f"lr_multipliers[{i}]", pattern, paths):
            multipliers.setdefault(path, (float(factor), pattern))
    if paths and len(frozen) == len(paths):
        raise UsageError(
            f"config.optim.frozen={config_optim.frozen!r} freezes every parameter, so nothing "
            "would be trained"
        )
    groups = {}
    for path, leaf in paths.items():
        is_frozen = path in frozen
        factor, pattern = multipliers.get(path, (1.0, ""))
        groups[path] = Group(
            frozen=is_frozen,
            decayed=not is_frozen and path in decayed and config_optim.weight_decay > 0,
            multiplier=1.0 if is_frozen else factor,
            pattern="" if is_frozen else pattern,
            muon=not is_frozen
            and config_optim.name == "muon"
            and _is_hidden_matrix(path, leaf.shape),
            mup=mup.rate_factor(path, mup_ratio),
        )
    return groups


def describe_groups(config_optim, params_shapes, mup_ratio=1.0):
    """Table for the log: the number of tensors and parameters in each group."""
    paths = param_paths(params_shapes)
    groups = parameter_groups(config_optim, params_shapes, mup_ratio)
    rows = []

    def add(name, chosen):
        sizes = [math.prod(paths[path].shape) for path, group in groups.items() if chosen(group)]
        rows.append((name, len(sizes), sum(sizes)))

    add(config_optim.name, lambda group: True)
    add(f"decayed by lr * {config_optim.weight_decay:g}", lambda group: group.decayed)
    add("not decayed", lambda group: not (group.decayed or group.frozen))
    add("frozen", lambda group: group.frozen)
    if config_optim.name == "muon":
        add("orthogonalised", lambda group: group.muon)
    if mup_ratio != 1.0:
        add(f"lr * {mup_ratio:g} by muP", lambda group: group.mup != 1.0)
    for pattern, factor in config_optim.lr_multipliers:
        add(f"lr * {factor:g}: {pattern}", lambda group, pattern=pattern: group.pattern == pattern)
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(
        f"{name:<{width}}  {tensors:>5} tensors  {count:>14,} parameters"
        for name, tensors, count in rows
    )


def grad_norm(opt_state):
    """Global norm, before clipping, of the last gradient; f32[]."""
    return _find_state(opt_state, GradNormState).norm


def keeps_averages(optimizer_name):
    """Whether evaluation parameters are computed from the optimiser's state."""
    return optimizer_name == "schedule_free_adamw"


def eval_params(optimizer_name, opt_state, params):
    """The parameters to evaluate, sample and export with.

    `schedule_free_adamw` trains at y, between the base iterate z and the average x, and is
    evaluated at x = (y - (1 - b1) z) / b1 (Defazio et al. 2024, arXiv 2405.15682). Other optimisers
    evaluate at the trained parameters, as all do for frozen ones.
    """
    if not keeps_averages(optimizer_name):
        return params
    state = _find_state(opt_state, optax.contrib.ScheduleFreeState)

    def is_frozen(z):
        return isinstance(z, optax.MaskedNode)

    return jax.tree.map(
        lambda z, y: y if is_frozen(z) else average(y, z, state.b1), state.z, params,
        is_leaf=is_frozen,
    )  # fmt: skip


def stored_averages(paths):
    """{path of a parameter: (path of its z, path of b1)} in a stored `TrainState`.

    From these `average` computes the evaluation parameters. {} if the optimiser keeps no averages.

    Args:
      paths: of all leaves, as tuples of strings. A parameter's path starts below "params".
    """
    tops = [path[:-1] for path in paths if path[0] == "opt_state" and path[-1] == "b1"]
    return {
        path[len(top) + 1 :]: (path, (*top, "b1"))
        for top in tops
        for path in paths
        if (*top, "weight_sum") in paths and path[: len(top) + 1] == (*top, "z")
    }


def average(y, z, b1):
    """The average x of a parameter that is trained at y, with base iterate z."""
    return ((y - (1.0 - b1) * z) / b1).astype(y.dtype)


def _direction(config, per_leaf):
    """The transformation of an optimiser, without decay and learning rate."""
    if config.name == "lion":
        return optax.scale_by_lion(b1=config.b1, b2=config.b2)
    if config.name == "sgd":
        return optax.trace(decay=config.momentum) if config.momentum else optax.identity()
    if config.name == "schedule_free_adamw":
        # Adam without its first moment, which `optax.contrib.schedule_free` replaces.
        return optax.scale_by_rms(
            decay=config.b2, eps=config.eps, eps_in_sqrt=False, bias_correction=True
        )
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.name == "adamw":
        return adam

    def matrices(updates):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    muon = optax.contrib.scale_by_muon(
        beta=config.momentum, eps=config.eps, weight_dimension_numbers=matrices
    )
    return optax.partition(
        {"muon": optax.chain(muon, optax.stateless(_muon_scale)), "adam": adam},
        per_leaf(lambda group: "muon" if group.muon else "adam"),
    )


def _muon_scale(updates, _):
    return jax.tree.map(lambda u: u * (MUON_UPDATE_RMS * max(u.shape[-2:]) ** 0.5), updates)


def _is_hidden_matrix(path, shape):
    """Whether Muon trains this parameter; a matrix with one row or column counts as a vector."""
    *modules, leaf = path.split("/")
    return leaf == "kernel" and min(shape[-2:]) > 1 and not NOT_HIDDEN.intersection(modules)


def _clip(max_norm):
    """Records the global norm; scales the gradient down to max_norm unless that is 0."""
    clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()

    def update(updates, state, params=None):
        norm = optax.tree.norm(updates).astype(jnp.float32)
        clipped, _ = clip.update(updates, optax.EmptyState(), params)
        return clipped, GradNormState(norm)

    return optax.GradientTransformation(lambda _: GradNormState(jnp.zeros((), jnp.float32)), update)


def _scale_leaves(factors):
    def update(updates, _):
        # A leaf of `factors` may correspond to a masked, empty subtree.
        return jax.tree.map(
            lambda factor, subtree: jax.tree.map(lambda u: u * factor, subtree), factors, updates
        )

    return optax.stateless(update)


def _zero_updates():
    """Updates of -0.0, which keep every bit: p = -0.0 plus 0.0 is 0.0."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: jnp.full_like(u, -0.0), updates)
    )


def _checked(config_optim):
    """The block `config.optim`; a UsageError where two settings contradict each other."""
    c = make(OptimConfig, config_optim)
    if c.name == "schedule_free_adamw":
        if not c.b1:
            raise UsageError("config.optim.b1=0.0: must be more than 0 for schedule_free_adamw")
        if c.schedule.kind != "constant":
            raise UsageError(
                f"config.optim.schedule.kind={c.schedule.kind!r}: must be 'constant' for "
                "schedule_free_adamw (its averaging replaces the decay; warm-up is allowed)"
            )
    return c


def _matching(key, pattern, paths):
    """The set of paths that `pattern` matches."""
    if not pattern:
        return set()
    regex = re.compile(pattern)
    matched = {path for path in paths if regex.fullmatch(path)}
    if not matched:
        all_paths = list(paths)
        partly = any(regex.search(path) for path in paths)
        hint = f"; a pattern must match the whole path, such as '.*{pattern}.*'" if partly else ""
        raise UsageError(
            f"config.optim.{key}={pattern!r} matches no parameter; there are "
            f"{len(all_paths)}, such as "
            + ", ".join(all_paths[:: max(1, len(all_paths) // 4)][:4])
            + hint
        )
    return matched


def _find_state(opt_state, kind):
    """The one node of type `kind` in an optimiser state."""

    def is_kind(node):
        return isinstance(node, kind)

    return next(filter(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))
