"""The variables of a model: initial values, shapes, unrolled layers and the cache of decoding."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.layers import kv_cache
from efx.models.language_model import unrolled
from efx.models.stack import convert_layers, unroll_params
from efx.parallel.sharding import only_shapes


def init(model, key):
    """Variables of a new model; parameters are boxed with their logical axes."""
    tokens = jnp.zeros((1, min(2, model.context)), jnp.int32)
    return model.init(_keys(key), tokens, mutable=["params", "state"])


def _keys(key):
    return {"params": key, "dropout": key, "routing": key}


@functools.lru_cache(maxsize=64)
def variable_shapes(model):
    """The shapes of the variables that `init` returns."""
    with only_shapes():
        # Make the key here: the mesh may have no devices, as in ahead-of-time compilation.
        return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def unboxed_shapes(model):
    """`variable_shapes` without logical axes."""

    def is_box(leaf):
        return isinstance(leaf, nn.LogicallyPartitioned)

    # On a mesh `nn.unbox` would constrain the layout of shapes, which fails.
    shapes = variable_shapes(model)
    return jax.tree.map(lambda x: x.value if is_box(x) else x, shapes, is_leaf=is_box)


def unroll(model, params):
    """(model, params) with scanned layers unrolled; unchanged without scanned layers."""
    if not model.config.scan_layers:
        return model, params
    return unrolled(model), convert_layers(unroll_params, params, model.specs())


def unroll_variables(model, variables):
    """All collections of a model, with scanned layers unrolled."""
    return {name: unroll(model, tree)[1] for name, tree in variables.items()}


# ---- the cache of decoding ---------------------------------------------------------------------


@functools.cache
def decoding_shapes(model, batch, cache_size):
    """Shapes of (cache, `features` of one new token of each sequence)."""
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def run(tokens):
        options = dict(decode=True, cache_size=cache_size, method="features")
        keys = _keys(jax.random.key(0))
        x_BTD, variables = model.init_with_output(keys, tokens, tokens, **options)
        return variables["cache"], x_BTD[:, 0]

    with only_shapes():
        return jax.eval_shape(run, tokens)


def init_cache(model, batch, cache_size):
    """An empty `cache` collection for decoding `batch` sequences of up to `cache_size` tokens."""
    cache = decoding_shapes(model, batch, cache_size)[0]
    return jax.jit(lambda: _map_names(_empty, cache))()  # one program, not one for each shape


def clear_rows(cache, rows_B):
    """The cache without the tokens of the rows in a mask, bool [B]. Keys and values, which are
    large, remain: no query sees keys without a position."""

    def clear(name, x):
        if name in kv_cache.KEYS_AND_VALUES:
            return x
        return jnp.where(rows_B.reshape(-1, *(1,) * (x.ndim - 1)), _empty(name, x), x)

    return _map_names(clear, cache)


def _empty(name, x):
    """An empty array of the cache. No query sees a position of -1."""
    return jnp.full(x.shape, -1 if name == "position" else 0, x.dtype)


def _map_names(function, cache):
    return jax.tree_util.tree_map_with_path(lambda path, x: function(path[-1].key, x), cache)
