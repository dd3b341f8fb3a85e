"""The parts of `benchmarks.accelerator`: what each of them measures.

A part is a function of the `Setup` that yields (title, function): the function measures and returns
{what comes after the title in a row's name: {column: value}}.
"""

import copy
import dataclasses
import functools
import gc
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import children, common, decode, latent_cost
from efx.config.load import load_config
from efx.configs import gpt2, learned_dropout, mod, moe
from efx.configs.common import ACCELERATOR, apply
from efx.layers import attend, flops
from efx.layers.kernels import KERNELS, UnsupportedKernel
from efx.logging import quantity, read_metrics, tables
from efx.studies import isoflop, reference, results
from efx.studies.isoflop import report
from efx.studies.step_time import compiled_together, take_turns
from efx.train import memory

ROOT = pathlib.Path(__file__).resolve().parent.parent
# All that a row may say, with the formats of its numbers.
COLUMNS = {
    "says": "",  # a verdict, or why there are no numbers; in every row
    "error": ".2e",  # relative to values and gradients in float32
    "ms": ".2f",
    "TFLOP/s": ".1f",
    "tokens/s": "quantity",
    "MFU": ".1%",
    "batch": "d",
    "memory, GB": ".2f",
    "time / dense": ".3f",
    "FLOPs / dense": ".3f",
    "over transformers": ".2f",
    "over its static cache": ".2f",
    "loss": ".4f",
    "seconds": ".0f",
}
MFU_TARGET = 0.5  # of dense 350M in bfloat16
MOD_TARGET = 0.9  # of the time that the ratio of FLOPs would save
DECODE_TARGET = 1.0  # over transformers
CHARACTERS_TARGET = 1.4697  # nats, nanoGPT's published best
REFERENCE_SEEDS = (0, 1, 2)  # of nanoGPT's recipe, for its band
# Of attention against float32 at the highest precision. A mask that is off by a token is far above.
TOLERANCE = {"bfloat16": 2e-2, "float32": 5e-3}
VOCAB = 32_000
SIZES = {
    "124M": dict(width=768, depth=12, heads=12, context=1024, batch=32),
    "350M": dict(width=1024, depth=24, heads=16, context=2048, batch=16),
    "1.3B": dict(width=2048, depth=24, heads=16, context=2048, batch=8),
    "smoke": dict(width=32, depth=4, heads=2, context=32, batch=2),
}


class Skipped(Exception):
    """Something that this needs is not here."""


class Unfinished(Exception):
    """The time was up; what has been done so far is kept for the next call."""


def failure(error):
    """The cells of what raised an exception: out of memory, say. A kernel that was asked for and
    says that it cannot has not failed."""
    if isinstance(error, UnsupportedKernel):
        return refusal(error.reason)
    return {"says": f"FAILED: {type(error).__name__}: {_first_line(error)}"}


def refusal(*reasons):
    """The cells of a kernel that refuses."""
    return {"says": f"refused: {'; '.join(dict.fromkeys(reasons))}"}


def of_the_device(cells):
    """Whether these are the cells of an error of the device or its compiler, such as one of CUDA:
    nothing that the same process measures afterwards means anything."""
    return cells.get("says", "").startswith(f"FAILED: {jax.errors.JaxRuntimeError.__name__}:")


def _first_line(error):
    return (str(error).splitlines() or [""])[0][:300]


@dataclasses.dataclass(frozen=True)
class Setup:
    """How to measure.

    Attributes:
      folder: of the runs that are trained. text: tinyshakespeare.
      deadline: on the clock `time.monotonic`.
      curves: the file of reference curves.
      platform: of the device.
    """

    smoke: bool
    folder: pathlib.Path
    text: pathlib.Path
    deadline: float
    curves: pathlib.Path = ROOT / reference.CURVES
    platform: str = "cpu"

    def runs(self, part):
        return self.folder / part

    def forget_runs(self, part):
        if self.runs(part).is_dir():
            shutil.rmtree(self.runs(part))

    def size(self, name):
        return SIZES["smoke" if self.smoke else name]

    def vocab(self, size=VOCAB):
        return 64 if self.smoke else size

    @property
    def rounds(self):
        """Timed calls of each function, after two that are not."""
        return 2 if self.smoke else 20

    def run(self, command, output=None, **environment):
        """Exit status of a process. At the deadline it and those that it started are asked to save
        and end. output: a file for what it says."""
        streams = dict(stdout=output, stderr=output)
        try:
            return children.run(command, self.deadline, env=os.environ | environment, **streams)
        except children.Late:
            raise Unfinished from None


# ---- is it right --------------------------------------------------------------------------------


LENGTH = 1000  # of the masks, no multiple of a kernel's block
# What a mask may have: alone, in the pairs that decide what a kernel can, and all at once.
MASKS = (
    "causal", "window", "softcap", "gaps", "documents", "grouped", "window, gaps",
    "gaps, documents", "window, documents, grouped", "window, softcap, gaps, documents, grouped",
)  # fmt: skip


def kernels(setup):
    """Values and gradients of attention by each kernel, with masks of every kind, against plain XLA
    in float32 at the highest precision."""
    names = ["xla"] + [
        name for name, kernel in KERNELS.items() if kernel.platform == jax.default_backend()
    ]
    for mask in MASKS[::3] if setup.smoke else MASKS:
        masked = functools.cache(functools.partial(_masked, setup, mask))
        for name in names:
            yield f"attention, {mask}, {name}", functools.partial(_kernel, masked, name)


def _masked(setup, mask):
    """`attention` with this mask, and what it has to give."""
    if setup.smoke:
        function, arrays = with_mask(mask, length=40, head_dim=16, window=7)
    else:
        function, arrays = with_mask(mask, length=LENGTH, head_dim=64, window=100)
    with jax.default_matmul_precision("highest"):
        return function, arrays, function("xla", "float32", arrays)


def with_mask(mask, *, length, head_dim, window):
    """`attention` with one of MASKS."""
    return attention(
        length=length,
        kv_heads=2 if "grouped" in mask else 8,
        head_dim=head_dim,
        window=window if "window" in mask else 0,
        softcap=2.0 if "softcap" in mask else 0.0,
        gaps="gaps" in mask,
        documents="documents" in mask,
    )


def _kernel(masked, name):
    rows, refused = {}, {}
    for dtype, tolerance in TOLERANCE.items():
        function, arrays, wanted = masked()
        try:
            got = function(name, dtype, arrays)
            error = max(map(relative_error, got, wanted))
        except UnsupportedKernel as error:
            refused[dtype] = error.reason
            continue
        except Exception as error:
            rows[f", {dtype}"] = failure(error)
            break  # of the device's, perhaps, on which nothing more is to be tried
        says = "right" if error <= tolerance else f"FAILED: more than {tolerance} off"
        rows[f", {dtype}"] = {"error": error, "says": says}
    if not rows:
        return {"": refusal(*refused.values())}
    return rows | {f", {dtype}": refusal(reason) for dtype, reason in refused.items()}


def attention(*, length, kv_heads, head_dim, window, softcap, gaps, documents):
    """(function, its arrays) of one kind of mask: the function takes a kernel's name, the name of a
    dtype and the arrays, and returns outputs and gradients of queries, keys and values."""
    draw = np.random.default_rng(0)
    shapes = [(2, length, heads, head_dim) for heads in (8, kv_heads, kv_heads, 8)]
    arrays = [jnp.asarray(draw.standard_normal(shape, np.float32)) for shape in shapes]
    segments = np.ones((2, length), np.int32)
    if documents:
        segments[0, length // 3 :], segments[1, length // 2 :] = 2, 2
    positions = np.stack([_positions(row, gaps, draw) for row in segments])
    options = dict(
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
        has_gaps=gaps,
        positions_BT=jnp.asarray(positions, jnp.int32),
        segment_ids_BT=jnp.asarray(segments) if documents else None,
    )

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def function(kernel, dtype, arrays):
        q_BTNH, k_BSKH, v_BSKH, d_BTNH = (y.astype(dtype) for y in arrays)
        output, pullback = jax.vjp(
            functools.partial(attend.attend, kernel=kernel, **options), q_BTNH, k_BSKH, v_BSKH
        )
        return output, *pullback(d_BTNH)

    return function, arrays


def _positions(segments, gaps, draw):
    """Positions in the documents of a row; with gaps some are left out."""
    steps = draw.integers(1, 4, len(segments)) if gaps else np.ones(len(segments), int)
    position = np.cumsum(steps)
    starts = np.flatnonzero(np.diff(segments, prepend=0))
    return position - np.repeat(position[starts], np.diff(starts, append=len(segments)))


def relative_error(got, wanted):
    got, wanted = (np.asarray(y, np.float64) for y in (got, wanted))
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    return float(error) if np.isfinite(error) else math.inf


# Under the first flag alone XLA still tries for each fusion which of two of its compilers makes the
# faster kernel, and takes what is faster that time: sums in another order in each compilation.
IN_ONE_ORDER = "--xla_gpu_deterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=true"
# Of the suite, what runs on one device of any kind, and a device may get wrong.
SUITE = {
    "decoding is the full pass": (
        "tests/contract/test_families.py", "test_cached_decoding_is_the_full_forward and quick",
    ),
    "nothing looks ahead": ("tests/contract/test_families.py", "test_causal and quick"),
    "a run that goes on is bit for bit one that never stopped": (
        "tests/runs/test_train.py", "test_a_resumed_run_is_the_uninterrupted_run and latent",
    ),
}  # fmt: skip


def tests(setup):
    if setup.smoke:
        yield (
            "nothing looks ahead",
            functools.partial(
                _pytest, setup, "tests/contract/test_families.py", "test_causal and quick and moe"
            ),
        )
        return
    for title, (path, names) in SUITE.items():
        yield title, functools.partial(_pytest, setup, path, names)


def _pytest(setup, path, names):
    """Tests of the suite on this device, where products are in float32 and sums in one order."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed; install the extra: pip install -e '.[dev]'")
    folder = setup.runs("tests")
    folder.mkdir(parents=True, exist_ok=True)
    report, log = folder / "report.xml", folder / "log.txt"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", path, "-k", names, "-q", f"--junitxml={report}"]
    with log.open("w") as output:
        status = setup.run(
            [*command, "-p", "no:cacheprovider"],
            output,
            JAX_PLATFORMS={"gpu": "cuda"}.get(setup.platform, setup.platform),
            JAX_DEFAULT_MATMUL_PRECISION="highest",
            XLA_FLAGS=IN_ONE_ORDER,
        )
    said = log.read_text(errors="replace").splitlines()
    if not report.is_file():
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        raise RuntimeError(f"pytest ended with status {status} and no report: {last}")
    counts = dict(re.findall(r'(tests|failures|errors|skipped)="(\d+)"', report.read_text()))
    says = ", ".join(f"{count} {name}" for name, count in counts.items())
    failed = [line for line in said if line.startswith(("FAILED ", "ERROR "))]
    says += f"; {failed[0]}" if failed else ""
    return {"": {"says": f"{'right' if status == 0 else 'FAILED'}: {says}"}}


# ---- how fast is it -----------------------------------------------------------------------------


def matmul(setup):
    for dtype, size in (
        ("bfloat16", 4096), ("bfloat16", 8192), ("bfloat16", 16384), ("float32", 8192),
    ):  # fmt: skip
        size = size // 256 if setup.smoke else size
        yield f"product of {size}, {dtype}", functools.partial(_matmul, setup, dtype, size)


def _matmul(setup, dtype, size):
    products = 10  # a call, each of the one before
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (size, size), dtype) for key in keys)
    w = w * size**-0.5
    run = {"": lambda turn: jax.block_until_ready(chain(x, w, products))}
    turns = take_turns(run, setup.rounds)
    seconds = turns[""].median / products
    speed = flops.matmul(size, size, size) / seconds
    return {"": {"ms": 1e3 * seconds, "TFLOP/s": speed / 1e12} | _of_peak(speed, dtype, 1)}


@functools.partial(jax.jit, static_argnums=2)
def chain(x, w, products):
    """x times w, so many times, and nothing else: a loop copies what it carries at each turn, which
    on a v5e takes a third of the time of a product of 4096."""
    for _ in range(products):
        x = x @ w
    return x


def _of_peak(flops_per_second, dtype, devices):
    """{"MFU": ...} where the peak of the device is known."""
    peak = flops.device_peak(dtype)
    return {"MFU": flops_per_second / (peak * devices)} if peak else {}


def dense(setup):
    names = ["xla"] + [
        name for name, kernel in KERNELS.items() if kernel.platform == jax.default_backend()
    ]
    for name in names:
        config = sized(setup, gpt2.get_config(), "124M", {"model.attention.kernel": name})
        config.train.accumulation = 1
        yield (
            f"dense 124M (GPT-2), {name}",
            functools.partial(_steps, setup, {"": config}, vocab=50257),
        )
    others = {
        "nothing computed twice": {"model.remat": "none"},
        "scanned layers": {"model.scan_layers": True},
    }
    listed = {name: {"model.attention.kernel": name} for name in names}
    for title, changes in (listed | others).items():
        config = sized(setup, mod.get_config("dense"), "350M", changes)
        step = functools.partial(_steps, setup, {"": config}, mfu_target=MFU_TARGET)
        yield f"dense 350M, {title}", step


def mixture_of_depths(setup):
    for size in ("350M", "1.3B"):
        configs = {
            f" {variant or 'MoD'}": sized(setup, mod.get_config(variant), size)
            for variant in ("dense", "")
        }
        yield size, functools.partial(_steps, setup, configs, saving_target=MOD_TARGET)


def mixture_of_experts(setup):
    width = setup.size("124M")["width"]
    changes = {"model.mlp.hidden": 11 * width // 4, "model.mlp.moe.expert_hidden": 11 * width // 8}
    configs = {
        f", {variant or 'token_choice'}": sized(setup, moe.get_config(variant), "124M", changes)
        for variant in ("dense", "", "expert_choice")
    }
    yield "8 experts", functools.partial(_steps, setup, configs)


def latent(setup):
    flags = "--width=1024 --depth=24 --heads=16 --level-widths=256,512 --tokens=32768".split()
    args = latent_cost.arguments(["--quick"] if setup.smoke else flags)
    for context in (64, 128) if setup.smoke else (8192, 32768):
        # One compiled layer for all: 24 of 8192 tokens one by one take more than nine minutes.
        changes = {"train.dtype": "bfloat16", "model.remat": "dots", "model.scan_layers": True}
        configs = {
            f", {name}": apply(config, changes)
            for name, config in latent_cost.configs(args, context).items()
        }
        yield f"context {context}", functools.partial(_steps, setup, configs)


def masks(setup):
    configs = {
        f", {variant or 'attention'}": sized(setup, learned_dropout.get_config(variant), "124M")
        for variant in ("none", "", "elementwise", "embedding_linear", "skip")
    }
    yield "learned masks", functools.partial(_steps, setup, configs)


def sized(setup, config, size, changes=()):
    """The config for an accelerator, at this size."""
    sizes = setup.size(size)
    return apply(
        config,
        {
            **ACCELERATOR,
            "data.seq_len": sizes["context"],
            "data.batch_size": sizes["batch"],
            "model.width": sizes["width"],
            "model.depth": sizes["depth"],
            "model.attention.num_heads": sizes["heads"],
            "train.loss_chunk": min(256, sizes["context"]),
            **dict(changes),
        },
    )


def _steps(setup, configs, *, vocab=VOCAB, mfu_target=None, saving_target=None):
    """Rows of training steps, one model after the other so that each has the memory to itself, but
    all compiled before; those after the first are compared with it."""
    rows, baseline, vocab = {}, None, setup.vocab(vocab)
    compiled = compiled_together(configs, vocab)
    for suffix, config in configs.items():
        try:
            step = _fitting(config, vocab, setup.rounds, compiled.pop(suffix))
        except Exception as error:
            if baseline is None:
                raise
            rows[suffix] = failure(error)
            if of_the_device(rows[suffix]):
                break
            continue
        rows[suffix] = cells = {
            "ms": 1e3 * step.times.median,
            "tokens/s": step.tokens_per_second,
            "batch": step.batch,
            "memory, GB": step.memory / 1e9,
        }
        speed = step.nominal / step.times.median
        cells |= _of_peak(speed, config.train.dtype, jax.device_count())
        if "MFU" in cells and mfu_target:
            cells["says"] = common.verdict("MFU", cells["MFU"], mfu_target, at_least=True)
        if baseline is None:
            baseline = step
            continue
        time_ratio = baseline.tokens_per_second / step.tokens_per_second
        flop_ratio = step.per_token / baseline.per_token
        cells |= {"time / dense": time_ratio, "FLOPs / dense": flop_ratio}
        if saving_target:
            title = "ratio of FLOPs over ratio of times"
            value = flop_ratio / time_ratio
            cells["says"] = common.verdict(title, value, saving_target, at_least=True)
    return rows


def _fitting(config, vocab, rounds, compiled):
    """`common.TrainingStep` of a config, with half its batch as often as memory demands.

    Args:
      compiled: Future of its `Stepper`.
    """
    config = copy.deepcopy(config)
    while True:
        try:
            steppers = compiled and {"": compiled.result()}
            return common.training_steps({"": config}, vocab, rounds, 2, steppers)[""]
        except jax.errors.JaxRuntimeError as error:
            if not memory.is_full(error) or config.data.batch_size == 1:
                raise
        steppers = compiled = None
        gc.collect()
        apply(config, {"data.batch_size": config.data.batch_size // 2})


# XLA's, of which each spares it something that it tries on the device: which of two of its
# compilers makes the faster kernel of a fusion, kernels of Triton for products, all of that.
COMPILING = {
    "as it is": "",
    "fusions not tried": "--xla_gpu_experimental_enable_fusion_autotuner=false",
    "products by cuBLAS": "--xla_gpu_enable_triton_gemm=false",
    "nothing tried": "--xla_gpu_autotune_level=0",
}


def compiling(setup):
    for title, flags in COMPILING.items() if setup.platform == "gpu" else [("as it is", "")]:
        yield f"compiling 6 layers, {title}", functools.partial(_compiling, setup, flags)


def _compiling(setup, flags):
    """Seconds of compiling and milliseconds of a step, by `benchmarks.compiling`."""
    path = setup.runs("compiling") / "found.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.compiling", f"--json={path}", "--layers=6"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    status = setup.run([*command, *["--smoke"] * setup.smoke], XLA_FLAGS=flags)
    if status:
        raise RuntimeError(f"benchmarks.compiling ended with status {status}")
    return {f", {name}": row for name, row in json.loads(path.read_text()).items()}


def decoding(setup):
    sizes = setup.size("350M")
    flags = {
        **{name: sizes[name] for name in ("width", "depth", "heads")},
        "context": 128 if setup.smoke else 1024,
        "vocab": setup.vocab(),
        "tokens": 34 if setup.smoke else 256,
        "prompt": 8 if setup.smoke else 64,
        "rounds": 1 if setup.smoke else 3,
        "dtype": "bfloat16",
    }
    args = decode.parse([f"--{name}={value}" for name, value in flags.items()])

    @functools.cache
    def built():
        return {"dense": decode.build("none", args), "MoD": decode.build("mod", args)}

    for batch in (1, 2) if setup.smoke else (1, 16, 128):
        yield f"decoding, batch {batch}", functools.partial(_decode, built, batch, args)


def _decode(built, batch, args):
    others, notes = _transformers(built()["dense"][0], batch, args)
    best = decode.best_of_rounds(built(), others, batch, args)
    speed = {name: wall for name, (wall, _, _) in best.items()}
    rows = {}
    for name in built():
        rows[f", {name}"] = cells = {"tokens/s": speed[name], "batch": batch}
        if name != "dense":
            cells["time / dense"] = speed["dense"] / speed[name]
        ratios = {f"over {other}": speed[name] / speed[other] for other in others}
        verdicts = [
            common.verdict(title, value, DECODE_TARGET, at_least=True)
            for title, value in ratios.items()
        ]
        cells |= ratios | {"says": "; ".join(verdicts + notes)}
    return rows


def _transformers(model, batch, args):
    """({name: `decode.Transformers`}, [why one of them is not there])"""
    if importlib.util.find_spec("transformers") is None or not importlib.util.find_spec("torch"):
        return {}, ["not compared: the extra `interop` is not installed"]
    import torch

    if jax.default_backend() == "tpu":
        return {}, ["not compared: PyTorch does not run on this device"]
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return {}, ["not compared: PyTorch is installed without CUDA"]
    device = {"gpu": "cuda"}.get(jax.default_backend(), "cpu")
    others, notes = {}, []
    for name, cache in (("transformers", None), ("its static cache", "static")):
        try:
            other = decode.Transformers(model, args, device, cache)
            other.measure(batch, args)  # compiles what it compiles
            others[name] = other
        except Exception as error:  # of another library, which says nothing about ours
            notes.append(f"{name} failed: {type(error).__name__}: {_first_line(error)}")
    return others, notes


# ---- what comes out -----------------------------------------------------------------------------


def characters(setup):
    smoke = ",smoke" * setup.smoke
    seeds = {f"dense{f', seed {seed}' * bool(seed)}": seed for seed in REFERENCE_SEEDS}
    for title, seed in seeds.items():
        measure = functools.partial(_characters, setup, title, "gpu" + smoke, seed)
        yield f"nanoGPT's characters, {title}", measure
    measure = functools.partial(_characters, setup, "MoD", "gpu,mod" + smoke)
    yield "nanoGPT's characters, MoD", measure
    measure = functools.partial(_reference, setup, list(seeds))
    yield "nanoGPT's characters, reference curves", measure


def _characters(setup, title, variants, seed=0):
    if not setup.text.is_file():
        raise Skipped(f"--text={setup.text}: there is no such file")
    config, folder = f"shakespeare_char:{variants}", setup.runs("characters") / title
    status = setup.run(
        [
            *(sys.executable, "-m", "efx.main", f"--config={config}", f"--workdir={folder}"),
            *(f"--config.data.source=text:{setup.text}", "--config.train.dtype=bfloat16"),
            f"--config.seed={seed}",
        ]
    )
    if status:
        raise RuntimeError(f"the run in {folder} ended with status {status}")
    rows = read_metrics(folder)
    if rows[-1]["step"] < load_config(config).steps:
        raise Unfinished
    losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    seconds = {row["step"]: row["seconds"] for row in rows if "seconds" in row}
    best = min(losses.values())
    reached = [step for step, loss in losses.items() if loss <= CHARACTERS_TARGET]
    until = min(reached, default=max(seconds))
    says = common.verdict("best loss", best, CHARACTERS_TARGET, at_least=False)
    says += f"; seconds are those of training until step {until}"
    spent = max(value for step, value in seconds.items() if step <= until)
    return {"": {"loss": best, "seconds": spent, "says": says}}


def _reference(setup, titles):
    """Curves of nanoGPT's recipe for a GPU: recorded where none of another machine are, and else
    what the runs here are compared with."""
    folders = [setup.runs("characters") / title for title in titles]
    if not all(folder.is_dir() for folder in folders):
        raise Skipped("the runs of the recipe are not there")
    path = setup.curves
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write_result(path, results.read_result(ROOT / reference.CURVES))
    if setup.smoke:  # tiny runs, of no recipe
        path = setup.folder / setup.curves.name
        result = results.read_result(setup.curves)
        results.write_result(path, result | {"curves": result["curves"] | {"gpu": None}})
    recorded = reference.read_curves(path)["curves"]["gpu"]
    device = reference.read_run(folders[0])["device"]
    if recorded is None or recorded["device"] == device:
        reference.record(path, "gpu", folders)
        return {"": {"says": f"recorded as those of the recipe in {path.name}"}}
    judged = [reference.compare(folder, {"gpu": recorded}) for folder in folders]
    outside = [lines[-1] for _, lines, within in judged if not within]
    says = f"beside those of {recorded['device']}: "
    return {"": {"says": "FAILED: " * bool(outside) + says + "; ".join(outside or ["within"])}}


SMOKE_GRID = """
def get_grid():
    sizes = {f"{width} wide": {"model.width": width} for width in (8, 16, 24)}
    families = {"dense": {"model.depth_routing.kind": "none"}, "MoD 12.5%": {}}
    base = {"data.batch_size": 2, "evaluate.max_batches": 1, "model.attention.num_heads": 2}
    sizes = {name: {**base, **size} for name, size in sizes.items()}
    return dict(config="mod:smoke", seeds=(0,), budgets=(3e8,), families=families, sizes=sizes)
"""


def isoflop_study(setup):
    yield "isoFLOP", functools.partial(_isoflop, setup)


def _isoflop(setup):
    folder, grid = setup.runs("isoflop"), "isoflop_accelerator"
    if setup.smoke:
        folder.mkdir(parents=True, exist_ok=True)
        grid = folder / "grid.py"
        grid.write_text(SMOKE_GRID)
    command = [sys.executable, "-m", "efx.studies.isoflop", f"--grid={grid}"]
    # Compiling, on the host, takes as long as training. A TPU belongs to one process at a time.
    jobs = 4 if setup.platform == "gpu" else 1
    status = setup.run([*command, f"--workdir={folder}", f"--jobs={jobs}"])
    if status:
        raise RuntimeError(f"the study in {folder} ended with status {status}")
    path = folder / "isoflop.json"
    study = json.loads(path.read_text())
    analysis = isoflop.analysis_of(isoflop.points_of(study, path), study)
    rows = {}
    for (budget, family), cells in report.optima_table(analysis).items():
        measured, best = cells["least measured"]["mean"], cells["loss at the best size"]
        if isinstance(best, str):
            says = "least of those measured; their parabola has no minimum among them"
        else:
            parameters = quantity(cells["its parameters"]["mean"], "parameters")
            loss = tables.text(best, ".4f")
            says = f"least of those measured; {loss} at the best size, {parameters}"
        rows[f" of {quantity(budget, 'FLOPs')}, {family}"] = {"loss": measured, "says": says}
    return rows


# First what takes little and says most.
PARTS = {
    "matmul": matmul,
    "dense": dense,
    "kernels": kernels,
    "tests": tests,
    "mod": mixture_of_depths,
    "moe": mixture_of_experts,
    "latent": latent,
    "masks": masks,
    "decode": decoding,
    "compiling": compiling,
    "characters": characters,
    "isoflop": isoflop_study,
}
# Those that run programs of their own: a TPU belongs to one process at a time.
OF_PROGRAMS = ("tests", "compiling", "characters", "isoflop")
