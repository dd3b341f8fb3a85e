"""benchmarks/crash.py and benchmarks/fuzz.py: a little of each, and that they find faults."""

import numpy as np
import pytest

from benchmarks import crash, fuzz


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
    for name, value in {"bits": 1, "missing": 1, "problems": ["a traceback"]}.items():
        assert crash.Outcome(times=1, survived=1, **{name: value}).lost
    assert crash.Outcome(times=1).lost and crash.Outcome().lost
    a = {("x",): np.array([1.0, 0.0]), ("y",): np.zeros(2, np.int32)}
    assert crash.bits(a, a) == 0
    assert crash.bits(a, {**a, ("x",): np.array([1.0, -0.0])}) == 1
    assert crash.bits(a, {("x",): a[("x",)]}) == 64


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
