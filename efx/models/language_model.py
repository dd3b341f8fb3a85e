"""The interface of all families and their common parts: embeddings, the call, the output layer."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from efx.layers import attend, flops, mup
from efx.layers.block import with_dropout
from efx.layers.learned_dropout import make_dropout, make_mask_input
from efx.layers.linear import Embedding, Linear, broadcast
from efx.layers.token_context import CacheView, TokenContext
from efx.models import costs
from efx.models.stack import names
from efx.parallel.collectives import reshard
from efx.parallel.sharding import constrain
from efx.routing.scores import token_places

# Logical axes of the token embedding, the position embedding and an untied output layer.
TABLE_AXES, POSITION_AXES, HEAD_AXES = ("vocab", "table"), ("position", "table"), ("table", "vocab")


class LanguageModel(nn.Module):
    """Base of the families: tokens -> logits, causal.

    A family defines `setup`, which calls `setup_embedding` and makes `head` if the output layer is
    not tied; `trunk`; and `specs`. Families without one stack of blocks on token embeddings define
    `features` and `ledger` instead. The rest of efx calls only the public methods of this class.
    Methods that need parameters are called by `apply(variables, ..., method=...)`.

    Attributes:
      config: resolved settings of the family. The rest of efx reads `family`, `context`,
        `scan_layers`, `remat`, `depth_routing`, `dropout`, `mup` and `member_runs` ((key, run
        directory), ... of its members).
      dtype: of activations; parameters are float32.
      selection: as in `TokenContext`; "auto" is "train" in training, else "causal".
    """

    config: Any
    vocab_size: int
    dtype: jnp.dtype
    selection: str = "auto"

    @classmethod
    def compose(cls, members, config, vocab_size, dtype):
        """The model of a resolved config; `members`: the models of other runs in it."""
        if members:
            raise ValueError(f"a model of the family {config.family!r} has no members")
        return cls(config, vocab_size, dtype)

    @property
    def members(self):
        """{name in the tree of parameters: (model of another run, regex of its unused parameters)},
        in the order of `config.member_runs`."""
        return {}

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The state [B, T, D] that the output layer reads.

        Args:
          tokens_BT: int32.
          positions_BT: int32, default 0..T-1. Required in decoding, where a negative position
            marks padding.
          segment_ids_BT: int32 documents of packed rows, 0 for padding.
          train: dropout on, routing as configured for training.
          decode: append to the collection `cache` and attend to it. "first": the tokens start
            their rows and padding follows them, so attention does not read the cache.
          cache_size: the most tokens of a sequence in the cache.
        Raises: UsageError for more tokens than the model has learned positions.
        """
        length = tokens_BT.shape[1]
        if self.positions_embed is not None or self.config.dropout.by_position:
            self.check_context(cache_size if decode else length)
        if positions_BT is None:
            positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
        call = self.make_call(positions_BT, segment_ids_BT, train, decode, cache_size)
        call = call.with_cache(first=decode == "first")
        x_BTD = self.embed(tokens_BT)
        if self.positions_embed is not None:
            x_BTD = x_BTD + self.position_embedding(positions_BT, x_BTD.shape)
        if self.config.depth_routing.reads_token_ids:
            places_BT = token_places(tokens_BT, positions_BT, self.vocab_size)
            call = call.replace(token_places_BT=places_BT)
        if self.mask_input is not None:
            call = call.replace(mask_input_BTD=self.mask_input(x_BTD, call))
        return self.trunk(x_BTD, call)

    def trunk(self, embedded_BTD, call):
        """The state that the output layer reads, from embeddings before their dropout."""
        raise NotImplementedError

    def specs(self):
        """Specs of the layers of the stack, which may be scanned; for names see `stack.names`."""
        raise NotImplementedError

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence of `length` tokens, a `flops.Ledger`.

        Args:
          selection: "train" counts the capacity of routed blocks, "causal" all slots that the
            causal decision may fill.
          shares: {path in `blocks()` of a routed block: (measured fraction of routed tokens, of
            causal pairs among them)}, counted in place of slots.
        """
        c = self.config
        pairs = flops.causal_pairs(length, c.attention.window)
        parts = [
            costs.stack_flops(self.blocks(), length, selection, shares),
            costs.embedding_mask_flops(self.block_config(), length, pairs),
            self.head_flops(length, c.width),
        ]
        return flops.Ledger(length, flops.add(parts))

    def __call__(self, tokens_BT, *args, **options):
        """float32 logits [B, T, V]; arguments as in `features`."""
        x_BTD = self.features(tokens_BT, *args, **options)
        return self.logits(x_BTD)[..., : self.vocab_size]

    @nn.nowrap
    def apply_to_batch(self, variables, batch, **options):
        """`apply` on a batch of the data pipeline, with further keywords of `apply`."""
        positions_BT, segment_ids_BT = batch.get("positions"), batch.get("segment_ids")
        return self.apply(variables, batch["inputs"], positions_BT, segment_ids_BT, **options)

    @nn.nowrap
    def check_packing(self):
        """Raise UsageError if the model cannot compute rows of several documents."""

    @nn.nowrap
    def blocks(self):
        """{path in the parameters of the unrolled model: `LayerSpec`}."""
        specs = self.specs()
        return {f"layers/{name}": spec for name, spec in zip(names(specs), specs, strict=True)}

    @nn.nowrap
    def stack_length(self, length):
        """Length of the stack's sequence for `length` tokens."""
        return length

    @nn.nowrap
    def token_indices(self, path, positions_RS, length):
        """int [R, S]: the token with which each position of a module's arrays is computed;
        negative for padding and memory tokens.

        Args:
          path: of the module in the unrolled model.
          positions_RS: of the module's `TokenContext` for one sequence of `length` tokens.
        """
        return positions_RS

    @property
    def context(self):
        return self.config.context

    # ---- parts for families ----

    def setup_embedding(self, num_positions):
        """Make the modules of `features`; `num_positions`: of a learned table, 0: none."""
        c, block, std = self.config, self.block_config(), self.deviations.table
        self.embed = self.token_table(c.width, std)
        self.positions_embed = None
        if num_positions:
            self.positions_embed = Embedding(
                num_positions, c.width, std, self.dtype, axes=POSITION_AXES
            )
        self.dropout_embedding = make_dropout(block, "embedding")
        self.mask_input = make_mask_input(block)

    def position_embedding(self, positions_BT, shape):
        """Learned positions, broadcast to `shape`."""
        # Padding has negative positions and may read any row.
        return broadcast(self.positions_embed(jnp.maximum(positions_BT, 0)), shape)

    def drop_embedding(self, embedded_BTD, call):
        """The input of the stack: embeddings after their dropout or mask."""
        x_BTD = with_dropout(self.dropout_embedding, embedded_BTD, call)
        return constrain(x_BTD, "batch", "length", "act_embed")

    @property
    def deviations(self):
        """Initial standard deviations, `mup.Deviations`."""
        c = self.config
        return mup.deviations(c.initialisation, c.init_std, c.mup, c.width)

    @nn.nowrap
    def block_config(self, num_increments=1):
        """`BlockConfig`, without experts, of a stack with this number of residual increments."""
        std = self.deviations.hidden
        std_out = std / max(1, num_increments) ** 0.5
        return self.config.block(std=std, std_out=std_out, dtype=self.dtype)

    @nn.nowrap
    def make_call(self, positions_BT, segment_ids_BT, train, decode, cache_size):
        """The `TokenContext` for the layers."""
        selection = self.selection
        if selection == "auto":
            selection = "train" if train else "causal"
        return TokenContext(
            positions_BT,
            segment_ids_BT,
            cache=CacheView(cache_size) if decode else None,
            routing_key=self.make_rng("routing") if self.has_rng("routing") else None,
            train=train,
            selection=selection,
        )

    @nn.nowrap
    def check_context(self, length):
        """Raise UsageError for more tokens than learned positions."""
        if length > self.config.context:
            self.config.refuse(
                "context",
                f"rows of {length} tokens are longer than the learned positions; use shorter rows, "
                "or train with a longer context",
            )

    # ---- the output layer ----

    @property
    def logit_scale(self):
        """Factor of muP on the logits."""
        return self.config.mup_ratio

    def logits(self, x):
        """float32 logits over the padded vocabulary; padded columns hold a large negative value."""
        c = self.config
        logits = self.embed.attend(x) if c.tied else self.head(x)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if c.logit_softcap:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        if self.padded_vocab > self.vocab_size:
            real = jnp.arange(self.padded_vocab) < self.vocab_size
            real = real.reshape((1,) * (logits.ndim - 1) + real.shape)
            logits = jnp.where(real, logits, attend.MASKED)
        return logits

    @nn.nowrap
    def head_params(self, params):
        """The parameters of the output layer, gathered over the batch's mesh axes.

        A loss over slices of the sequence would otherwise gather them for every slice. They have
        the dtype of the model, which needs less communication than float32.
        """
        module, name, stored, used = self._head()
        return {module: {name: reshard(params[module][name].astype(self.dtype), stored, used)}}

    @nn.nowrap
    def sum_head_gradients(self, gradients):
        """Gradients in `head_params`, summed over their first axis, the shards of the batch."""
        module, name, stored, _ = self._head()
        return {module: {name: constrain(jnp.sum(gradients[module][name], axis=0), *stored)}}

    @nn.nowrap
    def _head(self):
        """Module and name of the output matrix, its logical axes as stored and as used."""
        if self.config.tied:
            return "embed", "embedding", TABLE_AXES, ("act_vocab", "act_embed")
        return "head", "kernel", HEAD_AXES, ("act_embed", "act_vocab")

    @nn.nowrap
    def head_fn(self, head_params, x_ND):
        """Pure output layer: (parameters, [N, D]) -> logits [N, V]."""
        return self.apply({"params": head_params}, x_ND, method="logits")

    @property
    def padded_vocab(self):
        multiple = self.config.vocab_multiple
        return -(-self.vocab_size // multiple) * multiple

    @nn.nowrap
    def token_table(self, width, std):
        """The token embedding. Padded rows start at 0 and stay there: no token reads them, and they
        get no probability and so no gradient."""
        padding = self.padded_vocab - self.vocab_size
        return Embedding(self.padded_vocab, width, std, self.dtype, TABLE_AXES, padding)

    @nn.nowrap
    def output_layer(self, std):
        """The output layer of an untied model."""
        padding = self.padded_vocab - self.vocab_size
        return Linear(
            self.padded_vocab,
            HEAD_AXES,
            std,
            dtype=self.dtype,
            padding=padding,
            float32_output=True,
        )

    @nn.nowrap
    def head_flops(self, length, width):
        """{"head": nominal FLOPs}, without padding, which depends on the mesh."""
        return {"head": flops.matmul(length, width, self.vocab_size)}


def unrolled(model):
    """The same model with unrolled layers; `models.unroll` converts parameters."""
    if not model.config.scan_layers and model.config.remat == "none":
        return model
    return model.clone(config=dataclasses.replace(model.config, scan_layers=False, remat="none"))
