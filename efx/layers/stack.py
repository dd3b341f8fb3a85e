"""Stacks of layers, unrolled or scanned: what every family is built from."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.errors import UsageError
from efx.layers import attention_kernels
from efx.layers.blocks import Block, SkipMLP
from efx.layers.config import BlockConfig, DenseFormerConfig, DepthRoutingConfig
from efx.layers.dense_former import Averages
from efx.layers.routing.depth import DepthRouted
from efx.layers.routing.soft_experts import SoftBlock
from efx.sharding import constrain

REMAT_POLICIES = {
    "full": None,
    # Keep the results of the projections, recompute everything cheap and all attention scores.
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
        jax.checkpoint_policies.save_only_these_names(attention_kernels.RESIDUALS),
    ),
}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a stack: a block, and how depth routing wraps it (None: it is not routed)."""

    block: BlockConfig
    routing: DepthRoutingConfig | None = None
    capacity: float = 1.0

    @property
    def module(self):
        """The module of a layer, made from its spec: (state, info) -> state."""
        return Layer

    @property
    def blocks(self):
        """The blocks that are computed."""
        return (self.block,)

    @property
    def new_blocks(self):
        """Those of them whose parameters no earlier layer has."""
        return (self.block,)


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """One pass through a stack of blocks that several passes share (kind="recursion").

    Attributes:
      number: of the pass, from 0.
      blocks: the shared blocks.
      routing: None: all tokens, with no router.
      capacity, survivors: shares of the sequence that this pass computes, and the one before.
    """

    number: int
    blocks: tuple[BlockConfig, ...]
    routing: DepthRoutingConfig | None = None
    capacity: float = 1.0
    survivors: float = 1.0

    @property
    def name(self):
        return f"pass_{self.number}"

    @property
    def new_blocks(self):
        return () if self.number else self.blocks


def names(specs):
    """What the layers of a stack are called: `block_<i>`, numbered by their parameters."""
    result, index = [], 0
    for spec in specs:
        passes = isinstance(spec, PassSpec)
        result.append(spec.name if passes else f"block_{index}")
        index += len(spec.new_blocks) if passes else 1
    return result


class Layer(nn.Module):
    """x + block(x), for all tokens or for the routed ones."""

    spec: LayerSpec

    def setup(self):
        spec = self.spec
        block = partial(Block if spec.block.soft is None else SoftBlock, spec.block)
        if spec.routing is None:
            self.inner = block()
        else:
            hidden = spec.routing.skip_mlp
            skip_mlp = partial(SkipMLP, spec.block, hidden) if hidden else None
            self.inner = DepthRouted(block, spec.routing, spec.capacity, skip_mlp)
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

    specs: tuple
    remat: str

    @nn.compact
    def __call__(self, x_BTD, info):
        for i, spec in enumerate(self.specs):
            layer = _layer_class(spec, self.remat, scanned=True)(spec, name=f"block_{i}")
            x_BTD = layer(x_BTD, info)
        return x_BTD, None


class Stack(nn.Module):
    """Layers one after another, unrolled (`block_<i>/...`) or scanned (`units/block_<i>/...`).

    A scan runs over repetitions of the shortest repeating pattern of layers: (dense, routed) for
    a Mixture-of-Depths stack that routes every second block. Its parameters have a leading layer
    axis; `unroll_params` and `scan_params` convert between the two forms.

    What goes from layer to layer is whatever the specs' modules take: x_BTD, or two streams.
    Passes through shared blocks (`PassSpec`) leave the parameters of these where a dense stack
    has them, `block_<i>/...`, and have their routers in `pass_<i>/...`.

    With `averages`, which a scan has no place for, layers read averages of all earlier states
    (DenseFormer); a pass counts as one layer. Their weights are in `average_<i>/alpha`, i from 1.
    """

    specs: tuple  # of LayerSpec and PassSpec, or of another family's
    scan: bool
    remat: str
    averages: DenseFormerConfig | None = None

    @nn.compact
    def __call__(self, x_BTD, info, before=None):
        """The state after all layers. `before` = {number of a layer: function that the state passes
        on its way there}; a scan has no place for these either."""
        if self.scan:
            assert not before
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
                    "means": 0,
                    "masks": 0,
                    "state": 0,
                },
                split_rngs={"params": True, "dropout": True, "routing": True},
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x_BTD, _ = scanned(self.specs[:size], self.remat, name="units")(x_BTD, info)
            return x_BTD
        shared, alive_BT, average = None, None, Averages(self.averages, x_BTD)
        for i, (name, spec) in enumerate(zip(names(self.specs), self.specs, strict=True)):
            if before and i in before:
                x_BTD = before[i](x_BTD)
            if not isinstance(spec, PassSpec):
                layer = _layer_class(spec, self.remat, scanned=False)(spec, name=name)
                x_BTD = average(layer(x_BTD, info))
                continue
            if shared is None:
                inner = map(LayerSpec, spec.blocks)
                shared = SharedStack(
                    tuple(
                        _layer_class(s, self.remat, scanned=False)(s, name=f"block_{i}")
                        for i, s in enumerate(inner, 1)
                    )
                )
            x_BTD, alive_BT = self._pass(spec, shared, x_BTD, info.with_tokens(alive_BT=alive_BT))
            x_BTD = average(x_BTD)
        return x_BTD

    def _pass(self, spec, shared, x_BTD, info):
        """(x, the tokens that the next pass chooses from, or None: all)."""
        info = info.with_cache(tag=spec.name)
        if spec.routing is None:
            return shared.through(x_BTD, info), None
        routed = DepthRouted(
            None,
            spec.routing,
            spec.capacity,
            shared=shared,
            survivors=spec.survivors,
            name=spec.name,
        )
        x_BTD, alive_BT = routed.route(x_BTD, info)
        return constrain(x_BTD, "batch", "length", "act_embed"), alive_BT


class SharedStack(nn.Module):
    """Layers that belong to a module outside, one after another, as a block to be routed."""

    layers: tuple[nn.Module, ...]

    @property
    def config(self):
        return self.layers[0].spec.block

    def through(self, x_BTD, info):
        for layer in self.layers:
            x_BTD = layer(x_BTD, info)
        return x_BTD

    def __call__(self, x_BTD, info, context=None):
        """The increment of all of them together; `context` stays None (`kv_for_skipped`)."""
        return self.through(x_BTD, info) - x_BTD


def _layer_class(spec, remat, scanned):
    if remat == "none":
        return spec.module
    return nn.remat(spec.module, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)


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
