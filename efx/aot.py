"""Compile the programs of a run for accelerators that are not there.

    python -m efx.main --config llama --mode=compile --topology=v5e:16x16

prints, for the training step, evaluation and sampling, the memory that a device needs, the
compiler's FLOPs and the collectives, and whether the run fits. Nothing runs: the compilers for TPUs
(libtpu) and NVIDIA GPUs (JAX's CUDA plugin) need only a description of the device.
"""

import collections
import functools
import json
import math
import os
import re
from importlib.util import find_spec

import jax
import numpy as np
from jax.experimental import topologies

from efx import models, run_dir, sampling
from efx.config.load import to_config
from efx.data import tokenizers
from efx.errors import UsageError, extra, nearest
from efx.layers import flops
from efx.logging import quantity
from efx.parallel import sharding
from efx.train import evaluator, setup

GIB = 2**30
# Bytes that the compiler lets a program use; the data sheets give a little more.
TPUS = {"v5e": 15.75 * GIB, "v5p": 95.74 * GIB, "v6e": 31.25 * GIB}
# (name, bytes of memory, its bytes/s)
GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_000_000_000),
    "h200": ("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000),
}
# Of GPUs: slices x hosts x GPUs.
_EXAMPLES = {
    "v5e": "v5e:16x16",
    "v5p": "v5p:4x4x4",
    "v6e": "v6e:16x16",
    "h100": "h100:1x1x8",
    "h200": "h200:1x1x8",
}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_COLUMNS = ("needed", "arguments", "temporaries", "outputs", "code", "held")

# XLA's description of a GPU (its protocol buffer `GpuTargetConfigProto`).
_HOPPER = """
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
  pcie_bandwidth: 34359738368 l2_cache_size: 52428800
  ecc_enabled: true device_address_bits: 64
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
"""


def compile_and_report(config, topology_name, *, vocab_size=None, workdir=None, as_json=False):
    """Compile the programs of a run and print what they need, as text or as JSON.

    Args:
      vocab_size: number of token ids; None: those of the tokenizer.
      workdir: run directory whose tokenizer counts, or None.
    """
    config = to_config(config)
    vocab_size = vocab_size or _vocab_size(config, workdir)
    devices, limit = describe(topology_name)
    e = setup.experiment_without_data(config, vocab_size, devices)
    one_device = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), devices[:1])
    show = (lambda *lines: None) if as_json else functools.partial(print, flush=True, sep="\n")
    # Kernels are chosen by the platform of the default device and of the mesh.
    with jax.default_device(devices[0]):
        with jax.set_mesh(one_device):
            training = setup.Training(e)
        report = {
            "topology": topology_name,
            "device": devices[0].device_kind,
            "devices": len(devices),
            "device_memory": limit,
            "mesh": {axis: size for axis, size in e.mesh.shape.items() if size > 1},
            "parameters": flops.count_params(training.shapes.params),
            "tokens": e.tokens_per_step,
            "nominal_flops": e.ledger.train_flops(e.tokens_per_step) + e.teacher_flops(),
            "programs": [],
        }
        show(*_head(report))
        for name, *program in _programs(e, training, one_device):
            found = {"name": name, **_compile(name, *program)}
            report["programs"].append(found)
            show(*_lines(found))
    report["needed"] = max(found["needed"] for found in report["programs"])
    report["fits"] = report["needed"] <= limit
    show(
        "",
        "cost: the compiler's count, without attention kernels. A loop, such as that over scanned",
        "layers, counts once in it and in the collectives.",
        f"{'fits' if report['fits'] else 'does not fit'}: needs "
        f"{_in_words(report['needed'])} of {_in_words(limit)} a device",
    )
    if as_json:
        print(json.dumps(report))


def _vocab_size(config, workdir):
    """Return the number of ids of a run's tokenizer, or of one that needs no text."""
    if workdir and (saved := run_dir.RunDir(workdir).tokenizer_path):
        return tokenizers.load_tokenizer(saved).vocab_size
    kind, argument = tokenizers.parse(config.data.tokenizer)
    if kind == "bpe":
        return argument
    if tokenizer := tokenizers.pretrained_tokenizer(config.data.tokenizer):
        return tokenizer.vocab_size
    raise UsageError(
        f"config.data.tokenizer={config.data.tokenizer!r}: the number of ids depends on the "
        "text, and --mode=compile reads no text; set --vocab_size"
    )


# ---- programs of a run ---------------------------------------------------------------------------


def _programs(e, training, one_device):
    """Yield (name, mesh, rules, trace, arguments, held) of each program of a run.

    Args:
      e: Experiment. one_device: the mesh of one of its devices.
    Returns:
      trace: a function that traces the program. arguments: their shapes, with shardings.
      held: bytes on a device that are none of the arguments, such as the optimiser's state while
        the run evaluates.
    """
    c, state = e.config, training.shapes
    for stage in reversed(e.stages):
        name = "training step"
        if stage is not e.stages[-1]:
            name += f" at capacity {stage.model.config.depth_routing.capacity:g}"
        trace = functools.partial(training.trace_step, stage.model)
        yield name, e.mesh, e.rules, trace, (state, training.batch, training.teacher), 0

    # The next batch is read ahead.
    resident = _bytes_on_device((state, training.teacher, training.batch))
    variables = {"params": state.params, **state.variables}
    shapes = evaluator.shapes_of_step(c, e.mesh, e.rules, state.params, state.variables)
    step = evaluator.steps(e.model, c, e.mesh, e.rules)["causal"]
    held = resident - _bytes_on_device(variables)
    yield "evaluation", e.mesh, e.rules, functools.partial(step.trace, *shapes), shapes, held
    if not c.sample.every:
        return

    rows, unrolled = c.sample.num_samples, variables
    with jax.set_mesh(one_device):
        if e.model.config.scan_layers:
            unrolled = setup.variable_shapes(e, models.unrolled(e.model))
        program = sampling.Program.of(e.model, rows, e.model.context, e.rules)
        mesh, is_split = sampling.mesh_for(variables, one_device.devices.flat[0])
    if not is_split:
        variables, unrolled = _replicated(variables, mesh), _replicated(unrolled, mesh)
    with sharding.use(mesh, program.rules):
        unroll = jax.make_jaxpr(lambda x: models.unroll_variables(e.model, x))(variables).jaxpr
        is_copy = [not any(x is given for given in unroll.invars) for x in unroll.outvars]
        cache = _replicated(program.state_shapes(), mesh)
    leaves = zip(jax.tree.leaves(unrolled), is_copy, strict=True)
    held = resident - _bytes_on_device([leaf for leaf, is_new in leaves if not is_new])
    prefill, decode = program.jitted()
    zero, zero_B, false_B = np.int32(0), np.zeros(rows, np.int32), np.zeros(rows, bool)
    tokens_BT = np.zeros((rows, program.chunk), np.int32)
    one = np.float32(1)
    options = dict(temperature=one, top_k=zero, top_p=one, stop_ids=np.zeros(1, np.int32))
    shapes = (unrolled, *cache, false_B, tokens_BT, tokens_BT, np.uint32(0))
    trace = functools.partial(prefill.trace, program.decode_first, *shapes)
    yield f"prefill of {program.chunk} tokens", mesh, program.rules, trace, shapes, held
    shapes = (unrolled, *cache, zero_B, false_B, zero_B.astype(np.uint32), zero, zero, options)
    trace = functools.partial(decode.trace, *shapes)
    yield "decoding of one token", mesh, program.rules, trace, shapes, held


def _bytes_on_device(tree):
    """Return the bytes on one device of a tree of shapes; without a sharding one is whole there."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if getattr(x, "sharding", None) else x.shape)
        * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _replicated(shapes, mesh):
    layout = sharding.replicated(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), shapes)


def _compile(name, mesh, rules, trace, arguments, held):
    """Compile a program; returns bytes, FLOPs and collectives of one device."""
    try:
        with sharding.use(mesh, rules):
            lowered = trace().lower()
        compiled = lowered.compile()
    except UsageError:
        raise
    except Exception as error:  # compilers and kernels raise any class
        if needed := bytes_refused(str(error)):
            return {"needed": needed + held}
        reason = " ".join(str(error).split())[:500]
        raise UsageError(f"{name}: not compiled: {type(error).__name__}: {reason}") from error
    needs = compiled.memory_analysis()
    used = needs.argument_size_in_bytes
    parts = {
        "arguments": used,
        "temporaries": needs.temp_size_in_bytes,
        "outputs": needs.output_size_in_bytes - needs.alias_size_in_bytes,
        "code": needs.generated_code_size_in_bytes,
        # The program omits arguments that it does not use; they stay in memory.
        "held": held + max(0, _bytes_on_device(arguments) - used),
    }
    return {
        "needed": sum(parts.values()),
        **parts,
        "flops": (compiled.cost_analysis() or {}).get("flops"),
        "collectives": collectives(compiled.as_text()),
    }


def bytes_refused(message):
    """Return the bytes that a program would need, from the compiler's error; None for others."""
    # "Used 17.90G of 15.75G hbm", or "... HLO temporaries (1.17T) exceeds available HBM (15.75G)"
    pattern = r"(?:Used |HLO temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)"
    if not (match := re.search(pattern, message)):
        return None
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))


_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute|collective-broadcast)(?:-done)?\("  # "-start" is the same operation
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def collectives(text):
    """Return {kind: {"count", "bytes" of their results}} of a compiled program's text.

    Loop bodies count once.
    """
    sizes, computation = collections.defaultdict(dict), ""
    for i, line in enumerate(text.splitlines()):
        if line.endswith("{"):
            computation = line.split(" ", 1)[0]
        if match := _COLLECTIVE.search(line):
            result, kind = match.groups()
            # A TPU's reduce-scatter is a fusion around an all-reduce.
            kind = "reduce-scatter" if computation.startswith("%all-reduce-scatter") else kind
            # All parts of an asynchronous collective have one channel.
            channel = re.search(r"channel_id=\d+", line)
            sizes[kind][channel[0] if channel else i] = sum(
                math.prod(int(n) for n in shape.split(",") if n) * int(bits or 8) // 8
                for bits, shape in _ARRAY.findall(result)
            )
    return {
        kind: {"count": len(each), "bytes": sum(each.values())}
        for kind, each in sorted(sizes.items())
    }


# ---- text ----------------------------------------------------------------------------------------


def _head(r):
    mesh = ", ".join(f"{axis} {size}" for axis, size in r["mesh"].items()) or "one device"
    nominal, count = r["nominal_flops"], r["devices"]
    return [
        f"{r['topology']}: {count} x {r['device']}, {_in_words(r['device_memory'])} each; "
        f"mesh {mesh}",
        f"{quantity(r['parameters'], 'parameters')}; nominal cost of a step of "
        f"{quantity(r['tokens'])} tokens: {quantity(nominal, 'FLOPs')}, "
        f"{quantity(nominal / count, 'FLOPs')} a device",
        "",
        f"{'on each device':32}{''.join(f'{title:>13}' for title in (*_COLUMNS, 'cost'))}",
    ]


def _in_words(count):
    """Return a number of bytes for people."""
    power = min(len(_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.3g} {_UNITS[power]}"


def _lines(program):
    cells = [_in_words(int(program[key])) if key in program else "?" for key in _COLUMNS]
    cells.append(quantity(program["flops"], "FLOPs") if program.get("flops") else "?")
    lines = [f"{program['name']:32}{''.join(f'{cell:>13}' for cell in cells)}"]
    if "collectives" in program:
        moved = [
            f"{kind} x {entry['count']} ({_in_words(entry['bytes'])})"
            for kind, entry in program["collectives"].items()
        ]
        lines.append(f"    collectives: {', '.join(moved) or 'none'}")
    return lines


# ---- topologies ----------------------------------------------------------------------------------


def describe(name):
    """Return (described devices, usable bytes of memory of each) of a topology, "v5e:16x16".

    Raises: UsageError if there is none of this name, or its compiler is not installed.
    """
    chip, _, sizes = name.partition(":")
    examples = f"{', '.join(_EXAMPLES.values())} (GPUs: slices x hosts x GPUs)"
    numbers = r"[1-9]\d*(x[1-9]\d*)+" if chip in TPUS else r"[1-9]\d*(x[1-9]\d*){2}"
    if chip not in (*TPUS, *GPUS) or not re.fullmatch(numbers, sizes):
        hint = nearest(chip, _EXAMPLES, _EXAMPLES)
        raise UsageError(f"--topology={name}: expected CHIP:SIZES, such as {examples}{hint}")
    try:
        found, limit = _tpus(name) if chip in TPUS else _gpus(chip, sizes)
    except NotImplementedError as error:
        compiler = extra("tpu" if chip in TPUS else "cuda12")
        raise UsageError(
            f"--topology={name}: its compiler is not installed; install {compiler}"
        ) from error
    except Exception as error:  # of the compilers
        reason = " ".join(str(error).split())
        raise UsageError(f"--topology={name}: {reason}; use sizes such as {examples}") from error
    return tuple(found.devices), int(limit)


def _tpus(name):
    if find_spec("libtpu") is None:
        raise NotImplementedError
    # Without these, libtpu looks for a TPU and its metadata server, and locks out other processes.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-16"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return found, TPUS[name.partition(":")[0]]


def _gpus(chip, sizes):
    name, size, bandwidth = GPUS[chip]
    target = _HOPPER.format(name=name, memory=size, bandwidth=bandwidth)
    jax.local_devices()  # registers the plugins
    found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=sizes)
    # JAX reserves a part of a GPU's memory.
    return found, size * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
