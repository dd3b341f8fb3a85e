"""The picture of what a model decides for each token: its numbers are the masks and routes."""

import csv

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx import main, models
from efx.errors import UsageError
from efx.layers.stack import scan_params
from efx.studies import token_map

MASKS = {"dropout.kind": "attention", "dropout.sites": families.NO_PROBS}


def rows_of(changes, length=20):
    model = families.make({"depth": 2, **changes})
    params = families.random_params(model)
    ids = families.tokens(batch=1, length=length)[0]
    return token_map.token_map(model, {"params": params, **families.random_state(model)}, ids), (
        model,
        params,
        ids,
    )


def test_rows_are_the_masks():
    rows, (model, params, ids) = rows_of(MASKS)
    assert list(rows) == ["embedding"] + [
        f"block_{i} {site}_output" for i in range(2) for site in ("attention", "mlp")
    ]
    _, state = model.apply(
        {"params": params},
        ids[None],
        mutable=["intermediates"],
        capture_intermediates=lambda module, method: method == "mask",
    )
    mask = state["intermediates"]["layers"]["block_1"]["dropout_mlp_output"]["mask"][0]
    np.testing.assert_allclose(rows["block_1 mlp_output"], np.mean(mask[0], axis=-1), atol=1e-6)
    assert 0.05 < rows["block_1 mlp_output"].mean() < 0.95


def test_rows_of_probabilities_count_allowed_pairs():
    rows, _ = rows_of({"dropout.kind": "elementwise"})
    for i in range(2):
        row = rows[f"block_{i} probs_dropout"]
        assert row.shape == (20,) and 0 <= row.min() <= row.max() <= 1


def test_rows_are_the_routes():
    rows, (model, params, ids) = rows_of(
        {"depth_routing.kind": "mod", "depth_routing.capacity": 0.5, **MASKS}
    )
    # Masks inside the routed block have no place for tokens that it skips.
    assert [name for name in rows if name.startswith("block_1")] == ["block_1 routed"]
    state = model.apply(
        {"params": params},
        ids[None],
        mutable=["intermediates"],
        capture_intermediates=lambda m, _: m.name == "block_0",
    )[1]
    x_TD = state["intermediates"]["layers"]["block_0"]["__call__"][0][0]
    wanted_T = np.asarray(x_TD @ params["layers"]["block_1"]["router"]) > 0
    np.testing.assert_array_equal(rows["block_1 routed"], wanted_T)


def test_rows_of_two_streams():
    """Blocks by themselves, also the one after the stack; those that are routed have no masks."""
    sites = {**MASKS, "dropout.sites": ("embedding", "mlp_output")}
    changes = {"family": "encoder_decoder", "mlp.hidden": 48, **sites}
    rows, _ = rows_of(changes)
    masked = ("block_0 decoder", "block_0 encoder_0", "last block_0 decoder")
    assert list(rows) == ["embedding", *(f"{name} mlp_output" for name in masked)]
    routing = {"depth_routing.kind": "mod", "depth_routing.blocks": (0, 2)}
    rows, _ = rows_of({**changes, **routing})
    assert list(rows) == [
        "embedding",
        "block_0 decoder mlp_output",
        "block_0 encoder_0 routed",
        "last block_0 decoder routed",
    ]
    assert all(set(row) <= {0.0, 1.0} for name, row in rows.items() if name.endswith("routed"))


def test_scanned_layers_are_named_as_unrolled_ones():
    rows, (model, params, ids) = rows_of(MASKS)
    stacked = {**params, "layers": scan_params(params["layers"], model.specs())}
    scanned = token_map.token_map(models.changed(model, scan_layers=True), {"params": stacked}, ids)
    assert list(scanned) == list(rows)
    jax.tree.map(np.testing.assert_array_equal, scanned, rows)


def test_a_model_that_decides_nothing():
    with pytest.raises(UsageError, match="decides nothing token by token"):
        rows_of({})


def test_command(tmp_path, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    run = tmp_path / "run"
    main.run(
        [
            "x",
            "--config=configs/learned_dropout.py:smoke,skip",
            f"--workdir={run}",
            "--config.steps=6",
            "--config.sample.every=0",
            "--config.model.width=16",
            "--config.model.depth=2",
            "--config.data.max_bytes=20000",
        ]
    )
    capsys.readouterr()
    text = "def f(x):\n    return x$"
    assert token_map.main(["--workdir", str(run), "--text", text]) == 0
    assert "token_map.png" in capsys.readouterr().out
    assert (run / "token_map.png").read_bytes()[:4] == b"\x89PNG"
    with open(run / "token_map.csv", newline="") as file:
        table = list(csv.reader(file))
    assert table[0][0] == "token" and "".join(row[0] for row in table[1:]) == text
    assert token_map.main(["--workdir", str(run)]) == 0
    for bad, message in (
        (["--text", ""], "--text: 0 tokens"),
        (["--text", "x" * 100], "100 tokens; the model takes 1 to 64"),
        (["--out", str(tmp_path / "no" / "x.png")], f"there is no folder {tmp_path / 'no'}"),
        (["--out", str(tmp_path)], f"--out={tmp_path} is a folder; give a file in it"),
        (["--out", str(tmp_path / "map")], f"e.g. {tmp_path / 'map.png'}; there are "),
        (["--out", str(tmp_path / "map.csv")], f"e.g. {tmp_path / 'map.png'}; there are "),
        (["--step", "77"], "77"),
    ):
        assert token_map.main(["--workdir", str(run), *bad]) == 2
        assert message in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert jnp.isfinite(jnp.float32([float(x) for x in table[1][1:]])).all()
