"""Write the tables of README and docs from results/, and check the results in their sentences.

    python -m results.pages

A table stands below its marker; its header and first column are written by hand:

    <!-- table: results/mod_table.csv name=* {loss:.3f} ± {loss_std:.3f} | {step_time_ratio:.2f} -->

A cell is a text in which {column:format} is the value in the row that the conditions select;
`*` is the label in the first column. A cell keeps the file and conditions of the cell to its left
but for those that it changes. A result in a sentence has its source directly behind it:

    1.740 ± 0.037<!-- results/mod_table.csv name="MoD 12.5%" {loss:.3f} ± {loss_std:.3f} -->

A result is a number with a decimal point or a percent sign. Settings stand in code, numbers from
elsewhere in italics or in links to elsewhere; with letters attached a number is a name.
"""

import functools
import itertools
import pathlib
import re
import shlex

import numpy as np
import pandas as pd

from efx.logging import tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"<!-- table: ([^>]+?) -->\n\n(\|.*\n\|[-|]+\n)((?:\|.*\n)+)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
SOURCE = re.compile(r"<!-- (results/.+?) -->")
ELSEWHERE = re.compile(
    r"`[^`]*`|\[[^]]*\]\(http[^)]*\)|\]\([^)]*\)|<!--.*?-->|(?<![\w*])\*[^*\s][^*]*(?<!\s)\*(?![\w*])"
)
NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)[-+−]?\d[\d,]*(?:\.\d+%?|%)(?!\w|\.\d)")
UNITS = {"GFLOPs": 1e9, "TFLOPs": 1e12}


@functools.cache
def read(path):
    return tables.read_csv(ROOT / path)[0]


def parse(source):
    """Return (file or "", ((column, value), ...), template) of a source."""
    head, _, template = source.partition("{")
    words = shlex.split(head)
    file = words.pop(0) if words and "=" not in words[0] else ""
    return file, tuple(tuple(each.split("=", 1)) for each in words), "{" + template


def value_of(text):
    """Return 7.5e11 for "750 GFLOPs" or "7.5e11"."""
    digits, _, unit = text.replace(",", "").partition(" ")
    return float(digits) * UNITS.get(unit, 1)


@functools.cache
def render(file, conditions, template):
    """Return the template with the values of the rows that meet the conditions, equal in all."""
    rows = read(file)
    for column, value in conditions:
        numeric = pd.api.types.is_numeric_dtype(rows[column])
        rows = rows[np.isclose(rows[column], value_of(value)) if numeric else rows[column] == value]
    if NUMBER.search(re.sub(r"{.*?}", "", template)):
        raise ValueError(f"{template!r} states a number; name a column")
    texts = {template.format_map(row).replace(" ± nan", "") for _, row in rows.iterrows()}
    if len(texts) != 1:
        raise ValueError(f"{file} gives {sorted(texts)} for {conditions}: select one row")
    return texts.pop()


def table_row(line, cells):
    """Return a row of a table with its label and new cells."""
    label = line.split("|")[1].strip()
    row, file, conditions = [label], "", {}
    for cell in cells.split("|"):
        new_file, changes, template = parse(cell.strip())
        changes = {column: label if value == "*" else value for column, value in changes}
        file, conditions = (new_file, changes) if new_file else (file, conditions | changes)
        row.append(render(file, tuple(conditions.items()), template))
    return f"| {' | '.join(row)} |\n"


def with_tables(text):
    """Return a page with all its tables rewritten."""

    def table(match):
        rows = [table_row(line, " ".join(match[1].split())) for line in match[3].splitlines()]
        return match[0].removesuffix(match[3]) + "".join(rows)

    return TABLE.sub(table, text)


def unsourced(text):
    """Return the results in the sentences of a page that their sources do not give."""
    text = " ".join(FENCE.sub(" ", TABLE.sub(r"\2", text)).split())
    sentences, wrong = SOURCE.split(text), []
    for sentence, source in itertools.zip_longest(sentences[::2], sentences[1::2], fillvalue=""):
        result = render(*parse(source)) if source else ""
        before = sentence.removesuffix(result)
        if source and (before == sentence or re.search(r"[\w.,+−-]$", before)):
            wrong.append(
                f"{sentence[-60:]!r} does not end with {result!r}: change it or {source!r}"
            )
        numbers = NUMBER.finditer(ELSEWHERE.sub(" ", before))
        wrong += [f"{number[0]} has no source: write one behind it" for number in numbers]
    return wrong


def main():
    for page in PAGES:
        text = page.read_text()
        written = with_tables(text)
        if written != text:
            page.write_text(written)
            print(f"wrote {page.relative_to(ROOT)}")
        for message in unsourced(written):
            print(f"{page.relative_to(ROOT)}: {message}")


if __name__ == "__main__":
    main()
