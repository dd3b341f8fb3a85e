"""Gates of depth routing: the factor on the increment of a selected token, from its score.

A new gate is a function and an entry of `GATES`.
"""

import jax
import jax.numpy as jnp

GATES = {
    "identity": lambda r: r,  # Raposo et al. 2024, arXiv 2404.02258, equation 1
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "twice_sigmoid": lambda r: 2.0 * jax.nn.sigmoid(r),  # 1 for r = 0
    "one": jnp.ones_like,
}
