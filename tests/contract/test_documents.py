"""Documents of a packed row: the tokens of one do not change what is computed of another.

The limits of routed blocks under every decision, of experts, of adapters that may be left out, and
of each of these inside another count within a document.
"""

import functools

import families
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, LENGTH

# With the capacity of a config, 0.125, and its slack, 2; by r > 0 more are selected.
MOD = {"depth_routing.kind": "mod", "depth_routing.causal": "aux_loss"}
MODELS = {
    "defaults": MOD,
    # Without memory tokens, which belong to no document.
    "latent_mod": {**FAMILIES["latent_mod"].changes, "memory_global": 0, "group_size": 4},
}
SIZES = 13, 11, 3  # and padding; none begins with a group
STARTS = np.cumsum([0, *SIZES])
SEGMENTS_T = np.repeat([1, 2, 3, 0], [*SIZES, LENGTH - sum(SIZES)])
POSITIONS_T = np.arange(LENGTH) - np.append(STARTS, 0)[SEGMENTS_T - 1]


def packed(row_T, batch):
    return jnp.asarray(np.tile(row_T, (batch, 1)), jnp.int32)


def moved(model, selection, rows=5):
    """[document]: how far the logits of each move when the first one holds something else."""
    if selection is not None:
        model = model.clone(selection=selection)
    tokens_BT = families.tokens(batch=rows)
    other_BT = jnp.where(SEGMENTS_T == 1, families.tokens(seed=9, batch=rows), tokens_BT)
    run = families.jit(functools.partial(model.apply, rngs=families.keys()))
    variables = {"params": families.random_params(model), **families.random_state(model)}
    shape = packed(POSITIONS_T, rows), packed(SEGMENTS_T, rows)
    a, b = (np.asarray(run(variables, tokens, *shape)) for tokens in (tokens_BT, other_BT))
    return [np.abs(a - b)[:, SEGMENTS_T == document].max() for document in (1, 2, 3)]


SELECTIONS = [
    ("defaults", "causal"),
    ("defaults", "train"),
    ("mod_threshold", "train"),
    ("mod_stochastic", "causal"),
    ("recursion", "train"),
    ("moe", "causal"),
    ("moe_expert_choice", "train"),
    ("mode_staged", "causal"),
    ("mode_staged", "train"),
    ("latent_mod", "train"),
    ("adapter_inclusion", "train"),
]
SLOW = {name for name, _ in SELECTIONS} - {"mode_staged", "moe_expert_choice"}


@pytest.mark.parametrize("name, selection", families.rows(SELECTIONS, SLOW))
def test_a_document_does_not_change_the_next(name, selection):
    model = families.make(MODELS[name] if name in MODELS else FAMILIES[name].changes)
    first, *others = moved(model, selection)
    assert first > 0.1 and max(others) < 1e-5


@pytest.mark.slow
def test_a_document_does_not_change_the_next_through_a_bridge():
    first, *others = moved(families.bridge(MOD, FAMILIES["moe"].changes), None, rows=3)
    assert first > 0.1 and max(others) < 1e-5
