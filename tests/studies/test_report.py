"""The report page: what it holds, what it refuses, and what it does in a browser."""

import html.parser
import itertools
import json
import math
import sys

import browser as browsers
import pytest

from efx import runfolder, tables
from efx.errors import UsageError
from efx.metrics import MetricsWriter
from efx.studies import isoflop, logged, page, report, report_fits
from efx.studies.isoflop import grid, law
from efx.studies.isoflop import points as isoflop_points
from efx.studies.isoflop import report as isoflop_report
from efx.studies.isoflop.bootstrap import with_draws

for package in ("jinja2", "plotly"):
    pytest.importorskip(package, reason="the extra `report` is not installed")

HOSTILE = "<b>bold</b></script><img src=x onerror='window.hacked=1'> %{x} {{ 7*7 }}"

NARROW = "narrow<img src=x onerror='hacked=1'>"  # a folder


def make_run(
    folder, width=32, speed=1000.0, tokenizer="bytes", evaluated=True, held_out="h", **data
):
    """A run of 40 steps whose losses, FLOPs and tokens follow from the step and the width."""
    config = {
        "seed": 0,
        "steps": 40,
        "model": {"width": width},
        "data": {"source": "stdlib", "tokenizer": tokenizer, "text_key": "text"} | data,
        "log": {"every": 4},
    }
    text = {"source": "s", "eval_source": None, "held_out": held_out}
    folder.mkdir(parents=True)
    opened = runfolder.open_run(folder, config, command_line=[])
    opened.commit({}, text=text, tokenizer=f"hash of {tokenizer}")
    with MetricsWriter(folder, tensorboard=False) as writer:
        writer.write(1, {"startup_seconds": 1.0, "parameters": width * 1000})
        for step in range(4, 41, 4):
            row = {
                "tokens": 100 * step,
                "flops": 1e6 * width * step,
                "seconds": step / 2,
                "tokens_per_second": speed,
                "train/loss": 64 / width + 4 / step,
                "router/accuracy": 0.5,
            }
            if evaluated and step % 20 == 0:
                loss = 96 / width + 4 / step
                row |= {"eval/loss": loss, "eval/bits_per_byte": loss / math.log(2)}
            writer.write(step, row)
        for step in (20, 40):
            writer.write_text(step, "sample 0", f"of step {step} {HOSTILE}")
    return folder


def make_isoflop(path, families=((1, "dense"), (0.5, "MoD")), sizes=(4, 8, 16, 32, 64)):
    """isoflop.json of these families and two budgets, three seeds, by a law that is known; "short"
    has one budget, which allows no law, and a parabola with its least loss, 2.0, at 8000
    parameters."""
    known, points = law.Law(1.0, 8.0, 9.0, 0.3, 0.25), []
    for budget, (share, family), size in itertools.product((1e10, 4e10), families, sizes):
        points.append((family, f"{size} blocks", budget, 1000 * size, 6000 * size * share))
    points += [("short", f"{size} blocks", 1e10, 1000 * size, 6e3 * size) for size in sizes]
    found = []
    for (family, size, budget, parameters, cost), seed in itertools.product(points, range(3)):
        loss = float(known.loss(parameters, budget / cost))
        if family == "short":
            loss = 2 + 0.1 * math.log(parameters / 8000) ** 2
        run = {"family": family, "size": size, "budget": budget, "seed": seed}
        run |= {name: None for name in grid.Run._fields if name not in run}
        numbers = {"parameters": parameters, "tokens": budget / cost, "flops": budget}
        alike = {"fitted": True, "seconds": None, "split": 1.0, "settings": {}}
        words = dict.fromkeys(("machine", "revision", "text", "tokenizer", "source"), "x")
        loss += 0.001 * (seed - 1)
        found.append(isoflop_points.Point(grid.Run(**run), loss=loss, **numbers, **alike, **words))
    study = isoflop_points.as_data(found) | {"draws": 20, "further": [10.0], "config": "c"}
    path.write_text(json.dumps(study))
    return path


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    """A study of two runs, one of another tokenizer, and ones that have nothing to show."""
    top = tmp_path_factory.mktemp("runs")
    make_run(top / "study" / NARROW, text_key=HOSTILE)
    make_run(top / "study/deeper/wide", width=64, speed=500.0)
    make_run(top / "bpe", tokenizer="bpe:512")
    make_run(top / "other_text", held_out="k")
    make_run(top / "unseen", evaluated=False)
    for name in ("begun", "silent", "torn"):
        make_run(top / name)
    (top / "begun/metrics.jsonl").unlink()
    (top / "silent/metrics.jsonl").write_text('{"step": 1, "startup_seconds": 1.0}\n')
    (top / "torn/config.json").write_text('{"seed": 0, "mod')
    (top / "headless").mkdir()
    (top / "headless/metrics.jsonl").write_text('{"step": 4, "train/loss": 2.0}\n')
    (top / "nothing/in/it").mkdir(parents=True)
    (top / "a.txt").write_text("text")
    (top / "table.json").write_text('{"rows": []}')
    make_isoflop(top / "isoflop.json")
    return top


@pytest.fixture(scope="module")
def written(top):
    """The page of the study and of the isoFLOP study."""
    out = top / "report.html"
    call = [str(top / "study"), str(top / "isoflop.json"), f"--out={out}"]
    assert report.main([*call, "--metrics=router/accuracy"]) == 0
    return out


class Elements(html.parser.HTMLParser):
    """Every element of a page with its attributes, and the texts of its scripts and cells."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self.cells = [], [], []
        self._into = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        into = {"script": self.scripts, "td": self.cells}.get(tag)
        if into is not None:
            into.append("")
            self._into = into

    def handle_endtag(self, tag):
        if tag in ("script", "td"):
            self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data


@pytest.fixture(scope="module")
def elements(written):
    return Elements(written.read_text())


def test_a_page_is_one_file_and_what_runs_say_is_text_in_it(elements):
    tags = [tag for tag, _ in elements.found]
    assert "img" not in tags and "b" not in tags  # of the hostile setting and samples
    assert all("src" not in attributes for _, attributes in elements.found)
    addresses = [attributes["href"] for _, attributes in elements.found if "href" in attributes]
    assert addresses == ["data:,"]
    assert tags.count("style") == 1 and "49" not in elements.cells
    assert [HOSTILE in cell for cell in elements.cells].count(True) == 1
    policy = next(of["content"] for tag, of in elements.found if "http-equiv" in of)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.partition("script-src ")[2].partition(";")[0].count("'sha256-") == 6


def test_curves_and_table_have_the_numbers_of_the_runs(elements):
    curves = next(json.loads(s) for s in elements.scripts if s.startswith('{"axes"'))
    wide, narrow = curves["runs"]
    assert wide["name"] == "wide" and narrow["name"] == NARROW  # unique without settings
    assert wide["about"] == "data.text_key=text, width=64" and HOSTILE in narrow["about"]
    assert list(curves["axes"]) == ["step", "tokens", "flops", "seconds"]
    rows, losses = (narrow["columns"]["eval/loss"][key] for key in ("rows", "values"))
    assert losses == pytest.approx([3.2, 3.1])
    assert [narrow["axes"]["flops"][row] for row in rows] == [64e7, 128e7]
    titles = [metric["title"] for metric in curves["metrics"]]
    assert titles[0] == "training and held-out loss (nats a token)" and "MFU" not in titles
    assert titles[-1] == "router/accuracy"
    cells = elements.cells
    first = cells.index("wide")
    assert cells[first : first + 5] == ["wide", "1.6000", "1.1000", "2.3083", "2.56 GFLOPs"]
    assert cells[first + 9 : first + 12] == ["64.0k", "text", "64"]  # what was got, then settings
    assert cells.count("500") == 1 and cells.count("1.00k") == 1


def test_fits_of_an_isoflop_study(top, elements):
    """Plotly's own classes take the traces; optima and their intervals are those that are known."""
    from plotly import graph_objects

    study = report_fits.read(top / "isoflop.json")
    traces = graph_objects.Figure(report_fits.traces(study), {}).data
    stars = {trace.name: trace for trace in traces if trace.marker.symbol == "star"}
    analysis = isoflop.analysis_of(isoflop_points.read_points(top / "isoflop.json"), {"draws": 20})
    assert len(stars) == 5 and "short" in analysis.refusals
    for (budget, name), (family, fits) in itertools.product(
        ((1e10, "10.0 GFLOPs"),),
        (("MoD", analysis.laws), ("short", analysis.parabolas)),
    ):
        star, fit = stars[f"{family}, {name}"], fits[family]
        best, loss = with_draws(fit.parameters[budget]), with_draws(fit.losses[budget])
        assert (star.x[0], star.y[0]) == pytest.approx((best.value, loss.value))
        low, high = loss.interval(95)
        assert star.error_y.array[0] == pytest.approx(high - loss.value)
        assert star.error_y.arrayminus[0] == pytest.approx(loss.value - low)
    assert stars["short, 10.0 GFLOPs"].x[0] == pytest.approx(8000)
    assert "by a parabola" in stars["short, 10.0 GFLOPs"].hovertemplate
    row = elements.cells.index("MoD")
    cell = tables.text(isoflop_report.cell(with_draws(analysis.laws["MoD"].losses[1e10])), ".4f")
    assert " to " in cell and cell in elements.cells[row : row + 10]


def test_all_tables_of_a_study_are_folded_below_its_fits(top, elements):
    """The cells are those of the study's own Markdown, in their order."""
    data = json.loads((top / "isoflop.json").read_text())
    points = isoflop_points.from_data(data, "x")
    made = isoflop_report.details(isoflop.analysis_of(points, data), points, data)
    lines = [line for text in made for line in text.splitlines() if line.startswith("|")]
    cells = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
    tags = [tag for tag, _ in elements.found]
    assert tags.count("details") == 5 and len(cells) > 20
    said = "\n".join(elements.cells)
    for row in cells:
        assert "\n".join(row) in said or row[0] in ("size", "family", "budget"), row


def test_a_table_of_markdown_is_folded_and_one_without_rows_is_not_there():
    text = "Of a | b, at 2; more:\n\n" + tables.markdown(["x", "y"], [["", "**1.5**"], ["2", "3"]])
    (block,) = report_fits.details_blocks(text + "\n\nBest: 2.")
    assert block.values["summary"] == "Of a | b, at 2"
    assert block.values["paragraphs"] == ["Of a | b, at 2; more:", "Best: 2."]
    shown = [[cell for cell, _ in row] for row, _ in block.values["rows"]]
    assert shown == [["", "1.5 (best)"], ["2", "3"]]
    assert report_fits.details_blocks(f"None:\n\n{tables.markdown(['x', 'y'], [])}") == []
    (block,) = report_fits.details_blocks("No law of a: why.")
    assert block.values["text"] == "No law of a: why."


@pytest.mark.parametrize("families, budgets", [(2, 5), (4, 10), (9, 3), (20, 4)])
def test_families_at_their_budgets_look_unlike(families, budgets):
    fits = [
        report_fits.Fit(float(b), f"f{f}", *[None] * 8)
        for b in range(budgets)
        for f in range(families)
    ]
    looks = report_fits.looks_of(report_fits.Study(fits, *[None] * 6))
    assert len({*looks.values()}) == families * budgets


def test_the_optimum_over_budgets_is_that_of_the_law(top):
    study = report_fits.read(top / "isoflop.json")
    assert [one.family for one in study.optima] == ["dense", "MoD", "short"]
    analysis = isoflop.analysis_of(isoflop_points.read_points(top / "isoflop.json"), {"draws": 20})
    dense, _, short = study.optima
    for place, budget in ((0, 1e10), (dense.measured - 1, 4e10)):
        loss = with_draws(analysis.laws["dense"].losses[budget])
        low, high = loss.interval(95)
        assert dense.line[:, place] == pytest.approx([budget, loss.value, low, high])
    assert dense.line[0, -1] == pytest.approx(4e11)
    assert short.line.shape == (4, 0)
    assert short.marks[:2, 0] == pytest.approx([1e10, 2.0])


@pytest.mark.parametrize("change, words", [
    (('"budget": 10000000000.0', '"budget": "<b>"'), "budget='<b>': expected a number above 0"),
    (('"points"', '"point"'), "not the points of an isoFLOP study (KeyError: 'points'); use"),
    (('"draws": 20', '"draw": 20'), "KeyError: 'draws'"),
    (('{"settings"', '"settings"'), "JSONDecodeError"),
])  # fmt: skip
def test_points_that_are_none_are_one_line(change, words, top, tmp_path, capsys):
    text = (top / "isoflop.json").read_text()
    assert change[0] in text
    (tmp_path / "isoflop.json").write_text(text.replace(*change, 1))
    assert report.main([str(tmp_path), f"--out={tmp_path / 'a.html'}"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    # What is wrong is said once.
    by_name = "expected" in words or "not the points" in said
    assert ("is not the isoflop.json of a study" in said) != by_name
    assert said.count("Error") == ("expected" not in words)


def test_rows_of_an_evaluation_alone_lie_between_the_others():
    rows = [{"step": 0, "eval/loss": 5.0}, {"step": 4, "tokens": 400.0}, {"step": 6}]
    rows += [{"step": 8, "tokens": 800.0}, {"step": 9}]
    run = logged.Run("r", {}, {}, rows)
    assert logged.axis_values(run, "tokens") == [0, 400, 600, 800, None]
    assert logged.axis_values(run, "flops") == [None] * 5
    count = 4 * report._MOST_POINTS
    rows, means = report.thinned(list(range(count)), [1.0, 2.0, 3.0, None] * (count // 4))
    assert len(rows) == report._MOST_POINTS and rows[:2] == [3, 7] and set(means) == {2.0}


def test_numbers_that_a_stranger_wrote(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        digits = "9" * 400
        file.write('{"step": 44, "train/loss": "<b>", "mfu": NaN, "tokens": true,')
        file.write(f' "seconds": Infinity, "flops": {digits}, "eval/loss": null}}\n')
    row = logged.read_run(run).rows[-1]
    assert row == {"step": 44, "mfu": None, "seconds": None, "flops": None, "eval/loss": None}
    assert report.main([str(run), f"--out={tmp_path / 'a.html'}"]) == 0
    assert "not finite" in Elements((tmp_path / "a.html").read_text()).cells


def test_runs_below_a_folder_that_cannot_be_read_are_named(top, capsys):
    out = top / "all.html"
    assert report.main([str(top), f"--out={out}", "--bits-per-byte"]) == 0
    said = capsys.readouterr().out
    assert "a page of 5 runs and 1 isoFLOP study" in said
    for name in ("begun", "silent", "torn", "headless"):
        assert said.count(f"left out: {top / name}") == 1, said
    text = out.read_text()
    assert "have different tokenizers (config.data.tokenizer=" in text
    assert "have different held-out text (the same settings, of other text)" in text
    assert "compare the shapes of the curves" in text and f"evaluation: {top / 'unseen'}." in text
    titles = [metric["title"] for metric in curves_of(text)["metrics"]]
    assert titles[0] == "held-out bits per byte" and not any("nats" in title for title in titles)


@pytest.mark.parametrize("other", ["bpe", "other_text"])
def test_the_axis_of_bits_per_byte_is_flops(other, top, written):
    """Of other tokenizers, and of one tokenizer with another held-out text."""
    out = top / "unlike.html"
    runs = [str(top / "study"), str(top / other)]
    assert report.main([*runs, f"--out={out}", "--bits-per-byte"]) == 0
    checked = [
        attributes["value"]
        for text in (out.read_text(), written.read_text())
        for tag, attributes in Elements(text).found
        if tag == "input" and "checked" in attributes
    ]
    assert checked == ["flops", "tokens"]


def test_settings_of_blocks_that_are_off_are_left_out():
    config = {
        "model": {
            "depth_routing": {"kind": "none", "capacity": 0.5},
            "dropout": {"kind": "attention", "attention": {"x": 1}, "elementwise": {"x": 2}},
            "dense_former": {"on": False, "period": 2},
            "mlp": {"kind": "dense", "hidden": 8, "moe": {"top_k": 2}},
            "depth": 3,
        }
    }
    settings = runfolder.dotted(config)
    left = report.without_blocks_that_are_off(settings, config)
    assert sorted(settings.keys() - left.keys()) == [
        "model.dense_former.period",
        "model.depth_routing.capacity",
        "model.dropout.elementwise.x",
        "model.mlp.moe.top_k",
    ]


def test_the_table_begins_with_results_and_hides_what_some_runs_lack():
    rows = [{"step": 4, "train/loss": 2.0, "eval/loss": 2.1, "flops": 1e9, "tokens": 100.0}]
    runs = [logged.Run(name, {}, {}, rows) for name in "ab"]
    settings = [{f"s{i}": i + j for i in range(12)} | {"model.mlp.kind": "x"} for j in range(2)]
    settings[1]["model.only.b"] = 3
    styles = report.styles_of(2)
    values = report.runs_table(runs, ["a", "b"], settings, styles, False).values
    titles = [title for title, _ in values["columns"]]
    assert titles[:6] == [
        "run",
        "held-out loss",
        "training loss",
        "training FLOPs",
        "tokens",
        "steps",
    ]
    assert titles[6:14] == ["model.mlp.kind", *(f"s{i}" for i in range(7))]
    assert titles[14:] == [*(f"s{i}" for i in range(7, 12)), "model.only.b"]
    assert values["further"] == 6 and values["what"] == "settings that differ"


def test_the_column_of_steps_was_the_setting_where_runs_differ_in_it():
    """With equal FLOPs all runs but the first have config.steps=0; also of what a few runs have."""
    rows = [{"step": 40, "train/loss": 2.0, "tokens": 100.0}]
    runs = [logged.Run(name, {}, {}, rows) for name in "ab"]
    settings = [{"steps": 40}, {"steps": 0, "tokens": 7}]
    values = report.runs_table(runs, ["a", "b"], settings, report.styles_of(2), False).values
    titles = [title for title, _ in values["columns"]]
    cells = [dict(zip(titles, [text for text, _ in row], strict=True)) for row, _ in values["rows"]]
    assert [of["steps"] for of in cells] == ["40", "40"]
    assert [of["tokens"] for of in cells] == ["100", "100"]
    assert [of["config.steps"] for of in cells] == ["40", "0"]
    assert cells[1]["config.tokens"] == "7"
    assert titles.index("steps") < titles.index("config.steps") < titles.index("config.tokens")


def test_long_names_are_cut_where_they_are_alike():
    names = [
        f"dense_half_as_deep_48_wide_{n}_deep_12.0_TFLOPs-seed{s}" for n, s in ((6, 0), (6, 1))
    ]
    first, second = page.cut_names(names, 40)
    assert len(first) == len(second) == 40
    assert first.startswith("dense_half_as_deep_") and first.endswith("12.0_TFLOPs-seed0")
    assert second.endswith("12.0_TFLOPs-seed1")
    # What differs in the middle is not cut.
    middles = [names[0], names[0].replace("6_deep", "8_deep")]
    assert len({*page.cut_names(middles, 40)}) == 2
    assert page.cut_names(["a", "a"], 4) == ["a", "a"]


def test_a_long_run_has_the_places_of_its_points_alone():
    rows = [
        {"step": step, "tokens": 8.0 * step, "train/loss": 1.0 + 1 / step}
        for step in range(1, 40_001)
    ]
    rows[-1]["eval/loss"] = 2.0
    run = logged.Run("r", {}, {}, rows)
    offered = report.choices([run], [], False)
    block = report.curves_block([run], ["r"], report.styles_of(1), offered, [{}], False)
    (drawn,) = block.data["runs"]
    assert {*map(len, drawn["axes"].values())} == {len(drawn["columns"]["train/loss"]["rows"])}
    assert len(drawn["axes"]["tokens"]) <= report._MOST_POINTS
    assert drawn["axes"]["tokens"][-1] == 320_000
    held_out = drawn["columns"]["eval/loss"]
    assert [drawn["axes"]["step"][row] for row in held_out["rows"]] == [40_000]


def test_a_folder_of_cbtm_is_its_runs(tmp_path):
    for name in ("seed", "expert_0", "expert_1"):
        make_run(tmp_path / "cbtm" / name)
    (tmp_path / "cbtm/clusters").mkdir()
    (tmp_path / "cbtm/config.json").write_text("{}")
    for given in (tmp_path / "cbtm", tmp_path):
        runs, _, left_out = report.collect([str(given)])
        assert [run.path.name for run in runs] == ["expert_0", "expert_1", "seed"]
        assert left_out == []


def curves_of(text):
    return next(json.loads(s) for s in Elements(text).scripts if s.startswith('{"axes"'))


@pytest.mark.parametrize("arguments, words", [
    ([f"study/{NARROW}", "bpe"], "bpe have different tokenizers (config.data.tokenizer='bytes' and"
     " 'bpe:512'): their losses in nats a token cannot be compared; use fewer runs, or"
     " --bits-per-byte"),
    ([f"study/{NARROW}", "other_text"], "other_text have different held-out text"),
    (["begun"], "begun has no metrics.jsonl: nothing has been logged"),
    (["silent"], "no step has been logged yet"),
    (["torn"], "torn/config.json is damaged"),
    (["headless"], "headless is not a run folder: it has no config.json"),
    (["a.txt"], "a.txt: a file; use a run folder"),
    (["none"], "none: no such folder; use"),
    (["nothing"], "nothing is not a run folder: it has no config.json"),
    (["table.json"], "table.json: not the points of an isoFLOP study"),
    (["study", "--metrics=router/acuracy"], "'router/acuracy' (did you mean 'router/accuracy'?)"),
    (["study", "--bits-per-byte", "--metrics=eval/loss"], "eval/loss counts by tokens"),
    (["unseen", "--bits-per-byte"], "no run has the column eval/bits_per_byte"),
    (["study", "--out=none/a.html"], "--out=none/a.html: there is no folder none"),
    (["study", "--out=a.png"], "--out=a.png: unknown file ending; use one of"),
    (["study", "--out=study"], "--out=study is a folder; use a file in it"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments, words, top, capsys, monkeypatch):
    monkeypatch.chdir(top)
    assert report.main(["--out=new.html", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("efx: error: "), said
    assert not (top / "new.html").exists()


@pytest.mark.parametrize("package", ["jinja2", "plotly.offline"])
def test_without_the_extra_nothing_is_begun(package, top, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert report.main([str(top / "study"), f"--out={top / 'new.html'}"]) == 2
    said = capsys.readouterr().err
    assert "a page needs the extra `report`" in said and said.count("\n") == 1
    assert not (top / "new.html").exists()


def test_a_page_has_no_number_that_is_none(tmp_path):
    sections = [page.Section("a", [page.figure([{"y": [math.nan]}], {})])]
    with pytest.raises(ValueError):
        page.write_page(tmp_path / "a.html", "a", sections)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="cannot write"):
        page.write_page(tmp_path / "none/a.html", "a", [])


# ---- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver():
    with browsers.chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def loaded(driver, written):
    """The page, and all that it said and asked for when it was loaded."""
    driver.get(written.as_uri())
    return browsers.said(driver), browsers.requests(driver)


@pytest.fixture
def browser(driver, loaded):
    return driver


CURVES = "document.querySelector('.curves')"


def waited(browser, script):
    """What the script gives once that is true."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 10, 0.05).until(lambda _: browser.execute_script(script))


def run_order(browser):
    """The runs of the table, as they are shown."""
    script = "return [...document.querySelectorAll('table')].pop().tBodies[0].innerText"
    return [line.split("\t")[0].strip() for line in browser.execute_script(script).splitlines()]


def heading(browser, title):
    return browser.find_element("xpath", f"//th/button[text()={title!r}]")


def test_it_loads_with_no_word_and_no_request(loaded, written, browser):
    assert loaded == ([], [written.as_uri()])
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.figure .main-svg')].length"
    )
    assert drawn >= 3  # curves, fits, speed
    assert browser.execute_script("return window.hacked") is None
    shares = "return document.querySelectorAll('[data-title*=hare]').length"
    assert browser.execute_script(shares) == 0  # Plotly's button that uploads a figure


def test_the_axis_switches(browser):
    axis = f"const axis = {CURVES}.layout.xaxis; const line = {CURVES}.data.at(-1);"
    axis += "return [axis.title.text, axis.type, [...line.x]]"
    browser.find_element("css selector", "input[value=flops]").click()
    assert browser.execute_script(axis) == ["training FLOPs", "linear", [64e7, 128e7]]
    shown = browser.find_element("css selector", ".curves .xtitle").text
    assert shown == "training FLOPs"
    browser.find_element("css selector", "input[name=log-x]").click()
    browser.find_element("css selector", "input[value=seconds]").click()
    assert browser.execute_script(axis) == ["seconds of training", "log", [10, 20]]
    browser.find_element("css selector", "input[name=log-x]").click()


def test_a_metric_is_chosen_and_smoothed(browser):
    def choose(metric, count):
        browser.find_element("xpath", f"//select[@name='metric']/option[text()='{metric}']").click()
        field = browser.find_element("name", "smooth")
        field.clear()
        field.send_keys(count, "\n")

    read = f"return {CURVES}.data.map((line) => [...line.y])"
    choose("training loss (nats a token)", 2)
    wide, narrow = browser.execute_script(read)
    assert wide[:2] == pytest.approx([1 + 1, 1 + (1 + 0.5) / 2]) and len(narrow) == 10
    choose("training and held-out loss (nats a token)", 1)
    assert [len(line) for line in browser.execute_script(read)] == [10, 2, 10, 2]


def test_hovering_shows_the_value(browser):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.find_element("css selector", "input[value=tokens]").click()
    where = f"""
        const figure = {CURVES}, line = figure.data.at(-1)
        const {{ xaxis, yaxis }} = figure._fullLayout
        figure.scrollIntoView({{ block: "center" }})
        const box = figure.getBoundingClientRect()
        return [
          xaxis._offset + xaxis.d2p(line.x[0]) - box.width / 2,
          yaxis._offset + yaxis.d2p(line.y[0]) - box.height / 2,
        ]
    """
    x, y = browser.execute_script(where)
    figure = browser.find_element("css selector", ".curves")
    ActionChains(browser).move_to_element_with_offset(figure, round(x), round(y)).perform()
    label = "return document.querySelector('.curves .hoverlayer .hovertext')?.textContent"
    text = waited(browser, label)
    assert "held-out" in text and "2k, 3.2" in text
    assert NARROW in text  # tags as text
    assert browser.execute_script("return window.hacked") is None


def test_the_legend_switches_a_run_off(browser):
    names = f"return new Set({CURVES}.data.map((line) => line.name)).size"
    button = browser.find_element("css selector", ".legend button")
    button.click()
    assert browser.execute_script(names) == 2 and button.get_attribute("aria-pressed") == "false"
    button.click()
    assert browser.execute_script(names) == 4


def test_runs_are_shown_alone_all_or_none(browser):
    from selenium.webdriver.common.action_chains import ActionChains

    def shown():
        return browser.execute_script(f"return {CURVES}.data.map((line) => line.name)")

    browser.find_element("css selector", ".runs .none").click()
    assert shown() == []
    pressed = "return [...document.querySelectorAll('.curves ~ .legend button')]"
    pressed += ".map((one) => one.ariaPressed)"
    assert browser.execute_script(pressed) == ["false", "false"]
    button = browser.find_element("css selector", ".curves ~ .legend button")
    ActionChains(browser).double_click(button).perform()
    assert shown() == ["wide: training", "wide: held-out"]
    hint = browser.find_element("css selector", ".runs .widths")
    assert hint.text == "Thin lines are training, thick ones held-out."
    browser.find_element("css selector", ".runs .all").click()
    assert len(shown()) == 4 and browser.execute_script(pressed) == ["true", "true"]
    metric = "//select[@name='metric']/option[text()='{}']"
    browser.find_element("xpath", metric.format("held-out bits per byte")).click()
    assert not hint.is_displayed()
    first = "training and held-out loss (nats a token)"
    browser.find_element("xpath", metric.format(first)).click()


def test_the_table_sorts_by_numbers_both_ways(browser):
    assert run_order(browser) == ["wide", NARROW]
    title = heading(browser, "tokens/s")
    for order in (["wide", NARROW], [NARROW, "wide"], ["wide", NARROW]):
        title.click()
        assert run_order(browser) == order
    heading(browser, "held-out loss").click()
    assert run_order(browser) == ["wide", NARROW]
    heading(browser, "run").click()
    assert run_order(browser) == [NARROW, "wide"]
    sorted_by = browser.find_elements("css selector", "th[aria-sort]")
    assert [one.text.split()[0] for one in sorted_by] == ["run"]


def test_samples_of_a_step_stand_side_by_side(browser):
    def texts():
        return [one.text for one in browser.find_elements("css selector", ".samples pre")]

    assert texts() == [f"## sample 0\nof step 40 {HOSTILE}"] * 2
    step = browser.find_element("css selector", "select[name=step]")
    step.find_element("css selector", "option[value='20']").click()
    assert texts() == [f"## sample 0\nof step 20 {HOSTILE}"] * 2


def test_the_page_is_dark_where_the_system_is(browser):
    colour = f"return {CURVES}._fullLayout.font.color"
    assert browser.execute_script(colour) == "#1d2127"
    for scheme, expected in (("dark", "#e4e7ec"), ("light", "#1d2127")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert waited(browser, f"{colour} === '{expected}'")


def test_the_browser_itself_forbids_requests_and_other_scripts(browser):
    assert browsers.said(browser) == []  # all that was clicked and hovered above
    assert [one for one in browsers.requests(browser) if not one.startswith("data:")] == []
    script = """
        const done = arguments[0], script = document.createElement("script")
        script.textContent = "window.hacked = 1"
        document.body.append(script)
        fetch("http://127.0.0.1:9/").then(() => done("loaded"), () => done("refused"))
    """
    assert browser.execute_async_script(script) == "refused"
    assert browser.execute_script("return window.hacked") is None
    assert all("Content Security Policy" in words for words in browsers.said(browser))


def test_labels_of_sizes_stand_apart_and_legends_below(driver, tmp_path):
    """Of nine families, whose sizes are many."""
    families = [(1 + n / 9, f"family of a long name, number {n}") for n in range(9)]
    make_isoflop(tmp_path / "isoflop.json", families, tuple(range(20, 120, 4)))
    out = tmp_path / "a.html"
    assert report.main([str(tmp_path / "isoflop.json"), f"--out={out}"]) == 0
    driver.get(out.as_uri())
    browsers.awaited(driver, ".figure .main-svg")
    boxes = """return [...document.querySelectorAll('.figure')].map((figure) =>
        SELECTORS.map((selector) => [...figure.querySelectorAll(selector)].map((one) => {
          const { left, right, top, bottom } = one.getBoundingClientRect()
          return [left, right, top, bottom]
        })))"""
    selectors = "['.xtick text', '.xtitle', '.legend', '.cartesianlayer .xy .gridlayer']"
    drawn = driver.execute_script(boxes.replace("SELECTORS", selectors))
    assert len(drawn) == 2
    for ticks, (title,), (legend,), (lines,) in drawn:
        assert len(ticks) > 2
        for (_, right, *_), (left, *_) in itertools.pairwise(sorted(ticks)):
            assert right + 2 < left
        assert title[3] <= legend[2] + 1 and lines[3] - lines[2] > 250


def test_a_switch_shows_the_further_columns(driver, tmp_path):
    table = page.table(["a", "b", "c"], [["x", 1, 2], ["y", 2, 1]], further=1, what="of them")
    page.write_page(tmp_path / "a.html", "a", [page.Section("a", [table])])
    driver.get((tmp_path / "a.html").as_uri())
    switch = driver.find_element("css selector", ".switch")
    assert switch.text == "1 more of them"
    last = driver.find_elements("css selector", "th, td")[2::3]
    assert [one.is_displayed() for one in last] == [False] * 3
    switch.click()
    assert [one.text for one in last] == ["c", "2", "1"]
    heading(driver, "c").click()
    assert run_order(driver) == ["y", "x"]
