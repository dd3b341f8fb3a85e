"""Documents of a packed row: the tokens of one do not change what is computed of another.

The limits of routed blocks under every decision, of experts, of adapters that select tokens, and of
each of these inside another count within a document.
"""

import families
import numpy as np
import pytest
from families import BATCH, FAMILIES, LENGTH, Grain, every_row

from efx.certify import properties, subjects

EXACT = 1e-5


@every_row(families.can_pack, whole=Grain.KINDS)
def test_a_document_does_not_change_the_next(name):
    families.assert_passes(properties.packed_neighbours, families.subject(name), EXACT)


@every_row(lambda model: families.can_pack(model) and families.selects_tokens(model))
def test_a_document_does_not_change_the_next_in_training(name):
    families.assert_passes(properties.packed_neighbours, families.subject(name, "train"), EXACT)


@pytest.mark.slow
def test_a_document_does_not_change_the_next_through_a_bridge():
    routed = {"depth_routing.kind": "mod", "depth_routing.causal_decision": "aux_loss"}
    model = families.bridge(routed, FAMILIES["moe"].changes)
    variables = {"params": families.random_params(model), **families.random_state(model)}
    subject = subjects.of_model(model, variables)
    families.assert_passes(properties.packed_neighbours, subject, EXACT)


@every_row(families.can_pack, whole=Grain.KINDS)
def test_packed_documents_are_as_if_alone(name):
    """Also in a row that says nothing of documents, and with padding on both sides, unless tokens
    overflow: the limits of packed rows have no headroom."""
    subject = families.subject(name, share=1.0, slack=100.0)
    for prop in (properties.packed_as_if_alone, properties.padding):
        families.assert_passes(prop, subject, tolerance=2e-5)
    tokens_BT, positions_T = families.tokens(), np.arange(LENGTH, dtype=np.int32)
    layout = np.tile(positions_T, (BATCH, 1)), np.ones((BATCH, LENGTH), np.int32)
    packed_BTV = subject.compute(tokens_BT, *layout)
    np.testing.assert_allclose(packed_BTV, subject.compute(tokens_BT), atol=2e-5)
    assert np.isfinite(packed_BTV).all()
