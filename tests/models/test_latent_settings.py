"""The grouped-latent transformer: settings, costs, noise and the parts of its levels."""

import families
import jax
import numpy as np
import pytest
from families import LENGTH
from latent_helpers import MEMORY, MOD, NONE, make
from refusals import refused

from efx import build, models
from efx.configs import common, latent


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"latents": (2, 4)}, "config.model.latents=(2, 4)"),
        ({"latents": (8, 4)}, "config.model.group_size=8"),
        ({"latents": ()}, "config.model.latents=()"),
        ({"level_heads": (3, 2)}, "config.model.level_widths=(8, 12)"),
        ({"level_heads": ()}, "config.model.level_widths=(8, 12)"),
        ({"level_heads": (1,)}, "config.model.level_heads=(1,)"),
        ({"level_widths": (8,)}, "config.model.level_widths=(8,)"),
        ({"attention.num_heads": 3}, "config.model.attention.num_heads=3"),
        ({"level_widths": (9, 12)}, "9 / 1"),  # an odd head width under rotary positions
        ({"encoder_local": 600}, "config.model.encoder_local=600"),
        ({"encoder_local": (1,)}, "config.model.encoder_local=(1,)"),
        ({"soft_experts_in": "encoder"}, "config.model.soft_experts_in='encoder'"),
        (
            {
                "dropout.kind": "attention",
                "dropout.sites": ("mlp_output",),
                "dropout.attention.num_heads": 4,
                "level_widths": (8, 18),
                "level_heads": (2, 1),
            },
            "config.model.level_widths=(8, 18)",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: make(changes), name)


def test_memory_tokens_and_packed_rows_are_refused_together(tmp_path):
    (tmp_path / "text.txt").write_text("a few words of text, " * 999)

    def experiment(name, packing):
        changes = {f"model.{name}": 2, "data.packing": packing}
        changes["data.source"] = f"text:{tmp_path}/text.txt"
        return build.experiment(common.apply(latent.get_config("smoke"), changes))

    for name in ("memory_local", "memory_global"):
        refused(lambda name=name: experiment(name, True), f"config.model.{name}=2")
    assert experiment("memory_global", False).model.config.memory_global == 2


def test_realised_flops_follow_the_share_of_routed_latents():
    model = make({**MOD, "depth": 3})
    none, whole = (
        model.ledger(32, shares={path: (share, share) for path in model.blocks()}).nominal
        for share in (0.0, 1.0)
    )
    dense = make({"depth": 3}).ledger(32).nominal
    assert whole["mlp"] == dense["mlp"] and whole["attention_scores"] == dense["attention_scores"]
    assert none["mlp"] == 0 and none["levels"] == whole["levels"] == dense["levels"]


def test_dropout_is_on_in_training_only():
    """At each site alone."""
    tokens_BT = families.tokens(batch=1, length=8)

    def dropping(*sites):
        dropout = {"dropout.kind": "standard", "dropout.rate": 0.5, "dropout.sites": sites}
        return make({**NONE, "encoder_local": 1, **(dropout if sites else {})}, levels=1)

    @families.jit
    def run(params, key):
        variables = {"params": params}
        noisy = [
            dropping(site).apply(variables, tokens_BT, train=True, rngs={"dropout": key})
            for site in families.ALL_SITES
        ]
        off = dropping(*families.ALL_SITES).apply(variables, tokens_BT)
        return dropping().apply(variables, tokens_BT), off, noisy

    params = families.random_params(dropping())
    plain, off, noisy = jax.device_get(run(params, jax.random.key(0)))
    np.testing.assert_allclose(off, plain, atol=1e-5)
    for site, logits in zip(families.ALL_SITES, noisy, strict=True):
        assert np.abs(logits - plain).max() > 0.1, site


def test_embedding_noise_is_uniform_in_training_only():
    """Within alpha / sqrt(T D). Compression that begins with the identity shows its input."""
    changes = {"compression": "transformer", **NONE}
    plain = make(changes, levels=1)
    model = make({**changes, "embedding_noise": 5.0}, levels=1)
    params = jax.device_get(families.random_params(model))
    params["encoder_0"]["compress"]["residual"]["kernel"] = np.eye(8, 16, dtype=np.float32)

    @families.jit
    def run(key):
        def entered(model, train):
            _, sown = model.apply(
                {"params": params},
                families.tokens(batch=4),
                train=train,
                rngs={"dropout": key},
                capture_intermediates=lambda module, _: module.name == "residual",
                mutable=["intermediates"],
            )
            compress = sown["intermediates"]["encoder_0"]["compress"]
            return compress["residual"]["__call__"][-1][..., :8]

        return entered(model, True), entered(model, False), entered(plain, True)

    noisy, off, expected = jax.device_get(run(jax.random.key(0)))
    np.testing.assert_array_equal(off, expected)
    noise, bound = noisy - expected, 5.0 / (LENGTH * 8) ** 0.5
    assert 0.95 * bound < np.abs(noise).max() <= bound * (1 + 1e-5)
    assert abs(noise.std() - bound / 3**0.5) < 0.1 * bound


def shapes_of(changes, **options):
    """{path: shape} of the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(
        models.unboxed_shapes(make(changes, **options))["params"]
    )
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


def test_recursion_and_experts_are_those_of_the_latent_stack():
    changes = {"depth": 4, "depth_routing.kind": "recursion", "depth_routing.capacity": 0.5}
    paths = shapes_of({**changes, "mlp.kind": "moe", "mlp.moe.every": 2})
    assert "layers/recursion_1/router" in paths
    experts = {path.split("/mlp/")[0] for path in paths if "/experts/" in path}
    assert experts == {"layers/block_1", "layers/block_3"}


def test_masks_of_attention_probabilities_have_an_entry_for_each_place():
    """4 groups of 2 latents in the stack, all places in global blocks, one group elsewhere."""
    changes = {"dropout.kind": "elementwise", "upsampling": "attention", **MEMORY["both"]}
    shapes = shapes_of(changes, context=30)
    for block, places in (
        ("layers/block_0", 2 + 4 * 2),
        ("encoder_0/compress", 8),
        ("decoder_0", 8),
        ("encoder_0/blocks/local_0/block_0", 1 + 4),
        ("encoder_0/blocks/global_1/block_0", 2 + 4 * 4),
        ("decoder_0/blocks/global_1/block_0", 2 + 4 * 8),
    ):
        assert shapes[f"{block}/attention/probs_dropout/mask_phase"][0] == places, block


@pytest.mark.parametrize(
    "where, scopes",
    [("stack", set()), ("encoder", {"encoder_0", "encoder_1"}),
     ("levels", {"encoder_0", "encoder_1", "decoder_0", "decoder_1"})],
)  # fmt: skip
def test_soft_experts_are_in_the_chosen_blocks(where, scopes):
    """In all blocks of a level, and in every second one of the stack."""
    soft = {"soft_experts.num": 2, "soft_experts.every": 2, "depth": 2}
    paths = shapes_of({**soft, "soft_experts_in": where})
    blocks = {path.split("/mlp/")[0] for path in paths if "/mlp/" in path}
    having = {path.split("/mlp/")[0] for path in paths if "/mlp/experts/" in path}
    inside = {path for path in blocks if "/blocks/" in path and path.split("/")[0] in scopes}
    assert having == inside | {"layers/block_1"}
