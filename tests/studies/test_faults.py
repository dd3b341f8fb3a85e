"""benchmarks/crash.py and benchmarks/fuzz.py: a little of each, and that they find faults."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import crash, fuzz
from efx.data import tokenizers


@pytest.mark.slow
def test_kills_in_start_up_and_training_lose_nothing(capfd):
    status = crash.main(["--kills=2", "--steps=20", "--faults=kills", "--seed=3"])
    said = capfd.readouterr().out
    assert status == 0, said
    assert "1 in the start-up, 1 in the steps" in said
    (row,) = [line.split() for line in said.splitlines() if line.startswith("kill -9")]
    assert row[:9] == ["kill", "-9", "2", "2", *5 * ["0"]]


def test_lost_bits_are_counted():
    found = crash.Outcome(times=1, survived=1)
    assert not found.lost
    for name in ("bits", "doubled", "missing", "different", "samples"):
        assert crash.Outcome(times=1, survived=1, **{name: 1}).lost
    assert crash.Outcome(times=1).lost and crash.Outcome().lost
    assert crash.Outcome(times=1, survived=1, problems=["ended in a traceback"]).lost
    a = {("x",): np.array([1.0, 0.0]), ("y",): np.zeros(2, np.int32)}
    assert crash.bits(a, a) == 0
    assert crash.bits(a, {**a, ("x",): np.array([1.0, -0.0])}) == 1
    assert crash.bits(a, {("x",): a[("x",)]}) == 64
    assert crash.bits(a, {**a, ("y",): np.zeros(2, np.int64)}) == 128


def test_lost_and_doubled_rows_are_counted(tmp_path):
    class Bench(crash.Bench):
        def __init__(self):
            self.rows = [{"step": step, "loss": step} for step in (1, 2, 3)]
            self.leaves, self.samples = {}, {"step_1.txt": b"a"}

    (tmp_path / "samples").mkdir()
    steps = [(1, 1), (1, 1), (3, 4), (4, 4)]
    rows = [{"step": step, "loss": loss, "seconds": 5.0} for step, loss in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = crash.Outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash, "leaves", lambda folder: {})
        Bench().compare(outcome, tmp_path)
    assert (outcome.doubled, outcome.missing, outcome.different, outcome.samples) == (1, 1, 2, 1)


# Parts without compilation or runs.
CHEAP = "command_line,tokenizers,shards,records,caches"


@pytest.mark.slow
def test_hostile_input_works_or_is_one_line(capsys):
    assert fuzz.main([f"--parts={CHEAP}", "--once", "--seed=1"]) == 0, capsys.readouterr().out
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {row[0]: list(map(int, row[1:])) for row in rows if row[0] in fuzz.PARTS}
    assert list(counts) == CHEAP.split(",")
    for name, (cases, worked, refused, findings) in counts.items():
        assert cases == worked + refused and worked and not findings
        assert refused or name == "caches"


@pytest.mark.slow
def test_a_finding_is_printed_with_its_command(capsys, monkeypatch):
    """Also a panic of a library, which is no `Exception`."""

    class Panic(BaseException):
        pass

    def encode(self, text):
        if len(text) < 3:
            raise Panic("of Rust")
        return np.zeros(0, np.int32)

    monkeypatch.setattr(tokenizers.ByteTokenizer, "encode", encode)
    assert fuzz.main(["--parts=tokenizers", "--once", "--seed=1"]) == 1
    said = capsys.readouterr().out
    assert "python -m benchmarks.fuzz --parts=tokenizers --seed=1 --once" in said
    assert "of Rust" in said and "case: [" in said


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_found(monkeypatch):
    """The next process starts after the case."""
    program = """if True:
        import json, os, sys
        counts = {"text": {"worked": 2, "refused": 1}}
        for said in {"part": "text", "seed": 7}, {"found": None, "counts": counts}:
            print(json.dumps(said), flush=True)
        os.kill(os.getpid(), 11) if "--seed=5" in sys.argv else None
    """
    real = subprocess.Popen

    def popen(command, **streams):
        return real([sys.executable, "-c", program, *command[3:]], **streams)

    monkeypatch.setattr(subprocess, "Popen", popen)
    found, counts = fuzz.watch(["text"], 5, 60)
    assert [(one.part, one.seed) for one in found] == [("text", 7)]
    assert "ended with status -11" in found[0].text
    assert counts["text"] == fuzz.Counts(worked=4, refused=2)
    monkeypatch.setattr(fuzz, "_HANGS", 0.5)
    program = 'import time; print(\'{"part": "text", "seed": 7}\', flush=True); time.sleep(60)'
    found, _ = fuzz.watch(["text"], 5, 3)
    assert {one.text.splitlines()[0] for one in found} == {"nothing for 0.5 seconds"}
