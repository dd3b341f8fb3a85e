"""Signals: SIGTERM saves and stops, whatever is under way; a second one ends the process."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from run_files import TINY, tiny

from efx import build, signals, train
from efx.checkpoint import files
from efx.data.pipeline import Data, TrainIterator
from efx.evaluate import Evaluator
from efx.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_device")
CHANGES = {"optim.schedule.decay_steps": 6, "checkpoint.every": 0, "evaluate.max_batches": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(400)))
    return path


@pytest.fixture(autouse=True)
def default_handlers():
    """A program that ignores a signal, as under nohup, starts children that ignore it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def hang(monkeypatch):
    """A function that has a method hang in one call, during which a SIGTERM comes."""
    released, threads = threading.Event(), []

    def hang_in(owner, name, condition=lambda *arguments: True):
        real, calls = getattr(owner, name), []

        def method(*arguments, **options):
            if calls or not condition(*arguments):
                return real(*arguments, **options)
            calls.append(name)
            threads.append(threading.current_thread())
            os.kill(os.getpid(), signal.SIGTERM)
            released.wait(100)
            raise RuntimeError("the interrupted work was waited for")

        monkeypatch.setattr(owner, name, method)

    yield hang_in
    released.set()
    for thread in threads:
        thread.join()


def rows(run):
    """The metrics without the times."""
    keys = ("train/", "eval/", "step", "tokens", "flops")
    return [
        {key: value for key, value in row.items() if key.startswith(keys) and "second" not in key}
        for row in read_metrics(run)
    ]


def samples(run):
    return {path.name: path.read_text() for path in (run / "samples").iterdir()}


def assert_same_run(config, straight, broken):
    """Rows, parameters and the best checkpoint are those of a run that was not interrupted."""
    assert rows(broken) == rows(straight)
    params = [jax.tree.leaves(build.finished(config, run)[2]) for run in (straight, broken)]
    for a, b in zip(*params, strict=True):
        np.testing.assert_array_equal(a, b)
    for run in (straight, broken):
        with build.checkpointer(run, build.run_settings.check(config).checkpoint) as checkpoints:
            assert checkpoints.best_step() == 2


def test_sigterm_saves_and_the_next_launch_makes_up_for_the_evaluation(
    text, tmp_path, hang, capsys
):
    changes = CHANGES | {"sample.every": 2, "sample.max_new_tokens": 2}
    config, straight, broken = tiny(text, **changes), tmp_path / "straight", tmp_path / "broken"
    train.train_and_evaluate(config, straight)
    capsys.readouterr()
    hang(Evaluator, "__call__")
    train.train_and_evaluate(config, broken)
    out = capsys.readouterr().out
    assert "stopped at step 2 by SIGTERM" in out and "finished: " not in out
    assert files.finished_steps(files.as_root(broken / "checkpoints")) == [2]
    assert "eval/loss" not in rows(broken)[-1] and not (broken / "samples").exists()
    train.train_and_evaluate(config, broken)
    assert "finished: 2 steps, " in capsys.readouterr().out
    assert_same_run(config, straight, broken)
    assert samples(broken) == samples(straight)


@pytest.mark.slow
def test_sigterm_does_not_wait_for_the_compiler(text, tmp_path, hang, capsys):
    stages = {
        "model.depth_routing.kind": "mod",
        "model.depth_routing.every": 1,
        "model.depth_routing.capacity_stages": ((0.5, 1.0),),  # a program for the second step
    }
    config = tiny(text, **CHANGES | stages)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train.train_and_evaluate(config, straight)
    hang(build.Training, "compile_step", lambda training, model, start: start)
    for line in ("stopped at step 1 by SIGTERM", "finished: 2 steps, "):
        train.train_and_evaluate(config, broken)
        assert line in capsys.readouterr().out
    assert_same_run(config, straight, broken)


@pytest.mark.slow
def test_sigterm_does_not_wait_for_text_that_is_still_tokenised(
    text, tmp_path, hang, monkeypatch, capsys
):
    changes = {"data.shuffle": "buffer", "data.split": "documents", "data.document_bytes": 100}
    changes |= {"data.cache_dir": str(tmp_path / "cache")}
    config = tiny(text, **CHANGES | changes)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train.train_and_evaluate(config, straight)
    monkeypatch.setattr(Data, "grows", True)  # as while there is more text than this
    hang(TrainIterator, "__next__", lambda iterator: iterator.get_state()["step"] == 1)
    capsys.readouterr()
    for line in ("stopped at step 1 by SIGTERM", "finished: 2 steps, "):
        train.train_and_evaluate(config, broken)
        assert line in capsys.readouterr().out
    assert_same_run(config, straight, broken)


def test_only_training_listens_for_signals_and_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopSignals() as found:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # before the first step
            found.listen()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# A SIGINT while the first of the libraries is imported.
IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "absl":
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("command", ["from efx import main", "from efx.studies import sweep"])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(command, root):
    code = IMPORTING + "sys.argv[0] = '-m'\n" * ("studies" in command) + command
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


# ---- a process of its own ------------------------------------------------------------------------

# Hangs where no signal reaches Python, as in a compiler: in C, for a lock that is never free.
STUCK = """
import ctypes, sys
from efx import main
def stuck(*arguments, **options):
    print("stuck", flush=True)
    lock = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
if sys.argv.pop() == "start":
    main.run = stuck
else:
    from efx.checkpoint import Checkpointer
    Checkpointer.save = stuck
sys.exit(main.command())
"""


def endless(run, text):
    """The arguments of a run that does not end by itself."""
    settings = {**TINY, "data.source": f"text:{text}", "steps": 10**6, "checkpoint.every": 10**6}
    settings |= {"model.depth_routing.every": 1}
    arguments = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["--config=configs/mod.py", f"--workdir={run}", *arguments]


def until(stream, word):
    output = b""
    while word not in output:
        new = os.read(stream, 4096)
        assert new, output.decode()
        output += new


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, number, word",
    [("start", signal.SIGINT, b"stuck"), ("save", signal.SIGTERM, b"step 1/")],
)
def test_the_second_signal_ends_a_process_at_once(where, number, word, text, tmp_path, root):
    """Also while Python handles none: in a compiler, in the last save."""
    command = [sys.executable, "-u", "-c", STUCK, *endless(tmp_path / "run", text), where]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(command, cwd=root, **streams)
    try:
        until(process.stdout.fileno(), word)
        time.sleep(0.5)  # it prints "stuck" before it is
        process.send_signal(number)
        process.send_signal(number)  # as timeout(1) does
        if where == "save":
            until(process.stdout.fileno(), b"stuck")
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=5) == 128 + number
    finally:
        process.kill()
        process.communicate()


def test_a_terminal_that_is_closed_saves_the_run(text, tmp_path, root):
    """Writing to it is an error by then."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "efx.main", *endless(tmp_path / "run", text)]
    # A session of its own, whose terminal this is.
    login = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    login += "os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", login, *command], cwd=root, start_new_session=True,
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    try:
        os.close(theirs)
        until(ours, b"step ")
        until(ours, b"loss")
        os.close(ours)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    (step,) = [int(p.name) for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit()]
    assert step == read_metrics(tmp_path / "run")[-1]["step"] > 0
