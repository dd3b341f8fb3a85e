"""The grouped-latent transformer: what it says about itself, its settings."""

import functools
import logging

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import LENGTH
from flax import linen as nn
from latent_helpers import FEW, MEMORY, MOD, apply, make

from efx import build, models
from efx.configs import common, latent
from efx.errors import UsageError
from efx.layers.info import CallInfo, Mode, Tokens
from efx.models.latent import config as latent_config
from efx.models.latent import group_views
from efx.step import by_layer, make_eval_step

# ---- what it says about itself -----------------------------------------------------------------


def test_routed_latents_are_counted_as_the_decoders():
    """Evaluation has a row for each routed block; the ledger takes measured shares of latents."""
    model = make({**MOD, "depth": 3})
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = families.tokens(length=29)
    batch = {"inputs": tokens_BT, "targets": tokens_BT, "weights": jnp.ones(tokens_BT.shape)}
    params = variables.pop("params")
    result = families.jit(make_eval_step(model, common.base()))(params, variables, batch, 0, 0)
    stats = by_layer(result["stats"], model)
    for i in range(3):
        assert 0 <= stats[f"router/decided_fraction/block_{i}"] <= 1
    none, whole = (
        model.ledger(32, shares={path: (share, share) for path in model.blocks()}).nominal
        for share in (0.0, 1.0)
    )
    dense = make({"depth": 3}).ledger(32).nominal
    assert whole["mlp"] == dense["mlp"] and whole["attention_scores"] == dense["attention_scores"]
    assert none["mlp"] == 0 and none["levels"] == whole["levels"] == dense["levels"]


def test_a_perceiver_costs_the_share_of_places_that_it_keeps():
    parts = {
        kind: make({"compression": kind}, levels=1).ledger(24).nominal
        for kind in ("perceiver", "transformer")
    }
    assert parts["perceiver"]["compression"] < parts["transformer"]["compression"]
    assert "compression_scores" not in parts["transformer"]


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"latents": (2, 4)}, r"latents=\(2, 4\): 4 must be less than the 2 of the level before"),
        ({"latents": (8, 4)}, r"8 must be less than config\.model\.group_size=8"),
        ({"latents": (4, 0)}, r"latents=\(4, 0\): must be at least 1"),
        ({"latents": ()}, r"config\.model\.latents=\(\): expected"),
        ({"level_heads": (3, 2)}, r"level_widths=\(8, 12\): 8 is not divisible by its 3 heads"),
        ({"level_heads": ()}, r"level_widths=\(8, 12\): 12 is not divisible by 8"),
        ({"level_heads": (1,)}, r"level_heads=\(1,\): expected 2"),
        ({"level_widths": (8,)}, r"level_widths=\(8,\): expected 2 widths"),
        (
            {"attention.num_heads": 3},
            r"config\.model\.width=16 is not divisible by config\.model\.attention\.num_heads=3",
        ),
        ({"level_widths": (9, 12)}, r"positions='both': rope needs an even head width, not 9 / 1"),
        (
            {"encoder_local": 600},
            r"encoder_local=600: the levels have \d+ blocks in total; use at most",
        ),
        ({"encoder_local": (1,)}, r"encoder_local=\(1,\): expected a number of blocks, or one"),
        ({"memory_local": -1}, r"config\.model\.memory_local=-1: must be at least 0"),
        ({"group_size": 0}, r"config\.model\.group_size=0: must be at least 1"),
        ({"scan_layers": True, "depth": 3, "depth_routing.kind": "recursion"}, r"scan_layers=True"),
        (
            {"soft_experts_in": "encoder"},
            r"soft_experts_in='encoder': .*config\.model\.soft_exp.*num",
        ),
        (
            {
                "dropout.kind": "attention",
                "dropout.sites": ("mlp_output",),
                "dropout.attention.num_heads": 4,
                "level_widths": (8, 18),
                "level_heads": (2, 1),
            },
            r"level_widths=\(8, 18\): 18 is not divisible by .*dropout\.attention\.num_heads=4",
        ),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UsageError, match=message) as error:
        make(changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, packing", [("memory_local", True), ("memory_global", True), ("memory_global", False)]
)
def test_memory_tokens_and_packed_rows_are_refused_before_a_run_begins(tmp_path, name, packing):
    (tmp_path / "text.txt").write_text("a few words of text, " * 999)
    config = common.apply(
        latent.get_config("smoke"),
        {
            f"model.{name}": 2,
            "data.packing": packing,
            "data.source": f"text:{tmp_path}/text.txt",
        },
    )
    if not packing:
        assert build.experiment(config).model.config.memory_global == 2
        return
    with pytest.raises(UsageError, match=rf"config\.model\.{name}=2: .*packed rows") as error:
        build.experiment(config)
    assert "\n" not in str(error.value)


def test_padding_to_whole_groups_is_said_once(caplog):
    latent_config._say_padded.cache_clear()
    with caplog.at_level(logging.WARNING):
        make(context=16)
        assert not caplog.records
        for _ in range(2):
            model = make(context=19)
            models.variable_shapes(model)
    (record,) = caplog.records
    assert "19 tokens is not a multiple of config.model.group_size=8" in record.getMessage()


def test_noise_and_dropout_are_on_in_training_only():
    sites = ("embedding", "attention_probs", "attention_output", "mlp_output")
    noise, dropout = {"embedding_noise": 10.0}, {"dropout.kind": "standard", "dropout.rate": 0.5}

    def made(changes):
        return make({**FEW, **changes}, levels=1)

    params, tokens_BT = families.random_params(made({})), families.tokens(batch=1)
    expected = apply(made({}), params, tokens_BT)
    everything = made({**noise, **dropout, "dropout.sites": sites})
    np.testing.assert_allclose(apply(everything, params, tokens_BT), expected, atol=1e-5)
    for changes in (noise, *({**dropout, "dropout.sites": (site,)} for site in sites)):
        train = families.jit(functools.partial(made(changes).apply, train=True))
        noisy = train({"params": params}, tokens_BT, rngs={"dropout": jax.random.key(0)})
        assert np.abs(np.asarray(noisy) - expected).max() > 0.1, changes


def test_noise_is_as_large_as_it_says():
    """Uniform, within alpha / sqrt(T D); a model that hands its embedding through shows it."""
    model = make({"embedding_noise": 5.0})
    bound = 5.0 / (LENGTH * 8) ** 0.5

    def entered(train):
        def run(model, x):
            views = group_views.views(
                CallInfo(Tokens(jnp.zeros((1, 1), jnp.int32)), Mode(train=train)),
                4,
                model.config.sizes,
                0,
                0,
            )
            return model._enter(x, views[0], LENGTH, jnp.zeros((1, 4, 8), jnp.int32))

        variables, rngs = {"params": families.random_params(model)}, {"dropout": jax.random.key(0)}
        entering = families.jit(functools.partial(model.apply, method=run))
        return np.asarray(entering(variables, np.zeros((2, 4, 8, 8), np.float32), rngs=rngs))

    noise = entered(True) - entered(False)
    assert np.abs(noise).max() <= bound and np.abs(noise).max() > 0.95 * bound
    assert abs(noise.std() - bound / 3**0.5) < 0.1 * bound


def test_recursion_and_experts_come_by_the_decoders_settings():
    model = make(
        {
            "depth": 4,
            "depth_routing.kind": "recursion",
            "depth_routing.capacity": 0.5,
            "mlp.kind": "moe",
            "mlp.moe.every": 2,
        }
    )
    (first, *steps, last) = model.specs()
    assert len(steps) == 2 and first.block.moe is None and last.block.moe is not None
    assert all(level.block.moe is None for level in model.levels(encoder=True))


def test_places_of_the_learned_dropout_are_enough():
    """Masks of attention probabilities have an entry for each place that there may be: of 4 groups
    in the stack and in global blocks, of one group elsewhere."""
    changes = {"dropout.kind": "elementwise", "upsampling": "attention", **MEMORY["both"]}
    model = make(changes, context=30)
    boxed = models.variable_shapes(model)["params"]
    shapes = nn.unbox(boxed)

    def places(block):
        return block["attention"]["probs_dropout"]["mask_phase"].shape[0]

    encoder, decoder = shapes["encoder_0"], shapes["decoder_0"]
    assert places(shapes["layers"]["block_0"]) == 2 + 4 * 2
    assert places(encoder["compress"]) == places(decoder) == 8
    assert places(encoder["blocks"]["local_0"]["block_0"]) == 1 + 4
    assert places(encoder["blocks"]["global_1"]["block_0"]) == 2 + 4 * 4
    assert places(decoder["blocks"]["global_1"]["block_0"]) == 2 + 4 * 8


@pytest.mark.parametrize(
    "where, encoder, decoder", [("stack", 0, 0), ("encoder", 2, 0), ("levels", 2, 2)]
)
def test_soft_experts_are_where_they_are_asked_for(where, encoder, decoder):
    """In all blocks of a level, and in every second one of the stack."""
    soft = {"soft_experts.num": 2, "soft_experts.every": 2, "depth": 2}
    model = make({**soft, "soft_experts_in": where})
    assert [spec.block.soft is not None for spec in model.specs()] == [False, True]
    for side, count in ((True, encoder), (False, decoder)):
        for level in model.levels(encoder=side):
            blocks = level.local_block, level.global_block
            assert sum(block.soft is not None for block in blocks) == count
            assert level.block.soft is None and all(b.hidden == 4 * b.width for b in blocks)
