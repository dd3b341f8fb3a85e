"""Collectives that the partitioner does not find by itself."""

import functools
import itertools
import math

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from efx.parallel.sharding import constrain, mesh_axes, num_devices


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x, stored, used):
    """Return a parameter stored by the logical axes `stored`, laid out by `used`.

    Its gradient is laid out by `stored`. A plain constraint would lay it out by `used`: every
    device would sum the whole gradient, not only its shard.
    """
    return constrain(x, *used)


def _reshard_forward(x, stored, used):
    return constrain(x, *used), None


def _reshard_backward(stored, used, _, gradient):
    return (constrain(gradient, *stored),)


reshard.defvjp(_reshard_forward, _reshard_backward)

_EXCHANGED = "exchanged"
saves_exchanged = jax.checkpoint_policies.save_only_these_names(_EXCHANGED)


def exchange(x, before, after):
    """Move x from the logical axes `before` to `after`.

    If one mesh axis moves from one dimension to another, this is an all-to-all, which the
    partitioner does not always find: it then gathers all of x on every device. The policy
    `saves_exchanged` of `jax.checkpoint` saves the result, so that the backward pass does not
    repeat the exchange.
    """
    x, mesh = constrain(x, *before), jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    old, new = mesh_axes(before), mesh_axes(after)
    if old == new:
        return constrain(x, *after)
    move = _find_move(old, new)
    divides = all(
        size % math.lcm(num_devices(mesh, a), num_devices(mesh, b)) == 0
        for size, a, b in zip(x.shape, old, new, strict=True)
    )
    if move is not None and divides:
        axis, source, target = move
        x = jax.shard_map(
            lambda x: jax.lax.all_to_all(
                x, axis, split_axis=target, concat_axis=source, tiled=True
            ),
            in_specs=PartitionSpec(*old),
            out_specs=PartitionSpec(*new),
            check_vma=False,
        )(x)
    return checkpoint_name(constrain(x, *after), _EXCHANGED)


def _find_move(old, new):
    """Return (mesh axis, its old dimension, its new one) if only one axis moves, else None.

    old, new: for each dimension the tuple of its mesh axes.
    """
    for source, target in itertools.permutations(range(len(old)), 2):
        moved = list(old)
        moved[source], moved[target] = old[source][:-1], (*old[target], *old[source][-1:])
        if moved == new:
            return old[source][-1], source, target
    return None
