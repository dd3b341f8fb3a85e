"""Blocks of settings: a field's type says which values are allowed; every setting has one."""

import dataclasses
import json
import math
from typing import Literal

import pytest
from refusals import refused

from efx import models
from efx.config import schema
from efx.config.load import to_config, with_new_defaults
from efx.config.names import OTHER_NAMES, setting_names
from efx.config.run import default_config
from efx.config.schema import Count, Fraction, Natural, block
from efx.models import FAMILIES


@block("config.inner")
class Inner:
    size: Count = 4
    share: Fraction | tuple[Fraction, ...] = 0.5


@block("config.outer")
class Outer:
    kind: Literal["one", "other"] = "one"
    names: tuple[str, ...] = ()
    rate: float = 0.0
    limit: Natural | None = None
    on: bool = False
    inner: Inner = Inner()

    def check(self):
        if self.on and not self.names:
            self.refuse("on", "needs config.outer.names")


@pytest.mark.parametrize("changes, name", [
    ({"kind": "othr"}, "config.outer.kind='othr'"),
    ({"names": "ab"}, "config.outer.names='ab'"),
    ({"names": ("a", 1)}, "config.outer.names[1]=1"),
    ({"rate": True}, "config.outer.rate=True"),
    ({"limit": -1}, "config.outer.limit=-1"),
    ({"limit": 1.5}, "config.outer.limit=1.5"),
    ({"on": 1}, "config.outer.on=1"),
    ({"on": True}, "config.outer.on=True"),
    ({"inner": 3}, "config.inner=3"),
    ({"inner": {"size": 0, "share": 0.5}}, "config.inner.size=0"),
    ({"inner": {"size": 1, "share": math.nan}}, "config.inner.share=nan"),
    ({"inner": {"size": 1, "share": 0}}, "config.inner.share=0"),
    ({"inner": {"size": 1, "share": (0.5, 2)}}, "config.inner.share[1]=2"),
    ({"inner": {"size": 1, "share": "all"}}, "config.inner.share='all'"),
    ({"inner": {"size": 1}}, "config.inner.share"),
    ({"inner": {"size": 1, "share": 1, "sise": 2}}, "config.inner.sise"),
])  # fmt: skip
def test_a_bad_value_is_refused_by_name(changes, name):
    refused(lambda: Outer(**changes), name)


def test_values_are_converted_and_fixed():
    made = Outer(names=["a"], rate=1, inner={"size": 2, "share": [1, 0.5]})
    assert made == Outer(names=("a",), rate=1.0, inner=Inner(size=2, share=(1.0, 0.5)))
    assert isinstance(made.rate, float) and isinstance(made.inner.share, tuple)
    assert hash(made) == hash(dataclasses.replace(made))


def test_a_block_starts_a_config_and_comes_back():
    config = schema.defaults(Outer())
    assert schema.make(Outer, config) == Outer()
    config.inner.share = (0.5, 0.25)  # of either type
    config.limit = 3  # None: of its type, once it is given
    with pytest.raises(TypeError):
        config.limit = "three"
    assert schema.make(Outer, config).inner.share == (0.5, 0.25)
    changed = schema.replaced(Outer(), {"rate": 2.0, "inner.size": 9})
    assert (changed.rate, changed.inner.size) == (2.0, 9)
    assert schema.as_dict(changed)["inner"] == {"size": 9, "share": 0.5}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "bridged"])
def test_the_default_config_of_a_family_is_complete_and_resolved_once(family, monkeypatch):
    config = default_config(family)
    made = to_config(config)
    assert schema.as_dict(made) == config.to_dict() and to_config(made) is made
    cls, calls = FAMILIES[family].config, []
    resolved = cls.resolved
    monkeypatch.setattr(cls, "resolved", lambda self: calls.append(self) or resolved(self))
    models.build(made.model, vocab_size=50, context=32, dtype="float32", adapter=made.adapter)
    assert len(calls) == 1


def test_a_setting_that_a_run_predates_has_its_default():
    whole = json.loads(json.dumps(schema.as_dict(to_config(default_config()))))
    whole["optim"]["b1"] = 0.5
    older = json.loads(json.dumps(whole))
    del older["optim"]["clip_norm"], older["model"]["mlp"]
    assert with_new_defaults(whole) == with_new_defaults(older) == whole


def test_each_name_of_another_program_leads_to_one_setting():
    every = set(setting_names(default_config()))
    others = [name for line in OTHER_NAMES.values() for name in line.split()]
    assert len(others) == len(set(others))
    assert {f"config.{setting}" for setting in OTHER_NAMES} <= every
    # A setting of such a name would be suggested without the table.
    assert not set(others) & {name.rpartition(".")[2] for name in every}
