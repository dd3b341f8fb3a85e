"""Sampling from a sparse ensemble, with a cache for each of the experts in use and no other.

The weights are computed from the text so far, when sampling begins and then every
`config.ensemble.every` tokens. An expert that comes into use reads the text once; one that goes out
of use gives its cache and its place on the device back.
"""

import collections
import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from efx import models, sharding
from efx.models import ensemble as mixtures
from efx.sample import PREFILL, STREAM, Sampler, TextSampler, choose


class EnsembleSampler(Sampler):
    """`Sampler` for one sequence at a time, of a mixture of experts of one architecture.

    Args:
      model: that of the experts.
      clustering: anything with `distances(texts)`: [n, k] squared distances from the centres.
      tokenizer: its `decode` gives the text that decides on the weights.
      settings: `config.ensemble`.
      options: those of Sampler.
    Attributes:
      stats: as Sampler's; also experts, {number: tokens for which it was in use}, and switches, how
        many times an expert came into use after the first ones.
    """

    def __init__(self, model, clustering, tokenizer, settings, **options):
        super().__init__(model, batch_size=1, **options)
        self._mixture = _Mixture(self._program)
        self._clustering, self._tokenizer, self._settings = clustering, tokenizer, settings

    def weights(self, ids):
        """log w [k] for the token after `ids`."""
        distances = self._clustering.distances([self._tokenizer.decode(ids)])
        tau, top_k = self._settings.tau, self._settings.top_k
        return np.asarray(mixtures.log_weights(jnp.asarray(distances), tau, top_k))[0]

    def tokens(self, variables, prompts, *, max_new_tokens, seeds, ended=()):
        """As `Sampler.tokens`, of one prompt; variables: those of expert j are `variables[j]`."""
        (prompt,), (seed,) = prompts, seeds
        self.check_prompt(prompt)
        run = _Run(self, variables, list(map(int, prompt)), np.uint32(seed % 2**32))
        with sharding.single_device():
            run.choose_experts()
            run.decode(0)  # compiles, if need be
        run.seconds["compile"] = run.seconds.pop("decode")
        while run.made < max_new_tokens and not run.done and 0 not in ended:
            # Not around the yield: in between, the caller's code runs.
            with sharding.single_device():
                run.choose_experts()
                new = run.decode(max_new_tokens - run.made)
            yield [new]
        self.stats = run.statistics()


class _Run:
    """One call of `EnsembleSampler.tokens`."""

    def __init__(self, sampler, variables, text, seed):
        self.sampler, self.variables, self.text, self.seed = sampler, variables, text, seed
        self.made = self.begin = self.due = 0  # tokens; of the text, where the caches begin
        self.done, self.experts, self.in_use = False, {}, []
        self.used, self.seconds = collections.Counter(), collections.Counter()
        self.counts = collections.Counter(prompt_tokens=len(text))

    def choose_experts(self):
        """Weights anew if they are due; then the experts in use have read the text so far."""
        clock, sampler = time.perf_counter(), self.sampler
        if len(self.text) - self.begin > sampler.cache_size:
            self._leave(list(self.experts))
            self.begin = len(self.text) - max(1, sampler.cache_size // 2)
            self.counts["slides"] += 1
        if self.made == self.due:  # before the first token, and then every so many
            log_w = sampler.weights(self.text)
            self.due += sampler._settings.every
            in_use = np.flatnonzero(np.isfinite(log_w)).tolist()
            self.counts["switches"] += len(set(in_use) - set(self.in_use)) if self.made else 0
            self.log_weights_E, self.in_use = log_w[in_use], in_use
            self._leave([j for j in self.experts if j not in in_use])
        for j in self.in_use:
            if j not in self.experts:
                text = self.text[self.begin :]
                own = self.variables[j]
                self.experts[j] = _Expert(sampler._program, sampler.model, own, text, self.seed)
        self.seconds["prefill"] += time.perf_counter() - clock

    def _leave(self, numbers):
        for j in numbers:
            self.counts["expert_overflow"] += self.experts.pop(j).dropped()

    def decode(self, most):
        """The next tokens, up to `most` and until something has to be decided anew."""
        clock, sampler = time.perf_counter(), self.sampler
        chosen = [self.experts[j] for j in self.in_use]
        caches, logits, rest = sampler._mixture.decode(
            tuple(expert.variables for expert in chosen),
            tuple(expert.cache for expert in chosen),
            tuple(expert.logits_BV for expert in chosen),
            self.log_weights_E,
            np.array([len(self.text) - self.begin], np.int32),
            self.seed,
            np.int32(self.made),
            np.int32(min(STREAM, most, self.due - self.made)),
            sampler._options,
        )
        for expert, cache, logits_BV in zip(chosen, caches, logits, strict=True):
            expert.cache, expert.logits_BV = cache, logits_BV
        out_N, count, done, steps = map(np.asarray, jax.device_get(rest))
        new, self.done = out_N[: int(count)].tolist(), bool(done)
        self.text = self.text + new
        self.made += int(steps)
        self.counts["new_tokens"] += len(new)
        self.used.update(dict.fromkeys(self.in_use, int(steps)))
        self.seconds["decode"] += time.perf_counter() - clock
        return new

    def statistics(self):
        """`EnsembleSampler.stats`."""
        caches = [expert.cache for expert in self.experts.values()]
        size = sum(x.nbytes for x in jax.tree.leaves(caches))
        self._leave(list(self.experts))
        names = ("prompt_tokens", "new_tokens", "slides", "switches", "expert_overflow")
        return {
            **{name: self.counts[name] for name in names},
            **{f"{name}_seconds": self.seconds[name] for name in ("compile", "prefill", "decode")},
            "tokens_per_second": self.counts["new_tokens"] / max(self.seconds["decode"], 1e-9),
            "cache_bytes": size,
            "experts": dict(self.used),
        }


class _Expert:
    """An expert in use: its parameters on the device, its cache, its logits of the next token."""

    def __init__(self, program, model, variables, ids, seed):
        self.variables = models.unroll_variables(model, jax.tree.map(jnp.asarray, variables))
        self.cache, self.logits_BV = program.start()
        for t in range(0, len(ids), PREFILL):
            part = ids[t : t + PREFILL]
            tokens_BT = np.zeros((1, PREFILL), np.int32)
            positions_BT = np.full((1, PREFILL), -1, np.int32)
            tokens_BT[0, : len(part)] = part
            positions_BT[0, : len(part)] = t + np.arange(len(part))
            self.cache, self.logits_BV = program.prefill(
                self.variables, self.cache, self.logits_BV, tokens_BT, positions_BT, seed
            )

    def dropped(self):
        """Choices of an expert inside of a Mixture of Experts that found it full."""
        leaves = jax.tree_util.tree_leaves_with_path(self.cache)
        return sum(int(np.sum(x)) for path, x in leaves if path[-1].key == "dropped")


@dataclasses.dataclass(frozen=True)
class _Mixture:
    """The compiled decode loop of the experts in use; compiled once for each number of them."""

    program: object

    @partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def decode(
        self, variables, caches, logits, log_weights_E, length_B, seed, made, limit, options
    ):
        """Up to `limit` tokens: (caches, logits, (tokens [STREAM], how many count, done, steps)).

        Ends early at a stop token, or when the last token has no place in the caches.
        """
        program, keys = self.program, jax.random.key(seed)[None]

        def running(state):
            step, _, _, length_B, _, _, done = state
            return (step < limit) & ~done & (length_B[0] <= program.cache_size)

        def body(state):
            step, caches, logits, length_B, out_N, count, done = state
            mixed_BV = mixtures.mix_logits(jnp.stack(logits, axis=1), log_weights_E[None])
            token_B = choose(mixed_BV, keys, made + step, options)
            out_N = out_N.at[step].set(token_B[0])
            done = jnp.any(token_B == options["stop_ids"])
            fits = ~done & (length_B < program.cache_size)
            positions_BT = jnp.where(fits, length_B, -1)[:, None]
            read = [
                program._features(own, cache, token_B[:, None], positions_BT, seed)
                for own, cache in zip(variables, caches, strict=True)
            ]
            caches = tuple(cache for _, cache in read)
            logits = tuple(
                program._logits(own, x_BTD[:, 0])
                for own, (x_BTD, _) in zip(variables, read, strict=True)
            )
            return step + 1, caches, logits, length_B + ~done, out_N, count + ~done, done

        zero = jnp.int32(0)
        state = (
            zero,
            caches,
            logits,
            length_B,
            jnp.zeros(STREAM, jnp.int32),
            zero,
            jnp.array(False),
        )
        step, caches, logits, _, out_N, count, done = jax.lax.while_loop(running, body, state)
        return caches, logits, (out_N, count, done, step)


class EnsembleTextSampler(TextSampler):
    """`TextSampler` of an ensemble, by a `config.sample` and a `config.ensemble` block."""

    def __init__(self, model, clustering, tokenizer, config, settings):
        super().__init__(model, tokenizer, config)
        self.sampler = EnsembleSampler(
            model,
            clustering,
            tokenizer,
            settings,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_ids=() if tokenizer.eot is None else (tokenizer.eot,),
        )
