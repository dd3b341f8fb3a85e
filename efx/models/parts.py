"""The parts of a model that can be switched off, and what each of them costs.

A part is a layer, its attention, cross-attention or MLP, a step of a recursion, an expert, a level
of latents with all coarser ones, a learned mask, or the adapters. Switched off, it adds nothing to
the residual stream; a mask is 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx.layers import flops
from efx.layers.attention import Attention
from efx.layers.learned_dropout import AttentionMask, ElementwiseMask, ElementwiseProbsMask
from efx.layers.mlp import MLP
from efx.layers.moe import Experts
from efx.layers.report import label
from efx.layers.soft_experts import SoftMLP
from efx.models.adapters import Adapter
from efx.models.latent import DecoderLevel
from efx.models.stack import Layer
from efx.routing.mod import MoDBlock

ROUTED, ADAPTERS = "routed layers", "adapters"


def _zeros(args, result):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)


def _input(args, result):
    return args[0]


# {class: (kind, method, (arguments, result) -> the result of the method when the part is off)}. A
# module is of the first class that fits.
PARTS = {
    Layer: ("layer", "__call__", _input),
    # A step of a recursion. Off, it selects no token for the next step either.
    MoDBlock: ("layer", "__call__", lambda args, result: (args[0], _zeros(args, result[1]))),
    # The finer state joins nothing that was compressed.
    DecoderLevel: ("level", "__call__", lambda args, result: args[1]),
    Experts: ("expert", "__call__", _zeros),
    (MLP, SoftMLP): ("mlp", "__call__", _zeros),
    Attention: ("attention", "__call__", _zeros),
    (AttentionMask, ElementwiseMask): ("mask", "__call__", _input),
    ElementwiseProbsMask: ("probs mask", "drop_probs", _input),
    Adapter: (ADAPTERS, "__call__", _zeros),
}


def intercept_parts(replace):
    """Context manager in which a part returns replace(path, kind, off, args, compute): `off` as in
    PARTS, `compute` a function without arguments."""
    classes = {}  # {path: class of the part}

    def intercept(next_function, args, kwargs, context):
        path, module = "/".join(context.module.path), type(context.module)
        row = next((row for part, row in PARTS.items() if issubclass(module, part)), None)
        if row is None or context.method_name != row[1]:
            return next_function(*args, **kwargs)
        # The block of a layer has the layer's path and is called by it.
        if classes.setdefault(path, module) is not module:
            return next_function(*args, **kwargs)
        compute = functools.partial(next_function, *args, **kwargs)
        return replace(path, row[0], row[2], args, compute)

    return nn.intercept_methods(intercept)


@dataclasses.dataclass
class Part:
    """A row of the result: modules that are switched off together.

    Attributes:
      off: {path: bool array, False, or [E] with one False for an expert}.
      flops: forward FLOPs on one row.
    """

    name: str
    kind: str
    off: dict
    flops: float


def find_parts(model, length):
    """The `Part`s of a model with unrolled layers, in order of computation."""

    def forward_flops():
        return flops.executed.__wrapped__(model, length)  # the function without its cache

    found = {}

    def record(path, kind, off, args, compute):
        _, results = found.setdefault(path, (kind, []))
        results.append(compute())
        return results[-1]

    with intercept_parts(record):
        total = forward_flops()
    parts, routed, adapters = [], {}, {}
    layers = model.blocks()
    for path, (kind, results) in found.items():
        shapes = iter(results)  # of a recursion several: it computes its blocks several times

        def leave_out(name, kind, off, args, compute, path=path, shapes=shapes):
            if name != path:
                return compute()
            return off(args, next(shapes))

        with intercept_parts(leave_out):
            count = total - forward_flops()
        if kind == "expert":
            number = len(results[0])
            for e, keep_E in enumerate(~np.eye(number, dtype=bool)):
                parts.append(Part(f"{label(path)}/{e}", kind, {path: keep_E}, count / number))
            continue
        part = Part(label(path), kind, {path: np.array(False)}, count)
        if kind == ADAPTERS:
            adapters[path] = part
            continue
        parts.append(part)
        if path in layers and layers[path].routing is not None:
            routed[path] = part
    for name, group in ((ROUTED, routed), (ADAPTERS, adapters)):
        if group:
            off = {path: np.array(False) for path in group}
            parts.append(Part(name, name, off, sum(part.flops for part in group.values())))
    return parts


def switch_parts(on):
    """Context manager in which a part is off where on[path] is False.

    Args:
      on: {path: bool array}, as `Part.off`; may be traced.
    """

    def switch(path, kind, off, args, compute):
        result, is_on = compute(), on[path]
        is_on = is_on.reshape(*is_on.shape, *(1,) * (2 * is_on.ndim))  # of experts [E, 1, 1]
        return jax.tree.map(lambda y, z: jnp.where(is_on, y, z), result, off(args, result))

    return intercept_parts(switch)
