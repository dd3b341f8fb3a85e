"""muP and initialisations: initial values, learning rates, and flat activations."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efx import models, optim
from efx.configs import common
from efx.layers.mup import rate_factor
from efx.studies import coord_check

SMALL = {"width": 64, "depth": 1, "init_std": 0.02, "mlp.hidden": 256, "preset": "gpt2"}


def initial(changes):
    """{path: initial values}"""
    params = families.initial(families.make({**SMALL, **changes}, vocab_size=500))["params"]
    return {path: np.asarray(leaf) for path, leaf in optim.param_paths(params).items()}


@pytest.mark.parametrize(
    "changes, table, hidden, head",
    [
        ({}, 0.02, 0.02, 0.02),
        ({"initialisation": "spike_no_more"}, (2 / 320) ** 0.5, (2 / 320) ** 0.5, (2 / 320) ** 0.5),
        ({"mup.base_width": 16}, 0.02, 0.01, 0.0),
        (
            {"mup.base_width": 16, "mup.zero_head": False, "initialisation": "spike_no_more"},
            *((2 / 80) ** 0.5, (2 / 320) ** 0.5, (2 / 80) ** 0.5),
        ),
    ],
)
def test_initial_standard_deviations(changes, table, hidden, head):
    for path, value in initial({**changes, "tied": False}).items():
        expected = {"embedding": table, "kernel": hidden}.get(path.split("/")[-1])
        if expected is None:
            continue
        if "head/" in path:
            expected = head
        elif "/out/" in path or "/down/" in path:
            expected = hidden / 2**0.5  # sqrt(2 * 1 block)
        assert value.std() == pytest.approx(expected, rel=0.06), path


def test_at_its_base_width_mup_can_change_nothing():
    """With the scale of attention and the start of the output layer as without muP. At other widths
    the logits are divided by width / base width."""
    plain, base, wide, capped = (
        families.make(
            {**SMALL, "tied": False, "mup.attention": "sqrt", "mup.zero_head": False}
            | {"mup.base_width": width, "logit_softcap": softcap}
        )
        for width, softcap in ((0, 0.0), (64, 0.0), (16, 0.0), (16, 3.0))
    )
    drawn = [families.initial(model)["params"] for model in (plain, base)]
    jax.tree.map(np.testing.assert_array_equal, *drawn)

    @families.jit
    def logits(params):
        tokens_BT = families.tokens(batch=2)
        return [model.apply({"params": params}, tokens_BT) for model in (plain, base, wide, capped)]

    plain_BTV, base_BTV, wide_BTV, capped_BTV = map(np.asarray, logits(drawn[0]))
    np.testing.assert_array_equal(plain_BTV, base_BTV)
    np.testing.assert_allclose(wide_BTV, plain_BTV / 4, atol=1e-6)
    np.testing.assert_allclose(capped_BTV, 3 * np.tanh(plain_BTV / 4 / 3), atol=1e-5)


def test_both_streams_of_an_encoder_decoder_follow_the_width():
    """Initial values, learning rates and logits, of cross-attention and of the decoder's start."""
    routed = {"depth_routing.kind": "mod", "depth_routing.every": 1}
    small = {key: value for key, value in SMALL.items() if key != "preset"} | routed
    small |= {"family": "encoder_decoder", "depth": 2, "encoder_depth": 2}
    mup = families.make({**small, "mup.base_width": 16}, vocab_size=500)
    shapes = families.initial(mup)["params"]
    groups = optim.parameter_groups(common.base().optim, shapes, 16)
    for path, value in optim.param_paths(shapes).items():
        place, leaf = path.rsplit("/", 1)
        if leaf in ("scale", "bias"):
            continue
        expected = {"embedding": 0.02, "kernel": 0.01, "router": 0.02 / 4}[leaf]
        if place.endswith(("/out", "/down")):
            expected /= (2 * 2 if "encoder" in path else 3 * 2) ** 0.5
        assert np.std(value) == pytest.approx(expected, rel=0.25 if leaf == "router" else 0.06), (
            path
        )
        fan_in = {"embedding": 16, "router": 64, "kernel": value.shape[0]}[leaf]
        assert groups[path].mup == 16 / fan_in, path
    params = families.random_params(mup)
    plain = families.make({**small, "attention.scale": "mup"}, vocab_size=500)

    @families.jit
    def logits(params):
        return [m.apply({"params": params}, families.tokens(batch=1)) for m in (mup, plain)]

    scaled_BTV, plain_BTV = logits(params)
    np.testing.assert_allclose(scaled_BTV, plain_BTV / 4.0, atol=1e-5)


def test_learned_vectors_of_the_latent_family_start_as_embeddings():
    """Memory tokens and the first group's latents enter blocks as embeddings of tokens do: they
    keep their size at every width, while hidden matrices shrink."""
    changes = {
        "family": "latent", "group_size": 8, "latents": (4, 2), "level_widths": (32, 64),
        "width": 128, "depth": 1, "attention.num_heads": 4, "level_heads": (4, 4),
        "memory_local": 8, "memory_global": 8, "init_std": 0.02, "mup.base_width": 8,
    }  # fmt: skip
    params = optim.param_paths(families.initial(families.make(changes))["params"])
    learned = [path for path in params if path.endswith(("_local", "_global", "first"))]
    # Of two levels, twice, local and global memory; first latents of the decoder's; the stack's.
    assert len(learned) == 2 * (2 + 2) + 2 + 1
    for path in learned:
        assert np.std(params[path]) == pytest.approx(0.02, rel=0.2), path
    square = [path for path in params if path.endswith("/query/kernel")]
    square = [path for path in square if len(set(params[path].shape)) == 1]
    assert {params[path].shape[0] for path in square} == {32, 64, 128}
    for path in square:
        expected = 0.02 * (8 / params[path].shape[0]) ** 0.5
        assert np.std(params[path]) == pytest.approx(expected, rel=0.1), path


def updates(changes, base, value=0.25):
    """{path: update of the first step, divided by the rate} of gradients of 1."""
    model = families.make({**SMALL, "mup.base_width": base, "tied": False})
    config = common.base()
    common.apply(
        config,
        {
            "optim.schedule.warmup_steps": 0,
            "optim.schedule.kind": "constant",
            "optim.clip_norm": 0.0,
            "optim.learning_rate": 0.1,
            **changes,
        },
    )
    shapes = models.unboxed_shapes(model)["params"]
    optimizer, _ = optim.make_optimizer(config.optim, 10, shapes, model.config.mup.base_width)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), shapes)

    @jax.jit
    def first(params):
        ones = jax.tree.map(jnp.ones_like, params)
        return optimizer.update(ones, optimizer.init(params), params)[0]

    result = first(params)
    return {path: -float(leaf.mean()) / 0.1 for path, leaf in optim.param_paths(result).items()}


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_hidden_matrices_learn_by_their_fan_in(name):
    """lr * base / fan_in of the direction; weight decay keeps its strength."""
    plain, mup = (
        updates({"optim.name": name, "optim.weight_decay": 0.4}, base) for base in (0, 16)
    )
    assert plain.keys() == mup.keys()
    for path, update in mup.items():
        kernel = path.endswith("kernel") and "head" not in path
        factor = 16 / (256 if "down" in path else 64) if kernel else 1.0
        decayed = 0.25 * 0.4 if path.endswith(("kernel", "embedding")) else 0.0
        assert update == pytest.approx(factor * 1.0 + decayed, rel=1e-3), path
        assert plain[path] == pytest.approx(1.0 + decayed, rel=1e-3), path


def test_hidden_matrices_by_path():
    assert rate_factor("layers/block_0/mlp/experts/up/kernel", (8, 64, 256), 16) == 1 / 4
    assert rate_factor("layers/units/block_0/mlp/down/kernel", (3, 256, 64), 16) == 1 / 16
    assert (
        rate_factor("layers/block_0/dropout_mlp_output/attention/mask_query", (64, 64), 16) == 1 / 4
    )
    assert rate_factor("mask_input/mask_linear", (64, 64), 16) == 1 / 4
    for path in (
        "head/kernel",
        "embed/embedding",
        "layers/block_0/adapter/up",
        "norm_final/scale",
        "layers/block_0/dropout_mlp_output/mask_shift",
    ):
        assert rate_factor(path, (64, 64), 16) == 1.0
    assert rate_factor("layers/block_0/mlp/up/kernel", (64, 256), 0) == 1.0


# ---- routers and gates -------------------------------------------------------------------------

ROUTED = {
    "mlp.kind": "moe",
    "mlp.moe.num_experts": 4,
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.also_train": ("predictor",),
}
EXPERTS = {
    "adapter.kind": "lora",
    "adapter.experts": ("a", "b"),
    "adapter.sites": ".*/(query|down)",
}


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            ROUTED,
            {
                "block_0/router": 0.02 / 4,
                "mlp/router": 0.02 / 4,
                "kernel_in": 64**-0.5,
                "kernel_out": 32**-0.5 / 2,
            },
        ),
        (
            ROUTED | {"depth_routing.predictor_hidden": 24},
            {"kernel_in": 64**-0.5 / 2, "kernel_out": 24**-0.5},
        ),
        (
            EXPERTS | {"adapter.routing": "inclusion"},
            {"query/adapter/entrance": 0.02 / 4, "mlp/down/adapter/entrance": 0.02 / 16},
        ),
    ],
)
def test_routers_start_smaller_the_wider_the_model(changes, expected):
    """Base width 16, width 64: otherwise scores grow with the width."""
    params = initial({**changes, "mup.base_width": 16})
    for end, std in expected.items():
        found = [value.ravel() for path, value in params.items() if path.endswith(end)]
        assert np.concatenate(found).std() == pytest.approx(std, rel=0.25), end


@pytest.mark.parametrize(
    "scan, changes, expected",
    [
        (False, ROUTED, {"/router": 16 / 64, "kernel_in": 16 / 64, "kernel_out": 16 / 32}),
        (True, ROUTED, {"/router": 16 / 64, "kernel_in": 16 / 64, "kernel_out": 16 / 32}),
        (
            True,
            EXPERTS | {"adapter.routing": "inclusion"},
            {
                "mlp/down/adapter/entrance": 16 / 256,
                "query/adapter/entrance": 16 / 64,
                "query/adapter/down": 16 / 64,
                "adapter/up": 1.0,
                "adapter/entrance_bias": 1.0,
            },
        ),
        (False, EXPERTS | {"adapter.routing": "topk"}, {"query/adapter/gate": 16 / 64}),
        (False, {"adapter.kind": "lora", "adapter.gate": True}, {"down/adapter/gate": 16 / 256}),
    ],
)
def test_routers_learn_by_their_fan_in(scan, changes, expected):
    """As matrices of hidden layers do."""
    model = families.make(
        {**SMALL, **changes, "depth": 2, "mup.base_width": 16, "scan_layers": scan}
    )
    shapes = models.unboxed_shapes(model)["params"]
    groups = optim.parameter_groups(common.base().optim, shapes, 16)
    for end, factor in expected.items():
        found = [group.mup for path, group in groups.items() if path.endswith(end)]
        assert found and set(found) == {factor}, end


# ---- coordinate check --------------------------------------------------------------------------


STUDIES = {  # config, learning rate, changes of the model, measured layers
    "gpt2": ("gpt2", 1e-2, ("attention.num_heads=2",), ["layers/block_0", "logits"]),
    # One level, a quarter as wide as the stack.
    "latent": (
        "latent",
        4e-3,
        ("latents=(2,)", "level_widths=(16,)")
        + ("encoder_global=0", "decoder_local=0", "decoder_global=0"),
        ["decoder_0/upsample", "encoder_0/blocks/local_0/block_0", "encoder_0/compress"]
        + ["layers/block_0", "logits"],
    ),
    "encoder_decoder": (
        "encoder_decoder",
        1e-2,
        ("attention.num_heads=2", "cross_source=same_layer"),
        ["layers/block_0/decoder", "layers/block_0/encoder_0", "logits"],
    ),
}


def arguments(root, study="gpt2", **changes):
    config, rate, sets, _ = STUDIES[study]
    given = {
        "config": root / f"configs/{config}.py:smoke",
        "learning-rate": rate,
        "widths": "32,128",
        "steps": "4",
        "context": "16",
        "batch": "8",
        "vocab": "32",
        **changes,
    }
    return [
        *(f"--{key}={value}" for key, value in given.items()),
        *(f"--set=model.{text}" for text in ("depth=1", *sets)),
    ]


@pytest.mark.slow
def test_the_coordinate_check_measures_routers(root):
    sets = (
        "depth=1", "attention.num_heads=1", "mlp.moe.num_experts=2", "mlp.moe.expert_hidden=8",
        "depth_routing.every=1", "depth_routing.causal=predictor",
    )  # fmt: skip
    flags = ["--widths=16,32", "--steps=1", "--context=8", "--vocab=16"]
    flags += ["--config", str(root / "configs/mode.py:smoke")]
    args = coord_check._parser().parse_args([*flags, *(f"--set=model.{text}" for text in sets)])
    found = coord_check.activations(coord_check._config(args, 16, 16), args)
    assert sorted(found) == [
        "layers/block_0",
        "layers/block_0/mlp/router_logits",
        "layers/block_0/predictor_logits",
        "layers/block_0/router_logits",
        "logits",
    ]
    assert all(value > 0 for value in found.values())


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("study", STUDIES)
def test_activations_are_flat_with_mup_and_grow_without(root, tmp_path, capsys, study):
    argv = [*arguments(root, study), "--out", str(tmp_path)]
    assert coord_check.main(argv) == 0
    text = (tmp_path / "coord_check.md").read_text()
    assert text.strip() in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == STUDIES[study][-1]
    for place, *cells in rows:
        mup, standard = float(cells[-2]), float(cells[-1])
        assert 0.5 < mup < 1.5, place
        assert standard > 2.0, place
    assert (tmp_path / "coord_check.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"widths": "32"}, "--widths"),
        ({"config": "configs/calm.py:bridge"}, "config.model.mup"),
        ({"config": "configs/latent.py:smoke", "widths": "32,33"}, "config.model.level_widths"),
    ],
)
def test_bad_arguments_are_refused(root, tmp_path, monkeypatch, capsys, changes, name):
    monkeypatch.chdir(root)
    assert coord_check.main([*arguments(root, **changes), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("efx: error: ") and name in error and error.count("\n") == 1
