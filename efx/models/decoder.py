"""The decoder: a causal language model, dense or with depth routing. Presets `gpt2` and `llama`."""

from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from efx import flops
from efx.layers import attend, costs, learned_dropout, norms, stack_specs
from efx.layers.blocks import BlockConfig
from efx.layers.dense_former import DenseFormerConfig
from efx.layers.depth_config import DepthRoutingConfig
from efx.layers.dropout import DropoutConfig
from efx.layers.linear import Embedding
from efx.layers.mlp import MLPConfig
from efx.layers.parametrisation import MuPConfig, deviations
from efx.layers.soft_experts_config import SoftExpertsConfig
from efx.layers.stack import Stack
from efx.models.decoder_config import resolve
from efx.models.language_model import LanguageModel
from efx.sharding import constrain


class Decoder(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `configs/common.py` for each knob.

    The fields from `vocab_size` to `dtype` come from the data and the training block of a config,
    the others are `config.model`. A field that is None takes its value from the preset.
    """

    vocab_size: int
    context: int
    dtype: jnp.dtype
    preset: str
    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: str | None
    norm_eps: float | None
    use_bias: bool | None
    positions: str | None
    rope_theta: float
    tied: bool | None
    qk_norm: str
    attention_scale: str
    window: int
    attention_softcap: float
    logit_softcap: float
    attention_chunk: int
    initialisation: str
    init_std: float
    mup: MuPConfig
    vocab_multiple: int
    scan_layers: bool
    remat: str
    mlp: MLPConfig
    depth_routing: DepthRoutingConfig
    dropout: DropoutConfig
    soft_experts: SoftExpertsConfig
    dense_former: DenseFormerConfig
    selection: str = "auto"

    # Training looks ahead when tokens compete for places in a sequence; evaluation never does.
    causal_in_training: ClassVar[str] = (
        "unless depth_routing selects by top-k or mlp.moe by expert_choice"
    )

    def resolved(self):
        """The same module with the preset's values filled in and everything checked."""
        return resolve(self)

    def setup(self):
        c = self.resolved()
        std = c.deviations
        self.embed = c.token_table(c.width, std.table)
        self.positions_embed = None
        if c.positions == "learned":
            self.positions_embed = Embedding(
                c.context, c.width, std.table, c.dtype, axes=("position", "table")
            )
        block = c.block()
        self.dropout_embedding = learned_dropout.make_dropout(block, "embedding")
        self.mask_input = learned_dropout.make_mask_input(block)
        self.layers = Stack(c.specs(), c.scan_layers, c.remat, c.dense_former)
        self.norm_final = norms.make_norm(
            c.norm, use_bias=c.use_bias, eps=c.norm_eps, dtype=c.dtype, name=None
        )
        if not c.tied:
            self.head = c.output_layer(std.head)

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The normalised state [B, T, D] that the output layer reads.

        Args:
          tokens_BT: int32.
          positions_BT: int32, default 0..T-1. While decoding they are required, and a negative
            one marks padding. Past the table of learned positions there are no numbers.
          segment_ids_BT: int32 documents of packed rows, 0 for padding.
          train: dropout on, routing as configured for training.
          decode: append to the `cache` collection and attend over it.
          cache_size: tokens of context of that cache.
        Raises: UsageError: more tokens than the model has learned positions for.
        """
        if self.dropout.by_position or self.positions_embed is not None:
            self.check_context(cache_size if decode else tokens_BT.shape[1])
        if positions_BT is None:
            positions_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        info = self.token_info(positions_BT, segment_ids_BT, train, decode, cache_size)
        x_BTD = self.embed(tokens_BT)
        if self.positions_embed is not None:
            x_BTD = x_BTD + self.positions_embed(jnp.maximum(positions_BT, 0))
        if self.mask_input is not None:
            info = info.replace(mask_input_BTD=self.mask_input(x_BTD, info))
        if self.dropout_embedding is not None:
            x_BTD = self.dropout_embedding(x_BTD, info)
        x_BTD = constrain(x_BTD, "batch", "length", "act_embed")
        return self.norm_final(self.layers(x_BTD, info))

    @property
    def logit_scale(self):
        return self.mup.logit_scale(self.width)

    @property
    def deviations(self):
        return deviations(self.initialisation, self.init_std, self.mup, self.width)

    @nn.nowrap
    def block(self):
        """What the blocks without experts are built from."""
        c = self.resolved()
        return BlockConfig(
            width=c.width,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            hidden=c.mlp.hidden_size(c.width),
            activation=c.mlp.activation,
            norm=c.norm,
            norm_eps=c.norm_eps,
            use_bias=c.use_bias,
            rope_theta=c.rope_theta if c.positions == "rope" else 0.0,
            qk_norm=c.qk_norm,
            mup=c.attention_scale == "mup" or c.mup.base_width > 0,
            window=c.window,
            softcap=c.attention_softcap,
            chunk=c.attention_chunk,
            std=c.deviations.hidden,
            std_out=c.deviations.hidden / (2 * c.depth) ** 0.5,
            dropout=c.dropout,
            dtype=c.dtype,
            context=c.context,
            router_scale=c.mup.logit_scale(c.width),
        )

    def specs(self):
        """The layers of the stack."""
        c = self.resolved()
        return stack_specs.make(c.block(), c.depth, c.mlp, c.depth_routing, c.soft_experts)

    @nn.nowrap
    def unrolled(self):
        """The same model with unrolled layers; `models.unroll` converts the parameters."""
        return self.clone(scan_layers=False, remat="none")

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """FLOPs of one sequence, see `flops.Ledger`.

        Args:
          selection: "train" counts the capacity of routed blocks; "causal" the buffer that
            evaluation under the causal decision computes, ceil(c * T * slack).
          shares: {index in `specs()` of a routed layer: (share of the tokens, share of the causal
            pairs) that it was measured to route}: `nominal` then counts these, which is what
            decoding costs.
        """
        c, counts = self.resolved(), []
        stack = stack_specs.stack_flops(c.specs(), length, selection, shares)
        whole = (
            attend.visited_pairs(length, c.attention_chunk, c.window),
            flops.causal_pairs(length, c.window),
        )
        for nominal, (counted, pairs) in enumerate(zip(stack, whole, strict=True)):
            head = c.head_flops(length, c.width, nominal)
            masks = costs.embedding_mask_flops(c.block(), length, pairs)
            counts.append(flops.add([counted, masks, head]))
        return flops.Ledger(length, *counts)

    @nn.nowrap
    def parameter_count(self):
        """{component: parameters}, by formula."""
        c = self.resolved()
        norm = c.width * (2 if c.norm == "layernorm" and c.use_bias else 1)
        count = {"embedding": c.padded_vocab * c.width, "norm": norm}
        if c.positions == "learned":
            count["positions"] = c.context * c.width
        if not c.tied:
            count["head"] = c.width * c.padded_vocab
        if c.dense_former.on:
            count["averages"] = c.dense_former.parameter_count(len(c.specs()))
        masks = costs.embedding_mask_params(c.block())
        return flops.add([count, masks, stack_specs.stack_params(c.specs(), norm)])

    @nn.nowrap
    def cache_bytes(self, cache_size):
        """Bytes of keys and values that decoding one sequence of `cache_size` tokens keeps."""
        c = self.resolved()
        total = stack_specs.cached_values(c.specs(), cache_size)
        total += costs.embedding_mask_attentions(c.block()) * cache_size * c.width
        return 2 * total * jnp.dtype(c.dtype).itemsize
