"""The map of what a model does with each token: its numbers are those that the model goes by."""

import csv
import functools
import itertools
import json
import re

import browser as browsers
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from ml_collections import ConfigDict

from efx import means, models
from efx.data.bpe import train_bpe
from efx.data.pipeline import Data
from efx.data.stream import Stream
from efx.data.tokenizers import ByteTokenizer
from efx.errors import UsageError
from efx.evaluate import Passes
from efx.layers.info import CacheView, CallInfo, Tokens
from efx.layers.report import CHOICES
from efx.layers.stack import scan_params
from efx.models.latent import group_views
from efx.models.reports import REPORTS
from efx.step import by_layer
from efx.studies import page, token_choices, token_map, token_text

T = 24
INCLUSION = families.FAMILIES["adapter_inclusion"].changes
OWN = {
    # Masks of one value a token; the MLP of a token whose mask is 0 is not computed.
    "skips": {
        "dropout.kind": "attention",
        "dropout.sites": ("mlp_output",),
        "dropout.attention.granularity": "token",
        "dropout.attention.input": "embedding_linear",
        "dropout.attention.rounding": "stochastic",
        "dropout.attention.skip_tile": 5,
    },
    "inclusion": {**INCLUSION, "adapter.sites": ".*/(query|up)"},
    "gates": {"adapter.kind": "lora", "adapter.gate": True, "adapter.sites": ".*/up"},
}


@functools.cache
def case(name):
    """(model, variables, ids [T], TokenMap, what was sown, logits [T, V]) of a row of families or
    of OWN."""
    model = families.make(OWN[name]) if name in OWN else families.build(name)
    seed = 25 if name == "skips" else 0  # masks that close some tokens
    variables = {"params": families.random_params(model, seed), **families.random_state(model)}
    ids = families.tokens(batch=1, length=T, seed=3)[0]
    made = token_choices.token_map(model, variables, ids, families.keys())

    @families.jit
    def sow(variables):
        collections = ["stats", means.COLLECTION, "masks", "intermediates"]
        return model.apply(variables, ids[None], rngs=families.keys(), mutable=collections)

    logits_BTV, sown = jax.device_get(sow(variables))
    return model, variables, ids, made, sown, logits_BTV[0]


def evaluated(name):
    """What evaluation says of a model by what this pass measured."""
    model, _, _, _, sown, _ = case(name)
    stats = by_layer(sown["stats"], model)
    own = {key: float(value) for key, value in stats.items()} | {"loss": 1.0}
    selections = ("causal", "topk", "aux_loss", "predictor", "threshold")
    passes = Passes(dict.fromkeys(selections, own), 1.0)
    rows = {}
    for report in REPORTS:
        rows |= passes.statistics("causal", report.statistics)
        rows |= report.rows(model, T, passes)
    return rows


# ---- decisions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mod_options", "recursion", "streams_mod"])
def test_blocks_compute_what_evaluation_counts(name):
    made, rows = case(name)[3], evaluated(name)
    computed = made.of("computed")
    assert computed and made.quantities["computed"].kind == "flag"
    for block, values_T in computed.items():
        path = block.replace(" ", "/")  # of two streams block_0/decoder
        # Evaluation counts those that left a recursion as not computed.
        share = np.nan_to_num(values_T).mean()
        assert share == pytest.approx(rows[f"eval/router/routed_fraction/{path}"])
        gate_T, score_T = made.of("gate")[block], made.of("score")[block]
        there_T = ~np.isnan(values_T)
        assert ((gate_T != 0) == (values_T == 1))[there_T].all()
        assert (score_T[values_T == 1] > 0).all()
    assert 0 < np.nanmean(list(computed.values())) < 1
    if name == "recursion":  # who left does not come back, and nothing is decided about it
        for earlier, later in itertools.pairwise(computed.items()):
            left_T = ~(earlier[1] == 1)
            assert 0 < left_T.sum() < T
            for row in made.rows:
                if row.name == later[0]:
                    np.testing.assert_array_equal(np.isnan(row.values_T), left_T)


@pytest.mark.parametrize(
    "name, key",
    [
        ("mod_options", "eval/router/flops_per_token"),
        ("recursion", "eval/router/flops_per_token"),
        ("streams_mod", "eval/router/flops_per_token"),
        ("latent_mod", "eval/router/flops_per_token"),
        ("mode_integrated", "eval/moe/flops_per_token"),
        ("skips", "eval/flops_per_token"),
    ],
)
def test_the_cost_of_all_tokens_is_the_ledger_of_what_was_measured(name, key):
    made = case(name)[3]
    assert made.flops_T.sum() / T == pytest.approx(evaluated(name)[key], rel=1e-6)
    assert (made.flops_T <= made.dense_T * (1 + 1e-9)).all()
    assert np.unique(made.flops_T).size > 1


def test_scores_are_those_of_the_router():
    """aux_loss compares the router's score itself with 0."""
    model, _, _, made, sown, _ = case("recursion")
    assert model.config.depth_routing.causal == "aux_loss"
    for block, score_T in made.of("score").items():
        (logits_BT,) = sown["intermediates"]["layers"][block]["router_logits"]
        there_T = ~np.isnan(score_T)
        np.testing.assert_allclose(score_T[there_T], logits_BT[0][there_T], rtol=1e-5)


def test_experts_and_what_becomes_of_all_choices():
    model, _, _, made, sown, _ = case("mode_integrated")
    top_k, rows = model.config.mlp.moe.top_k, evaluated("mode_integrated")
    count, noop, full = (made.of(name) for name in ("experts", "noop", "full"))
    for name in count:
        np.testing.assert_array_equal(count[name] + noop[name] + full[name], top_k)
        block = name.removesuffix(" mlp")
        mean = rows[f"eval/moe/computed_fraction/{block}"]
        assert count[name].mean() == pytest.approx(top_k * mean)
        assert noop[name].mean() == pytest.approx(top_k * rows[f"eval/moe/noop_fraction/{block}"])
        (logits_BTE,) = sown["intermediates"]["layers"][block]["mlp"]["router_logits"]
        for t, served in enumerate(made.served[name]):
            assert len(served) == count[name][t]
            best = np.argsort(-logits_BTE[0, t])[:top_k]
            assert {e for e, _ in served} <= set(best.tolist())
            if served:
                assert max(served, key=lambda pair: pair[1])[0] == made.of("expert")[name][t]
            else:
                assert np.isnan(made.of("expert")[name][t])
    assert made.quantities["experts"].kind == "count" and sum(map(np.sum, noop.values())) > 0


def test_masks_inside_of_routed_blocks_and_of_probabilities():
    """Each row has the mean that the mask itself reports, of the tokens that its block computes."""
    _, _, _, made, sown, _ = case("dropout_elementwise_mod")
    kept, computed = made.of("kept"), made.of("computed")
    for block in ("block_0", "block_1"):
        for site in ("attention_output", "mlp_output"):
            row_T = kept[f"{block} {site}"]
            (mean,) = sown["stats"]["layers"][block][f"dropout_{site}"]["dropout/kept"]
            assert np.nanmean(row_T) == pytest.approx(float(mean), rel=1e-5)
            np.testing.assert_array_equal(~np.isnan(row_T), computed[block] == 1)
        (masks,) = sown["masks"]["layers"][block]["attention"]["probs_dropout"]["dropout/changed"]
        rows = [np.moveaxis(mask, 3, 0).reshape(mask.shape[3], -1) for mask in masks]
        share = np.concatenate([(m == 1).sum(1) / np.maximum((m >= 0).sum(1), 1) for m in rows])
        row_T = kept[f"{block} attention probs_dropout"]
        there_T = ~np.isnan(row_T)
        np.testing.assert_allclose(row_T[there_T], share[: there_T.sum()], atol=1e-6)


def test_masks_of_tokens_are_flags():
    """Masks of one value a token; where they are 0 the MLP is not computed."""
    made = case("skips")[3]
    assert made.quantities["kept"].kind == "flag"
    kept, computed = made.of("kept"), made.of("computed")
    for block in ("block_0", "block_1"):
        np.testing.assert_array_equal(kept[f"{block} mlp_output"], computed[f"{block} mlp"])
        closed_T = kept[f"{block} mlp_output"] == 0
        assert 0 < closed_T.sum() < T
        np.testing.assert_array_equal(made.of("flops")[block] < 1, closed_T)


def test_composed_experts_and_gates():
    _, _, _, made, sown, _ = case("inclusion")
    for name, row_T in made.of("experts").items():
        block, *layer = name.split(" ")
        tree = functools.reduce(lambda t, k: t[k], layer, sown["stats"]["layers"][block])
        (mean,) = tree["adapter"]["adapter/experts_per_token"]
        assert row_T.mean() == pytest.approx(float(mean))
    assert len(made.of("experts")) == 4 and np.unique(made.flops_T).size > 1
    # One adapter with a gate.
    _, _, _, made, sown, _ = case("gates")
    (logits,) = sown["intermediates"]["layers"]["block_1"]["mlp"]["up"]["adapter"]["gate_logits"]
    gate_T = 1 / (1 + np.exp(-logits[:, 0]))
    np.testing.assert_allclose(made.of("gate")["block_1 mlp up"], gate_T, rtol=1e-5)


def test_entropy_and_loss_are_those_of_the_logits():
    _, _, ids, made, _, logits_TV = case("mod_options")
    logits_TV = np.float64(logits_TV)
    log_p = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    np.testing.assert_allclose(made.entropy_T, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-4)
    expected = -log_p[np.arange(T - 1), np.asarray(ids)[1:]]
    np.testing.assert_allclose(made.loss_T[:-1], expected, rtol=1e-4)
    assert np.isnan(made.loss_T[-1])


def test_scanned_layers_are_named_as_unrolled_ones():
    model, variables, ids, made, *_ = case("mod_options")
    stacked = {
        name: {**tree, "layers": scan_params(tree["layers"], model.specs())}
        for name, tree in variables.items()
    }
    scanned = models.changed(model, scan_layers=True)
    again = token_choices.token_map(scanned, stacked, ids, families.keys())
    assert [row[:2] for row in again.rows] == [row[:2] for row in made.rows]
    for row, other in zip(again.rows, made.rows, strict=True):
        np.testing.assert_allclose(row.values_T, other.values_T, rtol=1e-4, atol=1e-5)


def test_a_model_that_decides_nothing():
    model = families.make({"depth": 1})
    with pytest.raises(UsageError, match="no decision per token"):
        params = families.random_params(model)
        token_choices.token_map(model, {"params": params}, families.tokens(batch=1, length=4)[0])


def test_who_does_not_ask_has_no_choices_in_the_program():
    """Neither in training nor in evaluation; the initialisation makes none either."""
    model, variables, ids, *_ = case("mod_options")

    def program(*collections):
        def run(variables):
            return model.apply(variables, ids[None], mutable=list(collections))[1]

        return jax.make_jaxpr(run)(variables)

    asked, not_asked = program("stats", CHOICES), program("stats")
    assert len(asked.jaxpr.eqns) > len(not_asked.jaxpr.eqns)
    assert len(asked.jaxpr.outvars) > len(not_asked.jaxpr.outvars)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), ids[None]))
    assert CHOICES not in shapes


# ---- latents -------------------------------------------------------------------------------------


def test_latents_have_the_times_at_which_decoding_computes_them():
    model, length = families.build("latent_memory"), 15
    c = model.config
    info = CallInfo(Tokens(jnp.arange(length)[None]), cache=CacheView(length))
    views = group_views.decoding_views(info, c.sizes, c.memory_local, c.memory_global)
    stages = {stage.path: stage for stage in model.stages(length)}
    for path, level in (("encoder_0", 1), ("decoder_0", 0)):
        view, size = views[level], c.sizes[level]
        there = np.asarray(view.place_BT) >= 0
        token = np.asarray(view.group_BT * c.group_size + c.group_size - size + view.place_BT)
        tokens_S = stages[path].tokens_S
        np.testing.assert_array_equal(tokens_S[tokens_S >= 0], token[there])
        # Places of blocks across groups and inside of them, memory before them.
        for kind, call, memory in (
            ("global_0", view.whole, c.memory_global),
            ("local_0", view.local, c.memory_local),
        ):
            positions = np.asarray(call.tokens.positions_BT)
            groups = -(-length // c.group_size)
            row = np.arange(memory + size * (groups if kind == "global_0" else 1))[None]
            row = row if kind == "global_0" else np.repeat(row, groups, axis=0)
            times = model.times(f"{path}/blocks/{kind}/block_0", row, length)
            assert (times[:, :memory] == -1).all()
            row_of = np.asarray(view.group_BT) if kind == "local_0" else np.zeros_like(token)
            found = times[row_of[there], positions[there]]
            np.testing.assert_array_equal(found, token[there])
    tokens_S = stages["layers/block_0"].tokens_S
    assert (tokens_S[: c.memory_global] == -1).all()


def test_levels_and_blocks_of_latents_compute_at_their_tokens():
    model, _, _, made, *_ = case("latent_mod")
    computed, last = made.of("computed"), model.config.latents[-1]
    place_T = np.arange(T) % model.config.group_size
    level_T = place_T >= model.config.group_size - last
    np.testing.assert_array_equal(computed["encoder_0"], level_T)
    for block in ("block_0", "block_1"):
        np.testing.assert_array_equal(np.isnan(computed[block]), ~level_T)
        assert set(computed[block][level_T]) == {0.0, 1.0}


# ---- the text ------------------------------------------------------------------------------------


def test_a_held_out_text_shorter_than_a_row_is_shown_as_it_is():
    """What fills up its row was shown as text, and as the token after it."""
    config = ConfigDict(dict(seq_len=16, packing=False))
    streams = {"eval": Stream([np.arange(1, 6, dtype=np.uint16)])}
    data = Data(config, 0, ByteTokenizer(), streams, None, None, "key")
    assert token_map.held_out(data) == ([1, 2, 3, 4], 5)


def test_pieces_have_whole_characters_and_all_tokens():
    byte = ByteTokenizer()
    ids = [*byte.encode("a—\n").tolist(), 255, 0xE2, 65, 256, 0xE2, 0x80]
    assert token_text.pieces(byte, ids) == [
        ("a", 1), ("—", 3), ("\n", 1), ("\\xff", 1), ("\\xe2", 1), ("A", 1), ("⟨end⟩", 1),
        ("\\xe2", 1), ("\\x80", 1),
    ]  # fmt: skip
    text = "hello — 漢字 wörld </script>"
    bpe = train_bpe(["hello wörld </script>" * 20], 300)
    ids = bpe.encode(text).tolist()
    found = token_text.pieces(bpe, [*ids, bpe.eot])
    assert "".join(piece.text for piece in found) == text + "⟨end⟩"
    assert sum(piece.count for piece in found) == len(ids) + 1
    assert ("漢", 3) in found and max(piece.count for piece in found) == 3


# ---- the command and its page --------------------------------------------------------------------

TEXT = "def f(x):\n    return '</script><b>é' # $a$"


@pytest.fixture(scope="module")
def pages():
    """What pages are written with."""
    for package in ("jinja2", "plotly"):
        pytest.importorskip(package, reason="the extra `report` is not installed")


@pytest.fixture(scope="module")
def run(pages, tmp_path_factory, root, one_device):
    return small_run.train(
        root,
        tmp_path_factory.mktemp("token_map") / "run",
        "learned_dropout.py:smoke,skip",
        "steps=6",
        "sample.every=0",
        "model.width=16",
        "model.depth=2",
        "data.max_bytes=20000",
    )


def test_command(run, tmp_path, capsys):
    out = tmp_path / "map.html"
    assert token_map.main(["--workdir", str(run), "--text", TEXT, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "map.html" in said and "block_1 mlp computed" in said
    with open(tmp_path / "map.csv", newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert header[:3] == ["token", "entropy", "loss"]
    assert "".join(line[0] for line in lines) == TEXT and len(lines) == len(TEXT.encode())
    assert all(float(x) >= 0 for x in lines[0][1:])
    page = out.read_text()
    assert "<b>é" not in page and page.count("</script>") == page.count("<script")
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert "".join(piece["text"] for piece in data["pieces"]) == TEXT
    assert sum(piece["count"] for piece in data["pieces"]) == len(data["ids"]) == len(lines)
    # A picture of the same, and the text of the held-out split into the run folder.
    picture = tmp_path / "map.png"
    arguments = ["--workdir", str(run), "--text", TEXT, "--out", str(picture)]
    assert token_map.main([*arguments, "--quantity", "kept"]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert token_map.main(["--workdir", str(run)]) == 0
    assert (run / "token_map.html").exists() and (run / "token_map.csv").exists()


def test_rows_of_a_picture_that_do_not_compare_have_own_scales():
    values = np.array([[1.0, -4.0, np.nan], [0.01, 0.0, 0.005], [0.0, 0.0, np.nan]])
    over = token_map._by_row(values)
    np.testing.assert_allclose(over, [[0.25, -1, np.nan], [1, 0, 0.5], [0, 0, np.nan]])


@pytest.mark.filterwarnings("error")
def test_a_picture_has_room_for_characters_that_its_font_lacks(tmp_path):
    """They are written as numbers, which are longer than they are."""
    rows = [token_choices.Row("block_1", "computed", np.array([0.0, 1.0]))]
    numbers = np.ones(2)
    made = token_choices.TokenMap(rows, {}, numbers, numbers, numbers, numbers)
    pieces = [token_text.Piece("深度混合模型深度混合模型", 1), token_text.Piece("漢字", 1)]
    token_map.draw(made, pieces, "computed", tmp_path / "map.png")  # warns of a layout that fails
    assert token_map._ticks(pieces, slice(0, 2), set(range(128)))[1] == [
        "u6df1u5ea6…",
        "u6f22u5b57",
    ]


@pytest.mark.parametrize(
    "bad, message",
    [
        (["--text", ""], "--text: 0 tokens"),
        (["--text", "x" * 100], "100 tokens; must have from 1 to 64"),
        (["--out", "{tmp}/no/x.png"], "there is no folder {tmp}/no"),
        (["--out", "{tmp}"], "--out={tmp} is a folder; use a file in it"),
        (["--workdir", "{tmp}/none"], "--workdir={tmp}/none is not a run folder: there is no such"),
        (["--out", "{tmp}/map"], "unknown file ending; use one of"),
        (["--out", "{tmp}/map.csv"], "unknown file ending; use one of"),
        (
            ["--out", "{tmp}/map.png", "--quantity", "gates"],
            "--quantity=gates: expected one of computed",
        ),
        (["--quantity", "kept"], "--quantity: a page shows all quantities"),
        (["--step", "77"], "77"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, bad, message):
    bad = [word.format(tmp=tmp_path) for word in bad]
    assert token_map.main(["--workdir", str(run), *bad]) == 2
    said = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_checkpoint(tmp_path, capsys):
    assert token_map.main(["--workdir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- in a browser --------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def written(pages, tmp_path_factory):
    """A page of made-up numbers: a hostile text of 6 tokens, one of its characters of 3 tokens."""
    texts = ((HOSTILE, 1), ("</script>", 1), ("漢", 3), ("\n", 1))
    pieces = [token_text.Piece(*of) for of in texts]
    rows = [
        token_choices.Row("block_1", "computed", np.array([0.0, 1, 0, 1, 0, 1])),
        token_choices.Row("block_1", "score", np.array([-1.0, 0.5, -0.2, 0.3, -2, 1])),
        token_choices.Row("block_1", "wanted", np.array([0.0, 1, 1, 1, 0, 1])),
        token_choices.Row("<b>block_3", "computed", np.array([1.0, np.nan, 0, 0, 1, 1])),
        token_choices.Row("<b>block_3", "score", np.array([0.01, np.nan, -0.005, 0, 0, 0])),
        token_choices.Row("block_3 mlp", "expert", np.array([0.0, 2, 1, np.nan, 1, 0])),
    ]
    served = {"block_3 mlp": [[(0, 0.75)], [(2, 1.0)], [(1, 0.5), (0, 0.25)], [], [(1, 1.0)], []]}
    numbers = np.array([1.0, 2.5, 3.0, 4.0, 5.0, 6.0])
    unknown, dense = np.full(6, np.nan), np.full(6, 80.0)
    made = token_choices.TokenMap(rows, served, numbers, unknown, numbers**2 * 2.5, dense)
    path = tmp_path_factory.mktemp("page") / "map.html"
    sections = token_map.sections(made, range(6), pieces)
    page.write_page(path, "<i>title</i>", sections, about=HOSTILE)
    return path


@pytest.fixture(scope="module")
def browser(written):
    with browsers.chromium() as browser:
        browser.get(written.as_uri())
        browsers.awaited(browser, ".heatmap .main-svg")
        yield browser


GRID = "document.querySelector('.heatmap')"


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def test_it_loads_with_no_word_and_no_request(browser, written):
    assert browser.execute_script(f"return [...{GRID}.data[0].z[0]]") == [0, 1, 0, 1, 0, 1]
    assert all_of(browser, ".heatmap .main-svg")
    assert browsers.said(browser) == []
    # Plotly paints a heatmap as a picture of its own making.
    asked = [url for url in browsers.requests(browser) if not url.startswith("data:")]
    assert asked == [written.as_uri()]
    # Everything of the text is text.
    (tokens,) = all_of(browser, ".tokens")
    assert tokens.text.split() == [*f"{HOSTILE}</script>漢↵".split()]
    assert not all_of(browser, ".token-map img, .names b, .xtick img, .xtick b, h1 i")
    assert [one.text for one in all_of(browser, ".names div")] == ["block_1", "<b>block_3"]
    ticks = [one.text for one in all_of(browser, ".xtick > text")]
    assert ticks == ["<img·src=x·…", "</script>", "漢", "↵"]
    # Two entries for 0 and 1, and one for where nothing is decided.
    words = all_of(browser, ".of-grid")[0].text.split("\n")
    assert words[1:] == ["skipped", "computed", "nothing is decided here"]


def test_pointing_at_a_token_shows_its_path(browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.support import wait as support

    (path,) = all_of(browser, ".path")
    # In the middle of a character of three tokens is the second of these.
    character = all_of(browser, ".tokens > span")[2]
    ActionChains(browser).move_to_element(character).perform()
    assert path.get_attribute("data-token") == "3"
    said = path.text
    assert "number 3, 2 of 3, id 3" in said and "4 nats" in said and "not known" in said
    assert "50% of the cost with everything computed: 40 FLOPs" in said
    items = [item.text for item in all_of(browser, ".path li")]
    assert items == [
        "block_1 · computed · router score 0.3 · selected",
        "<b>block_3 · skipped · router score 0",
    ]
    all_of(browser, ".tokens > span")[0].click()
    assert "router score -1 · not selected" in path.text
    all_of(browser, ".tokens > span")[0].click()
    ActionChains(browser).move_to_element(character).perform()
    # The grid: its third column, where two experts share the token.
    (grid,) = all_of(browser, ".heatmap")
    column = 18 * 2 + 9 - round(grid.size["width"] / 2)
    row = grid.size["height"] // 2 - 12
    ActionChains(browser).move_to_element_with_offset(grid, column, row).perform()
    shown = "return document.querySelector('.path').dataset.token"
    support.WebDriverWait(browser, 10).until(lambda _: browser.execute_script(shown) == "2")
    assert "block_3 mlp · experts 1 (50%), 0 (25%)" in path.text
    cursor = all_of(browser, ".cursor")[0]
    assert cursor.value_of_css_property("left") == "36px"
    # A click keeps the token until the next one.
    ActionChains(browser).click().perform()
    ActionChains(browser).move_to_element(character).perform()
    assert path.get_attribute("data-token") == "2"
    character.click()
    assert browsers.said(browser) == []


def test_the_switch_shows_another_quantity(browser):
    from selenium.webdriver.support.select import Select

    switch = Select(all_of(browser, "select.quantity")[0])
    options = [option.text for option in all_of(browser, "select.quantity option")]
    assert options == ["computed", "which expert", "router score", "selected"]
    switch.select_by_visible_text("which expert")
    read = f"return [...{GRID}.data[0].z].map((row) => [...row])"
    assert browser.execute_script(read) == [[0, 2, 1, None, 1, 0]]
    assert [one.text for one in all_of(browser, ".names div")] == ["block_3 mlp"]
    words = all_of(browser, ".of-grid")[0].text.split("\n")
    assert words[1:] == ["0", "1", "2", "nothing is decided here"]
    switch.select_by_visible_text("router score")
    # Each row has its own scale, which its name says.
    drawn = browser.execute_script(read)
    assert drawn[0] == pytest.approx([-0.5, 0.25, -0.1, 0.15, -1, 0.5])
    assert drawn[1] == [1, None, -0.5, 0, 0, 0]
    assert browser.execute_script(f"return [{GRID}.data[0].zmin, {GRID}.data[0].zmax]") == [-1, 1]
    assert "over the largest of each row" in all_of(browser, ".of-grid")[0].text
    titles = [one.get_attribute("title") for one in all_of(browser, ".names div")]
    assert titles == ["block_1: -2 to 1", "<b>block_3: -0.005 to 0.01"]
    # The text by another number.
    colour = "return document.querySelectorAll('.tokens > span')[1].style.background"
    before = browser.execute_script(colour)
    Select(all_of(browser, "select.by")[0]).select_by_visible_text("entropy")
    assert "entropy of the next token" in all_of(browser, ".of-text")[0].text
    assert browser.execute_script(colour) != before
    assert browsers.said(browser) == []


def test_tokens_of_no_width_are_seen_and_turn_no_others(browser, pages, tmp_path):
    """Each begins where the one before ends, and can be pointed at."""
    texts = ["a", "\u200b", " \u202e", "turned", "\u202c", "\r", "\ufeff\u200d", "👩\u200d🚀", "b"]
    numbers = np.ones(len(texts))
    rows = [token_choices.Row("block_1", "computed", np.arange(len(texts)) % 2.0)]
    made = token_choices.TokenMap(rows, {}, numbers, numbers, numbers, numbers)
    pieces = [token_text.Piece(text, 1) for text in texts]
    path = tmp_path / "map.html"
    page.write_page(path, "map", token_map.sections(made, range(len(texts)), pieces))
    browser.get(path.as_uri())
    browsers.awaited(browser, ".heatmap .main-svg")
    spans = all_of(browser, ".tokens > span")
    shown = [
        "a",
        r"\x200b",
        r" \x202e",
        "turned",
        r"\x202c",
        r"\x0d",
        r"\xfeff\x200d",
        texts[7],
        "b",
    ]
    assert [span.get_attribute("textContent") for span in spans] == shown
    boxes = [span.rect for span in spans]
    assert all(box["width"] > 5 for box in boxes)
    for box, after in itertools.pairwise(boxes):
        assert box["x"] + box["width"] == pytest.approx(after["x"], abs=3)


def test_it_works_within_the_output_of_a_notebook(browser, written, tmp_path):
    """As HTML of another page, without a file to load."""
    outer = tmp_path / "notebook.html"
    outer.write_text(f"<!doctype html><body>{page.frame(written, height=500)}</body>")
    browsers.said(browser), browsers.requests(browser)  # of the page before
    browser.get(outer.as_uri())
    inside = browsers.awaited(browser, "iframe")
    assert inside.size["height"] == 500
    browser.switch_to.frame(inside)
    browsers.awaited(browser, ".heatmap .main-svg")
    assert browser.execute_script(f"return [...{GRID}.data[0].z[0]]") == [0, 1, 0, 1, 0, 1]
    all_of(browser, ".tokens > span")[3].click()
    assert all_of(browser, ".path")[0].text
    browser.switch_to.default_content()
    assert browsers.said(browser) == []
    asked = [url for url in browsers.requests(browser) if not url.startswith("data:")]
    assert [url for url in asked if url != "about:srcdoc"] == [outer.as_uri()]
