"""Stacks of layers, unrolled or scanned: the trunk of every family."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.errors import UsageError
from efx.layers import kernels, linear, selection
from efx.layers.block import Block
from efx.layers.config import BlockConfig, DenseFormerConfig, block_in_stack
from efx.layers.soft_experts import SoftBlock
from efx.parallel.collectives import saves_exchanged
from efx.parallel.sharding import constrain, parameter
from efx.routing.config import DepthRoutingConfig
from efx.routing.mod import MoDBlock
from efx.routing.recursion import SharedBlocks, run_step

# Collections with a leading axis of layers in a scanned stack.
_SCANNED = "params", "cache", "losses", "stats", "means", "state"

_keeps_selections = jax.checkpoint_policies.save_only_these_names(selection.SELECTION)


def _any_of(*policies):
    return lambda *args, **params: any(policy(*args, **params) for policy in policies)


REMAT_POLICIES = {
    "full": _keeps_selections,
    # Keep the results of projections (on GPUs rotated ones), of attention kernels and of exchanges
    # between devices; recompute elementwise work and the attention scores of plain XLA.
    "dots": _any_of(
        jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
        linear.saves_projections,
        saves_exchanged,
        kernels.saves_kernel_results,
        _keeps_selections,
    ),
}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a stack: a block, or a step of a recursion, which applies several.

    Attributes:
      routing: None: it computes all tokens.
      capacity: fraction of the sequence that it computes.
      kind: class of the block.
      step: number of the step of a recursion.
    """

    blocks: tuple[BlockConfig, ...]
    routing: DepthRoutingConfig | None = None
    capacity: float = 1.0
    kind: type = Block
    step: int | None = None


def layer_specs(b, c):
    """The layers of the stack of a family.

    Args:
      b: `BlockConfig` of a block without experts.
      c: resolved config of the family, with `depth`, `mlp`, `depth_routing`, `soft_experts`.
    """
    r = c.depth_routing
    layers = tuple(stream_specs(b, c, c.depth, r.routed_blocks(c.depth)))
    if r.kind != "recursion":
        return layers
    shared = tuple(spec.blocks[0] for spec in layers[1:-1])
    steps = (
        LayerSpec(shared, r if r.step_is_routed(i) else None, capacity, step=i)
        for i, capacity in enumerate(r.step_capacities)
    )
    return layers[0], *steps, layers[-1]


def stream_specs(b, c, depth, capacities, kind=Block):
    """Specs of `depth` layers, of which those in `capacities` = {index: capacity} are routed.

    Args:
      b, c: as in `layer_specs`. kind: class of the blocks.
    """
    for i in range(depth):
        routed = dict(routing=c.depth_routing, capacity=capacities[i]) if i in capacities else {}
        yield LayerSpec((block_in_stack(b, c, i),), **routed, kind=kind)


def names(specs):
    """Names of the layers of a stack: `block_<i>`, numbered by their parameters, and
    `recursion_<i>`."""
    result, index = [], 0
    for spec in specs:
        step = getattr(spec, "step", None)
        result.append(f"block_{index}" if step is None else f"recursion_{step}")
        if not step:
            index += 1 if step is None else len(spec.blocks)
    return result


class Layer(nn.Module):
    """x + block(x), for all tokens or for the routed ones."""

    spec: LayerSpec

    def setup(self):
        (b,) = self.spec.blocks
        self.block = (self.spec.kind if b.soft is None else SoftBlock)(b)
        # A routed layer has a dense layer's parameters at the same paths, plus its router.
        nn.share_scope(self, self.block)
        if self.spec.routing is not None:
            self.mod_block = MoDBlock(self.block, self.spec.routing, self.spec.capacity)
            nn.share_scope(self, self.mod_block)

    def __call__(self, x_BTD, call, context=None):
        """`context`: of a layer that is not routed itself, as in `Block`."""
        if self.spec.routing is not None:
            x_BTD, _ = self.mod_block(x_BTD, call)
        else:
            delta_BTD = self.block(x_BTD, call, context)
            if delta_BTD is None:  # it only writes keys and values
                return x_BTD
            x_BTD = x_BTD + delta_BTD
        return constrain(x_BTD, "batch", "length", "act_embed")


class _Unit(nn.Module):
    """The layers of one period of the pattern, as the body of a scan."""

    specs: tuple
    remat: str
    layer: type

    @nn.compact
    def __call__(self, x_BTD, call):
        layer = _with_remat(self.layer, self.remat, prevent_cse=False)
        for i, spec in enumerate(self.specs):
            x_BTD = layer(spec, name=f"block_{i}")(x_BTD, call)
        return x_BTD, None


class Stack(nn.Module):
    """Layers one after another, unrolled (`block_<i>/...`) or scanned (`units/block_<i>/...`).

    A scan runs over repetitions of the shortest repeating pattern of layers: (dense, routed) for
    a Mixture-of-Depths stack that routes every second block. Its parameters have a leading layer
    axis; `unroll_params` and `scan_params` convert between the two forms.

    The state is the argument of the layers: x_BTD, or two streams. The shared blocks of a
    recursion have their parameters where a dense stack has them, in `block_<i>/...`; routers and
    skip MLPs of its steps are in `recursion_<i>/...`.

    With `averages` (DenseFormer, not in a scan) layers read averages of all earlier states, see
    `StateAverage`; a recursion step counts as one layer. Weights: `average_<i>/alpha`, i from 1.
    """

    specs: tuple  # the field `spec` of each layer
    scan: bool
    remat: str
    averages: DenseFormerConfig | None = None
    layer: type = Layer

    @nn.compact
    def __call__(self, x_BTD, call):
        """The state after all layers."""
        if self.scan:
            size = period(self.specs)
            scanned = nn.scan(
                _Unit,
                length=len(self.specs) // size,
                in_axes=nn.broadcast,
                variable_axes=dict.fromkeys(_SCANNED, 0),
                split_rngs={"params": True, "dropout": True, "routing": True},
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x_BTD, _ = scanned(self.specs[:size], self.remat, self.layer, name="units")(x_BTD, call)
            return x_BTD
        layer = _with_remat(self.layer, self.remat)
        shared, selectable_BT, states = None, None, [x_BTD]
        for i, (name, spec) in enumerate(zip(names(self.specs), self.specs, strict=True)):
            if name.startswith("block"):
                x_BTD = layer(spec, name=name)(x_BTD, call)
            else:
                if shared is None:
                    blocks = (
                        layer(LayerSpec((b,)), name=f"block_{j}")
                        for j, b in enumerate(spec.blocks, i)
                    )
                    shared = SharedBlocks(tuple(blocks))
                step_call = call.replace(selectable_BT=selectable_BT)
                x_BTD, selectable_BT = run_step(name, spec, shared, x_BTD, step_call)
            if self.averages is not None and self.averages.on:
                states.append(x_BTD)
                x_BTD = StateAverage(name=f"average_{i + 1}")(states)
        return x_BTD


class StateAverage(nn.Module):
    """DenseFormer: sum over j of alpha_j X_j, of states [B, T, D] (arXiv 2402.02622, section 3).

    With X_0 the input of the stack, Y_0 = X_0, and for block i = 1..L
        X_i = block_i(Y_{i-1}),    Y_i = sum over j <= i of alpha_ij X_j,
    at first with alpha_ii = 1 and all others 0. The FLOP ledger does not count averages.
    """

    @nn.compact
    def __call__(self, states):
        def last_one(key, shape, dtype):
            return jnp.zeros(shape, dtype).at[-1].set(1.0)

        alpha = parameter(self, "alpha", last_one, (len(states),), ("norm",))
        # One at a time, so that the compiler fuses the sum and does not stack the states.
        mean_BTD = sum(alpha[j] * x_BTD.astype(jnp.float32) for j, x_BTD in enumerate(states))
        return mean_BTD.astype(states[-1].dtype)


def _with_remat(layer, remat, prevent_cse=True):
    if remat == "none":
        return layer
    return nn.remat(layer, policy=REMAT_POLICIES[remat], prevent_cse=prevent_cse)


def period(specs):
    """Length of the shortest pattern whose repetition gives `specs`."""
    for size in range(1, len(specs) // 2 + 1):
        if len(specs) % size == 0 and specs == specs[:size] * (len(specs) // size):
            return size
    raise UsageError(
        f"config.model.scan_layers=True: the {len(specs)} layers do not repeat a pattern; use an "
        "even number of periods of the depth routing or config.model.scan_layers=False"
    )


def first_of_scanned(path):
    """The path of a module of a scanned stack in the first of its unrolled layers; other paths
    unchanged."""
    return re.sub("^layers/units/", "layers/", path)


def first_of_unrolled(path, size):
    """The path of a module of an unrolled stack in the first layer that a scan with this period
    merges with its layer; other paths unchanged."""
    return re.sub(r"(?<=^layers/block_)\d+", lambda number: str(int(number[0]) % size), path)


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


def convert_layers(convert, tree, specs):
    """Apply `scan_params` or `unroll_params` to the layers of a collection, if it has any."""
    if "layers" not in tree:
        return tree
    return {**tree, "layers": convert(tree["layers"], specs)}
