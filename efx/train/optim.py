"""Optimisers, learning-rate schedules and parameter groups, built on optax.

- A parameter is named by its path, such as "block_0/attention/query/kernel". Patterns of the config
  (`decay`, `frozen`, `lr_multipliers`) are regular expressions that must match a whole path:
  "block_1/.*" is not block 10. An empty pattern matches nothing; a pattern without a match is an
  error. Rank decides nothing, because norm scales of scanned layers are 2-D.
- Weight decay is decoupled for every optimiser (Loshchilov and Hutter 2019, arXiv 1711.05101, as in
  PyTorch): the update of a decayed parameter p is -lr(step) * m * (direction + wd * p), with its lr
  multiplier m.
- Matrices are stored as [..., in, out] under the name "kernel"; leading axes are stacks (scanned
  layers, experts). Muon orthogonalises each matrix of a stack separately.
- Gradients of frozen parameters count in neither the norm nor the clipping, so the compiler may
  drop the work of computing them.
"""

import re
from typing import NamedTuple

import jax
import optax
from flax import traverse_util
from flax.core import meta

from efx.config.run import OptimConfig
from efx.config.schema import make
from efx.errors import UsageError
from efx.layers import mup
from efx.routing.parameters import params_pattern

# Muon's orthogonal updates are scaled by 0.2 sqrt(max(in, out)), the size of AdamW's (arXiv
# 2502.16982, section 2.2), so that one learning rate and one decay serve both.
MUON_UPDATE_RMS = 0.2
_GRAD_NORM = "grad_norm"  # name of a value in the optimiser's state


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
    c = make(OptimConfig, config_optim)
    schedule = make_schedule(c, total_steps)
    groups = parameter_groups(c, params_shapes, mup_ratio)
    shapes = meta.unbox(params_shapes)

    def per_leaf(value):
        return traverse_util.path_aware_map(lambda keys, _: value(groups["/".join(keys)]), shapes)

    rule = optax.chain(
        _direction(c, per_leaf),
        _scale_leaves(per_leaf(lambda group: group.mup)),
        optax.add_decayed_weights(c.weight_decay, per_leaf(lambda group: group.decayed)),
        optax.scale_by_learning_rate(schedule),
        _scale_leaves(per_leaf(lambda group: group.multiplier)),
    )
    trained = optax.chain(
        optax.snapshot(_GRAD_NORM, optax.tree.norm),
        optax.clip_by_global_norm(c.clip_norm) if c.clip_norm else optax.identity(),
        rule,
    )
    labels = per_leaf(lambda group: "frozen" if group.frozen else "trained")
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels), schedule


def grad_norm(opt_state):
    """Global norm, before clipping, of the last gradient of the trained parameters; f32[]."""
    return optax.tree.get(opt_state, _GRAD_NORM)


# ---- schedules -----------------------------------------------------------------------------------


def make_schedule(config_optim, total_steps):
    """Learning rate as a function of the zero-based step, from `config.optim.schedule`.

    With end E (`decay_steps`, or total_steps if 0), warm-up W (`_warmup_steps`), peak p and
    f = `final_fraction`: p (step + 1) / (W + 1) for step < W, so that no step has rate 0; then
    `constant` p; `cosine` and `linear` from p at step W to f p at step E; `wsd` p, and over the
    last `decay_fraction` of E linearly to f p. From E on f p (`constant`: p).
    """
    c = make(OptimConfig, config_optim)
    peak, shape = c.learning_rate, c.schedule
    final, end = peak * shape.final_fraction, shape.decay_steps or total_steps
    warmup, decay = _warmup_steps(shape, total_steps), _wsd_decay_steps(shape, end)
    if warmup + decay > end:
        name = "config.optim.schedule.decay_steps" if shape.decay_steps else "config.steps"
        raise UsageError(
            f"config.optim.schedule.warmup_steps={shape.warmup_steps}: {warmup} steps of warm-up "
            f"(warmup_fraction={shape.warmup_fraction}) and {decay} of decay "
            f"(decay_fraction={shape.decay_fraction}) are more than {name}={end}; use fewer"
        )
    after_warmup = max(1, end - warmup)
    if shape.kind == "cosine":
        main = optax.cosine_decay_schedule(peak, after_warmup, alpha=shape.final_fraction)
    elif shape.kind == "linear":
        main = optax.linear_schedule(peak, final, after_warmup)
    else:
        main = optax.constant_schedule(peak)
    schedules, boundaries = [main], []
    if warmup:
        schedules.insert(0, optax.linear_schedule(peak / (warmup + 1), peak, warmup))
        boundaries.append(warmup)
    if decay:
        schedules.append(optax.linear_schedule(peak, final, decay))
        boundaries.append(end - decay)
    return optax.join_schedules(schedules, boundaries)


def _warmup_steps(shape, total_steps):
    """The larger of `warmup_steps` and `warmup_fraction`. A tenth of the run (at least one step)
    replaces `warmup_steps` that do not fit into it."""
    end, warmup = shape.decay_steps or total_steps, shape.warmup_steps
    longest = end - _wsd_decay_steps(shape, end)
    if warmup > longest and not shape.decay_steps:
        warmup = min(longest, max(1, total_steps // 10))
    return max(warmup, round(shape.warmup_fraction * end))


def _wsd_decay_steps(shape, end):
    """Number of decay steps of a `wsd` schedule that ends at step `end`; 0 for other kinds."""
    return max(1, round(shape.decay_fraction * end)) if shape.kind == "wsd" else 0


# ---- parameter groups ----------------------------------------------------------------------------


class Group(NamedTuple):
    """How one parameter is trained."""

    frozen: bool
    decayed: bool
    multiplier: float  # of the learning rate
    muon: bool
    mup: float  # factor of muP on the update, excluding weight decay


def param_paths(params):
    """{path: leaf} of a parameter tree; boxed leaves are unboxed."""
    return traverse_util.flatten_dict(meta.unbox(params), sep="/")


def parameter_groups(config_optim, params_shapes, mup_ratio=1.0):
    """{path: `Group`}. `frozen` overrides other patterns; the first matching lr multiplier wins."""
    c, paths = config_optim, param_paths(params_shapes)
    frozen = _matching("frozen", c.frozen, paths)
    decayed = _matching("decay", c.decay, paths)
    multipliers = {}
    for i, (pattern, factor) in enumerate(c.lr_multipliers):
        for path in _matching(f"lr_multipliers[{i}]", pattern, paths):
            multipliers.setdefault(path, float(factor))
    if paths and len(frozen) == len(paths):
        raise UsageError(
            f"config.optim.frozen={c.frozen!r}: freezes every parameter, so nothing would be "
            "trained; use a pattern that matches fewer"
        )
    for path in filter(re.compile(params_pattern("router", "scorer")).fullmatch, paths):
        multipliers.setdefault(path, c.router_rate)
    groups = {}
    for path, leaf in paths.items():
        is_frozen = path in frozen
        groups[path] = Group(
            frozen=is_frozen,
            decayed=not is_frozen and path in decayed and c.weight_decay > 0,
            multiplier=1.0 if is_frozen else multipliers.get(path, 1.0),
            muon=not is_frozen and c.name == "muon" and _is_hidden_matrix(path, leaf.shape),
            mup=mup.rate_factor(path, mup_ratio),
        )
    return groups


def _matching(key, pattern, paths):
    """The set of paths that `pattern` matches."""
    regex = re.compile(pattern)
    matched = {path for path in paths if pattern and regex.fullmatch(path)}
    if pattern and not matched:
        is_partial = any(map(regex.search, paths))
        hint = f"; a pattern must match a whole path, as '.*{pattern}.*' does" * is_partial
        examples = ", ".join(list(paths)[:: max(1, len(paths) // 4)][:4])
        raise UsageError(
            f"config.optim.{key}={pattern!r}: matches no parameter; there are {len(paths)}, such "
            f"as {examples}{hint}"
        )
    return matched


def _is_hidden_matrix(path, shape):
    """Whether Muon trains this parameter: a "kernel", but no output layer, as in the authors' Muon.

    AdamW trains the others. A matrix with one row or column counts as a vector.
    """
    *modules, leaf = path.split("/")
    return leaf == "kernel" and min(shape[-2:]) > 1 and "head" not in modules


# ---- update rules --------------------------------------------------------------------------------


def _direction(c, per_leaf):
    """The transformation of an optimiser, without decay and learning rate."""
    if c.name == "lion":
        return optax.scale_by_lion(b1=c.b1, b2=c.b2)
    if c.name == "sgd":
        return optax.trace(decay=c.momentum) if c.momentum else optax.identity()
    adam = optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps)
    if c.name == "adamw":
        return adam

    def last_two_axes(updates):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    def rescale(updates, _):
        return jax.tree.map(lambda u: u * (MUON_UPDATE_RMS * max(u.shape[-2:]) ** 0.5), updates)

    muon = optax.contrib.scale_by_muon(
        beta=c.momentum, eps=c.eps, weight_dimension_numbers=last_two_axes
    )
    return optax.partition(
        {"muon": optax.chain(muon, optax.stateless(rescale)), "adam": adam},
        per_leaf(lambda group: "muon" if group.muon else "adam"),
    )


def _scale_leaves(factors):
    def scale_subtree(factor, subtree):  # a leaf, or the empty tree of a masked leaf
        return jax.tree.map(lambda u: u * factor, subtree)

    return optax.stateless(lambda updates, _: jax.tree.map(scale_subtree, factors, updates))
