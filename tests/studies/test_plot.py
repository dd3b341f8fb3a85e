"""Curves of several runs: points, names, which runs are comparable."""

import csv
import json

import numpy as np
import pytest
from study_helpers import error_line, logged_run

from efx.studies import plot


def make_run(folder, tokenizer="bytes", width=32, seed=0, every=5, **text):
    config = {"seed": seed, "model": {"width": width, "depth": 2}, "log": {"every": every}}
    config["data"] = {"tokenizer": tokenizer}
    rows = []
    for step in range(1, 7):
        row = {"tokens": 10 * step, "flops": 1e6 * step, "train/loss": 3.0 / step}
        if step % 3 == 0:
            row |= {"eval/loss": float(step), "eval/bits_per_byte": 2.0 * step}
        rows.append((step, row))
    return logged_run(folder, config, rows, **text)


@pytest.fixture
def runs(tmp_path):
    return [
        make_run(tmp_path / "narrow", every=1),
        make_run(tmp_path / "wide", width=64, seed=1),
    ]


def test_a_picture_its_points_and_a_table(runs, tmp_path, capsys):
    out = tmp_path / "curves.png"
    assert plot.main([*map(str, runs), "--out", str(out)]) == 0
    assert out.read_bytes()[1:4] == b"PNG"
    with open(tmp_path / "curves.csv") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["run", "tokens", "eval/loss"]
    narrow, wide = "narrow (width=32, seed=0)", "wide (width=64, seed=1)"
    points = [["30.0", "3.0"], ["60.0", "6.0"]]
    assert rows[1:] == [[name, *point] for name in (narrow, wide) for point in points]
    printed = capsys.readouterr().out
    assert f"| {narrow} | 60 | 6 |" in printed and "written: " in printed


def test_evaluations_between_logged_rows_are_interpolated(tmp_path):
    """Evaluated every 3 steps, logged every 2; values that count up from 0 are interpolated."""
    run = make_run(tmp_path / "run")
    rows = [{"step": 1, "parameters": 1e3}, {"step": 2, "tokens": 20, "flops": 4e9 + 2}]
    rows += [{"step": 3, "eval/loss": 3.0}, {"step": 4, "tokens": 40, "flops": 8e9 + 4}]
    rows += [{"step": 5, "eval/loss": None}, {"step": 6, "tokens": 60, "eval/loss": 2.0}]
    rows += [{"step": 9, "eval/loss": 1.0}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    call = [str(run), f"--out={tmp_path / 'a.png'}"]
    for x, points in (
        ("tokens", ["30.0,3.0", "60.0,2.0"]),
        ("flops", ["6000000003.0,3.0"]),
        ("step", ["3.0,3.0", "6.0,2.0", "9.0,1.0"]),
    ):
        assert plot.main([*call, f"--x={x}"]) == 0
        said = (tmp_path / "a.csv").read_text().split()
        assert said == [f"run,{x},eval/loss", *(f"run,{point}" for point in points)]
    assert plot.main([*call, "--x=parameters"]) == 2


@pytest.mark.parametrize("other", [{"tokenizer": "bpe"}, {"held_out": "k"}])
def test_losses_of_runs_that_cannot_be_compared_are_refused(other, tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", **other))]
    out = tmp_path / "a.png"
    assert plot.main([*runs, f"--out={out}"]) == 2
    error_line(capsys, "tokenizer" if "tokenizer" in other else "held-out")
    assert not out.exists()


@pytest.mark.parametrize(
    "other, x, y, warned",
    [
        ({"tokenizer": "bpe"}, "flops", "eval/bits_per_byte", False),
        ({"held_out": "k"}, "tokens", "eval/bits_per_byte", True),
        ({"source": "t"}, "tokens", "train/loss", True),
        ({"source": "t"}, "tokens", "eval/loss", False),
    ],
)
def test_limits_of_a_comparison_are_printed(other, x, y, warned, tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", **other))]
    assert plot.main([*runs, f"--x={x}", f"--y={y}", f"--out={tmp_path / 'a.png'}"]) == 0
    before, _, _ = capsys.readouterr().out.partition("| run |")
    assert bool(before) == warned


def test_means_of_successive_points():
    points = np.array([range(1, 7), [3.0 / step for step in range(1, 7)]])
    drawn = plot.smoothed(points, 2)
    np.testing.assert_allclose(drawn[:, 0], [1.5, 2.25])
    assert drawn.shape == (2, 5)


def test_names_of_runs_differ():
    assert plot.names(["a/run", "b/other"], [{}, {"model.width": 8}]) == ["run", "other (width=8)"]
    assert plot.names(["s/a/run", "s/b/run"], [{}, {"seed": 1}]) == ["a/run", "b/run (seed=1)"]
    first, second = plot.names([f"{'x' * 90}{i}" for i in range(2)], [{}, {}])
    assert first != second


@pytest.mark.parametrize("bad", ["--y=train/los", "--out=curves"])
def test_bad_flags_are_refused(bad, runs, tmp_path, capsys):
    assert plot.main([str(runs[0]), f"--out={tmp_path}/a.png", bad]) == 2
    error_line(capsys, bad.partition("=")[2])
    assert not (tmp_path / "a.png").exists()
