"""Results as data: what a finished study leaves in results/, and what is written from it."""

import json
import shutil

import pytest
from test_isoflop import GRID, fake_runs, quick  # noqa: F401
from test_studies import SWEEP, fake_run

from efx.errors import UsageError
from efx.studies import isoflop, results, sweep

NEW = ("--title", "MoD and its twin", "--section", "Mixture-of-Depths", "--command", "python -m x")


@pytest.fixture
def top(tmp_path):
    """A checkout: a README, docs, and a result that says nothing but its name."""
    for folder in ("docs", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text(f"a\n{results.START}\nold\n{results.END}\nz\n")
    result = results.FIELDS | {
        "title": "Speed: a step",
        "section": "Speed",
        "commands": ["python -m benchmarks.mod_step"],
        "machine": "2 CPU cores",
        "revision": "0123456789abcdef",
        "columns": {"step time": ".2f"},
        "rows": [{"name": "MoD", "cells": {"step time": 0.5}}],
    }
    results.write_result(tmp_path / "results/step.json", result)
    return tmp_path


def ran(folder, seed, revision="c0ffee" * 6, dirty=False):
    """What a run says of itself, beside its metrics."""
    launch = {
        "git": {"revision": revision, "dirty": dirty},
        "devices": {"kind": "cpu"},
        "device_count": 1,
        "cpu_count": 3,
        "command_line": ["efx", "--config=configs/mod.py", "--workdir=x"],
    }
    (folder / "run.json").write_text(json.dumps({"launches": [{}, launch]}))
    (folder / "config.json").write_text(json.dumps({"seed": seed}))


def study(workdir, losses, **said):
    """A finished sweep. losses: {row: [loss of each seed]}."""
    path = workdir / "sweep.py"
    workdir.mkdir()
    path.write_text(SWEEP)
    spec = sweep.load_sweep(path)
    spec["runs"] = {name: spec["runs"][name] for name in losses}
    for name, row in losses.items():
        for seed, loss in enumerate(row):
            accuracy = 0.9 + loss / 1000 if name.startswith("MoD") else None
            fake_run(spec, workdir, name, seed, loss, accuracy=accuracy)
            ran(sweep.folder(workdir, name, seed), seed, **said)
    table = sweep.collect_table(spec, workdir, None)
    (workdir / "table.json").write_text(json.dumps(table))
    return str(workdir)


def page(top):
    return (top / "docs/results.md").read_text()


def test_a_finished_sweep_becomes_a_result(top, tmp_path):
    losses = {"MoD, 12.5%": [1.0, 1.2, 1.7], "dense twin": [2.0, 2.1, 2.2]}
    workdir = study(tmp_path / "w", losses)
    call = [f"--root={top}", f"--from={workdir}", "--name=mod", *NEW]
    assert results.main(call) == 0
    result = results.read_result(top / "results/mod.json")
    assert result["seeds"] == [0, 1, 2] and result["machine"] == "3 CPU cores"
    assert result["config"] == "configs/mod.py" and result["revision"] == "c0ffee" * 6
    cell = result["rows"][0]["cells"]["held-out loss (nats)"]
    assert cell["values"] == [1.0, 1.2, 1.7] and cell["n"] == 3
    assert (cell["mean"], cell["spread"]) == pytest.approx((1.3, 0.36055513))
    assert "decision accuracy" not in result["rows"][1]["cells"]
    text = page(top)
    assert "| MoD, 12.5% | 1.3000 ± 0.3606 | 2.6000 ± 0.7211 | 0.9013 ± 0.0004 |" in text
    assert "| dense twin | 2.1000 ± 0.1000 |" in text and "40.0 GFLOPs | 400 | 40 |" in text
    assert "`configs/mod.py`; seeds 0, 1, 2: mean ± standard deviation; 3 CPU cores; " in text
    assert "revision c0ffeec0f (the code that ran)" in text and "```bash\npython -m x\n```" in text
    # Sections have their order, whatever the files are called.
    assert text.index("### MoD and its twin") < text.index("### Speed: a step")
    assert "old" not in (top / "README.md").read_text()
    first = text, (top / "README.md").read_bytes()
    assert results.main([f"--root={top}"]) == 0
    assert first == (page(top), (top / "README.md").read_bytes())


def test_what_a_file_says_stays_and_its_numbers_are_replaced(top, tmp_path):
    path = top / "results/mod.json"
    study(tmp_path / "w", {"MoD, 12.5%": [1.0, 1.2, 1.7], "dense twin": [2.0, 2.1, 2.2]})
    new = {"title": "t", "section": "Speed", "commands": ["c"]}
    results.import_study(path, tmp_path / "w", new)
    said = results.read_result(path) | {
        "about": "What it is.",
        "stale": "Of other settings.",
        "columns": {"held-out loss (nats)": ".2f"},
        "headline": [["MoD, 12.5%", "dense twin"]],
        "picture": "dots",
    }
    for row in said["rows"]:
        row["cells"] = {"held-out loss (nats)": row["cells"]["held-out loss (nats)"]}
    results.write_result(path, said)
    results.publish(top)
    assert "**Not as efx is today.** Of other settings." in page(top)
    readme = (top / "README.md").read_text()
    assert readme.startswith(f"a\n{results.START}\n![t](docs/mod.png)\n\n| measured")
    link = "[MoD, 12.5%](docs/results.md#t) †"
    assert f"| {link} | 1.30 ± 0.36 | dense twin | 2.10 ± 0.10 |" in readme
    assert readme.endswith(f"{results.END}\nz\n")
    assert (top / "docs/mod.png").read_bytes().startswith(b"\x89PNG")

    # One row anew, of other code; with --add the other one stays, and keeps its revision.
    other = study(tmp_path / "v", {"MoD, 12.5%": [3.0, 3.0, 3.0]}, revision="beef" * 10, dirty=True)
    assert results.main([f"--root={top}", f"--from={other}", "--name=mod", "--add"]) == 0
    result = results.read_result(path)
    assert (result["about"], result["stale"]) == ("What it is.", "Of other settings.")
    assert result["columns"] == said["columns"] and result["headline"] == said["headline"]
    assert [row["name"] for row in result["rows"]] == ["MoD, 12.5%", "dense twin"]
    text = page(top)
    assert "| MoD, 12.5% | 3.00 ± 0.00 |" in text and "| dense twin | 2.10 ± 0.10 |" in text
    assert result["revision"] == "beef" * 10 + " with changes"
    assert "revision c0ffeec0f for dense twin" in text
    with pytest.raises(UsageError, match="headline names 'dense twin', no row"):
        results.import_study(path, other, {})
    results.write_result(path, results.read_result(path) | {"headline": []})
    results.import_study(path, other, {})
    assert not results.read_result(path)["stale"] and len(results.read_result(path)["rows"]) == 1


def test_an_isoflop_study_keeps_its_points_and_draws_a_picture_of_them(top, tmp_path):
    workdir = tmp_path / "w"
    (tmp_path / "grid.py").write_text(GRID)
    fake_runs(isoflop.load_grid(tmp_path / "grid.py"), workdir)
    how = [f"--grid={tmp_path / 'grid.py'}", "--table-only", "--draws=20"]
    assert isoflop.main([*how, f"--workdir={workdir}"]) == 0
    before = (workdir / "isoflop.md").read_text()
    assert results.main([f"--root={top}", f"--from={workdir}", "--name=iso", *NEW]) == 0
    text = page(top)
    assert "![MoD and its twin](iso.png)" in text
    assert "| dense, 1.00 GFLOPs | 8 blocks | " in text and "| MoD, 2.00 GFLOPs | " in text
    result = results.read_result(top / "results/iso.json")
    assert len(result["study"]["points"]) == 24 and result["seeds"] == [0, 1]
    assert (result["machine"], result["revision"]) == ("3 CPU cores", "c0ffee" * 6)
    assert (result["config"], result["columns"]["speedup in FLOPs"]) == ("configs/mod.py", ".2f")
    shutil.rmtree(workdir)  # the picture is drawn from the result alone
    drawn = (top / "docs/iso.png").read_bytes()
    (top / "docs/iso.png").unlink()
    results.publish(top)
    assert (top / "docs/iso.png").read_bytes() == drawn and drawn.startswith(b"\x89PNG")
    # So are the tables, on a machine without any of the runs.
    assert isoflop.main([*how, f"--workdir={workdir}", f"--from={top / 'results/iso.json'}"]) == 0
    assert (workdir / "isoflop.md").read_text().splitlines()[:-1] == before.splitlines()[:-1]


def test_every_revision_is_listed():
    """Of an isoFLOP study with the number of its runs; nine characters of each, and changes."""
    first, second = "0123456789abcdef", "fedcba9876543210"
    points = [{"revision": first}] * 3 + [{"revision": f"{second} with changes"}]
    result = results.FIELDS | {
        "machine": "a machine",
        "revision": f"{first}, {second} with changes",
        "rows": [{"name": "MoD", "revision": f"{second} with changes"}],
    }
    said = results.provenance(result)
    assert "; revisions 012345678, fedcba987 with changes (the code that ran)" in said
    assert said.endswith("; revision fedcba987 with changes for MoD.")
    said = results.provenance(result | {"rows": [], "study": {"points": points}})
    words = "revisions 012345678 (3 runs), fedcba987 with changes (1 run) (the code that ran)."
    assert said == f"a machine; {words}"


def test_a_row_for_each_seed_is_read_too(top, tmp_path):
    """As the studies of composition write their tables."""
    workdir = tmp_path / "w"
    (workdir / "seed0/base").mkdir(parents=True)
    (workdir / "seed0/base/metrics.jsonl").write_text("")
    ran(workdir / "seed0/base", 0)
    rows = {"base": [{"x": 1.0, "mean": 1.5}], "gates": [{"x": 0.5, "experts a token": 2.0}]}
    (workdir / "table.json").write_text(json.dumps(rows))
    assert results.main([f"--root={top}", f"--from={workdir}", "--name=gates", *NEW]) == 0
    assert "| run | x | mean | experts a token |" in page(top)
    assert "| gates | 0.5000 |  | 2.0000 |" in page(top)


@pytest.mark.parametrize("arguments, words", [
    (["--name=a"], "--from and --name go together"),
    (["--from=nowhere", "--name=a", *NEW], "--from=nowhere: no table.json"),
    (["--from={w}", "--name=new"], "--title is missing"),
    (["--from={w}", "--name=new", *NEW[:3], "Sped", *NEW[4:]], "did you mean 'Speed'"),
    (["--from={w}", "--name=new", *NEW], "no run folder in it"),
])  # fmt: skip
def test_what_is_missing_is_one_line(arguments, words, top, tmp_path, capsys):
    (tmp_path / "w").mkdir()
    (tmp_path / "w/table.json").write_text('{"a": {"x": [1.0]}}')
    if words.startswith("did"):
        (tmp_path / "w/metrics.jsonl").write_text("")
        ran(tmp_path / "w", 0)
    given = [argument.format(w=tmp_path / "w") for argument in arguments]
    assert results.main([f"--root={top}", *given]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and error.startswith("efx: error: ")
    assert not (top / "results/new.json").exists()


@pytest.mark.parametrize("change, words", [
    (('"title"', '"titel"'), "'titel' is not a field of a result \\(did you mean 'title'"),
    (('"machine": "2 CPU cores",', ""), "the result lacks 'machine'"),
    (('"Speed",', '"Spead",'), "did you mean 'Speed'"),
    (('{"step time": 0.5}', '{"time": 0.5}'), "MoD: 'time' is not a column"),
    (("]", ""), "no JSON"),
])  # fmt: skip
def test_a_file_that_is_no_result_is_one_line(change, words, top):
    path = top / "results/step.json"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UsageError, match=words):
        results.publish(top)


def test_a_readme_without_a_place_for_results_is_refused(top):
    (top / "README.md").write_text("nothing")
    with pytest.raises(UsageError, match="expected one line <!-- results -->"):
        results.publish(top)
