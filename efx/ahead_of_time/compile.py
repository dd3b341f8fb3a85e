"""From a config and the name of a topology to a `Report`."""

import json
import logging
import re
import time

import jax

from efx import build, flops, run_settings, runfolder, settings, sharding, signals
from efx.ahead_of_time import hlo, topology
from efx.ahead_of_time.report import Estimate, Memory, Report
from efx.data import tokenizers
from efx.errors import UsageError

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_and_report(config, topology_name, *, vocab_size=None, workdir=None, as_json=False):
    """What `--mode=compile` does: prints the report, as text or as JSON.

    Args:
      vocab_size: number of token ids; None: those of the config's tokenizer.
      workdir: run folder whose tokenizer counts, or None.
    """
    config = run_settings.check(config)
    if vocab_size is None:
        vocab_size = _vocab_size(config, workdir)
    report = compile_step(config, topology_name, vocab_size)
    print(json.dumps(report.as_dict()) if as_json else report.text())


def _vocab_size(config, workdir):
    """Of the tokenizer of a run, or of a config whose tokenizer has a size without its text."""
    if workdir and (saved := runfolder.saved_tokenizer(workdir)):
        return tokenizers.load_tokenizer(saved).vocab_size
    kind, argument = tokenizers.parse(config.data.tokenizer)
    if kind == "bpe":
        return argument
    if tokenizer := tokenizers.ready(config.data.tokenizer):
        return tokenizer.vocab_size
    raise UsageError(
        f"config.data.tokenizer={config.data.tokenizer!r} has as many ids as its text has"
        " characters, and --mode=compile reads no text: give --vocab_size"
    )


def compile_step(config, topology_name, vocab_size):
    """The `Report` on the training step of a config on a topology; UsageError for what cannot be
    asked, and a report of what does not fit for what needs more memory than there is."""
    target = topology.describe(topology_name)
    experiment = build.without_text(config, vocab_size, target.devices)
    config, model = experiment.config, experiment.model
    mesh, rules = experiment.mesh, experiment.rules
    one = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), target.devices[:1])
    # Kernels ask JAX about its own device, where it is one of the topology that counts.
    asked = jax.default_device(target.devices[0])
    with jax.set_mesh(one), asked:  # kernels are chosen for the devices of the topology here, too
        training = build.Training(experiment)
    length, rows = config.data.seq_len, config.data.batch_size
    # The products of kernels are not in their program as such, so those of plain XLA are counted.
    plain = settings.replaced(config, {"model.attention.kernel": "xla"})
    plain_model = build.without_text(plain, vocab_size, target.devices).model
    forward = flops.executed(plain_model, length, rows // config.train.accumulation)
    report = Report(
        topology=topology_name,
        device=target.devices[0].device_kind,
        devices=len(target.devices),
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        parameters=flops.count_params(training.shapes.params),
        tokens=experiment.tokens_per_step,
        ledger_flops=experiment.ledger.train_flops(experiment.tokens_per_step)
        + experiment.teacher_flops(),
        executed_flops=flops.TRAIN_FACTOR * config.train.accumulation * forward
        + experiment.teacher_flops(nominal=False),
        advice=training.advice(),
    )
    _log.info("compiling for %s, which may take minutes", topology_name)
    started = time.monotonic()
    with sharding.use(mesh, rules), asked:
        lowered = training.trace_step(model).lower()
        try:
            compiled = _compiled(lowered)
        except jax.errors.JaxRuntimeError as error:
            report.memory = _refused(str(error), target.chip)
            return report
    report.compile_seconds = time.monotonic() - started
    report.memory = _memory(compiled.memory_analysis(), target.chip)
    program = hlo.Program(compiled.as_text())
    report.collectives = hlo.collectives(program, target.hosts_of(mesh))
    report.kernels = hlo.kernels(program)
    report.unknown_loops = program.unknown_loops
    peak = flops.device_peak(config.train.dtype, target.devices[0])
    report.estimate = _estimate(program, report, target, peak)
    return report


def _compiled(lowered):
    """`lowered.compile()`, for which Ctrl-C does not have to wait, see `efx.signals`."""
    return signals.Beside(lowered.compile).result()


def _memory(needs, chip):
    return Memory(
        arguments=needs.argument_size_in_bytes,
        temporaries=needs.temp_size_in_bytes,
        outputs=needs.output_size_in_bytes - needs.alias_size_in_bytes,
        code=needs.generated_code_size_in_bytes,
        chip=chip.memory,
        fraction=1.0 if chip.kind == "tpu" else topology.GPU_FRACTION,
    )


def _refused(message, chip):
    """The `Memory` of a program for which the compiler found too little; other errors are raised.

    XLA says either "Used 17.90G of 15.75G hbm" or "... required for HLO temporaries (1.17T) exceeds
    available HBM (15.75G)".
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)", message) or re.search(
        r"required for .*?\(([\d.]+)([KMGT]?)\) exceeds available .*?\(([\d.]+)([KMGT]?)\)", message
    )
    if not found:
        raise UsageError(f"the compiler refuses this program: {' '.join(message.split())[:500]}")
    needed, limit = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
    return Memory(refused=needed, chip=limit)


def _estimate(program, report, target, peak):
    """Seconds of a step: what each device computes, its kernels, its communication."""
    chip = target.chip
    known = [call for call in report.kernels if call.flops is not None]
    # A kernel of attention reaches about half of the peak.
    kernels = sum(call.runs * call.flops for call in known) / (0.5 * peak)
    if chip.kind == "tpu":
        cycles, missing = hlo.estimated_cycles(program)
        times, by = [(step, c / chip.clock) for step, c in cycles], "the compiler's cycles"
    else:
        times, missing = hlo.roofline(program, peak, chip.bandwidth), {}
        by = "a roofline of each kernel that XLA makes"
    for call in report.kernels:
        if call.flops is None:
            missing[f"kernel {call.name}"] = (
                missing.setdefault(f"kernel {call.name}", 0) + call.runs
            )
    return Estimate(
        by=by,
        compute=sum(seconds for _, seconds in times),
        kernels=kernels,
        communication=sum(chip.seconds(c) for c in report.collectives),
        useful=report.ledger_flops / report.devices / peak,
        missing=missing,
        operations=hlo.operations(times),
    )
