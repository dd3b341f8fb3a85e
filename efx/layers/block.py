"""The transformer block, and the parts that blocks are built from."""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from efx import means
from efx.layers import norms
from efx.layers.attention import Attention
from efx.layers.config import BlockConfig
from efx.layers.learned_dropout import make_dropout
from efx.layers.mask_dropout import open_rows
from efx.layers.mlp import MLP
from efx.layers.moe import ROUTER_STD, MoE
from efx.layers.report import sow_choice


class Block(nn.Module):
    """Attention and MLP, see `BlockKind`. Returns the increment: the residual is the caller's to
    add. A dense stack computes x + delta, a depth-routed one x + gate * delta on the tokens it
    routes.
    """

    config: BlockConfig

    writes_as_it_goes: ClassVar[bool] = False

    @nn.compact
    def __call__(self, x_BTD, call, context=None):
        """`context` = (tokens [B, S, D], their call, ...): attend over these instead of over x."""
        c = self.config
        attention = make_attention(c, "attention")
        before, after = sublayer_norms(c, "norm_attention")
        if context is not None:
            context = before(context[0]), context[1]
        a_BTD = attention(before(x_BTD), call, context)
        if call.access == "write":
            return None
        a_BTD = apply_dropout(c, "attention_output", after(a_BTD), call)
        return a_BTD + masked_mlp(self, c, after_attention(c, x_BTD, a_BTD), call)


class SkipMLP(nn.Module):
    """A small pre-norm MLP for tokens that a depth-routed block skips; returns the increment."""

    config: BlockConfig
    hidden: int

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        mlp = MLP(self.hidden, c.mlp.activation, c.use_bias, c.std, c.std_out, c.dtype, name="mlp")
        return mlp(make_norm(c, "norm")(x_BTD), None)


def make_norm(c, name):
    """A norm of the block `c` (a `BlockConfig`) under the given name."""
    return norms.make_norm(c.norm, use_bias=c.use_bias, eps=c.norm_eps, dtype=c.dtype, name=name)


def sublayer_norms(c, name):
    """What the input of an attention or an MLP of the block `c` passes, and what its output: one of
    the two is the norm of this name, the other nothing."""
    norm = make_norm(c, name)
    return (_as_it_is, norm) if c.kind == "post_norm" else (norm, _as_it_is)


def after_attention(c, x, a):
    """What the next part of the block `c` reads after an attention, or attentions, gave `a`."""
    return x if c.kind == "parallel" else x + a


def _as_it_is(x):
    return x


def make_attention(c, name, kind=Attention, **changes):
    """The attention of the block `c`, of this class and with these fields changed."""
    probs_dropout = None
    if c.dropout.active("attention_probs"):
        probs_dropout = partial(make_dropout, c, "attention_probs")
    fields = dict(
        config=c.attention,
        std=c.std,
        std_out=c.std_out,
        norm_eps=c.norm_eps,
        probs_dropout=probs_dropout,
        dtype=c.dtype,
        width=c.width,
        name=name,
    )
    return kind(**{**fields, **changes})


def make_mlp(c, name):
    """An MLP, or the experts that stand in its place."""
    options = c.hidden, c.mlp.activation, c.use_bias, c.std, c.std_out, c.dtype
    if c.moe is None:
        return MLP(*options, name=name)
    return MoE(c.moe, *options, router_std=ROUTER_STD * c.router_scale, name=name)


def masked_mlp(module, c, x_BTD, call):
    """Norm, MLP and dropout of a block: [B, T, D]. Where the mask is known before the MLP and the
    config says so, the MLP leaves closed tokens out; their share is then sown."""
    mlp, (before, after) = make_mlp(c, "mlp"), sublayer_norms(c, "norm_mlp")
    y_BTD = before(x_BTD)
    if not c.dropout.skips or c.moe is not None or call.train or module.is_initializing():
        return apply_dropout(c, "mlp_output", after(mlp(y_BTD, call)), call)
    mask_BTD = make_dropout(c, "mlp_output", name="dropout_mlp_output").mask(y_BTD, call)
    valid_BT = call.real(x_BTD.shape[0])
    open_BT = jnp.any(mask_BTD > 0, axis=-1) & valid_BT
    if not call.decode:
        computed = means.over(open_BT.astype(jnp.float32), valid_BT)
        means.sow(module, "stats", "mlp/computed_fraction", computed)
        sow_choice(module, "mlp_computed", open_BT, call)
    m_BTD = after(open_rows.compute(mlp, y_BTD, open_BT, c.dropout.attention.skip_tile))
    return (m_BTD.astype(jnp.float32) * mask_BTD).astype(m_BTD.dtype)


def apply_dropout(config, site, x_BTD, call, name=None):
    dropout = make_dropout(config, site, name=name or f"dropout_{site}")
    return x_BTD if dropout is None else dropout(x_BTD, call)
