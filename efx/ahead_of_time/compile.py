"""From a config and the name of a topology to a `Report` and what goes with it."""

import contextlib
import functools
import json
import logging
import re
import time

import jax
import numpy as np

from efx import models, run_dir, sampling
from efx.ahead_of_time import hlo, topology
from efx.ahead_of_time.report import Compiled, Estimate, Memory, Report
from efx.config import schema
from efx.config.load import to_config
from efx.data import tokenizers
from efx.errors import UsageError
from efx.layers import flops
from efx.logging import quantity
from efx.parallel import sharding, signals
from efx.train import evaluator, memory, optim, setup

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_and_report(config, topology_name, *, vocab_size=None, workdir=None, as_json=False):
    """What `--mode=compile` does: prints a report of the training step, and of each other program
    of the run, as soon as it is compiled, as text; or all as JSON.

    Args:
      vocab_size: number of token ids; None: those of the config's tokenizer.
      workdir: run directory whose tokenizer counts, or None.
    """
    config = to_config(config)
    if vocab_size is None:
        vocab_size = _vocab_size(config, workdir)
    done = []
    for compiled in compile_programs(config, topology_name, vocab_size):
        done.append(compiled)
        if not as_json:
            print(compiled.text(), flush=True)
    if as_json:
        step, *others = (compiled.as_dict() for compiled in done)
        print(json.dumps(step | {"programs": others}))
    else:
        print("\nEstimates exclude kernel launches and waiting; nothing was run.")
    if refused := [compiled.name for compiled in done if compiled.error]:
        raise UsageError(f"--topology={topology_name}: not compiled: {', '.join(refused)}")


def _vocab_size(config, workdir):
    """Of the tokenizer of a run, or of a config whose tokenizer has a size without its text."""
    if workdir and (saved := run_dir.saved_tokenizer(workdir)):
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


def compile_programs(config, topology_name, vocab_size):
    """Yields the `Report` on the training step of a config on a topology, then a `Compiled` for the
    step of each earlier stage of its capacity and for each program that evaluates and samples in
    such a training, one after the other.

    UsageError for what cannot be asked. What needs more memory than there is and what the compiler
    refuses for another reason have a report, too.
    """
    run = _Run(config, topology_name, vocab_size)
    yield run.training_step()
    yield from run.earlier_stages()
    yield from run.evaluation()
    if run.config.sample.every:
        yield from run.sampling()


class _Run:
    """A run of a config, on devices that are not there."""

    def __init__(self, config, topology_name, vocab_size):
        self.target = topology.describe(topology_name)
        devices = self.target.devices
        self.experiment = e = setup.without_text(config, vocab_size, devices)
        self.config = e.config
        self.one = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), devices[:1])
        # The products of kernels are not in their program as such, so those of plain XLA are
        # counted.
        plain = schema.replaced(e.config, {"model.attention.kernel": "xla"})
        self.plain_model = setup.without_text(plain, vocab_size, devices).model
        with self._one_device():  # kernels are chosen for these devices here, too
            self.training = setup.Training(e)
            self._count_memory()

    @contextlib.contextmanager
    def _one_device(self):
        with self._asked(), jax.set_mesh(self.one):
            yield

    def _asked(self):
        """Kernels ask JAX about its own device, where it is one of the topology that counts."""
        return jax.default_device(self.target.devices[0])

    def _count_memory(self):
        """Of what is on a device while the run evaluates and samples."""
        state, name = self.training.shapes, self.config.optim.name

        def evaluated(state):
            return optim.eval_params(name, state.opt_state, state.params)

        new = memory.is_new(evaluated, state)
        leaves = zip(jax.tree.leaves(state.params), new, strict=True)
        self.averages = [leaf for leaf, is_new in leaves if is_new]  # beside the parameters
        # The next batch is there before the run pauses.
        held = state, self.training.teacher, self.training.batch, self.averages
        self.held = memory.on_each_device(held)
        self.variables = {"params": state.params, **state.variables}

    def training_step(self):
        e = self.experiment
        report = Report(
            topology=self.target.name,
            device=self.target.devices[0].device_kind,
            devices=len(self.target.devices),
            mesh={axis: size for axis, size in e.mesh.shape.items() if size > 1},
            parameters=flops.count_params(self.training.shapes.params),
            tokens=e.tokens_per_step,
            ledger_flops=e.ledger.train_flops(e.tokens_per_step) + e.teacher_flops(),
            executed_flops=self._flops_of_step(e.model),
            advice=self.training.advice(),
        )
        _log.info("compiling for %s; this may take minutes", self.target.name)
        useful = report.ledger_flops / report.devices / self._peak()
        with sharding.use(e.mesh, e.rules):
            self._compile(report, lambda: self.training.trace_step(e.model), e.mesh, useful=useful)
        return report

    def earlier_stages(self):
        """Yields a `Compiled` for the training step of each stage of the capacity but the last, the
        first of which is often the one that needs most."""
        e = self.experiment
        for stage in e.stages[:-1]:
            report = Compiled(
                name=f"training step at capacity {stage.model.config.depth_routing.capacity:g}",
                of=f"{quantity(e.tokens_per_step)} tokens",
                executed_flops=self._flops_of_step(stage.model),
            )
            with sharding.use(e.mesh, e.rules):
                trace = functools.partial(self.training.trace_step, stage.model)
                self._compile(report, trace, e.mesh)
            yield report

    def _flops_of_step(self, model):
        """Executed FLOPs of a training step of this model, a teacher's included."""
        e, c = self.experiment, self.config
        rows = c.data.batch_size // c.train.accumulation
        forward = flops.executed(model, c.data.seq_len, rows)
        of_model = flops.TRAIN_FACTOR * c.train.accumulation * forward
        return of_model + e.teacher_flops(nominal=False)

    def evaluation(self):
        """Yields a `Compiled` for each way of routing in evaluations."""
        e, c = self.experiment, self.config
        state, mesh = self.training.shapes, e.mesh
        shapes = evaluator.shapes_of_step(c, mesh, e.rules, state.params, state.variables)
        beside = self.held - memory.on_each_device(self.variables)
        with self._one_device():
            plain = evaluator.steps(self.plain_model, c, self.one, e.rules)
        steps = evaluator.steps(e.model, c, mesh, e.rules)
        for selection, step in steps.items():
            report = Compiled(
                name="evaluation" + f" with {selection} routing" * (len(steps) > 1),
                of=f"a batch of {c.evaluate.batch_size} rows",
                executed_flops=self._flops(plain[selection], shapes),
            )
            with sharding.use(mesh, e.rules):
                trace = functools.partial(step.trace, *shapes)
                self._compile(report, trace, mesh, beside, shapes)
            yield report

    def sampling(self):
        """Yields a `Compiled` for each program that samples are made with, after one for the copies
        of scanned layers' parameters that they read."""
        e, rows = self.experiment, self.config.sample.num_samples
        with self._one_device():
            variables = unrolled = self.variables
            if e.model.config.scan_layers:
                unrolled = setup.variable_shapes(e, models.unrolled(e.model))
            program, plain = (
                sampling.Program.of(model, rows, model.context, e.rules)
                for model in (e.model, self.plain_model)
            )
            mesh, is_split = sampling.mesh_for(variables, self.target.devices[0])
        if not is_split:
            variables, unrolled = _replicated(variables, mesh), _replicated(unrolled, mesh)
        with sharding.use(mesh, program.rules):
            is_new = memory.is_new(lambda x: models.unroll_variables(e.model, x), variables)
            state = _replicated(program.state_shapes(), mesh)
        leaves = list(zip(jax.tree.leaves(unrolled), is_new, strict=True))
        kept = memory.on_each_device([leaf for leaf, is_copy in leaves if not is_copy])
        copies = memory.on_each_device([leaf for leaf, is_copy in leaves if is_copy])
        if copies:
            yield Compiled(
                name="sampling: copies of the parameters",
                of="unrolled",
                memory=self._memory(beside=self.held, outputs=copies),
            )
        prefill, decode = program.jitted()
        zero, zero_B, false_B = np.int32(0), np.zeros(rows, np.int32), np.zeros(rows, bool)
        tokens_BT = np.zeros((rows, program.chunk), np.int32)
        # The tokenizer decides how many stop tokens there are, and is not loaded here.
        options = dict(
            temperature=np.float32(1),
            top_k=zero,
            top_p=np.float32(1),
            stop_ids=np.zeros(1, np.int32),
        )
        programs = {
            "prefill": (
                f"{program.chunk} tokens",
                functools.partial(prefill.trace, program.decode_first),
                functools.partial(plain.prefill, plain.decode_first),
                (unrolled, *state, false_B, tokens_BT, tokens_BT, np.uint32(0)),
            ),
            "decoding": (
                "one token",
                decode.trace,
                plain.decode,
                (unrolled, *state, zero_B, false_B, zero_B.astype(np.uint32), zero, zero, options),
            ),
        }
        each = f"of {rows} rows" if rows > 1 else "of one row"
        for name, (tokens, trace, function, shapes) in programs.items():
            report = Compiled(
                name=f"sampling: {name}",
                of=f"{tokens} {each}",
                executed_flops=self._flops(function, shapes),
            )
            with sharding.use(mesh, program.rules):
                trace = functools.partial(trace, *shapes)
                self._compile(report, trace, mesh, self.held - kept, shapes)
            yield report

    def _flops(self, function, shapes):
        """Executed FLOPs of a function, as one device would compute all of it."""
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        with self._one_device():
            return flops.jaxpr_flops(function, *whole)

    def _peak(self):
        return flops.device_peak(self.config.train.dtype, self.target.devices[0])

    def _memory(self, **parts):
        chip = self.target.chip
        fraction = 1.0 if chip.kind == "tpu" else topology.GPU_FRACTION
        return Memory(chip=chip.memory, fraction=fraction, **parts)

    def _compile(self, report, trace, mesh, beside=0, arguments=(), useful=0.0):
        """Compiles a program and has the `Compiled` say what it needs and does.

        Args:
          trace: () -> the program, traced. mesh: its devices.
          beside: bytes on a device that are none of its arguments. arguments: these as shapes.
        """
        started = time.monotonic()
        try:
            with self._asked():
                compiled = _compiled(trace().lower())
        except Exception as error:  # compilers and kernels raise what they like
            report.memory = _refused(str(error), beside)
            if report.memory is None:
                reason = " ".join(str(error).split())[:500]
                is_told = isinstance(error, UsageError)
                report.error = reason if is_told else f"{type(error).__name__}: {reason}"
            return
        report.compile_seconds = time.monotonic() - started
        needs = compiled.memory_analysis()
        # Arguments that a program makes no use of are left out of it, and are there all the same.
        unused = max(0, memory.on_each_device(arguments) - needs.argument_size_in_bytes)
        report.memory = self._memory(
            arguments=needs.argument_size_in_bytes,
            temporaries=needs.temp_size_in_bytes,
            outputs=needs.output_size_in_bytes - needs.alias_size_in_bytes,
            code=needs.generated_code_size_in_bytes,
            beside=beside + unused,
        )
        program = hlo.Program(compiled.as_text())
        report.collectives = hlo.collectives(program, self.target.hosts_of(mesh))
        report.kernels = hlo.kernels(program)
        report.unknown_loops = program.unknown_loops
        report.estimate = _estimate(program, report, self.target, self._peak(), useful)


def _replicated(shapes, mesh):
    """The shapes, with the sharding of arrays that every device of the mesh holds."""
    layout = sharding.replicated(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), shapes)


def _compiled(lowered):
    """`lowered.compile()`, for which Ctrl-C does not have to wait, see `efx.parallel.signals`."""
    return signals.BackgroundTask(lowered.compile).result()


def _refused(message, beside=0):
    """The `Memory` of a program for which the compiler found too little; None for other errors.

    XLA says either "Used 17.90G of 15.75G hbm" or "... required for HLO temporaries (1.17T) exceeds
    available HBM (15.75G)".
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)", message) or re.search(
        r"required for .*?\(([\d.]+)([KMGT]?)\) exceeds available .*?\(([\d.]+)([KMGT]?)\)", message
    )
    if not found:
        return None
    needed, limit = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
    return Memory(refused=needed, chip=limit, beside=beside)


def _estimate(program, report, target, peak, useful):
    """Seconds of a program: what each device computes, its kernels, its communication."""
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
        useful=useful,
        missing=missing,
        operations=hlo.operations(times),
    )
