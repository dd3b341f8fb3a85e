"""benchmarks/accelerator.py: resuming a call, its time limit, and its cheap parts for real."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import psutil
import pytest
from test_reference import CURVE, make_run, shifted

from benchmarks import accelerator, accelerator_parts, children, common
from benchmarks.accelerator_parts import Setup, Skipped, Unfinished
from efx import memory
from efx.configs import mod
from efx.layers import attend
from efx.layers.attention_kernels import KERNELS, Kernel
from efx.studies import reference, results


@pytest.fixture
def call(tmp_path, capsys):
    """Runs the program in smoke mode, in this process unless `apart`: (status, output)."""

    def run(*argv, smoke=True, apart=False, fresh=True):
        flags = ["--smoke"] * smoke + [f"--workdir={tmp_path}"]
        if not apart:
            flags += [f"--tried={tmp_path / 'tried.txt'}"]
            if fresh:
                (tmp_path / "tried.txt").unlink(missing_ok=True)
        return accelerator.main([*argv, *flags]), "".join(capsys.readouterr())

    run.path = tmp_path / "smoke/accelerator-smoke.json"
    return run


@pytest.fixture
def parts(monkeypatch):
    """Two parts of two measurements each. behave: {title: the error to raise}; measured: titles."""
    fake = SimpleNamespace(behave={}, measured=[])

    def measure(title):
        fake.measured.append(title)
        if title in fake.behave:
            raise fake.behave[title]
        return {", a": {"ms": 1.0 + len(fake.measured)}, ", b": {"ms": 9.0, "says": "said"}}

    def part(*titles):
        return lambda setup: ((title, partial(measure, title)) for title in titles)

    named = {"one": part("1st", "2nd"), "two": part("3rd", "4th")}
    monkeypatch.setattr(accelerator, "PARTS", named)
    return fake


def rows(call):
    return {row["name"]: row["cells"] for row in json.loads(call.path.read_text())["rows"]}


def test_a_second_call_resumes_where_the_first_ended(call, parts):
    parts.behave["2nd"] = Unfinished()
    status, said = call("--parts=one")
    assert status == 3 and "time is up within '2nd'" in said
    assert list(rows(call)) == ["1st, a", "1st, b"]
    parts.behave.clear()
    status, said = call("--parts=one")
    assert status == 0 and parts.measured == ["1st", "2nd", "2nd"]
    assert list(rows(call)) == ["1st, a", "1st, b", "2nd, a", "2nd, b"]
    assert "1st, a; ms 2.00" in said
    assert call("--parts=one")[0] == 0 and len(parts.measured) == 3


def test_no_measurement_starts_that_would_exceed_the_time_limit(call, parts, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(accelerator, "time", SimpleNamespace(monotonic=lambda: clock.now))
    fast = accelerator.PARTS["one"]

    def slowly(measure):
        clock.now += 61
        return measure()

    def slow(setup):
        return ((title, partial(slowly, measure)) for title, measure in fast(setup))

    monkeypatch.setitem(accelerator.PARTS, "one", slow)
    status, said = call("--parts=one", "--minutes=2")
    assert status == 3 and parts.measured == ["1st"] and "time is up before '2nd'" in said
    assert call("--parts=one", "--minutes=0")[0] == 3 and parts.measured == ["1st"]
    assert call("--parts=one", "--minutes=2")[0] == 0 and parts.measured == ["1st", "2nd"]


def test_again_repeats_one_part(call, parts):
    assert call("--parts=two")[0] == call("--parts=one")[0] == 0
    assert list(rows(call))[0] == "1st, a"  # in the order of the parts
    run = call.path.parent / "one/run"
    run.mkdir(parents=True)
    parts.behave["1st"] = Unfinished()
    assert call("--parts=one", "--again")[0] == 3
    assert list(rows(call)) == ["3rd, a", "3rd, b", "4th, a", "4th, b"] and not run.exists()
    parts.behave.clear()
    assert call("--parts=one")[0] == 0
    assert parts.measured[4:] == ["1st", "1st", "2nd"]


def test_failed_and_skipped_measurements_are_retried_last(call, parts):
    parts.behave |= {"1st": RuntimeError("out of\nmemory"), "3rd": Skipped("no text")}
    for _ in range(2):
        assert call("--parts=one")[0] == 1
        assert rows(call)["1st"] == {"says": "FAILED: RuntimeError: out of"}
        assert call("--parts=two")[0] == 4
        assert rows(call)["3rd"] == {"says": "skipped: no text"}
    assert parts.measured == ["1st", "2nd", "3rd", "4th", "1st", "3rd"]
    parts.behave.clear()
    assert call("--parts=one")[0] == call("--parts=two")[0] == 0


def test_a_fresh_process_resumes_after_an_error_of_the_device(call, parts):
    parts.behave["1st"] = jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")
    status, _ = call("--parts=one")
    assert status == accelerator.GO_ON
    assert parts.measured == ["1st"]
    # This call does not retry it.
    assert call("--parts=one", fresh=False)[0] == 1 and parts.measured == ["1st", "2nd"]
    parts.behave.clear()
    assert call("--parts=one")[0] == 0 and parts.measured == ["1st", "2nd", "1st"]


def test_the_measurement_a_process_died_in_is_recorded(call, parts):
    parts.behave["1st"] = KeyboardInterrupt()  # as after a crash, nothing is recorded
    with pytest.raises(KeyboardInterrupt):
        call("--parts=one")
    assert call("--parts=one", fresh=False)[0] == 1
    assert rows(call)["1st"] == {"says": "FAILED: the process ended within it"}
    assert parts.measured == ["1st", "2nd"]


def test_each_part_runs_in_its_own_process(call, parts, monkeypatch):
    statuses, commands, tries = [], [], iter(range(100))

    def run(command, deadline, grace, env):
        commands.append([str(word) for word in command])
        tried = accelerator.Tried(command[command.index("--tried") + 1])
        tried.add(f"title {next(tries)}")
        return statuses.pop(0)

    monkeypatch.setattr(accelerator.children, "run", run)

    def ran(*argv, ends):
        statuses[:], commands[:] = ends, []
        status, _ = call(*argv, apart=True)
        return status, [words[words.index("--parts") + 1].split(",")[0] for words in commands]

    assert ran(ends=[1, 3]) == (3, ["one", "two"])  # an unfinished part decides the status
    assert ran(ends=[0, 1]) == (1, ["one", "two"])
    assert ran(ends=[4, 0]) == (4, ["one", "two"])
    # A fresh process after a crash or an error of the device does not forget again.
    assert ran("--again", ends=[-6, accelerator.GO_ON, 0, 0]) == (0, [*3 * ["one"], "two"])
    assert ["--again" in command for command in commands] == [True, False, False, True]
    # A part that dies without measuring is not restarted forever.
    monkeypatch.setattr(accelerator.Tried, "add", lambda self, title: None)
    assert ran("--parts=one", ends=[-6]) == (1, ["one"])


def test_a_call_ends_within_nine_minutes(call, parts, monkeypatch):
    """Though one part takes its time and the next needs all the grace to end."""
    clock, calls = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(accelerator, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def run(command, deadline, grace, env):
        calls.append(command)
        minutes = float(command[command.index("--minutes") + 1])
        # A part measures its own time against the same end.
        assert clock.now + 60 * minutes == pytest.approx(100 + 9 * 60, abs=0.1)
        if len(calls) == 1:
            accelerator.Tried(command[command.index("--tried") + 1]).add("1st")
            clock.now = deadline - 1
            return accelerator.GO_ON
        clock.now = max(clock.now + 1, deadline) + grace + 1
        raise children.Late

    monkeypatch.setattr(accelerator.children, "run", run)
    status, said = call(apart=True)
    assert status == 3 and "'1st'" in said
    assert clock.now < 100 + 9 * 60


@pytest.mark.slow
def test_parts_run_in_processes(tmp_path, capfd):
    status = accelerator.main(["--smoke", "--parts=matmul", f"--workdir={tmp_path}"])
    said = capfd.readouterr().out
    assert status == 0 and "product of 32, float32; ms" in said, said


# ---- the parts ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_kernel_is_found(monkeypatch):
    """One that ignores windows, refuses softcap and float32 with gaps, and fails on documents."""

    def reason(case):
        if case.softcap:
            return "has no softcap"
        return "takes no float32" if case.gaps and case.dtype == jnp.float32 else None

    def run(case, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, scale):
        if case.documents:
            raise jax.errors.JaxRuntimeError("CUDA_ERROR")
        options = dict(scale=scale, softcap=case.softcap, segment_ids_BT=segment_ids_BT)
        return attend.attend(q_BTNH, k_BSKH, v_BSKH, kernel="xla", **options)

    monkeypatch.setitem(KERNELS, "cudnn", Kernel("cpu", reason, run))
    masks = ("causal", "window", "softcap", "gaps", "documents")
    monkeypatch.setattr(accelerator_parts, "MASKS", masks)
    monkeypatch.setattr(accelerator_parts, "LENGTH", 120)
    found = dict(accelerator_parts.kernels(SimpleNamespace(smoke=False)))
    found = {mask: found[f"attention, {mask}, cudnn"]() for mask in masks}
    assert found["causal"][", float32"]["says"] == "right"
    assert found["window"][", float32"]["error"] > 0.05
    assert found["window"][", float32"]["says"].startswith("FAILED")
    assert found["softcap"] == {"": {"says": "refused: has no softcap"}}
    assert found["gaps"][", float32"] == {"says": "refused: takes no float32"}
    assert found["documents"] == {", bfloat16": {"says": "FAILED: JaxRuntimeError: CUDA_ERROR"}}


FULL = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 1.00GiB (1073741824B) on device ordinal 0",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.90G of 15.75G hbm.",
    "RESOURCE_EXHAUSTED: Attempting to allocate 2.00G. That was not possible. 1.20G are free.",
)
OF_A_KERNEL = (
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144, available: 232448",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not be possible to run "
    "out of scoped vmem",
    "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
)


def test_full_memory_is_told_from_limits_of_a_kernel():
    errors = [jax.errors.JaxRuntimeError(message) for message in (*FULL, *OF_A_KERNEL)]
    found = list(map(memory.is_full, errors))
    assert found == [True] * len(FULL) + [False] * len(OF_A_KERNEL)


def test_the_tests_for_a_device_exist(root):
    for path, names in accelerator_parts.SUITE.values():
        assert f"def {names.split()[0]}(" in (root / path).read_text(), names


def test_a_batch_that_does_not_fit_is_halved(monkeypatch):
    tried = []

    def steps(configs, vocab, rounds, warmup, compiled):
        (config,) = configs.values()
        assert compiled == (None if tried else {"": "the whole batch's"})
        tried.append(config.data.batch_size)
        if config.data.batch_size > 4 or vocab == 0:
            raise jax.errors.JaxRuntimeError(FULL[0] if vocab else OF_A_KERNEL[0])
        return {"": config.data.batch_size}

    monkeypatch.setattr(common, "training_steps", steps)
    config = mod.get_config()
    assert config.data.batch_size == 16
    whole = concurrent.futures.Future()
    whole.set_result("the whole batch's")
    assert accelerator_parts._fitting(config, 64, 1, whole) == 4 and tried == [16, 8, 4]
    tried.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory"):
        accelerator_parts._fitting(config, 0, 1, whole)
    assert tried == [16]  # a smaller batch would not fit either


def test_training_steps_are_compared_by_tokens(monkeypatch):
    """Time, FLOPs and the fraction of the possible saving, also of batches that differ."""

    def fitting(name, vocab, rounds, compiled):
        if name == "bad":
            raise RuntimeError("out of memory")
        batch, seconds, per_token = {"dense": (8, 2.0, 100.0), "MoD": (4, 0.75, 60.0)}[name]
        return SimpleNamespace(
            batch=batch,
            times=SimpleNamespace(median=seconds),
            memory=1e9,
            tokens_per_second=batch * 10 / seconds,
            per_token=per_token,
            nominal=per_token * batch * 10,
        )

    class Config(str):
        train = SimpleNamespace(dtype="bfloat16")

    monkeypatch.setattr(accelerator_parts, "_fitting", fitting)
    monkeypatch.setattr(accelerator_parts, "compiled_together", lambda configs, _: dict(configs))
    monkeypatch.setattr(accelerator_parts.flops, "device_peak", lambda dtype: 1000.0)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    configs = {name: Config(name) for name in ("dense", "MoD", "bad")}
    setup = Setup(True, None, None, 0.0)
    found = accelerator_parts._steps(setup, configs, mfu_target=0.5, saving_target=0.9)
    assert found["dense"]["MFU"] == 0.5 and found["dense"]["says"].endswith("reached")
    assert found["MoD"]["time / dense"] == 0.75 and found["MoD"]["FLOPs / dense"] == 0.6
    assert "0.800" in found["MoD"]["says"] and "MISSED" in found["MoD"]["says"]
    assert found["bad"]["says"] == "FAILED: RuntimeError: out of memory"


def gone(pid):
    """Whether a process ends within some seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_late_process_ends_with_its_children(tmp_path):
    file = tmp_path / "pid"
    setup = Setup(True, tmp_path, tmp_path, time.monotonic() + 1)
    with pytest.raises(Unfinished):
        setup.run(["bash", "-c", f"sleep 100 & echo $! > {file}; wait"])
    assert gone(int(file.read_text()))
    code = "import os; raise SystemExit(int(os.environ['STATUS']))"
    assert setup.run([sys.executable, "-c", code], STATUS="7") == 7


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_children_of_a_killed_call_end(number, tmp_path, root):
    file = tmp_path / "pid"
    code = "import sys; from benchmarks import children; children.run(sys.argv[1:], 1e9)"
    sleep = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    command = [sys.executable, "-c", code, sys.executable, "-c", sleep]
    process = subprocess.Popen(command, cwd=root)
    while not (file.is_file() and file.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(30)
    assert gone(int(file.read_text()))


def test_curves_of_the_recipe_are_recorded_or_compared(tmp_path, root):
    path = tmp_path / "curves.json"
    known = results.read_result(root / reference.CURVES)
    results.write_result(path, known | {"curves": known["curves"] | {"gpu": None}})

    def measured(name, device, off=0.0):
        setup = Setup(False, tmp_path / name, tmp_path / "input.txt", 0.0, path)
        for seed, title in enumerate(("dense", "dense, seed 1", "dense, seed 2")):
            folder = setup.runs("characters") / title
            curve = shifted(off + 0.01 * seed)
            make_run(folder, curve, recipe="gpu", seed=seed, device=device)
        *_, (_, measure) = accelerator_parts.characters(setup)
        (cells,) = measure().values()
        return cells["says"]

    assert measured("a", "H100").startswith("recorded")
    curves = reference.read_curves(path)["curves"]["gpu"]
    assert curves["device"] == "1 x H100" and list(curves["seeds"]) == ["0", "1", "2"]
    assert curves["seeds"]["0"]["eval/loss"]["5000"] == CURVE[-1]
    # Runs of another machine are compared with them.
    assert measured("b", "H200").startswith("beside")
    assert measured("c", "H200", off=0.5).startswith("FAILED")
    assert reference.read_curves(path)["curves"]["gpu"] == curves
