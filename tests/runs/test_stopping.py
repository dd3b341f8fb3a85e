"""Signals while something takes long: what they leave undone, and what a second one does."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_train import TINY, text, tiny  # noqa: F401 (a fixture)

from benchmarks.crash import rows, samples
from efx import build, signals, train
from efx.checkpoint import Checkpointer, files
from efx.data.pipeline import Data, TrainIterator
from efx.errors import UsageError
from efx.evaluate import Evaluator
from efx.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = {"model.width": 16, "model.depth": 1, "model.depth_routing.every": 1}
CHANGES = {
    **SMALL,
    "mesh.data": -1,
    "steps": 2,
    "model.depth_routing.capacity_stages": ((0.5, 1.0),),  # another program for the second step
    "checkpoint.every": 0,
    "evaluate.max_batches": 1,
    "sample.every": 1,
    "sample.max_new_tokens": 2,
}


@pytest.fixture(autouse=True)
def heeding():
    """A program that ignores a signal, as one under nohup does, starts others that ignore it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stuck(monkeypatch):
    """A function that lets a method hang in its first call, where a SIGTERM comes."""
    released, threads = threading.Event(), []

    def hang(owner, name, condition=lambda self: True):
        real, calls = getattr(owner, name), []

        def method(self, *arguments, **options):
            if calls or not condition(self):
                return real(self, *arguments, **options)
            calls.append(self)
            threads.append(threading.current_thread())
            os.kill(os.getpid(), signal.SIGTERM)
            released.wait(100)
            raise RuntimeError("what was left undone was waited for")

        monkeypatch.setattr(owner, name, method)

    yield hang
    released.set()
    for thread in threads:
        thread.join()


def test_a_signal_waits_for_no_compiling_and_no_evaluation(
    text,  # noqa: F811
    tmp_path,
    stuck,
    monkeypatch,
    capsys,
):
    """Property: the run is saved where it is; what was due is done by the next launch, and it is
    the run that nobody has stopped: rows, samples, parameters, the best checkpoint."""
    compiled = train._Launch._compiled

    def unguarded(self, *arguments):  # before the first step there is nothing to save
        assert self.step or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return compiled(self, *arguments)

    monkeypatch.setattr(train._Launch, "_compiled", unguarded)
    config, straight, broken = tiny(text, **CHANGES), tmp_path / "straight", tmp_path / "broken"
    train.train_and_evaluate(config, straight)
    for step, owner, name, condition in (
        (1, train._Launch, "_compiled", lambda launch: launch.step),
        (2, Evaluator, "__call__", lambda _: True),
    ):
        stuck(owner, name, condition)
        capsys.readouterr()
        train.train_and_evaluate(config, broken)
        said = capsys.readouterr().out
        assert f"stopped at step {step} by SIGTERM; the run is saved" in said
        assert "finished" not in said
        assert files.finished_steps(files.as_root(broken / "checkpoints"))[-1] == step
    assert signals.work_is_left()
    assert "eval/loss" not in rows(broken)[-1] and "step_00000002.txt" not in samples(broken)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpointer, "amend", killed)  # when all is written but that it is
        train.train_and_evaluate(config, broken)
    for line in ("finished: 2 steps, ", "finished already: "):  # and nothing twice
        capsys.readouterr()
        train.train_and_evaluate(config, broken)
        assert line in (said := capsys.readouterr().out), said
    assert rows(broken) == rows(straight)
    assert samples(broken) == samples(straight)
    results = [build.finished(tiny(text, **CHANGES), folder) for folder in (straight, broken)]
    for a, b in zip(*(np_leaves(params) for _, _, params, _ in results), strict=True):
        np.testing.assert_array_equal(a, b)
    bests = []
    for folder in (straight, broken):
        with build.checkpointer(folder, build.run_settings.check(config).checkpoint) as found:
            bests.append((found.best_step(), found._score(2)))
    assert bests[0] == bests[1] and None not in bests[0]


def killed(*arguments):
    raise KeyboardInterrupt


def np_leaves(tree):
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_signal_waits_for_no_text_that_is_still_tokenised(
    text,  # noqa: F811
    tmp_path,
    stuck,
    monkeypatch,
    capsys,
):
    """Property: the run is saved after the step that was taken, and goes on as if never stopped."""
    config = tiny(
        text,
        **CHANGES
        | {"model.depth_routing.capacity_stages": ()}  # one program does
        | {"data.shuffle": "buffer", "data.split": "documents", "data.document_bytes": 100}
        | {"data.cache_dir": str(tmp_path / "cache"), "evaluate.every": 0, "sample.every": 0},
    )
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train.train_and_evaluate(config, straight)
    monkeypatch.setattr(Data, "grows", True)  # as while there is more text than this
    stuck(TrainIterator, "__next__", lambda iterator: iterator.get_state()["step"] == 1)
    capsys.readouterr()
    for line in ("stopped at step 1 by SIGTERM; the run is saved", "finished: 2 steps, "):
        train.train_and_evaluate(config, broken)
        assert line in (said := capsys.readouterr().out), said
    assert rows(broken) == rows(straight)


def test_what_is_done_apart_fails_as_if_it_were_not():
    with signals.StopSignals() as found:
        found.listen()
        assert found.unless_stopped(lambda: 3) == 3
        with pytest.raises(UsageError, match="bad"):
            found.unless_stopped(lambda: (_ for _ in ()).throw(UsageError("bad")))
        found._caught(signal.SIGTERM, None)
        with pytest.raises(signals.Interrupted):
            found.unless_stopped(lambda: pytest.fail("was begun"))
        found._caught(signal.SIGTERM, None)  # the same one, which timeout(1) sends twice
        found._time -= 2
        with pytest.raises(KeyboardInterrupt):
            found._caught(signal.SIGTERM, None)


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopSignals() as found:
            found.listen()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == found._caught
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
from efx import main
"""


def test_ctrl_c_during_the_imports_ends_without_a_traceback(root):
    def ended(before):
        command = [sys.executable, "-c", before + IMPORTING]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert ended("") == (-signal.SIGINT, "")
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"  # as shells do with &
    assert ended(ignoring) == (7, "")
    # A study, which Python has not begun to run.
    code = f"{IMPORTING.replace('from efx import main', '')}sys.argv[0] = '-m'\n"
    code += "from efx.studies import sweep"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


# Hangs where no signal reaches Python, as in a compiler: in C, for a lock that is never free.
STUCK = """
import ctypes, sys
from efx import main
where = sys.argv.pop()
def stuck(*arguments, **options):
    print("stuck", flush=True)
    lock = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
if where == "start":
    main.run = stuck
elif where == "evaluate":
    from efx.evaluate import Evaluator
    Evaluator.__call__ = stuck
else:
    from efx.checkpoint import Checkpointer
    Checkpointer.save = stuck
sys.exit(main.command())
"""


def begin(root, arguments, where, **streams):
    settings = {**TINY, **SMALL, "steps": 10**6, "checkpoint.every": 10**6, "log.every": 1}
    settings |= {"evaluate.every": int(where == "evaluate")}
    command = [sys.executable, "-u", "-c", STUCK, "--config=configs/mod.py", *arguments]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    return subprocess.Popen([*command, where], cwd=root, **streams)


def until(stream, word):
    said = b""
    while word not in said:
        new = os.read(stream, 4096)
        assert new, said.decode()
        said += new
    return said


def test_the_second_signal_ends_a_process_at_once(text, tmp_path, root):  # noqa: F811
    """Also where Python does not come to handle any: in a compiler, in the last save."""
    arguments = [f"--workdir={tmp_path / 'run'}", f"--config.data.source=text:{text}"]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    saving, starting = (begin(root, arguments, where, **streams) for where in ("save", "start"))
    try:
        for process, number, word in (
            (starting, signal.SIGINT, b"stuck"),
            (saving, signal.SIGTERM, b"step 1/"),
        ):
            until(process.stdout.fileno(), word)
            time.sleep(0.5)  # it says that it is stuck before it is
            process.send_signal(number)
            process.send_signal(number)  # as timeout(1) does
            if process is saving:
                until(process.stdout.fileno(), b"stuck")
            time.sleep(1.5)
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(timeout=5) == 128 + number
            name = signal.Signals(number).name
            assert f"efx: {name} received again: ending at once" in process.stdout.read().decode()
    finally:
        for process in (saving, starting):
            process.kill()
            process.communicate()


def test_a_compiler_that_goes_on_does_not_keep_the_process(text, tmp_path, root):  # noqa: F811
    """Saved and ended within 10 seconds, though a thread is still in C."""
    arguments = [f"--workdir={tmp_path / 'run'}", f"--config.data.source=text:{text}"]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = begin(root, arguments, "evaluate", **streams)
    try:
        until(process.stdout.fileno(), b"stuck")
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert b"stopped at step 1 by SIGTERM; the run is saved" in process.stdout.read()
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "run/checkpoints/1").is_dir()


def test_a_terminal_that_is_closed_saves_the_run(text, tmp_path, root):  # noqa: F811
    """Its output is gone, writing to it an error; the run is saved nevertheless."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable, "-m", "efx.main", "--config=configs/mod.py",
        f"--workdir={tmp_path / 'run'}", f"--config.data.source=text:{text}",
    ]  # fmt: skip
    settings = {**TINY, **SMALL, "steps": 10**6, "checkpoint.every": 10**6}
    command += [f"--config.{key}={value}" for key, value in settings.items()]
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
