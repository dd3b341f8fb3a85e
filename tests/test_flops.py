"""The ledger against the compiler and against published counts; the counting tools themselves."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from efx import flops, models
from efx.layers import attention

# Wide enough that element-wise work, which the ledger leaves out, is below 2%.
WIDE = {"width": 512, "depth": 2, "num_heads": 8, "init_std": 0.02}


def compiled_flops(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "gpt2"},
        {"num_kv_heads": 2},
        {"depth_routing.kind": "mod", "depth_routing.capacity": 0.25},
    ],
    ids=["gpt2", "llama", "mod"],
)
@pytest.mark.parametrize("training", [False, True])
def test_ledger_is_the_compilers_count_within_two_percent(changes, training):
    model = families.make({**WIDE, **changes}, vocab_size=1000, context=128)
    model = model.clone(selection="train")
    params = jax.eval_shape(lambda: families.random_params(model))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    ledger = model.ledger(128)
    expected = 2 * sum(ledger.parts.values())
    if training:
        counted = compiled_flops(jax.grad(families.loss_fn(model)), params, tokens)
        expected *= flops.TRAIN_FACTOR
    else:
        counted = compiled_flops(lambda p, t: model.apply({"params": p}, t), params, tokens)
    assert counted == pytest.approx(expected, rel=0.02)


def published(**changes):
    config = common.base()
    common.apply(config, {f"model.{key}": value for key, value in changes.items()})
    return config.model


def test_gpt2_has_its_published_parameter_count():
    """124,439,808: the number of parameters of the released GPT-2 small."""
    config = published(preset="gpt2", width=768, depth=12, num_heads=12)
    model = models.build(config, vocab_size=50257, context=1024, dtype="float32")
    assert sum(model.parameter_count().values()) == 124_439_808
    shapes = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))["params"]
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 124_439_808


def test_llama_7b_has_its_published_parameter_count():
    """6,738,415,616: the number of parameters of the released Llama 2 7B."""
    config = published(
        preset="llama", width=4096, depth=32, num_heads=32, **{"mlp.multiple_of": 256}
    )
    model = models.build(config, vocab_size=32000, context=4096, dtype="bfloat16")
    assert model.specs()[0].block.hidden == 11008
    assert sum(model.parameter_count().values()) == 6_738_415_616


def test_a_routed_block_costs_its_share():
    """Linear work follows C/T, attention scores (C/T)^2 (with one chunk, exactly)."""
    changes = {"attention_chunk": 64, "depth_routing.every": 1, "depth_routing.capacity": 0.25}
    dense = families.make(changes, context=64).ledger(64).parts
    routed = families.make({**changes, "depth_routing.kind": "mod"}, context=64).ledger(64).parts
    for part in ("attention_projections", "mlp"):
        assert routed[part] == dense[part] / 4
    assert routed["attention_scores"] == dense["attention_scores"] / 16
    assert routed["head"] == dense["head"]
    assert routed["router"] == 2 * 2 * 64 * 32


def test_default_stack_is_the_papers_share():
    """12.5% every second block: 0.5625 of the linear FLOPs of the stack."""

    def parts(kind):
        changes = {"depth": 4, "depth_routing.kind": kind, "depth_routing.capacity": 0.125}
        return families.make(changes, context=64).ledger(64).nominal

    assert parts("mod")["mlp"] / parts("none")["mlp"] == 0.5625


@pytest.mark.parametrize("length, window", [(1, 0), (7, 0), (64, 0), (64, 5), (64, 64), (64, 99)])
def test_causal_pairs(length, window):
    q, k = np.meshgrid(np.arange(length), np.arange(length), indexing="ij")
    allowed = (k <= q) & ((q - k < window) if window else True)
    assert flops.causal_pairs(length, window) == allowed.sum()


@pytest.mark.parametrize(
    "length, chunk, window", [(64, 16, 0), (70, 16, 0), (70, 16, 9), (5, 0, 0)]
)
def test_visited_pairs_cover_the_allowed_ones(length, chunk, window):
    visited = np.zeros((length, length), bool)
    for q0, q1, k0, k1 in attention.spans(length, chunk, window):
        visited[q0:q1, k0:k1] = True
    q, k = np.meshgrid(np.arange(length), np.arange(length), indexing="ij")
    allowed = (k <= q) & ((q - k < window) if window else True)
    assert (visited | ~allowed).all()
    assert visited.sum() == attention.visited_pairs(length, chunk, window)


def test_jaxpr_flops_counts_scans_times_their_length():
    w = jnp.ones((5, 8, 8))

    def scanned(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def unrolled(w, x):
        for i in range(5):
            x = jnp.tanh(x @ w[i])
        return x

    x = jnp.ones((3, 8))
    assert flops.jaxpr_flops(scanned, w, x) == flops.jaxpr_flops(unrolled, w, x) == 5 * 2 * 3 * 64
    assert (
        flops.jaxpr_flops(
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: jnp.zeros((3, 3)), x),
            x,
        )
        == 2 * 3 * 8 * 3
    )


def test_training_flops_of_a_ledger():
    ledger = flops.Ledger(10, {"a": 100, "b": 50}, {"a": 60, "b": 50})
    assert ledger.per_token == 15 and ledger.nominal_per_token == 11
    assert ledger.train_flops(7) == 3 * 7 * 11
    assert ledger.train_flops(7, nominal=False) == 3 * 7 * 15
