"""What the tests of efx.optim share."""

import functools
import typing

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from efx import optim
from efx.run_blocks import OptimConfig

STEPS = 20
OPTIMIZERS = typing.get_args(typing.get_type_hints(OptimConfig)["name"])
CONSTANT = dict(kind="constant", warmup_steps=0)


def config(**changes):
    values = dict(
        name="adamw",
        learning_rate=0.01,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        momentum=0.9,
        weight_decay=0.1,
        decay=".*/(kernel|embedding)",
        frozen="",
        lr_multipliers=(),
        clip_norm=1.0,
        schedule=dict(
            kind="cosine",
            warmup_steps=4,
            warmup_fraction=0.0,
            final_fraction=0.1,
            decay_fraction=0.2,
            decay_steps=0,
        ),
    )
    values["schedule"].update(changes.pop("schedule", {}))
    return ml_collections.ConfigDict(values | changes)


def make_params():
    """A tree shaped like a model's: one plain block and a scanned stack of 3."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32)

    return {
        "embed": {"embedding": array(11, 4)},
        "block_0": {
            "attention": {"query": {"kernel": array(4, 6), "bias": array(6)}},
            "router": {"kernel": array(4, 1)},
        },
        "units": {
            "block": {"mlp": {"up": {"kernel": array(3, 4, 8)}}, "norm": {"scale": array(3, 4)}}
        },
        "head": {"kernel": array(4, 11)},
    }


def gradients(params, step, size=1.0):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: np.float32(size * rng.normal(size=p.shape)), params)


@functools.partial(jax.jit, static_argnums=0)
def one_step(transformation, params, state, grads):
    updates, state = transformation.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def run(transformation, params, steps=4, size=1.0):
    state = transformation.init(params)
    for step in range(steps):
        params, state = one_step(transformation, params, state, gradients(params, step, size))
    return params, state


def first_update(transformation, params, grads):
    """(updates by path, state) of the first step."""
    updates, state = jax.jit(
        lambda params, grads: transformation.update(grads, transformation.init(params), params)
    )(params, grads)
    return optim.param_paths(updates), state


def built(params, **changes):
    return optim.make_optimizer(config(**changes), STEPS, params)[0]


def assert_same(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)
