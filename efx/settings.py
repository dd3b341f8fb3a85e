"""Which settings there are: a config has the keys of `configs/common.py`, no more and no less.

A config is a ConfigDict that any Python file may write to, so a misspelt key would otherwise be one
more key, which nobody reads. Whatever set it, a config is checked as a whole.
"""

from ml_collections import ConfigDict

from efx.errors import UsageError, nearest


def known(family="decoder"):
    """The config with every key that there is for a model family, at its default.

    Raises UsageError for an unknown family.
    """
    from efx.configs import common

    if family not in common.FAMILIES:
        raise UsageError(
            f"config.model.family={family!r}: expected one of {', '.join(common.FAMILIES)}"
            + nearest(family, common.FAMILIES)
        )
    config = common.base()
    config.model = ConfigDict(common.FAMILIES[family]())
    return config


def check(config, where=""):
    """UsageError unless a config has just the keys that there are, each with a value of its type.

    Args:
      config: ConfigDict, of any family.
      where: what the config comes from, to be told with what is wrong: a file, a run folder.
    """
    try:
        if not isinstance(config, ConfigDict):
            raise UsageError(f"a config is a ConfigDict, not of type {type(config).__name__}")
        right = known(require(config, "model.family"))
        _check_family(config.model)
        _check_block(config, right, "config", names(right))
    except UsageError as error:
        raise UsageError(f"{where}: {error}" if where else str(error)) from None


def _check_family(model):
    """A changed `config.model.family` does not change the settings beside it."""
    from efx.configs import common

    for family, settings in common.FAMILIES.items():
        if family != model.family and set(settings()) == set(model):
            raise UsageError(
                f"config.model.family={model.family!r}: the settings of config.model are those of "
                f"{family!r}; start from a config file of the other family"
            )


def _check_block(block, right, name, every):
    for key in block:
        if key not in right:
            raise UsageError(_unknown(f"{name}.{key}", block=right, every=every))
    for key in right:
        if key not in block:
            raise UsageError(f"{name}.{key} is missing")
        value = block[key]
        if _is_block(right[key]):
            if not _is_block(value):
                raise UsageError(
                    f"{name}.{key}={value!r}: it is a block of settings, {', '.join(right[key])}"
                )
            _check_block(value, right[key], f"{name}.{key}", every)
            continue
        try:
            right[key] = value
        except TypeError:
            wanted = right.get_type(key).__name__
            raise UsageError(f"{name}.{key}={value!r}: expected {wanted}") from None


def require(config, key):
    """What a dotted key names in a config, a value or a block; UsageError if it names nothing."""
    block, name = config, "config"
    for part in key.split("."):
        if not _is_block(block):
            raise UsageError(f"config.{key}: {name} is a value, not a block of settings")
        name = f"{name}.{part}"
        if part not in block:
            raise UsageError(_unknown(name, block, names(config)))
        block = block[part]
    return block


def names(block, name="config"):
    """The dotted names of all settings in a block that is called `name`."""
    for key in block:
        inner = f"{name}.{key}"
        yield from names(block[key], inner) if _is_block(block[key]) else [inner]


def elsewhere(key, every):
    """The name of a setting that ends in these dotted keys, the shortest of `every` such; or ""."""
    return min((name for name in every if name.endswith(f".{key}")), key=len, default="")


def _unknown(name, block, every):
    """What to say of a name that is none: where else there is such a key, or the nearest one."""
    key = name.rpartition(".")[2]
    found = elsewhere(key, every)
    hint = f" (did you mean {found!r}?)" if found else nearest(key, block)
    return f"{name} is not a setting{hint}"


def _is_block(value):
    return hasattr(value, "keys")
