"""Scores of depth routing: one number per token, by which a routed block selects.

    router      r = x w, learned (Raposo et al. 2024, arXiv 2404.02258, equation 1)
    position    the first of every 1/capacity positions score highest, the same in every block
    token_hash  whole types of tokens score alike, other types in each block: a hash of their ids,
                as in Hash Layers (Roller et al. 2021, arXiv 2106.04426)
    stochastic  random numbers, drawn afresh for every block, row and batch (Raposo et al. 2024,
                section 3.4)
    gumbel      r = x w + Gumbel noise: top-k samples tokens without replacement (Kool et al. 2019,
                arXiv 1903.06059)
    norm        log |x|, without parameters: large where the blocks below changed the stream most

`position`, `token_hash` and `stochastic` are controls: they have no parameters and do not read the
activations. About the fraction `capacity` of their scores is positive, so thresholds start close to
their final values.

A new score is a subclass of `Score` and an entry of `SCORES`. The score of a token must depend on
that token and its `TokenContext` alone, because decoding has no others.
"""

import fractions
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx.errors import UsageError
from efx.layers import flops
from efx.layers.linear import dot_float32
from efx.layers.moe import ROUTER_STD
from efx.parallel.sharding import parameter

SEEDS = 4096  # seeds of blocks are below this


class RoutingModule(nn.Module):
    """Base of the scores and the causal decisions of a routed block.

    Attributes:
      config: a `DepthRoutingConfig`. capacity: c of the block. width: D.
      router_scale: factor on the initial values of routers, see `mup`.
    """

    config: Any
    capacity: float
    width: int
    router_scale: float = 1.0

    @staticmethod
    def flops(config, width, tokens):
        return 0


class Score(RoutingModule):
    """Base of the scores: (x [B, T, D], `TokenContext`) -> r [B, T], float32."""

    is_trained: ClassVar[bool] = False  # it has parameters
    reads_token_ids: ClassVar[bool] = False  # through `TokenContext.token_places_BT`

    def seed(self):
        """int32 of the block, drawn when the model is initialised; in the collection `state`."""

        def draw():
            return jax.random.randint(self.make_rng("params"), (), 0, SEEDS)

        return self.variable("state", "seed", draw).value

    def uniform(self, call):
        """Numbers [B, T] in [0, 1), drawn by (routing key, block, row, position): the same in a
        longer row, and in decoding with the same key."""
        if call.routing_key is None:
            raise UsageError(
                f"config.model.depth_routing.score={self.config.score!r}: needs a key; call the "
                "model with rngs={'routing': key}"
            )
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            jax.random.fold_in(call.routing_key, self.seed()), jnp.arange(len(call.positions_BT))
        )
        return jax.vmap(_uniform)(keys_B, call.positions_BT)


class Router(Score):
    """r = x w. The parameter `router` is beside those of the block."""

    is_trained: ClassVar[bool] = True

    @staticmethod
    def flops(config, width, tokens):
        return flops.matmul(tokens, width, 1)

    def setup(self):
        # From zero all scores would be equal, and top-k would select the first tokens.
        init = nn.initializers.normal(ROUTER_STD * self.router_scale)
        self.router = parameter(self, "router", init, (self.width,), ("norm",))

    def __call__(self, x_BTD, call):
        return dot_float32(self.router, x_BTD)  # float32, whatever the dtype of x


class Position(Score):
    """Interval k of 1/capacity = b/a positions starts at floor(b k / a). The first n positions of a
    document contain ceil(capacity * n) starts; only these have positive scores."""

    def __call__(self, x_BTD, call):
        capacity = fractions.Fraction(self.capacity)
        a, b = capacity.limit_denominator(4096).as_integer_ratio()
        if self.capacity < 1 / 4096:  # the nearest fraction would be 0, or larger
            a, b = 1, min(math.ceil(1 / capacity), 2**30)
        # Modulo b first: a times a position may exceed int32.
        after_BT = -(a * (call.positions_BT % b)) % b  # less than a at a start
        score_BT = (a - 0.5 - after_BT.astype(jnp.float32)) / b
        return jnp.broadcast_to(score_BT, x_BTD.shape[:2])


class TokenHash(Score):
    """Places of the token's id on a circle of all ids, counted from the block's seed."""

    reads_token_ids: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x_BTD, call):
        return self.capacity - (call.token_places_BT + self.seed() / SEEDS) % 1.0


class Stochastic(Score):
    """Uniform noise."""

    @nn.compact
    def __call__(self, x_BTD, call):
        return self.uniform(call) - (1.0 - self.capacity)


class GumbelRouter(Router):
    """A router with noise in evaluation and sampling too: the threshold is of noisy scores."""

    @nn.compact
    def __call__(self, x_BTD, call):
        noise_BT = -jnp.log(-jnp.log(jnp.maximum(self.uniform(call), 1e-30)))
        return super().__call__(x_BTD, call) + noise_BT


class Norm(Score):
    """Logarithm of the norm of x: blocks add to the stream, so its norm changes with depth."""

    def __call__(self, x_BTD, call):
        return jnp.log(1e-6 + jnp.linalg.norm(x_BTD.astype(jnp.float32), axis=-1))


SCORES = {
    "router": Router,
    "position": Position,
    "token_hash": TokenHash,
    "stochastic": Stochastic,
    "gumbel": GumbelRouter,
    "norm": Norm,
}


def token_places(tokens_BT, positions_BT, vocab_size):
    """Places [B, T] in [0, 1) of token ids on a circle, in the order of a hash.

    An id has an interval of 1 / vocab_size, in which the position of a token draws its place, so
    that a threshold can select any fraction of the tokens of an id.
    """
    # Multiplying by an odd number close to 2^32 / golden ratio gives distinct keys (Knuth, The Art
    # of Computer Programming 3, section 6.4).
    keys_V = np.arange(vocab_size, dtype=np.uint32) * np.uint32(2654435769)
    rank_V = jnp.asarray(np.argsort(np.argsort(keys_V)), jnp.float32)
    draw_BT = jax.vmap(_uniform, in_axes=(None, 0))(jax.random.key(0), positions_BT)
    return (rank_V[tokens_BT] + draw_BT) / vocab_size


def _uniform(key, positions_T):
    return jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position)))(
        positions_T
    )
