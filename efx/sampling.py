"""Sampling: prefill in chunks of a fixed size, then one compiled decode loop.

    Sampler       tokens for a batch of prompts
    TextSampler   text, by the block `config.sample`
    Program       the compiled functions: `prefill` reads a chunk of each prompt, `decode` generates
                  up to 16 tokens of each row, so that text streams
    _Run          cache, counts and timing of one call of `Sampler.tokens`

Prompts, their lengths, sampling settings, seeds and new parameters trigger no recompilation.
"""

import collections
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from efx import models
from efx.config.run import SampleConfig
from efx.config.schema import make
from efx.errors import UsageError
from efx.layers.report import label
from efx.parallel import sharding

PREFILL = 64  # tokens of each prompt in a prefill chunk on a CPU; at least these elsewhere
_PREFILL_BATCH, _PREFILL_ROW = 2048, 1024  # elsewhere: tokens of all rows; at most of one row
STREAM = 16  # tokens of a row that one call of the decode loop generates
_MASS_TOLERANCE = 1e-6  # relative; rounding error of probabilities summed in float32
# Folded into the seed of stochastic routing; no token has this index.
ROUTING = np.uint32(2**32 - 1)
# Counts of each row in the cache: the tokens that reach a routed block, and the tokens or choices
# that routed blocks and experts admit and that are over their limits.
_COUNTS = "reached", "admitted", "overflow"


class Sampler:
    """Samples from a model. Variables are arguments of each call, so a run needs one sampler.

    Args:
      model: of any family; scanned layers are unrolled, which decodes faster.
      batch_size: rows decoded together; their prompts may differ in length. With one row, blocks
        that skip its token do not run.
      cache_size: tokens of context in the cache; 0: the model's context. When a row outgrows it,
        its last half is read again from position 0.
      temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
      stop_ids: tokens that end a row (the end of a document).
      rules: logical to mesh axes, for variables that are split over a mesh. They stay split: every
        process of the run has to call the sampler, and gets the same tokens. Other variables are
        copied to one device.
    Attributes:
      stats: statistics of the last completed call of `tokens`, see `_Run.statistics`.
    """

    def __init__(
        self,
        model,
        *,
        batch_size=1,
        cache_size=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        stop_ids=(),
        rules=sharding.DEFAULT_RULES,
    ):
        SampleConfig(temperature=temperature, top_k=top_k, top_p=top_p)  # checks their ranges
        self.model, self.batch_size = model, batch_size
        self.cache_size = min(cache_size or model.context, model.context)
        self.program = Program.of(model, batch_size, self.cache_size, rules)
        self.options = dict(
            temperature=np.float32(temperature),
            top_k=np.int32(top_k),
            top_p=np.float32(top_p),
            stop_ids=np.array(sorted(stop_ids), np.int32),
        )
        self.stats = {}

    def tokens(self, variables, prompts, *, max_new_tokens, seeds, ended=()):
        """Yield lists (one a row) of new token ids, up to `STREAM` at a time.

        The random numbers of a row depend on its seed and on how many tokens it has generated: its
        text is the same alone and in any batch (up to rounding; stochastic routing draws for the
        whole batch, by the seed of the first row).

        Args:
          variables: {"params": ...}, and "state" where the model has one. Variables that depend on
            the text are an object with `every` and `at(texts, before)`. `at` is called before the
            first token and then after every `every` tokens, with the token ids so far of each row
            and the previous variables ({} at first; their arrays may be donated). It returns
            (variables, whether the rows have to be read again with them).
          prompts: list of `batch_size` int arrays, each with at least one token.
          seeds: one int for each row. ended: a set of rows to end; the caller may add rows.
        """
        for prompt in prompts:
            self.check_prompt(prompt)
        texts = [list(map(int, prompt)) for prompt in prompts]
        run = _Run(self, variables, texts, seeds)
        done_B, num_steps = np.zeros(len(texts), bool), 0
        while num_steps < max_new_tokens and not done_B.all():
            run.prefill(texts, done_B, num_steps)
            limit = min(STREAM, max_new_tokens - num_steps, run.next_update - num_steps)
            new, done_B, steps = run.decode(done_B, num_steps, limit)
            num_steps += steps
            for text, ids in zip(texts, new, strict=True):
                text += ids
            yield new
            done_B = done_B | np.isin(np.arange(len(texts)), list(ended))
        self.stats = run.statistics()

    def check_prompt(self, ids):
        """Raise UsageError if the prompt is longer than the context."""
        if len(ids) > self.cache_size:
            raise UsageError(
                f"a prompt of {len(ids)} tokens: is longer than the context of "
                f"{self.cache_size}; shorten it"
            )


# ---- compiled functions --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions that are compiled for a model, a batch size and a cache size.

    Attributes:
      chunk: number of tokens of each prompt that one call of `prefill` reads.
      decode_first: the model's `decode` argument for the first chunk of a prompt: "first", whose
        attention needs no cache, or True on a CPU, where one prefill program is enough.
    """

    model: object
    batch_size: int
    cache_size: int
    rules: tuple
    chunk: int
    decode_first: object

    @classmethod
    def of(cls, model, batch_size, cache_size, rules):
        """The program for the current platform."""
        unrolled = models.unrolled(model) if model.config.scan_layers else model
        # A few rows of one token each are not worth splitting.
        rules = sharding.unsplit(rules, "batch", "expert_batch", "length")
        if sharding.platform() == "cpu":  # longer chunks are no faster
            return cls(unrolled, batch_size, cache_size, rules, PREFILL, True)
        # A call with few tokens spends its time on reading the parameters.
        chunk = min(_PREFILL_ROW, max(PREFILL, _PREFILL_BATCH // batch_size), cache_size)
        chunk = -(-chunk // PREFILL) * PREFILL
        return cls(unrolled, batch_size, cache_size, rules, chunk, "first")

    def prefill(self, decode, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        """Read a chunk, after emptying the cache of new rows.

        Args:
          decode: the model's argument, True or "first".
          last_BD: features of the last token so far of each row.
          new_B: rows that start with this chunk.
          positions_BT: -1 for padding.
        Returns:
          (cache, last_BD)
        """
        cache = models.clear_rows(cache, new_B)
        x_BTD, cache = self._features(variables, cache, tokens_BT, positions_BT, seed, decode)
        count_B = jnp.sum(positions_BT >= 0, axis=1)

        def last(x_TD, before_D, count):
            return jnp.where(count > 0, x_TD[jnp.maximum(count - 1, 0)], before_D)

        return cache, jax.vmap(last)(x_BTD, last_BD, count_B)

    def decode(self, variables, cache, last_BD, length_B, done_B, seed_B, index, limit, options):
        """Generate up to `limit` tokens for every row that is not done.

        Ends early when all rows are done, or when a row outgrows the cache: its length is then
        cache_size + 1.

        Args:
          length_B: number of tokens of each row in the cache.
          index: number of tokens that were generated before.
          options: temperature, top_k, top_p, stop_ids.
        Returns:
          (cache, last_BD, length_B, tokens [B, STREAM], number of them that count [B], done_B,
          number of steps)
        """
        keys = jax.vmap(jax.random.key)(seed_B)
        out_BN = jnp.zeros((self.batch_size, STREAM), jnp.int32)
        count_B = jnp.zeros(self.batch_size, jnp.int32)

        def is_running(state):
            step, _, _, length_B, _, _, done_B = state
            outgrown = jnp.any(~done_B & (length_B > self.cache_size))
            return (step < limit) & ~jnp.all(done_B) & ~outgrown

        def generate(state):
            step, cache, last_BD, length_B, out_BN, count_B, done_B = state
            token_B = choose(self._logits(variables, last_BD), keys, index + step, options)
            out_BN = out_BN.at[:, step].set(token_B)
            done_B = done_B | jnp.any(token_B[:, None] == options["stop_ids"][None], axis=1)
            count_B = count_B + ~done_B  # the stop token itself is not counted
            fits_B = ~done_B & (length_B < self.cache_size)
            positions_B = jnp.where(fits_B, length_B, -1)
            x_BTD, cache = self._features(
                variables, cache, token_B[:, None], positions_B[:, None], seed_B[0]
            )
            return step + 1, cache, x_BTD[:, 0], length_B + ~done_B, out_BN, count_B, done_B

        state = (jnp.int32(0), cache, last_BD, length_B, out_BN, count_B, done_B)
        step, cache, *state = jax.lax.while_loop(is_running, generate, state)
        return cache, *state, step

    def state_shapes(self):
        """Shapes of the cache and of last_BD."""
        return models.decoding_shapes(self.model, self.batch_size, self.cache_size)

    def _features(self, variables, cache, tokens_BT, positions_BT, seed, decode=True):
        x_BTD, state = self.model.apply(
            {**variables, "cache": cache},
            tokens_BT,
            positions_BT,
            decode=decode,
            cache_size=self.cache_size,
            mutable=["cache"],
            method="features",
            rngs={"routing": jax.random.fold_in(jax.random.key(seed), ROUTING)},
        )
        return x_BTD, state["cache"]

    def _logits(self, variables, x_BD):
        logits_BV = self.model.apply(variables, x_BD, method="logits")
        return logits_BV[..., : self.model.vocab_size]

    def jitted(self):
        """(prefill, decode), jitted. They donate the cache and last_BD."""
        options = dict(out_shardings=PartitionSpec())
        prefill = jax.jit(self.prefill, static_argnums=0, donate_argnums=(2, 3), **options)
        return prefill, jax.jit(self.decode, donate_argnums=(1, 2), **options)


@functools.cache
def _jitted(program):
    """(prefill, decode, maker of an empty cache and last_BD), jitted. Equal programs share them."""
    shapes = program.state_shapes()

    def make_state():  # jitted, so that each device allocates its own zeros
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return *program.jitted(), jax.jit(make_state, out_shardings=PartitionSpec())


_compiled = set()  # (program, mesh) that have run


def mesh_for(variables, device):
    """(mesh over which variables are split, or a mesh of this device; whether they are split)."""
    mesh = sharding.mesh_that_splits(variables)
    if mesh is not None:
        return mesh, True
    return sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), [device]), False


# ---- one call of Sampler.tokens ------------------------------------------------------------------


class _FixedVariables(NamedTuple):
    """Variables that do not depend on the text, see `Sampler.tokens`."""

    variables: dict
    every: float = math.inf

    def at(self, texts, before):
        return self.variables, True


class _Run:
    """State of one call of `Sampler.tokens`: arrays on the devices, and counts.

    Attributes:
      next_update: number of generated tokens at which variables are updated.
      must_read: whether all rows have to be read with the current variables.
      length_B: number of tokens of each row in the cache.
      start_B: index in its text of the first of these.
      counts: {name: {block: number}} of `_COUNTS`.
    """

    def __init__(self, sampler, variables, texts, seeds):
        self.program, self.model, self.options = sampler.program, sampler.model, sampler.options
        is_fixed, size = isinstance(variables, Mapping), sampler.batch_size
        self.source = _FixedVariables(variables) if is_fixed else variables
        self.mesh, self.is_split = mesh_for(variables if is_fixed else {}, jax.local_devices()[0])
        self.seed_B = np.array([seed % 2**32 for seed in seeds], np.uint32)
        self.length_B, self.start_B = np.zeros((2, size), np.int32)
        self.counts = {name: collections.Counter() for name in _COUNTS}
        self.new_tokens = self.prefill_seconds = self.decode_seconds = 0
        self.variables, self.next_update = {}, 0
        self._update_variables(texts)
        self.must_read = True
        self._prefill, self._decode, make_state = self._call(_jitted, self.program)
        self.cache, self.last_BD = self._call(make_state)
        if (self.program, self.mesh) not in _compiled:
            # Compile outside of timing, by calls without effect: no rows, and finished rows.
            self._read({})
            self.decode(np.ones(size, bool), 0, 0)
            self.decode_seconds = 0
            _compiled.add((self.program, self.mesh))

    def _update_variables(self, texts):
        with jax.set_mesh(self.mesh):  # no rules: `at` may restore variables of other models
            variables, self.must_read = self.source.at(texts, self.variables)
        self.next_update += self.source.every
        if not self.is_split:
            variables = jax.device_put(
                sharding.copy_to_one_device(variables), sharding.replicated(self.mesh)
            )
        self.variables = self._call(models.unroll_variables, self.model, variables)

    def prefill(self, texts, done_B, index):
        """Update variables if due at token `index`; read rows that are new or outgrew the cache."""
        started = time.perf_counter()
        if index == self.next_update:
            self._update_variables(texts)
        size, length_B = self.program.cache_size, np.array(list(map(len, texts)))
        outgrown_B = ~done_B & (length_B - self.start_B > size)
        self.start_B = np.where(outgrown_B, length_B - max(1, size // 2), self.start_B)
        rows = np.flatnonzero(~done_B if self.must_read else outgrown_B)
        self.must_read = False
        if len(rows):
            self._read({b: texts[b][self.start_B[b] :] for b in rows})
        self.prefill_seconds += time.perf_counter() - started

    def _read(self, texts):
        """Prefill {row: tokens}, after emptying the cache of these rows."""
        self._add_counts(list(texts))
        longest, chunk = max(map(len, texts.values()), default=1), self.program.chunk
        shape = (len(self.seed_B), -(-longest // chunk) * chunk)
        tokens_BT, positions_BT = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        is_read_B = np.zeros(len(self.seed_B), bool)
        for b, text in texts.items():
            tokens_BT[b, : len(text)] = text
            positions_BT[b, : len(text)] = np.arange(len(text))
            self.length_B[b], is_read_B[b] = len(text), True
        for t in range(0, shape[1], chunk):
            part = slice(t, t + chunk)
            self.cache, self.last_BD = self._call(
                self._prefill, True if t else self.program.decode_first, self.variables,
                self.cache, self.last_BD, is_read_B & (t == 0), tokens_BT[:, part],
                positions_BT[:, part], self.seed_B[0],
            )  # fmt: skip
        jax.block_until_ready(self.last_BD)

    def decode(self, done_B, index, limit):
        """(lists of new token ids, done_B, number of steps)."""
        started = time.perf_counter()
        self.cache, self.last_BD, *rest = self._call(
            self._decode, self.variables, self.cache, self.last_BD, self.length_B, done_B,
            self.seed_B, np.int32(index), np.int32(limit), self.options,
        )  # fmt: skip
        self.length_B, out_BN, count_B, done_B, steps = map(np.array, jax.device_get(rest))
        self.decode_seconds += time.perf_counter() - started
        self.new_tokens += int(count_B.sum())
        new = [out_N[:count].tolist() for out_N, count in zip(out_BN, count_B, strict=True)]
        return new, done_B, int(steps)

    def _call(self, function, *arguments):
        # Not around the whole generator: between its steps the caller's mesh must be active.
        with sharding.use(self.mesh, self.program.rules):
            return function(*arguments)

    def _add_counts(self, rows):
        """Add the counts in the cache of these rows, before it is emptied."""
        leaves = jax.tree_util.tree_leaves_with_path(self.cache)
        counts = {tuple(key.key for key in path): value for path, value in leaves}
        for (*modules, name), value in counts.items():
            if name in self.counts:
                # [B], or [B, ...] of experts or of several models that are decoded together.
                counts_BN = np.asarray(value).reshape(len(value), -1)[rows]
                combine = np.mean if (*modules, "reached") in counts else np.sum
                self.counts[name][label("/".join(modules))] += combine(counts_BN, axis=1).sum()

    def statistics(self):
        """Statistics of the finished call, once.

        new_tokens; prefill_seconds, decode_seconds; tokens_per_second (of decoding); cache_bytes;
        expert_choices and expert_overflow (choices over the limits of experts). With routed blocks:
        routed_fraction (mean over blocks of the computed fraction of tokens), selected (tokens that
        the blocks selected), overflow (those of them over the causal limit).
        """
        self._add_counts(range(len(self.seed_B)))
        reached, admitted, overflow = (self.counts[name] for name in _COUNTS)
        experts = [layer for layer in admitted if layer not in reached]
        expert_overflow = sum(overflow[layer] for layer in experts)
        stats = {
            "new_tokens": self.new_tokens,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": self.new_tokens / max(self.decode_seconds, 1e-9),
            "cache_bytes": sum(value.nbytes for value in jax.tree.leaves(self.cache)),
            "expert_overflow": round(expert_overflow),
            "expert_choices": round(expert_overflow + sum(admitted[layer] for layer in experts)),
        }
        if reached:
            # Fractions of the tokens (or latents) that reach a block.
            fractions = [admitted[block] / max(1, count) for block, count in reached.items()]
            over = sum(overflow[block] for block in reached)
            stats["routed_fraction"] = float(np.mean(fractions))
            stats["overflow"] = round(over)
            stats["selected"] = round(over + sum(admitted[block] for block in reached))
        return stats


def _total_statistics(calls):
    """The statistics of several calls together."""
    names = calls[0].keys()
    total = {name: sum(call[name] for call in calls) for name in names}
    total["tokens_per_second"] = total["new_tokens"] / max(total["decode_seconds"], 1e-9)
    for name in {"cache_bytes", "routed_fraction"} & names:
        total[name] /= len(calls)
    return total


# ---- the distribution of a token -----------------------------------------------------------------


def choose(logits_BV, keys, index, options):
    """Draw token number `index` of each row [B].

    Args:
      options: temperature, top_k, top_p.
    """
    temperature, top_k, top_p = (options[name] for name in ("temperature", "top_k", "top_p"))

    def draw():
        scaled_BV = logits_BV / temperature
        filtered_BV = jax.lax.cond(
            (top_k > 0) | (top_p < 1),
            lambda: filter_logits(scaled_BV, top_k, top_p),
            lambda: scaled_BV,
        )
        noise_BV = jax.vmap(
            lambda key: jax.random.gumbel(jax.random.fold_in(key, index), logits_BV.shape[1:])
        )(keys)
        return filtered_BV + noise_BV

    score_BV = jax.lax.cond(temperature > 0, draw, lambda: logits_BV)
    return jnp.argmax(score_BV, axis=-1).astype(jnp.int32)


def filter_logits(logits_BV, top_k, top_p):
    """Set logits outside the top k, and outside the nucleus of the top k, to -inf.

    Args:
      top_k: 0 keeps all tokens. Logits equal to the last kept one are kept, too.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p (Holtzman et al.
        2020, arXiv 1904.09751); 1 keeps all tokens.
    """
    logits_BV = sharding.constrain(logits_BV, None, None)  # gathered once, for the sort and the sum
    ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    rank_1V = jnp.arange(logits_BV.shape[-1])[None]
    in_top_k_1V = rank_1V < jnp.where(top_k > 0, top_k, logits_BV.size)
    probs_BV = jax.nn.softmax(jnp.where(in_top_k_1V, ordered_BV, -jnp.inf), axis=-1)
    mass_before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    # The tolerance covers float32: 0.5 + 0.3 reaches 0.8.
    in_nucleus_BV = (mass_before_BV < top_p * (1 - _MASS_TOLERANCE)) | (top_p >= 1)
    # The most likely token is kept even if top_p underflows to 0.
    count_B1 = jnp.maximum(1, jnp.sum(in_top_k_1V & in_nucleus_BV, axis=-1, keepdims=True))
    least_B1 = jnp.take_along_axis(ordered_BV, count_B1 - 1, axis=-1)
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)


# ---- text ----------------------------------------------------------------------------------------


class TextSampler:
    """Samples text by a `config.sample` block."""

    def __init__(self, model, tokenizer, config, *, batch_size=1, rules=sharding.DEFAULT_RULES):
        config = make(SampleConfig, config)
        self.tokenizer, self.config = tokenizer, config
        self.sampler = Sampler(
            model,
            batch_size=batch_size,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_ids=() if tokenizer.eot is None else (tokenizer.eot,),
            rules=rules,
        )
        try:
            self.sampler.check_prompt(self.encode(config.prompt))
        except UsageError as error:
            raise UsageError(f"config.sample.prompt: {error}") from error

    def encode(self, prompt):
        """Ids of a prompt, after the start tokens of a document.

        An empty prompt becomes the end-of-document token, or token 0.
        """
        ids = [*self.tokenizer.start, *self.tokenizer.encode(prompt)]
        return ids or [self.tokenizer.eot or 0]

    def write(self, variables, stream=None):
        """Write `num_samples` continuations of the config's prompt as they are generated.

        Returns: their statistics together, see `_Run.statistics`.
        """
        stream, prompt, stats = stream or sys.stdout, self.config.prompt, []
        for i in range(self.config.num_samples):
            stream.write(prompt)
            for piece in self.stream(variables, prompt, seed=self.config.seed + i):
                stream.write(piece)
                stream.flush()
            stream.write("\n")
            stats.append(self.sampler.stats)
        return _total_statistics(stats)

    def stream(self, variables, prompt, *, seed):
        """Yield the continuation of `prompt`, up to `config.sample.stop`, in pieces."""
        for (piece,) in self._pieces(variables, [prompt], [seed]):
            if piece:
                yield piece

    def texts(self, variables, prompts, *, seeds):
        """Continuations of `batch_size` prompts."""
        return ["".join(row) for row in zip(*self._pieces(variables, prompts, seeds), strict=True)]

    def _pieces(self, variables, prompts, seeds):
        """Yield lists (one a row) of new text."""
        rows, ended = [_Text(self.tokenizer, self.config.stop) for _ in prompts], set()
        ids, n = [self.encode(prompt) for prompt in prompts], self.config.max_new_tokens
        for new in self.sampler.tokens(variables, ids, max_new_tokens=n, seeds=seeds, ended=ended):
            yield [row.feed(ids) for row, ids in zip(rows, new, strict=True)]
            ended.update(b for b, row in enumerate(rows) if row.ended)
        yield [row.finish() for row in rows]


class _Text:
    """Decodes a stream of tokens into text that ends before `stop`."""

    def __init__(self, tokenizer, stop):
        self._decoder, self._stop, self._held = tokenizer.stream_decoder(), stop, ""
        self.ended = False

    def feed(self, ids):
        """New complete characters; the last ones, which may begin the stop text, are held back."""
        new = "".join(map(self._decoder.feed, ids))
        return self._cut(new, max(0, len(self._stop) - 1))

    def finish(self):
        """The remaining text."""
        return self._cut(self._decoder.finish(), 0)

    def _cut(self, new, num_held):
        """The text to show of `new` and the characters held before."""
        if self.ended:
            return ""
        text = self._held + new
        if self._stop and self._stop in text:
            self.ended = True
            return text[: text.index(self._stop)]
        ready = max(0, len(text) - num_held)
        self._held = text[ready:]
        return text[:ready]
