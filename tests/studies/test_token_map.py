"""The map of what a model does with each token: its numbers are those of the model."""

import csv
import functools
import itertools
import json
import re

import families
import jax
import numpy as np
import pytest
import study_helpers
from ml_collections import ConfigDict
from refusals import refused
from study_helpers import error_line

from efx import models
from efx.data.bpe import train_bpe
from efx.data.pipeline import Data
from efx.data.stream import Stream, TokenSplit
from efx.data.tokenizers import ByteTokenizer
from efx.layers import batch_means
from efx.layers.stack import scan_params
from efx.studies import token_choices, token_map, token_text
from efx.train.evaluator import REPORTS, Passes
from efx.train.step import by_layer

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
    """(model, variables, ids [T], TokenMap) of a row of families or of OWN."""
    model = families.make(OWN[name]) if name in OWN else families.build(name)
    seed = 25 if name == "skips" else 0  # masks that close some tokens
    variables = {"params": families.random_params(model, seed), **families.random_state(model)}
    ids = families.tokens(batch=1, length=T, seed=3)[0]
    return model, variables, ids, token_choices.token_map(model, variables, ids, families.keys())


@functools.cache
def forward(name):
    """(logits [T, V], sown collections) of a case."""
    model, variables, ids, _ = case(name)

    @families.jit
    def sow(variables):
        collections = ["stats", batch_means.COLLECTION, "masks", "intermediates"]
        return model.apply(variables, ids[None], rngs=families.keys(), mutable=collections)

    logits_BTV, sown = jax.device_get(sow(variables))
    return logits_BTV[0], sown


def evaluated(name):
    """The metrics of evaluation from the statistics of the same pass."""
    model = case(name)[0]
    stats = by_layer(forward(name)[1]["stats"], model)
    own = {key: float(value) for key, value in stats.items()} | {"loss": 1.0}
    selections = ("causal", "topk", "off", "aux_loss", "predictor", "threshold")
    passes = Passes(dict.fromkeys(selections, own), 1.0)
    rows = {}
    for report in REPORTS:
        rows |= passes.statistics("causal", report.statistics)
        rows |= report.rows(model, T, passes)
    return rows


# ---- decisions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mod_options", "recursion", pytest.param("streams_mod", marks=pytest.mark.slow)]
)
def test_blocks_compute_what_evaluation_counts(name):
    made, rows = case(name)[3], evaluated(name)
    computed = made.of("computed")
    assert computed and made.quantities["computed"].kind == "flag"
    for block, values_T in computed.items():
        path = block.replace(" ", "/")  # of two streams block_0/decoder
        # Evaluation counts tokens that left a recursion as not computed.
        share = np.nan_to_num(values_T).mean()
        assert share == pytest.approx(rows[f"eval/router/routed_fraction/{path}"])
        gate_T, score_T = made.of("gate")[block], made.of("score")[block]
        there_T = ~np.isnan(values_T)
        assert ((gate_T != 0) == (values_T == 1))[there_T].all()
        assert (score_T[values_T == 1] > 0).all()
    assert 0 < np.nanmean(list(computed.values())) < 1
    if name == "recursion":  # a token that left is not decided about again
        for earlier, later in itertools.pairwise(computed.items()):
            left_T = ~(earlier[1] == 1)
            assert 0 < left_T.sum() < T
            for row in made.rows:
                if row.name == later[0]:
                    np.testing.assert_array_equal(np.isnan(row.values_T), left_T)


def test_scores_are_those_of_the_router():
    """aux_loss compares the router's score itself with 0."""
    model, _, _, made = case("recursion")
    sown = forward("recursion")[1]
    assert model.config.depth_routing.causal == "aux_loss"
    for block, score_T in made.of("score").items():
        (logits_BT,) = sown["intermediates"]["layers"][block]["router_logits"]
        there_T = ~np.isnan(score_T)
        np.testing.assert_allclose(score_T[there_T], logits_BT[0][there_T], rtol=1e-5)


def test_choices_of_experts_are_those_of_the_router():
    model, _, _, made = case("mode_integrated")
    sown = forward("mode_integrated")[1]
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
    assert sum(map(np.sum, noop.values())) > 0


def test_kept_fractions_of_masks_in_routed_blocks():
    """Each row has the mean that the mask reports, over the tokens that its block computes."""
    made, sown = case("dropout_elementwise_mod")[3], forward("dropout_elementwise_mod")[1]
    kept, computed = made.of("kept"), made.of("computed")
    for block in ("block_0", "block_1"):
        for site in ("attention_output", "mlp_output"):
            row_T = kept[f"{block} {site}"]
            (mean,) = sown["stats"]["layers"][block][f"dropout_{site}"]["dropout/kept"]
            assert np.nanmean(row_T) == pytest.approx(float(mean), rel=1e-5)
            np.testing.assert_array_equal(~np.isnan(row_T), computed[block] == 1)


def test_a_closed_token_mask_skips_the_mlp():
    made = case("skips")[3]
    kept, computed = made.of("kept"), made.of("computed")
    for block in ("block_0", "block_1"):
        np.testing.assert_array_equal(kept[f"{block} mlp_output"], computed[f"{block} mlp"])
        assert 0 < kept[f"{block} mlp_output"].sum() < T


@pytest.mark.slow
def test_composed_experts_and_gates():
    made, sown = case("inclusion")[3], forward("inclusion")[1]
    assert len(made.of("experts")) == 4
    up = sown["stats"]["layers"]["block_1"]["mlp"]["up"]
    (mean,) = up["adapter"]["adapter/experts_per_token"]
    assert made.of("experts")["block_1 mlp up"].mean() == pytest.approx(float(mean))
    # One adapter with a gate.
    made, sown = case("gates")[3], forward("gates")[1]
    (logits,) = sown["intermediates"]["layers"]["block_1"]["mlp"]["up"]["adapter"]["gate_logits"]
    gate_T = 1 / (1 + np.exp(-logits[0]))
    np.testing.assert_allclose(made.of("gate")["block_1 mlp up"], gate_T, rtol=1e-5)


def test_entropy_and_loss_are_those_of_the_logits():
    _, _, ids, made = case("mod_options")
    logits_TV = np.float64(forward("mod_options")[0])
    log_p = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    np.testing.assert_allclose(made.entropy_T, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-4)
    expected = -log_p[np.arange(T - 1), np.asarray(ids)[1:]]
    np.testing.assert_allclose(made.loss_T[:-1], expected, rtol=1e-4)
    assert np.isnan(made.loss_T[-1])


@pytest.mark.slow
def test_scanned_layers_are_named_as_unrolled_ones():
    model, variables, ids, made = case("mod_options")
    stacked = {
        name: {**tree, "layers": scan_params(tree["layers"], model.specs())}
        for name, tree in variables.items()
    }
    scanned = models.changed(model, scan_layers=True)
    again = token_choices.token_map(scanned, stacked, ids, families.keys())
    assert [row[:2] for row in again.rows] == [row[:2] for row in made.rows]
    for row, other in zip(again.rows, made.rows, strict=True):
        np.testing.assert_allclose(row.values_T, other.values_T, rtol=1e-4, atol=1e-5)


def test_a_dense_model_is_refused():
    model = families.make({"depth": 1})
    params, ids = families.random_params(model), families.tokens(batch=1, length=4)[0]
    refused(lambda: token_choices.token_map(model, {"params": params}, ids), "no decision")


def test_blocks_of_latents_compute_at_the_last_tokens_of_groups():
    model, _, _, made = case("latent_mod")
    computed, last = made.of("computed"), model.config.latents[-1]
    place_T = np.arange(T) % model.config.group_size
    level_T = place_T >= model.config.group_size - last
    for block in ("block_0", "block_1"):
        np.testing.assert_array_equal(np.isnan(computed[block]), ~level_T)
        assert set(computed[block][level_T]) == {0.0, 1.0}


# ---- the text ------------------------------------------------------------------------------------


def test_a_held_out_text_shorter_than_a_row_is_not_padded():
    config = ConfigDict(dict(seq_len=16, packing=False))
    splits = {"eval": TokenSplit("text", Stream([np.arange(1, 6, dtype=np.uint16)]))}
    data = Data(config, 0, ByteTokenizer(), splits, "key")
    assert token_map.held_out(data) == ([1, 2, 3, 4], 5)


def test_pieces_have_whole_characters_and_all_tokens():
    byte = ByteTokenizer()
    ids = [*byte.encode("a—\n").tolist(), 255, 65, 256, 0xE2, 0x80]
    single = [(piece, 1) for piece in ("\n", "\\xff", "A", "⟨end⟩", "\\xe2", "\\x80")]
    assert token_text.pieces(byte, ids) == [("a", 1), ("—", 3), *single]
    text = "hello — 漢字 wörld </script>"
    bpe = train_bpe(["hello wörld </script>" * 20], 300)
    ids = bpe.encode(text).tolist()
    found = token_text.pieces(bpe, ids)
    assert "".join(piece.text for piece in found) == text
    assert sum(piece.count for piece in found) == len(ids)
    assert ("漢", 3) in found and max(piece.count for piece in found) == 3


# ---- the command and its page --------------------------------------------------------------------

TEXT = "def f(x):\n    return '</script><b>é' # $a$"


@pytest.fixture(scope="module")
def run(tmp_path_factory, root, one_device):
    for package in ("jinja2", "plotly"):
        pytest.importorskip(package, reason="the extra `studies` is not installed")
    return study_helpers.train(
        root,
        tmp_path_factory.mktemp("token_map") / "run",
        "learned_dropout.py:smoke,skip",
        "steps=6",
        "sample.every=0",
        "model.width=16",
        "model.depth=2",
        "data.max_bytes=20000",
    )


def test_the_command_writes_page_table_and_picture(run, tmp_path, capsys):
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
    # A picture of the held-out text.
    picture = tmp_path / "map.png"
    arguments = ["--workdir", str(run), "--out", str(picture), "--quantity", "kept"]
    assert token_map.main(arguments) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "bad, name",
    [
        (["--text", "x" * 100], "100"),
        (["--out", "{tmp}/map.png", "--quantity", "gates"], "--quantity=gates"),
        (["--step", "77"], "77"),
    ],
)
def test_bad_input_is_refused(run, tmp_path, capsys, bad, name):
    bad = [word.format(tmp=tmp_path) for word in bad]
    assert token_map.main(["--workdir", str(run), *bad]) == 2
    error_line(capsys, name)
    assert not list(tmp_path.iterdir())
