"""Runs against the reference curves of their recipe: within the band, outside, not comparable."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from study_helpers import LAUNCH, TEXT, error_line

from efx.config import schema
from efx.config.load import load_config, to_config
from efx.logging import MetricsWriter
from efx.studies import reference, results
from efx.studies.isoflop import points

ROOT = Path(__file__).resolve().parents[2]
# Held-out loss at the steps 500, ..., 2000.
CURVE = (2.4, 2.2, 2.0, 1.9)


@functools.cache
def plain(recipe):
    config, changes = reference.RECIPES[recipe]
    return schema.as_dict(to_config(load_config(config, changes)))


def make_run(folder, curve=CURVE, recipe="cpu", seed=0, steps=None, **record):
    """The folder of a run of a recipe. record: entries of run.json that are others."""
    config = plain(recipe) | {"seed": seed, "steps": steps or plain(recipe)["steps"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    launch = LAUNCH | {"devices": {"kind": record.pop("device", "cpu")}}
    says = {"launches": [launch], "text": TEXT, "tokenizer": "characters"}
    (folder / "run.json").write_text(json.dumps(says | record))
    every = config["steps"] // len(CURVE)
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        for i, loss in enumerate(curve):
            writer.write(every * (i + 1), {"train/loss": loss + 0.1, "eval/loss": loss})
    return folder


def shifted(by):
    return [loss + by for loss in CURVE]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A file with the curves of three seeds of the recipe `cpu`, which are 0.01 apart."""
    top = tmp_path_factory.mktemp("recorded")
    path = top / "curves.json"
    empty = results.read_result(ROOT / reference.CURVES)
    empty |= {"curves": dict.fromkeys(reference.RECIPES), "seeds": ()}
    results.write_result(path, empty)
    runs = [make_run(top / f"{i}", shifted(0.01 * i), seed=i) for i in (0, 1, 2)]
    assert call(path, *runs, "--record=cpu") == 0
    return path


def call(path, *argv):
    return reference.main([*map(str, argv), f"--curves={path}"])


def test_a_further_seed_is_in_the_band_as_often_as_claimed():
    low, high = reference.bands({"1": [1.0, 2.0, 3.0]})["1"]
    reach = 4.3027 * math.sqrt(4 / 3)  # Student's t of 2 degrees of freedom
    assert (low, high) == pytest.approx((2 - reach, 2 + reach), abs=1e-3)
    assert reference.bands({"1": [1.0]}) == {"1": None}
    draws = np.random.default_rng(0).normal(size=(1500, 4)).tolist()
    bands = [reference.bands({"1": seeds})["1"] for *seeds, _ in draws]
    inside = [low < draw[-1] < high for (low, high), draw in zip(bands, draws, strict=True)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_a_step_with_close_seeds_has_the_usual_band():
    bands = reference.bands({"1": [0.9, 1.0, 1.1], "2": [2.0, 2.0, 2.0], "3": [2.8, 3.0, 3.2]})
    reach = {step: (high - low) / 2 for step, (low, high) in bands.items()}
    usual = math.sqrt((0.1**2 + 0.2**2) / 3)
    assert reach["2"] == reach["1"] and reach["2"] / reach["3"] == pytest.approx(usual / 0.2)


def test_a_run_in_the_band_passes(recorded, tmp_path, capsys):
    assert call(recorded, make_run(tmp_path / "a", shifted(0.03), seed=7)) == 0
    said = capsys.readouterr().out
    assert "\n   500    2.4300    2.4100  2.3603 to 2.4597: within\n" in said


def test_a_run_outside_the_band_fails(recorded, tmp_path, capsys):
    off = [*CURVE[:2], 2.2, 1.2]
    runs = [make_run(tmp_path / "right"), make_run(tmp_path / "off", off)]
    assert call(recorded, *runs) == 1
    said = capsys.readouterr().out
    assert "2.2000    2.0100  1.9603 to 2.0597: OUTSIDE, 0.1403 above" in said
    assert "1.2000    1.9100  1.8603 to 1.9597: OUTSIDE, 0.6603 below" in said
    assert call(recorded, make_run(tmp_path / "nan", [*CURVE[:3], math.nan])) == 1


def test_an_unfinished_run_is_compared_up_to_its_step(recorded, tmp_path, capsys):
    assert call(recorded, make_run(tmp_path / "a", CURVE[:2])) == 0
    assert "steps 1500, 2000: not compared" in capsys.readouterr().out


def test_runs_that_are_not_comparable_are_refused(recorded, tmp_path, capsys):
    def refused(name, *argv, path=recorded):
        assert call(path, *argv) == 2
        error_line(capsys, name)

    other = make_run(tmp_path / "other", steps=1000)
    refused("config.steps", other)
    text = make_run(tmp_path / "text", text=TEXT | {"source": "xyz"})
    refused("'cpu'", text)
    gpu = make_run(tmp_path / "gpu", recipe="gpu")
    refused("'gpu'", gpu)  # not recorded yet
    refused("nothing.json", gpu, path=tmp_path / "nothing.json")
    # Runs to record.
    right, same = make_run(tmp_path / "right"), make_run(tmp_path / "same")
    refused("seed", right, same, "--record=cpu")
    refused("config.steps", right, other, "--record=cpu")
    refused("text", right, text, "--record=cpu")
    nan = make_run(tmp_path / "nan", [*CURVE[:3], math.nan], seed=1)
    refused("finite", right, nan, "--record=cpu")


def test_the_section_has_the_recorded_curves(recorded):
    result = results.read_result(recorded)
    assert result["seeds"] == [0, 1, 2] and result["machine"] == "3 CPU cores"
    page = results.section("reference_curves", result)
    assert "| cpu, step 500 | 2.4100 ± 0.0100 | 2.3603 to 2.4597 | 2.5100 ± 0.0100 |" in page
    assert "| gpu | not measured yet" in page


def test_the_committed_curves_are_of_the_current_recipes(root):
    result = reference.read_curves(root / reference.CURVES)
    assert len(result["curves"]["cpu"]["seeds"]) == 3
    for name, recipe in result["curves"].items():
        if recipe:
            expected = reference.todays_settings(name)
            assert points.differing_settings(recipe["settings"], expected) == []
    rows = [reference.rows_of(name, recipe) for name, recipe in result["curves"].items()]
    assert json.loads(json.dumps(sum(rows, []))) == result["rows"]
