"""The device mesh of a run (`config.mesh`)."""

import math

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from efx.config.schema import as_dict
from efx.errors import UsageError

MESH_AXES = ("data", "fsdp", "tensor", "expert", "sequence")


def make_mesh(mesh_config, devices=None):
    """Return the mesh with the axes of `MESH_AXES`. Neighbouring devices go to the later axes,
    which communicate most.

    Args:
      mesh_config: the block `config.mesh`, or a dict of the sizes. One size may be -1: all
        remaining devices.
      devices: by default all devices of JAX.
    Raises: UsageError if the sizes do not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    settings = as_dict(mesh_config)
    sizes = {name: settings[name] for name in MESH_AXES}
    inferred = [name for name, size in sizes.items() if size == -1]
    if len(inferred) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UsageError(
            f"config.mesh={sizes}: each size must be at least 1, and at most one of them -1"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (fixed != len(devices) and not inferred):
        raise UsageError(
            f"config.mesh={sizes}: needs {'a multiple of ' if inferred else ''}{fixed} "
            f"devices, but there are {len(devices)}"
        )
    if inferred:
        sizes[inferred[0]] = len(devices) // fixed
    # Auto, not Explicit: linen's logical constraints are hints to the partitioner.
    return jax.sharding.Mesh(
        _arranged(devices, sizes),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def _arranged(devices, sizes):
    """Return the devices as an array of these sizes; only the axis `data` spans TPU slices."""
    if devices[0].platform != "tpu":
        # In the order of processes: GPUs and CPUs report no topology.
        return np.array(devices).reshape(tuple(sizes.values()))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if sizes["data"] % slices:
        raise UsageError(
            f"config.mesh={sizes}: data={sizes['data']} must be a multiple of the {slices} TPU "
            "slices"
        )
    inner = (sizes["data"] // slices, *list(sizes.values())[1:])
    options = dict(devices=devices, allow_split_physical_axes=True)
    try:
        if slices == 1:
            return mesh_utils.create_device_mesh(inner, **options)
        outer = (slices, *(1,) * (len(sizes) - 1))
        return mesh_utils.create_hybrid_device_mesh(inner, outer, **options)
    except (ValueError, NotImplementedError, AssertionError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"config.mesh={sizes} does not fit these {len(devices)} devices: {problem}"
        ) from error
