"""The page of all settings, made from the dataclasses and their comments.

python -m efx.config.reference
"""

import dataclasses
import inspect
import re
import types
import typing

from efx.config.run import Config
from efx.config.schema import is_block
from efx.models import FAMILIES
from efx.models.config import ModelConfig

HEAD = """# Settings

Printed by `python -m efx.config.reference`. Set one with `--config.<key>=<value>`, e.g.
`--config.model.depth=12`.
"""


def meanings(cls):
    """Return {field: its comment} of a block, from the class's source and that of its bases."""
    found = {}
    for base in reversed(cls.__mro__):
        if not is_block(base):
            continue
        above = []
        for line in inspect.getsource(base).splitlines():
            field = re.match(r"    (\w+): [^#]*(?:#\s*(.*))?$", line)
            comment = re.match(r"    # (.*)", line)
            if comment:
                above.append(comment[1])
            elif field and field[1] in cls.__dataclass_fields__:
                found[field[1]] = " ".join([*above, field[2] or ""]).strip()
                above = []
            else:
                above = []
    return found


def type_words(hint):
    """Return a type and its range in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, limits = arguments[0].__name__, arguments[1]
        return ", ".join(filter(None, (kind, limits.words())))
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"tuple of {type_words(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(type_words, arguments))
    return getattr(hint, "__name__", str(hint)).replace("NoneType", "None").replace("object", "any")


def table(cls, prefix, seen, without=()):
    """Yield the lines of a block and of the blocks inside it.

    Args:
      seen: blocks with a table already, to which this one's are added.
    """
    hints, comments = typing.get_type_hints(cls, include_extras=True), meanings(cls)
    rows, blocks = [], []
    for field in dataclasses.fields(cls):
        default = field.default
        if field.name in without:
            continue
        if is_block(default):
            inner = f"{prefix}.{field.name}"
            if (inner, default) not in seen:
                blocks.append((type(default), inner))
                seen.append((inner, default))
            continue
        cells = (field.name, type_words(hints[field.name]), f"`{default!r}`", comments[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if rows:
        yield f"\n### {prefix}\n"
        yield inspect.getdoc(cls).splitlines()[0] + "\n"
        yield "| key | values | default | meaning |\n|---|---|---|---|"
        yield from rows
    for inner, name in blocks:
        yield from table(inner, name, seen)


def page():
    """Return the page as Markdown."""
    seen = []
    lines = [HEAD, *table(Config, "config", seen, without=("model", "rules"))]
    lines += ["\n## The model, all families", *table(ModelConfig, "config.model", seen)]
    common = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    for name, family in FAMILIES.items():
        own = family.config
        fields = {field.name: field.default for field in dataclasses.fields(own)}
        without = [key for key in common if fields.get(key) == common[key]]
        lines += [f"\n## Family `{name}`", *table(own, "config.model", seen, without)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
