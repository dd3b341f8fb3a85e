"""What a GPU or a TPU does with efx: one table, one CSV file.

    python -m benchmarks.accelerator                     every part
    python -m benchmarks.accelerator --parts dense mod   some of them
    python -m benchmarks.accelerator --smoke             tiny sizes on any device

Parts: matmul (the peak that can be reached), attention (each kernel against plain XLA in float32),
dense (124M and 350M), mod (350M and 1.3B over their dense twins), moe, latent (context 8192),
decode (over transformers, with the extra `interop`), characters (nanoGPT's recipe on --text).
Training steps are in bfloat16. A part that fails is a row that says why, and the others go on. The
table is written to --out, by default results/accelerator-<device>.csv.
"""

import argparse
import functools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from benchmarks import common, decode
from efx import run_dir
from efx.config.load import load_config
from efx.config.names import apply
from efx.configs.common import ACCELERATOR
from efx.errors import UsageError, first_line
from efx.layers import attend, flops
from efx.layers.kernels import KERNELS
from efx.logging import read_metrics, tables

VOCAB = 32_000
SIZES = {
    "124M": dict(width=768, depth=12, heads=12, context=1024, batch=32),
    "350M": dict(width=1024, depth=24, heads=16, context=2048, batch=16),
    "1.3B": dict(width=2048, depth=24, heads=16, context=2048, batch=8),
    "smoke": dict(width=32, depth=4, heads=4, context=32, batch=2),
}
MOE = {"model.mlp.kind": "moe", "model.mlp.moe.num_experts": 8, "model.mlp.moe.top_k": 2}
TOLERANCE = 2e-2  # of bfloat16 attention; a mask that is off by one token is far above


def matmul(args):
    """Products of square matrices, ten in a chain."""
    for size in (256,) if args.smoke else (4096, 8192, 16384):
        keys = jax.random.split(jax.random.key(0))
        x, w = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)

        @jax.jit
        def chain(x, w):
            for _ in range(10):
                x = x @ w
            return x

        run = {"": lambda turn, x=x, w=w * size**-0.5: jax.block_until_ready(chain(x, w))}
        seconds = common.take_turns(run, args.rounds)[""].median / 10
        speed = flops.matmul(size, size, size) / seconds
        yield f"product of {size}", {"ms": 1e3 * seconds, "tflops_per_s": speed / 1e12} | mfu(speed)


def mfu(flops_per_second):
    """Return {"mfu": x} where the peak of the device is known."""
    peak = flops.device_peak("bfloat16")
    return {"mfu": flops_per_second / (peak * jax.device_count())} if peak else {}


def attention(args):
    """Values and gradients of each kernel, with masks of several kinds, against float32 XLA."""
    length, width = (40, 16) if args.smoke else (1000, 64)
    draw = np.random.default_rng(0)
    arrays = [
        jnp.asarray(draw.standard_normal((2, length, 8, width), np.float32)) for _ in range(4)
    ]
    segments = np.ones((2, length), np.int32)
    segments[:, length // 3 :] = 2
    gaps = np.cumsum(draw.integers(1, 4, (2, length)), axis=1).astype(np.int32)
    plain = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))
    restarted = np.where(segments == 2, plain - length // 3, plain)
    masks = {
        "causal": {"positions_BT": plain},
        "window": {"positions_BT": plain, "window": length // 10},
        "gaps": {"positions_BT": gaps, "has_gaps": True},
        "documents": {"positions_BT": restarted, "segment_ids_BT": segments},
    }

    def run(kernel, dtype, options):
        q, k, v, d = (x.astype(dtype) for x in arrays)
        options = {"scale": width**-0.5, "window": 0, "softcap": 0.0, "has_gaps": False,
                   "segment_ids_BT": None} | options  # fmt: skip
        options |= {name: jnp.asarray(x) for name, x in options.items() if hasattr(x, "shape")}
        output, pullback = jax.vjp(
            functools.partial(attend.attend, kernel=kernel, **options), q, k, v
        )
        return [np.asarray(x, np.float64) for x in (output, *pullback(d))]

    kernels = [n for n, kernel in KERNELS.items() if kernel.platform == jax.default_backend()]
    for mask, options in masks.items():
        with jax.default_matmul_precision("highest"):
            expected = run("xla", jnp.float32, options)
        for kernel in ["xla", *kernels]:
            try:
                found = run(kernel, jnp.bfloat16, options)
            except Exception as error:
                yield f"attention, {mask}, {kernel}", {"note": first_line(error)}
                continue
            pairs = zip(found, expected, strict=True)
            error = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)
            note = {} if error <= TOLERANCE else {"note": "WRONG"}
            yield f"attention, {mask}, {kernel}", {"error": error} | note


def sized(args, source, size, changes=()):
    """Return a config for an accelerator at a size."""
    size = SIZES["smoke" if args.smoke else size]
    own = {
        "data.seq_len": size["context"],
        "data.batch_size": size["batch"],
        "train.accumulation": 1,
        "model.width": size["width"],
        "model.depth": size["depth"],
        "model.attention.num_heads": size["heads"],
        "train.loss_chunk": min(256, size["context"]),
    }
    return apply(load_config(source), {**ACCELERATOR, **own, **dict(changes)})


def steps(args, title, configs, vocab=VOCAB):
    """Yield rows of training steps; those after the first are compared with it."""
    base = None
    for name, config in configs.items():  # one after the other: each has the memory to itself
        found = common.training_steps({name: config}, 256 if args.smoke else vocab, args.rounds)
        step = found[name]
        row = {"ms": 1e3 * step.times.median, "tokens_per_s": step.tokens / step.times.median}
        row |= {"batch": config.data.batch_size, "memory_gb": step.memory / 1e9}
        row |= mfu(step.nominal / step.times.median)
        if base:
            row |= {"time_ratio": step.times.median / base.times.median}
            row |= {"flops_ratio": step.nominal / base.nominal}
        base = base or step
        yield f"{title}{name}", row


def dense(args):
    config = sized(args, "gpt2", "124M")
    yield from steps(args, "dense 124M (GPT-2)", {"": config}, 50257)
    others = {"": {}, ", scanned layers": {"model.scan_layers": True}}
    for name, changes in others.items():
        yield from steps(args, "dense 350M", {name: sized(args, "mod:dense", "350M", changes)})


def mod(args):
    for size in ("350M",) if args.smoke else ("350M", "1.3B"):
        configs = {" dense": "mod:dense", " MoD": "mod"}
        half = {"model.depth": SIZES[size]["depth"] // 2}
        configs = {name: sized(args, source, size) for name, source in configs.items()}
        if not args.smoke:
            configs[" dense, half as deep"] = sized(args, "mod:dense", size, half)
        yield from steps(args, size, configs)


def moe(args):
    configs = {"dense": {}, "8 experts": MOE}
    configs = {name: sized(args, "mod:dense", "124M", own) for name, own in configs.items()}
    yield from steps(args, "124M, ", configs)


def latent(args):
    context = 64 if args.smoke else 8192
    changes = {"data.seq_len": context, "data.batch_size": 2 if args.smoke else 4}
    changes |= {"model.scan_layers": True, "model.remat": "dots"}
    width = SIZES["smoke" if args.smoke else "350M"]["width"]
    levels = {"model.level_widths": (width // 4, width // 2)}
    configs = {", dense": sized(args, "mod:dense", "350M", changes)}
    configs[", latent"] = sized(args, "latent", "350M", changes | levels)
    yield from steps(args, f"context {context}", configs)


def decoding(args):
    size = SIZES["smoke" if args.smoke else "350M"]
    words = [f"--{name}={size[name]}" for name in ("width", "depth", "heads")]
    words += ["--context=128", "--vocab=256", "--tokens=34", "--prompt=8", "--rounds=1"]
    if not args.smoke:
        words[3:] = ["--context=1024", f"--vocab={VOCAB}", "--tokens=256", "--prompt=64"]
    own = decode.parse([*words, "--dtype=bfloat16"])
    built = {"dense": decode.build("none", own), "MoD": decode.build("mod", own)}
    for batch in (1, 2) if args.smoke else (1, 16):
        others = {}
        if not args.smoke and decode.has_transformers():
            device = "cuda" if jax.default_backend() == "gpu" else "cpu"
            model = decode.Transformers(built["dense"][0], own, device, "static")
            others = {"transformers": model}
        speed = {
            name: wall
            for name, (wall, *_) in decode.best_of_rounds(built, others, batch, own).items()
        }
        for name in built:
            row = {"tokens_per_s": speed[name], "batch": batch}
            if others:
                row["over_static_cache"] = speed[name] / speed["transformers"]
            yield f"decoding, batch {batch}, {name}", row


def characters(args):
    if not args.text:
        raise UsageError("--parts characters needs --text, the file of tinyshakespeare")
    variant = "gpu,smoke" if args.smoke else "gpu"
    for name, more in (("dense", ""), ("MoD", ",mod")):
        for seed in (0,) if args.smoke or name == "MoD" else (0, 1, 2):
            folder = pathlib.Path(args.runs) / f"characters_{name}_{seed}"
            words = [f"--config=shakespeare_char:{variant}{more}", f"--workdir={folder}"]
            words += [f"--config.seed={seed}", f"--config.data.source=text:{args.text}"]
            words += ["--config.train.dtype=bfloat16"]
            subprocess.run([sys.executable, "-m", "efx.main", *words], check=True)
            rows = read_metrics(folder)
            best = min(row["eval/loss"] for row in rows if row.get("eval/loss") is not None)
            row = {"best_loss": best, "seconds": max(row.get("seconds", 0) for row in rows)}
            yield f"nanoGPT's characters, {name}, seed {seed}", row


PARTS = {
    "matmul": matmul, "attention": attention, "dense": dense, "mod": mod, "moe": moe,
    "latent": latent, "decode": decoding, "characters": characters,
}  # fmt: skip


@common.command
def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [name for name in PARTS if name != "characters"]
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=default)
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each")
    parser.add_argument("--text", help="file of tinyshakespeare, for the part characters")
    parser.add_argument("--runs", default="runs/accelerator", help="directory of its runs")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--out", help="CSV file")
    args = parser.parse_args(argv)
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    name = re.sub(r"\W+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    out = pathlib.Path(args.out or f"results/accelerator-{name}.csv")
    rows, failed = [], False
    for part in args.parts:
        try:
            for title, row in PARTS[part](args):
                cells = (
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                )
                print(f"{title}: {', '.join(cells)}", flush=True)
                rows.append({"name": title} | row)
        except UsageError:
            raise
        except Exception as error:
            failed = True
            rows.append({"name": part, "note": first_line(error)})
            print(f"{part}: FAILED: {first_line(error)}", flush=True)
    header = {"title": "Training steps and decoding in bfloat16", "machine": device}
    header |= {"command": f"python -m benchmarks.accelerator --parts {' '.join(args.parts)}"}
    git = run_dir.git_revision() or {"revision": "unknown"}
    out.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    numbers = table.select_dtypes("number").columns
    table[numbers] = table[numbers].map(lambda x: float(f"{x:.5g}"))
    tables.write_csv(out, table, header | {"revision": git["revision"]})
    print(f"written: {out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
