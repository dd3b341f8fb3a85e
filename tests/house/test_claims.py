"""Every number that a document quotes is in a file of results/ that the same page links to.

Checked are decimals with two digits or more, outside code. In a row of a table that begins with the
name of a run or family, the number has to be in a row of that name. Numbers from elsewhere are in
italics.
"""

import math
import re
from pathlib import Path

import pytest
from test_docs import PAGES, ROOT, prose

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import pandas as pd

from efx.studies import results
from efx.studies.statistics import difference

NUMBER = re.compile(r"(?<![\w./])-?\d+\.\d{2,}(?![\w.]*/|\d*v\d|\.\d)")
UNITS = {"%": 0.01}
RATES_SELECTED_ON = 0  # the seed that does not count where it selected the learning rates


def numbers(text):
    """(text, value, precision) of the numbers of a passage, without links and code."""
    text = re.sub(
        r"(?<!\*)\*[^*]+\*(?!\*)|`[^`]*`|\]\([^)]*\)|<[^>]*>|arXiv[\s:]*\d{4}\.\d{5}|\[\d{4}\.\d{5}",
        " ",
        text,
    )
    for found in NUMBER.finditer(text):
        digits = len(found[0].partition(".")[2])
        scale = UNITS.get(text[found.end() : found.end() + 1], 1)
        yield found[0], float(found[0]) * scale, 0.5001 * 10**-digits * scale


def values(table):
    """All numbers of a result, and of its seeds the mean and deviation of each point."""
    found = [table[column] for column in table.select_dtypes("number")]
    if {"seed", "loss"} <= {*table}:
        keys = [key for key in ("family", "size", "budget", "rate") if key in table]
        for measured in {"loss", "repeat_gain"} & {*table}:
            for seeds in (table.seed >= 0, table.seed != RATES_SELECTED_ON):
                groups = table[seeds].groupby(keys, dropna=False)[measured]
                found += [groups.mean(), groups.std()]
    return pd.concat(found).dropna()


def rows_of(table, label):
    """The rows of a result whose name or family is `label`; empty where it names none."""
    for column in ("name", "family"):
        if column in table:
            rows = table[table[column].astype(str) == label]
            if len(rows):
                return rows
    return table.iloc[:0]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "settings.md"], ids=lambda page: page.name
)
def test_numbers_are_results(page):
    text = page.read_text()
    names = sorted(set(re.findall(r"results/([\w-]+)\.csv", text)))
    tables = [results.read(name, ROOT / "results")[0] for name in names]
    wrong = []
    for line in prose(text).splitlines():
        label = re.sub(r"[`*]", "", line.split("|")[1]).strip() if line.startswith("|") else ""
        named = [rows for rows in (rows_of(table, label) for table in tables) if len(rows)]
        known = [values(table) for table in named or tables]
        for quoted, value, precision in numbers(line):
            if not any(((one.abs() - abs(value)).abs() <= precision).any() for one in known):
                wrong.append(f"{quoted} in: {line.strip()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name, compute", [(results.OUT, results.by_budget), ("comparisons", results.comparisons)]
)
def test_comparisons_are_current(name, compute):
    published, _ = results.read(name, ROOT / "results")
    computed = compute(ROOT / "results").round(4)
    pd.testing.assert_frame_equal(published, computed, check_dtype=False, atol=1e-4)


def test_an_unpaired_interval_is_students():
    """Two samples of three, by hand: sp = 1, so the half width is t(0.975, 4) sqrt(2/3)."""
    mean, low, high, p = difference((2.0, 1.0, 3), (1.0, 1.0, 3))
    assert mean == 1 and math.isclose(high - mean, 2.7764451 * math.sqrt(2 / 3), rel_tol=1e-6)
    assert math.isclose(mean - low, high - mean) and p > 0.5  # far outside the margin
    *_, p = difference((2.0, 1e-3, 3), (2.001, 1e-3, 3))
    assert p < 1e-3  # well inside


def test_results_name_their_command_and_revision():
    for path in (ROOT / "results").glob("*.csv"):
        table, header = results.read(path.stem, path.parent)
        assert len(table) and {"title", "command", "machine"} <= {*header}, path.name
        derived = (results.OUT, "comparisons", "_optima", "_differences")
        assert path.stem.endswith(derived) or "revision" in header, path.name
        for page in re.findall(r"configs/\S+\.py", " ".join(header["command"])):
            assert Path(ROOT / page).is_file(), (path.name, page)
