"""benchmarks/crash.py and benchmarks/fuzz.py: a little of each, and that they find faults."""

import pytest

from benchmarks import crash, fuzz


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return crash.Bench(tmp_path_factory.mktemp("crash"), seed=3, steps=20)


@pytest.mark.slow
def test_kills_in_training_lose_nothing(bench):
    assert crash.kills(bench, 2) == []


@pytest.mark.slow
def test_a_run_that_lost_something_is_found(bench):
    folder = bench.folder()
    assert bench.finish(folder) == []
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))
    (line,) = bench.finish(folder)
    assert "metrics" in line


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
