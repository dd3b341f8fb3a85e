"""A selection, two controls and a decision that efx does not know by name, for tests of what all
have. A test module imports the fixture `new_rules`."""

import jax
import jax.numpy as jnp
import pytest

from efx.config import schema
from efx.layers import selection
from efx.routing import controls, decisions
from efx.routing.config import DepthRoutingConfig


def first_tokens(scores_BT, rate, valid_BT, segment_ids_BT):
    """The first ceil(rate * T) valid tokens of a row."""
    slots = selection.num_slots(rate, scores_BT.shape[1])
    return valid_BT & (jnp.cumsum(valid_BT, axis=1) <= slots)


def even_positions(call, seed, capacity):
    return call.positions_BT % 2 == 0


class Drawn(decisions.Decision):
    """A random logit."""

    def __call__(self, x_BTD, score_BT):
        return jax.random.normal(self.make_rng("routing"), score_BT.shape)


@pytest.fixture
def new_rules(monkeypatch):
    for name in ("train_selection", "causal"):
        monkeypatch.setitem(schema._hints(DepthRoutingConfig), name, str)
    monkeypatch.setitem(selection.SELECTIONS, "first", selection.Selection(first_tokens))
    exact = controls.Control(even_positions, has_causal_limit=False)
    monkeypatch.setitem(controls.CONTROLS, "even", exact)
    monkeypatch.setitem(controls.CONTROLS, "limited", controls.Control(even_positions))
    monkeypatch.setitem(decisions.DECISIONS, "drawn", Drawn)
