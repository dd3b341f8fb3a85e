# NOTE FOR THE SAMPLER'S AUTHOR (remove this note): the lead wrote this file over yours by accident at
# 00:42, having seen only a stub. Keep THIS file's API (Sampler.tokens, TextSampler.stream/texts/stats:
# efx/train.py and efx/inference.py use it) and merge into it whatever yours does better; then write
# tests/test_sample.py, tests/test_decode.py and benchmarks/decode.py against it. You own it again.
"""Sampling: a prefill in chunks of fixed size, then one compiled decode loop.

Two functions are compiled for a sampler, whatever the prompts: `prefill` takes 64 tokens a call
(the last chunk padded), `decode` makes up to 16 tokens a call. So nothing is compiled again for a
token, a prompt or a prompt's length, and text reaches the terminal while it is made.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from efx import models, sharding
from efx.errors import UsageError

PREFILL = 64  # tokens of a prompt that a call processes
STREAM = 16  # tokens that a call of the decode loop makes before they are shown


class Sampler:
    """Samples from a model; parameters are given at each call, so one sampler serves a whole run.

    Args:
      model: of any family; scanned layers are unrolled, which decodes faster.
      batch_size: sequences decoded together; their prompts may differ in length.
      cache_size: tokens of context kept; by default the model's context. When a sequence reaches
        it, its last half is read again as a prompt and sampling goes on from there (positions
        start again at 0).
      temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
      stop_ids: tokens that end a sequence (the end of a document).
    """

    def __init__(
        self, model, *, batch_size=1, cache_size=0, temperature=1.0, top_k=0, top_p=1.0, stop_ids=()
    ):
        _check(model, temperature, top_k, top_p)
        self.model, self.batch_size = model, batch_size
        self.cache_size = cache_size or model.context
        self._unrolled = model.unrolled() if model.scan_layers else model
        self._options = (np.float32(temperature), np.float32(top_p))
        self._top_k, self._use_top_p = min(top_k, model.vocab_size), top_p < 1
        self._stop_ids = np.asarray(sorted(stop_ids), np.int32)
        self._cache_shapes = jax.eval_shape(
            lambda: models.init_cache(self._unrolled, batch_size, self.cache_size)
        )
        self._prefill = jax.jit(self._prefill_chunk, donate_argnums=1)
        self._decode = jax.jit(self._decode_chunk, donate_argnums=1)
        self._warm = False
        self.stats = {}

    def tokens(self, params, prompts, *, max_new_tokens, seeds):
        """Yields lists (one a row) of new token ids, up to `STREAM` at a time.

        The random numbers of a row are a function of its seed and of how many tokens it has made:
        a row's text is the same alone and in any batch.

        Args:
          prompts: list of `batch_size` int arrays, each with at least one token.
          seeds: one int for each row.
        Raises: UsageError when a prompt is longer than the context.
        """
        for prompt in prompts:
            if len(prompt) >= self.cache_size:
                raise UsageError(
                    f"the prompt has {len(prompt)} tokens and the context is {self.cache_size}: "
                    f"give at most {self.cache_size - 1}"
                )
        texts = [list(map(int, prompt)) for prompt in prompts]
        done_B = np.zeros(len(prompts), bool)
        made, seconds, steps = 0, 0.0, 0
        with sharding.single_device():
            keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
            params = models.unroll(self.model, params)[1]
            cache, logits_BV = self._read(params, texts)
            lengths = [len(text) for text in texts]
            while made < max_new_tokens and not done_B.all():
                if max(lengths) >= self.cache_size:
                    cache = None  # free it before the next one is made
                    kept = [text[-(self.cache_size // 2) :] for text in texts]
                    cache, logits_BV = self._read(params, kept)
                    lengths = [len(text) for text in kept]
                limit = min(STREAM, max_new_tokens - made, self.cache_size - max(lengths))
                start = time.perf_counter()
                state = (jnp.asarray(lengths, jnp.int32), jnp.asarray(done_B))
                cache, logits_BV, out_BN, count_B, done = self._decode(
                    params, cache, logits_BV, *state, keys, jnp.int32(made), jnp.int32(limit),
                    *self._options,
                )
                out_BN, count_B, done_B = jax.device_get((out_BN, count_B, done))
                if self._warm:  # the first call compiles
                    seconds += time.perf_counter() - start
                    steps += int(count_B.sum())
                self._warm = True
                new = [out_BN[b, : count_B[b]].tolist() for b in range(len(texts))]
                for b, ids in enumerate(new):
                    texts[b] += ids
                    lengths[b] += len(ids)
                made += limit
                self.stats = self._statistics(cache, lengths, steps / seconds if steps else 0.0)
                yield new

    def _read(self, params, texts):
        """Fill an empty cache with the texts; the logits after the last token of each row."""
        cache = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.full(x.shape, -1 if path[-1].key == "position" else 0, x.dtype),
            self._cache_shapes,
        )
        longest = max(map(len, texts))
        tokens_BT = np.zeros((len(texts), -(-longest // PREFILL) * PREFILL), np.int32)
        positions_BT = np.full(tokens_BT.shape, -1, np.int32)
        for b, text in enumerate(texts):
            tokens_BT[b, : len(text)] = text
            positions_BT[b, : len(text)] = np.arange(len(text))
        logits_BV = jnp.zeros((len(texts), self.model.vocab_size), jnp.float32)
        for t in range(0, tokens_BT.shape[1], PREFILL):
            part = slice(t, t + PREFILL)
            cache, logits_BV = self._prefill(
                params, cache, logits_BV, tokens_BT[:, part], positions_BT[:, part]
            )
        return cache, logits_BV

    def _apply(self, params, cache, tokens_BT, positions_BT, method="features"):
        return self._unrolled.apply(
            {"params": params, "cache": cache}, tokens_BT, positions_BT, decode=True,
            cache_size=self.cache_size, mutable=["cache"], method=method,
        )

    def _logits(self, params, x_BD):
        logits_BV = self._unrolled.apply({"params": params}, x_BD, method="logits")
        return logits_BV[..., : self.model.vocab_size]

    def _prefill_chunk(self, params, cache, logits_BV, tokens_BT, positions_BT):
        x_BTD, mutated = self._apply(params, cache, tokens_BT, positions_BT)
        count_B = jnp.sum(positions_BT >= 0, axis=1)
        last_BD = jax.vmap(lambda x, i: x[i])(x_BTD, jnp.maximum(count_B - 1, 0))
        new_BV = self._logits(params, last_BD)
        return mutated["cache"], jnp.where((count_B > 0)[:, None], new_BV, logits_BV)

    def _decode_chunk(
        self, params, cache, logits_BV, length_B, done_B, keys, made, limit, temperature, top_p
    ):
        """Up to `limit` tokens for every row that is not done."""
        batch = length_B.shape[0]
        out_BN = jnp.zeros((batch, STREAM), jnp.int32)
        count_B = jnp.zeros((batch,), jnp.int32)

        def running(state):
            step, done_B = state[0], state[4]
            return (step < limit) & ~jnp.all(done_B)

        def body(state):
            step, cache, logits_BV, length_B, done_B, out_BN, count_B = state
            token_B = self._choose(logits_BV, keys, made + step, temperature, top_p)
            out_BN = out_BN.at[:, step].set(token_B)
            done_B = done_B | jnp.any(token_B[:, None] == self._stop_ids[None], axis=1)
            count_B = count_B + jnp.where(done_B, 0, 1)  # the stop token itself is not counted
            positions_B = jnp.where(done_B, -1, length_B)
            x_BTD, mutated = self._apply(params, cache, token_B[:, None], positions_B[:, None])
            logits_BV = self._logits(params, x_BTD[:, 0])
            length_B = length_B + jnp.where(done_B, 0, 1)
            return step + 1, mutated["cache"], logits_BV, length_B, done_B, out_BN, count_B

        start = (jnp.int32(0), cache, logits_BV, length_B, done_B, out_BN, count_B)
        _, cache, logits_BV, _, done_B, out_BN, count_B = jax.lax.while_loop(running, body, start)
        return cache, logits_BV, out_BN, count_B, done_B

    def _choose(self, logits_BV, keys, index, temperature, top_p):
        """The next token of each row, in float32."""
        greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        scaled_BV = logits_BV / jnp.maximum(temperature, 1e-6)
        scaled_BV = filter_logits(scaled_BV, self._top_k, top_p if self._use_top_p else None)
        noise_BV = jax.vmap(
            lambda key: jax.random.gumbel(jax.random.fold_in(key, index), scaled_BV.shape[1:])
        )(keys)
        drawn_B = jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32)
        return jnp.where(temperature > 0, drawn_B, greedy_B)

    def _statistics(self, cache, lengths, rate):
        """Speed, cache size, and for routed models how much of them ran."""
        named = {}
        for path, value in jax.tree_util.tree_leaves_with_path(cache):
            named.setdefault(path[-1].key, []).append(np.asarray(value))
        kept = named["cached_key"] + named["cached_value"]
        stats = {"tokens_per_second": rate, "cache_bytes": sum(x.nbytes for x in kept)}
        if "routed" in named:
            fractions = [float(routed.sum() / sum(lengths)) for routed in named["routed"]]
            stats["routed_fraction"] = float(np.mean(fractions))
            stats["routed_fraction_by_block"] = fractions
            stats["overflow"] = int(sum(x.sum() for x in named["overflow"]))
        return stats


def filter_logits(logits_BV, top_k, top_p):
    """Logits with the tokens outside the top k, or outside the nucleus, at -inf.

    top_k: int, 0 keeps all. top_p: keep the fewest most likely tokens whose probabilities reach
    top_p, at least one (Holtzman et al. 2020, arXiv 1904.09751); None keeps all.
    """
    if top_k:
        smallest_B = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < smallest_B, -jnp.inf, logits_BV)
    if top_p is not None:
        ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probs_BV = jax.nn.softmax(ordered_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        count_B = jnp.sum(before_BV < top_p, axis=-1, keepdims=True)
        smallest_B = jnp.take_along_axis(ordered_BV, jnp.maximum(count_B - 1, 0), axis=-1)
        logits_BV = jnp.where(logits_BV < smallest_B, -jnp.inf, logits_BV)
    return logits_BV


class TextSampler:
    """A sampler of text, by a `config.sample` block."""

    def __init__(self, model, tokenizer, config, *, batch_size=1):
        self.tokenizer, self.config = tokenizer, config
        if config.max_new_tokens < 1:
            raise UsageError(
                f"config.sample.max_new_tokens={config.max_new_tokens}: must be at least 1"
            )
        self.sampler = Sampler(
            model, batch_size=batch_size, temperature=config.temperature, top_k=config.top_k,
            top_p=config.top_p, stop_ids=() if tokenizer.eot is None else (tokenizer.eot,),
        )

    @property
    def stats(self):
        return self.sampler.stats

    def encode(self, prompt):
        """Ids of a prompt; an empty one is the end-of-document token, or else token 0."""
        ids = self.tokenizer.encode(prompt)
        if len(ids):
            return ids
        return [0 if self.tokenizer.eot is None else self.tokenizer.eot]

    def stream(self, params, prompt, *, seed):
        """Yields the continuation of `prompt` in pieces; it ends before `config.sample.stop`."""
        decoder, stop, held = self.tokenizer.stream_decoder(), self.config.stop, ""
        new = self.sampler.tokens(
            params, [self.encode(prompt)], max_new_tokens=self.config.max_new_tokens, seeds=[seed]
        )
        for (ids,) in new:
            held += "".join(decoder.feed(i) for i in ids)
            if stop and stop in held:
                yield held[: held.index(stop)]
                return
            # What might be the beginning of the stop text waits for the next piece.
            ready = len(held) - (_overlap(held, stop) if stop else 0)
            if ready:
                yield held[:ready]
            held = held[ready:]
        yield held + decoder.finish()

    def texts(self, params, prompts, *, seeds):
        """Continuations of `batch_size` prompts, decoded together."""
        rows = [[] for _ in prompts]
        for new in self.sampler.tokens(
            params, [self.encode(prompt) for prompt in prompts],
            max_new_tokens=self.config.max_new_tokens, seeds=seeds,
        ):
            for row, ids in zip(rows, new, strict=True):
                row += ids
        texts = [self.tokenizer.decode(row) for row in rows]
        stop = self.config.stop
        return [text.split(stop)[0] if stop else text for text in texts]


def _overlap(text, stop):
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


def _check(model, temperature, top_k, top_p):
    if temperature < 0:
        raise UsageError(f"config.sample.temperature={temperature}: must be at least 0 (greedy)")
    if top_k < 0:
        raise UsageError(f"config.sample.top_k={top_k}: must be at least 0 (off)")
    if not 0 < top_p <= 1:
        raise UsageError(f"config.sample.top_p={top_p}: must be in (0, 1]; 1 is off")
    if model.context < 2:
        raise UsageError(f"config.model.context={model.context}: sampling needs at least 2")
