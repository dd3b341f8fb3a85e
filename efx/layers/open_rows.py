"""Computing only those tokens that a mask leaves open, at inference.

How many there are is not known when a program is compiled, so a loop takes them a fixed number at a
time, ceil(open / tile) times: shapes are static, and what is closed is not computed. A loop of
unknown length has no reverse mode, hence inference only.
"""

import jax.numpy as jnp
from flax import linen as nn

from efx.layers import routing


def compute(module, x_BTD, open_BT, tile):
    """module(x) [B, T, D] for the open tokens, 0 for the others.

    Args:
      module: treats every token alike: [B, T, D] -> [B, T, D].
      open_BT: bool.
      tile: how many tokens are computed at a time.
    """
    batch, length, width = x_BTD.shape
    x_1ND, open_1N = x_BTD.reshape(1, -1, width), open_BT.reshape(1, -1)
    tile = min(tile, batch * length)
    rank_1N = jnp.cumsum(open_1N, axis=1) - 1
    count = jnp.sum(open_1N)

    def more(module, carry):
        return carry[0] < count

    def some(module, carry):
        done, out_1ND = carry
        plan = routing.first_plan(open_1N & (rank_1N >= done), tile)
        y_1CD = module(routing.gather(x_1ND, plan))
        return done + tile, routing.scatter_add(out_1ND, y_1CD, plan)

    start = (jnp.int32(0), jnp.zeros_like(x_1ND))
    return nn.while_loop(more, some, module, start)[1].reshape(x_BTD.shape)
