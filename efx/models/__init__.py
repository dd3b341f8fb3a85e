"""Model families and how to build, initialise and unroll their models.

    model = build(config.model, vocab_size=..., context=..., dtype=...)
    logits_BTV = model.apply(variables, tokens_BT, positions_BT=None, segment_ids_BT=None,
                             train=False)

`LanguageModel` (models/language_model.py) is the interface. Collections: `params`; `cache`
(decoding: `decode=True, cache_size=...`); `losses` and `stats`, sown by the layers, and `means`,
the sums that these are made of (efx/means.py); `state`, running averages that a checkpoint keeps.

Axis letters, the suffixes of array names and the subscripts of einsums alike: B batch, T query
position, S key position, D width, N query heads, K key and value heads, G query heads a kv head,
H head width, F MLP width, V vocabulary, E experts, C capacity, M groups of tokens, P positions in
a group, L stacked layers, R low rank, X channels.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx.errors import UsageError, nearest
from efx.layers import kv_cache
from efx.layers.stack import in_layers, period, unroll_params
from efx.models.adapters import AdapterConfig, adapt
from efx.models.bridges import Bridged, BridgedConfig
from efx.models.decoder import Decoder, DecoderConfig
from efx.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from efx.models.language_model import unrolled
from efx.models.latent import Latent, LatentConfig
from efx.settings import is_block, make, names_of, replaced
from efx.sharding import only_shapes


class Family(NamedTuple):
    """Settings (a block of `config.model`) and the `LanguageModel` that they describe."""

    config: Any
    module: Any


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
    """The settings of a `config.model`: of a mapping, or settings as they are."""
    if is_block(model):
        return model
    mapping = dict(model.items())
    check_family(mapping)
    return make(config_class(mapping.get("family")), mapping)


def check_family(mapping):
    """Raise UsageError if the settings of a `config.model` are those of another family than its
    name: changing `config.model.family` does not change the other settings."""
    cls = config_class(mapping.get("family"))
    for family, (other, _) in FAMILIES.items():
        if set(names_of(other)) == set(mapping) != set(names_of(cls)):
            raise UsageError(
                f"config.model.family={mapping['family']!r}: the settings of config.model are "
                f"those of {family!r}; start from a config file of the family "
                f"{mapping['family']!r}"
            )


def build(model_config, *, vocab_size, context, dtype, adapter=None, members=(), vocab_ways=1):
    """The module of a config's `model` block.

    Args:
      model_config: the block of a family, or a mapping with exactly its settings.
      vocab_size: V of the tokenizer.
      context: longest sequence; `config.model.context` when that is not 0.
      dtype: "float32" or "bfloat16", of activations (parameters are float32).
      adapter: `AdapterConfig` or a mapping, a config's `adapter` block; None: no adapters.
      members: the models of `config.model.member_runs`, in that order.
      vocab_ways: number of devices that split the vocabulary: it is padded to a multiple of it
        unless the config sets one.
    Raises:
      UsageError: an unknown family, an unknown, missing or mistyped key, or values that do not
        fit each other.
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
    made_of = [unrolled(member) for member in members]
    model = FAMILIES[c.family].module.of(made_of, c, vocab_size, jnp.dtype(dtype))
    if c.scan_layers:
        period(model.specs())
    if adapter is None:
        return model
    return adapt(model, make(AdapterConfig, adapter))


def changed(model, **changes):
    """The same model with settings of its config changed, by dotted key, which is checked anew."""
    return model.clone(config=replaced(model.config, changes))


def init(model, key):
    """Variables of a new model; parameters are boxed with their logical axes."""
    tokens = jnp.zeros((1, min(2, model.context)), jnp.int32)
    keys = {"params": key, "dropout": key, "routing": key}
    return model.init(keys, tokens, mutable=["params", "state"])


@functools.lru_cache(maxsize=64)
def variable_shapes(model):
    """The shapes of what `init` gives."""
    with only_shapes():
        # The key is made inside: the mesh may have no devices, as in ahead-of-time compilation.
        return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def unboxed_shapes(model):
    """The same without logical axes. `nn.unbox` would constrain the layout of what are no arrays
    where there is a mesh."""

    def is_box(leaf):
        return isinstance(leaf, nn.LogicallyPartitioned)

    variables = variable_shapes(model)
    return jax.tree.map(
        lambda leaf: leaf.value if is_box(leaf) else leaf, variables, is_leaf=is_box
    )


def init_cache(model, batch, cache_size):
    """An empty `cache` collection for decoding `batch` sequences of up to `cache_size` tokens."""
    cache = decoding_shapes(model, batch, cache_size)[0]

    def fill():
        starts = _map_names(_start, cache)
        return jax.tree.map(lambda x, start: jnp.full(x.shape, start, x.dtype), cache, starts)

    return jax.jit(fill)()  # one program, not one for each shape


def emptied(cache, rows_B):
    """The cache without the tokens of these rows, bool [B]. Keys and values, which are large, stay:
    no query sees those that have no position."""

    def change(name, x):
        if name in kv_cache.SEEN_BY_POSITION:
            return x
        return jnp.where(rows_B.reshape(-1, *(1,) * (x.ndim - 1)), _start(name, x), x)

    return _map_names(change, cache)


def _start(name, x):
    """What the array of this name starts out with; a position of -1 is seen by no query."""
    return np.array(-1 if name == "position" else 0, x.dtype)


def _map_names(function, cache):
    return jax.tree_util.tree_map_with_path(lambda path, x: function(path[-1].key, x), cache)


@functools.cache
def decoding_shapes(model, batch, cache_size):
    """(cache, what `features` gives for one token of each sequence), as shapes."""
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def make(tokens):
        key = jax.random.key(0)
        keys = {"params": key, "dropout": key, "routing": key}
        options = dict(decode=True, cache_size=cache_size, method="features")
        x_BTD, variables = model.init_with_output(keys, tokens, tokens, **options)
        return variables["cache"], x_BTD[:, 0]

    with only_shapes():
        return jax.eval_shape(make, tokens)


def unroll(model, params):
    """(model, params) with scanned layers unrolled; as they are when they already are."""
    if not model.config.scan_layers:
        return model, params
    return unrolled(model), _unroll(model, params)


def unroll_variables(model, variables):
    """Every collection of a model with scanned layers as those of the unrolled model."""
    if not model.config.scan_layers:
        return variables
    return {name: _unroll(model, tree) for name, tree in variables.items()}


def _unroll(model, tree):
    return in_layers(unroll_params, tree, model.specs())
