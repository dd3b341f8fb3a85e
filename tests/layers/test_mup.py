"""muP and initialisations: initial values, learning rates, attention scales, flat activations."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from efx.configs import common
from efx.train import optim

SMALL = {"width": 64, "depth": 1, "init_std": 0.02, "preset": "gpt2", "tied": False}
# One level, half as wide as the stack.
LATENT = {
    "family": "latent", "group_size": 8, "latents": (2,), "level_widths": (32,), "width": 64,
    "depth": 1, "attention.num_heads": 2, "init_std": 0.02, "tied": False,
    "decoder_local": 1, "decoder_global": 0,
}  # fmt: skip
STREAMS = {"family": "encoder_decoder", "width": 64, "depth": 2, "init_std": 0.02}
MODE = {
    "mlp.kind": "moe",
    "mlp.moe.num_experts": 4,
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.extra_decisions": ("predictor",),
}
ADAPTERS = {
    "adapter.kind": "lora",
    "adapter.experts": ("a", "b"),
    "adapter.sites": ".*/(query|down)",
    "adapter.routing": "inclusion",
}


def initial(changes):
    """{path: initial value}"""
    params = families.initial(families.make(changes, vocab_size=500))["params"]
    return {path: np.asarray(leaf) for path, leaf in optim.param_paths(params).items()}


# ---- the base width ----------------------------------------------------------------------------


def trained(changes, steps=5):
    """Parameters after some steps of AdamW."""
    model = families.make(changes)
    params, config, loss_fn = (
        families.initial(model)["params"],
        common.base(),
        families.loss_fn(model),
    )
    common.apply(config, {"optim.learning_rate": 1e-2, "optim.schedule.warmup_steps": 0})
    optimizer, _ = optim.make_optimizer(config.optim, 10, params, model.config.mup_ratio)

    @families.jit
    def train(params, batches_NBT):
        def step(carry, tokens_BT):
            params, state = carry
            grads = jax.grad(loss_fn)(params, tokens_BT)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), batches_NBT)[0][0]

    return train(params, np.stack([families.tokens(seed, batch=2) for seed in range(steps)]))


@pytest.mark.parametrize(
    "changes", [SMALL, SMALL | MODE, LATENT], ids=["decoder", "mod_experts", "latent"]
)
def test_updates_at_the_base_width_equal_those_without_mup(changes):
    base, plain = trained(changes | {"mup.base_width": 64}), trained(changes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), base, plain)


# ---- initial values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, table, hidden, head",
    [
        ({}, 0.02, 0.02, 0.02),
        ({"initialisation": "spike_no_more"}, (2 / 320) ** 0.5, (2 / 320) ** 0.5, (2 / 320) ** 0.5),
        ({"mup.base_width": 16}, 0.02, 0.01, 0.02),
        (
            {"mup.base_width": 16, "mup.zero_head": True, "initialisation": "spike_no_more"},
            *((2 / 80) ** 0.5, (2 / 320) ** 0.5, 0.0),
        ),
    ],
)
def test_initial_standard_deviations(changes, table, hidden, head):
    for path, value in initial({**SMALL, **changes}).items():
        expected = {"embedding": table, "kernel": hidden}.get(path.split("/")[-1])
        if expected is None:
            continue
        if "head/" in path:
            expected = head
        elif "/out/" in path or "/down/" in path:
            expected = hidden / 2**0.5  # sqrt(2 * 1 block)
        assert value.std() == pytest.approx(expected, rel=0.06), path


def test_initial_standard_deviations_of_latent_levels():
    """All levels start from init_std * sqrt(base_width / width); first latents start like
    embeddings."""
    values = initial(LATENT | {"mup.base_width": 16})
    (first,) = (value for path, value in values.items() if path.endswith("first"))
    assert first.std() == pytest.approx(0.02, rel=0.2)
    queries = [value for path, value in values.items() if path.endswith("/query/kernel")]
    assert {value.shape for value in queries} >= {(32, 32), (64, 64)}  # of both levels
    for value in queries:
        assert value.std() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            MODE,
            {
                "block_0/router": 0.02 / 4,
                "mlp/router": 0.02 / 4,
                "kernel_in": 64**-0.5,
                "kernel_out": 32**-0.5 / 2,
            },
        ),
        (ADAPTERS, {"query/adapter/entrance": 0.02 / 4, "mlp/down/adapter/entrance": 0.02 / 4}),
    ],
)
def test_routers_start_smaller_the_wider_the_model(changes, expected):
    """Base width 16, width 64: otherwise scores grow with the width."""
    params = initial({**SMALL, **changes, "mup.base_width": 16})
    for end, std in expected.items():
        found = [value.ravel() for path, value in params.items() if path.endswith(end)]
        assert np.concatenate(found).std() == pytest.approx(std, rel=0.25), end


# ---- learning rates ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        SMALL | MODE | {"depth": 2, "scan_layers": True},
        SMALL | ADAPTERS,
        SMALL | {"adapter.kind": "lora", "adapter.gate": True, "soft_experts.num": 2},
        SMALL | {"dropout.kind": "attention", "dropout.attention.input": "embedding"}
        | {"dropout.sites": ("mlp_output",), "dense_former.on": True},
        LATENT | {"upsampling": "attention", "latent_loss.kind": "cosine"},
        STREAMS,
    ],
    ids=["mod_experts", "adapters", "gate_soft_experts", "masks", "latent", "streams"],
)  # fmt: skip
def test_learning_rates_scale_with_the_fan_in(changes):
    """The factor is the fan-in at the base width over the fan-in, for all parameters but the output
    layer, whose logits muP scales instead."""
    model = families.make(changes | {"mup.base_width": 16})
    at_base = {"width": 16} | ({"level_widths": (8,)} if "level_widths" in changes else {})
    shapes, base_shapes = (
        families.variable_shapes(each)["params"]
        for each in (model, families.make(changes | at_base))
    )
    groups = optim.parameter_groups(common.base().optim, shapes, model.config.mup_ratio)
    base_shapes, found = optim.param_paths(base_shapes), set()
    for path, leaf in optim.param_paths(shapes).items():
        name, factor = path.split("/")[-1], 1.0
        is_gate = name in ("gate", "entrance") or (name == "router" and "mlp" not in path)
        if path != "head/kernel" and (is_gate or leaf.ndim > 1):
            axis = -1 if is_gate else -2
            factor = base_shapes[path].shape[axis] / leaf.shape[axis]
        assert groups[path].mup == factor, path
        found.add(factor)
    assert found == {1.0, 0.25}


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_updates_by_learning_rate_and_weight_decay(name):
    """Of gradients of 1: matrices move by the rate of muP; weight decay keeps its strength."""
    model = families.make(SMALL | {"mup.base_width": 16})
    config = common.base()
    changes = {
        "optim.name": name, "optim.weight_decay": 0.4, "optim.schedule.warmup_steps": 0,
        "optim.schedule.kind": "constant", "optim.clip_norm": 0.0, "optim.learning_rate": 0.1,
    }  # fmt: skip
    common.apply(config, changes)
    shapes = families.variable_shapes(model)["params"]
    optimizer, _ = optim.make_optimizer(config.optim, 10, shapes, model.config.mup_ratio)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.25, np.float32), shapes)

    @jax.jit
    def first_update(params):
        ones = jax.tree.map(jnp.ones_like, params)
        return optimizer.update(ones, optimizer.init(params), params)[0]

    for path, update in optim.param_paths(first_update(params)).items():
        hidden = path.endswith("kernel") and path != "head/kernel"
        decay = 0.25 * 0.4 if path.endswith(("kernel", "embedding")) else 0.0
        expected = (0.25 if hidden else 1.0) + decay
        assert -float(update.mean()) / 0.1 == pytest.approx(expected, rel=1e-3), path


# ---- attention and logits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, score_factor",
    [
        (SMALL, 0.5),
        (SMALL | {"logit_softcap": 3.0}, 0.5),
        (SMALL | {"attention.head_dim": 16}, 1.0),
        (STREAMS, 0.5),
        (LATENT, 0.5),
    ],
    ids=["decoder", "softcap", "stated_head_dim", "streams", "latent"],
)
def test_factors_on_scores_and_logits(changes, score_factor):
    """A quarter of the width: scores are q k sqrt(H / 4) / H, logits a quarter."""
    mup = families.make(changes | {"mup.base_width": 16})
    plain = changes | {"attention.score_factor": score_factor, "logit_softcap": 0.0}
    params, plain = families.random_params(mup), families.make(plain)

    @families.jit
    def logits(params):
        return [m.apply({"params": params}, families.tokens(batch=1)) for m in (mup, plain)]

    scaled_BTV, plain_BTV = logits(params)
    cap, expected_BTV = changes.get("logit_softcap"), plain_BTV / 4
    if cap:
        expected_BTV = cap * np.tanh(expected_BTV / cap)
    np.testing.assert_allclose(scaled_BTV, expected_BTV, atol=1e-5)


# ---- coordinate check --------------------------------------------------------------------------

STUDIES = {  # learning rate, changes of the model, measured modules
    "mode": (
        1e-2,
        "attention.num_heads=2 mlp.moe.num_experts=2 depth_routing.every=1"
        " depth_routing.causal_decision=predictor",
        "layers/block_0 layers/block_0/mlp/router_logits layers/block_0/predictor/logits"
        " layers/block_0/router_logits logits",
    ),
    # One level, a quarter as wide as the stack.
    "latent": (
        4e-3,
        "latents=(2,) level_widths=(16,) encoder_global=0 decoder_local=0 decoder_global=0",
        "decoder_0/upsample encoder_0/blocks/local_0/block_0 encoder_0/compress layers/block_0"
        " logits",
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("study", STUDIES)
def test_activations_are_flat_with_mup_and_grow_without(root, tmp_path, capsys, study):
    pytest.importorskip("pandas", reason="the extra `studies` is not installed")
    from efx.studies import coord_check

    rate, settings, modules = STUDIES[study]
    argv = [f"--config={root}/configs/{study}.py:smoke", f"--learning-rate={rate}"]
    argv += ["--widths=32,128", f"--out={tmp_path}", "--", "--config.model.depth=1"]
    argv += [f"--config.model.{setting}" for setting in settings.split()]
    assert coord_check.main(argv) == 0
    text = (tmp_path / "coord_check.md").read_text()
    assert text.strip() in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == modules.split()
    for module, *cells in rows:
        mup, standard = float(cells[-2]), float(cells[-1])
        assert 0.35 < mup < 1.05 < standard, module
    assert (tmp_path / "coord_check.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "config, widths, name",
    [
        ("latent:smoke", "32", "--widths"),
        ("calm:bridge", "32,64", "config.model.mup"),
        ("latent:smoke", "32,33", "--widths: at 33"),
    ],
)
def test_bad_arguments_are_refused(root, tmp_path, monkeypatch, capsys, config, widths, name):
    pytest.importorskip("pandas", reason="the extra `studies` is not installed")
    from efx.studies import coord_check

    monkeypatch.chdir(root)
    argv = [f"--config={config}", f"--widths={widths}", f"--out={tmp_path}"]
    assert coord_check.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("efx: error: ") and name in error and error.count("\n") == 1
