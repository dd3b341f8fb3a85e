"""Settings: each is written once, as a field of a frozen dataclass, with its meaning beside it.

    @block("config.sample")
    class SampleConfig:
        top_k: Natural = 0  # choose among so many tokens; 0: all

The field's type says what is allowed: a Python type, `Literal` choices, a range (`Natural`,
`Fraction`...), tuples and unions of these, another block. Making a block of a wrong value raises a
`UsageError` that names key, value and what would be right. Rules between fields are the block's
`check`.

A config file starts from `defaults(...)` of a block, a ConfigDict that any Python file may write to
and that the command line overrides; `make` turns it into the block again.
"""

import dataclasses
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Literal

from ml_collections import ConfigDict, config_dict

from efx.errors import UsageError, nearest

# Largest int32 and float32, the limits of a range without an upper bound.
_LARGEST = {int: 2**31 - 1, float: (2 - 2**-23) * 2.0**127}


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number: inclusive `least` and `most`, exclusive `above` and `below`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @property
    def is_unbounded(self):
        """Whether there is no upper bound."""
        return self.most is None and self.below is None

    def words(self):
        """The range in words, such as "at least 1" or "in (0, 1]"."""
        low = f"[{self.least}" if self.above is None else f"({self.above}"
        high = f"{self.most}]" if self.below is None else f"{self.below})"
        if "None" not in low + high:
            return f"in {low}, {high}"
        if self.above is not None:
            return f"more than {self.above}"
        return "" if self.least is None else f"at least {self.least}"

    def violation(self, value, kind):
        """What a number must be, if it is out of range, such as "at least 1"; else "".

        Args:
          kind: int or float.
        """
        if not -math.inf < value < math.inf:  # math.isfinite fails on a huge int
            return "finite"
        if self.is_unbounded and abs(value) > _LARGEST[kind]:
            limit = format(_LARGEST[kind], "d" if kind is int else ".8g")
            return f"at most {limit} in size, the largest {kind.__name__}32"
        bounds = (
            (self.least, operator.ge),
            (self.above, operator.gt),
            (self.most, operator.le),
            (self.below, operator.lt),
        )
        is_valid = all(bound is None or holds(value, bound) for bound, holds in bounds)
        return "" if is_valid else self.words()


Count = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
# Blocks and other modules, each of which is traced: more would be traced for hours.
Modules = Annotated[int, Range(least=1, most=10_000)]
ModulesOrZero = Annotated[int, Range(least=0, most=10_000)]
# Positions or experts: the sum of two such numbers is an int32.
Positions = Annotated[int, Range(least=0, most=2**30 - 1)]
Bytes = Annotated[int, Range(least=0, below=2**63)]
Number = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
AtLeastOne = Annotated[float, Range(least=1)]
Fraction = Annotated[float, Range(above=0, most=1)]
Probability = Annotated[float, Range(least=0, below=1)]


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def block(where):
    """Class decorator: a frozen dataclass that converts and checks its values.

    Blocks have the method `refuse(name, message)`, which raises a `UsageError` for a value.

    Args:
      where: the block's name in a config, such as "config.model.mlp".
    """

    def decorate(cls):
        cls.where = where
        cls.refuse = _refuse
        cls.__post_init__ = _check_fields
        return dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def _refuse(self, name, message):
    raise UsageError(f"{self.where}.{name}={getattr(self, name)!r}: {message}")


def is_block(value):
    """Whether a class, or an object, is a block of settings."""
    return dataclasses.is_dataclass(value) and hasattr(value, "where")


@functools.cache
def _hints(cls):
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def names_of(cls):
    """The names of the settings in a block."""
    return tuple(_hints(cls))


def leaves(settings, name=None):
    """(dotted name, hint, value) of every setting in a block and in the blocks inside it; name: of
    the block, by default its own."""
    name = name or settings.where
    for key, hint in _hints(type(settings)).items():
        value = getattr(settings, key)
        if is_block(value):
            yield from leaves(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}", hint, value


def _check_fields(self):
    for name, hint in _hints(type(self)).items():
        value = converted(hint, getattr(self, name), f"{self.where}.{name}")
        object.__setattr__(self, name, value)
    if hasattr(self, "check"):
        self.check()


def _options(hint):
    """The alternatives of a union; of any other hint itself."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def converted(hint, value, where):
    """The value in the type of its field: a tuple for a list, a float for an int, a block for a
    mapping; UsageError if it does not have that type."""
    refusals = []
    for option in _options(hint):
        try:
            return _as_option(option, value, where)
        except UsageError as refusal:
            refusals.append(refusal)
    # Of several types, the one that the value has gives the best message.
    fitting = [
        refusal for refusal in refusals if "expected" not in str(refusal).rpartition(": ")[2]
    ]
    if fitting or len(refusals) == 1:
        raise (fitting or refusals)[0]
    expected = " or ".join(map(_type_name, _options(hint)))
    raise UsageError(f"{where}={value!r}: expected {expected}")


def _as_option(hint, value, where):
    """The value in one of the `_options` of a hint."""
    if hint in (object, typing.Any):
        return value
    if hint is types.NoneType:
        if value is None:
            return None
        raise UsageError(f"{where}={value!r}: expected None")
    origin = typing.get_origin(hint)
    if origin is Annotated:
        kind, allowed = typing.get_args(hint)
        number = _as_option(kind, value, where)
        if violation := allowed.violation(number, kind):
            raise UsageError(f"{where}={value!r}: must be {violation}")
        return number
    if origin is Literal:
        choices = typing.get_args(hint)
        if value in choices and isinstance(value, str):
            return value
        raise UsageError(
            f"{where}={value!r}: expected one of {', '.join(choices)}{nearest(value, choices)}"
        )
    if origin is tuple:
        item, _ = typing.get_args(hint)
        if isinstance(value, (tuple, list)):
            return tuple(converted(item, x, f"{where}[{i}]") for i, x in enumerate(value))
    elif is_block(hint):
        return value if isinstance(value, hint) else make(hint, value)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _LARGEST[float]:  # float() fails on the largest
            return math.inf if value > 0 else -math.inf
        return float(value)
    elif hint is str and isinstance(value, str):
        # Undecodable bytes of the command line are surrogates in Python.
        if "\0" in value or value != value.encode(errors="replace").decode():
            raise UsageError(f"{where}={value!r}: must be UTF-8 text without null characters")
        return value
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise UsageError(f"{where}={value!r}: expected {_type_name(hint)}")


def check_regex(pattern, where):
    """UsageError unless a setting is a regular expression, or empty."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{where}={pattern!r} is not a regular expression: {error}") from None


def _type_name(hint):
    origin = typing.get_origin(hint)
    if hint is types.NoneType:
        return "None"
    if origin is Annotated:
        return _type_name(typing.get_args(hint)[0])
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin is tuple:
        return f"a tuple of {_type_name(typing.get_args(hint)[0])}"
    if isinstance(hint, type):
        return hint.__name__
    return " or ".join(map(_type_name, _options(hint)))


def make(cls, mapping):
    """The block `cls` of a mapping that has exactly its settings."""
    if is_block(mapping) and isinstance(mapping, cls):
        return mapping
    if not isinstance(mapping, Mapping) and not hasattr(mapping, "items"):
        names = ", ".join(_hints(cls))
        raise UsageError(f"{cls.where}={mapping!r}: expected a block of settings ({names})")
    values, hints = dict(mapping.items()), _hints(cls)
    for key in values:
        if key not in hints:
            raise UsageError(f"{cls.where}.{key} is not a setting{nearest(key, hints)}")
    for key in hints:
        if key not in values:
            raise UsageError(f"{cls.where}.{key} is missing")
    return cls(**values)


def defaults(settings):
    """A block as a ConfigDict. A setting of several types accepts each of them, and one that is
    None (decided elsewhere) its type."""
    config = ConfigDict()
    for name, hint in _hints(type(settings)).items():
        value, options = getattr(settings, name), _options(hint)
        types_of_value = [option for option in options if option is not types.NoneType]
        if is_block(value):
            config[name] = defaults(value)
        elif hint is object or len(types_of_value) > 1:
            config[name] = config_dict.FieldReference(value, field_type=object)
        elif value is None:
            config[name] = config_dict.placeholder(_plain_type(types_of_value[0]))
        else:
            config[name] = value
    return config


def _plain_type(hint):
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)[0]
    return str if typing.get_origin(hint) is Literal else hint


def as_dict(settings):
    """A block as nested plain dicts with its tuples; a mapping as a plain dict."""
    if not is_block(settings):
        return dict(settings.items())
    values = {name: getattr(settings, name) for name in names_of(type(settings))}
    return {name: as_dict(value) if is_block(value) else value for name, value in values.items()}


def replaced(settings, changes):
    """A block with some settings changed, by dotted key: `replaced(c, {"mlp.kind": "moe"})`."""
    nested = {}
    for key, value in changes.items():
        name, _, subkey = key.partition(".")
        if subkey:
            nested.setdefault(name, {})[subkey] = value
        else:
            nested[name] = value
    for name, value in nested.items():
        if isinstance(value, dict) and is_block(getattr(settings, name)):
            nested[name] = replaced(getattr(settings, name), value)
    return dataclasses.replace(settings, **nested)
