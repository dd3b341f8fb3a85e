"""FLOPs, nominal and executed: against hand counts and the compiler; published sizes."""

import itertools
import math
import re
from types import SimpleNamespace

import families
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import traverse_util

from efx import models
from efx.layers import flops, kernels
from efx.parallel import sharding

# ---- counting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 3])
def test_pairs_of_some_tokens_are_the_mean_over_all_choices_of_them(window):
    length = 6
    for tokens in range(1, length + 1):
        pairs = [
            sum(0 <= q - k < (window or length) for q in chosen for k in chosen)
            for chosen in itertools.combinations(range(length), tokens)
        ]
        mean = flops.thinned_pairs(tokens, length, window)
        assert mean == pytest.approx(sum(pairs) / len(pairs)), tokens


def test_jaxpr_count_by_hand():
    x, w = jnp.ones((3, 5)), jnp.ones((5, 7))
    once = 2 * 3 * 5 * 7
    assert flops.jaxpr_flops(lambda x, w: x @ w, x, w) == once
    assert flops.jaxpr_flops(jax.jit(lambda x, w: jnp.sin(x) @ w + 1), x, w) == once
    batched = jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7))
    assert flops.jaxpr_flops(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), *batched) == 4 * once
    # Both gradients; that of the loss needs no product.
    grad = jax.grad(lambda x, w: jnp.sum(x @ w), argnums=(0, 1))
    assert flops.jaxpr_flops(grad, x, w) == 3 * once

    def scanned(x, w):
        return jax.lax.scan(lambda carry, _: (carry @ w @ w.T, None), x, length=6)[0]

    assert flops.jaxpr_flops(scanned, x, w) == 6 * 2 * once
    assert flops.jaxpr_flops(jax.checkpoint(lambda x, w: x @ w), x, w) == once

    def branches(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w.T @ w)

    assert flops.jaxpr_flops(branches, x, w) == 3 * once


def test_a_count_depends_neither_on_scanned_layers_nor_on_the_mesh():
    """One sequence does not divide over eight devices, which also share it."""
    model = families.make({"depth": 2})
    scanned = models.changed(model, scan_layers=True, remat="dots")
    alone = flops.executed(model, 16)
    assert flops.executed(scanned, 16) == alone > 0
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | dict(data=2, sequence=4))
    flops.executed.cache_clear()
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        assert flops.executed(model, 16) == alone
        assert flops.executed(model, 16, batch=8) == 8 * alone


def test_a_count_does_not_depend_on_the_kernel_of_attention(monkeypatch):
    """A kernel's products are not in the program as such, which on accelerators "auto" takes."""
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    changes = {"depth": 1, "width": 128, "attention.num_heads": 2}
    case = kernels.Case(128, 2, 2, 64, jnp.bfloat16)
    assert kernels.choose("auto", case) is kernels.KERNELS["splash"]
    model, plain = (
        families.make(changes | {"attention.kernel": kernel}, "bfloat16", context=128)
        for kernel in ("auto", "xla")
    )
    assert flops.executed(model, 128) == flops.executed(plain, 128)


# ---- models ------------------------------------------------------------------------------------

# Attention visits what its mask allows and no more, and the vocabulary has no padding.
EXACT = {"attention.chunk": 1, "vocab_multiple": 1}


def abstract_params(model):
    return jax.eval_shape(
        lambda key: nn.unbox(models.init(model, key))["params"], jax.random.key(0)
    )


def test_ledger_by_hand():
    """Llama with grouped heads, one dense block and one that computes 4 of 16 tokens, of 50 in a
    vocabulary that is padded to 64."""
    model = families.make(
        {
            "width": 32,
            "attention.num_heads": 4,
            "attention.num_kv_heads": 2,
            "attention.head_dim": 8,
            "depth": 2,
            "mlp.hidden": 48,
            "attention.chunk": 8,
            "vocab_multiple": 64,
            "depth_routing.kind": "mod",
            "depth_routing.capacity": 0.25,
            "depth_routing.slack": 2.0,
        },
        vocab_size=50,
    )
    # q and out: 32 -> 32; k and v: 32 -> 16.
    per_token = 2 * 32 * (32 + 32 + 16 + 16), 3 * 2 * 32 * 48
    ledger = model.ledger(16)
    parts = {
        "attention_projections": (16 + 4) * per_token[0],
        # By the papers' convention a query meets (T+1)/2 keys on average.
        "attention_scores": (16 * 17 / 2 + 4 * 5 / 2) * 4 * 4 * 8,
        "mlp": (16 + 4) * per_token[1],
        "router": 16 * 2 * 32,
        "head": 16 * 2 * 32 * 50,
    }
    assert ledger.nominal == parts
    assert ledger.nominal_per_token == sum(parts.values()) / 16
    assert ledger.train_flops(160) == 3 * 10 * sum(parts.values())
    # Chunks of 8 queries visit 8 keys, then 16; 4 tokens are one chunk. Padding is computed.
    pairs = 8 * 8 + 8 * 16 + 4 * 4
    parts |= {"attention_scores": pairs * 4 * 4 * 8, "head": 16 * 2 * 32 * 64}
    assert flops.executed(model, 16) == sum(parts.values())
    # In evaluation slack times as many slots and 4 more: 8 more tokens, chunks of 8 and 4.
    assert model.ledger(16, "causal").nominal["mlp"] == (16 + 12) * per_token[1]
    more = 8 * sum(per_token) + (8 * 8 + 4 * 12 - 4 * 4) * 4 * 4 * 8
    assert flops.executed(model, 16, train=False) == sum(parts.values()) + more


@pytest.mark.parametrize("kv_for_skipped", [False, True])
def test_measured_shares_by_hand(kv_for_skipped):
    """A block that computed 5 of 16 tokens and a tenth of the causal pairs; with the keys of all
    tokens its queries see what is before them, whatever is computed of that."""
    changes = {
        "width": 32,
        "attention.num_heads": 4,
        "depth": 1,
        "depth_routing.kind": "mod",
        "depth_routing.every": 1,
        "depth_routing.kv_for_skipped": kv_for_skipped,
    }
    model, causal = families.make(changes), 16 * 17 / 2
    ledger = model.ledger(16, "causal", {"layers/block_0": (5 / 16, 0.1)}).nominal
    pairs, keys = (5 / 16 * causal, 16) if kv_for_skipped else (0.1 * causal, 5)
    assert ledger["attention_scores"] == pytest.approx(pairs * 4 * 32)
    assert ledger["attention_projections"] == pytest.approx(2 * 32 * 2 * 32 * (5 + keys))


def test_experts_cost_as_many_tokens_as_they_have_slots():
    """16 tokens, 2 of 4 experts each, a capacity factor of 1.5: 12 slots an expert and 4 more."""
    changes = {
        "mlp.kind": "moe",
        "mlp.moe.num_experts": 4,
        "mlp.moe.capacity_factor": 1.5,
        "mlp.moe.expert_hidden": 24,
        "mlp.moe.num_shared": 1,
        "depth": 1,
        **EXACT,
    }
    row = 3 * 2 * 32 * 24

    def executed(model, train=True):
        """FLOPs of the experts; everything else is executed as the ledger says."""
        nominal = model.ledger(16).nominal
        return flops.executed(model, 16, train=train) - sum(nominal.values()) + nominal["mlp"]

    model = families.make(changes)
    assert executed(model) == (4 * 16 + 16) * row
    assert model.ledger(16).nominal["mlp"] == (2 * 16 + 16) * row
    assert model.ledger(16).nominal["moe_router"] == 16 * 2 * 32 * 4
    # Half of the choices are no-ops: half of the slots, half of the cost.
    noop = families.make({**changes, "mlp.moe.num_noop": 4})
    assert executed(noop) == (4 * 10 + 16) * row
    assert noop.ledger(16).nominal["mlp"] == (16 + 16) * row
    assert noop.ledger(16).nominal["moe_router"] == 16 * 2 * 32 * 8
    ahead = families.make(
        {
            **changes,
            "mlp.moe.router": "expert_choice",
            "mlp.moe.capacity": 0.25,
            "mlp.moe.slack": 2.0,
        }
    )
    assert executed(ahead) == ahead.ledger(16).nominal["mlp"] == (4 * 4 + 16) * row
    assert executed(ahead, train=False) == (4 * 12 + 16) * row
    assert ahead.ledger(16, "causal").nominal["mlp"] == (4 * 12 + 16) * row


WIDE = {
    "gpt2": {"preset": "gpt2", "mlp.activation": "gelu_tanh"},
    "mod": {"depth_routing.kind": "mod", "depth_routing.capacity": 0.25},
    "moe": {"mlp.kind": "moe", "mlp.moe.num_experts": 4, "mlp.moe.num_shared": 1},
}


def wide_model(changes):
    """A model so wide that its products outweigh the rest; nothing of it is ever computed."""
    large = {
        "width": 768,
        "attention.num_heads": 8,
        "depth": 2,
        "attention.chunk": 64,
        "vocab_multiple": 1,
        "mlp.multiple_of": 64,
    }
    return families.make({**large, **changes}, vocab_size=512, context=128)


@pytest.mark.parametrize(
    "name, training",
    families.rows(
        [*((name, False) for name in WIDE), ("mod", True), ("moe", True)],
        {"moe"},
    ),
)
def test_executed_is_what_the_compiler_counts(name, training):
    """Within 2%, element-wise work included."""
    model = wide_model(WIDE[name])
    batch, length = 2, 128
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def forward(params, tokens_BT):
        variables = {"params": params, **families.random_state(model)}
        return model.clone(selection="train").apply(variables, tokens_BT)

    step = jax.grad(families.loss_fn(model)) if training else forward
    compiled = families.jit(step).lower(abstract_params(model), tokens).compile()
    traced = flops.executed(model, length, batch) * (flops.TRAIN_FACTOR if training else 1)
    assert compiled.cost_analysis()["flops"] == pytest.approx(traced, rel=0.02)


# ---- frozen parameters -------------------------------------------------------------------------


def frozen_but(model, pattern):
    """Paths of the parameters that a pattern does not match."""
    paths = traverse_util.flatten_dict(abstract_params(model), sep="/")
    return frozenset(path for path in paths if not re.fullmatch(pattern, path))


def test_frozen_parameters_cost_the_gradients_that_are_computed():
    """By hand: gradients of activations reach down to the lowest trained parameter."""
    model = families.make({**EXACT, "mlp.hidden": 48})
    parts = model.ledger(16).nominal
    whole, scores, head = sum(parts.values()), parts["attention_scores"], parts["head"]
    down = 2 * 16 * 48 * 32  # of one block
    mlp, out = 3 * down, 2 * 16 * 32 * 32

    def cost(pattern):
        factor = flops.train_factor(model, 16, frozen=frozen_but(model, pattern))
        return factor * flops.executed(model, 16)

    expected = {
        ".*": 3 * whole,
        ".*norm.*": 2 * whole + scores,  # no gradient of a matrix
        "embed/embedding": 2 * whole + scores,
        "head/kernel": whole + head,
        "norm_final/scale": whole + head,
        "layers/block_1/mlp/down/kernel": whole + down + head,
        # Two gradients of the scores' second product are of values and one of probabilities.
        "layers/block_1/attention/value/kernel": whole + 2 * out + scores / 4 + mlp + head,
    }
    assert {pattern: cost(pattern) for pattern in expected} == pytest.approx(expected)
    # A scan computes the same gradients for all layers.
    model = models.changed(model, scan_layers=True, remat="dots")
    assert cost("layers/units/block_0/mlp/.*") == pytest.approx(2 * whole + scores + parts["mlp"])


# ---- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, vocab_size, context, published",
    [
        # GPT-2 124M: https://huggingface.co/openai-community/gpt2
        (
            {"preset": "gpt2", "width": 768, "depth": 12, "attention.num_heads": 12},
            50257,
            1024,
            124_439_808,
        ),
        # Llama 2 7B (arXiv 2307.09288)
        (
            {"width": 4096, "depth": 32, "attention.num_heads": 32, "mlp.multiple_of": 256},
            32000,
            4096,
            6_738_415_616,
        ),
    ],
)
def test_published_parameter_counts(changes, vocab_size, context, published):
    # Scanned, so that the shapes of all layers take one trace.
    model = families.make(
        {**changes, "vocab_multiple": 1, "scan_layers": True},
        vocab_size=vocab_size,
        context=context,
    )
    assert flops.count_params(abstract_params(model)) == published


def test_device_peak():
    class Device:
        device_kind = "NVIDIA H200"

    bf16, f32 = (flops.device_peak(dtype, Device()) for dtype in ("bfloat16", "float32"))
    assert 9e14 < bf16 < 1e15 and math.isclose(f32, bf16 / 2, rel_tol=0.01)
    assert flops.device_peak("bfloat16") is None  # a CPU
    # Names go on, by blanks or hyphens, and one device's name may be the beginning of another's.
    known = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA L40S": 362e12,
        "TPU v5 lite": 197e12,
        "NVIDIA L400": None,
    }
    for kind, peak in known.items():
        assert flops.device_peak("bfloat16", SimpleNamespace(device_kind=kind)) == peak
