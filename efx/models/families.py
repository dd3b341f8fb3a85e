"""The table of families: what a `config.model.family` is."""

from typing import Any, NamedTuple

from efx.errors import UsageError, nearest
from efx.models.bridged.config import BridgedConfig
from efx.models.bridged.model import Bridged
from efx.models.decoder import Decoder
from efx.models.decoder_config import DecoderConfig
from efx.models.encoder_decoder.config import EncoderDecoderConfig
from efx.models.encoder_decoder.model import EncoderDecoder
from efx.models.latent.config import LatentConfig
from efx.models.latent.model import Latent
from efx.settings import is_block, make, names_of


class Family(NamedTuple):
    """A block of settings and the module that is built of it, see `efx.models.contract`."""

    config: Any
    module: Any


FAMILIES = {
    "decoder": Family(DecoderConfig, Decoder),
    "encoder_decoder": Family(EncoderDecoderConfig, EncoderDecoder),
    "latent": Family(LatentConfig, Latent),
    "bridged": Family(BridgedConfig, Bridged),
}


def config_class(family):
    """The block of settings of a family; UsageError for an unknown one."""
    if family not in FAMILIES:
        raise UsageError(
            f"config.model.family={family!r}: expected one of {', '.join(FAMILIES)}"
            + nearest(family, FAMILIES)
        )
    return FAMILIES[family].config


def config_of(model):
    """The block of settings of a `config.model`: of a mapping, or a block as it is."""
    if is_block(model):
        return model
    mapping = dict(model.items())
    check_family(mapping)
    return make(config_class(mapping.get("family")), mapping)


def check_family(mapping):
    """UsageError where the settings of a `config.model` are those of another family than it says:
    a changed `config.model.family` does not change the settings beside it."""
    cls = config_class(mapping.get("family"))
    for family, (other, _) in FAMILIES.items():
        if set(names_of(other)) == set(mapping) != set(names_of(cls)):
            raise UsageError(
                f"config.model.family={mapping['family']!r}: the settings of config.model are "
                f"those of {family!r}; start from a config file of the family "
                f"{mapping['family']!r}"
            )
