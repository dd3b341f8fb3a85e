"""A small train state, and checkpoints of it on the disk."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from efx.checkpoint import Checkpointer


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    variables: dict


def make_state(seed=0, width=8, optimizer=None):
    """Parameters of several dtypes and depths, and an optimizer state."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": {"embedding": jax.random.normal(keys[0], (16, width))},
        "block_0": {
            "mlp": {"up": {"kernel": jax.random.normal(keys[1], (width, 16))}},
            "norm": {"scale": jnp.ones(width)},
        },
        "head": {"kernel": jax.random.normal(keys[2], (width, 16)).astype(jnp.bfloat16)},
    }
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(jnp.int32(seed), params, optimizer.init(params), {})


def abstract(tree, shardings=None):
    """The tree's shapes with shardings (by default its own)."""
    if shardings is None:
        shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def make(root, **changes):
    values = dict(keep_last=2, keep_best=0, scores={}, asynchronous=True)
    return Checkpointer(root, **values | changes)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        # Bytes, so that NaN equals NaN and -0 does not equal 0.
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def saved(root, steps=(2, 4), **changes):
    """Save checkpoints and return the states by step."""
    states = {step: make_state(step) for step in steps}
    with make(root, **changes) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state, {"next_index": step}, {"name": "run"})
    return states


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def damage(root, step):
    """Flip a bit in the largest file of a checkpoint and return its name."""
    files = [path for path in (root / str(step) / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    flip(largest)
    return largest.name
