"""Soft experts: the block against its formula in numpy, precision, cost and cache."""

import dataclasses

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from refusals import refused
from scipy import special

from efx import flops
from efx.layers import costs
from efx.layers.call import Call
from efx.layers.soft_experts import SoftBlock, merge

B, T = 2, 11
SMALL = {
    "soft_experts.num": 3,
    "soft_experts.hidden_multiple": 0.5,
    "positions": "none",
    "width": 24,
    "attention.num_heads": 4,
}


def block(changes):
    """(a block with soft experts, parameters in which nothing is zero, input)."""
    module = SoftBlock(families.make({**SMALL, **changes}).specs()[0].block)
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(B, T, 24)))
    shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), x_BTD, call())))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: np.float32(rng.normal(0.1, 0.4, leaf.shape)), shapes["params"]
    )
    return module, params, x_BTD


def call():
    return Call(np.arange(T)[None])


def softmax(x, axis):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def reference(c, p, x):
    """The formula, channel after channel and head after head, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    x = np.asarray(x, np.float64)
    s, heads, kv_heads, width = (
        c.soft.num,
        c.attention.num_heads,
        c.attention.num_kv_heads,
        c.attention.head_dim,
    )
    group = heads // kv_heads

    def linear(p, x, i=None):
        kernel, bias = p["kernel"], p["bias"] if "bias" in p else 0.0
        return (
            x @ kernel + bias
            if i is None
            else x @ kernel[i] + (p["bias"][i] if "bias" in p else 0.0)
        )

    def norm(p, x):
        centre = x.mean(-1, keepdims=True) if c.norm == "layernorm" else 0.0
        y = x - centre
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + c.norm_eps) * p["scale"]
        return y + p["bias"] if "bias" in p else y

    def rms(p, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * p["scale"]

    def act(p, x, i=None):
        up = linear(p["up"], x, i)
        if c.mlp.activation == "swiglu":
            gate = linear(p["gate"], x, i)
            return gate / (1.0 + np.exp(-gate)) * up
        return 0.5 * up * (1.0 + special.erf(up / np.sqrt(2.0)))

    attention, normed = p["attention"], norm(p["norm_attention"], x)
    outer = (
        (lambda y: y.reshape(B, T, kv_heads, s, group, width))
        if c.soft.shared_kv
        else (lambda y: y.reshape(B, T, s, kv_heads, group, width).swapaxes(2, 3))
    )
    query = outer(linear(attention["query"], normed))  # [B, T, K, X, G, H]
    key, value = (linear(attention[name], normed) for name in ("key", "value"))
    if c.soft.shared_kv:
        key, value = (
            np.repeat(y.reshape(B, T, 1, kv_heads, width), s, axis=2) for y in (key, value)
        )
    else:
        key, value = (y.reshape(B, T, s, kv_heads, width) for y in (key, value))
    ys = []
    for i in range(s):
        q, k = query[:, :, :, i], key[:, :, i]
        if c.attention.qk_norm == "width":
            q = rms(attention["norm_query"], q.reshape(B, T, -1)).reshape(q.shape)
            k = rms(attention["norm_key"], k.reshape(B, T, -1)).reshape(k.shape)
        out = np.zeros((B, T, heads, width))
        for n in range(heads):
            scores = np.einsum("bth,bsh->bts", q[:, :, n // group, n % group], k[:, :, n // group])
            scores = np.where(np.tri(T, dtype=bool), scores / np.sqrt(width), -np.inf)
            out[:, :, n] = softmax(scores, -1) @ value[:, :, i, n // group]
        h = x + linear(attention["out"], out.reshape(B, T, heads * width), i)
        mlp, normed_h = p["mlp"], norm(p["norm_mlp"], h)
        z = linear(mlp["experts"]["down"], act(mlp["experts"], normed_h, i), i)
        if c.soft.shared:
            z = z + linear(mlp["shared"]["down"], act(mlp["shared"], normed_h))
        ys.append(h + linear(mlp["out"], z))
    y = np.stack(ys)
    return {"softmax": (softmax(y, 0) * y).sum(0), "mean": y.mean(0), "max": y.max(0)}[
        c.soft.merge
    ] - x


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"soft_experts.merge": "mean", "soft_experts.shared": 2, "soft_experts.multiple": 2},
        {
            "soft_experts.merge": "max",
            "soft_experts.shared_kv": True,
            "attention.num_kv_heads": 2,
            "attention.qk_norm": "width",
        },
        {
            "preset": "gpt2",
            "soft_experts.num": 5,
            "soft_experts.shared": 1,
            "attention.num_kv_heads": 2,
            "attention.qk_norm": "width",
        },
        {"preset": "gpt2", "soft_experts.num": 1, "soft_experts.shared_kv": True},
    ],
    ids=str,
)
def test_a_block_equals_its_formula(changes):
    module, params, x_BTD = block(changes)
    result = families.jit(module.apply)({"params": params}, x_BTD, call())
    expected = reference(module.config, params, x_BTD)
    assert np.abs(expected).mean() > 0.3
    np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


def test_channels_in_bfloat16_are_merged_in_float32():
    d = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 30, 40)), jnp.bfloat16)
    run = families.jit(lambda d: merge("softmax", d))
    assert np.mean(run(d) == run(d.astype(jnp.float32)).astype(jnp.bfloat16)) > 0.99


def test_blocks_with_soft_experts_and_their_widths():
    model = families.make({"depth": 5, "soft_experts.num": 2, "soft_experts.every": 2})
    assert [spec.block.soft is not None for spec in model.specs()] == [0, 1, 0, 1, 0]
    # The features of an expert are a fraction of the width, rounded up.
    soft = model.specs()[1].block.soft
    assert [
        dataclasses.replace(soft, num=n, multiple=m).features(32)
        for n, m in ((4, 1), (4, 3), (5, 1), (12, 6))
    ] == [8, 24, 7, 16]


def test_fewer_latents_in_channels_cost_as_claimed():
    """Scores: s (K/m)^2 in place of K^2, by the ledger of a model."""
    K = 512
    dense = families.make({}).specs()[0].block
    many = costs.attention_flops(dense, K, flops.causal_pairs(K))["attention_scores"]
    for channels, shrink in ((4, 4), (12, 8), (2, 2)):
        soft = families.make({"soft_experts.num": channels}).specs()[0].block
        few = costs.attention_flops(soft, K // shrink, flops.causal_pairs(K // shrink))
        claim = channels / shrink**2
        assert few["attention_scores"] / many == pytest.approx(claim, rel=0.02)


def test_the_cache_is_as_wide_as_its_keys():
    plain, own, shared = (
        families.cache_bytes(families.make(changes), 10)
        for changes in (
            {},
            {"soft_experts.num": 3},
            {"soft_experts.num": 3, "soft_experts.shared_kv": True},
        )
    )
    assert own == 3 * plain and shared == plain


def test_a_block_has_one_kind_of_experts():
    both = {"soft_experts.num": 2, "soft_experts.every": 2, "mlp.kind": "moe", "depth": 4}
    refused(lambda: families.make({**both, "mlp.moe.every": 2}), "soft_experts.every=2")
    assert families.make({**both, "soft_experts.every": 3, "mlp.moe.every": 2})
