"""Sampling from the sparse ensemble: `efx.sampling` with a model that is several experts at once.

The weights are computed from the text so far, when sampling begins and then every
`config.ensemble.every` tokens. Only the experts in use are on the device and have a cache; when an
expert comes into use, the text so far is read again.
"""

import collections
import dataclasses
import io
import itertools
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from efx import models
from efx.composition.ensemble import Ensemble, log_weights, mix_logits
from efx.config.load import to_config
from efx.logging import quantity
from efx.parallel import sharding
from efx.sampling import TextSampler


@dataclasses.dataclass(frozen=True)
class StackedExperts:
    """Experts of one architecture as one model for `efx.sampling.Sampler`.

    Its variables are those of an expert with a leading axis of experts, which is the second axis of
    "cache", and "log_weights" [E]. Its features are [B, T, E, D].

    Attributes:
      expert: the model of each expert, its layers not scanned. count: E.
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
        x_BTED, cache = jnp.stack([x_BTD] * self.count, axis=2), variables["cache"]
        return x_BTED, {"cache": jax.tree.map(lambda x: jnp.stack([x] * self.count, 1), cache)}

    def apply(self, variables, x, *arguments, method, **options):
        """`features` of tokens x, or `logits` of features x: log p of the mixture."""
        variables = dict(variables)
        log_weights_E = variables.pop("log_weights")
        apply = partial(self.expert.apply, method=method, **options)
        if method == "logits":
            logits_BEV = jax.vmap(apply, in_axes=(0, 1), out_axes=1)(variables, x)
            return mix_logits(logits_BEV[..., : self.vocab_size], log_weights_E[None])
        axes = {name: 1 if name == "cache" else 0 for name in variables}
        over_experts = jax.vmap(
            lambda variables: apply(variables, x, *arguments), in_axes=(axes,), out_axes=(2, 1)
        )
        return over_experts(variables)


class WeighedExperts:
    """The variables of StackedExperts for a text, as `efx.sampling.Sampler.tokens` takes them.

    Args:
      model: of an expert.
      experts: variables of expert j at [j], anywhere; indexed when one comes into use.
      clustering: anything with `distances(texts)`: [n, k] squared distances from the centres.
      tokenizer: its `decode` gives the text that decides the weights.
      settings: `config.ensemble`.
    Attributes:
      model: StackedExperts.
      history: of the last text, [(length at which weights were computed, experts in use)].
    """

    def __init__(self, model, experts, clustering, tokenizer, settings):
        self.model = StackedExperts(models.unrolled(model), settings.top_k)
        self.every, self.history = settings.every, []
        self._expert, self._experts = model, experts
        self._clustering, self._tokenizer, self._settings = clustering, tokenizer, settings

    def log_weights(self, ids):
        """log w [number of experts] for the token after `ids`; -inf for all but `top_k`."""
        distances = jnp.asarray(self._clustering.distances([self._tokenizer.decode(ids)]))
        return np.asarray(log_weights(distances, self._settings.tau, self._settings.top_k))[0]

    def at(self, texts, before):
        """See `Sampler.tokens`; for one text. An expert that stays in use keeps its index."""
        (ids,) = texts
        log_weights_E = self.log_weights(ids)
        best = np.argsort(-log_weights_E, kind="stable")[: self.model.count].tolist()
        variables, changed = {**before}, False
        if not before:
            self.history, in_use = [], best
            variables = _stacked(*map(self._variables, best))
        else:
            del variables["log_weights"]
            in_use = list(self.history[-1][1])
            coming = [j for j in best if j not in in_use]
            leaving = [i for i, j in enumerate(in_use) if j not in best]
            for i, j in zip(leaving, coming, strict=True):
                variables, in_use[i], changed = _replaced(variables, self._variables(j), i), j, True
        self.history.append((len(ids), tuple(in_use)))
        return {**variables, "log_weights": log_weights_E[in_use]}, changed

    def _variables(self, j):
        return models.unroll_variables(self._expert, self._experts[j])

    def usage(self, new_tokens):
        """({expert: number of the last text's new tokens that it was in use for}, number of times
        that an expert came into use after the first ones)."""
        tokens, switches = collections.Counter(), 0
        end = (self.history[0][0] + new_tokens, ())
        for (length, in_use), (until, following) in itertools.pairwise([*self.history, end]):
            tokens.update(dict.fromkeys(in_use, until - length))
            switches += len(set(following) - set(in_use))
        return tokens, switches


@jax.jit
def _stacked(*variables):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)


@partial(jax.jit, donate_argnums=0)
def _replaced(stacked, variables, i):
    return jax.tree.map(lambda stacked_leaf, leaf: stacked_leaf.at[i].set(leaf), stacked, variables)


class _HostMemory:
    """`[j]`: variables of expert j, read from its checkpoint when first asked for."""

    def __init__(self, ensemble):
        self._ensemble, self._read = ensemble, {}
        self.model = self._restore(0).model

    def _restore(self, j):
        experiment, _, params, variables = self._ensemble.load_expert(j)
        # The sampler asks under a mesh of one device, and these may lie on those of all processes.
        with jax.set_mesh(experiment.mesh):
            self._read[j] = jax.device_get(sharding.gather({"params": params, **variables}))
        return experiment

    def __getitem__(self, j):
        if j not in self._read:
            self._restore(j)
        return self._read[j]


def sample(config, workdir, step=None, stream=None):
    """Continues `config.sample.prompt` with the sparse ensemble of a folder of experts."""
    config = to_config(config)
    ensemble = Ensemble(config, workdir, step)
    on_host, tokenizer = _HostMemory(ensemble), ensemble.tokenizer
    experts = WeighedExperts(
        on_host.model, on_host, ensemble.clustering, tokenizer, config.ensemble
    )
    sampler = TextSampler(experts.model, tokenizer, config.sample)
    is_primary = jax.process_index() == 0
    # All processes make the text, since each may hold a part of the experts' parameters.
    stats = sampler.write(experts, stream if is_primary else io.StringIO())
    if not is_primary:
        return stats
    num_last = sampler.sampler.stats["new_tokens"]  # of the last sample
    tokens, switches = experts.usage(num_last)
    total = max(1, num_last)
    usage_text = ", ".join(f"{j} for {n / total:.0%}" for j, n in sorted(tokens.items()))
    print(
        f"{quantity(stats['tokens_per_second'], 'tokens/s')}; experts used, of "
        f"{ensemble.count}: {usage_text} of the tokens; {switches} switched on during sampling",
        file=sys.stderr,
    )
    return stats
