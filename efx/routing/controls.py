"""Controls of depth routing: tokens are chosen without a look at what they hold.

What learned routing is worth is the distance to these. None has a router, a gate (it is 1) or a
decision to be trained: what they choose does not depend on later tokens, so training, evaluation
and sampling choose alike.

    stochastic       top-k of Gaussian noise, drawn afresh for every block, row and batch (Raposo et
                     al. 2024, arXiv 2404.02258, section 3.4)
    position         the first of every 1/capacity positions, in every block
    token_hash       the occurrences of some types of tokens (a type is an entry of the vocabulary),
                     others in each block, chosen by a hash of their ids as in Hash Layers (Roller
                     et al. 2021, arXiv 2106.04426), balanced by how frequent types are

A control that tells from a token by itself whether to compute it, by whatever is known of it
without its activations, is one function in `BY_TOKEN`, whose name is one of the choices of
`DepthRoutingConfig.train_selection` too.
"""

import fractions
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.errors import UsageError
from efx.layers.call import TokenPlaces

# Seeds of blocks are below this.
SEEDS = 4096


def position(call, seed, capacity):
    """The first of every 1/capacity positions of a document.

    For a capacity of a/b, interval k starts at position floor(b k / a). The first n positions
    contain at most ceil(capacity * n) starts.
    """
    a, b = fractions.Fraction(capacity).limit_denominator(4096).as_integer_ratio()
    if capacity < 1 / 4096:  # the nearest fraction would be 0, or larger
        a, b = 1, min(math.ceil(1 / capacity), 2**30)
    # Of each b positions by themselves: a times a position may be more than an int32 holds.
    inner_BT = call.positions_BT % b
    return inner_BT == b * ((a * inner_BT + a - 1) // b) // a


def token_hash(call, seed, capacity):
    """The types on an arc of length `capacity` of the circle of all types, which begins where the
    block's seed says."""
    return (_places_of_types(call, seed) + seed / SEEDS) % 1.0 < capacity


def _uniform(seed, number_BT):
    """Numbers in [0, 1), [B, T], each drawn by (seed, number)."""
    key = jax.random.key(seed)
    draw = jax.vmap(jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number))))
    return draw(number_BT)


def _places_of_types(call, seed):
    """A place in [0, 1) for each token, [B, T], on the part of the line that its type has.

    It is drawn by (seed, position), so of a type that lies across a boundary as many tokens fall on
    either side as its parts are long, and what is chosen is the capacity in the mean.
    """
    places = call.token_places
    return places.start_BT + places.length_BT * _uniform(seed, call.positions_BT)


# name: (call, seed, capacity) -> bool [B or 1, T], which tokens to compute. `seed` is an int32 of
# the block's own, drawn when the model is initialised and kept with its state.
BY_TOKEN = {
    "position": position,
    "token_hash": token_hash,
}
STOCHASTIC = "stochastic"


class TokenTypes(nn.Module):
    """Where the types of tokens lie on a line on which each is as long as it is frequent.

    How frequent types are is counted in training: `share`, in the collection `state`, is the mean
    over the steps of their shares of the tokens of a step; before the first step all are equal. A
    step counts its tokens after it has decided about them.
    """

    vocab_size: int

    @nn.compact
    def __call__(self, tokens_BT, call):
        """`TokenPlaces` of the tokens."""
        size = self.vocab_size
        share = self.variable("state", "share", jnp.zeros, (size,), jnp.float32)
        steps = self.variable("state", "steps", jnp.zeros, (), jnp.int32)
        share_V = jnp.where(steps.value > 0, share.value, 1.0 / size)
        # Sorted by a hash: multiplying by an odd number close to 2^32 / golden ratio gives every id
        # another key (Knuth, The Art of Computer Programming 3, section 6.4).
        sorted_V = jnp.argsort(jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(2654435769))
        ends_V = jnp.cumsum(share_V[sorted_V])
        start_V = jnp.zeros(size).at[sorted_V].set(ends_V - share_V[sorted_V], unique_indices=True)
        if call.train and not self.is_initializing():
            real_BT = call.real(tokens_BT.shape[0]).astype(jnp.float32)
            counts_V = jnp.zeros(size).at[tokens_BT].add(real_BT)
            now_V = counts_V / jnp.maximum(real_BT.sum(), 1.0)
            share.value += (now_V - share.value) / (steps.value + 1)
            steps.value += 1
        return TokenPlaces(start_V[tokens_BT], share_V[tokens_BT])


def make_token_types(routing, vocab_size):
    """What makes `Tokens.types` for blocks that are routed so, or None where they need none."""
    if not routing.by_type:
        return None
    return TokenTypes(vocab_size)


def noise(module, batch, length):
    """N(0, 1), [B, T], of a module with the rng stream "routing".

    Whoever asks for the same batch and length with the same key gets the same numbers, however
    often the module was called before. `make_rng` counts calls, and decoding may call a stack twice
    for what is one call of a full pass: for memory tokens, and for the others.
    """
    if not module.has_rng("routing"):
        raise UsageError(
            f"config.model.depth_routing.train_selection={STOCHASTIC!r} needs a key: call the "
            "model with rngs={'routing': key}"
        )
    return jax.random.normal(module.scope.rngs["routing"].as_jax_rng(), (batch, length))
