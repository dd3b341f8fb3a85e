"""The attention layer and its cache; the arithmetic is in `attend.py`."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn

from efx.layers import cache, norms
from efx.layers.attend import attend, attend_cache, attend_context
from efx.layers.linear import Linear
from efx.layers.positions import rope
from efx.sharding import constrain


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values; returns what is added to the residual.

    Attributes:
      num_heads, num_kv_heads, head_dim: N, K, H; N is a multiple of K.
      rope_theta: base of the rotary embedding, 0 for none.
      qk_norm: RMS-normalise queries and keys: "none", "head" (over H) or "width" (over N*H).
      mup: scale the scores by 1/H instead of 1/sqrt(H).
      window: how many positions back a query sees, its own included; 0 for all.
      std, std_out: initialisation of the input and the output projections.
      probs_dropout: factory of a module applied to the attention probabilities, or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    use_bias: bool
    rope_theta: float
    qk_norm: str
    mup: bool
    window: int
    softcap: float
    chunk: int
    std: float
    std_out: float
    norm_eps: float
    probs_dropout: Callable | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD, info, context=None):
        """Attention of the tokens x over themselves, or over `context` = (tokens [B, S, D], their
        info). Where the latter is `info` itself, the context is another state of the same tokens
        (S = T), causal in the same order; while decoding it has to be that. See `TokenInfo.kv`."""
        batch, length, width = x_BTD.shape
        q_BTNH = self._queries(x_BTD, info)
        k_BSKH, v_BSKH = self._keys_values(*((x_BTD, info) if context is None else context))
        options = dict(
            scale=1.0 / self.head_dim if self.mup else self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            probs_fn=self._probs_fn(info),
        )
        if info.decode:
            out_BTNH = self._attend_cached(q_BTNH, k_BSKH, v_BSKH, info, options)
        elif context is not None and context[1] is not info:
            out_BTNH = attend_context(q_BTNH, k_BSKH, v_BSKH, info, context[1], **options)
        else:
            out_BTNH = attend(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                chunk=self.chunk,
                positions_BT=info.positions_BT,
                segment_ids_BT=info.segment_ids_BT,
                **options,
            )
        out_BTD = out_BTNH.reshape(batch, length, self.num_heads * self.head_dim)
        return Linear(
            width, ("heads", "embed"), self.std_out, self.use_bias, self.dtype, name="out"
        )(out_BTD)

    def _queries(self, x_BTD, info):
        q_BTNH = self._heads("query", x_BTD, self.num_heads, "heads")
        if self.rope_theta:
            q_BTNH = rope(q_BTNH, info.positions_BT, self.rope_theta)
        return constrain(q_BTNH, "batch", "length", "act_heads", None)

    def _keys_values(self, x_BSD, info):
        k_BSKH = self._heads("key", x_BSD, self.num_kv_heads, "kv_heads")
        v_BSKH = self._project("value", x_BSD, self.num_kv_heads, "kv_heads")
        v_BSKH = v_BSKH.reshape(k_BSKH.shape)
        if self.rope_theta:
            k_BSKH = rope(k_BSKH, info.positions_BT, self.rope_theta)
        k_BSKH, v_BSKH = (
            constrain(y, "batch", "length", "act_kv_heads", None) for y in (k_BSKH, v_BSKH)
        )
        return k_BSKH, v_BSKH

    def _project(self, name, x_BTD, heads, axis):
        features = heads * self.head_dim
        return Linear(features, ("embed", axis), self.std, self.use_bias, self.dtype, name=name)(
            x_BTD
        )

    def _heads(self, name, x_BTD, heads, axis):
        y = self._project(name, x_BTD, heads, axis)
        if self.qk_norm == "width":
            y = norms.RMSNorm(eps=self.norm_eps, dtype=self.dtype, name=f"norm_{name}")(y)
        y = y.reshape(*y.shape[:-1], heads, self.head_dim)
        if self.qk_norm == "head":
            y = norms.RMSNorm(eps=self.norm_eps, dtype=self.dtype, name=f"norm_{name}")(y)
        return y

    def _probs_fn(self, info):
        if self.probs_dropout is None:
            return None
        dropout = self.probs_dropout(name="probs_dropout")
        return lambda probs, k_start: dropout(probs, info)

    def _attend_cached(self, q_BTNH, k_BTKH, v_BTKH, info, options):
        """Append the new keys and values to the cache, then attend over all of it.

        Slots fill in order of arrival and every slot remembers its token's position, so a routed
        block's cache is as short as the tokens routed through it. Padding (negative positions)
        is not stored. `info.rows_B` picks rows of the cache when only some rows run.
        """
        rows, _, heads, width = k_BTKH.shape
        # The rows of the cache are made when it is initialised, by a full batch.
        size = info.cache_size
        key, value, position, used = cache.variables(
            self,
            info.cache_tag,
            cached_key=lambda: jnp.zeros((rows, heads, width, size), self.dtype),
            cached_value=lambda: jnp.zeros((rows, heads, size, width), self.dtype),
            position=lambda: jnp.full((rows, size), -1, jnp.int32),
            used=lambda: jnp.zeros((rows,), jnp.int32),
        ).values()
        if self.is_initializing():
            return q_BTNH
        if info.kv != "read":
            self._store(k_BTKH, v_BTKH, info, key, value, position, used)
        return attend_cache(
            q_BTNH,
            key.value,
            value.value,
            info.full(rows).positions_BT,
            position.value,
            used=jnp.max(used.value),
            rows_B=info.rows_B,
            **options,
        )

    @staticmethod
    def _store(k_BTKH, v_BTKH, info, key, value, position, used):
        rows, size = k_BTKH.shape[0], value.value.shape[2]
        row_B = jnp.arange(rows) if info.rows_B is None else info.rows_B
        positions_BT = info.full(rows).positions_BT
        valid_BT = positions_BT >= 0
        used_B = used.value.at[row_B].get(mode="fill", fill_value=0)
        slot_BT = used_B[:, None] + jnp.cumsum(valid_BT, axis=1) - 1
        slot_BT = jnp.where(valid_BT, slot_BT, size)  # out of range: dropped
        # One entry for each new token, and one that is dropped: XLA:CPU makes a slice update of a
        # scatter of a single entry, fuses it into every reader and so copies the whole cache.
        row_C = _and_one(jnp.broadcast_to(row_B[:, None], slot_BT.shape), 0)
        slot_C, position_C = _and_one(slot_BT, size), _and_one(positions_BT, 0)
        k_CKH, v_CKH = (_and_one(y.astype(value.value.dtype), 0) for y in (k_BTKH, v_BTKH))
        key.value = key.value.at[row_C, :, :, slot_C].set(k_CKH, mode="drop")
        value.value = value.value.at[row_C, :, slot_C].set(v_CKH, mode="drop")
        position.value = position.value.at[row_C, slot_C].set(position_C, mode="drop")
        used.value = used.value.at[row_B].add(jnp.sum(valid_BT, axis=1), mode="drop")


def _and_one(y, fill):
    """y [B, T, ...] as [B*T + 1, ...], the last entry `fill`."""
    y = y.reshape(-1, *y.shape[2:])
    return jnp.concatenate([y, jnp.full((1, *y.shape[1:]), fill, y.dtype)])
