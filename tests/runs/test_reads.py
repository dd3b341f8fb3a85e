"""Which arguments a program reads in one precision alone."""

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import models, reads, sample, sharding

SHORT = jnp.dtype(jnp.bfloat16)


def short(x):
    return x.astype(SHORT)


def loop(p, x):
    return jax.lax.fori_loop(0, 3, lambda i, y: y + short(p["loop"]) @ x, x)


def branch(p, x):
    return jax.lax.cond(x[0] > 0, lambda: short(p["branch"]) @ x, lambda: x)


def scanned(p, x):
    return jax.lax.scan(lambda y, w_DD: (y + short(w_DD) @ x, None), x, p["stack"])[0]


YES = {
    "product": lambda p, x: short(p["product"]) @ x,
    "loop": loop,
    "branch": branch,
    "stack": scanned,
    "recomputed": lambda p, x: jax.checkpoint(lambda x: short(p["recomputed"]) @ x)(x),
    "compiled": lambda p, x: jax.jit(lambda w_DD: short(w_DD) @ x)(p["compiled"]),
    "moved": lambda p, x: short(p["moved"].T.reshape(2, 8)[jnp.array([1, 0])]),
    "twice": lambda p, x: short(p["twice"]) @ short(p["twice"][0]),
}
NO = {
    "scaled": lambda p, x: short(2.0 * p["scaled"]) @ x,
    "given": lambda p, x: p["given"],
    "also": lambda p, x: (short(p["also"]) @ x, jnp.sum(p["also"])),
    "one_branch": lambda p, x: jax.lax.cond(
        x[0] > 0, lambda: short(p["one_branch"])[0], lambda: short(jnp.sin(p["one_branch"][0]))
    ),
    "carried": lambda p, x: short(
        jax.lax.fori_loop(0, 2, lambda i, y: y + short(p["branch"])[0], p["carried"][0])
    ),
    "other": lambda p, x: p["other"].astype(jnp.float16),
    "index": lambda p, x: x[p["index"].astype(jnp.int32)[0, 0]],
    "test": lambda p, x: jax.lax.while_loop(lambda y: y[0] > p["test"][0, 0], jnp.negative, x),
}


@pytest.mark.parametrize("name", [*YES, *NO])
def test_only_as(name):
    leaves = {name: jnp.ones((3, 4, 4) if name == "stack" else (4, 4)) for name in {**YES, **NO}}
    found = reads.only_as(SHORT, {**YES, **NO}[name], leaves, jnp.ones(4, SHORT))
    assert dict(zip(sorted(leaves), found, strict=True))[name] == (name in YES)


# Of norms, routers, predictors, gates and masks, which compute in float32, and the state.
WHOLE = {
    "moe": {"scale", "router"},
    "mod_capacity_list": {"scale", "router", "kernel_in", "kernel_out", "bias"},
    "adapter_mod": {"scale", "gate", "share", "seed", "steps"},
    "streams_final": {"scale", "mask_shift"},
    "latent_moe": {"scale", "router"},
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_decoder_of_bfloat16_reads_little_else(name):
    model = families.build(name, "bfloat16")
    model = models.unrolled(model) if model.config.scan_layers else model
    shapes = nn.unbox(models.variable_shapes(model))
    shapes = {name: shapes[name] for name in ("params", "state") if name in shapes}
    program = sample._Program(model, 1, families.LENGTH, 8, False, 0, sharding.DEFAULT_RULES)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    short = sample._converted_places(program, sample._shapes(shapes))
    whole = {path[-1].key for (path, _), yes in zip(leaves, short, strict=True) if not yes}
    assert whole == WHOLE[name]
    sizes = np.array([leaf.size for _, leaf in leaves])
    assert sizes[short].sum() > 0.96 * sizes.sum()
