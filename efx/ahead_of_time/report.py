"""What is known of the compiled programs of a run, as text for people and as plain data."""

import dataclasses
from collections import Counter, defaultdict

from efx.logging import quantity

_GIB = 2**30
_SHOWN = 5  # of the largest exchanges, the slowest operations


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      arguments: of a training step its state and batch. outputs: what is not written over these.
      temporaries: activations, gradients.
      beside: what else is there while the program runs: of the state of training what is no
        argument.
      chip: what a program may have. fraction: the part of it that JAX takes by itself.
      refused: what the program would need, if the compiler refused it for that; then nothing else
        of it is known.
    """

    chip: float
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0
    code: int = 0
    beside: int = 0
    fraction: float = 1.0
    refused: float = 0.0

    @property
    def needed(self):
        own = self.arguments + self.temporaries + self.outputs + self.code
        return self.beside + (self.refused or own)

    @property
    def fits(self):
        return not self.refused and self.needed <= self.chip

    def as_dict(self):
        return dataclasses.asdict(self) | {"needed": self.needed, "fits": self.fits}

    def verdict(self):
        need, have = _gib(self.needed), _gib(self.chip)
        if not self.fits:
            too_much = _gib(self.needed - self.chip)
            return f"does not fit: needs {need} of {have} a chip, {too_much} too much"
        text = f"fits: needs {need} of {have} a chip, {_gib(self.chip - self.needed)} to spare"
        if self.needed > self.fraction * self.chip:
            text += (
                f"; but JAX reserves only {self.fraction:.0%} of a GPU's memory; set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION to at least "
                f"{self.needed / self.chip + 0.01:.2f}"
            )
        return text


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step, or of another program, on each device.

    Attributes:
      by: what `compute` is estimated by. kernels: of attention, from their FLOPs at half of the
        peak. communication: of all exchanges, one after the other, at the full speed of all links.
      useful: of the ledger's FLOPs at the peak, of a training step; else 0.
      missing: {what: runs} of what is in none of these.
      operations: `hlo.Operation`s of `compute`, the slowest first.
    """

    by: str
    compute: float
    kernels: float
    communication: float
    useful: float
    missing: dict
    operations: list = dataclasses.field(default_factory=list)

    @property
    def step(self):
        """Communication hidden behind computation as far as it goes."""
        return max(self.compute + self.kernels, self.communication)

    @property
    def mfu(self):
        return self.useful / self.step

    @property
    def mfu_without_overlap(self):
        return self.useful / (self.compute + self.kernels + self.communication)


@dataclasses.dataclass(kw_only=True)
class Compiled:
    """A program on a topology. Of one that does not fit by itself nothing but `memory` is known, of
    one that cannot be compiled nothing but why: `error`, a line.

    Attributes:
      name: what it does. of: how much of it the numbers are of, in words.
      executed_flops: on all devices together; None where a program only copies.
      collectives: `hlo.Collective`s, the largest first. kernels: `hlo.KernelCall`s.
      unknown_loops: loops of unknown length, counted as one trip.
    """

    name: str
    of: str
    executed_flops: float | None = None
    memory: Memory | None = None
    estimate: Estimate | None = None
    collectives: list = dataclasses.field(default_factory=list)
    kernels: list = dataclasses.field(default_factory=list)
    unknown_loops: int = 0
    compile_seconds: float = 0.0
    error: str = ""

    def by_kind(self):
        """{kind of collective: (runs, bytes)} a step and device."""
        total = defaultdict(lambda: [0, 0])
        for c in self.collectives:
            total[c.kind][0] += c.runs
            total[c.kind][1] += c.bytes
        return {kind: tuple(total[kind]) for kind in sorted(total)}

    def kernel_runs(self):
        """{kernel: runs a step}"""
        runs = Counter()
        for call in self.kernels:
            runs[call.name] += call.runs
        return dict(runs)

    def as_dict(self):
        """All of it as plain data, with what follows from it."""
        fields = dataclasses.asdict(self)
        if self.memory:
            fields["memory"] = self.memory.as_dict()
        fields["collectives_by_kind"] = self.by_kind()
        fields["kernel_runs"] = self.kernel_runs()
        if self.estimate:
            fields["estimate"]["step"] = self.estimate.step
        return fields

    def text(self):
        """A few lines, of a program beside the training step."""
        lines = ["", f"{self.name}, {self.of}"]
        if self.error:
            return "\n".join([*lines, f"{'not compiled':13} {self.error}"])
        memory, estimate = self.memory, self.estimate
        lines.append(f"{'memory':13} {memory.verdict()}")
        held = [f"beside it {_gib(memory.beside)} of the training"] * bool(memory.beside)
        if memory.refused:
            return "\n".join(lines + [f"{'':13} {text}" for text in held])
        parts = ("arguments", "temporaries", "outputs")
        sizes = {name: getattr(memory, name) for name in parts}
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
        lines.append(f"{'':13} {'; '.join([*held, listed])}")
        if not estimate:
            return "\n".join(lines)
        moved = [
            f"{kind} x {runs}, {size / 1e6:,.0f} MB a chip"
            for kind, (runs, size) in self.by_kind().items()
        ]
        lines.append(f"{'exchanged':13} {'; '.join(moved) or 'nothing'}")
        took = f"{_ms(estimate.compute + estimate.kernels)} for"
        took += f" {quantity(self.executed_flops, 'FLOPs')} executed"
        if estimate.communication:
            took += f", communication {_ms(estimate.communication)} if not overlapped"
        return "\n".join([*lines, f"{'time, about':13} {took}", *self._left_out()])

    def _left_out(self):
        """Lines on what is not in the estimate."""
        lines = []
        if missing := self.estimate.missing:
            listed = ", ".join(f"{what} x {runs}" for what, runs in missing.items())
            lines.append(f"{'':13} not in the estimate: {listed}")
        if self.unknown_loops:
            loops = "loop" if self.unknown_loops == 1 else "loops"
            counts = "counts" if self.unknown_loops == 1 else "count"
            lines.append(
                f"{'':13} {self.unknown_loops} {loops} of unknown length {counts} as one trip"
            )
        return lines


@dataclasses.dataclass(kw_only=True)
class Report(Compiled):
    """The training step on a topology, the headline of what is said of a run.

    Attributes:
      tokens, ledger_flops: of a step on all devices together.
      advice: see `build.Training`.
    """

    name: str = "training step"
    of: str = ""
    topology: str
    device: str
    devices: int
    mesh: dict
    parameters: int
    tokens: int
    ledger_flops: float
    advice: str = ""

    def as_dict(self):
        fields = super().as_dict()
        if self.estimate:
            fields["estimate"] |= {
                "mfu": self.estimate.mfu,
                "mfu_without_overlap": self.estimate.mfu_without_overlap,
            }
        return fields

    def text(self):
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items()) or "one device"
        tokens, per_token = (
            quantity(self.tokens),
            quantity(self.ledger_flops / self.tokens, "FLOPs"),
        )
        lines = [
            f"{self.topology}: {self.devices} x {self.device}; mesh {mesh}",
            f"model         {quantity(self.parameters, 'parameters')}, {tokens} tokens a step,"
            f" {per_token} a token",
        ]
        if self.advice:
            lines.insert(1, f"{'':13} {self.advice}")
        if self.error:
            return "\n".join([*lines, f"{'not compiled':13} {self.error}"])
        memory, estimate = self.memory, self.estimate
        lines.append(f"memory        {memory.verdict()}")
        if memory.refused:
            return "\n".join(lines)
        lines.append(
            f"              state and batch {_gib(memory.arguments)}, temporaries"
            f" {_gib(memory.temporaries)}"
        )
        lines.append(
            f"FLOPs a step  {quantity(self.ledger_flops, 'FLOPs')} by the ledger,"
            f" {quantity(self.executed_flops, 'FLOPs')} executed (recomputation not counted)"
        )
        runs = ", ".join(f"{name} x {count}" for name, count in self.kernel_runs().items())
        lines.append(f"attention     {f'kernels: {runs}' if runs else 'plain XLA, no kernel'}")
        lines += self._communication()
        parts = f"{_ms(estimate.compute)} by {estimate.by}"
        if estimate.kernels:
            parts += f" + {_ms(estimate.kernels)} of kernels, by their FLOPs at half of the peak"
        lines.append(f"step, about   {parts}")
        lines += self._slowest()
        lines.append(
            f"              communication {_ms(estimate.communication)} at the links' full "
            "speed, if not overlapped"
        )
        lines.append(
            f"MFU, about    {estimate.mfu:.0%} with communication overlapped, "
            f"{estimate.mfu_without_overlap:.0%} without overlap"
        )
        return "\n".join([*lines, *self._left_out()])

    def _slowest(self):
        """Lines on the operations that take most of the time."""
        compute, operations = self.estimate.compute, self.estimate.operations
        if not operations:
            return []
        return [f"{'':13} the slowest:"] + [
            f"{'':15} {o.time / compute:.0%} {o.kind} x {o.runs}: {_what(o)}".rstrip()
            for o in operations[:_SHOWN]
        ]

    def _communication(self):
        """Lines on what devices exchange."""
        if not self.collectives:
            return ["exchanged     nothing"]
        lines, title = [], "exchanged"
        for kind, (runs, size) in self.by_kind().items():
            lines.append(f"{title:13} {kind} x {runs}, {size / 1e6:,.0f} MB a chip")
            title = ""
        lines.append(f"{'':13} the largest:")
        for c in self.collectives[:_SHOWN]:
            lines.append(
                f"{'':15} {c.kind} x {c.runs}, {c.bytes / 1e6:,.0f} MB"
                f"{f' among {c.hosts} hosts' * (c.hosts > 1)}: {_what(c)}".rstrip()
            )
        return lines


def _what(c):
    """The arrays and the place in the model of a `Collective` or an `Operation`."""
    shapes = c.shapes if len(c.shapes) < 60 else f"{c.shapes[:57]}..."
    return f"{shapes} {c.where.rpartition('body/closed_call/')[2][-70:]}"


def _gib(count):
    return f"{count / _GIB:.2f} GiB"


def _ms(seconds):
    return f"{1e3 * seconds:.1f} ms"
