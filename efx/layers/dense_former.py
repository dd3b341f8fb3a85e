"""DenseFormer: weighted averages of all earlier states of a stack (arXiv 2402.02622, section 3).

With X_0 what enters the stack, Y_0 = X_0, and for block i = 1..L
    X_i = block_i(Y_{i-1}),    Y_i = sum over j <= i of alpha_ij X_j.
At initialisation alpha_ii = 1 and the others are 0: a stack without averages. Averages take place
in every `period`-th block only (elsewhere Y_i = X_i), over every `dilation`-th state back from i.
The weights are leaves called `alpha`, which weight decay, by its default pattern, leaves alone.
Each token is averaged with itself only, so causality and decoding caches are not concerned.

The averages are elementwise work, which the FLOP ledger does not count.
"""

import jax.numpy as jnp
from flax import linen as nn

from efx.parameter import parameter


class StateAverage(nn.Module):
    """sum over j of alpha_j X_j, of states [B, T, D]; at first the last one has the weight 1."""

    @nn.compact
    def __call__(self, states):
        def initial(key, shape, dtype):
            return jnp.zeros(shape, dtype).at[-1].set(1.0)

        alpha = parameter(self, "alpha", initial, (len(states),), ("norm",))
        # One at a time, so that the compiler makes one pass of it and no copy of all states.
        mean_BTD = sum(alpha[j] * x_BTD.astype(jnp.float32) for j, x_BTD in enumerate(states))
        return mean_BTD.astype(states[-1].dtype)


class Averages:
    """The states of each stream in one pass through a stack, as a `Stack` goes along."""

    def __init__(self, config):
        self.config, self.states = config, {}

    def __call__(self, number, stream, before, after):
        """The state `after` a layer with Y_i for its X_i; inside the compact method of the stack,
        which owns the weights.

        Args:
          number: of the layer, from 1. stream: which entry of the state, a tuple, the layer
            computes, whose blocks are counted by themselves; None: the state is one array.
          before: what entered the layer.
        """
        if self.config is None or not self.config.on:
            return after
        x_BTD, y_BTD = (x if stream is None else x[stream] for x in (before, after))
        states = self.states.setdefault(stream, [x_BTD])
        states.append(y_BTD)
        chosen = self.config.states(len(states) - 1)
        if not chosen:
            return after
        y_BTD = StateAverage(name=f"average_{number}")([states[j] for j in chosen])
        return y_BTD if stream is None else (*after[:stream], y_BTD, *after[stream + 1 :])
