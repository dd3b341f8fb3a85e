"""Sampling: prefill in chunks of a fixed size, then one compiled decode loop.

`_Program` holds the functions that are compiled for a model, a batch size and a cache size:
`prefill` reads a chunk of each prompt (64 tokens on a CPU, more elsewhere; the last one padded),
`decode` generates up to 16 tokens a call, so that text is shown as it is generated. A prompt, its
length, a sampling setting, a seed or new parameters compile nothing again.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from efx import memory, models, sharding
from efx.errors import UsageError
from efx.layers import kv_cache
from efx.layers.stack import label
from efx.run_blocks import SampleConfig
from efx.settings import make

PREFILL = 64  # tokens of each prompt that a call processes on a CPU, and at least elsewhere
_PREFILL_ALL, _PREFILL_MOST = 2048, 1024  # elsewhere: of all prompts together; at most of each
_LONG_CACHE = 2**16  # tokens of all sequences
STREAM = 16  # tokens of a row that a call of the decode loop generates
_MASS_TOLERANCE = 1e-6  # relative; rounding error of probabilities summed in float32
# Folded into a seed for the numbers that random routing draws; no token has this index.
PLACES = np.uint32(2**32 - 1)


class Sampler:
    """Samples from a model. Parameters are arguments of each call, so a run needs one sampler.

    Args:
      model: of any family; scanned layers are unrolled, which decodes faster.
      batch_size: sequences decoded together; their prompts may differ in length. With one
        sequence, blocks that skip its token do not run.
      cache_size: tokens of context in the cache; 0: the model's context. When a sequence outgrows
        it, its last half is read again, from position 0, and sampling continues from there.
      temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
      stop_ids: tokens that end a sequence (the end of a document).
      rules: logical to mesh axes, for variables that are split over a mesh. They stay split: every
        device computes with its part, for all sequences; every process of the run has to sample,
        and gets the same tokens. Other variables are used on one device.
    Attributes:
      stats: statistics of the last call of `tokens`, once it has ended: prompt_tokens, new_tokens;
        slides (times that a sequence outgrew the cache); compile_seconds, prefill_seconds,
        decode_seconds; tokens_per_second (of decoding); cache_bytes; expert_choices, and
        expert_overflow, the number of them that experts dropped; by row [B]:
        computed_choices_by_row {layer: choices that its experts computed} and routed_by_row
        {block: tokens that it computed}. With routed blocks: routed_fraction_by_block {block:
        fraction of the tokens read}; routed_fraction, their mean; selected, the number of tokens
        that the blocks selected, and overflow, the number of them over the causal limit.
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
        _check(temperature, top_k, top_p)
        self.model, self.batch_size = model, batch_size
        self.cache_size = cache_size or model.context
        if self.cache_size > model.context:
            raise ValueError(
                f"cache_size={cache_size}: must be at most the context of {model.context} tokens"
            )
        self._program = _Program.of(model, batch_size, self.cache_size, len(stop_ids), rules)
        self._check_memory()
        self._options = dict(
            temperature=np.float32(temperature),
            top_k=np.int32(top_k),
            top_p=np.float32(top_p),
            stop_ids=np.array(sorted(stop_ids), np.int32),
        )
        self.stats = {}

    def tokens(self, variables, prompts, *, max_new_tokens, seeds, ended=()):
        """Yield lists (one a row) of new token ids, up to `STREAM` at a time.

        The random numbers of a row depend on its seed and on how many tokens it has generated: its
        text is the same alone and in any batch (up to rounding; a stochastic control of routing
        draws for the whole batch, by the seed of the first row).

        Args:
          variables: {"params": ...}, and "state" where the model has one; or, if they depend on
            the text, an object with `every` and `at(texts, before)`, which is called before the
            first token and then after every `every` tokens with the token ids so far of each row
            and the previous variables ({} at first; their arrays may be donated). It returns
            (variables, whether the rows have to be read again with them).
          prompts: list of `batch_size` int arrays, each with at least one token.
          seeds: one int for each row. ended: a set of rows to end; the caller may add rows.
        """
        for prompt in prompts:
            self.check_prompt(prompt)
        texts = [list(map(int, prompt)) for prompt in prompts]
        run = _Run(self, variables, texts, seeds)
        done_B, made = np.zeros(len(texts), bool), 0
        while made < max_new_tokens and not done_B.all():
            with run.timed("prefill"):
                run.prepare(texts, done_B, made)
            with run.timed("decode"):
                limit = min(STREAM, max_new_tokens - made, run.due - made)
                out_BN, count_B, done_B, steps = run.decode(done_B, made, limit)
            made += int(steps)
            new = [out_BN[b, : count_B[b]].tolist() for b in range(len(texts))]
            for text, ids in zip(texts, new, strict=True):
                text += ids
            run.new_tokens += sum(map(len, new))
            yield new
            done_B = done_B | np.isin(np.arange(len(texts)), list(ended))
        run.count(range(len(texts)))
        self.stats = run.statistics()

    def _check_memory(self):
        """Raise UsageError if the cache does not fit in memory."""
        rows, size = self.batch_size, self.cache_size
        if rows * size < _LONG_CACHE:  # tracing the shapes takes a second
            return
        memory.check(
            f"config.sample.num_samples={rows}, config.model.context={size}: sampling",
            {"keys and values": memory.on_each_device(self._program.state_shapes())},
        )

    def check_prompt(self, ids):
        """Raise UsageError if the prompt is longer than the context."""
        if len(ids) > self.cache_size:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, more than the context of "
                f"{self.cache_size}; shorten it"
            )


def prefill_of(batch_size, cache_size):
    """(tokens of each prompt that a call reads, whether the first call has a program of its own).

    On a CPU more tokens a call are no faster, and there is no attention kernel. Elsewhere a call
    with few tokens spends its time on reading the parameters.
    """
    if sharding.platform() == "cpu":
        return PREFILL, False
    chunk = min(_PREFILL_MOST, max(PREFILL, _PREFILL_ALL // batch_size), cache_size)
    return -(-chunk // PREFILL) * PREFILL, True


@dataclasses.dataclass(frozen=True)
class _Program:
    """The functions that are compiled.

    Attributes:
      chunk: tokens of each prompt that a call reads. two_prefills: whether the first call has a
        program of its own. stops: number of stop tokens.
    """

    model: object
    batch_size: int
    cache_size: int
    chunk: int
    two_prefills: bool
    stops: int
    rules: tuple

    @classmethod
    def of(cls, model, batch_size, cache_size, stops, rules):
        """The program for this platform."""
        unrolled = models.unrolled(model) if model.config.scan_layers else model
        reads = prefill_of(batch_size, cache_size)
        # Few sequences of one token each are not worth splitting.
        rules = sharding.unsplit(rules, "batch", "expert_batch", "length")
        return cls(unrolled, batch_size, cache_size, *reads, stops, rules)

    def first(self):
        """The function for the first chunk of prompts."""
        return self.prefill_first if self.two_prefills else self.prefill

    def prefill(self, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        """Read a chunk; the cache of new rows is emptied first. Returns (cache, features of each
        row's last token so far)."""
        return self._read(True, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed)

    def prefill_first(self, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        """`prefill` of the first chunk of new rows, whose attention needs no cache."""
        return self._read("first", variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed)

    def _read(self, decode, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        cache = models.emptied(cache, new_B)
        x_BTD, cache = self._features(variables, cache, tokens_BT, positions_BT, seed, decode)
        count_B = jnp.sum(positions_BT >= 0, axis=1)

        def last(x_TD, before_D, count):
            return jnp.where(count > 0, x_TD[jnp.maximum(count - 1, 0)], before_D)

        return cache, jax.vmap(last)(x_BTD, last_BD, count_B)

    def decode(self, variables, cache, last_BD, length_B, done_B, seed_B, made, limit, options):
        """Generate up to `limit` tokens for every row that is not done.

        Ends early when all rows are done, or when a row outgrows the cache: its length is then
        cache_size + 1.
        """
        keys = jax.vmap(jax.random.key)(seed_B)
        out_BN = jnp.zeros((self.batch_size, STREAM), jnp.int32)
        count_B = jnp.zeros(self.batch_size, jnp.int32)

        def running(state):
            step, _, _, length_B, _, _, done_B = state
            outgrown = jnp.any(~done_B & (length_B > self.cache_size))
            return (step < limit) & ~jnp.all(done_B) & ~outgrown

        def body(state):
            step, cache, last_BD, length_B, out_BN, count_B, done_B = state
            token_B = choose(self._logits(variables, last_BD), keys, made + step, options)
            out_BN = out_BN.at[:, step].set(token_B)
            done_B = done_B | jnp.any(token_B[:, None] == options["stop_ids"][None], axis=1)
            count_B = count_B + ~done_B  # the stop token itself is not counted
            fits_B = ~done_B & (length_B < self.cache_size)
            positions_B = jnp.where(fits_B, length_B, -1)
            cache = kv_cache.set_pending_step(cache, step)
            x_BTD, cache = self._features(
                variables, cache, token_B[:, None], positions_B[:, None], seed_B[0]
            )
            return step + 1, cache, x_BTD[:, 0], length_B + ~done_B, out_BN, count_B, done_B

        cache = kv_cache.start_pending(cache, STREAM)
        state = (jnp.int32(0), cache, last_BD, length_B, out_BN, count_B, done_B)
        step, cache, *state = jax.lax.while_loop(running, body, state)
        return kv_cache.flush_pending(cache), *state, step

    def shapes_of_prefill(self, variables):
        """Shapes of the arguments of `prefill`, from those of the variables."""
        shape = jax.ShapeDtypeStruct
        rows, tokens = (self.batch_size,), shape((self.batch_size, self.chunk), np.int32)
        return (
            variables,
            *self.state_shapes(),
            shape(rows, bool),
            tokens,
            tokens,
            shape((), np.uint32),
        )

    def shapes_of_decode(self, variables):
        """Shapes of the arguments of `decode`, from those of the variables."""
        shape = jax.ShapeDtypeStruct
        rows, number = (self.batch_size,), shape((), np.int32)
        settings = dict(
            temperature=shape((), np.float32),
            top_k=shape((), np.int32),
            top_p=shape((), np.float32),
            stop_ids=shape((self.stops,), np.int32),
        )
        each = shape(rows, np.int32), shape(rows, bool), shape(rows, np.uint32)
        return variables, *self.state_shapes(), *each, number, number, settings

    def state_shapes(self):
        """Shapes of the cache and of the features of each row's last token."""
        return models.decoding_shapes(self.model, self.batch_size, self.cache_size)

    def _features(self, variables, cache, tokens_BT, positions_BT, seed, decode=True):
        variables = {**variables, "cache": cache}
        options = dict(
            decode=decode,
            cache_size=self.cache_size,
            mutable=["cache"],
            method="features",
            rngs={"routing": jax.random.fold_in(jax.random.key(seed), PLACES)},
        )
        x_BTD, state = self.model.apply(variables, tokens_BT, positions_BT, **options)
        return x_BTD, state["cache"]

    def _logits(self, variables, x_BD):
        logits_BV = self.model.apply(variables, x_BD, method="logits")
        return logits_BV[..., : self.model.vocab_size]


_compiled_for = set()  # (decode, mesh) that have run, so that they are compiled


@functools.cache
def _compiled(program):
    """(prefill of first chunks, prefill of later ones, decode, maker of an empty cache and features
    of each row's last token), jitted. Equal programs share them."""
    prefill = _jitted(program.prefill)
    first = _jitted(program.first()) if program.two_prefills else prefill
    shapes = program.state_shapes()

    def make_state():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # Jitted, so that devices make their zeros themselves.
    make_state = jax.jit(make_state, out_shardings=PartitionSpec())
    return first, prefill, _jitted(program.decode), make_state


def _jitted(function):
    """A jitted function of a `_Program`, which donates the cache and the features."""
    return jax.jit(function, donate_argnums=(1, 2), out_shardings=PartitionSpec())


def _mesh_for(variables, device):
    """(mesh over which variables are split, or a mesh of this device; whether they are split)."""
    mesh = sharding.mesh_that_splits(variables)
    alone = dict.fromkeys(sharding.MESH_AXES, 1)
    return mesh or sharding.make_mesh(alone, [device]), mesh is not None


class Outline:
    """Shapes of all that a run compiles and copies to sample from its model, for devices that need
    not exist.

    Args:
      batch_size, rules: see `Sampler`.
      variables: shapes with shardings of the run's variables. unrolled: of those of the unrolled
        model (the same if its layers are not scanned).
      device: the first device of the run. longest: see `longest_read`.
    Attributes:
      mesh: the mesh of sampling. program: see `_Program`. functions: {title: (function of the
        program, shapes of its arguments)}.
      used: variables as the functions get them. shared: those of them that are not copied.
    """

    def __init__(self, model, batch_size, variables, unrolled, rules, device, longest):
        # One stop token: the tokenizer, which decides, is not loaded here.
        program = _Program.of(model, batch_size, model.context, 1, rules)
        self.program, (self.mesh, is_split) = program, _mesh_for(variables, device)

        def placed(shapes, like=None):
            whole = jax.tree.map(lambda x: sharding.replicated(self.mesh), shapes)
            layouts = jax.tree.map(lambda x: x.sharding, like) if like and is_split else whole
            return jax.tree.map(
                lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
                shapes,
                layouts,
            )

        def unroll(variables):
            return models.unroll_variables(model, variables)

        with sharding.use(self.mesh, program.rules):
            variables = placed(variables, variables)
            self.used = placed(jax.eval_shape(unroll, variables), unrolled)
            leaves = zip(jax.tree.leaves(self.used), memory.is_new(unroll, variables), strict=True)
            self.shared = [leaf for leaf, is_copy in leaves if not is_copy]
            state = placed(program.state_shapes())
            reading, generating = (
                (variables, *state, *rest)
                for variables, _, _, *rest in (
                    program.shapes_of_prefill(self.used), program.shapes_of_decode(self.used)
                )
            )  # fmt: skip
        self.functions = {"prefill": (program.first(), reading)}
        if program.chunk < longest:
            self.functions["later chunks of a prompt"] = program.prefill, reading
        self.functions["decoding"] = program.decode, generating

    def trace(self, name):
        """One of the functions, jitted and traced as a run does."""
        function, shapes = self.functions[name]
        with sharding.use(self.mesh, self.program.rules):
            return _jitted(function).trace(*shapes)


def longest_read(config, cache_size):
    """The most tokens that one prefill reads under a `config.sample` block: a token is at least a
    byte, and a start token may precede the text."""
    prompt = len(config.prompt.encode()) + 1
    outgrows = prompt + config.max_new_tokens > cache_size
    return max(prompt, cache_size // 2) if outgrows else prompt


class _Run:
    """State of one call of `Sampler.tokens`: arrays on the devices, and counts."""

    def __init__(self, sampler, variables, texts, seeds):
        self.sampler, self.program = sampler, sampler._program
        self.source = _Fixed(variables) if isinstance(variables, Mapping) else variables
        of_all = variables if self.source.every == math.inf else {}
        self.mesh, self.is_split = _mesh_for(of_all, jax.local_devices()[0])
        self.due, self.variables = 0, {}  # index of the token before which variables are updated
        self.update_variables(texts)
        self.stale = True  # whether all rows have to be read with the current variables
        self.seed_B = np.array([seed % 2**32 for seed in seeds], np.uint32)
        # Of each row, the tokens in the cache and the first token of the text among them.
        self.length_B, self.begin_B = np.zeros((2, sampler.batch_size), np.int32)
        self.prompt_tokens = sum(map(len, texts))
        self.new_tokens = self.slides = 0
        self.seconds = dict.fromkeys(("compile", "prefill", "decode"), 0.0)
        names = ("routed", "reached", "overflow", "admitted", "dropped")
        self.counts = {
            name: collections.defaultdict(lambda: np.zeros(sampler.batch_size)) for name in names
        }  # of each block, of each row
        with self.timed("compile"):
            self.prefill_first, self.prefill, self.decode_loop, make_state = self._call(
                _compiled, self.program
            )
            self.cache, self.last_BD = self._call(make_state)
            # Compile by calls that change nothing: of no rows, and of finished rows.
            if (self.decode_loop, self.mesh) not in _compiled_for:
                self.read({})
                self.decode(np.ones(sampler.batch_size, bool), 0, 0)
                _compiled_for.add((self.decode_loop, self.mesh))

    def update_variables(self, texts):
        """Get the variables for these texts."""
        with jax.set_mesh(self.mesh):  # no rules: the source may restore variables of other models
            variables, again = self.source.at(texts, self.variables)
        if not self.is_split:
            variables = jax.device_put(sharding.whole(variables), sharding.replicated(self.mesh))
        self.variables = self._call(models.unroll_variables, self.sampler.model, variables)
        self.stale, self.due = again, self.due + self.source.every

    def prepare(self, texts, done_B, made):
        """Before token number `made`: update variables that are due, and read rows if needed."""
        if made == self.due:
            self.update_variables(texts)
        size, length_B = self.sampler.cache_size, np.array([len(text) for text in texts])
        outgrown_B = ~done_B & (length_B - self.begin_B > size)
        self.begin_B = np.where(outgrown_B, length_B - max(1, size // 2), self.begin_B)
        self.slides += int(outgrown_B.sum())
        rows = np.flatnonzero(~done_B if self.stale else outgrown_B)
        self.stale = False
        if len(rows):
            self.read({b: texts[b][self.begin_B[b] :] for b in rows})

    def read(self, texts):
        """Read {row: tokens}, after emptying the cache of these rows."""
        self.count(texts)
        rows_B = np.isin(np.arange(self.sampler.batch_size), list(texts))
        longest, chunk = max(map(len, texts.values()), default=1), self.program.chunk
        shape = (self.sampler.batch_size, -(-longest // chunk) * chunk)
        tokens_BT, positions_BT = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for b, text in texts.items():
            tokens_BT[b, : len(text)] = text
            positions_BT[b, : len(text)] = np.arange(len(text))
            self.length_B[b] = len(text)
        for t in range(0, tokens_BT.shape[1], chunk):
            part = slice(t, t + chunk)
            prefill = self.prefill if t else self.prefill_first
            self.cache, self.last_BD = self._call(
                prefill, self.variables, self.cache, self.last_BD,
                rows_B & (t == 0), tokens_BT[:, part], positions_BT[:, part], self.seed_B[0],
            )  # fmt: skip
        jax.block_until_ready(self.last_BD)

    def decode(self, done_B, made, limit):
        """(tokens [B, STREAM], how many of each row count, rows done, steps)."""
        self.cache, self.last_BD, *rest = self._call(
            self.decode_loop, self.variables, self.cache, self.last_BD, self.length_B, done_B,
            self.seed_B, np.int32(made), np.int32(limit), self.sampler._options,
        )  # fmt: skip
        self.length_B, *rest = map(np.array, jax.device_get(rest))
        return rest

    def _call(self, function, *arguments):
        # Not around the whole generator: between its steps the caller's mesh must be active.
        with sharding.use(self.mesh, self.program.rules):
            return function(*arguments)

    @contextlib.contextmanager
    def timed(self, name):
        self.seconds[name] -= time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter()

    def count(self, rows):
        """Add the counts in the cache of these rows, before it is emptied."""
        rows = list(rows)
        for path, value in jax.tree_util.tree_leaves_with_path(self.cache):
            if path[-1].key in self.counts:
                # [B], or [B, ...] of experts or of several models that are decoded together.
                counts = np.asarray(value).reshape(len(value), -1)[rows]
                of_tokens = path[-1].key in ("routed", "reached")
                of_rows = counts.mean(axis=1) if of_tokens else counts.sum(axis=1)
                block = label("/".join(key.key for key in path[:-1]))
                self.counts[path[-1].key][block][rows] += of_rows

    def statistics(self):
        """`Sampler.stats`."""
        admitted, dropped, overflow = (
            round(sum(map(np.sum, self.counts[name].values())))
            for name in ("admitted", "dropped", "overflow")
        )
        stats = {
            **{name: getattr(self, name) for name in ("prompt_tokens", "new_tokens", "slides")},
            **{f"{name}_seconds": seconds for name, seconds in self.seconds.items()},
            "tokens_per_second": self.new_tokens / max(self.seconds["decode"], 1e-9),
            "cache_bytes": sum(value.nbytes for value in jax.tree.leaves(self.cache)),
            "expert_overflow": dropped,
            "expert_choices": dropped + admitted,
            "computed_choices_by_row": dict(self.counts["admitted"]),
            "routed_by_row": dict(self.counts["routed"]),
        }
        if routed := self.counts["routed"]:
            # Of the tokens (or latents) that reach a block.
            totals = {name: of_rows.sum() for name, of_rows in routed.items()}
            reached = {name: of_rows.sum() for name, of_rows in self.counts["reached"].items()}
            fractions = {name: total / max(1, reached[name]) for name, total in totals.items()}
            stats["routed_fraction"] = float(np.mean(list(fractions.values())))
            stats["routed_fraction_by_block"] = fractions
            stats["overflow"] = overflow
            stats["selected"] = overflow + round(sum(totals.values()))
        return stats


class _Fixed:
    """Variables that do not depend on the text."""

    every = math.inf

    def __init__(self, variables):
        self._variables = variables

    def at(self, texts, before):
        return self._variables, True


def choose(logits_BV, keys, index, options):
    """Draw token number `index` of each row [B]; options: temperature, top_k, top_p."""
    temperature, top_k, top_p = (options[name] for name in ("temperature", "top_k", "top_p"))

    def greedy():
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw():
        scaled_BV = jax.lax.cond(
            (top_k > 0) | (top_p < 1),
            lambda: filter_logits(logits_BV / temperature, top_k, top_p),
            lambda: logits_BV / temperature,
        )
        noise_BV = jax.vmap(
            lambda key: jax.random.gumbel(jax.random.fold_in(key, index), scaled_BV.shape[1:])
        )(keys)
        return jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32)

    return jax.lax.cond(temperature > 0, draw, greedy)


def filter_logits(logits_BV, top_k, top_p):
    """Set the logits of tokens outside the top k, and outside the nucleus of these, to -inf.

    Of equal logits at the cut the lower ids are kept.

    Args:
      top_k: 0 keeps all tokens.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p (Holtzman et al.
        2020, arXiv 1904.09751); 1 keeps all tokens.
    """
    logits_BV = sharding.constrain(logits_BV, None, None)  # gathered once, for the sort and the sum
    number_1V = jnp.arange(logits_BV.shape[-1])[None]
    id_BV = jnp.broadcast_to(number_1V, logits_BV.shape)
    # The sort is stable: of equal logits the lower id comes first.
    negative_BV, ordered_id_BV = jax.lax.sort((-logits_BV, id_BV), num_keys=1)
    ordered_BV = -negative_BV
    in_top_k_1V = number_1V < jnp.where(top_k > 0, top_k, logits_BV.size)
    probs_BV = jax.nn.softmax(jnp.where(in_top_k_1V, ordered_BV, -jnp.inf), axis=-1)
    mass_before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    # The tolerance covers float32: 0.5 + 0.3 reaches 0.8.
    in_nucleus_BV = (mass_before_BV < top_p * (1 - _MASS_TOLERANCE)) | (top_p >= 1)
    # The most likely token is kept even if top_p underflows to 0.
    count_B1 = jnp.maximum(1, jnp.sum(in_top_k_1V & in_nucleus_BV, axis=-1, keepdims=True))
    least_B1 = jnp.take_along_axis(ordered_BV, count_B1 - 1, axis=-1)
    last_id_B1 = jnp.take_along_axis(ordered_id_BV, count_B1 - 1, axis=-1)
    kept_BV = (logits_BV > least_B1) | ((logits_BV == least_B1) & (id_BV <= last_id_B1))
    return jnp.where(kept_BV, logits_BV, -jnp.inf)


class TextSampler:
    """A sampler of text, configured by a `config.sample` block."""

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

    @property
    def stats(self):
        return self.sampler.stats

    def encode(self, prompt):
        """Ids of a prompt, with the start tokens of a document. An empty prompt becomes the
        end-of-document token, or token 0."""
        if ids := [*self.tokenizer.start, *self.tokenizer.encode(prompt)]:
            return ids
        return [0 if self.tokenizer.eot is None else self.tokenizer.eot]

    def write(self, variables, stream=None):
        """Write `num_samples` continuations of the config's prompt as they are generated."""
        stream, prompt = stream or sys.stdout, self.config.prompt
        for i in range(self.config.num_samples):
            stream.write(prompt)
            for piece in self.stream(variables, prompt, seed=self.config.seed + i):
                stream.write(piece)
                stream.flush()
            stream.write("\n")

    def stream(self, variables, prompt, *, seed):
        """Yield the continuation of `prompt` in pieces; it ends before `config.sample.stop`."""
        for (piece,) in self._pieces(variables, [prompt], [seed]):
            if piece:
                yield piece

    def texts(self, variables, prompts, *, seeds):
        """Continuations of `batch_size` prompts, decoded together."""
        return ["".join(row) for row in zip(*self._pieces(variables, prompts, seeds), strict=True)]

    def _pieces(self, variables, prompts, seeds):
        rows, ended = [_Text(self.tokenizer, self.config.stop) for _ in prompts], set()
        ids, n = [self.encode(prompt) for prompt in prompts], self.config.max_new_tokens
        for new in self.sampler.tokens(variables, ids, max_new_tokens=n, seeds=seeds, ended=ended):
            yield [row.feed(ids) for row, ids in zip(rows, new, strict=True)]
            ended.update(b for b, row in enumerate(rows) if row.ended)
        yield [row.finish() for row in rows]


class _Text:
    """Decoder of a stream of tokens into a text that ends before `stop`."""

    def __init__(self, tokenizer, stop):
        self._decoder, self._stop, self._held = tokenizer.stream_decoder(), stop, ""
        self.ended = False

    def feed(self, ids):
        """Text that is complete; a possible beginning of the stop text is held back."""
        return self._cut("".join(self._decoder.feed(i) for i in ids), last=False)

    def finish(self):
        """The rest of the text."""
        return self._cut(self._decoder.finish(), last=True)

    def _cut(self, new, last):
        if self.ended:
            return ""
        text, stop = self._held + new, self._stop
        if stop and stop in text:
            self.ended = True
            return text[: text.index(stop)]
        ready = len(text) if last else len(text) - _overlap(text, stop)
        self._held = text[ready:]
        return text[:ready]


def _overlap(text, stop):
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


def _check(temperature, top_k, top_p):
    if not temperature >= 0:
        raise UsageError(f"config.sample.temperature={temperature}: must be at least 0 (greedy)")
    if top_k < 0:
        raise UsageError(f"config.sample.top_k={top_k}: must be at least 0 (off)")
    if not 0 < top_p <= 1:
        raise UsageError(f"config.sample.top_p={top_p}: must be in (0, 1]; 1 is off")
