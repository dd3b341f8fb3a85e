"""Signals: the first one saves and stops the run, the second one ends the process."""

import gc
import os
import pty
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from run_files import TINY, tiny

from efx.config.load import to_config
from efx.logging import read_metrics
from efx.parallel import signals
from efx.run_dir import finished_steps
from efx.train import inference, trainer
from efx.train.evaluator import Evaluator

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
    before = {number: signal.getsignal(number) for number in signals.STOPPING}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def rows(run):
    """The metrics without the times."""
    keys = ("train/", "eval/", "step", "tokens", "flops")
    return [
        {key: value for key, value in row.items() if key.startswith(keys) and "second" not in key}
        for row in read_metrics(run)
    ]


def samples(run):
    return {path.name: path.read_text() for path in (run / "samples").iterdir()}


def test_sigterm_saves_and_the_next_launch_ends_as_if_uninterrupted(
    text, tmp_path, monkeypatch, capsys
):
    """Rows, samples, parameters and the best checkpoint are those of a run that was not stopped.
    The signal comes during an evaluation, which is finished; the run stops after the next step."""
    changes = CHANGES | {"steps": 5, "evaluate.every": 2, "sample.every": 2}
    config = tiny(text, **changes, **{"sample.max_new_tokens": 2})
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    trainer.train_and_evaluate(config, straight)
    capsys.readouterr()
    evaluate = Evaluator.__call__

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "__call__", interrupted)
        trainer.train_and_evaluate(config, broken)
    out = capsys.readouterr().out
    assert "stopped at step 3 by SIGTERM" in out and "finished: " not in out
    assert finished_steps(broken / "checkpoints") == [3]
    trainer.train_and_evaluate(config, broken)
    assert "finished: 5 steps, " in capsys.readouterr().out
    assert rows(broken) == rows(straight) and samples(broken) == samples(straight)
    params = [jax.tree.leaves(inference.restore(config, run)[2]) for run in (straight, broken)]
    jax.tree.map(np.testing.assert_array_equal, *params)
    with inference.checkpointer(broken, to_config(config).checkpoint) as checkpoints:
        assert checkpoints.best_step() == 5


@pytest.mark.parametrize("in_notebook", [False, True])
def test_the_first_signal_is_a_request_and_the_second_is_not_caught(monkeypatch, in_notebook):
    """timeout(1) sends the first one twice. A second Ctrl-C does not end a notebook."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    if in_notebook:
        monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with signals.StopSignals() as stop:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # before the first step
        stop.listen()
        assert not stop.stop_requested()
        repeated = []

        def repeat(*_):
            repeated.append(os.kill(os.getpid(), signal.SIGTERM))

        signal.setitimer(signal.ITIMER_REAL, 0.2)
        before = signal.signal(signal.SIGALRM, repeat)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGALRM, before)
        assert repeated  # while the first one was handled
        assert stop.name == "SIGTERM" and stop.stop_requested()
        after = signal.default_int_handler if in_notebook else signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == after
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_ctrl_c_in_a_callback_is_not_lost(monkeypatch):
    """Python ignores exceptions of callbacks of the garbage collector; JAX has one."""

    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "unraisablehook", signals.repeat_ignored_interrupt)
    gc.callbacks.append(callback)
    gc.collect()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)


def test_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.StopSignals() as stop:
        stop.listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


# ---- a process of its own ------------------------------------------------------------------------


def until(stream, word):
    output = b""
    while word not in output:
        new = os.read(stream, 4096)
        assert new, output.decode()
        output += new


def endless(run, text):
    """The arguments of a run that does not end by itself."""
    settings = {**TINY, "data.source": f"text:{text}", "steps": 10**6, "checkpoint.every": 10**6}
    settings |= {"model.depth_routing.every": 1}
    arguments = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["--config=configs/mod.py", f"--workdir={run}", *arguments]


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
        begin = time.monotonic()
        os.close(ours)
        assert process.wait(timeout=60) == 0 and time.monotonic() - begin < 10
    finally:
        process.kill()
        process.wait()
    (step,) = [int(p.name) for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit()]
    assert step == read_metrics(tmp_path / "run")[-1]["step"] > 0
