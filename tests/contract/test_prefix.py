"""The logits at t depend on the tokens up to t alone: not on the length of the row, the size of the
cache or the chunks of a prompt."""

import functools

import families
import jax
import numpy as np
import pytest
from families import LENGTH, every_row

from efx import models

PREFIX, CHUNKS = 20, (1, 4, 7)
SIZES = {24: CHUNKS[1:2], LENGTH: CHUNKS}  # of a cache: the chunks that are read with it


def with_little_capacity(name):
    """(model, variables) of a row, of which tokens overflow."""
    return families.with_capacity(families.build(name), share=0.4), families.variables_of(name)


def read_prefix(name, size, chunks):
    """[(logits, cache)] of the first tokens, read from a cache of this size in chunks of each
    length."""
    model, variables = with_little_capacity(name)
    step, length_B, found = families.decoder(model, variables, size), np.full(2, PREFIX), []
    for chunk in chunks:
        # One program, as wide as the widest chunk: padding fills the others.
        calls = ((CHUNKS[-1], new_B) for _, new_B in families.chunks(length_B, length_B, chunk))
        cache = models.init_cache(model, 2, size)
        found.append(families.read(step, cache, families.tokens(batch=2)[:, :PREFIX], calls))
    return found


@every_row()
def test_a_logit_depends_on_the_tokens_before_alone(name):
    model, variables = with_little_capacity(name)
    apply = families.jit(functools.partial(model.apply, variables, rngs=families.keys()))
    tokens_BT = families.tokens(batch=2)
    alone_BTV = np.asarray(apply(tokens_BT[:, :PREFIX]))
    found = {"in a longer row": np.asarray(apply(tokens_BT))[:, :PREFIX]}
    for size, chunks in SIZES.items():
        for chunk, (logits_BTV, _) in zip(chunks, read_prefix(name, size, chunks), strict=True):
            found[f"cache of {size}, chunks of {chunk}"] = logits_BTV
    assert alone_BTV.std() > 0.1
    off = {how: float(np.abs(logits_BTV - alone_BTV).max()) for how, logits_BTV in found.items()}
    assert max(off.values()) < 3e-4, off


@pytest.mark.parametrize("name", families.rows(["mod_options", "moe"], {"mod_options"}))
def test_tokens_overflow_at_so_little_capacity(name):
    """Here, so that the test above compares that."""
    ((_, cache),) = read_prefix(name, LENGTH, CHUNKS[:1])
    counters = [
        np.sum(count)
        for path, count in jax.tree_util.tree_leaves_with_path(cache)
        if path[-1].key == "overflow"
    ]
    assert sum(counters) > 0
