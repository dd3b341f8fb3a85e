"""benchmarks/accelerator.py: resuming a call, its time limit, and its cheap parts for real."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import jax
import psutil
import pytest

from benchmarks import accelerator, accelerator_parts
from benchmarks.accelerator_parts import Setup, Skipped, Unfinished
from efx.train import memory


@pytest.fixture
def call(tmp_path, capsys):
    """Runs the program in smoke mode, in this process: (status, output)."""

    def run(*argv, fresh=True):
        if fresh:
            (tmp_path / "tried.txt").unlink(missing_ok=True)
        flags = ["--smoke", f"--workdir={tmp_path}", f"--tried={tmp_path / 'tried.txt'}"]
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
    assert call("--parts=one", "--minutes=2")[0] == 0 and parts.measured == ["1st", "2nd"]


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
    assert call("--parts=one")[0] == accelerator.GO_ON and parts.measured == ["1st"]
    # This call does not retry it.
    assert call("--parts=one", fresh=False)[0] == 1 and parts.measured == ["1st", "2nd"]


def test_the_measurement_a_process_died_in_is_recorded(call, parts):
    parts.behave["1st"] = KeyboardInterrupt()  # as after a crash, nothing is recorded
    with pytest.raises(KeyboardInterrupt):
        call("--parts=one")
    assert call("--parts=one", fresh=False)[0] == 1
    assert rows(call)["1st"] == {"says": "FAILED: the process ended within it"}
    assert parts.measured == ["1st", "2nd"]


@pytest.mark.slow
def test_parts_run_in_processes(tmp_path, capfd):
    status = accelerator.main(["--smoke", "--parts=matmul", f"--workdir={tmp_path}"])
    said = capfd.readouterr().out
    assert status == 0 and "product of 32, float32; ms" in said, said


@pytest.mark.parametrize(
    "message, full",
    [
        ("Out of memory while trying to allocate 17179869184 bytes.", True),
        ("Failed to allocate request for 1.00GiB (1073741824B) on device ordinal 0", True),
        ("Ran out of memory in memory space hbm. Used 17.90G of 15.75G hbm.", True),
        ("Attempting to allocate 2.00G. That was not possible. 1.20G are free.", True),
        ("Shared memory size limit exceeded: requested 262144, available: 232448", False),
        ("Ran out of memory in memory space vmem.", False),
    ],
)
def test_full_memory_is_told_from_limits_of_a_kernel(message, full):
    assert memory.is_full(jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")) == full


def test_the_tests_for_a_device_exist(root):
    for path, names in accelerator_parts.SUITE.values():
        assert f"def {names.split()[0]}(" in (root / path).read_text(), names


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
@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_children_of_a_killed_call_end(tmp_path, root):
    file = tmp_path / "pid"
    code = "import sys; from benchmarks import children; children.run(sys.argv[1:], 1e9)"
    sleep = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    command = [sys.executable, "-c", code, sys.executable, "-c", sleep]
    process = subprocess.Popen(command, cwd=root)
    while not (file.is_file() and file.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait(30)
    assert gone(int(file.read_text()))
