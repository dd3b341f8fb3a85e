"""Sampling from the sparse ensemble: several experts as one model of `efx.sampling`.

Weights are computed from the text so far, at first and then every `config.ensemble.every` tokens.
Only the experts in use are on the device and have a KV cache. When an expert replaces another, the
text so far is read again.
"""

import dataclasses
import functools
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np

from efx import models
from efx.composition.ensemble import Ensemble, log_weights, mix_logits
from efx.config.load import to_config
from efx.errors import is_primary
from efx.logging import quantity
from efx.parallel import sharding
from efx.sampling import TextSampler


@dataclasses.dataclass(frozen=True)
class StackedExperts:
    """E experts of one architecture as one model for `efx.sampling.Sampler`.

    Variables are an expert's with a leading axis E, which is the second axis in "cache", and
    "log_weights" [E]. Features are [B, T, E, D].

    Attributes:
      expert: the model of one expert, with unrolled layers. count: E.
    """

    expert: object
    count: int

    @property
    def config(self):
        return self.expert.config

    @property
    def context(self):
        return self.expert.context

    @property
    def vocab_size(self):
        return self.expert.vocab_size

    def init_with_output(self, *arguments, **options):
        x_BTD, variables = self.expert.init_with_output(*arguments, **options)
        x_BTED = jnp.stack([x_BTD] * self.count, axis=2)
        cache = jax.tree.map(lambda x: jnp.stack([x] * self.count, 1), variables["cache"])
        return x_BTED, {"cache": cache}

    def apply(self, variables, x, *arguments, method, **options):
        """Return `features` of tokens x, or `logits` of features x: log p of the mixture."""
        variables = dict(variables)
        log_weights_E = variables.pop("log_weights")
        apply = functools.partial(self.expert.apply, method=method, **options)
        if method == "logits":
            logits_BEV = jax.vmap(apply, in_axes=(0, 1), out_axes=1)(variables, x)
            return mix_logits(logits_BEV[..., : self.vocab_size], log_weights_E[None])
        axes = {name: 1 if name == "cache" else 0 for name in variables}
        over_experts = jax.vmap(
            lambda variables: apply(variables, x, *arguments), in_axes=(axes,), out_axes=(2, 1)
        )
        return over_experts(variables)


class WeightedExperts:
    """The variables of StackedExperts for a text, as `Sampler.tokens` reads them.

    Args:
      model: the model of one expert.
      variables_of: function from an expert's index to its variables.
      clustering: `distances(texts)` returns [n, experts], squared distances from the centres.
      settings: `config.ensemble`.
    Attributes:
      in_use: the experts on the device, in the order of the stack.
      used: for each expert, the number of updates of the weights that selected it.
      replaced: how often an expert came in the place of another.
    """

    def __init__(self, model, variables_of, clustering, tokenizer, settings):
        self.model = StackedExperts(models.unrolled(model), settings.top_k)
        self.every, self.in_use, self.used, self.replaced = settings.every, [], [], 0
        self._variables_of = lambda j: models.unroll_variables(model, variables_of(j))
        self._clustering, self._tokenizer, self._settings = clustering, tokenizer, settings

    def log_weights(self, ids):
        """Return log w [experts] for the token after `ids`; -inf for all but `top_k`."""
        distances = self._clustering.distances([self._tokenizer.decode(ids)])
        return log_weights(distances, self._settings.tau, self._settings.top_k)[0]

    def at(self, texts, before):
        """Return (variables for one text, whether it has to be read again), see `Sampler.tokens`.

        An expert that stays in use keeps its index in the stack.
        """
        (ids,) = texts
        log_weights_E = self.log_weights(ids)
        best = np.flatnonzero(np.isfinite(log_weights_E)).tolist()
        if not before:
            self.in_use, self.used, self.replaced = best, np.zeros(len(log_weights_E), int), 0
            variables, added = _stacked(*map(self._variables_of, best)), []
        else:
            variables = {name: value for name, value in before.items() if name != "log_weights"}
            added = [j for j in best if j not in self.in_use]
            removed = [i for i, j in enumerate(self.in_use) if j not in best]
            for i, j in zip(removed, added, strict=True):
                variables = _replaced(variables, self._variables_of(j), i)
                self.in_use[i] = j
        self.used[best] += 1
        self.replaced += len(added)
        return {**variables, "log_weights": log_weights_E[self.in_use]}, bool(added)


@jax.jit
def _stacked(*variables):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)


@functools.partial(jax.jit, donate_argnums=0)
def _replaced(stacked, variables, i):
    return jax.tree.map(lambda stacked_leaf, leaf: stacked_leaf.at[i].set(leaf), stacked, variables)


def sample(config, workdir, step=None, stream=None):
    """Continue `config.sample.prompt` with the ensemble, writing text to `stream`.

    Returns: statistics of the sampler.
    """
    config = to_config(config)
    ensemble = Ensemble(config, workdir, step)

    @functools.cache
    def in_host_memory(j):
        experiment, _, params, variables = ensemble.load_expert(j)
        # The sampler's mesh is of one device; these may lie on the devices of all processes.
        with jax.set_mesh(experiment.mesh):
            gathered = jax.device_get(sharding.gather({"params": params, **variables}))
        return experiment.model, gathered

    experts = WeightedExperts(
        in_host_memory(0)[0],
        lambda j: in_host_memory(j)[1],
        ensemble.clustering,
        ensemble.tokenizer,
        config.ensemble,
    )
    sampler = TextSampler(experts.model, ensemble.tokenizer, config.sample)
    # All processes sample, since each may hold a part of the parameters.
    stats = sampler.write(experts, stream if is_primary() else io.StringIO())
    if is_primary():
        updates = experts.used.sum() / config.ensemble.top_k  # of the last sample
        used = [f"{j} for {n / updates:.0%}" for j, n in enumerate(experts.used) if n]
        print(
            f"{quantity(stats['tokens_per_second'], 'tokens/s')}; experts used, of "
            f"{ensemble.count}: {', '.join(used)} of the text; {experts.replaced} replaced another",
            file=sys.stderr,
        )
    return stats
