"""benchmarks/accelerator.py: what a call leaves for the next one, and its cheap parts for real."""

import concurrent.futures
import json
import os
import pathlib
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
from efx.errors import UsageError
from efx.layers import attend, attention_kernels
from efx.layers.attention_kernels import KERNELS, Kernel
from efx.studies import reference, results, step_time


@pytest.fixture
def call(tmp_path, capsys):
    """Calls the program in smoke mode, with parts in this process unless `apart`: (exit status,
    what it printed)."""

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
    """Two parts of two measurements each; `behave` says by title what happens in one, and
    `measured` which were made."""
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


def test_a_second_call_goes_on_where_the_first_ended(call, parts):
    parts.behave["2nd"] = Unfinished()
    status, said = call("--parts=one")
    assert status == 3 and "time is up within '2nd'" in said
    assert list(rows(call)) == ["1st, a", "1st, b"]
    parts.behave.clear()
    status, said = call("--parts=one")
    assert status == 0 and parts.measured == ["1st", "2nd", "2nd"]
    assert list(rows(call)) == ["1st, a", "1st, b", "2nd, a", "2nd, b"]
    assert "1st, a; ms 2.00" in said and "2nd, b; ms 9.00; said" in said
    assert call("--parts=one")[0] == 0 and len(parts.measured) == 3


def test_no_measurement_is_begun_that_would_last_too_long(call, parts, monkeypatch):
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


def test_again_forgets_one_part(call, parts):
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


def test_what_failed_or_was_skipped_is_tried_again_last(call, parts):
    parts.behave |= {"1st": RuntimeError("out of\nmemory"), "3rd": Skipped("no text")}
    for _ in range(2):
        assert call("--parts=one")[0] == 1
        assert rows(call)["1st"] == {"says": "FAILED: RuntimeError: out of"}
        status, said = call("--parts=two")
        assert status == 4 and "NOT MEASURED: 3rd" in said  # and not 0, as if it were
        assert rows(call)["3rd"] == {"says": "skipped: no text"}
    assert parts.measured == ["1st", "2nd", "3rd", "4th", "1st", "3rd"]
    parts.behave.clear()
    parts.behave["2nd"] = Unfinished()
    call("--parts=one", "--again")
    parts.behave["1st"] = RuntimeError("again")
    parts.measured.clear()
    parts.behave.pop("2nd")
    assert call("--parts=one")[0] == 0 and parts.measured == ["2nd"]
    assert call("--parts=two")[0] == call("--parts=one")[0] == 0


def test_after_an_error_of_the_device_a_fresh_process_goes_on(call, parts):
    parts.behave["1st"] = jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")
    status, said = call("--parts=one")
    assert status == accelerator.GO_ON and "in a fresh process" in said
    assert parts.measured == ["1st"]
    # What this call has tried is not tried again.
    assert call("--parts=one", fresh=False)[0] == 1 and parts.measured == ["1st", "2nd"]
    parts.behave.clear()
    assert call("--parts=one")[0] == 0 and parts.measured == ["1st", "2nd", "1st"]


def test_what_a_process_died_of_is_a_row(call, parts):
    parts.behave["1st"] = KeyboardInterrupt()  # which leaves as little as a crash
    with pytest.raises(KeyboardInterrupt):
        call("--parts=one")
    assert call("--parts=one", fresh=False)[0] == 1
    assert rows(call)["1st"] == {"says": "FAILED: the process ended within it"}
    assert parts.measured == ["1st", "2nd"]


def test_a_part_of_programs_leaves_the_device_to_them(call, parts, monkeypatch):
    monkeypatch.setitem(accelerator.PARTS, "tests", accelerator.PARTS["one"])
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("this process has the device"))
    status, said = call("--parts=tests")
    assert status == 0 and "== tests, " in said and " x cpu" in said


def test_results_go_where_they_are_wanted(call, parts, tmp_path, monkeypatch):
    """And are read there: on a machine whose disk is lost afterwards there is no other way."""
    device = ("gpu", "NVIDIA H100 80GB HBM3", 1)
    monkeypatch.setattr(accelerator, "_device", lambda part: device)
    setups = []
    own = accelerator.PARTS["one"]
    monkeypatch.setitem(accelerator.PARTS, "one", lambda setup: setups.append(setup) or own(setup))
    folder = tmp_path / "kept"
    for _ in range(2):
        assert call("--parts=one", f"--results={folder}", smoke=False)[0] == 0
        assert parts.measured == ["1st", "2nd"]
    record = results.read_result(folder / "accelerator-nvidia-h100-80gb-hbm3.json")
    assert record["machine"] == "1 x NVIDIA H100 80GB HBM3"
    assert setups[0].curves == folder / "reference_curves.json" and setups[0].platform == "gpu"


def test_rows_keep_the_revision_that_they_were_measured_with(call, parts, monkeypatch):
    for part, revision in (("one", "a" * 40), ("two", "b" * 40)):
        git = {"revision": revision, "dirty": part == "two"}
        monkeypatch.setattr(accelerator, "git_revision", lambda git=git: git)
        call(f"--parts={part}")
    result = results.read_result(call.path)
    assert result["revision"] == "b" * 40 + " with changes"
    found = [row.get("revision") for row in result["rows"]]
    assert found == ["a" * 40] * 4 + [None] * 4
    # The page is made of the file as it is.
    assert "| 1st, b | said | 9.00 |" in results.section("smoke", result)
    assert "numbers mean nothing" in result["title"]


def test_each_part_has_a_process_of_its_own(call, parts, monkeypatch):
    statuses, commands, tries = [], [], iter(range(100))

    def run(command, deadline, grace, env):
        commands.append([str(word) for word in command])
        tried = accelerator.Tried(command[command.index("--tried") + 1])
        tried.add(f"title {next(tries)}")
        if statuses[0] == "late":
            raise children.Late
        return statuses.pop(0)

    monkeypatch.setattr(accelerator.children, "run", run)

    def ran(*argv, ends):
        statuses[:], commands[:] = ends, []
        status, said = call(*argv, apart=True)
        parts_of = [command[command.index("--parts") + 1].split(",")[0] for command in commands]
        return status, parts_of, said

    assert ran("--again", ends=[1, 3])[:2] == (3, ["one", "two"])  # there is more: that counts most
    assert all({"--smoke", "--again"} <= set(command) for command in commands)
    assert 8 < float(commands[1][commands[1].index("--minutes") + 1]) <= 9
    assert ran(ends=[0, 1])[:2] == (1, ["one", "two"])
    assert ran(ends=[4, 0])[:2] == (4, ["one", "two"])
    # One that dies, or goes on in a fresh process, does not forget again.
    assert ran("--again", ends=[-6, accelerator.GO_ON, 0, 0])[:2] == (0, [*3 * ["one"], "two"])
    assert ["--again" in command for command in commands] == [True, False, False, True]
    status, parts_of, said = ran("--parts=two", ends=["late"])
    assert (status, parts_of) == (3, ["two"]) and "two was ended within 'title" in said
    # Of one that measures nothing there is no end.
    monkeypatch.setattr(accelerator.Tried, "add", lambda self, title: None)
    assert ran("--parts=one", ends=[-6])[:2] == (1, ["one"])


@pytest.mark.parametrize("again", [False, True])
def test_a_call_is_over_after_nine_minutes(again, call, parts, monkeypatch):
    """Of a part that is late, and needs all the grace to end, after one that took its time."""
    clock, forgets = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(accelerator, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def run(command, deadline, grace, env):
        forgets.append(command[command.index("--parts") + 1] if "--again" in command else "")
        minutes = float(command[command.index("--minutes") + 1])
        # The clock of the process itself, which begins what it may and is late with it.
        assert clock.now + 60 * minutes == pytest.approx(100 + 9 * 60, abs=0.1)
        if len(forgets) == 1:
            accelerator.Tried(command[command.index("--tried") + 1]).add("1st")
            clock.now = deadline - 1
            return accelerator.GO_ON
        clock.now = max(clock.now + 1, deadline) + grace + 1
        raise children.Late

    monkeypatch.setattr(accelerator.children, "run", run)
    status, said = call(*["--again"] * again, apart=True)
    assert status == 3 and "one was ended within '1st'" in said
    assert clock.now < 100 + 9 * 60
    # The part that got no time is measured anew too, by the next call.
    assert forgets == (["one,two", ""] if again else ["", ""])


def test_the_first_process_forgets_for_all(call, parts):
    assert call("--parts=one")[0] == call("--parts=two")[0] == 0
    parts.behave["2nd"] = Unfinished()
    assert call("--parts=one,two", "--again")[0] == 3
    assert list(rows(call)) == ["1st, a", "1st, b"]


def test_the_whole_call(tmp_path, capfd):
    """In processes, as a user has it."""
    status = accelerator.main(["--smoke", "--parts=matmul", f"--workdir={tmp_path}"])
    said = capfd.readouterr().out
    assert status == 0 and "product of 32, float32; ms" in said, said


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--parts=matmull"], "--parts=matmull: 'matmull' is no part; they are matmul, dense,"),
        (["--parts=matmul"], "JAX finds no accelerator here"),
        (["--minutes=1"], "--minutes=1.0: must be more than 1.67, the 100 seconds in which"),
        (["--minutes=nan"], "--minutes=nan: must be more than 1.67"),
    ],
)
def test_bad_input_is_one_line(argv, line, call):
    # A process of a part takes the minutes that are left, however few.
    status, said = call(*argv, smoke=False, apart="--minutes" in argv[0])
    assert status == 2 and said.startswith(f"efx: error: {line}") and said.count("\n") == 1


# ---- the parts ---------------------------------------------------------------------------------


def test_the_cheap_part_at_tiny_sizes(call):
    status, said = call("--parts=kernels")
    assert status == 0 and "NO MEASUREMENT" in said
    measured = rows(call)
    assert len(measured) == 2 * len(accelerator_parts.MASKS[::3])
    assert 0 < measured["attention, causal, xla, bfloat16"]["error"] < 1e-2
    assert {cells["says"] for cells in measured.values()} == {"right"}


def without_windows(case, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, scale):
    options = dict(scale=scale, softcap=case.softcap, segment_ids_BT=segment_ids_BT)
    return attend.attend(q_BTNH, k_BSKH, v_BSKH, kernel="xla", **options)


def test_products_are_timed_alone():
    """A loop over them copied each result, which took time of its own."""
    x = jnp.ones((64, 64))
    compiled = accelerator_parts.chain.lower(x, x, 3).compile().as_text()
    assert " copy(" not in compiled and " while(" not in compiled


def test_a_kernel_that_is_wrong_somewhere_is_found(call, monkeypatch):
    def reason(case):
        if case.softcap:
            return "has no softcap"
        return "takes no float32" if case.gaps and case.dtype == jnp.float32 else None

    def run(case, *arrays):
        if case.documents:
            raise jax.errors.JaxRuntimeError("CUDA_ERROR")
        return without_windows(case, *arrays)

    monkeypatch.setitem(KERNELS, "cudnn", Kernel("cpu", reason, run))
    references = []
    own = accelerator_parts._masked
    monkeypatch.setattr(
        accelerator_parts, "_masked", lambda *args: references.append(args[1]) or own(*args)
    )
    monkeypatch.setattr(accelerator_parts, "MASKS", ("causal", "window", "softcap", "gaps"))
    setup = SimpleNamespace(smoke=False)
    monkeypatch.setattr(accelerator_parts, "LENGTH", 120)
    found = {title: measure() for title, measure in accelerator_parts.kernels(setup)}
    cudnn = {mask: found[f"attention, {mask}, cudnn"] for mask in accelerator_parts.MASKS}
    assert cudnn["causal"][", float32"]["says"] == "right"
    assert cudnn["window"][", float32"]["error"] > 0.05
    assert cudnn["window"][", float32"]["says"].startswith("FAILED: more than")
    assert cudnn["softcap"] == {"": {"says": "refused: has no softcap"}}
    assert cudnn["gaps"][", float32"] == {"says": "refused: takes no float32"}
    assert references == list(accelerator_parts.MASKS)  # once a mask
    masked = partial(own, setup, "documents")
    rows = accelerator_parts._kernel(masked, "cudnn")
    assert rows == {", bfloat16": {"says": "FAILED: JaxRuntimeError: CUDA_ERROR"}}


def test_a_kernel_that_refuses_has_not_failed(call, monkeypatch):
    """In training steps as in attention alone: else a call has status 1 wherever one of the kernels
    is not installed."""
    refusing = Kernel("cpu", lambda case: "is not installed: the extra", None)
    monkeypatch.setattr(accelerator_parts, "KERNELS", {"cudnn": refusing})
    monkeypatch.setitem(KERNELS, "cudnn", refusing)
    rows_of_8 = accelerator_parts.SIZES["smoke"] | {"batch": 8}  # for the devices of the tests
    monkeypatch.setitem(accelerator_parts.SIZES, "smoke", rows_of_8)

    def dense(setup):
        entries = list(accelerator_parts.dense(setup))
        assert len(entries) == 6
        return (entry for entry in entries if "cudnn" in entry[0])

    monkeypatch.setattr(accelerator, "PARTS", {"dense": dense})
    status, said = call("--parts=dense")
    assert status == 0, said
    says = {"says": "refused: is not installed: the extra"}
    assert rows(call) == {"dense 124M (GPT-2), cudnn": says, "dense 350M, cudnn": says}
    # Also of one model among several.
    refused = attention_kernels.Refused("cudnn", "has no softcap")

    def fitting(config, vocab, rounds, compiled):
        assert compiled == f"{config}, compiled"
        if config == "MoD":
            raise refused
        return SimpleNamespace(
            batch=1, times=SimpleNamespace(median=1.0), memory=1, tokens_per_second=1.0, nominal=1.0
        )

    monkeypatch.setattr(accelerator_parts, "_fitting", fitting)
    monkeypatch.setattr(accelerator_parts, "compiled_together", compiled_by_name)
    configs = {name: _Config(name) for name in ("dense", "MoD")}
    found = accelerator_parts._steps(Setup(True, None, None, 0.0), configs)
    assert found["MoD"] == {"says": "refused: has no softcap"}
    # What else is wrong with a config is a failure.
    assert accelerator_parts.failure(UsageError("no"))["says"] == "FAILED: UsageError: no"


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


def compiled_by_name(configs, vocab_size):
    return {name: f"{config}, compiled" for name, config in configs.items()}


def test_a_full_memory_is_told_from_what_a_kernel_lacks():
    errors = [jax.errors.JaxRuntimeError(message) for message in (*FULL, *OF_A_KERNEL)]
    found = list(map(memory.is_full, errors))
    assert found == [True] * len(FULL) + [False] * len(OF_A_KERNEL)


def test_the_tests_for_a_device_are_there(root):
    paths, names = zip(*accelerator_parts.SUITE.values(), strict=True)
    wanted = " or ".join(f"({name})" for name in names)
    command = [sys.executable, "-m", "pytest", *sorted(set(paths)), "-k", wanted]
    command += ["--collect-only", "-q", "-n", "0"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    for name in names:
        assert name.split()[0] in done.stdout, done.stdout + done.stderr


def test_compiling_is_timed_with_flags_of_its_own(tmp_path, monkeypatch):
    """In a process of its own, beside the flags that are set, and each time anew."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    calls = []

    class Recorded(Setup):
        def run(self, command, **environment):
            calls.append((command[2], environment["XLA_FLAGS"]))
            (path,) = [part.removeprefix("--json=") for part in command if "--json=" in str(part)]
            assert not pathlib.Path(path).exists()
            pathlib.Path(path).write_text('{"dense": {"seconds": 3.0, "ms": 2.0}}')
            return len(calls) // 3

    setup = Recorded(False, tmp_path, tmp_path, 0.0, platform="gpu")
    entries = dict(accelerator_parts.compiling(setup))
    assert len(entries) == len(accelerator_parts.COMPILING)
    cells = {", dense": {"seconds": 3.0, "ms": 2.0}}
    assert entries["compiling 6 layers, as it is"]() == cells
    assert entries["compiling 6 layers, nothing tried"]() == cells
    assert calls[0] == ("benchmarks.compiling", "--xla_mine=1")
    assert calls[1] == ("benchmarks.compiling", "--xla_mine=1 --xla_gpu_autotune_level=0")
    with pytest.raises(RuntimeError, match="status 1"):
        entries["compiling 6 layers, as it is"]()
    assert len(list(accelerator_parts.compiling(Setup(True, tmp_path, tmp_path, 0.0)))) == 1


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
    assert tried == [16]  # which no smaller batch would mend


def test_an_error_of_one_compilation_is_its_own(monkeypatch):
    """Also where the others are compiled beside it."""

    def stepper(config, vocab_size):
        if config == "bad":
            raise RuntimeError("no kernel")
        return f"{config}, {vocab_size}"

    monkeypatch.setattr(step_time, "Stepper", stepper)
    found = step_time.compiled_together({"": "dense", " MoD": "bad"}, 64)
    assert found[""].result() == "dense, 64"
    assert str(found[" MoD"].exception()) == "no kernel"


def test_training_steps_are_compared_by_tokens(monkeypatch):
    """Time, FLOPs and the share of what could be saved, also of batches that differ."""

    def fitting(config, vocab, rounds, compiled):
        assert compiled == f"{config}, compiled"
        if config == "bad":
            raise RuntimeError("out of memory")
        batch, seconds, per_token = {"dense": (8, 2.0, 100.0), "MoD": (4, 0.75, 60.0)}[config]
        return SimpleNamespace(
            batch=batch,
            times=SimpleNamespace(median=seconds),
            memory=1e9,
            tokens_per_second=batch * 10 / seconds,
            per_token=per_token,
            nominal=per_token * batch * 10,
        )

    monkeypatch.setattr(accelerator_parts, "_fitting", fitting)
    monkeypatch.setattr(accelerator_parts, "compiled_together", compiled_by_name)
    monkeypatch.setattr(accelerator_parts.flops, "device_peak", lambda dtype: 1000.0)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    configs = {name: _Config(name) for name in ("dense", "MoD", "bad")}
    setup = Setup(True, None, None, 0.0)
    found = accelerator_parts._steps(setup, configs, mfu_target=0.5, saving_target=0.9)
    assert found["dense"]["MFU"] == 0.5 and found["dense"]["says"].endswith("reached")
    assert found["MoD"]["time / dense"] == 0.75 and found["MoD"]["FLOPs / dense"] == 0.6
    assert "0.800, target at least 0.9: MISSED" in found["MoD"]["says"]
    assert found["bad"]["says"] == "FAILED: RuntimeError: out of memory"


class _Config(str):
    """A name in the place of a config."""

    train = SimpleNamespace(dtype="bfloat16")


def gone(pid):
    """Whether a process ends within some seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True  # of a machine on which nobody asks for it
        time.sleep(0.1)
    return False


def test_a_process_ends_with_those_that_it_started(tmp_path):
    file = tmp_path / "pid"
    setup = Setup(True, tmp_path, tmp_path, time.monotonic() + 1)
    with pytest.raises(Unfinished):
        setup.run(["bash", "-c", f"sleep 100 & echo $! > {file}; wait"])
    assert gone(int(file.read_text()))
    code = "import os; raise SystemExit(int(os.environ['STATUS']))"
    assert setup.run([sys.executable, "-c", code], STATUS="7") == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell of a parent's end")
def test_what_a_killed_call_has_started_ends_with_it(number, tmp_path, root):
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


@pytest.mark.parametrize("says", ["Fatal Python error: Aborted", ""])
def test_pytest_that_dies_says_why(says, tmp_path, monkeypatch):
    def run(self, command, output, **environment):
        output.write(f"some\n{says}\n\n")
        return -6

    monkeypatch.setattr(Setup, "run", run)
    setup = Setup(False, tmp_path, tmp_path, 0.0)
    with pytest.raises(RuntimeError, match=f"status -6 and no report: {says or 'some'}"):
        accelerator_parts._pytest(setup, "test_file.py", "y")


def test_seconds_until_the_loss_are_read_from_the_run(call, tmp_path, monkeypatch):
    losses = {250: 1.6, 500: 1.46, 750: 1.45, 5000: 1.48}

    def run(self, command):
        folder = self.runs("characters") / "dense"
        folder.mkdir(parents=True, exist_ok=True)
        logged = [{"step": step, "seconds": step / 10} for step in losses]
        logged += [{"step": step, "eval/loss": loss} for step, loss in losses.items()]
        lines = [json.dumps(row) for row in sorted(logged, key=lambda row: row["step"])]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
        return 0

    monkeypatch.setattr(Setup, "run", run)
    text = tmp_path / "input.txt"
    setup = Setup(False, tmp_path, text, 0.0)
    with pytest.raises(Skipped, match="there is no such file"):
        accelerator_parts._characters(setup, "dense", "gpu")
    text.write_text("text")
    (cells,) = accelerator_parts._characters(setup, "dense", "gpu").values()
    assert (cells["loss"], cells["seconds"]) == (1.45, 50.0)
    assert "reached; seconds are those of training until step 500" in cells["says"]
    del losses[5000]  # stopped by the scheduler, which a run takes for its end
    with pytest.raises(Unfinished):
        accelerator_parts._characters(setup, "dense", "gpu")


def test_curves_of_the_recipe_are_recorded_or_compared(tmp_path, root):
    setup = Setup(False, tmp_path, tmp_path / "input.txt", 0.0, tmp_path / "kept/curves.json")
    known = results.read_result(root / reference.CURVES)  # which another file begins with
    *measured, (title, measure) = accelerator_parts.characters(setup)
    assert title == "nanoGPT's characters, reference curves"
    titles = ["dense", "dense, seed 1", "dense, seed 2"]
    assert [one.partition(", ")[2] for one, _ in measured] == [*titles, "MoD"]
    with pytest.raises(Skipped):
        measure()
    for seed, name in enumerate(titles):
        folder = setup.runs("characters") / name
        make_run(folder, shifted(0.01 * seed), recipe="gpu", seed=seed, device="H100")
    with pytest.raises(UsageError, match="a run of another text than the recipe 'gpu'"):
        measure()
    assert results.read_result(setup.curves)["curves"] == known["curves"]
    results.write_result(setup.curves, known | {"curves": known["curves"] | {"gpu": None}})
    assert measure() == {"": {"says": "recorded as those of the recipe in curves.json"}}
    curves = reference.read_curves(setup.curves)["curves"]["gpu"]
    assert curves["device"] == "1 x H100" and list(curves["seeds"]) == ["0", "1", "2"]
    assert curves["seeds"]["0"]["eval/loss"]["5000"] == CURVE[-1]
    # On another machine they stay, and its runs are compared with them.
    for seed, off, says in ((0, 0.0, "beside those of 1 x H100: within"), (1, 0.5, "FAILED: ")):
        other = Setup(False, tmp_path / str(seed), setup.text, 0.0, setup.curves)
        for i, name in enumerate(titles):
            folder = other.runs("characters") / name
            make_run(folder, shifted(off), recipe="gpu", seed=i, device="H200")
        *_, (_, measure) = accelerator_parts.characters(other)
        (cells,) = measure().values()
        assert cells["says"].startswith(says)
    assert reference.read_curves(setup.curves)["curves"]["gpu"] == curves


@pytest.mark.parametrize("platform, jobs", [("gpu", 4), ("tpu", 1)])
def test_an_isoflop_study_is_read(tmp_path, root, monkeypatch, platform, jobs):
    """One that has been measured, in place of the one that the part makes."""
    setup, commands = Setup(False, tmp_path, tmp_path, 0.0, platform=platform), []
    folder = setup.runs("isoflop")
    folder.mkdir(parents=True)
    studies = [results.read_result(path) for path in sorted((root / "results").glob("*.json"))]
    study = next(one["study"] for one in studies if "points" in one["study"])
    (folder / "isoflop.json").write_text(json.dumps(study))
    monkeypatch.setattr(Setup, "run", lambda self, command: commands.append(command) or 0)
    found = accelerator_parts._isoflop(setup)
    assert f"--jobs={jobs}" in commands[0]
    assert found and all(cells["loss"] > 0 for cells in found.values())
