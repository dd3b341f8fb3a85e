"""Sampling from the sparse ensemble: several experts as one model of `efx.sampling`.

Weights are computed from the text so far, at first and then every `config.ensemble.every` tokens.
Only the experts in use are on the device and have a KV cache. When they change, the text so far is
read again.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from efx import models
from efx.composition.ensemble import Ensemble, log_weights
from efx.config.load import to_config
from efx.data import load_tokenizer
from efx.logging import quantity
from efx.run_dir import TOKENIZER_FILE
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

    config = property(lambda self: self.expert.config)
    context = property(lambda self: self.expert.context)
    vocab_size = property(lambda self: self.expert.vocab_size)

    def init_with_output(self, *arguments, **options):
        x_BTD, variables = self.expert.init_with_output(*arguments, **options)
        cache = jax.tree.map(lambda x: jnp.stack([x] * self.count, 1), variables["cache"])
        return jnp.stack([x_BTD] * self.count, axis=2), {"cache": cache}

    def apply(self, variables, x, *arguments, method, **options):
        """Return `features` of tokens x, or `logits` of features x: log p of the mixture."""
        variables = dict(variables)
        log_w_E = variables.pop("log_weights")
        apply = functools.partial(self.expert.apply, method=method, **options)
        if method == "logits":
            logits_BEV = jax.vmap(apply, in_axes=(0, 1), out_axes=1)(variables, x)
            return mix_logits(logits_BEV[..., : self.vocab_size], log_w_E)
        axes = {name: 1 if name == "cache" else 0 for name in variables}
        over_experts = jax.vmap(
            lambda variables: apply(variables, x, *arguments), in_axes=(axes,), out_axes=(2, 1)
        )
        return over_experts(variables)


def mix_logits(logits_BEV, log_w_E):
    """Return log p [B, V] of the next token, from the experts' logits."""
    log_probs_BEV = jax.nn.log_softmax(logits_BEV.astype(jnp.float32), axis=-1)
    return jax.nn.logsumexp(log_probs_BEV + log_w_E[None, :, None], axis=1)


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
    """

    def __init__(self, model, variables_of, clustering, tokenizer, settings):
        self.model = StackedExperts(models.unrolled(model), settings.top_k)
        self.every, self.in_use, self.used = settings.every, [], 0
        self._variables_of = lambda j: models.unroll_variables(model, variables_of(j))
        self._clustering, self._tokenizer, self._settings = clustering, tokenizer, settings

    def log_weights(self, ids):
        """Return log w [experts] for the token after `ids`; -inf for all but `top_k`."""
        distances = self._clustering.distances([self._tokenizer.decode(ids)])
        return log_weights(distances, self._settings.tau, self._settings.top_k)[0]

    def at(self, texts, before):
        """Return (variables, whether the text has to be read again), see `Sampler.tokens`."""
        log_w_E = self.log_weights(*texts)
        is_selected_E = np.isfinite(log_w_E)
        self.used = self.used + is_selected_E
        selected = np.flatnonzero(is_selected_E).tolist()
        has_changed = not before or selected != self.in_use
        if has_changed:
            before, self.in_use = _stack(*map(self._variables_of, selected)), selected
        return {**before, "log_weights": log_w_E[selected]}, has_changed


@jax.jit
def _stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def sample(config, workdir, step=None, stream=None):
    """Continue `config.sample.prompt` with the ensemble, writing text to `stream`.

    Returns: statistics of the sampler.
    """
    config = to_config(config)
    ensemble = Ensemble(config, workdir, step)
    tokenizer = load_tokenizer(ensemble.folders[0] / TOKENIZER_FILE)

    @functools.cache
    def in_host_memory(j):
        experiment, _, params, variables = ensemble.load_expert(j)
        return experiment.model, jax.device_get({"params": params, **variables})

    experts = WeightedExperts(
        in_host_memory(0)[0],
        lambda j: in_host_memory(j)[1],
        ensemble.clustering,
        tokenizer,
        config.ensemble,
    )
    stats = TextSampler(experts.model, tokenizer, config.sample).write(experts, stream)
    shares = experts.used / (experts.used.sum() / config.ensemble.top_k)
    used = [f"{j} for {share:.0%}" for j, share in enumerate(shares) if share]
    print(
        f"{quantity(stats['tokens_per_second'], 'tokens/s')}; experts used, of {ensemble.count}: "
        f"{', '.join(used)} of the text",
        file=sys.stderr,
    )
    return stats
