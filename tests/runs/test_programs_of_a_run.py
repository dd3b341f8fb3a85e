"""`--mode=compile` compiles the programs that a run evaluates and samples with, and counts what is
on a device meanwhile: a run on fake devices and what is compiled ahead of it for these, compared.
"""

import devices
import jax
import numpy as np
import pytest

from efx import evaluate, flops, models, sample, train
from efx.ahead_of_time import compile as compile_lib
from efx.ahead_of_time import hlo, topology
from efx.configs import common
from efx.errors import UsageError
from efx.run_blocks import SampleConfig

GIB = 2**30
FEW = 200  # bytes
SETTINGS = {
    "steps": 2, "data.seq_len": 32, "data.batch_size": 4, "model.width": 32, "model.depth": 2,
    "model.attention.num_heads": 2, "train.dtype": "bfloat16",
    "optim.schedule.warmup_steps": 1, "checkpoint.every": 0, "evaluate.every": 1,
    "evaluate.batch_size": 8, "evaluate.max_batches": 1, "sample.every": 1,
    "sample.num_samples": 2, "sample.prompt": "ab", "sample.max_new_tokens": 4,
    "log.tensorboard": False, "mesh.data": 1,
}  # fmt: skip
RUNS = {
    "split and scanned": {"mesh.fsdp": 2, "model.scan_layers": True},
    "packed and averaged": {
        "mesh.data": 2, "data.packing": True, "data.document_bytes": 60,
        "model.depth_routing.kind": "mod", "optim.name": "schedule_free_adamw",
        "optim.schedule.kind": "constant", "optim.frozen": ".*embedding",
        "sample.prompt": "abcdefghijkl",
    },
}  # fmt: skip


class Recorded:
    """A jitted function, and what its first call was.

    Attributes:
      lowered: for the arguments of that call. bytes: of arrays on the first device then, but those
        that are `older` than the run.
    """

    def __init__(self, function, older):
        self.function, self.older, self.lowered, self.bytes = function, older, None, 0

    def __call__(self, *arguments):
        if self.lowered is None:
            self.bytes = newer(self.older)
            self.lowered = self.function.lower(*arguments)
        return self.function(*arguments)


def on_first_device():
    """{place in memory: bytes} of all arrays there."""
    shards = (shard for x in jax.live_arrays() for shard in x.addressable_shards)
    first = jax.devices()[0]
    own = [shard.data for shard in shards if shard.device == first]
    return {x.unsafe_buffer_pointer(): x.nbytes for x in own}


def newer(older):
    """Bytes of all arrays on the first device that were not there `older`."""
    return sum(size for place, size in on_first_device().items() if place not in older)


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def both(request, tmp_path_factory):
    """({program: how a run called it}, bytes that were there when the run had made copies to
    sample with, {program: (it as lowered ahead, the report of it)}, [report of these copies])."""
    folder = tmp_path_factory.mktemp("run")
    rows = np.random.default_rng(0).choice(list("abcd"), (200, 30))
    (folder / "text.txt").write_text("\n\n".join("".join(row) for row in rows))
    changes = SETTINGS | request.param | {"data.source": f"text:{folder / 'text.txt'}"}
    config = common.base()
    common.apply(config, changes | {"data.cache_dir": str(folder)})
    with devices.only(2), pytest.MonkeyPatch.context() as patch:
        # As on accelerators, where the first call has a program of its own.
        patch.setattr(sample, "prefill_of", lambda batch_size, cache_size: (8, True))
        return *called_by_a_run(config, folder / "run"), *compiled_ahead(config, patch)


def called_by_a_run(config, folder):
    called, copied, older = {}, [], on_first_device()
    steps, compiled, unroll = evaluate.steps, sample._compiled, models.unroll_variables

    def recorded(name, function):
        def call(*arguments):
            return called.setdefault(name, Recorded(function, older))(*arguments)

        return call

    def recorded_steps(*of):
        found = steps(*of)
        ways = [f" with {selection} routing" * (len(found) > 1) for selection in found]
        return {
            selection: recorded(f"evaluation{way}", step)
            for way, (selection, step) in zip(ways, found.items(), strict=True)
        }

    def recorded_programs(*of):
        first, prefill, decode, make_room = compiled(*of)
        return (
            recorded("sampling: prefill", first),
            recorded("sampling: later chunks of a prompt", prefill),
            recorded("sampling: decoding", decode),
            make_room,
        )

    def recorded_copies(model, variables):
        copies = unroll(model, variables)
        copied.append(newer(older))
        return copies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "steps", recorded_steps)
        patch.setattr(sample, "_compiled", recorded_programs)
        patch.setattr(models, "unroll_variables", recorded_copies)
        train.train_and_evaluate(config, folder)
    return called, copied[0]


def compiled_ahead(config, patch):
    lowered = []

    def compiled(program):
        lowered.append(program)
        return program.compile()

    described(patch, compiled)
    reports = [*compile_lib.compile_programs(config, "cpu", 257)]
    assert not any(report.error for report in reports), reports
    copies = [report for report in reports if report.estimate is None]
    compiled_reports = [report for report in reports if report not in copies]
    return {r.name: (low, r) for low, r in zip(lowered, compiled_reports, strict=True)}, copies


def described(patch, compiled):
    """Has the fake devices be those of a topology, and programs compiled by this function."""
    chip = topology.Chip("cuda", 80 * GIB, 1e12, 1e11)
    target = topology.Topology("cpu", chip, tuple(jax.devices()), 1)
    patch.setattr(topology, "describe", lambda name: target)
    patch.setattr(flops, "device_peak", lambda dtype, device: 1e15)
    patch.setattr(compile_lib, "_compiled", compiled)


def test_the_same_programs_are_compiled(both):
    """By what they compute, need and exchange."""
    called, _, ahead, _ = both
    assert ahead.keys() == called.keys() | {"training step"}
    for name, record in called.items():
        lowered, report = ahead[name]
        program, of_the_run = lowered.compile(), record.lowered.compile()
        needs, expected = program.memory_analysis(), of_the_run.memory_analysis()
        for part in ("temp", "output", "alias"):
            key = f"{part}_size_in_bytes"
            assert getattr(needs, key) == getattr(expected, key), (name, part)
        assert program.cost_analysis()["flops"] == of_the_run.cost_analysis()["flops"], name
        exchanged = hlo.collectives(hlo.Program(of_the_run.as_text()), [0] * 2)
        sizes = [(c.kind, c.runs, c.bytes) for c in report.collectives]
        assert sizes == [(c.kind, c.runs, c.bytes) for c in exchanged], name
        if name.startswith("evaluation"):
            assert lowered.as_text() == record.lowered.as_text(), name
        assert report.executed_flops > 0 and report.estimate.step > 0


def test_what_is_there_meanwhile_is_counted(both):
    """State, averages and the next batch of the training, copies for sampling, the cache: but for
    some numbers, which a run also keeps, these are all arrays when a program is called."""
    called, _, ahead, _ = both
    for name, record in called.items():
        memory = ahead[name][1].memory
        assert memory.beside + memory.arguments == pytest.approx(record.bytes, abs=FEW), name
        assert memory.needed >= memory.beside + memory.arguments + memory.temporaries


def test_unrolled_copies_of_scanned_layers_are_counted(both):
    _, copied, ahead, reports = both
    assert bool(reports) == (ahead["training step"][1].mesh == {"fsdp": 2})
    for report in reports:
        assert report.memory.needed == pytest.approx(copied, abs=FEW)
        assert report.memory.outputs > 0 and report.memory.arguments == 0


@pytest.mark.parametrize(
    "prompt, new, longest", [("\n", 30, 2), ("a" * 20, 4, 21), ("\n", 31, 16), ("ü" * 9, 20, 19)]
)
def test_how_much_of_a_text_is_read_in_a_row(prompt, new, longest):
    """The prompt, or half of the 32 tokens of context once a text has outgrown them."""
    config = SampleConfig(prompt=prompt, max_new_tokens=new)
    assert sample.longest_read(config, 32) == longest


def test_each_program_is_told_of_whatever_became_of_the_others(monkeypatch):
    """One that the compiler refuses for its memory, in vain or with an error of another kind."""
    refused = [
        ValueError("no\nluck"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 2.00G of 1.00G hbm."),
        UsageError("config.model.attention.kernel='splash': not here"),
    ]

    def compiled(program):
        if refused:
            raise refused.pop(0)
        return program.compile()

    config = common.base()
    common.apply(config, SETTINGS | {"mesh.data": -1, "train.dtype": "float32", "steps": 0})
    with devices.only(1):
        described(monkeypatch, compiled)
        step, evaluation, prefill, decoding = compile_lib.compile_programs(config, "cpu", 257)
    assert step.error == "ValueError: no luck" and step.memory is None
    assert evaluation.error == "" and not evaluation.memory.fits
    # The state of the training is there beside it: parameters that it reads, and the optimiser's.
    assert evaluation.memory.beside > 8 * step.parameters
    assert evaluation.memory.needed == 2 * GIB + evaluation.memory.beside
    assert prefill.error == "config.model.attention.kernel='splash': not here"
    assert decoding.memory.fits and decoding.estimate.step > 0
    common.apply(config, {"sample.every": 0})
    with devices.only(1):
        described(monkeypatch, compiled)
        names = [report.name for report in compile_lib.compile_programs(config, "cpu", 257)]
    assert names == ["training step", "evaluation"]
