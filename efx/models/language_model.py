"""What families have in common: the call, what layers are told, and the output layer."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx import flops
from efx.errors import UsageError
from efx.layers import attend
from efx.layers.call import CacheView, Call
from efx.layers.linear import Embedding, Linear
from efx.layers.stack import by_path
from efx.models.contract import Stage
from efx.sharding import summed_over_shards, used_as

# Logical axes of the token embedding and of an output layer of its own.
TABLE_AXES, HEAD_AXES = ("vocab", "table"), ("table", "vocab")


class LanguageModel(nn.Module):
    """Base of the families, which keep the contract `Model` of `efx.models.contract`.

    A family has `features`, and, if it does not bring an output layer of its own, `embed` and,
    untied, `head`.

    Attributes:
      dtype: of activations; parameters are float32.
      selection: "auto" is "train" in training, else "causal".
    """

    config: Any
    vocab_size: int
    dtype: jnp.dtype
    selection: str = "auto"

    @classmethod
    def of(cls, members, config, vocab_size, dtype):
        """The model of a resolved config, made of these models of other runs."""
        if members:
            raise ValueError(f"a model of the family {config.family!r} has no members")
        return cls(config, vocab_size, dtype)

    @property
    def members(self):
        return {}

    def __call__(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        x_BTD = self.features(tokens_BT, positions_BT, segment_ids_BT, train, decode, cache_size)
        return self.logits(x_BTD)[..., : self.vocab_size]

    @nn.nowrap
    def make_call(self, positions_BT, segment_ids_BT, train, decode, cache_size):
        """What the layers are told of a call, with `selection` made out."""
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
        """Raise UsageError if so many tokens are more than there are learned positions for."""
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
        return by_path("layers", self.specs())

    @nn.nowrap
    def stages(self, length):
        return [Stage(path, np.arange(length)) for path in self.blocks()]

    @nn.nowrap
    def times(self, path, positions_RS, length):
        return positions_RS

    @property
    def context(self):
        return self.config.context

    @property
    def logit_scale(self):
        """Factor on the logits, as muP has one."""
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
        # A loss that goes over slices of the sequence would otherwise gather it in every slice; in
        # the dtype that it is used in, which is less to send.
        module, name, stored, used = self._head()
        return {module: {name: used_as(params[module][name].astype(self.dtype), stored, used)}}

    @nn.nowrap
    def sum_head_gradients(self, gradients):
        module, name, stored, _ = self._head()
        return {module: {name: summed_over_shards(gradients[module][name], stored)}}

    @nn.nowrap
    def _head(self):
        """Module and name of the matrix of the output layer, and its logical axes as a parameter
        and as it is used."""
        if self.config.tied:
            return "embed", "embedding", TABLE_AXES, ("act_vocab", "act_embed")
        return "head", "kernel", HEAD_AXES, ("act_embed", "act_vocab")

    @nn.nowrap
    def head_fn(self, head_params, x_ND):
        return self.apply({"params": head_params}, x_ND, method="logits")

    @property
    def padded_vocab(self):
        multiple = self.config.vocab_multiple
        return -(-self.vocab_size // multiple) * multiple

    @nn.nowrap
    def token_table(self, width, std):
        """The token embedding. Its padding, like that of the output layer, is 0 and stays so: no
        token looks it up, and it gets no probability and with that no gradient."""
        padding = self.padded_vocab - self.vocab_size
        return Embedding(self.padded_vocab, width, std, self.dtype, TABLE_AXES, padding)

    @nn.nowrap
    def output_layer(self, std):
        """That of a model whose token embedding is not tied."""
        padding = self.padded_vocab - self.vocab_size
        return Linear(
            self.padded_vocab, HEAD_AXES, std, dtype=self.dtype, padding=padding, wide=True
        )

    @nn.nowrap
    def head_flops(self, length, width):
        """{"head": nominal FLOPs}, without padding, on which the mesh decides."""
        return {"head": flops.matmul(length, width, self.vocab_size)}


def unrolled(model):
    """The same model with unrolled layers; `models.unroll` converts the parameters."""
    if not model.config.scan_layers and model.config.remat == "none":
        return model
    return model.clone(config=dataclasses.replace(model.config, scan_layers=False, remat="none"))
