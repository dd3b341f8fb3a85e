"""The report page: its numbers, its refusals, texts of runs as text, and how a browser shows it."""

import html.parser
import json
import math

import browser as browsers
import pytest
from study_helpers import error_line, logged_run

from efx.logging import MetricsWriter
from efx.studies import logged, report

for package in ("jinja2", "plotly"):
    pytest.importorskip(package, reason="the extra `studies` is not installed")

HOSTILE = "<b>bold</b></script><img src=x onerror='window.hacked=1'> %{x} {{ 7*7 }}"

NARROW = "narrow<img src=x onerror='hacked=1'>"  # a folder


def make_run(folder, width=32, speed=1000.0, evaluated=True, held_out="h", **data):
    """A run of 40 steps whose losses, FLOPs and tokens follow from the step and the width."""
    config = {"seed": 0, "steps": 40, "model": {"width": width}, "log": {"every": 4}}
    config["data"] = {"source": "stdlib", "tokenizer": "bytes", "text_key": "text"} | data
    rows = [(1, {"startup_seconds": 1.0, "parameters": width * 1000})]
    for step in range(4, 41, 4):
        row = {"tokens": 100 * step, "flops": 1e6 * width * step, "seconds": step / 2}
        row |= {"tokens_per_second": speed, "train/loss": 64 / width + 4 / step}
        row |= {"router/accuracy": 0.5}
        if evaluated and step % 20 == 0:
            loss = 96 / width + 4 / step
            row |= {"eval/loss": loss, "eval/bits_per_byte": loss / math.log(2)}
        rows.append((step, row))
    logged_run(folder, config, rows, held_out=held_out)
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        for step in (20, 40):
            writer.write_samples(step, [f"of step {step} {HOSTILE}"])
    return folder


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    """A study of two runs, one of another tokenizer, and folders with nothing to show."""
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
    return top


class Elements(html.parser.HTMLParser):
    """Every element of a page with its attributes, and the texts of its scripts and cells."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self._into = [], {"script": [], "td": []}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag in self.texts:
            self.texts[tag].append("")
            self._into = self.texts[tag]

    def handle_endtag(self, tag):
        self._into = None if tag in self.texts else self._into

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data

    def curves(self):
        return next(json.loads(s) for s in self.texts["script"] if s.startswith('{"axes"'))


@pytest.fixture(scope="module")
def written(top):
    """The page of the study."""
    out = top / "report.html"
    assert report.main([str(top / "study"), f"--out={out}", "--metrics=router/accuracy"]) == 0
    return out


@pytest.fixture(scope="module")
def elements(written):
    return Elements(written.read_text())


def test_a_page_loads_nothing_and_shows_texts_of_runs_as_text(elements):
    tags = [tag for tag, _ in elements.found]
    assert "img" not in tags and "b" not in tags  # of the hostile setting and samples
    assert all("src" not in attributes for _, attributes in elements.found)
    addresses = [attributes["href"] for _, attributes in elements.found if "href" in attributes]
    assert addresses == ["data:,"]
    assert "49" not in elements.texts["td"]
    assert [HOSTILE in cell for cell in elements.texts["td"]].count(True) == 1
    policy = next(of["content"] for tag, of in elements.found if "http-equiv" in of)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_curves_and_table_have_the_numbers_of_the_runs(elements):
    curves = elements.curves()
    wide, narrow = curves["runs"]
    assert wide["name"] == "wide" and narrow["name"] == NARROW
    assert list(curves["axes"]) == ["step", "tokens", "flops", "seconds"]
    losses = narrow["columns"]["eval/loss"]
    assert losses["values"] == pytest.approx([3.2, 3.1])
    assert [narrow["axes"]["flops"][row] for row in losses["rows"]] == [64e7, 128e7]
    cells = elements.texts["td"]
    first = cells.index("wide")
    assert cells[first : first + 5] == ["wide", "1.6000", "1.1000", "2.3083", "2.56 GFLOPs"]


def test_invalid_numbers_of_a_run_are_dropped(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        digits = "9" * 400
        file.write('{"step": 44, "train/loss": "<b>", "mfu": NaN, "tokens": true,')
        file.write(f' "seconds": Infinity, "flops": {digits}, "eval/loss": null}}\n')
    row = logged.read_run(run).rows[-1]
    assert row == {"step": 44, "mfu": None, "seconds": None, "flops": None, "eval/loss": None}
    assert report.main([str(run), f"--out={tmp_path / 'a.html'}"]) == 0
    assert "not finite" in Elements((tmp_path / "a.html").read_text()).texts["td"]


def test_unreadable_runs_below_a_folder_are_skipped_and_named(top, capsys):
    out = top / "all.html"
    assert report.main([str(top), f"--out={out}", "--bits-per-byte"]) == 0
    said = capsys.readouterr().out
    assert "a page of 5 runs" in said
    for name in ("begun", "silent", "torn", "headless"):
        assert said.count(f"left out: {top / name}") == 1, said
    text = out.read_text()
    assert "have different tokenizers" in text and "have different held-out text" in text
    titles = [metric["title"] for metric in Elements(text).curves()["metrics"]]
    assert titles[0] == "held-out bits per byte" and not any("nats" in title for title in titles)


def test_a_long_run_is_thinned():
    rows = [
        {"step": step, "tokens": 8.0 * step, "train/loss": 1.0 + step % 2}
        for step in range(1, 40_001)
    ]
    run = logged.Run("r", {}, {}, rows)
    offered = report.choices([run], [], False)
    block = report.curves_block([run], ["r"], report.styles_of(1), offered, [{}], False)
    (drawn,) = block.data["runs"]
    losses = drawn["columns"]["train/loss"]["values"]
    assert len(losses) < 4000 and losses == pytest.approx([1.5] * len(losses), abs=0.04)
    assert drawn["axes"]["tokens"][-1] == 320_000


def test_a_folder_of_cbtm_stands_for_its_runs(tmp_path):
    for name in ("seed", "expert_0", "expert_1"):
        make_run(tmp_path / "cbtm" / name)
    (tmp_path / "cbtm/clusters").mkdir()
    (tmp_path / "cbtm/config.json").write_text("{}")
    runs, _, left_out = report.collect([str(tmp_path / "cbtm")])
    assert [run.path.name for run in runs] == ["expert_0", "expert_1", "seed"] and not left_out


@pytest.mark.parametrize(
    "arguments, name",
    [
        ([f"study/{NARROW}", "bpe"], "tokenizers"),
        ([f"study/{NARROW}", "other_text"], "held-out text"),
        (["torn"], "torn/config.json"),
        (["nothing"], "nothing"),
        (["study", "--metrics=router/acuracy"], "'router/acuracy'"),
        (["unseen", "--bits-per-byte"], "eval/bits_per_byte"),
    ],
)
def test_bad_input_is_refused(arguments, name, top, capsys, monkeypatch):
    monkeypatch.chdir(top)
    assert report.main(["--out=new.html", *arguments]) == 2
    error_line(capsys, name)
    assert not (top / "new.html").exists()


# ---- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver():
    with browsers.chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def loaded(driver, written):
    """(console messages, requests) of loading the page."""
    driver.get(written.as_uri())
    return browsers.messages(driver), browsers.requests(driver)


@pytest.fixture
def browser(driver, loaded):
    return driver


CURVES = "document.querySelector('.curves')"


def run_order(browser):
    """The runs of the table, as they are shown."""
    script = "return [...document.querySelectorAll('table')].pop().tBodies[0].innerText"
    return [line.split("\t")[0].strip() for line in browser.execute_script(script).splitlines()]


def heading(browser, title):
    return browser.find_element("xpath", f"//th/button[text()={title!r}]")


@pytest.mark.slow
def test_the_page_loads_without_messages_and_requests(loaded, written, browser):
    assert loaded == ([], [written.as_uri()])
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.figure .main-svg')].length"
    )
    assert drawn >= 2  # curves and speed
    assert browser.execute_script("return window.hacked") is None


@pytest.mark.slow
def test_the_axis_switches(browser):
    axis = f"const axis = {CURVES}.layout.xaxis; const line = {CURVES}.data.at(-1);"
    axis += "return [axis.title.text, axis.type, [...line.x]]"
    browser.find_element("css selector", "input[value=flops]").click()
    assert browser.execute_script(axis) == ["training FLOPs", "linear", [64e7, 128e7]]
    browser.find_element("css selector", "input[name=log-x]").click()
    browser.find_element("css selector", "input[value=seconds]").click()
    assert browser.execute_script(axis) == ["seconds of training", "log", [10, 20]]
    browser.find_element("css selector", "input[name=log-x]").click()


@pytest.mark.slow
def test_the_legend_switches_a_run_off(browser):
    names = f"return new Set({CURVES}.data.map((line) => line.name)).size"
    button = browser.find_element("css selector", ".legend button")
    button.click()
    assert browser.execute_script(names) == 2 and button.get_attribute("aria-pressed") == "false"
    button.click()
    assert browser.execute_script(names) == 4


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_page_forbids_requests_and_other_scripts(browser):
    assert browsers.messages(browser) == []  # after the clicks above
    assert [one for one in browsers.requests(browser) if not one.startswith("data:")] == []
    script = """
        const done = arguments[0], script = document.createElement("script")
        script.textContent = "window.hacked = 1"
        document.body.append(script)
        fetch("http://127.0.0.1:9/").then(() => done("loaded"), () => done("refused"))
    """
    assert browser.execute_async_script(script) == "refused"
    assert browser.execute_script("return window.hacked") is None
    assert all("Content Security Policy" in words for words in browsers.messages(browser))
