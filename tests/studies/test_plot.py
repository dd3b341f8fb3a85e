"""Curves of several runs: points, names, errors."""

import csv
import json

import numpy as np
import pytest

from efx import runfolder
from efx.metrics import MetricsWriter
from efx.studies import plot


def make_run(folder, **changes):
    config = {"seed": 0, "model": {"width": 32, "depth": 2}, "log": {"every": 5}}
    for key, value in changes.items():
        block = config["model"] if key in config["model"] else config
        block[key] = value
    folder.mkdir(parents=True)
    runfolder.open_run(folder, config, command_line=[]).commit({}, text={})
    with MetricsWriter(folder, tensorboard=False) as writer:
        for step in range(1, 7):
            row = {"tokens": 10 * step, "train/loss": 3.0 / step}
            writer.write(step, row | ({"eval/loss": float(step)} if step % 3 == 0 else {}))
    return folder


@pytest.fixture
def runs(tmp_path):
    return [
        make_run(tmp_path / "narrow", log={"every": 1}),
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


def test_means_of_successive_points(runs):
    points = plot.curve(runs[0], "step", "train/loss")
    np.testing.assert_array_equal(points, [range(1, 7), [3.0 / step for step in range(1, 7)]])
    drawn = plot.smoothed(points, 2)
    np.testing.assert_allclose(drawn[:, 0], [1.5, 2.25])
    assert drawn.shape == (2, 5)
    np.testing.assert_allclose(plot.smoothed(points, 100)[0], [3.5])


def test_runs_of_one_name_are_told_apart_by_their_paths():
    assert plot.names(["a/run", "b/other"], [{}, {"model.width": 8}]) == ["run", "other (width=8)"]
    assert plot.names(["s/a/run", "s/b/run"], [{}, {"seed": 1}]) == ["a/run", "b/run (seed=1)"]
    assert plot.names(["run", "./run"], [{}, {}]) == ["run", "./run"]
    long = [f"{'x' * 90}{i}" for i in range(2)]
    first, second = plot.names(long, [{}, {}])
    assert first != second and first.endswith(f"[{long[0]}]")


def test_bad_input_is_one_line(runs, tmp_path, capsys):
    run = str(runs[0])
    for arguments, words in (
        ([run, "--y=train/los"], "no column 'train/los' (did you mean 'train/loss'?)"),
        ([run, "--out=curves"], "--out=curves: the ending says"),
        ([run, f"--out={tmp_path}/none/a.png"], "there is no folder"),
        ([str(tmp_path / "no run")], "no run is not a run folder"),
        ([run, "--smooth=0"], "--smooth=0: must be at least 1"),
        ([run, "--z=1"], "--z is not a flag"),
    ):
        try:
            status = plot.main([f"--out={tmp_path}/a.png", *arguments])
        except SystemExit as exit:
            status = exit.code
        assert status == 2, arguments
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said
    assert not (tmp_path / "a.png").exists()
    config = json.loads((runs[0] / "config.json").read_text())
    assert config["model"]["width"] == 32
