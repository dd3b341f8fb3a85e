"""Controls of depth routing: tokens are chosen without a look at what they hold.

What learned routing is worth is the distance to these. Neither has a router, a gate (it is 1) or a
decision to be trained: what they choose does not depend on later tokens, so training, evaluation
and sampling choose alike.

    stochastic    top-k of Gaussian noise, drawn afresh for every block, row and batch (Raposo et
                  al. 2024, arXiv 2404.02258, section 3.4)
    random_fixed  the same places for every row of every batch, drawn once for each block

A control that tells from a token by itself whether to compute it, by whatever is known of it
without its activations, is one function in `BY_TOKEN`.
"""

import fractions

import jax
import jax.numpy as jnp

from efx.errors import UsageError


def random_fixed(tokens, seed, capacity):
    """One position, drawn by (seed, k), of the k-th 1/capacity positions of a document.

    Of the first n positions, whatever n, at most ceil(capacity * n) are so chosen: the places that
    a capacity allows. For c = a/b interval k is [floor(b k / a), floor(b (k + 1) / a)).
    """
    share = fractions.Fraction(capacity).limit_denominator(4096)
    a, b = share.numerator, share.denominator
    interval_BT = (a * tokens.positions_BT + a - 1) // b
    start_BT = b * interval_BT // a
    size_BT = b * (interval_BT + 1) // a - start_BT
    key = jax.random.key(seed)

    def uniform(k):
        return jax.random.uniform(jax.random.fold_in(key, k))

    within_BT = jnp.floor(size_BT * jax.vmap(jax.vmap(uniform))(interval_BT)).astype(jnp.int32)
    return tokens.positions_BT == start_BT + jnp.minimum(within_BT, size_BT - 1)


# name: (tokens, seed, capacity) -> bool [B or 1, T], which tokens to compute. `seed` is an int32 of
# the block's own, drawn when the model is initialised and kept with its state.
BY_TOKEN = {"random_fixed": random_fixed}
STOCHASTIC = "stochastic"
# Seeds of blocks are below this: the mean of equal ones over many micro-batches stays exact.
SEEDS = 4096


def noise(module, batch, length):
    """N(0, 1), [B, T], of a module with the rng stream "routing"."""
    if not module.has_rng("routing"):
        raise UsageError(
            f"config.model.depth_routing.train_selection={STOCHASTIC!r} draws places from a key: "
            "call the model with rngs={'routing': key}"
        )
    return jax.random.normal(module.make_rng("routing"), (batch, length))
