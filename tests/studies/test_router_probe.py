"""Probes of routers: made-up choices with known causes, and tiny models."""

import dataclasses
import functools
import json
import types

import families
import numpy as np
import pytest
import study_helpers
from refusals import refused
from study_helpers import error_line
from test_results import NEW, page, top  # noqa: F401

from efx.studies import results, router_probe, token_choices
from efx.studies.router_probe import analysis, report
from efx.studies.router_probe import tokens as tokens_lib

ROWS, LENGTH, TYPES = 80, 64, 40


@functools.cache
def text():
    """`Tokens` of 80 rows: types by Zipf's law, an entropy of a part by type and a random part."""
    draw, count = np.random.default_rng(0), ROWS * LENGTH
    share = 1 / np.arange(1, TYPES + 1)
    token_N = draw.choice(TYPES, count, p=share / share.sum())
    position_N = np.tile(np.arange(LENGTH), ROWS)
    entropy_N = draw.gamma(2, 0.5, TYPES)[token_N] + draw.gamma(2, 1, count)
    return analysis.Tokens(
        row_N=np.repeat(np.arange(ROWS), LENGTH),
        position_N=position_N,
        token_N=token_N,
        previous_N=np.where(position_N > 0, np.roll(token_N, 1), -1),
        rarity_N=-np.log2(share / share.sum())[token_N],
        entropy_N=entropy_N,
        loss_N=draw.exponential(entropy_N),
    )


def noise(seed):
    return np.random.default_rng(100 + seed).random(ROWS * LENGTH)


CHOICES = {
    "position": lambda t: t.position_N % 8 == 0,
    "token": lambda t: np.isin(t.token_N, (0, 5, 7)),
    "noise": lambda t: noise(0) < 0.125,
    "entropy": lambda t: t.entropy_N > np.quantile(t.entropy_N, 0.875),
}


@functools.cache
def of_choice(name):
    """The figures of a block with this choice; its scores agree with it."""
    chosen_N = CHOICES[name](text()).astype(float)
    score_N = chosen_N - 0.9 + 0.05 * noise(1)
    return analysis.of_block(text(), analysis.Block(chosen_N, score_N=score_N))


def explained(name, of="choice"):
    return {key: figures["explained"] for key, figures in of_choice(name)[of].items()}


def nothing(cell):
    low, high = cell["interval"]
    return low <= 0.001 and high >= 0 and abs(cell["mean"]) < 0.01


@pytest.mark.quick
def test_a_router_of_positions():
    for of in ("choice", "score"):
        shares = explained("position", of)
        for name, cell in shares.items():
            assert cell["mean"] > 0.95 if name == "position" else nothing(cell), (of, name)
    assert of_choice("position")["choice"]["position"]["auc"]["mean"] > 0.999
    assert of_choice("position")["choice"]["token"]["auc"]["mean"] == pytest.approx(0.5, abs=0.02)
    # Within a position the choice does not vary.
    assert of_choice("position")["correlations"]["entropy"]["spearman within position"] is None


@pytest.mark.quick
def test_a_router_of_tokens():
    for of in ("choice", "score"):
        shares = explained("token", of)
        assert shares["token"]["mean"] > 0.95 and shares["bigram"]["mean"] > 0.95
        assert nothing(shares["position"]) and nothing(shares["previous token"])
        # The entropy explains what the token does, and nothing beyond it.
        assert 0.005 < shares["entropy"]["mean"] < 0.2
        assert nothing(shares["entropy beyond token"])
        assert nothing(shares["loss beyond bigram"])
        assert shares["entropy beyond position"]["mean"] > 0.005
    correlation = of_choice("token")["correlations"]["entropy"]
    assert correlation["spearman"]["interval"][0] > 0
    assert correlation["spearman within token"] is None


@pytest.mark.quick
def test_a_router_of_entropy():
    for of in ("choice", "score"):
        shares = explained("entropy", of)
        assert shares["entropy"]["mean"] > 0.9
        assert shares["entropy beyond token"]["mean"] > 0.5
        assert shares["entropy beyond token"]["mean"] < shares["entropy"]["mean"]
        assert shares["entropy beyond position"]["mean"] > 0.9
        assert 0 < shares["loss"]["mean"] < 0.5 * shares["entropy"]["mean"]
        assert nothing(shares["position"]) and nothing(shares["previous token"])
    assert of_choice("entropy")["choice"]["entropy"]["auc"]["mean"] > 0.99
    correlation = of_choice("entropy")["correlations"]["entropy"]
    assert correlation["spearman within token"]["interval"][0] > 0.4
    assert 0 < of_choice("entropy")["correlations"]["loss"]["pearson"]["mean"] < 0.5


@pytest.mark.quick
def test_noise_is_not_explained():
    figures = of_choice("noise")
    assert all(nothing(cell) for cell in explained("noise").values())
    for of in figures["correlations"].values():
        for cell in of.values():
            assert abs(cell["mean"]) < 0.05
            assert np.diff(cell["interval"])[0] < 0.12


@pytest.mark.quick
def test_predictors_are_scored_on_rows_that_they_were_not_fitted_to():
    """Each token is of its own type, which a predictor could memorize."""
    t = dataclasses.replace(text(), token_N=np.arange(ROWS * LENGTH))
    rows, y_N = analysis.Rows(t.row_N), (noise(0) < 0.5).astype(float)
    figures = analysis.explained(t, rows, y_N, analysis.CHOICE, boosting=False)
    assert nothing(figures["token"]["explained"])
    for fit_N, score_N in rows.folds():
        assert not set(t.row_N[fit_N]) & set(t.row_N[score_N]) and 0 < fit_N.mean() < 1


@pytest.mark.quick
def test_intervals_count_rows_and_not_tokens():
    """Of a choice that is the same for all tokens of a row."""
    per_row_N = np.repeat(np.random.default_rng(0).random(ROWS) < 0.5, LENGTH).astype(float)
    low, high = analysis.Rows(text().row_N).mean(per_row_N)["interval"]
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(ROWS), rel=0.15)


@pytest.mark.quick
def test_bits_of_a_choice_and_a_block_that_never_computes():
    y_N = CHOICES["token"](text())
    entropy = -sum(p * np.log2(p) for p in (y_N.mean(), 1 - y_N.mean()))
    bits = of_choice("token")["choice"]["token"]["bits"]["mean"]
    assert bits == pytest.approx(entropy, rel=0.02)
    figures = analysis.of_block(text(), analysis.Block(np.zeros(ROWS * LENGTH)))
    assert figures["routed"]["mean"] == 0 and figures["score"] is None
    assert all(of["explained"] is None for of in figures["choice"].values())


def test_boosting_finds_what_no_predictor_explains_alone():
    pytest.importorskip("sklearn")
    t = text()
    y_N = ((t.entropy_N > 2.5) & (t.position_N < 32)).astype(float)
    fit_N, score_N = analysis.Rows(t.row_N).folds()[0]

    def share(predicted_N):
        bits = [
            analysis.CHOICE.loss(y_N, p_N)[score_N].sum()
            for p_N in (predicted_N, np.full(len(y_N), y_N[fit_N].mean()))
        ]
        return 1 - bits[0] / bits[1]

    assert share(analysis.predict_together(t, y_N, fit_N, analysis.CHOICE)) > 0.85
    alone = analysis.LEVELS["entropy"](t, fit_N)
    assert share(analysis.predict(alone, y_N, fit_N, analysis.CHOICE)) < 0.6


# ---- blocks together -----------------------------------------------------------------------------


@functools.cache
def probed():
    """The probe of three blocks, two of the same choice and one of noise, and of a recursion step
    that decides about the tokens of the first."""
    t = text()
    same_N = CHOICES["entropy"](t).astype(float)
    other_N = CHOICES["noise"](t).astype(float)
    step_N = np.where(same_N > 0, 1.0 * (t.position_N % 2 == 0), np.nan)
    score_N = np.where(same_N > 0, 1.0, -1.0) * (0.1 + noise(0))
    blocks = {
        "block_1": analysis.Block(same_N, same_N, score_N, 0.0),
        "block_3": analysis.Block(same_N, np.ones(len(same_N)), score_N - 5, -5.0),
        "block_5": analysis.Block(other_N),
        "step": analysis.Block(step_N),
    }
    return t, blocks, analysis.probe(t, blocks)


@pytest.mark.quick
def test_overlap_of_blocks():
    t, blocks, probe = probed()
    blocks = {name: block for name, block in blocks.items() if name != "step"}
    together = analysis.together(t, blocks)
    a, b = blocks["block_1"].routed_N.mean(), blocks["block_5"].routed_N.mean()
    shares = [of["independent"] for of in together["by_count"]]
    assert shares[0] == pytest.approx((1 - a) ** 2 * (1 - b)) and sum(shares) == pytest.approx(1)
    measured = [of["share"]["mean"] for of in together["by_count"]]
    assert measured[0] == pytest.approx((1 - a) * (1 - b), rel=0.05)
    assert measured[3] == pytest.approx(a * b, rel=0.3)
    pairs = together["pairs"]
    assert pairs["block_1, block_3"]["correlation"]["mean"] == pytest.approx(1)
    assert pairs["block_1, block_3"]["both"]["mean"] == pytest.approx(a)
    low, high = pairs["block_1, block_5"]["correlation"]["interval"]
    assert low < 0 < high
    # The step has few tokens to decide about.
    assert probe["left_out"] == {"step": int(blocks["block_1"].routed_N.sum())}
    # Tokens that no block decides about do not count.
    skip_N = t.position_N % 4 > 0
    for name, block in blocks.items():
        blocks[name] = analysis.Block(np.where(skip_N, np.nan, block.routed_N))
    fourth = analysis.together(t, blocks)["by_count"][0]["share"]["mean"]
    assert fourth == pytest.approx(measured[0], rel=0.05)


@pytest.mark.quick
def test_router_weights():
    _, blocks, probe = probed()
    first, third = (probe["blocks"][name] for name in ("block_1", "block_3"))
    share = blocks["block_1"].routed_N.mean()
    assert first["weights"]["above_half"]["mean"] == pytest.approx(share)
    assert sum(first["weights"]["all"]) == pytest.approx(1)
    assert sum(first["weights"]["routed"]) == pytest.approx(share)
    assert third["weights"]["threshold"] == pytest.approx(1 / (1 + np.exp(5)))
    assert first["overflow"]["mean"] == 0
    assert third["overflow"]["mean"] == pytest.approx(1 - share)
    assert probe["blocks"]["block_5"]["weights"] is None


# ---- tables, picture, results --------------------------------------------------------------------


@functools.cache
def data():
    """The output of a probe of two seeds, which differ in one number."""
    run = {"run": "mod", "step": 9, "selection": "topk", "text": "a text", "machine": "2 CPU cores",
           "revision": "c0ffee" * 6, "config": "configs/mod.py"}  # fmt: skip
    first = probed()[2]
    second = json.loads(json.dumps(first))
    second["blocks"]["block_1"]["routed"]["mean"] += 0.01
    return {
        "command": "python -m x",
        "selection": "causal",
        "runs": [{**run, "seed": seed} for seed in (0, 1)],
        "probes": [first, second],
    }


@pytest.mark.quick
def test_seeds_have_a_mean_and_a_deviation():
    probes = data()["probes"]
    cell = report.combined(probes)["blocks"]["block_1"]["routed"]
    values = [of["blocks"]["block_1"]["routed"]["mean"] for of in probes]
    assert cell["values"] == values and cell["mean"] == pytest.approx(np.mean(values))
    assert cell["spread"] == pytest.approx(np.std(values, ddof=1))
    assert report.combined(probes[:1]) == probes[0]


def test_a_probe_becomes_a_result(top, tmp_path):  # noqa: F811
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(data()))
    call = [f"--root={top}", f"--from={path}", "--name=probe", *NEW]
    assert results.main(call) == 0
    result = results.read_result(top / "results/probe.json")
    assert result["seeds"] == [0, 1] and result["picture"] == "probe"
    assert [row["name"] for row in result["rows"]] == ["block_1", "block_3", "block_5"]
    assert "| block_1 |" in page(top)
    assert (top / "docs/probe.png").read_bytes().startswith(b"\x89PNG")


# ---- tokens of models ----------------------------------------------------------------------------


def measure(model, batch, selection="causal"):
    """(variables, Tokens, {block: Block}) of a model on one batch."""
    variables = {"params": families.random_params(model), **families.random_state(model)}
    routed = tokens_lib.routed_blocks(model, batch["inputs"].shape[1])
    made = tokens_lib.passes(model, variables, [batch], selection, routed, 0)
    rarity_V = np.arange(families.VOCAB, dtype=float)
    return variables, *tokens_lib.assemble([batch], made, routed, selection, rarity_V)


def batch_of(ids_BT, **more):
    return {"inputs": ids_BT, "targets": ids_BT, "weights": np.ones(ids_BT.shape)} | more


def test_tokens_of_a_batch_are_those_of_the_map_of_each_text():
    ids_BT = families.tokens(batch=2, length=25, seed=3)
    batch = {"inputs": ids_BT[:, :-1], "targets": ids_BT[:, 1:], "weights": np.ones((2, 24))}
    batch["weights"][1, 20:] = 0  # past the end
    model = families.build("recursion")
    variables, tokens, blocks = measure(model, batch)
    assert model.config.depth_routing.causal == "aux_loss" and len(tokens.row_N) == 44
    assert tokens.previous_N[0] == -1 and (tokens.previous_N[1:24] == ids_BT[0, :23]).all()
    np.testing.assert_array_equal(tokens.rarity_N, tokens.token_N)
    for row in range(2):
        made = token_choices.token_map(model, variables, ids_BT[row, :-1], None, ids_BT[row, -1])
        here_N, count = tokens.row_N == row, int((tokens.row_N == row).sum())
        np.testing.assert_allclose(tokens.entropy_N[here_N], made.entropy_T[:count], rtol=1e-4)
        np.testing.assert_allclose(tokens.loss_N[here_N], made.loss_T[:count], rtol=1e-4)
        before_T = np.ones(count)
        for name, block in blocks.items():
            computed_T = np.nan_to_num(made.of("computed")[name][:count])
            expected_T = np.where(before_T > 0, computed_T, np.nan)
            np.testing.assert_array_equal(block.routed_N[here_N], expected_T)
            # The map has no scores of tokens that left before.
            score_T = made.of("score")[name][:count]
            np.testing.assert_array_equal(np.isnan(score_T), before_T == 0)
            score_T = np.where(before_T > 0, score_T, block.score_N[here_N])
            np.testing.assert_allclose(block.score_N[here_N], score_T, rtol=1e-4, atol=1e-5)
            assert block.threshold == pytest.approx(0, abs=1e-6)
            before_T = computed_T
    # The second step decides about the tokens of the first alone.
    first, second = list(blocks.values())[:2]
    assert np.isnan(second.routed_N).any()
    np.testing.assert_array_equal(np.isnan(second.routed_N), first.routed_N == 0)


def test_the_selection_of_training_is_the_top_k_of_each_row():
    batch = batch_of(families.tokens(batch=2, length=24, seed=1))
    _, tokens, blocks = measure(families.build("mod"), batch, "train")
    for block in blocks.values():
        for row in range(2):
            scores_T, routed_T = (x[tokens.row_N == row] for x in (block.score_N, block.routed_N))
            assert set(np.flatnonzero(routed_T)) == set(np.argsort(-scores_T)[:12])
        assert block.threshold is None and block.selected_N is None


def test_a_control_selects_by_position_in_the_document():
    """It has choices, and no scores."""
    segments_T = np.repeat([1, 2], [14, 10])
    positions_T = np.concatenate([np.arange(14), np.arange(10)])
    positions_BT, segment_ids_BT = (np.stack([x] * 2) for x in (positions_T, segments_T))
    ids_BT = families.tokens(batch=2, length=24, seed=1)
    batch = batch_of(ids_BT, positions=positions_BT, segment_ids=segment_ids_BT)
    routing = {"kind": "mod", "every": 1, "capacity": 0.5, "train_selection": "position"}
    model = families.make({f"depth_routing.{key}": value for key, value in routing.items()})
    _, tokens, blocks = measure(model, batch)
    np.testing.assert_array_equal(tokens.position_N, np.tile(positions_T, 2))
    assert (tokens.previous_N[[0, 14]] == -1).all()
    for block in blocks.values():
        np.testing.assert_array_equal(block.routed_N, tokens.position_N % 2 == 0)
        assert block.score_N is None and block.threshold is None


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory, root, one_device):
    return study_helpers.train(
        root,
        tmp_path_factory.mktemp("probe") / "run",
        "mod.py:smoke",
        "steps=2",
        "optim.schedule.warmup_steps=1",
        "checkpoint.every=2",
        "evaluate.every=0",
        "sample.every=0",
        "model.width=16",
        "model.depth=2",
        "data.seq_len=32",
        "data.max_bytes=20000",
        "data.eval_fraction=0.2",
    )


@pytest.fixture
def few_counted(monkeypatch):
    monkeypatch.setattr(tokens_lib, "COUNTED", 2000)


@pytest.mark.usefixtures("few_counted")
def test_the_command_probes_a_run(run, capsys):
    assert router_probe.main([f"--workdir={run}", "--tokens=2000"]) == 0
    said = capsys.readouterr().out
    saved = json.loads((run / "router_probe.json").read_text())
    (probe,), (about,) = saved["probes"], saved["runs"]
    assert about["config"] == "configs/mod.py:smoke" and about["step"] == 2
    assert list(probe["blocks"]) == ["block_1"] and 2000 <= probe["tokens"] < 2300
    assert probe["blocks"]["block_1"]["weights"]["threshold"] is not None
    assert (run / "router_probe.md").read_text().strip() in said
    assert (run / "router_probe.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "bad, name",
    [
        (["--out={tmp}/probe.png"], "--out={tmp}/probe.png"),
        (["--workdir", "{run}", "{run}"], "0, 0"),
        (["--step=77", "--tokens=2000"], "77"),
    ],
)
def test_bad_input_is_refused(run, tmp_path, capsys, bad, name):
    bad = [word.format(tmp=tmp_path, run=run) for word in bad]
    runs = [] if "--workdir" in bad else [f"--workdir={run}"]
    assert router_probe.main([*runs, f"--out={tmp_path}/x.json", *bad]) == 2
    error_line(capsys, name.format(tmp=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_runs_that_differ_in_more_than_the_seed_are_refused(monkeypatch):
    config = {"seed": 0, "model": {"depth": 2}, "log": {"every": 1}}
    others = {
        "a": config,
        "b": config | {"seed": 1, "log": {"every": 2}},
        "c": config | {"seed": 2, "model": {"depth": 4}},
    }
    monkeypatch.setattr(router_probe.run_dir, "recorded_config", others.get)
    router_probe.check_seeds(["a", "b"])
    refused(lambda: router_probe.check_seeds(["a", "b", "c"]), "--workdir=c", "config.model.depth")


@pytest.mark.quick
def test_runs_of_other_texts_are_refused(monkeypatch):
    records = iter([{"the text": "1"}, {"the text": "2"}])
    made = text(), {"block_1": analysis.Block(1.0 * (noise(0) < 0.5))}
    monkeypatch.setattr(tokens_lib, "measure", lambda *_: (*made, {"of": next(records)}))
    arguments = types.SimpleNamespace(
        runs=["a", "b"], tokens=2000, selection="causal", step=None, together=False
    )
    refused(lambda: router_probe.probe(arguments), "--workdir=b", "the text")


def test_too_few_tokens_are_refused():
    few = text().at(text().row_N < 6)
    block = {"block_1": analysis.Block(np.ones(len(few.row_N)))}
    refused(lambda: analysis.probe(few, block), "384")
