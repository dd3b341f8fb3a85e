"""Results as data: finished studies become files of results/, and tables are made from these."""

import json
import shutil

import numpy as np
import pytest
from refusals import refused
from study_helpers import LAUNCH, error_line
from test_isoflop import GRID, fake_runs, quick  # noqa: F401
from test_studies import SWEEP, fake_run

from efx.studies import isoflop, results, sweep

NEW = ("--title", "MoD and its twin", "--section", "Mixture-of-Depths", "--command", "python -m x")


@pytest.fixture
def top(tmp_path):
    """A checkout: a README, docs and one result."""
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
    """Writes the record of a run, beside its metrics."""
    launch = LAUNCH | {"git": {"revision": revision, "dirty": dirty}}
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
    # Published again from its data alone, nothing changes.
    first = text, (top / "README.md").read_bytes()
    assert results.main([f"--root={top}"]) == 0
    assert first == (page(top), (top / "README.md").read_bytes())


def test_an_update_keeps_the_texts_and_replaces_the_numbers(top, tmp_path):
    path = top / "results/mod.json"
    study(tmp_path / "w", {"MoD, 12.5%": [1.0, 1.2, 1.7], "dense twin": [2.0, 2.1, 2.2]})
    new = {"title": "t", "section": "Speed", "commands": ["c"]}
    results.import_study(path, tmp_path / "w", new)
    said = results.read_result(path) | {
        "about": "What it is.",
        "stale": "Of other settings.",
        "columns": {"held-out loss (nats)": ".2f"},
        "headline": [["MoD, 12.5%", "dense twin"]],
    }
    for row in said["rows"]:
        row["cells"] = {"held-out loss (nats)": row["cells"]["held-out loss (nats)"]}
    results.write_result(path, said)
    results.publish(top)
    assert "Of other settings." in page(top)
    readme = (top / "README.md").read_text()
    assert readme.startswith(f"a\n{results.START}\n") and readme.endswith(f"{results.END}\nz\n")
    link = "[MoD, 12.5%](docs/results.md#t) †"
    assert f"| {link} | 1.30 ± 0.36 | dense twin | 2.10 ± 0.10 |" in readme

    # One row is measured again, by other code; with --add the other row keeps its revision.
    other = study(tmp_path / "v", {"MoD, 12.5%": [3.0, 3.0, 3.0]}, revision="beef" * 10, dirty=True)
    assert results.main([f"--root={top}", f"--from={other}", "--name=mod", "--add"]) == 0
    result = results.read_result(path)
    assert result["about"] == said["about"] and result["headline"] == said["headline"]
    text = page(top)
    assert "| MoD, 12.5% | 3.00 ± 0.00 |" in text and "| dense twin | 2.10 ± 0.10 |" in text
    assert result["revision"] == "beef" * 10 + " with changes"
    assert "c0ffeec0f for dense twin" in text
    refused(lambda: results.import_study(path, other, {}), "'dense twin'")


def test_the_tables_of_an_isoflop_study_follow_from_its_result(top, tmp_path):
    workdir = tmp_path / "w"
    (tmp_path / "grid.py").write_text(GRID)
    fake_runs(isoflop.load_grid(tmp_path / "grid.py"), workdir)
    how = [f"--grid={tmp_path / 'grid.py'}", "--table-only", "--draws=20"]
    assert isoflop.main([*how, f"--workdir={workdir}"]) == 0
    before = (workdir / "isoflop.md").read_text()
    assert results.main([f"--root={top}", f"--from={workdir}", "--name=iso", *NEW]) == 0
    assert "| dense, 1.00 GFLOPs | 8 blocks | " in page(top)
    result = results.read_result(top / "results/iso.json")
    assert len(result["study"]["points"]) == 24 and result["seeds"] == [0, 1]
    assert (result["machine"], result["revision"]) == ("3 CPU cores", "c0ffee" * 6)
    shutil.rmtree(workdir)
    assert isoflop.main([*how, f"--workdir={workdir}", f"--from={top / 'results/iso.json'}"]) == 0
    assert (workdir / "isoflop.md").read_text().splitlines()[:-1] == before.splitlines()[:-1]


def test_a_table_with_a_row_for_each_seed_is_read(top, tmp_path):
    workdir = tmp_path / "w"
    (workdir / "seed0/base").mkdir(parents=True)
    (workdir / "seed0/base/metrics.jsonl").write_text("")
    ran(workdir / "seed0/base", 0)
    rows = {"base": [{"x": 1.0, "mean": 1.5}], "gates": [{"x": 0.5, "experts a token": 2.0}]}
    (workdir / "table.json").write_text(json.dumps(rows))
    assert results.main([f"--root={top}", f"--from={workdir}", "--name=gates", *NEW]) == 0
    assert "| run | x | mean | experts a token |" in page(top)
    assert "| gates | 0.5000 |  | 2.0000 |" in page(top)


def test_missing_inputs_are_refused(top, tmp_path, capsys):
    (tmp_path / "w").mkdir()
    (tmp_path / "w/table.json").write_text('{"a": {"x": [1.0]}}')
    for arguments, name in (
        (["--from=nowhere", *NEW], "--from=nowhere"),
        ([f"--from={tmp_path / 'w'}"], "--title"),
        ([f"--from={tmp_path / 'w'}", *NEW], "run directory"),
    ):
        assert results.main([f"--root={top}", "--name=new", *arguments]) == 2
        error_line(capsys, name)
    assert not (top / "results/new.json").exists()


DERIVED = {
    "family": "MoD",
    "over": {"dense": "dense"},
    "budgets": [
        {"name": "1 GFLOP", "flops": 1e9, "result": "iso"},
        {"name": "4 GFLOPs", "flops": 4e9, "result": "swept"},
    ],
}


@pytest.fixture
def by_budget(top):
    """A function of `derived` that returns the rows derived from an isoFLOP study and a sweep."""

    def points_of(family, size, budget, losses, fitted=True):
        of = dict(family=family, size=size, budget=budget, fitted=fitted, revision="c0ffee")
        return [of | {"seed": seed, "loss": loss} for seed, loss in enumerate(losses)]

    points = points_of("dense", "a", 1e9, [2.0, 2.1, 2.2])
    points += points_of("dense", "b", 1e9, [1.0, 1.0])  # too few seeds
    points += points_of("dense", "a", 2e9, [0.5] * 3)  # of another budget
    points += points_of("MoD", "a", 1e9, [9.0] * 3)  # not the best size
    points += points_of("MoD", "b", 1e9, [2.5, 2.5, 2.8, 2.0])
    points += points_of("MoD", "b", 1e9, [0.1], fitted=False)  # tried a learning rate
    step = results.read_result(top / "results/step.json")
    iso = step | {"title": "Iso", "study": {"points": points}}
    losses = {"MoD": [1.0, 2.0, 3.0], "dense, 8 wide": [3.0, 3.0, 3.0], "dense": [4.0] * 3}
    losses["dense, half as deep"] = [0.0] * 3  # another family
    rows = [
        {"name": name, "cells": {"held-out loss (nats)": {"mean": 0.0, "values": values}}}
        for name, values in losses.items()
    ]
    columns = {"held-out loss (nats)": ".3f"}
    swept = step | {"title": "Swept", "rows": rows, "seeds": [0, 1, 2], "columns": columns}
    results.write_result(top / "results/iso.json", iso)
    results.write_result(top / "results/swept.json", swept)

    def made(derived):
        said = {"title": "By budget", "section": "Mixture-of-Depths", "commands": ["python -m x"]}
        said |= {"picture": "budgets", "first": "budget", "derived": derived}
        (top / "results/by_budget.json").write_text(json.dumps(said))
        return results.read_results(top / "results")["by_budget"]["rows"]

    return made


def test_differences_by_budget_follow_from_other_results(top, by_budget):
    first, second = by_budget(DERIVED)
    assert first["cells"]["size"] == "b" and first["cells"]["held-out loss (nats)"]["n"] == 4
    over = first["cells"]["over dense"]
    np.testing.assert_allclose(over["values"], [0.5, 0.4, 0.6])  # seed 3 has no pair
    # 0.5 and 4.303 standard errors (Student's t).
    np.testing.assert_allclose([over["mean"], *over["interval"]], [0.5, 0.2516, 0.7484], atol=1e-4)
    assert second["cells"]["over dense"]["values"] == [-2.0, -1.0, 0.0]
    results.publish(top)
    assert "| 1 GFLOP | b | 2.450 ± 0.332 | 0.500 (0.252 to 0.748) |" in page(top)
    assert (top / "docs/by_budget.png").read_bytes().startswith(b"\x89PNG")


def test_results_that_cannot_be_derived_are_refused(by_budget):
    refused(lambda: by_budget(DERIVED | {"family": "MoE"}), "'MoE'")
    other = [{"name": "1", "flops": 1, "result": "is"}]
    refused(lambda: by_budget(DERIVED | {"budgets": other}), "'is'")


@pytest.mark.parametrize(
    "before, after, name",
    [
        ('"title"', '"titel"', "'titel'"),
        ('"Speed",', '"Spead",', "Spead"),
        ('{"step time": 0.5}', '{"time": 0.5}', "'time'"),
    ],
)
def test_a_file_that_is_no_result_is_refused(before, after, name, top):
    path = top / "results/step.json"
    path.write_text(path.read_text().replace(before, after))
    refused(lambda: results.publish(top), name)


def test_a_readme_without_a_place_for_results_is_refused(top):
    (top / "README.md").write_text("nothing")
    refused(lambda: results.publish(top), results.START)
