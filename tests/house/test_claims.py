"""Results in documents are those of results/, and comparisons are those of the published runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from test_docs import ROOT

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import pandas as pd

from efx.logging import tables
from efx.studies import statistics
from results import comparisons, pages


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_tables_are_generated_and_results_in_sentences_have_their_source(page):
    text = page.read_text()
    assert pages.with_tables(text) == text, "run: python -m results.pages"
    assert pages.unsourced(text) == []


@pytest.mark.parametrize("sentence, is_right", [
    ("0.5", False),
    ("12%", False),
    ("1.740<!-- results/mod_table.csv name=dense {loss:.3f} -->", False),  # another row's
    ("-1.984<!-- results/mod_table.csv name=dense {loss:.3f} -->", False),
    ("1.984<!-- results/mod_table.csv name=dense {loss:.3f} --> and 0.5", False),
    ("| run | 0.5 |", False),
    ("1.984\n± 0.031<!-- results/mod_table.csv name=dense {loss:.3f} ± {loss_std:.3f} -->", True),
    ("`gain=0.5`, *0.5*, [2404.02258](https://arxiv.org), 1.3B, version 4.57.1, 12 blocks", True),
])  # fmt: skip
def test_a_result_is_a_decimal_or_percentage_with_its_source_behind_it(sentence, is_right):
    assert (pages.unsourced(sentence) == []) == is_right


@pytest.mark.parametrize("source", [
    "results/mod_table.csv {loss:.3f}",  # many rows
    "results/mod_table.csv name=MoD {loss:.3f}",  # no row
    "results/mod_table.csv name=dense {loss:.3f} of 2.0",  # a number of the page's own
])  # fmt: skip
def test_a_source_names_one_row_and_only_columns(source):
    with pytest.raises(ValueError):
        pages.render(*pages.parse(source))


def test_comparisons_are_current():
    published, _ = tables.read_csv(ROOT / "results/comparisons.csv")
    computed = comparisons.comparisons()
    pd.testing.assert_frame_equal(published, computed, check_dtype=False, atol=1e-4)


def test_differences_are_welchs_or_paired():
    a, b = np.array([2.0, 2.1, 2.5, 2.2]), np.array([1.9, 2.0, 1.95, 2.0])
    welch = stats.ttest_ind(a, b, equal_var=False)
    paired = stats.ttest_rel(a, b)
    summary = [(each.mean(), each.std(ddof=1), 4) for each in (a, b)]
    for found, expected in (
        (statistics.difference(*summary), welch),
        (statistics.paired_difference(a, b), paired),
    ):
        low, high = expected.confidence_interval(0.95)
        values = found["difference"], found["low"], found["high"], found["p"]
        np.testing.assert_allclose(values, (a.mean() - b.mean(), low, high, expected.pvalue))
        assert found["equivalence_p"] > 0.5  # far outside the margin
    close = statistics.difference((2.0, 1e-3, 3), (2.001, 1e-3, 3))
    assert close["equivalence_p"] < 1e-3
    assert np.isnan(statistics.difference((2.0, np.nan, 1), (2.001, 1e-3, 3))["low"])


def test_holms_correction():
    np.testing.assert_allclose(statistics.holm([0.04, 0.01, 0.03, 0.9]), [0.09, 0.04, 0.09, 0.9])


def test_only_models_that_differ_in_the_selection_are_paired():
    runs = {"seed": [1, 2], "rate": [np.nan] * 2, "parameters": [100_000] * 2, "tokens": [500] * 2}

    def model(**changes):
        return comparisons.Model("", 0.0, (), pd.DataFrame(runs | changes))

    paired = comparisons.differ_in_selection_alone
    assert paired(model(), model(parameters=[100_256] * 2))  # a router
    for change in ({"seed": [0, 1]}, {"rate": [1e-3] * 2}, {"parameters": [50_000] * 2}):
        assert not paired(model(), model(**change))
    assert not paired(model(), model(tokens=[450] * 2))  # reads less of the text
    assert not paired(model(), comparisons.Model("", 0.0, ()))


def test_a_size_with_a_diverged_seed_is_not_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(comparisons, "RESULTS", tmp_path)
    rows = [("wide", seed, loss) for seed, loss in enumerate([1.0, 1.0, np.nan])]
    rows += [("narrow", seed, 2.0) for seed in range(3)] + [("one seed", 0, 0.5)]
    table = pd.DataFrame(rows, columns=["size", "seed", "loss"]).assign(family="dense")
    tables.write_csv(tmp_path / "points.csv", table, {"title": "points"})
    assert comparisons.best("points", np.nan, "loss", "dense").size == "narrow"


def test_results_name_their_command_and_revision():
    for path in (ROOT / "results").glob("*.csv"):
        table, header = tables.read_csv(path)
        assert len(table) and {"title", "command", "machine"} <= {*header}, path.name
        derived = ("comparisons", "_optima", "_differences")
        assert path.stem.endswith(derived) or "revision" in header, path.name
        for page in re.findall(r"configs/\S+\.py", " ".join(header["command"])):
            assert Path(ROOT / page).is_file(), (path.name, page)
