"""Blocks of settings: what a type says is allowed, and how it is told."""

import dataclasses
import json
import math
import typing
from typing import Literal

import pytest
from ml_collections import ConfigDict

from efx import models, run_settings, settings
from efx.errors import UsageError
from efx.models.families import FAMILIES
from efx.settings import Count, Fraction, Natural, block


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
            raise UsageError("config.outer.on=True needs names")


@pytest.mark.parametrize("changes, line", [
    ({"kind": "othr"}, "config.outer.kind='othr': expected one of one, other (did you mean "),
    ({"names": "ab"}, "config.outer.names='ab': expected a tuple of str"),
    ({"names": ("a", 1)}, "config.outer.names=('a', 1): expected str"),
    ({"rate": "fast"}, "config.outer.rate='fast': expected float"),
    ({"rate": True}, "config.outer.rate=True: expected float"),
    ({"limit": -1}, "config.outer.limit=-1: must be at least 0"),
    ({"limit": 1.5}, "config.outer.limit=1.5: expected int"),
    ({"on": 1}, "config.outer.on=1: expected bool"),
    ({"on": True}, "config.outer.on=True needs names"),
    ({"inner": 3}, "config.inner=3: expected a block of settings (size, share"),
    ({"inner": {"size": 0, "share": 0.5}}, "config.inner.size=0: must be at least 1"),
    ({"inner": {"size": True, "share": 0.5}}, "config.inner.size=True: expected int"),
    ({"inner": {"size": 1, "share": 0.0}}, "config.inner.share=0.0: must be in (0, 1]"),
    ({"inner": {"size": 1, "share": math.nan}}, "config.inner.share=nan: must be in (0, 1]"),
    ({"inner": {"size": 1, "share": (0.5, 2)}}, "config.inner.share=(0.5, 2): must be in (0, 1]"),
    ({"inner": {"size": 1, "share": "all"}}, "config.inner.share='all': expected float or a tuple"),
    ({"inner": {"size": 1}}, "config.inner.share is missing"),
    ({"inner": {"size": 1, "share": 1, "sise": 2}}, "config.inner.sise is not a setting (did you"),
])  # fmt: skip
def test_what_is_not_allowed_is_one_line(changes, line):
    with pytest.raises(UsageError) as error:
        Outer(**changes)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_values_are_converted():
    made = Outer(names=["a"], rate=1, inner={"size": 2, "share": [1, 0.5]})
    assert made == Outer(names=("a",), rate=1.0, inner=Inner(size=2, share=(1.0, 0.5)))
    assert isinstance(made.rate, float) and isinstance(made.inner.share, tuple)
    assert hash(made) == hash(dataclasses.replace(made))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.rate = 2.0


def test_a_block_starts_a_config_and_comes_back():
    config = settings.defaults(Outer())
    assert isinstance(config, ConfigDict) and settings.make(Outer, config) == Outer()
    config.inner.share = (0.5, 0.25)  # of either type
    config.limit = 3  # None: of its type, once it is given
    with pytest.raises(TypeError):
        config.limit = "three"
    assert settings.make(Outer, config).inner.share == (0.5, 0.25)
    changed = settings.replaced(Outer(), {"rate": 2.0, "inner.size": 9})
    assert (changed.rate, changed.inner.size) == (2.0, 9)
    assert settings.as_dict(changed)["inner"] == {"size": 9, "share": 0.5}


def choices(made, prefix=""):
    """{setting: a value that it cannot have} of those that are one or several of some names."""
    found = {}
    for name, hint in typing.get_type_hints(type(made)).items():
        value = getattr(made, name)
        options = {typing.get_origin(option) for option in settings._options(hint)}
        if settings.is_block(value):
            found |= choices(value, f"{prefix}{name}.")
        elif Literal in options:
            found[prefix + name] = "nothing"
        elif tuple in options and typing.get_origin(typing.get_args(hint)[0]) is Literal:
            found[prefix + name] = ("nothing",)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_that_no_setting_has_is_one_line(family):
    """Of every setting of a run and of its family that takes names."""
    config = run_settings.Config(model=FAMILIES[family].config())
    known = choices(config)
    assert len(known) > (10 if family == "bridged" else 20)
    for key, value in known.items():
        with pytest.raises(UsageError) as error:
            settings.replaced(config, {key: value})
        line = str(error.value)
        assert line.startswith(f"config.{key}={value!r}: expected one of "), line
        assert "\n" not in line


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "bridged"])
def test_the_default_config_of_a_family(family, monkeypatch):
    """It is complete, comes back as it was, and is made out once a build."""
    config = run_settings.known(family)
    made = run_settings.check(config)
    assert settings.as_dict(made) == config.to_dict() and run_settings.check(made) is made
    cls, calls = FAMILIES[family].config, []
    resolved = cls.resolved
    monkeypatch.setattr(cls, "resolved", lambda self: calls.append(self) or resolved(self))
    models.build(made.model, vocab_size=50, context=32, dtype="float32", adapter=made.adapter)
    assert len(calls) == 1


# ---- runs that are older than a setting ---------------------------------------------------------


def plain_config(family):
    config = run_settings.check(run_settings.known(family))
    return json.loads(json.dumps(settings.as_dict(config)))


def blocks_of(plain, right, path=()):
    """(path, block) of all blocks within those of a whole config."""
    for key, value in plain.items():
        inner = getattr(right, key)
        if settings.is_block(inner):
            yield (*path, key), value
            yield from blocks_of(value, inner, (*path, key))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_run_is_older_than_is_at_its_default(family, caplog):
    """Every setting within a block in turn; what names the family stays."""
    whole, right = plain_config(family), run_settings.check(run_settings.known(family))
    assert run_settings.completed(whole) == whole and not caplog.records
    for path, block_ in list(blocks_of(whole, right)):
        for key in block_:
            if (*path, key) == ("model", "family"):
                continue
            older = json.loads(json.dumps(whole))
            inner = older
            for part in path:
                inner = inner[part]
            del inner[key]
            assert run_settings.completed(older) == whole, (path, key)
    assert all("this run predates config." in record.message for record in caplog.records)


def test_what_lacks_a_block_or_is_no_config_stays_as_it_is():
    whole = plain_config("decoder")
    for plain in (
        None,
        [],
        {},
        {"model": 3},
        {"model": {"family": "no"}},
        {"model": {"family": []}},
    ):
        assert run_settings.completed(plain) == plain
    del whole["optim"]
    whole["losses"] = 3
    assert run_settings.completed(whole) == whole
