"""The sparse ensemble of cBTM: the mixture of experts' next-token distributions.

    p(x | context) = sum_e w_e p_e(x | context),    w_e ~ exp(-||h(context) - mu_e||^2 / tau),

the weights outside the top k put to zero and the others renormalised (Gururangan et al. 2023,
"Scaling Expert Language Models with Unsupervised Domain Discovery", arXiv 2303.14177, section 2.4).
All of it in float32 and in log space.
"""

import jax
import jax.numpy as jnp

from efx.layers import routing


def log_weights(distances_BE, tau, top_k):
    """log w [B, E] from squared distances [B, E]; -inf for the experts outside the top k.

    Among equally near experts the first ones are taken. tau > 0; 1 <= top_k <= E.
    """
    scores_BE = -distances_BE.astype(jnp.float32) / tau
    best_BC = routing.best(scores_BE, top_k)
    chosen_BE = jnp.any(jax.nn.one_hot(best_BC, scores_BE.shape[1], dtype=bool), axis=1)
    return jax.nn.log_softmax(jnp.where(chosen_BE, scores_BE, -jnp.inf), axis=-1)


def mix(log_probs_BE, log_weights_BE):
    """log of sum_e w_e p_e [B], from log p_e [B, E] of one token each."""
    return jax.nn.logsumexp(log_probs_BE + log_weights_BE, axis=-1)


def mix_logits(logits_BEV, log_weights_BE):
    """log p [B, V] of every next token, from the experts' logits [B, E, V]."""
    log_probs_BEV = jax.nn.log_softmax(logits_BEV.astype(jnp.float32), axis=-1)
    return jax.nn.logsumexp(log_probs_BEV + log_weights_BE[:, :, None], axis=1)
