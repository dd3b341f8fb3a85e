"""Computing only those tokens that a mask leaves open, at inference.

How many there are is not known when a program is compiled, so they are taken a fixed number at a
time, see `plans.in_rounds`, which has no reverse mode: hence inference only.
"""

import jax.numpy as jnp

from efx.routing import plans


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

    def compute_tile(module, plan, out_1ND):
        return plans.scatter_add(out_1ND, module(plans.gather(x_1ND, plan)), plan)

    start_1ND = jnp.zeros_like(x_1ND)
    return plans.in_rounds(module, open_1N, tile, start_1ND, compute_tile).reshape(x_BTD.shape)
