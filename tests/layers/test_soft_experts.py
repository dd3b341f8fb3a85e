"""Soft experts: the block against its formula in numpy, precision, parameters, cost and cache."""

import dataclasses

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from refusals import refused
from scipy import special

from efx.layers import flops
from efx.layers.soft_experts import SoftBlock, merge
from efx.layers.token_context import TokenContext
from efx.models import costs

B, T, WIDTH = 2, 11, 24
SMALL = {
    "soft_experts.num": 3,
    "soft_experts.hidden_multiple": 0.5,
    "positions": "none",
    "width": WIDTH,
    "attention.num_heads": 4,
}
CALL = TokenContext(np.arange(T)[None])


def block(changes):
    """(a block with soft experts, parameters without zeros, input)."""
    module = SoftBlock(families.make({**SMALL, **changes}).specs()[0].blocks[0])
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(B, T, WIDTH)))
    shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), x_BTD, CALL)))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.float32(rng.normal(0.1, 0.4, leaf.shape)), shapes)
    return module, params["params"], x_BTD


def reference(c, p, x):
    """The increment, channel after channel and head after head, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    x = np.asarray(x, np.float64)
    s, width = c.soft.num, c.attention.head_dim
    heads, kv_heads = c.attention.num_heads, c.attention.num_kv_heads
    group = heads // kv_heads

    def linear(p, x, i=0):
        kernel, bias = p["kernel"], p.get("bias", np.zeros(1))
        return x @ (kernel[i] if kernel.ndim > 2 else kernel) + (bias[i] if bias.ndim > 1 else bias)

    def rms(p, x, i=0):
        scale = p["scale"][i] if p["scale"].ndim > 1 else p["scale"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * scale

    def norm(p, x):
        centre = x.mean(-1, keepdims=True) if c.norm == "layernorm" else 0.0
        return rms(p, x - centre) + p.get("bias", 0.0)

    def mlp(p, x, i):
        up = linear(p["up"], x, i)
        if c.mlp.activation == "swiglu":
            gate = linear(p["gate"], x, i)
            return linear(p["down"], gate * special.expit(gate) * up, i)
        return linear(p["down"], 0.5 * up * (1.0 + special.erf(up / np.sqrt(2.0))), i)

    attention, n = p["attention"], norm(p["norm_attention"], x)
    query = linear(attention["query"], n).reshape(B, T, kv_heads, s, group, width)
    key, value = (
        linear(attention[name], n).reshape(B, T, kv_heads, -1, width) for name in ("key", "value")
    )
    ys = []
    for i in range(s):
        q, k, v = (
            query[:, :, :, i],
            key[:, :, :, i % key.shape[3]],
            value[:, :, :, i % key.shape[3]],
        )
        if c.attention.qk_norm == "width":
            q = rms(attention["norm_query"], q.reshape(B, T, -1), i).reshape(q.shape)
            k = rms(attention["norm_key"], k.reshape(B, T, -1), i).reshape(k.shape)
        scores = np.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(width)
        probs = special.softmax(np.where(np.tri(T, dtype=bool), scores, -np.inf), -1)
        out = np.einsum("bkgts,bskh->btkgh", probs, v).reshape(B, T, heads * width)
        h = x + linear(attention["out"], out, i)
        n = norm(p["norm_mlp"], h)
        parts = [p["mlp"][name] for name in ("experts", "shared") if name in p["mlp"]]
        ys.append(h + linear(p["mlp"]["out"], sum(mlp(part, n, i) for part in parts)))
    y = np.stack(ys)
    merged = {"softmax": (special.softmax(y, 0) * y).sum(0), "mean": y.mean(0), "max": y.max(0)}
    return merged[c.soft.merge] - x


OWN = {"soft_experts.tied": False}
GROUPED = {"attention.num_kv_heads": 2, "attention.qk_norm": "width"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"soft_experts.merge": "mean", "soft_experts.shared": 2, "soft_experts.multiple": 2, **OWN},
        {"soft_experts.merge": "max", "soft_experts.shared_kv": True, **GROUPED},
        {"preset": "gpt2", "soft_experts.num": 5, "soft_experts.shared": 1, **GROUPED, **OWN},
        {"preset": "gpt2", "soft_experts.shared": 1, **GROUPED},
    ],
    ids=str,
)
def test_a_block_equals_its_formula(changes):
    module, params, x_BTD = block(changes)
    result = families.jit(module.apply)({"params": params}, x_BTD, CALL)
    expected = reference(module.config, params, x_BTD)
    assert np.abs(expected).mean() > 0.3
    np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


def test_tied_channels_share_three_parameters():
    """The published form: the first matrices of the MLP, the output matrix of attention and the
    gains of queries and keys; separate ones are s times as many."""

    def sizes(changes):
        leaves = jax.tree_util.tree_leaves_with_path(block({**GROUPED, **changes})[1])
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): x.size for path, x in leaves
        }

    own, tied = sizes(OWN), sizes({})
    shared = {name for name in own if own[name] != tied[name]}
    mlp = {"mlp/experts/gate/kernel", "mlp/experts/up/kernel"}
    norms = {"attention/norm_key/scale", "attention/norm_query/scale"}
    assert shared == {"attention/out/kernel"} | mlp | norms
    assert all(own[name] == 3 * tied[name] for name in shared)
    assert tied["mlp/experts/down/kernel"] == 3 * 12 * 8  # a matrix [F, m D / s] for each channel


def test_channels_in_bfloat16_are_merged_in_float32():
    d = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 30, 40)), jnp.bfloat16)
    run = families.jit(lambda d: merge("softmax", d))
    assert np.mean(run(d) == run(d.astype(jnp.float32)).astype(jnp.bfloat16)) > 0.99


def test_blocks_with_soft_experts_and_their_widths():
    model = families.make({"depth": 5, "soft_experts.num": 2, "soft_experts.every": 2})
    assert [spec.blocks[0].soft is not None for spec in model.specs()] == [0, 1, 0, 1, 0]
    soft = model.specs()[1].blocks[0].soft
    features = [
        dataclasses.replace(soft, num=n, multiple=m).features(32)
        for n, m in ((4, 1), (4, 3), (5, 1), (12, 6))
    ]
    assert features == [8, 24, 7, 16]  # m D / s, rounded up


def test_fewer_latents_in_channels_cost_as_claimed():
    """Scores: s (K / m)^2 in place of K^2."""

    def scores(latents, changes):
        b = families.make(changes).specs()[0].blocks[0]
        return costs.attention_flops(b, latents, flops.causal_pairs(latents))["attention_scores"]

    for channels, m in ((4, 4), (12, 8), (2, 2)):
        few = scores(512 // m, {"soft_experts.num": channels})
        assert few / scores(512, {}) == pytest.approx(channels / m**2, rel=0.02)


def test_the_cache_has_keys_of_each_channel_unless_they_are_shared():
    soft = {"soft_experts.num": 3}
    dense, separate, shared = (
        families.cache_bytes(families.make(changes), 10)
        for changes in ({}, soft, {**soft, "soft_experts.shared_kv": True})
    )
    assert separate == 3 * dense and shared == dense


def test_a_block_has_one_kind_of_experts():
    both = {"soft_experts.num": 2, "soft_experts.every": 2, "mlp.kind": "moe", "depth": 4}
    refused(lambda: families.make({**both, "mlp.moe.every": 2}), "soft_experts.every=2")
    assert families.make({**both, "soft_experts.every": 3, "mlp.moe.every": 2})
