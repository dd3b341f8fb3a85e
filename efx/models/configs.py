"""`config.model` of every family."""

from efx.errors import UsageError, nearest
from efx.models.bridged_config import BridgedConfig
from efx.models.decoder_config import DecoderConfig
from efx.models.encoder_decoder_config import EncoderDecoderConfig
from efx.models.latent_config import LatentConfig
from efx.settings import is_block, make, names_of

CONFIGS = {
    "decoder": DecoderConfig,
    "encoder_decoder": EncoderDecoderConfig,
    "latent": LatentConfig,
    "bridged": BridgedConfig,
}


def config_class(family):
    """The block of settings of a family; UsageError for an unknown one."""
    if family not in CONFIGS:
        raise UsageError(
            f"config.model.family={family!r}: expected one of {', '.join(CONFIGS)}"
            + nearest(family, CONFIGS)
        )
    return CONFIGS[family]


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
    for family, other in CONFIGS.items():
        if other is not cls and set(names_of(other)) == set(mapping):
            raise UsageError(
                f"config.model.family={mapping['family']!r}: the settings of config.model are "
                f"those of {family!r}; start from a config file of the other family"
            )
