"""Sampling: a prefill in chunks of fixed size, then one compiled decode loop.

What is compiled for a model, a number of rows and a size of cache is `_Program`: `prefill` takes
some tokens a call (64 of each row on a CPU, more elsewhere; the last chunk padded), `decode` makes
up to 16 tokens a call. Nothing is compiled again for a token, a prompt, its length, a setting of
the sampling, a seed or new parameters, and text reaches the terminal while it is made.
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
_PREFILL_ALL, _PREFILL_MOST = 2048, 1024  # elsewhere: of all prompts, and at most of each
_LONG_CACHE = 2**16  # tokens of all sequences
STREAM = 16  # tokens that a call of the decode loop makes before they are shown
_MASS_TOLERANCE = 1e-6  # relative; rounding error of probabilities summed in float32
PLACES = np.uint32(2**32 - 1)  # in the place of a token's number, of which there are never so many


class Sampler:
    """Samples from a model; parameters are given at each call, so one sampler serves a whole run.

    Args:
      model: of any family; scanned layers are unrolled, which decodes faster.
      batch_size: sequences decoded together; their prompts may differ in length. One alone is
        cheapest: what depth routing skips for it does not run.
      cache_size: tokens of context kept; by default the model's context. When a sequence outgrows
        it, its last half is read again, from position 0, and sampling goes on from there.
      temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
      stop_ids: tokens that end a sequence (the end of a document).
      rules: logical to mesh axes, for variables that are split over a mesh. They stay so: every
        device of the mesh computes with its parts, for all sequences, and every process of the run
        has to sample, and gets the same tokens. Other variables are used on one device.
    Attributes:
      stats: of the last call of `tokens`, once that has ended: prompt_tokens, new_tokens; slides,
        how often a sequence outgrew the cache; compile_seconds, prefill_seconds, decode_seconds
        and tokens_per_second, of decoding alone; cache_bytes; expert_overflow, how many choices of
        an expert found it full, of expert_choices; of each row [B] computed_choices_by_row, {layer:
        choices of its experts}, and routed_by_row, {block: tokens}. With routed blocks
        routed_fraction_by_block, {block: of the tokens read}; routed_fraction, their mean;
        overflow, how many tokens found a block's cache full, of wanted, which decided for it. Room
        is that of a row of cache_size tokens, and these are the numbers of a forward pass over such
        rows; over shorter ones, such as an evaluation's, more are left out.
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
        """Yields lists (one a row) of new token ids, up to `STREAM` at a time.

        The random numbers of a row are a function of its seed and of how many tokens it has made:
        a row's text is the same alone and in any batch (but for rounding, and for a stochastic
        control of routing, whose places are drawn for the batch, by the seed of its first row).

        Args:
          variables: {"params": ...}, and "state" where the model has one; or, where they depend on
            the text, an object with `every` and `at(texts, before)`. It is asked for the variables
            before the first token and then after every `every` tokens, with the token ids so far of
            each row, and gives (variables, whether the rows have to be read again with them). In
            `before` are the variables until now, {} at first; their arrays may be used up.
          prompts: list of `batch_size` int arrays, each with at least one token.
          seeds: one int for each row. ended: a set of rows that make no more; the caller may add.
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
        """UsageError where the cache has no room. Tracing its shapes takes a second, which a short
        one is spared."""
        rows, size = self.batch_size, self.cache_size
        if rows * size < _LONG_CACHE:
            return
        memory.check(
            f"config.sample.num_samples={rows}, config.model.context={size}: sampling",
            {"keys and values": memory.on_each_device(self._program.room())},
        )

    def check_prompt(self, ids):
        """Raises UsageError if the prompt is longer than the context."""
        if len(ids) > self.cache_size:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, more than the context of "
                f"{self.cache_size}; shorten it"
            )


def prefill_of(batch_size, cache_size):
    """(tokens of each prompt that a call reads, whether the first call has a program of its own).

    A CPU computes 64 tokens as fast as many, and has no kernel. Elsewhere a call reads all
    parameters, and with few tokens does little else.
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
        program of its own. stops: how many tokens end a sequence.
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
        """By which so many sequences are decoded together on the devices that are traced for."""
        unrolled = models.unrolled(model) if model.config.scan_layers else model
        reads = prefill_of(batch_size, cache_size)
        # The few sequences that are made together, of one token at a time, are not split.
        rules = sharding.unsplit(rules, "batch", "expert_batch", "length")
        return cls(unrolled, batch_size, cache_size, *reads, stops, rules)

    def first(self):
        """The function that reads the first tokens of prompts."""
        return self.prefill_first if self.two_prefills else self.prefill

    def prefill(self, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        """Read tokens, those of new rows into an emptied cache: the cache, and the features of each
        row's last token; a row that has none among them keeps its own."""
        return self._read(True, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed)

    def prefill_first(self, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        """`prefill` of the first tokens of their rows, all of which are new: attention may be a
        kernel."""
        return self._read("first", variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed)

    def _read(self, decode, variables, cache, last_BD, new_B, tokens_BT, positions_BT, seed):
        cache = models.emptied(cache, new_B)
        x_BTD, cache = self._features(variables, cache, tokens_BT, positions_BT, seed, decode)
        count_B = jnp.sum(positions_BT >= 0, axis=1)

        def last(x_TD, before_D, count):
            return jnp.where(count > 0, x_TD[jnp.maximum(count - 1, 0)], before_D)

        return cache, jax.vmap(last)(x_BTD, last_BD, count_B)

    def decode(self, variables, cache, last_BD, length_B, done_B, seed_B, made, limit, options):
        """Up to `limit` tokens for every row that is not done.

        Ends early when all rows are done, or when one has a token for which its cache has no room:
        its length is then cache_size + 1.
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
        """The arguments of `prefill` as shapes, by those of the variables."""
        shape = jax.ShapeDtypeStruct
        rows, tokens = (self.batch_size,), shape((self.batch_size, self.chunk), np.int32)
        return variables, *self.room(), shape(rows, bool), tokens, tokens, shape((), np.uint32)

    def shapes_of_decode(self, variables):
        """The arguments of `decode` as shapes, by those of the variables."""
        shape = jax.ShapeDtypeStruct
        rows, number = (self.batch_size,), shape((), np.int32)
        settings = dict(
            temperature=shape((), np.float32),
            top_k=shape((), np.int32),
            top_p=shape((), np.float32),
            stop_ids=shape((self.stops,), np.int32),
        )
        each = shape(rows, np.int32), shape(rows, bool), shape(rows, np.uint32)
        return variables, *self.room(), *each, number, number, settings

    def room(self):
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


_compiled_for = set()  # (decode, mesh) of what `_compiled` gives, once it is compiled


@functools.cache
def _compiled(program):
    """(prefill of first tokens, prefill of later ones, decode, a function that makes the cache and
    the features of each row's last token), jitted. Equal programs share them."""
    prefill = _jitted(program.prefill)
    first = _jitted(program.first()) if program.two_prefills else prefill
    return first, prefill, _jitted(program.decode), _maker(program.room())


def _maker(shapes):
    """A function that makes arrays of these shapes where they are wanted: nothing is sent."""

    def zeros():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.jit(zeros, out_shardings=PartitionSpec())


def _jitted(function):
    """A function of a `_Program`, which writes the cache and the features over what it is given."""
    return jax.jit(function, donate_argnums=(1, 2), out_shardings=PartitionSpec())


def _mesh_for(variables, device):
    """(the mesh on which variables are used: that over which they are split, or one of the device
    alone; whether they are split)."""
    mesh = sharding.mesh_that_splits(variables)
    alone = dict.fromkeys(sharding.MESH_AXES, 1)
    return mesh or sharding.make_mesh(alone, [device]), mesh is not None


class Outline:
    """What a run compiles and copies to sample from its model, in shapes alone: for devices that
    need not be there.

    Args:
      batch_size, rules: see `Sampler`.
      variables: the run's, as shapes with shardings. unrolled: those of the model with its layers
        unrolled, the same ones where it has no others.
      device: the first one of the run. longest: see `longest_read`.
    Attributes:
      mesh: on which is sampled. program: see `_Program`. functions: {what it does: (a function of
        the program, its arguments as shapes)}.
      used: variables as the functions get them. shared: those of them that are arrays of the run,
        the others are copies.
    """

    def __init__(self, model, batch_size, variables, unrolled, rules, device, longest):
        # Whether a token ends a sequence is known with the tokenizer; it hardly matters here.
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
            room = placed(program.room())
            reading, making = (
                (variables, *room, *rest)
                for variables, _, _, *rest in (
                    program.shapes_of_prefill(self.used), program.shapes_of_decode(self.used)
                )
            )  # fmt: skip
        self.functions = {"prefill": (program.first(), reading)}
        if program.chunk < longest:
            self.functions["later chunks of a prompt"] = program.prefill, reading
        self.functions["decoding"] = program.decode, making

    def trace(self, name):
        """One of the functions, jitted and traced as a run does."""
        function, shapes = self.functions[name]
        with sharding.use(self.mesh, self.program.rules):
            return _jitted(function).trace(*shapes)


def longest_read(config, cache_size):
    """How many tokens of a text are read in a row, at most, by a `config.sample` block: a token is
    a byte or more, and one of its own may begin a text."""
    prompt = len(config.prompt.encode()) + 1
    outgrows = prompt + config.max_new_tokens > cache_size
    return max(prompt, cache_size // 2) if outgrows else prompt


class _Run:
    """One call of `Sampler.tokens`: what lives on the device, and what is counted."""

    def __init__(self, sampler, variables, texts, seeds):
        self.sampler, self.program = sampler, sampler._program
        self.source = _Fixed(variables) if isinstance(variables, Mapping) else variables
        of_all = variables if self.source.every == math.inf else {}
        self.mesh, self.is_split = _mesh_for(of_all, jax.local_devices()[0])
        self.due, self.variables = 0, {}  # the token before which variables are asked for
        self.take_variables(texts)
        self.stale = True  # whether all rows have to be read with the variables of now
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
            self.prefill_first, self.prefill, self.decode_loop, make_room = self._call(
                _compiled, self.program
            )
            # For what they work on, not empty yet. It may be gigabytes on every device.
            self.cache, self.last_BD = self._call(make_room)
            # No rows, and finished rows, change nothing, and take the time of a prompt.
            if (self.decode_loop, self.mesh) not in _compiled_for:
                self.read({})
                self.decode(np.ones(sampler.batch_size, bool), 0, 0)
                _compiled_for.add((self.decode_loop, self.mesh))

    def take_variables(self, texts):
        """The variables for these texts, from now on."""
        with jax.set_mesh(self.mesh):  # without rules: it may restore the variables of other models
            variables, again = self.source.at(texts, self.variables)
        if not self.is_split:
            variables = jax.device_put(sharding.whole(variables), sharding.replicated(self.mesh))
        self.variables = self._call(models.unroll_variables, self.sampler.model, variables)
        self.stale, self.due = again, self.due + self.source.every

    def prepare(self, texts, done_B, made):
        """Before token number `made`: variables that are due; rows read that have to be."""
        if made == self.due:
            self.take_variables(texts)
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
        # Also inside a mesh of many devices. Not for the whole run: in between, the caller's runs.
        with sharding.use(self.mesh, self.program.rules):
            return function(*arguments)

    @contextlib.contextmanager
    def timed(self, name):
        self.seconds[name] -= time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter()

    def count(self, rows):
        """Add up what routed blocks did for these rows, before their cache goes."""
        rows = list(rows)
        for path, value in jax.tree_util.tree_leaves_with_path(self.cache):
            if path[-1].key in self.counts:
                # One number a row, or several for several models that are decoded together.
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
            # Of what a block decides about: of latents there are not as many as of tokens.
            totals = {name: of_rows.sum() for name, of_rows in routed.items()}
            reached = {name: of_rows.sum() for name, of_rows in self.counts["reached"].items()}
            fractions = {name: total / max(1, reached[name]) for name, total in totals.items()}
            stats["routed_fraction"] = float(np.mean(list(fractions.values())))
            stats["routed_fraction_by_block"] = fractions
            stats["overflow"] = overflow
            stats["wanted"] = stats["overflow"] + round(sum(totals.values()))
        return stats


class _Fixed:
    """Variables that do not depend on the text."""

    every = math.inf

    def __init__(self, variables):
        self._variables = variables

    def at(self, texts, before):
        return self._variables, True


def choose(logits_BV, keys, index, options):
    """Token number `index` of each row [B], in float32; options: temperature, top_k, top_p."""
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
    """Set the logits of tokens outside the top k, and then outside the nucleus of these, to -inf.

    Of equal logits at the edge the lower ids are kept.

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
    """A sampler of text, by a `config.sample` block, all of which is checked here."""

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
        """Ids of a prompt, which begins as documents do; without any it is the end-of-document
        token, or else token 0."""
        if ids := [*self.tokenizer.start, *self.tokenizer.encode(prompt)]:
            return ids
        return [0 if self.tokenizer.eot is None else self.tokenizer.eot]

    def write(self, variables, stream=None):
        """Writes `num_samples` continuations of the config's prompt, as they are made."""
        stream, prompt = stream or sys.stdout, self.config.prompt
        for i in range(self.config.num_samples):
            stream.write(prompt)
            for piece in self.stream(variables, prompt, seed=self.config.seed + i):
                stream.write(piece)
                stream.flush()
            stream.write("\n")

    def stream(self, variables, prompt, *, seed):
        """Yields the continuation of `prompt` in pieces; it ends before `config.sample.stop`."""
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
    """A text that comes token by token and ends before `stop`."""

    def __init__(self, tokenizer, stop):
        self._decoder, self._stop, self._held = tokenizer.stream_decoder(), stop, ""
        self.ended = False

    def feed(self, ids):
        """What is new and certain: the possible beginning of the stop text is kept for later."""
        return self._cut("".join(self._decoder.feed(i) for i in ids), last=False)

    def finish(self):
        """What was kept."""
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
