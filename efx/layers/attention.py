"""The attention layer; the arithmetic is in `attend.py`, decoding in `kv_cache.py`."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn

from efx import sharding
from efx.layers import norms
from efx.layers.attend import attend, attend_context
from efx.layers.config import AttentionConfig
from efx.layers.kv_cache import attend_cached
from efx.layers.linear import Linear, projection
from efx.layers.positions import rope
from efx.sharding import constrain


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values; returns what is added to the residual.

    Attributes:
      config: as resolved; N is a multiple of K.
      std, std_out: initialisation of the input and the output projections.
      probs_dropout: factory of a module applied to the attention probabilities, or None.
      width: of the output; None: the heads side by side, without an output matrix.
    """

    config: AttentionConfig
    std: float
    std_out: float
    norm_eps: float
    probs_dropout: Callable | None
    dtype: jnp.dtype
    width: int | None

    @nn.compact
    def __call__(self, x_BTD, call, context=None):
        """Attention of the tokens x over themselves, or over `context` = (states [B, S, D], their
        `Call`). A context without a call (None) is another state of the same tokens (S = T),
        causal in the same order. While decoding, the context goes into the cache, and S may differ
        from T only inside groups. See `CacheView.access`."""
        c = self.config
        states_BSD, key_call = (x_BTD, None) if context is None else context
        same_tokens, key_call = key_call is None, key_call or call
        q_BTNH = k_BSKH = v_BSKH = None
        if call.access != "write":
            q_BTNH = self._queries(x_BTD, call)
        if call.access != "read":
            k_BSKH, v_BSKH = self._keys_values(states_BSD, key_call)
        options = dict(scale=c.factor, window=c.window, softcap=c.softcap)
        dropout = None if self.probs_dropout is None else self.probs_dropout(name="probs_dropout")
        if call.decode:
            # The first tokens need not read what they write.
            as_forward = call.cache.first and dropout is None
            view = call.with_cache(access="write") if as_forward else call
            out_BTNH = attend_cached(self, q_BTNH, k_BSKH, v_BSKH, view, key_call, dropout, options)
            if not as_forward:
                return None if out_BTNH is None else self._out(out_BTNH)
        probs_fn = None
        if dropout is not None:
            probs_fn = dropout.probs_dropout(call, key_call.positions_BT)
        options["probs_fn"] = probs_fn
        if not same_tokens:
            out_BTNH = attend_context(q_BTNH, k_BSKH, v_BSKH, call, key_call, **options)
        else:
            out_BTNH = attend(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                chunk=c.chunk,
                positions_BT=call.positions_BT,
                segment_ids_BT=call.segment_ids_BT,
                gaps=call.has_gaps,
                kernel=c.kernel,
                **options,
            )
        if dropout is not None:
            dropout.sow_block_outputs(probs_fn, call)
        return self._out(out_BTNH)

    @property
    def bias_out(self):
        return self.config.bias == "all"

    def _out(self, out_BTNH):
        out_BTD = out_BTNH.reshape(
            *out_BTNH.shape[:2], self.config.num_heads * self.config.head_dim
        )
        if self.width is None:
            return out_BTD
        return Linear(
            self.width, ("heads", "embed"), self.std_out, self.bias_out, self.dtype, name="out"
        )(out_BTD)

    def _queries(self, x_BTD, call):
        c = self.config
        q_BTNH = self._heads("query", x_BTD, c.num_heads, "heads")
        if c.rope_theta:
            q_BTNH = self._rotated(q_BTNH, call)
        return constrain(q_BTNH, "batch", "length", "act_heads", None)

    def _keys_values(self, x_BSD, call):
        c = self.config
        k_BSKH = self._heads("key", x_BSD, c.num_kv_heads, "kv_heads")
        v_BSKH = self._project("value", x_BSD, c.num_kv_heads, "kv_heads")
        v_BSKH = v_BSKH.reshape(k_BSKH.shape)
        if c.rope_theta:
            k_BSKH = self._rotated(k_BSKH, call)
        k_BSKH, v_BSKH = (
            constrain(y, "batch", "length", "act_kv_heads", None) for y in (k_BSKH, v_BSKH)
        )
        return k_BSKH, v_BSKH

    def _rotated(self, y, call):
        """Queries or keys by `rope`.

        On a GPU they are marked to be kept in place of what they are made of, which the backward
        pass needs for the gradient of a norm alone: rotating them again takes it two passes over
        memory. On a TPU it takes no time, and what is kept would take more room than the products.
        """
        y = rope(y, call.positions_BT, self.config)
        kept = sharding.platform() == "gpu" and self.config.qk_norm == "none"
        return projection(y) if kept else y

    def _project(self, name, x_BTD, heads, axis):
        features, bias = heads * self.config.head_dim, self.config.bias != "none"
        return Linear(features, ("embed", axis), self.std, bias, self.dtype, name=name)(x_BTD)

    def _heads(self, name, x_BTD, heads, axis):
        y = self._project(name, x_BTD, heads, axis)
        if self.config.qk_norm == "width":
            norm = norms.RMSNorm(eps=self.norm_eps, dtype=self.dtype, name=f"norm_{name}")
            y = self._norm_width(norm, y, heads)
        y = y.reshape(*y.shape[:-1], heads, self.config.head_dim)
        if self.config.qk_norm == "head":
            y = norms.RMSNorm(eps=self.norm_eps, dtype=self.dtype, name=f"norm_{name}")(y)
        return y

    def _norm_width(self, norm, y, heads):
        return norm(y)
