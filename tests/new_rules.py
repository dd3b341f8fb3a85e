"""A score, a selection, a gate and a decision that efx does not know by name, for tests of what all
have. A test module imports the fixture `new_rules`."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from efx.config import schema
from efx.layers import selection
from efx.parallel.sharding import parameter
from efx.routing import decisions
from efx.routing.config import DepthRoutingConfig
from efx.routing.gates import GATES
from efx.routing.scores import SCORES, Score
from efx.routing.selections import SELECTIONS, Selection


class Probe(Score):
    """The distance from a learned point: with parameters of its own."""

    is_trained: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x_BTD, call):
        point_D = parameter(self, "point", nn.initializers.ones, (self.width,), ("norm",))
        return jnp.linalg.norm(x_BTD.astype(jnp.float32) - point_D[None, None], axis=-1)


def first_tokens(scores_BT, rate, valid_BT, segment_ids_BT):
    """The first ceil(rate * T) valid tokens of a row."""
    slots = selection.num_slots(rate, scores_BT.shape[1])
    return valid_BT & (jnp.cumsum(valid_BT, axis=1) <= slots)


class Drawn(decisions.Decision):
    """A random logit."""

    def __call__(self, x_BTD, score_BT):
        return jax.random.normal(self.make_rng("routing"), score_BT.shape)


@pytest.fixture
def new_rules(monkeypatch):
    for name in ("score", "train_selection", "gate", "causal_decision"):
        monkeypatch.setitem(schema._hints(DepthRoutingConfig), name, str)
    monkeypatch.setitem(SCORES, "probe", Probe)
    monkeypatch.setitem(SELECTIONS, "first", Selection(first_tokens))
    monkeypatch.setitem(GATES, "softplus", jax.nn.softplus)
    monkeypatch.setitem(decisions.DECISIONS, "drawn", Drawn)
