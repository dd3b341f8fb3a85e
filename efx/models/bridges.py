"""CALM: a frozen model that reads layers of other frozen models through trained bridges.

Composition to Augment Language Models (Bansal et al. 2024, arXiv 2401.02412, section 3): the anchor
B and the augmenting models A read the same tokens. At n evenly spaced pairs of layers (i of A, j of
B)
    H_B,j <- H_B,j + CrossAttn(q = H_B,j, kv = H_A,i W_proj),
and layer j + 1 of B reads the sum. Only the bridges train. Their output projections start at zero,
so that the bridged model starts as its anchor. Query t sees the states of A at tokens <= t.

Members are models of any family whose layers run once each and have a state for every token. An
interceptor of Flax method calls reads and changes the outputs of these layers (of an
encoder-decoder, those of the decoder). Members run unrolled and as in evaluation, without dropout.
"""

import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn

from efx.config.schema import Count, Modules, NonNegative, Positions, block
from efx.errors import UsageError
from efx.layers import batch_means, flops
from efx.layers.attention import Attention
from efx.layers.config import AttentionConfig, DropoutConfig, MuPConfig
from efx.layers.linear import Linear
from efx.layers.token_context import TokenContext
from efx.models.language_model import LanguageModel
from efx.routing.config import DepthRoutingConfig


@block("config.model")
class BridgedConfig:
    """Finished runs with bridges between them, configs/calm.py."""

    family: Literal["bridged"] = "bridged"
    context: Positions = 0  # longest sequence; 0: data.seq_len
    anchor: str = ""  # run directory of the model that predicts
    augment: tuple[str, ...] = ("",)  # run directories of the models that it reads, same tokenizer
    pairs: Modules = 2  # evenly spaced layers of each model that a bridge connects
    num_heads: Count = 4  # of the cross-attention of bridges
    init_std: NonNegative = 0.02

    # Settings of other families that the rest of efx reads.
    scan_layers: ClassVar[bool] = False
    remat: ClassVar[str] = "none"
    depth_routing: ClassVar[DepthRoutingConfig] = DepthRoutingConfig()
    dropout: ClassVar[DropoutConfig] = DropoutConfig()
    mup: ClassVar[MuPConfig] = MuPConfig()
    mup_ratio: ClassVar[float] = 1.0

    @property
    def member_runs(self):
        """((key, run directory), ...), the anchor first."""
        return (("anchor", self.anchor), *(("augment", run) for run in self.augment))

    def resolved(self):
        """Raise UsageError without a model to read; there are no defaults to fill in."""
        if not self.augment:
            self.refuse("augment", "needs at least one run directory")
        return self


class Bridge(nn.Module):
    """Cross-attention from a state of the anchor [B, T, D] to one of an augmenting model."""

    config: BridgedConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, anchor_BTD, augment_BTD, call):
        """The increment [B, T, D] of the anchor's state; the two widths may differ."""
        c, width = self.config, anchor_BTD.shape[-1]
        axes = "embed", "table"
        context_BTD = Linear(width, axes, c.init_std, dtype=self.dtype, name="project")(augment_BTD)
        attention = AttentionConfig(
            num_heads=c.num_heads,
            num_kv_heads=c.num_heads,
            head_dim=width // c.num_heads,
            bias="none",
            rope_theta=0.0,
        )
        fields = dict(std=c.init_std, std_out=0.0, norm_eps=1e-5, probs_dropout=None, width=width)
        attend = Attention(attention, dtype=self.dtype, **fields, name="attention")
        return attend(anchor_BTD, call, (context_BTD, None))


class Bridged(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `BridgedConfig` for each setting.

    `efx.train.setup` builds the members from their run directories; `efx.checkpoint.init_from`
    restores their parameters.
    """

    anchor_model: nn.Module = None
    augment_models: tuple = ()

    @classmethod
    def compose(cls, members, config, vocab_size, dtype):
        """The model of these members, the anchor first."""
        if len(members) != 1 + len(config.augment):
            raise UsageError(
                "config.model.family='bridged' needs run directories: config.model.anchor and "
                "config.model.augment"
            )
        _check_members(config, members)
        anchor, *augment = members
        return cls(config, vocab_size, dtype, anchor_model=anchor, augment_models=tuple(augment))

    @property
    def members(self):
        """See `LanguageModel.members`. The output layers of augmenting models are not used."""
        augment = {f"augment_models_{i}": (m, "head/.*") for i, m in enumerate(self.augment_models)}
        return {"anchor_model": (self.anchor_model, "")} | augment

    def setup(self):
        # bridges_<a * pairs + k>: from augmenting model a at pair k.
        count = len(self.augment_models) * self.config.pairs
        self.bridges = [Bridge(self.config, self.dtype) for _ in range(count)]

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The anchor's normalised state [B, T, D]; `train` has no effect."""
        arguments = tokens_BT, positions_BT, segment_ids_BT, False, decode, cache_size
        states = [self._states(model, arguments) for model in self.augment_models]
        pair_of_layer = {path: k for k, path in enumerate(self._bridged_layers(self.anchor_model))}

        def add_bridges(layer, h_BTD, call):
            if layer not in pair_of_layer:
                return h_BTD
            pair, delta_BTD = pair_of_layer[layer], jnp.zeros_like(h_BTD)
            for a in range(len(self.augment_models)):
                bridge = self.bridges[a * self.config.pairs + pair]
                delta_BTD = delta_BTD + bridge(h_BTD, states[a][pair], call)
            return h_BTD + delta_BTD

        # Bridges train by the cross-entropy alone, not by the losses of the anchor's routers.
        with intercept_layers(self.anchor_model, add_bridges), batch_means.without_losses():
            return self.anchor_model.features(*arguments)

    def _states(self, model, arguments):
        """States [B, T, D] of an augmenting model after each of its bridged layers."""
        outputs = {}

        def record(layer, h_BTD, call):
            outputs[layer] = h_BTD
            return h_BTD

        with intercept_layers(model, record), batch_means.without_losses():
            model.features(*arguments)
        return [outputs[layer] for layer in self._bridged_layers(model)]

    def _bridged_layers(self, model):
        """Paths of the layers that bridges connect, evenly spaced, the last included."""
        pairs, paths = self.config.pairs, layer_paths(model)
        return [paths[math.ceil((k + 1) * len(paths) / pairs) - 1] for k in range(pairs)]

    def logits(self, x):
        return self.anchor_model.logits(x)

    @nn.nowrap
    def head_params(self, params):
        return self.anchor_model.head_params(params["anchor_model"])

    @nn.nowrap
    def sum_head_gradients(self, gradients):
        return self.anchor_model.sum_head_gradients(gradients)

    @nn.nowrap
    def head_fn(self, head_params, x_ND):
        return self.anchor_model.head_fn(head_params, x_ND)

    @nn.nowrap
    def specs(self):
        """None: the layers belong to the members."""
        return ()

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence, members as in evaluation."""
        c, width = self.config, self.anchor_model.config.width
        pairs = flops.causal_pairs(length)
        parts = [self.anchor_model.ledger(length, "causal").nominal]
        for model in self.augment_models:
            parts.append({**model.ledger(length, "causal").nominal, "head": 0})
            bridge = flops.matmul(length, model.config.width, width)
            bridge += 4 * flops.matmul(length, width, width)
            scores = flops.attention_scores(pairs, c.num_heads, width // c.num_heads)
            parts += [{"bridges": bridge, "attention_scores": scores}] * c.pairs
        return flops.Ledger(length, flops.add(parts))


def layer_paths(model):
    """Paths in a model of the layers that a bridge can connect, those of its decoder stream."""
    return [path for path in model.blocks() if "/encoder_" not in path]


def intercept_layers(model, replace_output):
    """Context manager that replaces the output h [B, T, D] of each layer of a bound model.

    Args:
      replace_output: (path of the layer in the model, h, its `TokenContext`) -> the new h.
    """
    paths, prefix, is_inside = layer_paths(model), "/".join((*model.path, "")), False

    def intercept(next_fun, args, kwargs, context):
        nonlocal is_inside
        path = "/".join(context.module.path)
        # A layer and its block have one path: the outer call is the layer's.
        is_layer = path.startswith(prefix) and path.removeprefix(prefix) in paths
        if not is_layer or is_inside or context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        is_inside = True
        h_BTD = next_fun(*args, **kwargs)
        is_inside = False
        call = next(value for value in args if isinstance(value, TokenContext))
        return replace_output(path.removeprefix(prefix), h_BTD, call)

    return nn.intercept_methods(intercept)


def _check_members(c, members):
    """UsageError unless a resolved `BridgedConfig` and the models of its runs fit together."""
    for (key, run), model in zip(c.member_runs, members, strict=True):
        where = f"config.model.{key}={run}"
        if model.members:
            raise UsageError(f"{where}: is itself made of other runs; use a run of one model")
        if model.context < c.context:
            raise UsageError(
                f"{where}: its context is {model.context} tokens, less than {c.context} here; "
                "lower config.data.seq_len"
            )
        family, routing = model.config.family, model.config.depth_routing.kind
        if family == "latent" or routing == "recursion":
            raise UsageError(
                f"{where}: a {type(model).__name__} cannot have bridges, because its layers do not "
                "run once each, one after another, with a state for each token"
            )
        if c.pairs > len(layer_paths(model)):
            c.refuse("pairs", f"must be at most {len(layer_paths(model))}, the layers of {where}")
    width = members[0].config.width
    if width % c.num_heads:
        c.refuse("num_heads", f"must divide the anchor's width, {width}")
