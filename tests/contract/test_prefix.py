"""Nothing but the tokens up to t decides the logits at t, in every routed family: not the length of
the row, the size of the cache or the chunks that a prompt is read in."""

import families
import jax
import numpy as np
import pytest
from families import FAMILIES, LENGTH

from efx import models

NAMES = tuple(name for name, family in FAMILIES.items() if family.routed)
DEFAULT = {"mod_options", "mod_threshold", "moe", "streams_mod_context"}
PREFIX, SIZES, CHUNKS = 20, (24, LENGTH), (1, 4, 7)
# Rows of which some tokens are refused, among so few and with these parameters.
REFUSES = {"mod", "mod_options", "mod_parallel", "mod_threshold", "mod_capacity_list", "recursion"}


def scarce(changes):
    """The settings of a row with 0.4 times the capacity, so that tokens are refused."""
    changes = {"mlp.moe.capacity_factor": 1.0, "depth_routing.slack": 1.0} | changes
    for key in ("depth_routing.capacity", "mlp.moe.capacity", "mlp.moe.capacity_factor"):
        value = changes.get(key, 0.5)
        several = isinstance(value, tuple)
        changes[key] = tuple(c if c == 1 else 0.4 * c for c in value) if several else 0.4 * value
    return changes | {key: 1.0 for key in changes if key.endswith(".slack")}


def count_overflow(cache):
    """Selected tokens over the causal limit, by the counters of a cache."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return sum(int(np.sum(x)) for path, x in leaves if path[-1].key == "overflow")


@pytest.mark.parametrize("name", families.rows(NAMES, set(NAMES) - DEFAULT))
def test_only_the_tokens_before_decide(name):
    refused = check(FAMILIES[name].changes)
    assert refused > 0 or name not in REFUSES


def check(changes):
    """Compare the logits of a prefix in all ways to compute them; returns the refused tokens."""
    model = families.make(scarce(changes))
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT, length_B = families.tokens(batch=2), np.full(2, PREFIX)
    apply = families.jit(lambda tokens_BT: model.apply(variables, tokens_BT, rngs=families.keys()))
    alone_BTV = np.asarray(apply(tokens_BT[:, :PREFIX]))
    found = {"in a longer row": np.asarray(apply(tokens_BT))[:, :PREFIX]}
    steps = {size: families.decoder(model, variables, size) for size in SIZES}
    for size, chunk in ((SIZES[0], CHUNKS[1]), *((SIZES[1], chunk) for chunk in CHUNKS)):
        # One program, as wide as the widest chunk: padding fills the others.
        calls = ((CHUNKS[-1], new_B) for _, new_B in families.chunks(length_B, length_B, chunk))
        cache, how = models.init_cache(model, 2, size), f"cache of {size}, chunks of {chunk}"
        found[how], cache = families.read(steps[size], cache, tokens_BT[:, :PREFIX], calls)
    assert alone_BTV.std() > 0.1
    off = {how: float(np.abs(logits_BTV - alone_BTV).max()) for how, logits_BTV in found.items()}
    assert max(off.values()) < 3e-4, off
    return count_overflow(cache)
