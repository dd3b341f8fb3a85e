"""The properties of a language model, and the interface of a model that they are held against.

Each function in `CHECKS` holds a `Subject` to one property. Differences of logits are in standard
deviations of the logits.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from efx.errors import UsageError, first_line

PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
BATCH, LENGTH = 8, 32
# Largest difference of two computations of the same logits, in standard deviations of the logits.
TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.05}
STD = "std of the logits"
# Executed over claimed FLOPs, at most, or at least one over it: programs compute empty slots,
# hidden scores and a padded vocabulary. Work of skipped tokens has no such excuse.
FLOPS_RATIO, WORK_RATIO = 1.4, 1.05
# A part that is worth fewer nats is asleep.
ASLEEP = 1e-3


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to certify. Arrays that it gets are numpy; it may return those of any library.

    Attributes:
      logits: (tokens [B, T]) -> logits [B, T, V]. With `layouts` also (tokens, positions,
        segments), int [B, T]: `segments` are documents 1, 2, ... of a row and 0 for padding;
        `positions` begin at 0 in each document, and are -1 for padding.
      layouts: what a row may have besides one document: "padding" (on either side), "packing".
      context: the longest row. document_multiple: documents begin at multiples of it.
      dtype: of the computation, a key of `TOLERANCES`.
      init_cache: (batch, size) -> empty cache of at most `size` tokens a row.
      decode: (cache, tokens [B, T], positions [B, T]) -> (logits, cache) of new tokens.
      ragged: new tokens of a call may have other positions in each row, -1 for padding at its end.
      count_flops: (function) -> FLOPs that a call of it without arguments executes, or None.
      claimed_flops: (tokens [B, T]) -> FLOPs of their forward pass, as the model claims.
      work: (tokens [1, T]) -> (executed [T], claimed [T]): the work of each token when decoded one
        by one, in any unit, and the work that is left if skipped tokens cost nothing.
      parts: {name: names of the parts that it consists of}. Without a part its increment is 0.
      without: (names) -> context manager in which `logits` computes without these parts.
      text: (tokens [B, T] of a text) for `sleeping_parts`; None: random tokens.
    """

    logits: Callable
    vocab_size: int
    layouts: frozenset = frozenset()
    context: int = LENGTH
    document_multiple: int = 1
    dtype: str = "float32"
    init_cache: Callable | None = None
    decode: Callable | None = None
    ragged: bool = False
    count_flops: Callable | None = None
    claimed_flops: Callable | None = None
    work: Callable | None = None
    parts: dict = dataclasses.field(default_factory=dict)
    without: Callable | None = None
    text: Any = None

    @property
    def length(self):
        return min(LENGTH, self.context)

    @property
    def tolerance(self):
        return TOLERANCES[self.dtype]

    def compute(self, tokens_BT, *layout):
        """Logits [B, T, V] in numpy; UsageError for another shape."""
        logits_BTV = to_numpy(self.logits(tokens_BT, *layout))
        expected = (*tokens_BT.shape, self.vocab_size)
        if logits_BTV.shape != expected:
            raise UsageError(
                f"logits of tokens {list(tokens_BT.shape)} have shape {list(logits_BTV.shape)}: "
                f"expected {list(expected)} (rows, tokens, vocabulary); set --vocab-size to the "
                "number of columns, or return logits of all tokens"
            )
        return logits_BTV


@dataclasses.dataclass(frozen=True)
class Result:
    """A property of a model. `reproduction`: seed, rows, positions and tokens of `number`."""

    name: str
    verdict: str
    number: float | None = None
    tolerance: float | None = None
    unit: str = ""
    reproduction: dict = dataclasses.field(default_factory=dict)


def to_numpy(x):
    """Logits of numpy, JAX or PyTorch as float64 if they have it, else as float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x if str(x.dtype) == "torch.float64" else x.float()
    x = np.asarray(x)
    return x if x.dtype == np.float64 else x.astype(np.float32)


def random_tokens(subject, seed, batch=BATCH, length=None):
    """int32 tokens [B, T] of a seed."""
    shape = batch, length or subject.length
    return np.random.default_rng(seed).integers(0, subject.vocab_size, shape).astype(np.int32)


def other_tokens(subject, seed, tokens_BT):
    """Random tokens that differ from `tokens_BT` everywhere."""
    shift_BT = np.random.default_rng(seed + 1).integers(1, subject.vocab_size, tokens_BT.shape)
    return ((tokens_BT + shift_BT) % subject.vocab_size).astype(np.int32)


def rows_of(ids, subject, most=64):
    """The first tokens of a text as rows [B, T], at most `most`."""
    rows = min(most, len(ids) // subject.length)
    if not rows:
        raise UsageError(f"--text has {len(ids)} tokens: at least {subject.length} are needed")
    return np.asarray(ids[: rows * subject.length], np.int32).reshape(rows, subject.length)


def change(expected_BTV, got_BTV):
    """[B, T]: largest change of a logit, in standard deviations of the expected logits; infinity
    where one is finite and the other is not."""
    finite = expected_BTV[np.isfinite(expected_BTV)]
    std = (finite.std() if finite.size else 0) or 1.0
    with np.errstate(invalid="ignore"):
        gap_BTV = np.abs(got_BTV - expected_BTV)
    same_BTV = (got_BTV == expected_BTV) | (np.isnan(got_BTV) & np.isnan(expected_BTV))
    gap_BTV = np.where(same_BTV, 0, np.where(np.isnan(gap_BTV), np.inf, gap_BTV))
    return gap_BTV.max(axis=-1) / std


class _Worst:
    """The largest change among several comparisons for a check, and where it is."""

    def __init__(self, check, subject, seed, tolerance=None):
        self.name, self.seed = _name(check), seed
        self.tolerance = subject.tolerance if tolerance is None else tolerance
        self.number, self.where = 0.0, {}

    def add(self, change_BT, mask_BT, tokens_BT, **where):
        """Compare where the mask is True; `where` has scalars, or arrays with an entry a row."""
        change_BT = np.where(mask_BT, change_BT, 0)
        row, position = map(int, np.unravel_index(change_BT.argmax(), change_BT.shape))
        if change_BT[row, position] > self.number:
            self.number = float(change_BT[row, position])
            of_row = {k: int(v[row]) for k, v in where.items() if isinstance(v, np.ndarray)}
            tokens = tokens_BT[row].tolist()
            self.where = dict(row=row, position=position, **{**where, **of_row}, tokens=tokens)

    def result(self, unit=STD):
        passes = self.number <= self.tolerance
        where = {"seed": self.seed, **({} if passes else self.where)}
        verdict = PASS if passes else FAIL
        return Result(self.name, verdict, self.number, self.tolerance, unit, where)


def _name(check):
    return check.__name__.replace("_", " ")


def _not_applicable(check, reason, number=None):
    return Result(_name(check), NOT_APPLICABLE, number, None, reason)


# ---- the full pass -----------------------------------------------------------------------------


def no_look_ahead(subject, seed=0):
    """Logits do not change with later tokens, for each position of a row.

    By perturbation: a gradient does not see what top-k selects.
    """
    tokens_BT = random_tokens(subject, seed)
    others_BT, place_T = other_tokens(subject, seed, tokens_BT), np.arange(subject.length)
    before_BTV, worst = subject.compute(tokens_BT), _Worst(no_look_ahead, subject, seed)
    for start in range(1, subject.length, BATCH):
        first_B = np.minimum(start + np.arange(BATCH), subject.length - 1)
        is_later_BT = place_T >= first_B[:, None]
        after_BTV = subject.compute(np.where(is_later_BT, others_BT, tokens_BT))
        worst.add(change(before_BTV, after_BTV), ~is_later_BT, tokens_BT, changed_from=first_B)
    return worst.result()


def reads_its_tokens(subject, seed=0):
    """Logits change with the token at their position, and some with an earlier token.

    `number` counts the positions that fail.
    """
    tokens_BT = random_tokens(subject, seed)
    others_BT, place_T = other_tokens(subject, seed, tokens_BT), np.arange(subject.length)
    before_BTV, later, unread = subject.compute(tokens_BT), 0.0, []
    for start in range(0, subject.length, BATCH):
        place_B = np.minimum(start + np.arange(BATCH), subject.length - 1)
        is_changed_BT = place_T == place_B[:, None]
        after_BTV = subject.compute(np.where(is_changed_BT, others_BT, tokens_BT))
        moved_BT = change(before_BTV, after_BTV)
        later = max(later, np.where(place_T > place_B[:, None], moved_BT, 0).max())
        unread += place_B[~np.any(moved_BT * is_changed_BT > 0, axis=1)].tolist()
    unread, problem = sorted({*unread}), "positions that do not read their token"
    if not later:
        unread, problem = place_T[1:].tolist(), "positions that read no earlier token"
    where = {"seed": seed}
    if unread:
        where |= dict(position=unread[0], tokens=tokens_BT[unread[0] % BATCH].tolist())
    verdict = FAIL if unread else PASS
    return Result(_name(reads_its_tokens), verdict, len(unread), 0, problem, where)


def batch_mates(subject, seed=0):
    """Logits of a row do not change with the other rows."""
    tokens_BT = random_tokens(subject, seed)
    kept_B = np.isin(np.arange(BATCH), (0, BATCH // 2))[:, None]
    others_BT = np.where(kept_B, tokens_BT, other_tokens(subject, seed, tokens_BT))
    worst = _Worst(batch_mates, subject, seed)
    moved_BT = change(subject.compute(tokens_BT), subject.compute(others_BT))
    worst.add(moved_BT, kept_B, tokens_BT, mates=f"other_tokens(seed {seed})")
    return worst.result()


def row_length(subject, seed=0):
    """Logits of the first tokens are those of the tokens alone, in a smaller batch."""
    tokens_BT, prefix = random_tokens(subject, seed), _prefix(subject)
    worst = _Worst(row_length, subject, seed)
    alone_BTV = subject.compute(tokens_BT[:2, :prefix])
    moved_BT = change(alone_BTV, subject.compute(tokens_BT)[:2, :prefix])
    worst.add(moved_BT, True, tokens_BT, prefix=prefix)
    return worst.result()


def _prefix(subject):
    return 5 * subject.length // 8


def padding(subject, seed=0):
    """Logits of rows with padding on the left or on the right are those without padding."""
    if "padding" not in subject.layouts:
        return _not_applicable(padding, "rows have no padding")
    tokens_BT, place_T = random_tokens(subject, seed), np.arange(subject.length)
    filler_BT = random_tokens(subject, seed + 1)
    multiple, worst = subject.document_multiple, _Worst(padding, subject, seed)
    most = max(1, subject.length // 2 // multiple)
    pads_B = multiple * (np.arange(BATCH) % (1 + min(3, most)))
    alone_BTV = subject.compute(tokens_BT, *_packed(subject, [subject.length]))
    for side, start_B in (("right", 0 * pads_B), ("left", pads_B)):
        real_B = subject.length - pads_B
        positions_BT = place_T - start_B[:, None]
        is_real_BT = (positions_BT >= 0) & (positions_BT < real_B[:, None])
        index_BT = np.clip(positions_BT, 0, subject.length - 1)
        rows_BT = np.where(is_real_BT, np.take_along_axis(tokens_BT, index_BT, 1), filler_BT)
        layout = np.where(is_real_BT, positions_BT, -1), is_real_BT.astype(np.int32)
        padded_BTV = subject.compute(rows_BT, *layout)
        expected_BTV = np.take_along_axis(alone_BTV, index_BT[..., None], 1)
        moved_BT = change(expected_BTV, padded_BTV)
        worst.add(moved_BT, is_real_BT, rows_BT, side=side, padding=pads_B)
    return worst.result()


def _packed(subject, sizes):
    """(positions, segments), int32 [B, T], of documents of these sizes; the others are padding or,
    for a model without padding, a document."""
    rest, sizes = subject.length - sum(sizes), [*sizes]
    segments_T = np.repeat(np.arange(len(sizes) + 1) + 1, [*sizes, rest])
    positions_T = np.concatenate([np.arange(size) for size in (*sizes, rest)])
    if "padding" in subject.layouts:
        is_real_T = segments_T <= len(sizes)
        segments_T, positions_T = segments_T * is_real_T, np.where(is_real_T, positions_T, -1)
    return [np.tile(x_T, (BATCH, 1)).astype(np.int32) for x_T in (positions_T, segments_T)]


def packed_neighbours(subject, seed=0):
    """Logits of a document in a packed row do not change with the other documents."""
    if "packing" not in subject.layouts:
        return _not_applicable(packed_neighbours, "rows hold one document")
    sizes = [part * subject.length // 32 for part in (13, 11, 3)]  # none begins with a group
    tokens_BT, (positions_BT, segments_BT) = random_tokens(subject, seed), _packed(subject, sizes)
    others_BT = other_tokens(subject, seed, tokens_BT)
    before_BTV = subject.compute(tokens_BT, positions_BT, segments_BT)
    worst = _Worst(packed_neighbours, subject, seed)
    for document in (1, 2):
        changed_BT = np.where(segments_BT == document, others_BT, tokens_BT)
        moved_BT = change(before_BTV, subject.compute(changed_BT, positions_BT, segments_BT))
        neighbours_BT = (segments_BT != document) & (segments_BT > 0)
        worst.add(moved_BT, neighbours_BT, tokens_BT, changed_document=document, sizes=sizes)
    return worst.result()


def packed_as_if_alone(subject, seed=0):
    """Logits of documents in a packed row are those of each document alone."""
    if "packing" not in subject.layouts:
        return _not_applicable(packed_as_if_alone, "rows hold one document")
    multiple = subject.document_multiple
    size = 3 * subject.length // 8 // multiple * multiple
    tokens_BT, worst = random_tokens(subject, seed), _Worst(packed_as_if_alone, subject, seed)
    packed_BTV = subject.compute(tokens_BT, *_packed(subject, [size, size]))
    for start in (0, size):
        # A document alone is the beginning of a longer one: logits do not depend on later tokens.
        alone = np.roll(tokens_BT, -start, axis=1), *_packed(subject, [subject.length])
        alone_BTV = subject.compute(*alone)[:, :size]
        moved_BT = change(alone_BTV, packed_BTV[:, start : start + size])
        worst.add(moved_BT, True, tokens_BT, document_from=start, size=size)
    return worst.result()


def determinism(subject, seed=0):
    """Logits of the same tokens are the same bits, with another call in between."""
    tokens_BT = random_tokens(subject, seed)
    before_BTV = subject.compute(tokens_BT)
    subject.compute(other_tokens(subject, seed, tokens_BT))
    worst = _Worst(determinism, subject, seed, tolerance=0.0)
    worst.add(change(before_BTV, subject.compute(tokens_BT)), True, tokens_BT)
    return worst.result()


def finite_logits(subject, seed=0):
    """Logits are finite for every token of the vocabulary. `number` counts positions."""
    ids = np.random.default_rng(seed).permutation(subject.vocab_size).astype(np.int32)
    rows_NT = np.resize(ids, (-(-len(ids) // (BATCH * subject.length)) * BATCH, subject.length))
    count, where = 0, {}
    for start in range(0, len(rows_NT), BATCH):
        tokens_BT = rows_NT[start : start + BATCH]
        bad_BT = ~np.isfinite(subject.compute(tokens_BT)).all(axis=-1)
        count += int(bad_BT.sum())
        if bad_BT.any() and not where:
            row, position = np.argwhere(bad_BT)[0].tolist()
            where = dict(position=position, tokens=tokens_BT[row, : position + 1].tolist())
    verdict = FAIL if count else PASS
    unit = "positions with a logit that is not finite"
    return Result(_name(finite_logits), verdict, count, 0, unit, {"seed": seed, **where})


# ---- decoding with a cache ---------------------------------------------------------------------


def chunks(prompt_B, length_B, size, single=1):
    """Calls that read prompts `size` tokens at a time and the rest of each row token by token.

    Yields:
      (width of the program, new tokens of each row); a single token is read in a program of width
      `single`, with padding.
    """
    done_B = np.zeros(len(length_B), int)
    for width, most, end_B in ((size, size, prompt_B), (single, 1, length_B)):
        while np.any(done_B < end_B):
            new_B = np.clip(end_B - done_B, 0, most)
            done_B = done_B + new_B
            yield width, new_B


def read(decode, cache, tokens_BT, calls):
    """(logits [B, T, V] as `calls` read the tokens, nan where nothing is read; cache)."""
    tokens_BT = np.asarray(tokens_BT)
    batch, length = tokens_BT.shape
    logits_BTV, done_B = None, np.zeros(batch, int)
    for width, new_B in calls:
        place_BT = done_B[:, None] + np.arange(width)
        inside_BT = np.arange(width) < new_B[:, None]
        place_BT = np.minimum(place_BT, length - 1)
        read_BT = np.where(inside_BT, np.take_along_axis(tokens_BT, place_BT, axis=1), 0)
        positions_BT = np.where(inside_BT, place_BT, -1)
        new_BTV, cache = decode(cache, read_BT.astype(np.int32), positions_BT.astype(np.int32))
        new_BTV = to_numpy(new_BTV)
        if logits_BTV is None:
            logits_BTV = np.full((batch, length, new_BTV.shape[-1]), np.nan)
        row_N, step_N = np.nonzero(inside_BT)
        logits_BTV[row_N, place_BT[row_N, step_N]] = new_BTV[row_N, step_N]
        done_B = done_B + new_B
    return logits_BTV, cache


def cached_decoding(subject, seed=0, single=1):
    """Logits of prompts in chunks and then single tokens, from a cache, are those of the full pass.

    Rows that need not be equal have prompts of different lengths, and end one after the other.

    Args:
      single: width of the call that reads single tokens, padded.
    """
    if subject.decode is None:
        return _not_applicable(cached_decoding, "the model has no cache")
    tokens_BT, end_B = random_tokens(subject, seed), np.full(BATCH, subject.length)
    prompt_B = np.array([10, 9, 7, 6, 5, 4, 2, 1]) if subject.ragged else np.full(BATCH, 10)
    calls = chunks(prompt_B, end_B, 5, single)
    cache = subject.init_cache(BATCH, subject.length)
    decoded_BTV, _ = read(subject.decode, cache, tokens_BT, calls)
    worst = _Worst(cached_decoding, subject, seed)
    moved_BT = change(subject.compute(tokens_BT), decoded_BTV)
    worst.add(moved_BT, True, tokens_BT, prompt=prompt_B)
    return worst.result()


CHUNKS = 1, 4, 7


def chunked_prefill(subject, seed=0):
    """Logits of a prompt do not depend on the size of its chunks, nor on that of the cache."""
    if subject.decode is None:
        return _not_applicable(chunked_prefill, "the model has no cache")
    tokens_BT, prefix = random_tokens(subject, seed, batch=2), _prefix(subject)
    expected_BTV, prompt_BT = subject.compute(tokens_BT)[:, :prefix], tokens_BT[:, :prefix]
    worst, sizes = _Worst(chunked_prefill, subject, seed), [(prefix + 4, CHUNKS[1])]
    for size, chunk in (*sizes, *((subject.length, chunk) for chunk in CHUNKS)):
        if subject.ragged:  # one program, as wide as the widest chunk: padding fills the others
            whole_B = np.full(2, prefix)
            calls = [(CHUNKS[-1], new_B) for _, new_B in chunks(whole_B, whole_B, chunk)]
        else:
            ends = [*range(chunk, prefix, chunk), prefix]
            news = np.diff([0, *ends])
            calls = [(new, np.full(2, new)) for new in news]
        cache = subject.init_cache(2, size)
        chunked_BTV, _ = read(subject.decode, cache, prompt_BT, calls)
        worst.add(change(expected_BTV, chunked_BTV), True, prompt_BT, chunk=chunk, cache=size)
    return worst.result()


def copies_of_a_cache(subject, seed=0):
    """A copy of a cache (`copy.deepcopy`) does not change when the other copy is used."""
    if subject.decode is None:
        return _not_applicable(copies_of_a_cache, "the model has no cache")
    tokens_BT, prefix = random_tokens(subject, seed, batch=2), 10
    others_BT = other_tokens(subject, seed, tokens_BT)
    prompt_BT, next_BT = tokens_BT[:, :prefix], tokens_BT[:, prefix : prefix + 1]
    positions_BT = np.tile(np.arange(prefix + 1, dtype=np.int32), (2, 1))

    def prefill():
        cache = subject.init_cache(2, subject.length)
        return subject.decode(cache, prompt_BT, positions_BT[:, :prefix])[1]

    def step(cache, new_BT):
        return to_numpy(subject.decode(cache, new_BT, positions_BT[:, prefix:])[0])

    cache = prefill()
    kept = copy.deepcopy(cache)
    step(cache, others_BT[:, prefix : prefix + 1])
    worst = _Worst(copies_of_a_cache, subject, seed)
    moved_B1 = change(step(prefill(), next_BT), step(kept, next_BT))
    worst.add(moved_B1, True, next_BT, position_in_row=prefix)
    return worst.result()


# ---- work and parts ----------------------------------------------------------------------------


def executed_flops(subject, seed=0):
    """A forward pass executes the FLOPs that the model claims."""
    if subject.count_flops is None:
        return _not_applicable(executed_flops, "FLOPs cannot be counted")
    tokens_BT = random_tokens(subject, seed)
    executed = subject.count_flops(lambda: subject.logits(tokens_BT))
    if executed is None or subject.claimed_flops is None:
        unit = "FLOPs of a forward pass; the model claims none"
        return _not_applicable(executed_flops, unit, executed)
    ratio = float(executed / subject.claimed_flops(tokens_BT))
    verdict = PASS if 1 / FLOPS_RATIO <= ratio <= FLOPS_RATIO else FAIL
    unit = f"executed / claimed FLOPs; {executed:.4g} executed"
    return Result(_name(executed_flops), verdict, ratio, FLOPS_RATIO, unit, {"seed": seed})


def skipped_work(subject, seed=0):
    """Decoding spends nothing on tokens that the model claims to skip."""
    if subject.work is None:
        return _not_applicable(skipped_work, "the model claims to skip nothing")
    tokens_1T = random_tokens(subject, seed, batch=1)
    executed_T, claimed_T = (np.asarray(x_T, float) for x_T in subject.work(tokens_1T))
    over_T, where = executed_T > WORK_RATIO * claimed_T, {}
    if over_T.any():
        where = dict(position=int(over_T.argmax()), tokens=tokens_1T[0].tolist())
    number = float(executed_T.sum() / max(claimed_T.sum(), 1e-30)) if executed_T.any() else 0.0
    unit = f"executed / claimed work; {over_T.sum()} of {len(over_T)} tokens above their claim"
    verdict = FAIL if where else PASS
    return Result(_name(skipped_work), verdict, number, WORK_RATIO, unit, {"seed": seed, **where})


def residuals_once(subject, seed=0):
    """A layer whose parts add nothing is the identity."""
    layers = {name: parts for name, parts in subject.parts.items() if parts}
    if not layers:
        return _not_applicable(residuals_once, "no layers with known increments")
    tokens_BT, worst = random_tokens(subject, seed), _Worst(residuals_once, subject, seed)
    for name, parts in layers.items():
        with subject.without([name]):
            identity_BTV = subject.compute(tokens_BT)
        with subject.without(parts):
            moved_BT = change(identity_BTV, subject.compute(tokens_BT))
        worst.add(moved_BT, True, tokens_BT, layer=name)
    return worst.result()


def sleeping_parts(subject, seed=0):
    """Each part is worth something: nats a token that a text costs without it.

    Without a text: the largest change of logits of random tokens.
    """
    if not subject.parts:
        return _not_applicable(sleeping_parts, "no parts can be switched off")
    has_text = subject.text is not None
    tokens_BT = subject.text if has_text else random_tokens(subject, seed)
    logits_BTV, worth = subject.compute(tokens_BT), {}
    for name in subject.parts:
        with subject.without([name]):
            without_BTV = subject.compute(tokens_BT)
        if has_text:
            worth[name] = _loss(without_BTV, tokens_BT) - _loss(logits_BTV, tokens_BT)
        else:
            worth[name] = float(change(logits_BTV, without_BTV).max())
    least = min(worth, key=worth.get)
    tolerance = ASLEEP if has_text else subject.tolerance
    unit = f"{'nats a token' if has_text else STD} by {least}, the least of {len(worth)} parts"
    verdict = PASS if worth[least] >= tolerance else FAIL
    where = {"seed": seed, "worth": worth}
    return Result(_name(sleeping_parts), verdict, worth[least], tolerance, unit, where)


def _loss(logits_BTV, tokens_BT):
    """Mean nats a token of a text."""
    logits_BTV = logits_BTV[:, :-1] - logits_BTV[:, :-1].max(axis=-1, keepdims=True)
    chosen_BT = np.take_along_axis(logits_BTV, tokens_BT[:, 1:, None], 2)[..., 0]
    return float(np.mean(np.log(np.exp(logits_BTV).sum(axis=-1)) - chosen_BT))


CHECKS = (
    finite_logits,
    determinism,
    reads_its_tokens,
    no_look_ahead,
    batch_mates,
    row_length,
    padding,
    packed_neighbours,
    packed_as_if_alone,
    cached_decoding,
    chunked_prefill,
    copies_of_a_cache,
    executed_flops,
    skipped_work,
    residuals_once,
    sleeping_parts,
)


def certify(subject, seed=0, checks=CHECKS):
    """Yield the `Result` of each check; an exception in a later call than the first is a FAIL.

    Raises: UsageError for a model that cannot be called as its `Subject` says.
    """
    if subject.vocab_size < 2:
        raise UsageError(f"a vocabulary of {subject.vocab_size}: must have at least 2 tokens")
    if subject.length < 16:
        raise UsageError(f"a context of {subject.context} tokens: must be at least 16")
    try:
        logits_BTV = subject.compute(random_tokens(subject, seed))
    except UsageError:
        raise
    except Exception as error:
        shape = [BATCH, subject.length]
        raise UsageError(
            f"the model cannot be called on tokens {shape} of a vocabulary of "
            f"{subject.vocab_size}: {first_line(error)}"
        ) from error
    if not np.isfinite(logits_BTV).any(axis=-1).all():
        raise UsageError("logits of random tokens are NaN or infinite: mend the model first")
    for check in checks:
        try:
            yield check(subject, seed)
        except UsageError:
            raise
        except Exception as error:
            yield Result(_name(check), FAIL, unit=first_line(error), reproduction={"seed": seed})
