"""The interface of all families, and their common parts: the call and the output layer."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from efx import flops
from efx.errors import UsageError
from efx.layers import attend
from efx.layers.call import CacheView, Call
from efx.layers.linear import Embedding, Linear
from efx.layers.stack import by_path
from efx.sharding import summed_over_shards, used_as

# Logical axes of the token embedding and of an output layer of its own.
TABLE_AXES, HEAD_AXES = ("vocab", "table"), ("table", "vocab")


class LanguageModel(nn.Module):
    """Base of the families: tokens -> logits, causal.

    A family defines `features`, `specs`, `ledger`, and `embed` or `head` for the output layer. The
    rest of efx calls only the public methods of this class. Methods that need parameters are called
    by `apply(variables, ..., method=...)`.

    Attributes:
      config: resolved settings of the family: `family`, `context`, `scan_layers`, `remat`,
        `depth_routing`, `dropout`, `mup`, `member_runs` ((key, run directory), ... of the runs
        that it is composed of), `causal_in_training` (when training does not look ahead, in words).
      dtype: of activations; parameters are float32.
      selection: as in `Call`; "auto" is "train" in training, else "causal".
    """

    config: Any
    vocab_size: int
    dtype: jnp.dtype
    selection: str = "auto"

    @classmethod
    def of(cls, members, config, vocab_size, dtype):
        """The model of a resolved config, composed of these models of other runs."""
        if members:
            raise ValueError(f"a model of the family {config.family!r} has no members")
        return cls(config, vocab_size, dtype)

    @property
    def members(self):
        """{name in the tree of parameters: (model of another run, regex of parameters of that run
        that are not used)}, in the order of `config.member_runs`."""
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
            their rows and padding follows them, so that attention needs no cache.
          cache_size: tokens of context of that cache.
        Raises: UsageError for more tokens than the model has learned positions.
        """
        raise NotImplementedError

    def specs(self):
        """The specs of the layers of the stack that may be scanned; their names:
        `stack.names`."""
        raise NotImplementedError

    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence of `length` tokens, a `flops.Ledger`.

        Args:
          selection: "train" counts the capacity of routed blocks, "causal" all slots that the
            causal decision may fill.
          shares: {path in `blocks()` of a routed block: (fraction of the tokens, fraction of the
            causal pairs) that it was measured to route}, counted in place of slots.
        """
        raise NotImplementedError

    def __call__(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """float32 logits [B, T, V] of `features`."""
        x_BTD = self.features(tokens_BT, positions_BT, segment_ids_BT, train, decode, cache_size)
        return self.logits(x_BTD)[..., : self.vocab_size]

    @nn.nowrap
    def make_call(self, positions_BT, segment_ids_BT, train, decode, cache_size):
        """The `Call` for the layers."""
        selection = self.selection
        if selection == "auto":
            selection = "train" if train else "causal"
        return Call(
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
            raise UsageError(
                f"config.model.context={self.config.context}: rows of {length} tokens are "
                "longer than the learned positions; use shorter rows, or train with a longer "
                "context"
            )

    @nn.nowrap
    def check_packing(self):
        """Raise UsageError if the model cannot compute rows of several documents."""

    @nn.nowrap
    def blocks(self):
        """{path in the parameters of the unrolled model: spec} of everything that is routed, or
        not, by itself; see `LayerSpec`."""
        return by_path("layers", self.specs())

    @nn.nowrap
    def stack_length(self, length):
        """Places of the stack's sequence for `length` tokens."""
        return length

    @nn.nowrap
    def token_of_place(self, path, positions_RS, length):
        """int [R, S]: the token at whose time each place of a module's arrays is computed;
        negative: none, such as of padding and memory.

        Args:
          path: of the module in the unrolled model.
          positions_RS: positions in the module's `Call` for one sequence of `length` tokens.
        """
        return positions_RS

    @property
    def context(self):
        return self.config.context

    @property
    def logit_scale(self):
        """Factor of muP on the logits."""
        return 1.0

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
        """The parameters of the output layer, gathered off the batch's mesh axes.

        A loss over slices of the sequence would otherwise gather them for every slice. In the dtype
        of use, which is less to send.
        """
        module, name, stored, used = self._head()
        return {module: {name: used_as(params[module][name].astype(self.dtype), stored, used)}}

    @nn.nowrap
    def sum_head_gradients(self, gradients):
        """Gradients in `head_params`, summed over their first axis, the shards of the batch."""
        module, name, stored, _ = self._head()
        return {module: {name: summed_over_shards(gradients[module][name], stored)}}

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
        """Output layer of its own, for untied models."""
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
