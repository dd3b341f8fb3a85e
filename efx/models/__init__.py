"""Model families and how to build their models; their variables: efx/models/variables.py.

    model = build(config.model, vocab_size=..., context=..., dtype=...)
    logits_BTV = model.apply(variables, tokens_BT, positions_BT=None, segment_ids_BT=None,
                             train=False)

`LanguageModel` (models/language_model.py) is the interface. Collections: `params`; `cache`
(decoding: `decode=True, cache_size=...`); `losses` and `stats`, sown by the layers, and `means`,
the sums that these are made of (efx/layers/batch_means.py); `state`, running averages that a
checkpoint keeps.

Axis letters, the suffixes of array names and the subscripts of einsums alike: B batch, T query
position, S key position, D width, N query heads, K key and value heads, G query heads a kv head,
H head width, F MLP width, V vocabulary, E experts, C capacity, M groups of tokens, P positions in
a group, L stacked layers, R low rank, X channels.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from efx.config.schema import is_block, make, names_of, replaced
from efx.errors import UsageError, nearest
from efx.models.adapters import AdapterConfig, adapt
from efx.models.bridges import Bridged, BridgedConfig
from efx.models.decoder import Decoder, DecoderConfig
from efx.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from efx.models.language_model import unrolled
from efx.models.latent import Latent, LatentConfig
from efx.models.stack import period
from efx.models.variables import (  # noqa: F401  (public names of this package)
    clear_rows,
    decoding_shapes,
    init,
    init_cache,
    unboxed_shapes,
    unroll,
    unroll_variables,
    variable_shapes,
)


class Family(NamedTuple):
    config: Any  # settings, a block of `config.model`
    module: Any  # `LanguageModel` that they describe


# A new family is one model file, one config and one row here.
FAMILIES = {
    "decoder": Family(DecoderConfig, Decoder),
    "encoder_decoder": Family(EncoderDecoderConfig, EncoderDecoder),
    "latent": Family(LatentConfig, Latent),
    "bridged": Family(BridgedConfig, Bridged),
}


def config_class(family):
    """The settings of a family; UsageError for an unknown one."""
    if family not in FAMILIES:
        raise UsageError(
            f"config.model.family={family!r}: expected one of {', '.join(FAMILIES)}"
            + nearest(family, FAMILIES)
        )
    return FAMILIES[family].config


def config_of(model):
    """The settings of a `config.model`, from a mapping or unchanged."""
    if is_block(model):
        return model
    mapping = dict(model.items())
    check_family(mapping)
    return make(config_class(mapping.get("family")), mapping)


def check_family(mapping):
    """Raise UsageError if a `config.model` has the settings of another family than its `family`:
    a change of `config.model.family` does not change the other settings."""
    name = mapping.get("family")
    expected = set(names_of(config_class(name)))
    for other, (config, _) in FAMILIES.items():
        if set(names_of(config)) == set(mapping) != expected:
            raise UsageError(
                f"config.model.family={name!r}: the settings of config.model are those of "
                f"{other!r}; start from a config file of the family {name!r}"
            )


def build(model_config, *, vocab_size, context, dtype, adapter=None, members=(), vocab_ways=1):
    """The module of a config's `model` block.

    Args:
      model_config: the block of a family, or a mapping with exactly its settings.
      context: longest sequence, if `config.model.context` is 0.
      dtype: "float32" or "bfloat16", of activations; parameters are float32.
      adapter: a config's `adapter` block or such a mapping; None: no adapters.
      members: the models of `config.model.member_runs`, in that order.
      vocab_ways: the padded vocabulary is a multiple of it, if `vocab_multiple` is 0.
    Raises: UsageError for unknown or missing settings, and values that do not fit together.
    """
    c = config_of(model_config)
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"config.train.dtype={dtype!r}: expected float32 or bfloat16")
    if vocab_size < 1 or context < 1:
        raise UsageError(
            f"a model of {vocab_size} tokens and sequences of {context}: both must be at least 1"
        )
    changes = {"context": c.context or context}
    if "vocab_multiple" in names_of(type(c)):
        changes["vocab_multiple"] = c.vocab_multiple or vocab_ways
    c = dataclasses.replace(c, **changes).resolved()
    members = [unrolled(member) for member in members]
    model = FAMILIES[c.family].module.compose(members, c, vocab_size, jnp.dtype(dtype))
    if c.scan_layers:
        period(model.specs())  # raises if the layers do not repeat a pattern
    return model if adapter is None else adapt(model, make(AdapterConfig, adapter))


def changed(model, **changes):
    """The same model with other settings, by dotted key, which are checked again."""
    return model.clone(config=replaced(model.config, changes))
