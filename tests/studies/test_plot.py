"""Curves of several runs: points, names, errors."""

import csv
import json

import matplotlib.figure
import numpy as np
import pytest

from efx import runfolder
from efx.metrics import MetricsWriter
from efx.studies import logged, plot


def make_run(folder, tokenizer="bytes", source="s", held_out="h", **changes):
    config = {"seed": 0, "model": {"width": 32, "depth": 2}, "log": {"every": 5}}
    config["data"] = {"tokenizer": tokenizer}
    for key, value in changes.items():
        block = config["model"] if key in config["model"] else config
        block[key] = value
    folder.mkdir(parents=True)
    text = {"source": source, "eval_source": None, "held_out": held_out}
    opened = runfolder.open_run(folder, config, command_line=[])
    opened.commit({}, text=text, tokenizer=f"hash of {tokenizer}")
    with MetricsWriter(folder, tensorboard=False) as writer:
        for step in range(1, 7):
            row = {"tokens": 10 * step, "flops": 1e6 * step, "train/loss": 3.0 / step}
            if step % 3 == 0:
                row |= {"eval/loss": float(step), "eval/bits_per_byte": 2.0 * step}
            writer.write(step, row)
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


def test_evaluations_between_logged_rows_were_left_out(tmp_path, capsys):
    """Every 3 steps, where every 2 are logged; what counts from 0 on is known in between."""
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
        printed = capsys.readouterr().out
        left_out = f"left out of run: {3 - len(points)} of eval/loss after its last {x}\n"
        assert (left_out in printed) == (len(points) < 3) == ("left out" in printed)
    # What does not count from 0 on has no value in between.
    assert plot.main([*call, "--x=parameters"]) == 2
    assert "no row with both parameters and eval/loss" in capsys.readouterr().err


@pytest.mark.parametrize("other, y, words", [
    ({"tokenizer": "bpe"}, "eval/loss", "different tokenizers (config.data.tokenizer='bytes' and"
     " 'bpe'): their eval/loss cannot be compared; use fewer runs, or --y=eval/bits_per_byte"),
    ({"tokenizer": "bpe"}, "train/loss", "different tokenizers"),
    ({"held_out": "k"}, "eval/loss", "different held-out text (the same settings, of other text):"),
])  # fmt: skip
def test_losses_of_unlike_runs_were_drawn_without_a_word(other, y, words, tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", **other))]
    out = tmp_path / "a.png"
    assert plot.main([*runs, f"--y={y}", f"--out={out}"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not out.exists()
    assert plot.main([runs[0], f"--y={y}", f"--out={out}"]) == 0


@pytest.mark.parametrize("other, x, y, words", [
    ({"tokenizer": "bpe"}, "flops", "eval/bits_per_byte", ""),
    ({"tokenizer": "bpe"}, "tokens", "eval/bits_per_byte", "their tokens are different amounts"),
    ({"held_out": "k"}, "tokens", "eval/bits_per_byte", "compare the shapes of the curves"),
    ({"held_out": "k"}, "tokens", "train/loss", ""),
    ({"source": "t"}, "tokens", "train/loss", "training losses cannot be compared"),
    ({"source": "t"}, "tokens", "eval/loss", ""),
])  # fmt: skip
def test_what_is_known_of_unlike_runs_is_printed(other, x, y, words, tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", **other))]
    assert plot.main([*runs, f"--x={x}", f"--y={y}", f"--out={tmp_path / 'a.png'}"]) == 0
    before, _, _ = capsys.readouterr().out.partition("| run |")
    assert words in before and bool(words) == bool(before)


def test_means_of_successive_points(runs):
    points, _ = plot.curve(logged.read_run(runs[0]), "step", "train/loss")
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
        ([run, "--out=curves"], "--out=curves: unknown file ending"),
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


def test_names_that_matplotlib_takes_for_formulas_or_leaves_out(tmp_path, monkeypatch):
    """A folder's name with two "$" ended in a traceback; one that begins with "_" was missing."""
    texts = []
    curves = {name: np.ones((2, 3)) for name in ("a$x^$b", "_first", "c")}
    write = matplotlib.figure.Figure.savefig

    def savefig(figure, *arguments, **options):
        (axes,) = figure.axes
        texts.extend(text.get_text() for text in axes.get_legend().get_texts())
        write(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
    plot.draw(curves, "tokens", "eval/loss", tmp_path / "curves.png")
    assert texts == list(curves) and (tmp_path / "curves.png").is_file()
