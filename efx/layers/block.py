"""The transformer block: an attention and an MLP, each with its norm and its dropout."""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from efx.layers.attention import Attention
from efx.layers.config import BlockConfig
from efx.layers.learned_dropout import make_dropout
from efx.layers.mlp import MLP
from efx.layers.moe import ROUTER_STD, MoE
from efx.layers.norms import NORMS


class Block(nn.Module):
    """x [B, T, D] -> the block's increment, see `BlockKind`; the caller adds the residual.

    Routing computes the block, or one of its two parts, for some tokens only (`routing.mod`).
    Blocks with other attentions or MLPs are subclasses.
    """

    config: BlockConfig

    # Whether the keys and values of a token depend on the block's own output at that token, so that
    # skipped tokens cannot write theirs before the others are computed.
    kv_depends_on_block_output: ClassVar[bool] = False

    def setup(self):
        c = self.config
        self.dropout_attention_output = self.dropout_mlp_output = None
        self.setup_attention()
        options = c.hidden, c.mlp.activation, c.use_bias, c.std, c.std_out, c.dtype
        if c.moe is None:
            self.mlp = MLP(*options)
        else:
            self.mlp = MoE(*options, c.moe, ROUTER_STD * c.router_scale)
        self.norm_mlp = make_norm(c)
        if c.dropout.kind != "none":
            self.dropout_mlp_output = make_dropout(c, "mlp_output")

    def setup_attention(self):
        c = self.config
        self.attention, self.norm_attention = make_attention(c), make_norm(c)
        if c.dropout.kind != "none":
            self.dropout_attention_output = make_dropout(c, "attention_output")

    def __call__(self, x_BTD, call, context=None):
        """`context` = (states [B, S, D], their call, ...): attend to these instead of to x."""
        a_BTD = self.attention_increment(x_BTD, call, context)
        if a_BTD is None:
            return None
        return a_BTD + self.mlp_increment(mlp_input(self.config, x_BTD, a_BTD), call)

    def attention_increment(self, x_BTD, call, context=None):
        """None if the call only writes keys and values."""
        c, norm = self.config, self.norm_attention
        if context is not None:
            context = norm_input(c, norm, context[0]), context[1]
        a_BTD = self.attention(norm_input(c, norm, x_BTD), call, context)
        return increment(c, norm, self.dropout_attention_output, a_BTD, call)

    def mlp_increment(self, x_BTD, call):
        c, norm, dropout = self.config, self.norm_mlp, self.dropout_mlp_output
        y_BTD = norm_input(c, norm, x_BTD)
        m_BTD = self.mlp(y_BTD) if c.moe is None else self.mlp(y_BTD, call)
        return increment(c, norm, dropout, m_BTD, call)


class SkipMLP(nn.Module):
    """A small pre-norm MLP for tokens that a routed block skips; returns the increment."""

    config: BlockConfig
    hidden: int

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        mlp = MLP(self.hidden, c.mlp.activation, c.use_bias, c.std, c.std_out, c.dtype, name="mlp")
        return mlp(make_norm(c, "norm")(x_BTD))


def norm_input(c, norm, x):
    """x [..., D], normalised unless the block `c` is post-norm: the input of attention or MLP."""
    return x if c.kind == "post_norm" else norm(x)


def increment(c, norm, dropout, y, call):
    """The increment from the output y of an attention or MLP: normalised if the block `c` is
    post-norm, then dropout. None, of a call that only writes keys and values, stays None."""
    if y is None:
        return None
    return with_dropout(dropout, norm(y) if c.kind == "post_norm" else y, call)


def mlp_input(c, x, a):
    """The input of the MLP of the block `c`, where `a` is the increment of attention."""
    return x if c.kind == "parallel" else x + a


def with_dropout(dropout, x, call):
    """`dropout`: a module (x, call) -> x; a list with one for each channel of x [X, ...]; None."""
    if isinstance(dropout, list | tuple):
        return jnp.stack([mask(y, call) for mask, y in zip(dropout, x, strict=True)])
    return x if dropout is None else dropout(x, call)


def make_norm(c, name=None):
    """A norm of the block `c` (a `BlockConfig`)."""
    return NORMS[c.norm](c.norm_eps, dtype=c.dtype, use_bias=c.use_bias, name=name)


def make_attention(c, name=None, kind=Attention, **changes):
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
