"""The causal prediction loss of latents: from the latent at t, the one at t + 1.

With p_t = W x_t and z_t = x_{t+1}, over the pairs (t, t+1) of one document:
    cosine   1 - cos(p_t, z_t), averaged over pairs (regression of the next latent, as in Mirasol,
             arXiv 2311.05698, with the cosine as the distance)
    siglip   the sigmoid loss of Zhai et al. 2023 (arXiv 2303.15343, equation 1): for unit vectors,
             logits l_ts = exp(a) p_t.z_s + b with learned a and b, and y = 1 for s = t, else -1,
             -sum over s of log sigmoid(y l_ts), averaged over t. The candidates s are the pairs of
             the same row, or of the whole batch; the value grows with how many they are.
Latents that are all alike have no cosine loss at all, so its weight is small; the sigmoid form
tells latents apart and is not minimised by that.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import flops, means
from efx.layers.linear import Linear
from efx.layers.norms import l2_normalize
from efx.parameter import parameter

LOSS = "latent_prediction"
# Where a and b start (arXiv 2303.15343, section 3.2): most pairs are no match.
LOG_TEMPERATURE, BIAS = 2.302585092994046, -10.0


def pairs_within(segment_ids_BT):
    """bool [B, T-1]: whether t and t + 1 are of the same document."""
    same_BT = segment_ids_BT[:, :-1] == segment_ids_BT[:, 1:]
    return same_BT & (segment_ids_BT[:, 1:] > 0)


def cosine_loss(p_BTD, z_BTD, pairs_BT):
    """Mean of 1 - cos(p_t, z_t) over the pairs that count, bool."""
    loss_BT = 1.0 - jnp.sum(l2_normalize(p_BTD) * l2_normalize(z_BTD), axis=-1)
    return means.over(loss_BT, pairs_BT)


def sigmoid_loss(p_BTD, z_BTD, pairs_BT, log_temperature, bias, candidates="row"):
    """The sigmoid loss of the module's docstring; pairs_BT: those that count, bool."""
    p_BTD, z_BSD, pairs_BS = l2_normalize(p_BTD), l2_normalize(z_BTD), pairs_BT
    if candidates == "batch":  # one row of all
        p_BTD, z_BSD = (y.reshape(1, -1, y.shape[-1]) for y in (p_BTD, z_BSD))
        pairs_BT = pairs_BS = pairs_BT.reshape(1, -1)
    cos_BTS = jnp.einsum("BTD,BSD->BTS", p_BTD, z_BSD)
    logits_BTS = jnp.exp(log_temperature) * cos_BTS + bias
    sign_BTS = 2.0 * jnp.eye(cos_BTS.shape[-1])[None] - 1.0
    loss_BTS = -jax.nn.log_sigmoid(sign_BTS * logits_BTS)
    return means.over(jnp.sum(loss_BTS * pairs_BS[:, None], axis=-1), pairs_BT)


class LatentPrediction(nn.Module):
    """Sows the loss `latent_prediction` of a sequence of latents; returns nothing.

    Attributes:
      std: initialisation of W.
    """

    config: object  # `LatentLossConfig`
    std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD, segment_ids_BT=None):
        """Of x [B, T, D], whose documents, 0 for padding, say which pairs count; None: all. A
        sequence of one latent has the loss 0."""
        c, (batch, length, width) = self.config, x_BTD.shape
        linear = Linear(width, ("embed", "heads"), self.std, dtype=self.dtype, name="predict")
        p_BTD = linear(x_BTD[:, :-1])
        z_BTD = x_BTD[:, 1:]
        if not c.target_gradient:
            z_BTD = jax.lax.stop_gradient(z_BTD)
        if segment_ids_BT is None:
            pairs_BT = jnp.ones((batch, length - 1), bool)
        else:
            pairs_BT = pairs_within(segment_ids_BT)
        if c.kind == "cosine":
            loss = cosine_loss(p_BTD, z_BTD, pairs_BT)
        else:
            a, b = self._scalar("log_temperature", LOG_TEMPERATURE), self._scalar("bias", BIAS)
            loss = sigmoid_loss(p_BTD, z_BTD, pairs_BT, a, b, c.candidates)
        means.sow(self, "losses", LOSS, loss)

    def _scalar(self, name, value):
        return parameter(self, name, nn.initializers.constant(value), (), ())


def loss_flops(c, width, length):
    """{component: FLOPs} for one sequence of `length` latents; {} without the loss.

    With candidates "batch" they grow with the number of sequences in the batch, here one.
    """
    if c.kind == "none":
        return {}
    pairs = length - 1
    counted = flops.matmul(pairs, width, width)
    if c.kind == "siglip":
        counted += flops.matmul(pairs, width, pairs)
    return {LOSS: counted}
