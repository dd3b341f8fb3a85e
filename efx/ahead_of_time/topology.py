"""Accelerators that are described and not there: `v5e:16x16`, `h100:1x8x8`.

The compiler for TPUs is in libtpu and that for NVIDIA GPUs in JAX's CUDA plugin. Neither needs the
device, only a description of it.
"""

import dataclasses
import math
import os
import re
from importlib.util import find_spec

import jax
from jax.experimental import topologies

from efx.errors import UsageError, extra, nearest

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a program on one accelerator has, by the vendor's data sheet.

    Attributes:
      kind: "tpu" or "cuda", the plugin that compiles for it.
      memory: bytes that a program may use. TPU: what the compiler allows, which is less than the
        data sheet says; GPU: all, see `REFUSED_BY_COMPILER`.
      bandwidth: bytes/s of that memory.
      link: bytes/s that leave the chip over all of its links to others of its slice or host.
      network: the same to other hosts, for GPUs.
      clock: cycles/s of a TPU, by which the compiler's cycles become time: the peak of the data
        sheet over the products that its matrix units start in a cycle.
    """

    kind: str
    memory: float
    bandwidth: float
    link: float
    network: float = 0.0
    clock: float = 0.0

    def seconds(self, collective):
        """Of an `hlo.Collective` in a step, with all links at their full speed."""
        # A sum of all devices' arrays is passed around twice, everything else once. That one of n
        # members keeps the n-th part to itself is left out.
        sent = (1 + (collective.kind == "all-reduce")) * collective.bytes
        if collective.hosts == 1:
            return sent / self.link
        # What all members on a host need comes to it once, over the networks of all of them; what
        # each sends to another alone, over its own.
        alike = collective.kind in ("all-gather", "all-reduce", "reduce-scatter")
        ways = collective.members if alike else 1
        return max(sent / ways / self.network, sent / self.link)


CHIPS = {
    "v5e": Chip("tpu", 15.75 * GIB, 819e9, 200e9, clock=1.5e9),
    "v5p": Chip("tpu", 95.74 * GIB, 2765e9, 600e9, clock=1.75e9),
    "v6e": Chip("tpu", 31.25 * GIB, 1640e9, 448e9, clock=1.75e9),
    "h100": Chip("cuda", 84_942_979_072, 3352e9, 450e9, network=50e9),
    "h200": Chip("cuda", 151_397_597_184, 4800e9, 450e9, network=50e9),
}
# The part of a GPU's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
GPU_FRACTION = 0.75

# What XLA wants to know of a GPU that it compiles for, as a text of its protocol buffer
# `GpuTargetConfigProto`. The two differ in memory alone.
_HOPPER = """
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  pcie_bandwidth: 34359738368
  l2_cache_size: 52428800
  ecc_enabled: true
  device_address_bits: 64
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""
_GPU_NAMES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200 141GB HBM3e"}
_EXAMPLES = "v5e:16x16, v5p:4x4x4, v6e:16x16, h100:1x8x8 (slices x hosts x GPUs), h200:1x1x8"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Attributes:
    name: as given. chip: see `Chip`. devices: described ones, in JAX's order. hosts: of GPUs.
    """

    name: str
    chip: Chip
    devices: tuple
    hosts: int

    def hosts_of(self, mesh):
        """[the host of each device of a mesh of these devices, in its order], 0 for all TPUs,
        whose links do not know of hosts."""
        number = {device: i for i, device in enumerate(self.devices)}
        on_one = len(self.devices) // max(self.hosts, 1)
        return [number[device] // on_one for device in mesh.devices.flat]


def parse(name):
    """(name of a chip, sizes); UsageError for what is no topology."""
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
    if not match:
        raise UsageError(f"--topology={name}: expected CHIP:SIZES, such as {_EXAMPLES}")
    chip, sizes = match[1], tuple(map(int, match[2].split("x")))
    if chip not in CHIPS:
        raise UsageError(
            f"--topology={name}: {chip} is not one of {', '.join(CHIPS)}{nearest(chip, CHIPS)}"
        )
    if CHIPS[chip].kind == "cuda" and len(sizes) != 3:
        raise UsageError(
            f"--topology={name}: expected slices x hosts x GPUs a host, as in {chip}:1x8x8"
        )
    return chip, sizes


def describe(name):
    """The `Topology` of a name; UsageError if there is none, or its compiler is not installed."""
    chip_name, sizes = parse(name)
    chip = CHIPS[chip_name]
    try:
        if chip.kind == "tpu":
            found = _tpus(name)
        else:
            found = _gpus(chip_name, chip, sizes)
    except UsageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--topology={name}: {reason}; use sizes such as {_EXAMPLES}") from error
    hosts = math.prod(sizes[:2]) if chip.kind == "cuda" else 0
    return Topology(name, chip, tuple(found.devices), hosts)


def _tpus(name):
    if find_spec("libtpu") is None:
        raise UsageError(
            f"--topology={name}: the compiler for TPUs is not installed; install {extra('tpu')}"
        )
    # Without these libtpu looks for the machine's TPU and for the cloud's description of it, and
    # lets no second process in, as if there were a device to share.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-16"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def _gpus(chip_name, chip, sizes):
    target = _HOPPER.format(
        name=_GPU_NAMES[chip_name], memory=int(chip.memory), bandwidth=int(chip.bandwidth)
    )
    text = "x".join(map(str, sizes))
    jax.local_devices()  # the plugins are registered with the first use of a device
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=text)
    except NotImplementedError as error:
        raise UsageError(
            f"--topology={chip_name}:{text}: JAX's plugin for NVIDIA GPUs is not installed; "
            f"install {extra('cuda12')}"
        ) from error
