"""Controls of depth routing: baselines that select tokens without a router.

Their gate is 1, they train no decision, and no selection depends on the content of later tokens.

    stochastic   random tokens, drawn afresh for every block, row and batch (Raposo et al. 2024,
                 arXiv 2404.02258, section 3.4); training takes the top-k of the same numbers
    position     the first of every 1/capacity positions, in every block
    token_hash   all occurrences of some token ids, other ids in each block, by a hash of the ids as
                 in Hash Layers (Roller et al. 2021, arXiv 2106.04426), balanced by frequency

A new control is one function and a row of `CONTROLS`.
"""

import dataclasses
import fractions
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.errors import UsageError
from efx.layers.call import TokenPlaces

SEEDS = 4096  # seeds of blocks are below this


def position(call, seed, capacity):
    """The first of every 1/capacity positions of a document.

    For a capacity of a/b, interval k starts at position floor(b k / a). The first n positions
    contain at most ceil(capacity * n) starts.
    """
    a, b = fractions.Fraction(capacity).limit_denominator(4096).as_integer_ratio()
    if capacity < 1 / 4096:  # the nearest fraction would be 0, or larger
        a, b = 1, min(math.ceil(1 / capacity), 2**30)
    # Modulo b first: a times a position may exceed int32.
    inner_BT = call.positions_BT % b
    return inner_BT == b * ((a * inner_BT + a - 1) // b) // a


def token_hash(call, seed, capacity):
    """The ids on an arc of length `capacity` of the circle of all ids. The seed places the arc.

    (seed, position) draws the point of a token in the interval of its id, so that an id across the
    end of the arc gets the right fraction of its tokens selected.
    """
    places = call.token_places
    key = jax.random.key(seed)
    draw = jax.vmap(jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number))))
    place_BT = places.start_BT + places.length_BT * draw(call.positions_BT)
    return (place_BT + seed / SEEDS) % 1.0 < capacity


def stochastic(call, seed, capacity):
    """Each token with the probability `capacity`."""
    return uniform_numbers(call, seed) < capacity


def uniform_numbers(call, seed):
    """Numbers [B, T] in [0, 1), drawn by (`Call.routing_key`, seed, row, position): the same in a
    longer row, and in decoding with the same key."""
    if call.routing_key is None:
        raise UsageError(
            "config.model.depth_routing.train_selection='stochastic' needs a key: call the model "
            "with rngs={'routing': key}"
        )

    def draw(key, position):
        return jax.random.uniform(jax.random.fold_in(key, position))

    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.fold_in(call.routing_key, seed), jnp.arange(len(call.positions_BT))
    )
    return jax.vmap(jax.vmap(draw, in_axes=(None, 0)))(keys_B, call.positions_BT)


@dataclasses.dataclass(frozen=True)
class Control:
    """A value of `train_selection` without a router.

    Attributes:
      select: (call, seed, capacity) -> bool [B or 1, T], the selected tokens. `seed` is an int32 of
        the block, drawn when the model is initialised and kept in the collection `state`.
      draw: (call, seed) -> numbers [B, T]: training selects the ceil(capacity * T) tokens with the
        smallest. None: training selects like evaluation.
      has_causal_limit: admission limits the selected tokens. Without it `select` itself selects at
        most ceil(capacity * n) of the first n tokens.
      needs_token_places: `select` reads `Call.token_places`.
    """

    select: Callable
    draw: Callable | None = None
    has_causal_limit: bool = True
    needs_token_places: bool = False

    def is_exact(self, looks_ahead):
        """As `Selection.is_exact`."""
        return not self.has_causal_limit or (looks_ahead and self.draw is not None)


CONTROLS = {
    "stochastic": Control(stochastic, draw=uniform_numbers),
    "position": Control(position, has_causal_limit=False),
    "token_hash": Control(token_hash, needs_token_places=True),
}


class TokenPlacement(nn.Module):
    """Place token ids on a line, with intervals as long as their frequencies.

    `share`, in the collection `state`, is the frequency of each id, a mean over training steps.
    Before the first step all are equal. A step uses the old frequencies, then adds its tokens.
    """

    vocab_size: int

    @nn.compact
    def __call__(self, tokens_BT, call):
        """`TokenPlaces` of the tokens."""
        size = self.vocab_size
        share = self.variable("state", "share", jnp.zeros, (size,), jnp.float32)
        steps = self.variable("state", "steps", jnp.zeros, (), jnp.int32)
        share_V = jnp.where(steps.value > 0, share.value, 1.0 / size)
        # Sort by a hash: multiplying by an odd number close to 2^32 / golden ratio gives distinct
        # keys (Knuth, The Art of Computer Programming 3, section 6.4).
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
