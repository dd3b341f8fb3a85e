"""How long a training step takes to compile, and to run, with XLA's flags of the environment.

    python -m benchmarks.compiling [--layers=6] [--json=FILE]
    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.compiling
    python -m benchmarks.compiling --smoke      tiny sizes: no measurement

Of a dense model and its Mixture-of-Depths twin, 350M parameters if they had 24 layers, one after
the other, without the cache of compiled programs. On a GPU XLA tries kernels for each shape on the
device, of which layers have the same ones: with fewer of them a program takes less than in
proportion. `python -m benchmarks.accelerator --parts compiling` runs this with several flags.
"""

import argparse
import json
import os
import pathlib
import sys

import jax

from benchmarks import accelerator_parts, common
from efx.configs import mod
from efx.studies.step_time import Stepper, time_steps


@common.command
def main(argv=None):
    args = _arguments(argv)
    jax.config.update("jax_enable_compilation_cache", False)
    setup = accelerator_parts.Setup(args.smoke, pathlib.Path(), pathlib.Path(), 0.0)
    found = {}
    for name, variant in (("dense", "dense"), ("MoD", "")):
        depth = {"model.depth": args.layers}
        config = accelerator_parts.sized(setup, mod.get_config(variant), "350M", depth)
        stepper = Stepper(config, setup.vocab())
        times = time_steps({name: stepper}, setup.rounds)[name]
        found[name] = {"seconds": stepper.compile_seconds, "ms": 1e3 * times.median}
        del stepper  # and its memory
    device = jax.devices()[0].device_kind
    print(f"{args.layers} layers, {device}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}")
    rows = [(name, f"{row['seconds']:.1f}", f"{row['ms']:.1f}") for name, row in found.items()]
    print(common.table(("", "compiling, s", "a step, ms"), *rows))
    if args.json:
        args.json.write_text(json.dumps(found))


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", type=pathlib.Path, help="a file for the numbers")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    return common.checked(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
