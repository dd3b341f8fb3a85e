"""The transformer block, and the stack of blocks that every family is built from."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.errors import UsageError
from efx.layers import norms
from efx.layers.attention import Attention
from efx.layers.depth import DepthRouted
from efx.layers.depth_config import DepthRoutingConfig
from efx.layers.dropout import DropoutConfig
from efx.layers.learned_dropout import make_dropout
from efx.layers.mlp import MLP
from efx.layers.moe import MoE
from efx.layers.moe_config import MoEConfig
from efx.sharding import constrain

REMAT_POLICIES = {
    "full": None,
    # Keep the results of the projections, recompute everything cheap and all attention scores.
    "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Everything one pre-norm block needs to know; sizes as in `Attention` and `MLP`.

    `context` is the longest sequence. With `moe` the MLP is a Mixture of Experts, and `hidden` the
    width of one expert.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    activation: str
    norm: str
    norm_eps: float
    use_bias: bool
    rope_theta: float
    qk_norm: str
    mup: bool
    window: int
    softcap: float
    chunk: int
    std: float
    std_out: float
    dropout: DropoutConfig
    dtype: jnp.dtype
    context: int = 0
    moe: MoEConfig | None = None


class Block(nn.Module):
    """Pre-norm attention and MLP. Returns the increment: the residual is the caller's to add.

    delta = a + MLP(norm(x + a)) with a = Attention(norm(x)); a dense stack computes x + delta, a
    depth-routed one x + gate * delta on the tokens it routes.
    """

    config: BlockConfig

    @nn.compact
    def __call__(self, x_BTD, info, context=None):
        """`context` = (tokens [B, S, D], their info): attend over these instead of over x."""
        c = self.config
        norm = partial(norms.make_norm, c.norm, use_bias=c.use_bias, eps=c.norm_eps, dtype=c.dtype)
        probs_dropout = None
        if c.dropout.active("attention_probs"):
            probs_dropout = partial(make_dropout, c, "attention_probs")
        attention = Attention(
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            use_bias=c.use_bias,
            rope_theta=c.rope_theta,
            qk_norm=c.qk_norm,
            mup=c.mup,
            window=c.window,
            softcap=c.softcap,
            chunk=c.chunk,
            std=c.std,
            std_out=c.std_out,
            norm_eps=c.norm_eps,
            probs_dropout=probs_dropout,
            dtype=c.dtype,
            name="attention",
        )
        mlp = MLP if c.moe is None else partial(MoE, c.moe)
        mlp = mlp(c.hidden, c.activation, c.use_bias, c.std, c.std_out, c.dtype, name="mlp")
        norm_attention = norm(name="norm_attention")
        if context is not None:
            context = norm_attention(context[0]), context[1]
        a_BTD = attention(norm_attention(x_BTD), info, context)
        if info.kv == "write":
            return a_BTD
        a_BTD = apply_dropout(c, "attention_output", a_BTD, info)
        m_BTD = mlp(norm(name="norm_mlp")(x_BTD + a_BTD), info)
        m_BTD = apply_dropout(c, "mlp_output", m_BTD, info)
        return a_BTD + m_BTD


class LightPath(nn.Module):
    """A small pre-norm MLP for tokens that a depth-routed block skips; returns the increment."""

    config: BlockConfig
    hidden: int

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        norm = norms.make_norm(
            c.norm, use_bias=c.use_bias, eps=c.norm_eps, dtype=c.dtype, name="norm"
        )
        mlp = MLP(self.hidden, c.activation, c.use_bias, c.std, c.std_out, c.dtype, name="mlp")
        return mlp(norm(x_BTD), None)


def apply_dropout(config, site, x_BTD, info):
    dropout = make_dropout(config, site, name=f"dropout_{site}")
    return x_BTD if dropout is None else dropout(x_BTD, info)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a stack: a block, and how depth routing wraps it (None: it is not routed)."""

    block: BlockConfig
    routing: DepthRoutingConfig | None = None
    capacity: float = 1.0


class Layer(nn.Module):
    """x + block(x), for all tokens or for the routed ones."""

    spec: LayerSpec

    def setup(self):
        spec = self.spec
        block = partial(Block, spec.block)
        if spec.routing is None:
            self.inner = block()
        else:
            light = partial(LightPath, spec.block, spec.routing.light_path)
            self.inner = DepthRouted(
                block, spec.routing, spec.capacity, light if spec.routing.light_path else None
            )
        # A routed layer has a dense layer's parameters at the same paths, plus its router.
        nn.share_scope(self, self.inner)

    def __call__(self, x_BTD, info):
        if self.spec.routing is None:
            x_BTD = x_BTD + self.inner(x_BTD, info)
        else:
            x_BTD = self.inner(x_BTD, info)
        return constrain(x_BTD, "batch", "length", "act_embed")


class _Unit(nn.Module):
    """The layers of one period of the pattern, as the body of a scan."""

    specs: tuple[LayerSpec, ...]
    remat: str

    @nn.compact
    def __call__(self, x_BTD, info):
        for i, spec in enumerate(self.specs):
            x_BTD = _layer_class(self.remat, scanned=True)(spec, name=f"block_{i}")(x_BTD, info)
        return x_BTD, None


class Stack(nn.Module):
    """Layers one after another, unrolled (`block_<i>/...`) or scanned (`units/block_<i>/...`).

    A scan runs over repetitions of the shortest repeating pattern of layers: (dense, routed) for
    a Mixture-of-Depths stack that routes every second block. Its parameters have a leading layer
    axis; `unroll_params` and `scan_params` convert between the two forms.
    """

    specs: tuple[LayerSpec, ...]
    scan: bool
    remat: str

    @nn.compact
    def __call__(self, x_BTD, info):
        if self.scan:
            size = period(self.specs)
            scanned = nn.scan(
                _Unit,
                length=len(self.specs) // size,
                in_axes=nn.broadcast,
                variable_axes={
                    "params": 0,
                    "cache": 0,
                    "losses": 0,
                    "stats": 0,
                    "masks": 0,
                    "state": 0,
                },
                split_rngs={"params": True, "dropout": True, "routing": True},
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x_BTD, _ = scanned(self.specs[:size], self.remat, name="units")(x_BTD, info)
            return x_BTD
        for i, spec in enumerate(self.specs):
            x_BTD = _layer_class(self.remat, scanned=False)(spec, name=f"block_{i}")(x_BTD, info)
        return x_BTD


def _layer_class(remat, scanned):
    if remat == "none":
        return Layer
    if remat not in REMAT_POLICIES:
        raise UsageError(
            f"config.model.remat={remat!r}: expected none, {', '.join(REMAT_POLICIES)}"
        )
    return nn.remat(Layer, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)


def period(specs):
    """Length of the shortest pattern whose repetition gives `specs`."""
    for size in range(1, len(specs) // 2 + 1):
        if len(specs) % size == 0 and specs == specs[:size] * (len(specs) // size):
            return size
    raise UsageError(
        f"config.model.scan_layers=True: the {len(specs)} layers do not repeat a pattern; use an "
        "even number of periods of the depth routing or config.model.scan_layers=False"
    )


def unroll_params(params, specs):
    """Parameters (or any collection) of a scanned stack as those of the unrolled stack."""
    size, unrolled = period(specs), {}
    for i in range(len(specs)):
        unit = params["units"].get(f"block_{i % size}")
        if unit is not None:
            unrolled[f"block_{i}"] = jax.tree.map(lambda x, i=i: x[i // size], unit)
    return unrolled


def scan_params(params, specs):
    """Parameters of an unrolled stack as those of the scanned one."""
    size = period(specs)
    units = {}
    for j in range(size):
        layers = [
            params[f"block_{i}"] for i in range(j, len(specs), size) if f"block_{i}" in params
        ]
        if layers:
            units[f"block_{j}"] = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    return {"units": units}
