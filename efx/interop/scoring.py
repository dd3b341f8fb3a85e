"""Log-probabilities of continuations, and generated texts, by the causal decisions of sampling.

For evaluation harnesses; `efx.interop.lm_eval` connects EleutherAI's. Few programs are compiled:
a row is padded at its end to the next power of two, from SHORTEST up to the longest row.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efx import models
from efx.errors import UsageError
from efx.layers.stack import label
from efx.parallel import sharding
from efx.sampling import ROUTING, Sampler
from efx.train import memory

SHORTEST = 32  # tokens of a row
_LOGITS = 64  # positions of all rows whose logits are in memory at once
_ADAPTER = "adapter"  # name of adapters in a layer; their experts do not count as the MLP's


class Score(NamedTuple):
    """Score of a continuation.

    Attributes:
      logprob: sum over its tokens, in nats.
      is_greedy: whether greedy decoding generates it.
      tokens: number of tokens that the model read. flops: nominal FLOPs, see `RowCost`.
    """

    logprob: float
    is_greedy: bool
    tokens: int
    flops: float


class GeneratedText(NamedTuple):
    """A generated text; tokens and flops as in `Score`, of the prompt and the text."""

    text: str
    tokens: int
    flops: float


def row_length(tokens, longest):
    """Length of the padded row for this number of tokens."""
    return min(longest, max(SHORTEST, 1 << (tokens - 1).bit_length()))


def has_routers(model):
    """Whether a cache of the model counts routed tokens or choices of experts."""
    cache, _ = models.decoding_shapes(model, 1, min(SHORTEST, model.context))
    counts = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
    return not counts.isdisjoint(("routed", "admitted"))


class RowCost:
    """Nominal FLOPs of a forward pass over one row, output layer included.

    Routed blocks and token-choice experts count the tokens that they computed. Expert choice,
    adapters, and routing in members of a bridged model count their full capacity.
    """

    def __init__(self, model):
        self._model, self._specs = model, model.blocks()
        self._cached_flops = functools.lru_cache(maxsize=4096)(self._flops)

    def __call__(self, tokens, routed, computed):
        """FLOPs of a row.

        Args:
          routed: {label of a routed block: number of tokens that it computed}.
          computed: number of choices of experts that were computed, over all layers.
        """
        return self._cached_flops(tokens, tuple(routed.items()), computed)

    def _flops(self, tokens, routed, computed):
        model, routed, shares = self._model, dict(routed), {}
        length = model.stack_length(tokens)
        for path, spec in self._specs.items():
            if spec.routing is not None:
                count = min(routed[label(path)], length)
                shares[path] = count / length, count * (count + 1) / (length * (length + 1))
        if choices := self._num_choices(length, routed):
            fraction = min(max(computed / choices, 1e-9), 1.0)
            model = models.changed(model, **{"mlp.moe.computed_fraction": fraction})
        return sum(model.ledger(tokens, "causal", shares).nominal.values())

    def _num_choices(self, length, routed):
        """Number of choices of experts by the tokens that reach them, no-op experts included."""
        return sum(
            block.moe.top_k * routed.get(label(path), length)
            for path, spec in self._specs.items()
            for block in spec.blocks
            if block.moe is not None and block.moe.router == "token_choice"
        )


def _computed_counts(cache):
    """({label of a routed block: [B] tokens that it computed}, [B] computed choices of experts)
    from the cache of unrolled layers."""
    routed, computed = {}, 0
    for path, value in jax.tree_util.tree_leaves_with_path(cache):
        if path[-1].key == "routed":
            routed[label("/".join(key.key for key in path[:-1]))] = value
        elif path[-1].key == "admitted" and path[-2].key != _ADAPTER:
            computed = computed + jnp.sum(value, axis=1)
    return routed, computed


class Scorer:
    """Scores continuations and generates texts with one model.

    Args:
      setup: `build.Setup`. variables: {"params": ..., and "state" where the model has one}.
      batch_size: rows that are computed together.
      max_length: tokens of the longest row; None: the model's context.
    """

    def __init__(self, setup, variables, *, batch_size, max_length=None):
        model, self.tokenizer = setup.model, setup.tokenizer
        self.mesh, self.rules = setup.mesh, sharding.unsplit(setup.rules, "length")
        self.batch_size = batch_size
        self.max_length = model.context if max_length is None else max_length
        if batch_size < 1:
            raise UsageError(f"--batch-size={batch_size}: must be at least 1")
        shards = sharding.shard_count(self.mesh, self.rules, "batch")
        if batch_size % shards:
            raise UsageError(
                f"--batch-size={batch_size}: must be a multiple of the {shards} devices on the "
                "mesh's batch axes"
            )
        if not 2 <= self.max_length <= model.context:
            raise UsageError(
                f"--max-length={max_length}: must be from 2 to {model.context}, the model's context"
            )
        self.has_routers, self.row_cost = has_routers(model), RowCost(model)
        self._placement = sharding.Placement(self.mesh, self.rules, batch_size)
        self.model, self.variables = model, variables
        if self.has_routers:
            if model.config.scan_layers:  # the counts of the cache are by layer
                self.model = models.unrolled(model)
                with sharding.use(self.mesh, self.rules):
                    self.variables = models.unroll_variables(model, variables)
            self._check_memory(shards)
        self._jitted_score = jax.jit(self._score, out_shardings=sharding.replicated(self.mesh))

    def _check_memory(self, shards):
        """Raise UsageError if a cache does not fit."""
        shapes = models.decoding_shapes(self.model, self.batch_size, self.max_length)
        memory.check(
            f"--batch-size={self.batch_size}, --max-length={self.max_length}: a cache",
            {"keys and values": memory.on_each_device(shapes) // shards},
        )

    def _batches(self, lengths):
        """[(row length, indices of up to `batch_size` rows)], the longest first."""
        batches = []
        for length in sorted(set(lengths), reverse=True):
            indices = [i for i, other in enumerate(lengths) if other == length]
            for start in range(0, len(indices), self.batch_size):
                batches.append((length, indices[start : start + self.batch_size]))
        return batches

    # ---- scoring ---------------------------------------------------------------------------------

    def score(self, requests, progress=iter):
        """A `Score` for each (context, continuation), non-empty lists of token ids.

        A request longer than the longest row loses its first tokens.

        Args:
          progress: wraps the iterable of batches, such as in a progress bar.
        """
        rows = [self._row(context, continuation) for context, continuation in requests]
        lengths = [row_length(len(tokens) - 1, self.max_length) for tokens, _ in rows]
        scores = [None] * len(rows)
        for length, indices in progress(self._batches(lengths)):
            for i, score in zip(
                indices, self._score_batch(length, [rows[i] for i in indices]), strict=True
            ):
                scores[i] = score
        return scores

    def _row(self, context, continuation):
        """(tokens of a row and the token after it, how many of the last are scored)"""
        if not continuation or len(continuation) > self.max_length:
            raise UsageError(
                f"a continuation of {len(continuation)} tokens: must have from 1 to "
                f"{self.max_length}, the length of a row"
            )
        return [*context, *continuation][-self.max_length - 1 :], len(continuation)

    def _score_batch(self, length, rows):
        """Yield the scores of up to `batch_size` rows."""
        shape = self.batch_size, length
        tokens_BT, targets_BT = np.zeros((2, *shape), np.int32)
        positions_BT, scored_BT = np.full(shape, -1, np.int32), np.zeros(shape, bool)
        for b, (tokens, count) in enumerate(rows):
            n = len(tokens) - 1
            tokens_BT[b, :n], targets_BT[b, :n] = tokens[:-1], tokens[1:]
            positions_BT[b, :n], scored_BT[b, n - count : n] = np.arange(n), True
        batch = dict(tokens=tokens_BT, targets=targets_BT, positions=positions_BT, scored=scored_BT)
        local = {name: x[self._placement.rows] for name, x in batch.items()}
        with sharding.use(self.mesh, self.rules):
            arrays = self._jitted_score(self.variables, self._placement(local))
        logprob_BT, greedy_B, (routed, computed) = jax.device_get(arrays)
        logprob_B = np.sum(logprob_BT, axis=1, dtype=np.float64)
        computed_B = np.broadcast_to(computed, len(logprob_B))
        for b, (tokens, _) in enumerate(rows):
            n, routed_in_row = len(tokens) - 1, {name: int(x[b]) for name, x in routed.items()}
            flops = self.row_cost(n, routed_in_row, int(computed_B[b]))
            yield Score(float(logprob_B[b]), bool(greedy_B[b]), n, flops)

    def _score(self, variables, batch):
        """(log-probabilities [B, T] of the scored targets, whether all of a row are the most
        likely tokens [B], `_computed_counts`)"""
        x_BTD, counts = self._features(variables, batch["tokens"], batch["positions"])
        head = self.model.head_params(variables["params"])

        def at_position(position):
            x_BD, target_B, scored_B = position
            logits_BV = self.model.head_fn(head, x_BD)[:, : self.model.vocab_size]
            target_logit_B = jnp.take_along_axis(logits_BV, target_B[:, None], axis=1)[:, 0]
            logprob_B = target_logit_B - jax.nn.logsumexp(logits_BV, axis=1)
            greedy_B = jnp.argmax(logits_BV, axis=1) == target_B
            return jnp.where(scored_B, logprob_B, 0.0), greedy_B | ~scored_B

        # Logits of all positions at once would be the largest array by far.
        by_position = [jnp.swapaxes(y, 0, 1) for y in (x_BTD, batch["targets"], batch["scored"])]
        batch_size = min(_LOGITS, len(by_position[0]))
        logprob_TB, greedy_TB = jax.lax.map(at_position, by_position, batch_size=batch_size)
        return logprob_TB.T, jnp.all(greedy_TB, axis=0), counts

    def _features(self, variables, tokens_BT, positions_BT):
        # A stochastic control of routing draws the same numbers in every batch.
        keys = {"routing": jax.random.fold_in(jax.random.key(0), ROUTING)}
        if not self.has_routers:
            # No token attends to the padding after it.
            x_BTD = self.model.apply(variables, tokens_BT, method="features", rngs=keys)
            return x_BTD, ({}, 0)
        # The cache counts the computed tokens.
        length = tokens_BT.shape[1]
        x_BTD, state = self.model.apply(
            {**variables, "cache": models.init_cache(self.model, self.batch_size, length)},
            tokens_BT,
            positions_BT,
            decode=True,
            cache_size=length,
            mutable=["cache"],
            method="features",
            rngs=keys,
        )
        return x_BTD, _computed_counts(state["cache"])

    # ---- generating ------------------------------------------------------------------------------

    def generate(
        self, prompts, *, max_new_tokens, until=(), temperature=0.0, top_k=0, top_p=1.0, seeds=None,
        progress=iter,
    ):  # fmt: skip
        """A `GeneratedText` for each prompt, a list of token ids.

        It ends before the first non-empty text of `until`, at the end of a document, or after
        `max_new_tokens`. A prompt loses its first tokens if it and so many new ones are longer
        than the longest row.

        Args:
          temperature, top_k, top_p: as in `Sampler`. seeds: one for each prompt; None: 0, 1, ...
          progress: as in `score`.
        """
        if not 1 <= max_new_tokens < self.max_length:
            raise UsageError(
                f"max_gen_toks={max_new_tokens}: must be from 1 to {self.max_length - 1}, one "
                "less than the longest row"
            )
        prompts = [list(prompt[max_new_tokens - self.max_length :]) for prompt in prompts]
        seeds = range(len(prompts)) if seeds is None else seeds
        # Prompts of similar lengths are decoded together.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        sizes = [row_length(len(prompts[i]) + max_new_tokens, self.max_length) for i in order]
        eot, texts = self.tokenizer.eot, [None] * len(prompts)
        for size, places in progress(self._batches(sizes)):
            indices = [order[place] for place in places]
            sampler = Sampler(
                self.model,
                batch_size=self.batch_size,
                cache_size=size,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop_ids=() if eot is None else (eot,),
                rules=self.rules,
            )
            generated = self._generate_batch(
                sampler,
                [prompts[i] for i in indices],
                [seeds[i] for i in indices],
                max_new_tokens,
                [stop for stop in until if stop],
            )
            for i, text in zip(indices, generated, strict=True):
                texts[i] = text
        return texts

    def _generate_batch(self, sampler, prompts, seeds, max_new_tokens, stops):
        """Yield the texts of up to `batch_size` prompts."""
        generated, missing = [[] for _ in prompts], self.batch_size - len(prompts)
        # The batch is filled up with copies of the first prompt, which end at once.
        ended = set(range(len(prompts), self.batch_size))
        steps = sampler.tokens(
            self.variables,
            [*prompts, *[prompts[0]] * missing],
            max_new_tokens=max_new_tokens,
            seeds=[*seeds, *[seeds[0]] * missing],
            ended=ended,
        )
        for new in steps:
            for b, ids in enumerate(generated):
                ids += new[b]
                if any(stop in self.tokenizer.decode(ids) for stop in stops):
                    ended.add(b)
        routed = sampler.stats["routed_by_row"]
        computed_B = np.zeros(self.batch_size)
        for layer, count_B in sampler.stats["computed_choices_by_row"].items():
            if not layer.endswith(f"/{_ADAPTER}"):
                computed_B += count_B
        for b, (prompt, ids) in enumerate(zip(prompts, generated, strict=True)):
            tokens = len(prompt) + len(ids)
            routed_in_row = {name: int(count_B[b]) for name, count_B in routed.items()}
            flops = self.row_cost(tokens, routed_in_row, int(computed_B[b]))
            yield GeneratedText(text_before(self.tokenizer.decode(ids), stops), tokens, flops)


def text_before(text, stops):
    """The text before the first of these stops."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
