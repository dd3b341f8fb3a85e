"""The routing map, the report and plots: numbers of the model, and pages that work in a browser."""

import math
import re

import families
import jax
import numpy as np
import pytest
from browser import chromium, messages, requests
from study_helpers import error_line, logged_run, train

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

import pandas as pd

from efx.layers import batch_means
from efx.studies import metrics, plot, report, routing_map, token_choices
from efx.train.eval_step import by_layer

T = 24


def a_pass(name):
    """(TokenMap, statistics that evaluation logs) of one pass of a row of families."""
    model = families.build(name)
    variables = {"params": families.random_params(model, 0), **families.random_state(model)}
    ids = families.tokens(batch=1, length=T, seed=3)[0]
    made = token_choices.TokenMapper(model, variables)(ids, families.keys())
    collections = ["stats", batch_means.COLLECTION]
    _, sown = model.apply(variables, ids[None], rngs=families.keys(), mutable=collections)
    return made, by_layer(jax.device_get(sown["stats"]), model)


def test_the_map_agrees_with_the_statistics_of_evaluation():
    made, stats = a_pass("mod")
    for name, computed_T in made.values("computed").items():
        decided, overflow = (
            float(stats[f"router/{kind}_fraction/{name}"]) for kind in ("decided", "overflow")
        )
        np.testing.assert_allclose(computed_T.mean(), decided - overflow, atol=1e-6)
        assert 0 < computed_T.mean() < 1
    assert set(made.values("score")) == set(made.values("computed"))


def test_the_map_has_the_entropy_and_the_loss_of_the_causal_predictions():
    model = families.build("mod")
    variables = {"params": families.params_of("mod"), **families.random_state(model)}
    ids = families.tokens(batch=1, length=T, seed=3)[0]
    found = token_choices.TokenMapper(model, variables)(ids[:-1], families.keys(), ids[-1])
    causal = model.clone(selection="causal")
    logits_TV = causal.apply(variables, ids[None, :-1], rngs=families.keys())[0]
    log_p_TV = np.asarray(jax.nn.log_softmax(logits_TV))
    entropy_T = -(np.exp(log_p_TV) * log_p_TV).sum(axis=-1)
    np.testing.assert_allclose(found.entropy_T, entropy_T, atol=1e-4)
    np.testing.assert_allclose(found.loss_T, -log_p_TV[np.arange(T - 1), ids[1:]], atol=1e-4)


@pytest.mark.parametrize("name, quantity", [("moe", "experts"), ("dropout_attention", "kept")])
def test_the_map_has_rows_of_other_decisions(name, quantity):
    rows = a_pass(name)[0].values(quantity)
    assert rows and all(np.nanmax(values_T) > 0 for values_T in rows.values())


def test_the_map_marks_blocks_whose_gates_are_closed_on_computed_tokens():
    computed_T, entropy_T = np.array([1.0, 0.0, 0.0, 1.0]), np.ones(4)
    rows = []
    for name, gate in (("block_1", 0.02), ("block_3", -0.009)):
        rows.append(token_choices.Row(name, "computed", computed_T))
        rows.append(token_choices.Row(name, "gate", gate * computed_T))
    made = token_choices.TokenMap(rows, entropy_T, entropy_T)
    rows = routing_map.rows_of_page(made)
    assert {row["name"] for row in rows if row["is_asleep"]} == {"block_3"}
    gates = [row["values"] for row in rows if row["quantity"] == "gate"]
    assert gates[0] == [0.02, None, None, 0.02]  # a skipped token has no gate


def test_a_character_of_several_tokens_is_the_text_of_the_last():
    from efx.data.tokenizers import ByteTokenizer

    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("aé\n").tolist(), tokenizer.eot]
    assert routing_map.token_texts(tokenizer, ids) == ["a", "", "é", "\n", "⟨end⟩"]


@pytest.fixture(scope="module")
def run(root, tmp_path_factory, one_device):
    folder = tmp_path_factory.mktemp("runs") / "mod"
    return train(root, str(folder), "mod.py:smoke", "steps=3", "data.max_bytes=100000")


def test_a_map_has_as_many_tokens_as_requested_from_the_start_of_a_line(run):
    made, ids, texts, _ = routing_map.map_of_run(run, tokens=150)
    assert len(ids) == len(texts) == len(made.loss_T) == 150  # the context has 64
    first, first_ids, _, _ = routing_map.map_of_run(run, tokens=20)
    assert first_ids == ids[:20]
    np.testing.assert_allclose(first.loss_T, made.loss_T[:20])
    assert np.isfinite(made.loss_T).all()
    assert routing_map.line_start(["f", "(\n", "x", "\n  ", "y"]) == 2
    assert routing_map.line_start(["f", "\n"]) == 0


def test_a_text_longer_than_the_context_is_mapped_in_windows(run):
    text = "def f(x):\n    return x\n" * 5
    made, ids, texts, _ = routing_map.map_of_run(run, text)
    assert "".join(texts) == text
    window, _, _, _ = routing_map.map_of_run(run, "".join(texts[64:]))
    for name, computed_T in window.values("computed").items():
        np.testing.assert_array_equal(made.values("computed")[name][64:], computed_T)
    assert np.isnan(made.loss_T).tolist() == [False] * (len(ids) - 1) + [True]


def test_a_map_in_a_browser(run, tmp_path, capsys):
    """The page works without network; a small map colours the text; keys move the token."""
    out = tmp_path / "map.html"
    text = "def f(x):\n    return '<b>&amp;</script>'" + 40 * "\nx = 1"
    assert routing_map.main([run, "--text", text, "--out", str(out)]) == 0
    table = pd.read_csv(out.with_suffix(".csv"), keep_default_na=False)
    assert "".join(table.token) == text
    with chromium() as browser:
        for width in (400, 1400):
            browser.set_window_size(width, 900)
            browser.get(f"file://{out}")
            assert messages(browser) == []
            assert [url for url in requests(browser) if not url.startswith("file:")] == []
            overflow = "return document.documentElement.scrollWidth > innerWidth"
            assert not browser.execute_script(overflow)
        shown = browser.execute_script("return find('#text').textContent")
        assert shown == text.replace("\n", "↵\n")
        names = "return [...document.querySelectorAll('#maps b')].map((name) => name.textContent)"
        assert browser.execute_script(names) == [
            "all blocks",
            "block 1",
            "block 3",
            "loss",
            "entropy",
        ]
        colours = "return spans.map((span) => span.style.background)"
        before = browser.execute_script(colours)
        browser.execute_script("document.querySelectorAll('#maps button')[3].click()")
        assert browser.execute_script(colours) != before
        browser.execute_script("document.querySelectorAll('#quantities button')[1].click()")
        assert browser.execute_script("return find('#name').textContent") == "block 1: gate"
        height = "return find('#text').clientHeight"
        folded = browser.execute_script(height)
        browser.execute_script("find('#fold').click()")
        assert browser.execute_script(height) > folded
        event = "new KeyboardEvent('keydown', {key: 'ArrowRight'})"
        browser.execute_script(f"find('#text').dispatchEvent({event})")
        assert "position 1, id" in browser.execute_script("return find('aside').textContent")


def test_a_map_of_less_than_one_token_is_refused(run, tmp_path, capsys):
    assert routing_map.main([run, "--tokens=-5", "--out", str(tmp_path / "map.html")]) == 2
    error_line(capsys, "--tokens")


def test_a_run_without_decisions_has_no_map(root, tmp_path, capsys, one_device):
    settings = ("steps=1", "data.max_bytes=100000", "model.depth=1")
    dense = train(root, str(tmp_path / "dense"), "mod.py:smoke,dense", *settings)
    capsys.readouterr()
    assert routing_map.main([dense, "--out", str(tmp_path / "map.html")]) == 2
    error_line(capsys, "config.model.depth_routing.kind")


def made_up_runs(folder, seeds=(0,)):
    """Runs of two study rows that differ in depth."""
    paths = []
    for name, depth in (("<a>", 2), ("b", 4)):
        for seed in seeds:
            config = {"data": {"tokenizer": "bytes"}, "model": {"depth": depth}, "seed": seed}
            rows = [
                (
                    step,
                    {
                        "train/loss": 3.0 / step,
                        "tokens": 10 * step,
                        "flops": 1e9 * step,
                        "seconds": step,
                    },
                )
                for step in (10, 20, 30)
            ]
            rows.append((25, {"eval/loss": 1.0 + depth + seed}))
            path = folder / (name if len(seeds) == 1 else f"{name}-seed{seed}")
            paths.append(str(logged_run(path, config, sorted(rows))))
    return paths


def diverged_run(folder, end):
    """A run with a low held-out loss before its last row `end`."""
    config = {"data": {"tokenizer": "bytes"}, "model": {"depth": 2}, "seed": 0}
    losses = [{"train/loss": x, "eval/loss": x} for x in (3.0, 0.9)] + [end]
    rows = [(10 * i, {"tokens": 100 * i, **row}) for i, row in enumerate(losses, 1)]
    return str(logged_run(folder, config, rows))


@pytest.mark.parametrize("last", ["eval/loss", "train/loss"])  # the latter after an evaluation
def test_a_diverged_run_does_not_look_best(last, tmp_path, capsys):
    paths = [diverged_run(tmp_path / "x", {last: math.nan}), *made_up_runs(tmp_path)]
    text = report.page(paths)
    (row,) = re.findall(r">x</td>.*?</tr>", text, re.DOTALL)
    assert row.count(">diverged<") == 2 and "0.9" not in row
    assert re.search('class="warning"[^<]*1 of 3 runs', text)
    assert '"label": "x (diverged)"' in text
    assert plot.main([*paths, "--y", last, "--out", str(tmp_path / "curves.png")]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if re.match(r"(<a>|b|x) ", line)]
    assert [line[0] for line in lines] == ["<", "b", "x"] and "diverged" in lines[-1]
    assert "1 of 3 runs" in shown
    table = pd.read_csv(tmp_path / "curves.csv")
    assert np.isinf(table[last][table.run == "x"].iloc[-1])


def test_seeds_of_a_study_row_are_one_curve(tmp_path):
    paths = made_up_runs(tmp_path, seeds=(0, 1))
    table, runs = metrics.read_runs(paths)
    assert runs.row.tolist() == ["<a>", "<a>", "b", "b"]
    assert list(runs.settings[0]) == ["model.depth"]
    curves = metrics.means_over_seeds(table, "eval/loss", "tokens")
    assert curves[["row", "tokens", "mean", "seeds"]].values.tolist() == [
        ["<a>", 250, 3.5, 2],
        ["b", 250, 5.5, 2],
    ]
    np.testing.assert_allclose(curves["std"], 0.5**0.5)


def test_a_curve_ends_where_one_of_its_seeds_diverges(tmp_path):
    paths = [
        diverged_run(tmp_path / f"x-seed{seed}", {"eval/loss": value})
        for seed, value in enumerate((0.8, math.nan))
    ]
    table, runs = metrics.read_runs(paths)
    assert metrics.means_over_seeds(table, "eval/loss").step.tolist() == [10, 20]
    assert metrics.row_labels(runs) == {"x": "x (1 of 2 diverged)"}


def test_labels_of_curves_keep_their_order_and_do_not_overlap():
    np.testing.assert_allclose(
        plot.spread(np.array([0.9, 0.5, 0.5, 0.1]), 0.1), [0.9, 0.45, 0.55, 0.1]
    )


def test_a_report_in_a_browser(tmp_path):
    paths, out = made_up_runs(tmp_path, seeds=(0, 1)), tmp_path / "report.html"
    config = {"data": {"tokenizer": "bytes"}, "model": {"depth": 2}, "seed": 1}
    paths.append(str(logged_run(tmp_path / "not evaluated", config, [(1, {"train/loss": 2.0})])))
    paths.insert(0, diverged_run(tmp_path / "diverged", {"eval/loss": math.nan}))
    assert report.main([*paths, "--out", str(out)]) == 0
    with chromium() as browser:
        browser.set_window_size(400, 900)
        browser.get(f"file://{out}")
        assert messages(browser) == []
        assert [url for url in requests(browser) if not url.startswith("file:")] == []
        assert not browser.execute_script(
            "return document.documentElement.scrollWidth > innerWidth"
        )
        names = "return [...table.tBodies].map((body) => body.rows[0].cells[0].dataset.value)"
        assert browser.execute_script(names) == ["diverged", "<a>", "b", "not evaluated"]
        is_loss = "(cell) => cell.textContent == 'held-out loss (nats)'"
        heading = f"[...table.tHead.rows[0].cells].find({is_loss})"
        for order, rows in (("ascending", ["<a>", "b"]), ("descending", ["b", "<a>"])):
            browser.execute_script(f"{heading}.firstChild.click()")
            assert browser.execute_script(names) == [*rows, "diverged", "not evaluated"]
            assert browser.execute_script(f"return {heading}.ariaSort") == order
        visible = "return table.innerText.includes('<a>-seed1')"
        assert not browser.execute_script(visible)
        browser.execute_script(
            "for (const button of table.querySelectorAll('td button')) button.click()"
        )
        assert browser.execute_script(visible)
        figures = "return document.querySelectorAll('.js-plotly-plot').length"
        assert browser.execute_script(figures) == 2


def test_a_report_of_long_runs_is_small(tmp_path):
    paths = []
    for seed in range(18):
        config = {"data": {"tokenizer": "bytes"}, "model": {"depth": seed // 3}, "seed": seed}
        rows = []
        for step in range(1, 1001):
            row = {"train/loss": 1 / step + seed / 97, "tokens": 2048 * step, "flops": 3e9 * step}
            if step % 20 == 0:
                names = ("loss", "bits_per_byte", "router/worth", "router/gate")
                row |= {f"eval/{name}": 1 / step + seed / 97 for name in names}
            rows.append((step, row))
        paths.append(str(logged_run(tmp_path / f"{seed // 3}-seed{seed}", config, rows)))
    assert len(report.page(paths)) < 300_000


def test_a_report_shows_the_worth_and_the_gates_of_routed_blocks(tmp_path):
    config = {"data": {"tokenizer": "bytes"}, "model": {"depth": 2}, "seed": 0}
    health = {"eval/router/worth": 0.0123, "eval/router/gate_min": 0.3}
    row = {"train/loss": 2.0, "eval/adapter/gate": math.nan} | health
    text = report.page([str(logged_run(tmp_path / "a", config, [(1, row)]))])
    for column in health:
        assert metrics.title(column) in text
    assert metrics.title("eval/adapter/gate") not in text  # it has no value
    assert ">0.0123<" in text


def test_a_plot_puts_evaluations_between_training_rows(tmp_path, capsys):
    paths, out = made_up_runs(tmp_path), tmp_path / "curves.png"
    assert plot.main([*paths, "--x", "tokens", "--y", "eval/loss", "--out", str(out)]) == 0
    table = pd.read_csv(out.with_suffix(".csv"))
    assert table.tokens.tolist() == [250, 250] and table["eval/loss"].tolist() == [3.0, 5.0]
    assert out.with_suffix(".pdf").exists()
    assert "model.depth" in capsys.readouterr().out
    assert plot.main([*paths, "--y", "eval/los", "--out", str(out)]) == 2
    error_line(capsys, "eval/los", "eval/loss")
    assert plot.main([*paths, "--out", str(tmp_path / "curves.txt")]) == 2
    error_line(capsys, "curves.txt", ".png")


def test_runs_of_different_tokenizers_are_marked(tmp_path):
    config = {"data": {"tokenizer": "bytes"}, "seed": 0}
    rows = [(1, {"eval/loss": 1.0})]
    first = logged_run(tmp_path / "a", config, rows)
    other = logged_run(tmp_path / "b", config | {"data": {"tokenizer": "bpe:512"}}, rows)
    text = report.page([first, other])
    assert re.search('class="warning"[^<]*eval/bits_per_byte', text)
