"""The logits at t depend on the tokens up to t alone: not on the length of the row, the size of the
cache or the chunks of a prompt."""

import families
import jax
import numpy as np
import pytest
from families import LENGTH, every_row

from efx import models
from efx.certify import properties


@every_row()
def test_a_logit_depends_on_the_tokens_before_alone(name):
    """With so little capacity that tokens overflow."""
    subject = families.subject(name, share=0.4)
    for prop in (properties.row_length, properties.chunked_prefill):
        families.assert_passes(prop, subject, tolerance=3e-4)


@pytest.mark.parametrize("name", families.rows(["mod_options", "moe"], {"mod_options"}))
def test_tokens_overflow_at_so_little_capacity(name):
    """Here, so that the test above compares that."""
    model = families.with_capacity(families.build(name), share=0.4)
    length_B = np.full(2, LENGTH)
    step = families.decoder(model, families.variables_of(name), LENGTH)
    cache, calls = models.init_cache(model, 2, LENGTH), families.chunks(length_B, length_B, 8)
    _, cache = families.read(step, cache, families.tokens(batch=2), calls)
    counters = [
        np.sum(count)
        for path, count in jax.tree_util.tree_leaves_with_path(cache)
        if path[-1].key == "overflow"
    ]
    assert sum(counters) > 0
