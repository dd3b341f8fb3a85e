"""Model families, and the contract that each of them keeps.

    model = build(config.model, vocab_size=..., context=..., dtype=...)
    logits_BTV = model.apply(variables, tokens_BT, positions_BT=None, segment_ids_BT=None,
                             train=False)

Collections: `params`; `cache` (decoding: `decode=True, cache_size=...`); `losses` and `stats`,
sown by the layers, and `means`, what these are made of, so that batches add up (efx/means.py);
`state`, running averages that a checkpoint keeps. Every family also has
`features` and `logits` (the two halves of a call), `head_params` and `head_fn` (the output layer
as a pure function), `ledger`, `parameter_count`, `cache_bytes`, `specs` and `unrolled`.

Axis letters, the suffixes of array names and the subscripts of einsums alike: B batch, T query
position, S key position, D width, N query heads, K key and value heads, G query heads a kv head,
H head width, F MLP width, V vocabulary, E experts, C capacity, M groups of tokens, P positions in
a group, L stacked layers, R low rank, X channels.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from efx.errors import UsageError, nearest
from efx.layers.adapters import AdapterConfig
from efx.layers.stack import unroll_params
from efx.models.bridged import Bridged
from efx.models.decoder import Decoder
from efx.models.encoder_decoder import EncoderDecoder
from efx.models.gated import adapt
from efx.models.latent import Latent

FAMILIES = {
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
    "latent": Latent,
    "bridged": Bridged,
}


def build(model_config, *, vocab_size, context, dtype, adapter=None, members=(), vocab_ways=1):
    """The module of a config's `model` block.

    Args:
      model_config: mapping with `family` and exactly the fields of that family.
      vocab_size: V of the tokenizer.
      context: longest sequence; `config.model.context` when that is not 0.
      dtype: "float32" or "bfloat16", of activations (parameters are float32).
      adapter: mapping, a config's `adapter` block; None: no adapters.
      members: family "bridged": the models of its anchor and of those that augment it.
      vocab_ways: what the vocabulary is padded to a multiple of where the config does not say:
        over how many devices it is to be split.
    Raises:
      UsageError: an unknown family, an unknown, missing or mistyped key, or values that do not
        fit each other.
    """
    fields = dict(model_config)
    family = fields.pop("family", None)
    if family not in FAMILIES:
        raise UsageError(
            f"config.model.family={family!r}: expected one of {', '.join(FAMILIES)}"
            + nearest(family, FAMILIES)
        )
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"config.train.dtype={dtype!r}: expected float32 or bfloat16")
    given = dict(vocab_size=vocab_size, dtype=jnp.dtype(dtype), selection="auto")
    given["context"] = fields.pop("context", 0) or context
    if fields.get("vocab_multiple") == 0:
        fields["vocab_multiple"] = vocab_ways
    cls = FAMILIES[family]
    if cls is Bridged:
        if len(members) != 1 + len(fields["augment"]):
            raise UsageError(
                "config.model.family='bridged' is made from run folders: config.model.anchor and "
                "config.model.augment"
            )
        given.update(anchor_model=members[0], augment_models=tuple(members[1:]))
    elif members:
        raise ValueError(f"a model of the family {family!r} has no members")
    values = _typed(cls, fields, "config.model", given)
    model = cls(**values).resolved()
    if adapter is None:
        return model
    if cls is Bridged and adapter["kind"] != "none":
        raise UsageError(
            f"config.adapter.kind={adapter['kind']!r}: not with config.model.family='bridged'; "
            "bridge a run that has adapters instead"
        )
    return adapt(model, AdapterConfig(**_typed(AdapterConfig, dict(adapter), "config.adapter")))


def _typed(cls, mapping, where, given=None):
    """Keyword arguments of a dataclass from a mapping: all fields present, known and well typed."""
    given = given or {}
    hints = typing.get_type_hints(cls)
    fields = {
        f.name: f
        for f in dataclasses.fields(cls)
        if f.init and f.name not in ("parent", "name") and f.name not in given
    }
    for key in mapping:
        if key not in fields:
            raise UsageError(f"{where}.{key} is not a setting{nearest(key, fields)}")
    values = dict(given)
    for name in fields:
        if name not in mapping:
            raise UsageError(f"{where}.{name} is missing from the config")
        values[name] = _cast(hints[name], mapping[name], f"{where}.{name}")
    return values


def _cast(hint, value, where):
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping) and not hasattr(value, "items"):
            raise UsageError(f"{where}={value!r}: expected a block of settings")
        return hint(**_typed(hint, dict(value.items()), where))
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is types.NoneType and value is None:
            return None
        if typing.get_origin(option) is tuple and isinstance(value, (tuple, list)):
            item = typing.get_args(option)[0]
            return tuple(_cast(item, x, where) for x in value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option):
            if not (option is int and isinstance(value, bool)):
                return value
    wanted = " or ".join(
        "None" if o is types.NoneType else getattr(o, "__name__", str(o)) for o in options
    )
    raise UsageError(f"{where}={value!r}: expected {wanted}")


def mup_base(model):
    """`config.model.mup.base_width` of a family that has it, else 0; the optimiser asks for it."""
    mup = getattr(model, "mup", None)
    return mup.base_width if mup else 0


def init(model, key):
    """Variables of a new model; parameters are boxed with their logical axes."""
    tokens = jnp.zeros((1, min(2, model.context)), jnp.int32)
    return model.init({"params": key, "dropout": key, "routing": key}, tokens)


def init_cache(model, batch, cache_size):
    """An empty `cache` collection for decoding `batch` sequences of up to `cache_size` tokens."""
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def make(key, tokens):
        keys = {"params": key, "dropout": key, "routing": key}
        return model.init(keys, tokens, tokens, decode=True, cache_size=cache_size)["cache"]

    shapes = jax.eval_shape(make, jax.random.key(0), tokens)
    # Slots start out empty: a position of -1 is seen by no query.
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full(x.shape, -1 if path[-1].key == "position" else 0, x.dtype),
        shapes,
    )


def unroll(model, params):
    """(model, params) with scanned layers unrolled; as they are when they already are."""
    if not model.scan_layers:
        return model, params
    return model.unrolled(), _unroll(model, params)


def unroll_variables(model, variables):
    """Every collection of a model with scanned layers as those of the unrolled model."""
    if not model.scan_layers:
        return variables
    return {name: _unroll(model, tree) for name, tree in variables.items()}


def _unroll(model, tree):
    return {**tree, "layers": unroll_params(tree["layers"], model.specs())}
