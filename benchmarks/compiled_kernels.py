"""Attention kernels compiled, forward and backward, for accelerators that are not there.

    python -m benchmarks.compiled_kernels                      for all whose compiler is installed
    python -m benchmarks.compiled_kernels --targets v5e,h100   for some of them
    python -m benchmarks.compiled_kernels --kernels splash     some of the kernels

Each kernel is compiled for each accelerator of its kind with a few masks, widths of heads and
dtypes; the table counts what compiles and what the kernel says that it cannot do. What it takes and
the compiler does not is printed below, and gives status 1. TPUs need the extra `tpu`, GPUs `cuda12`
or `cuda13`. Nothing runs on a device, so nothing is said of what comes out.
"""

import argparse
import os
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import common
from benchmarks.accelerator_parts import LENGTH, MASKS, TOLERANCE, with_mask
from efx import aot
from efx.errors import UsageError, nearest
from efx.layers.kernels import KERNELS
from efx.parallel import sharding

TARGETS = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "h100": "h100:1x1x1",
    "h200": "h200:1x1x1",
}
CASES = [
    (mask, width, dtype)
    for mask, width in (
        ("causal", 64),
        ("causal", 128),
        ("gaps, documents", 64),
        ("window, documents, grouped", 64),
        (MASKS[-1], 64),
    )
    for dtype in TOLERANCE
]


@common.command
def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, with commas")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="names, with commas")
    parser.add_argument("--masks", default="", help="with this in their name (default: all)")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if args.masks in case[0]]
    targets = _chosen("--targets", args.targets, TARGETS)
    names = _chosen("--kernels", args.kernels, KERNELS)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows, problems, missing = [], [], []
    for target in targets:
        try:
            device = aot.describe(TARGETS[target])[0][0]
        except UsageError as error:
            missing.append(str(error))
            continue
        for name in names:
            if KERNELS[name].platform != {"tpu": "tpu"}.get(device.platform, "gpu"):
                continue
            compiled, refused = 0, {}
            for case in cases:
                title = f"{target} {name}: {', '.join(map(str, case))}"
                try:
                    _compile(device, name, *case)
                    compiled += 1
                except UsageError as error:
                    reason = str(error).partition(": ")[2].partition(";")[0]
                    refused[reason] = refused.get(reason, 0) + 1
                except Exception as error:
                    said = " ".join(str(error).split())[:300]
                    problems.append(f"{title}: {type(error).__name__}: {said}")
            failed = len(cases) - compiled - sum(refused.values())
            rows.append((f"{target} {name}", compiled, sum(refused.values()), failed))
            print(f"{target} {name}: {compiled} of {len(cases)} compiled", flush=True)
            for reason, count in refused.items():
                print(f"    {count} refused: {name} {reason}", flush=True)
    for line in dict.fromkeys(missing):
        print(f"not compiled: {line}")
    if not rows:
        raise UsageError("there is nothing to compile, or nothing to compile it with")
    print(common.table((f"jax {jax.__version__}", "compiled", "refused", "FAILED"), *rows))
    print("\n".join(problems))
    return 1 if problems else 0


def _chosen(flag, text, known):
    names = text.split(",")
    for name in names:
        if name not in known:
            raise UsageError(
                f"{flag}={text}: {name!r} is none of {', '.join(known)}" + nearest(name, known)
            )
    return names


def _compile(device, kernel, mask, width, dtype):
    function, arrays = with_mask(mask, length=LENGTH, head_dim=width, window=100)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), [device])
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=whole) for y in arrays]
    with sharding.use(mesh, sharding.DEFAULT_RULES), jax.default_device(device):
        function.lower(kernel, dtype, shapes).compile()


if __name__ == "__main__":
    sys.exit(main())
