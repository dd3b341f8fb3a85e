"""How likely a model finds given tokens after others, and the tokens that it goes on with.

Both are those of the causal decisions, as a sampler has them. What an evaluation harness needs of a
model, without the harness; `efx.interop.lm_eval` gives it to EleutherAI's.

Few programs are compiled: rows are as long as the next power of two, from 32 up to the longest that
is asked for, with padding at their end. Where the model has room for a share of a sequence (routed
blocks, experts), a short row would have less of it than the whole context, and a token's chances
would depend on how long its row happens to be. There the rows are read into the cache that a
sampler has, whose room is that of the longest sequence, however short the text.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efx import memory, models, sharding
from efx.errors import UsageError
from efx.layers.stack import label
from efx.sample import PLACES, Sampler

SHORTEST = 32  # tokens of a row
_LOGITS = 64  # places of all rows whose logits are in memory at once


# The name of adapters below the layers that they adapt, whose experts are none of the MLP's.
_ADAPTER = "adapter"


class Score(NamedTuple):
    """Of a continuation.

    Attributes:
      logprob: the sum over its tokens, in nats.
      is_greedy: whether greedy decoding would have given all of them.
      tokens: how many the model read. flops: what that cost, see `Cost`.
    """

    logprob: float
    is_greedy: bool
    tokens: int
    flops: float


class Text(NamedTuple):
    """What a model went on with; tokens and flops as in `Score`, those made included."""

    text: str
    tokens: int
    flops: float


def row_length(tokens, longest):
    """The length of the row that so many tokens are computed in."""
    return min(longest, max(SHORTEST, 1 << (tokens - 1).bit_length()))


def has_room(model):
    """Whether what is computed of a token depends on how long its row is: a share of the row's
    tokens is all that something has room for, be it routed blocks, experts or adapters, in the
    model or its members. A sampler's cache counts what found none."""
    cache, _ = models.decoding_shapes(model, 1, min(SHORTEST, model.context))
    counts = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    return "overflow" in counts or "dropped" in counts


class Cost:
    """Nominal FLOPs of a forward pass over so many tokens, output layer included, with what routed
    blocks and experts that tokens choose were seen to compute of them. Experts and adapters that
    choose tokens count as full, and so does all that is routed in members of a bridged model."""

    def __init__(self, model):
        self._model, self._specs = model, model.blocks()
        self._of = functools.lru_cache(maxsize=4096)(self._flops)

    def __call__(self, tokens, routed, computed):
        """The FLOPs of one text.

        Args:
          routed: {label of a routed block: how many tokens it computed}.
          computed: how many choices of an expert were computed, over all layers.
        """
        return self._of(tokens, tuple(routed.items()), computed)

    def _flops(self, tokens, routed, computed):
        model, places, shares, routed = self._model, self._places(tokens), {}, dict(routed)
        for path, spec in self._specs.items():
            if spec.routing is not None:
                r = min(routed[label(path)], places)
                shares[path] = r / places, r * (r + 1) / (places * (places + 1))
        if choices := self._choices(places, routed):
            fraction = min(max(computed / choices, 1e-9), 1.0)
            model = models.changed(model, **{"mlp.moe.computed_fraction": fraction})
        return sum(model.ledger(tokens, "causal", shares).nominal.values())

    def _places(self, tokens):
        return self._model.stack_length(tokens)

    def _choices(self, places, routed):
        """How many experts the tokens that reach them choose, over all layers; no-op ones too."""
        total = 0
        for path, spec in self._specs.items():
            for block in spec.blocks:
                if block.moe is not None and block.moe.router == "token_choice":
                    total += block.moe.top_k * routed.get(label(path), places)
        return total


def _counts(cache):
    """({label of a routed block: [B] tokens that it computed}, [B] choices of experts that were) of
    a cache with unrolled layers."""
    routed, computed = {}, 0
    for path, value in jax.tree_util.tree_leaves_with_path(cache):
        if path[-1].key == "routed":
            routed[label("/".join(key.key for key in path[:-1]))] = value
        elif path[-1].key == "admitted" and path[-2].key != _ADAPTER:
            computed = computed + jnp.sum(value, axis=1)
    return routed, computed


class Answering:
    """A model with its variables, and how long its rows may be.

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
        shards = sharding.batch_shards(self.mesh, self.rules)
        if batch_size % shards:
            raise UsageError(
                f"--batch-size={batch_size}: must be a multiple of the {shards} devices on the "
                "mesh's batch axes"
            )
        if not 2 <= self.max_length <= model.context:
            raise UsageError(
                f"--max-length={max_length}: must be from 2 to {model.context}, the model's context"
            )
        self.has_room, self.cost = has_room(model), Cost(model)
        self._placement = sharding.Placement(self.mesh, self.rules, batch_size)
        self.model, self.variables = model, variables
        if self.has_room:
            if model.config.scan_layers:  # so that layers are counted one by one
                self.model = models.unrolled(model)
                with sharding.use(self.mesh, self.rules):
                    self.variables = models.unroll_variables(model, variables)
            self._check_memory(shards)
        self._scored = jax.jit(self._score, out_shardings=sharding.replicated(self.mesh))

    def _check_memory(self, shards):
        """UsageError where the cache has no room."""
        shapes = models.decoding_shapes(self.model, self.batch_size, self.max_length)
        memory.check(
            f"--batch-size={self.batch_size}, --max-length={self.max_length}: a cache",
            {"keys and values": memory.on_each_device(shapes) // shards},
        )

    # ---- scoring ---------------------------------------------------------------------------------

    def scores(self, requests, progress=iter):
        """A `Score` for each (context, continuation), lists of token ids neither of which is empty.

        What is too long loses its first tokens, so that as many as the longest row are read to
        predict the last ones.

        Args:
          progress: of a list of batches, an iterator that shows how far it is.
        """
        rows = [self._row(context, continuation) for context, continuation in requests]
        lengths = np.array([row_length(len(tokens) - 1, self.max_length) for tokens, _ in rows])
        batches = []
        for length in sorted(set(lengths.tolist()), reverse=True):  # what needs most memory first
            of_length = np.flatnonzero(lengths == length)
            batches += [
                (length, of_length[i : i + self.batch_size])
                for i in range(0, len(of_length), self.batch_size)
            ]
        begun = (
            (indices, self._begun(length, [rows[i] for i in indices]))
            for length, indices in progress(batches)
        )
        found = [None] * len(rows)
        for indices, arrays in _one_ahead(begun):
            scored = self._finished([rows[i] for i in indices], arrays)
            for i, score in zip(indices, scored, strict=True):
                found[i] = score
        return found

    def _row(self, context, continuation):
        """(tokens of a row and the one after it, how many of the last are scored)"""
        if not continuation or len(continuation) > self.max_length:
            raise UsageError(
                f"a continuation of {len(continuation)} tokens: must have from 1 to "
                f"{self.max_length}, the length of a row"
            )
        return [*context, *continuation][-self.max_length - 1 :], len(continuation)

    def _begun(self, length, rows):
        """What `_score` gives of up to `batch_size` rows, on the devices."""
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
            return self._scored(self.variables, self._placement(local))

    def _finished(self, rows, arrays):
        """The scores of rows by what `_begun` gave."""
        logprob_BT, greedy_B, (routed, computed) = jax.device_get(arrays)
        logprob_B = np.sum(logprob_BT, axis=1, dtype=np.float64)
        computed_B = np.broadcast_to(computed, len(logprob_B))
        for b, (tokens, _) in enumerate(rows):
            n, of_row = len(tokens) - 1, {name: int(x[b]) for name, x in routed.items()}
            flops = self.cost(n, of_row, int(computed_B[b]))
            yield Score(float(logprob_B[b]), bool(greedy_B[b]), n, flops)

    def _score(self, variables, batch):
        """(log-probabilities [B, T] of the scored targets, whether all of a row's are the most
        likely ones [B], `_counts`)"""
        x_BTD, counts = self._features(variables, batch["tokens"], batch["positions"])
        head = self.model.head_params(variables["params"])

        def at_place(place):
            x_BD, target_B, scored_B = place
            logits_BV = self.model.head_fn(head, x_BD)[:, : self.model.vocab_size]
            chosen_B = jnp.take_along_axis(logits_BV, target_B[:, None], axis=1)[:, 0]
            logprob_B = chosen_B - jax.nn.logsumexp(logits_BV, axis=1)
            right_B = jnp.argmax(logits_BV, axis=1) == target_B
            return jnp.where(scored_B, logprob_B, 0.0), right_B | ~scored_B

        # Logits of all places at once would be the largest array by far.
        by_place = [jnp.swapaxes(y, 0, 1) for y in (x_BTD, batch["targets"], batch["scored"])]
        length = len(by_place[0])
        logprob_TB, right_TB = jax.lax.map(at_place, by_place, batch_size=min(_LOGITS, length))
        return logprob_TB.T, jnp.all(right_TB, axis=0), counts

    def _features(self, variables, tokens_BT, positions_BT):
        # Random places, of a control of routing, are the same in every batch.
        keys = {"routing": jax.random.fold_in(jax.random.key(0), PLACES)}
        if not self.has_room:
            # No token sees the padding after it.
            x_BTD = self.model.apply(variables, tokens_BT, method="features", rngs=keys)
            return x_BTD, ({}, 0)
        cache = models.init_cache(self.model, self.batch_size, self.max_length)
        x_BTD, state = self.model.apply(
            {**variables, "cache": cache},
            tokens_BT,
            positions_BT,
            decode=True,
            cache_size=self.max_length,
            mutable=["cache"],
            method="features",
            rngs=keys,
        )
        return x_BTD, _counts(state["cache"])

    # ---- generating ------------------------------------------------------------------------------

    def texts(
        self, prompts, *, max_new_tokens, until=(), temperature=0.0, top_k=0, top_p=1.0, seeds=None,
        progress=iter,
    ):  # fmt: skip
        """A `Text` for each prompt, a list of token ids: what the model goes on with, up to the
        first text of `until` that is not empty, the end of a document or `max_new_tokens`.

        A prompt loses its first tokens where there would be no room for that many new ones.

        Args:
          temperature, top_k, top_p: as in `Sampler`. seeds: of each prompt; None: 0, 1, ...
          progress: as in `scores`.
        """
        most = self.max_length - max_new_tokens
        if not 1 <= max_new_tokens < self.max_length:
            raise UsageError(
                f"max_gen_toks={max_new_tokens}: must be from 1 to {self.max_length - 1}, one "
                "less than the longest row"
            )
        prompts = [list(prompt[-most:]) for prompt in prompts]
        seeds = range(len(prompts)) if seeds is None else seeds
        sizes = [
            self.max_length if self.has_room else row_length(n + max_new_tokens, self.max_length)
            for n in map(len, prompts)
        ]
        # Longest first, and rows of similar lengths together.
        order = sorted(range(len(prompts)), key=lambda i: (-sizes[i], -len(prompts[i])))
        batches = []
        for size in dict.fromkeys(sizes[i] for i in order):
            of_size = [i for i in order if sizes[i] == size]
            batches += [
                (size, of_size[i : i + self.batch_size])
                for i in range(0, len(of_size), self.batch_size)
            ]
        eot, found = self.tokenizer.eot, [None] * len(prompts)
        for size, indices in progress(batches):
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
            batch, of = [prompts[i] for i in indices], [seeds[i] for i in indices]
            made = self._made(sampler, batch, of, max_new_tokens, until)
            for i, text in zip(indices, made, strict=True):
                found[i] = text
        return found

    def _made(self, sampler, prompts, seeds, max_new_tokens, until):
        """The texts of up to `batch_size` prompts."""
        made, missing = [[] for _ in prompts], self.batch_size - len(prompts)
        # Rows that nobody asked for are the first prompt's, and end as soon as they may.
        ended = set(range(len(prompts), self.batch_size))
        rows = sampler.tokens(
            self.variables,
            [*prompts, *[prompts[0]] * missing],
            max_new_tokens=max_new_tokens,
            seeds=[*seeds, *[seeds[0]] * missing],
            ended=ended,
        )
        for new in rows:
            for b, (ids, more) in enumerate(zip(made, new[: len(made)], strict=True)):
                ids += more
                if any(stop in self.tokenizer.decode(ids) for stop in filter(None, until)):
                    ended.add(b)
        stats = sampler.stats
        computed_B = np.zeros(self.batch_size) + sum(
            count_B
            for layer, count_B in stats["computed_choices_by_row"].items()
            if not layer.endswith(f"/{_ADAPTER}")
        )
        for b, (prompt, ids) in enumerate(zip(prompts, made, strict=True)):
            n = len(prompt) + len(ids)
            of_row = {name: int(count_B[b]) for name, count_B in stats["routed_by_row"].items()}
            flops = self.cost(n, of_row, int(computed_B[b]))
            yield Text(until_first(self.tokenizer.decode(ids), until), n, flops)


def _one_ahead(begun):
    """What an iterator begins, each when the one after it has begun too: that is what devices
    compute while the host looks at this one."""
    before = []
    for one in begun:
        yield from before
        before = [one]
    yield from before


def until_first(text, stops):
    """The text before any of these."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text
