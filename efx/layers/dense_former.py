"""DenseFormer: weighted averages of all earlier states of a stack (arXiv 2402.02622, section 3).

With X_0 the input of the stack, Y_0 = X_0, and for block i = 1..L
    X_i = block_i(Y_{i-1}),    Y_i = sum over j <= i of alpha_ij X_j.
At initialisation alpha_ii = 1 and the others are 0: the plain stack. Averages follow every
`period`-th block only (elsewhere Y_i = X_i), over every `dilation`-th state back from i. A token is
averaged with itself only, so causality and caches are not affected. Weights are called `alpha`,
which the default of `config.optim.decay` does not match. The FLOP ledger does not count averages:
they are elementwise.
"""

import jax.numpy as jnp
from flax import linen as nn

from efx.parameter import parameter


class StateAverage(nn.Module):
    """sum over j of alpha_j X_j, of states [B, T, D]."""

    @nn.compact
    def __call__(self, states):
        def last_one(key, shape, dtype):
            return jnp.zeros(shape, dtype).at[-1].set(1.0)

        alpha = parameter(self, "alpha", last_one, (len(states),), ("norm",))
        # One at a time, so that the compiler fuses the sum and does not stack the states.
        mean_BTD = sum(alpha[j] * x_BTD.astype(jnp.float32) for j, x_BTD in enumerate(states))
        return mean_BTD.astype(states[-1].dtype)


class Averages:
    """The states of each stream during one pass through a stack."""

    def __init__(self, config):
        self.config, self.states = config, {}

    def __call__(self, number, stream, before, after):
        """The state `after` a layer with X_i replaced by Y_i; call it in the stack's compact
        method, which owns the weights.

        Args:
          number: of the layer, from 1.
          stream: index of the stream that the layer computes, in a tuple of states; each stream
            counts its own blocks. None: the state is one array.
          before: state before the layer.
        """
        if self.config is None or not self.config.on:
            return after
        x_BTD, y_BTD = (x if stream is None else x[stream] for x in (before, after))
        states = self.states.setdefault(stream, [x_BTD])
        states.append(y_BTD)
        indices = self.config.states(len(states) - 1)
        if not indices:
            return after
        y_BTD = StateAverage(name=f"average_{number}")([states[j] for j in indices])
        return y_BTD if stream is None else (*after[:stream], y_BTD, *after[stream + 1 :])
