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
        _arranged(devices, sizes, settings.get("dcn_data", 0)),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def _arranged(devices, sizes, groups):
    """Return the devices as an array of these sizes.

    Args:
      groups: `config.mesh.dcn_data`, the number of groups of devices that a slower network
        connects; only the axis `data` spans them. 0: the number of TPU slices.
    """
    is_tpu = devices[0].platform == "tpu"
    # Of a GPU the slice index is that of its machine. A single slice may have none.
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    groups = groups or (slices if is_tpu else 1)
    if groups == 1 and not is_tpu:
        # In the order of processes: GPUs and CPUs report no topology.
        return np.array(devices).reshape(tuple(sizes.values()))
    if sizes["data"] % groups:
        raise UsageError(
            f"config.mesh={sizes}: data={sizes['data']} must be a multiple of the {groups} groups "
            "of devices on the slower network (config.mesh.dcn_data; TPU slices)"
        )
    inner = (sizes["data"] // groups, *list(sizes.values())[1:])
    options = dict(devices=devices, allow_split_physical_axes=True)
    try:
        if groups == slices == 1:
            return mesh_utils.create_device_mesh(inner, **options)
        outer = (groups, *(1,) * (len(sizes) - 1))
        # Without slices the groups are processes.
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, process_is_granule=slices == 1, **options
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"config.mesh={sizes} with config.mesh.dcn_data={groups} does not fit these "
            f"{len(devices)} devices: {problem}"
        ) from error
