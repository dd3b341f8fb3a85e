"""The properties of a language model, and the interface of a model that they are held against.

A property is a generator of comparisons: (numbers [B, T] or a number, tokens [B, T], where). The
largest number must be within the tolerance. Arrays in `where` have one entry for each row.
Differences of logits are in standard deviations of the logits.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from efx.errors import UsageError, first_line

PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
BATCH, LENGTH = 8, 32
# A part is asleep below it, in nats a token of a text or standard deviations of the logits.
ASLEEP = 1e-3
# In place of infinity, which JSON has not.
FAR = 1e9


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to certify. Arrays that it gets are numpy; it may return those of any library.

    Attributes:
      logits: (tokens [B, T]) -> logits [B, T, V]. With `layouts` also (tokens, positions,
        segments), int [B, T]: `segments` are documents 1, 2, ... of a row and 0 for padding;
        `positions` begin at 0 in each document, and are -1 for padding.
      layouts: what a row may have besides one document: "padding" (on either side), "packing".
      context: the longest row. document_multiple: documents begin at multiples of it.
      tolerance: largest difference of two computations of the same logits, for float32.
      init_cache: (batch, size) -> empty cache of at most `size` tokens a row.
      decode: (cache, tokens [B, T], positions [B, T]) -> (logits, cache) of new tokens.
      ragged: new tokens of a call may have other positions in each row, -1 for padding at its end.
      flops: (tokens [B, T]) -> (executed, claimed) FLOPs of the forward pass.
      work: (tokens [1, T]) -> (executed, claimed) work of decoding them one by one, in any unit;
        the claim is that skipped tokens cost nothing.
      parts: {name: names of the parts that it consists of}. Without a part its increment is 0.
      without: (names of parts, tokens [B, T]) -> logits without these parts.
      text: (tokens [B, T] of a text) for `sleeping_parts`; None: random tokens.
    """

    logits: Callable
    vocab_size: int
    layouts: frozenset = frozenset()
    context: int = LENGTH
    document_multiple: int = 1
    tolerance: float = 1e-3
    init_cache: Callable | None = None
    decode: Callable | None = None
    ragged: bool = False
    flops: Callable | None = None
    work: Callable | None = None
    parts: dict = dataclasses.field(default_factory=dict)
    without: Callable | None = None
    text: Any = None

    @property
    def length(self):
        return min(LENGTH, self.context)

    @property
    def layers(self):
        """The parts that consist of others."""
        return {name: parts for name, parts in self.parts.items() if parts}

    def compute(self, tokens_BT, *layout, without=()):
        """Logits [B, T, V] in numpy, without some parts; UsageError for another shape."""
        logits = self.without(without, tokens_BT) if without else self.logits(tokens_BT, *layout)
        logits_BTV, expected = to_numpy(logits), (*tokens_BT.shape, self.vocab_size)
        if logits_BTV.shape != expected:
            raise UsageError(
                f"logits of tokens {list(tokens_BT.shape)} have shape {list(logits_BTV.shape)}: "
                f"expected {list(expected)} (rows, tokens, vocabulary); set --vocab-size to the "
                "number of columns, or return logits of all tokens"
            )
        return logits_BTV


@dataclasses.dataclass(frozen=True)
class Result:
    """A property of a model. `reproduction`: seed, row, position and tokens of `number`."""

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


def random_tokens(subject, seed, batch=BATCH):
    """int32 tokens [B, T] of a seed."""
    shape = batch, subject.length
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


def change(expected_BTV, got_BTV, mask_BT=True):
    """[B, T]: largest change of a logit where the mask is True, in standard deviations of the
    expected logits; `FAR` where one is finite and the other is not."""
    std = np.std(expected_BTV, where=np.isfinite(expected_BTV)) or 1.0
    with np.errstate(invalid="ignore"):
        gap_BTV = np.abs(got_BTV - expected_BTV) / std
    same_BTV = (got_BTV == expected_BTV) | (np.isnan(got_BTV) & np.isnan(expected_BTV))
    gap_BTV = np.where(same_BTV, 0, np.nan_to_num(gap_BTV, nan=FAR, posinf=FAR))
    return np.where(mask_BT, gap_BTV.max(axis=-1), 0)


# ---- the full pass -----------------------------------------------------------------------------


def finite_logits(subject, seed):
    """Logits are finite for every token of the vocabulary."""
    ids = np.random.default_rng(seed).permutation(subject.vocab_size).astype(np.int32)
    rows = -(-len(ids) // (BATCH * subject.length)) * BATCH
    for tokens_BT in np.split(np.resize(ids, (rows, subject.length)), rows // BATCH):
        yield (~np.isfinite(subject.compute(tokens_BT))).sum(axis=-1), tokens_BT, {}


def determinism(subject, seed):
    """Logits of the same tokens are the same bits, with another call in between."""
    tokens_BT = random_tokens(subject, seed)
    before_BTV = subject.compute(tokens_BT)
    subject.compute(other_tokens(subject, seed, tokens_BT))
    yield change(before_BTV, subject.compute(tokens_BT)), tokens_BT, {}


def _changes_of_places(subject, seed, tokens_BT, is_changed):
    """Yield for each place of a row, `BATCH` at a time, (places [B], change of logits [B, T]) when
    the tokens at the positions with is_changed(position, place) are others."""
    others_BT, before_BTV = other_tokens(subject, seed, tokens_BT), subject.compute(tokens_BT)
    position_T = np.arange(subject.length)
    for start in range(0, subject.length, BATCH):
        place_B = np.minimum(position_T[:BATCH] + start, subject.length - 1)
        is_changed_BT = is_changed(position_T, place_B[:, None])
        after_BTV = subject.compute(np.where(is_changed_BT, others_BT, tokens_BT))
        yield place_B, change(before_BTV, after_BTV)


def reads_its_tokens(subject, seed):
    """Logits change with the token at their position, and some with an earlier token."""
    tokens_BT, position_T = random_tokens(subject, seed), np.arange(subject.length)
    reads_earlier = False
    for place_B, moved_BT in _changes_of_places(subject, seed, tokens_BT, np.equal):
        reads_earlier |= np.any(moved_BT[position_T > place_B[:, None]])
        is_unread_BT = (moved_BT == 0) & (position_T == place_B[:, None])
        yield is_unread_BT, tokens_BT, {"reads": "not its token"}
    yield np.full(tokens_BT.shape, not reads_earlier), tokens_BT, {"reads": "no earlier token"}


def no_look_ahead(subject, seed):
    """Logits do not change with later tokens, for each position of a row.

    By perturbation: a gradient does not see what top-k selects.
    """
    tokens_BT, position_T = random_tokens(subject, seed), np.arange(subject.length)
    for place_B, moved_BT in _changes_of_places(subject, seed, tokens_BT, np.greater_equal):
        earlier_BT = np.where(position_T < place_B[:, None], moved_BT, 0)
        yield earlier_BT, tokens_BT, {"changed_from": place_B}


def batch_mates(subject, seed):
    """Logits of a row do not change with the other rows."""
    tokens_BT = random_tokens(subject, seed)
    kept_B1 = np.isin(np.arange(BATCH), (0, BATCH // 2))[:, None]
    others_BT = np.where(kept_B1, tokens_BT, other_tokens(subject, seed, tokens_BT))
    yield change(subject.compute(tokens_BT), subject.compute(others_BT), kept_B1), tokens_BT, {}


def row_length(subject, seed):
    """Logits of the first tokens are those of the tokens alone, in a smaller batch."""
    tokens_BT, prefix = random_tokens(subject, seed), 5 * subject.length // 8
    alone_BTV = subject.compute(tokens_BT[:2, :prefix])
    yield change(alone_BTV, subject.compute(tokens_BT)[:2, :prefix]), tokens_BT, {}


# ---- rows with padding or several documents ----------------------------------------------------


def layout(rows):
    """(positions, segments), int32 [B, T], of rows that are lists of the sizes of their documents;
    a negative size is padding."""
    positions, segments = [], []
    for row in rows:
        sizes, is_real = np.abs(row), np.array(row) > 0
        documents = np.where(is_real, np.cumsum(is_real), 0)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        segments.append(np.repeat(documents, sizes))
        positions.append(np.where(segments[-1] > 0, np.arange(len(starts)) - starts, -1))
    return np.array(positions, np.int32), np.array(segments, np.int32)


def _as_if_alone(subject, tokens_BT, rows):
    """Compare the documents of rows (see `layout`) with each alone in its row."""
    positions_BT, segments_BT = layout(rows)
    got_BTV = subject.compute(tokens_BT, positions_BT, segments_BT)
    whole, position_T = layout([[subject.length]] * BATCH), np.arange(subject.length)
    for document in range(1, segments_BT.max() + 1):
        is_inside_BT = segments_BT == document
        start_B1 = is_inside_BT.argmax(axis=1)[:, None]
        # A document alone is the beginning of a longer one: logits do not depend on later tokens.
        source_BT = (position_T + start_B1) % subject.length
        alone_BTV = subject.compute(np.take_along_axis(tokens_BT, source_BT, 1), *whole)
        back_BT = (position_T - start_B1) % subject.length
        expected_BTV = np.take_along_axis(alone_BTV, back_BT[..., None], 1)
        yield change(expected_BTV, got_BTV, is_inside_BT), tokens_BT, {"sizes": np.array(rows)}


def padding(subject, seed):
    """Logits of rows with padding on the left or on the right are those without padding."""
    multiple, length = subject.document_multiple, subject.length
    pads = multiple * np.minimum(np.arange(BATCH) % 4, length // 2 // multiple)
    right = [[length - pad, -pad] for pad in pads]
    left = [[-pad, length - pad] for pad in pads]
    for rows in (right, left):
        yield from _as_if_alone(subject, random_tokens(subject, seed), rows)


def packed_as_if_alone(subject, seed):
    """Logits of documents in a packed row are those of each document alone."""
    multiple = subject.document_multiple
    size = 3 * subject.length // 8 // multiple * multiple
    sizes = [size, size, subject.length - 2 * size]
    yield from _as_if_alone(subject, random_tokens(subject, seed), [sizes] * BATCH)


def packed_neighbours(subject, seed):
    """Logits of a document in a packed row do not change with the other documents."""
    sizes = [part * subject.length // 32 for part in (13, 11, 3)]  # none begins with a group
    sizes.append(subject.length - sum(sizes))
    tokens_BT, (positions_BT, segments_BT) = random_tokens(subject, seed), layout([sizes] * BATCH)
    others_BT = other_tokens(subject, seed, tokens_BT)
    before_BTV = subject.compute(tokens_BT, positions_BT, segments_BT)
    for document in (1, 2):
        is_changed_BT = segments_BT == document
        changed_BT = np.where(is_changed_BT, others_BT, tokens_BT)
        after_BTV = subject.compute(changed_BT, positions_BT, segments_BT)
        where = {"sizes": sizes, "changed_document": document}
        yield change(before_BTV, after_BTV, ~is_changed_BT), tokens_BT, where


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
        inside_BT = np.arange(width) < new_B[:, None]
        place_BT = np.minimum(done_B[:, None] + np.arange(width), length - 1)
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


def cached_decoding(subject, seed, single=1):
    """Logits of prompts in chunks and then single tokens, from a cache, are those of the full pass.

    Rows that need not be equal have prompts of different lengths, and end one after the other.

    Args:
      single: width of the call that reads single tokens, padded.
    """
    tokens_BT, end_B = random_tokens(subject, seed), np.full(BATCH, subject.length)
    prompt_B = np.array([10, 9, 7, 6, 5, 4, 2, 1]) if subject.ragged else np.full(BATCH, 10)
    calls, cache = chunks(prompt_B, end_B, 5, single), subject.init_cache(BATCH, subject.length)
    decoded_BTV, _ = read(subject.decode, cache, tokens_BT, calls)
    yield change(subject.compute(tokens_BT), decoded_BTV), tokens_BT, {"prompt": prompt_B}


PROMPT, CHUNKS = 15, (1, 3, 5)


def chunked_prefill(subject, seed):
    """Logits of a prompt do not depend on the size of its chunks, nor on that of the cache."""
    tokens_BT, end_B = random_tokens(subject, seed, batch=2), np.full(2, PROMPT)
    expected_BTV, prompt_BT = subject.compute(tokens_BT)[:, :PROMPT], tokens_BT[:, :PROMPT]
    sizes = (PROMPT + 1, CHUNKS[1]), *((subject.length, chunk) for chunk in CHUNKS)
    for size, chunk in sizes:
        # With padding one program, as wide as the widest chunk, reads all.
        width = CHUNKS[-1] if subject.ragged else chunk
        calls = [(width, new_B) for _, new_B in chunks(end_B, end_B, chunk)]
        got_BTV, _ = read(subject.decode, subject.init_cache(2, size), prompt_BT, calls)
        yield change(expected_BTV, got_BTV), prompt_BT, {"chunk": chunk, "cache": size}


def copies_of_a_cache(subject, seed):
    """A copy of a cache (`copy.deepcopy`) does not change when the other copy is used."""
    tokens_BT, end = random_tokens(subject, seed, batch=2), PROMPT + 1
    others_BT = other_tokens(subject, seed, tokens_BT)
    positions_BT = np.tile(np.arange(end, dtype=np.int32), (2, 1))
    cache = subject.init_cache(2, subject.length)
    _, cache = subject.decode(cache, tokens_BT[:, :PROMPT], positions_BT[:, :PROMPT])

    def step(cache, tokens_BT):
        new_B1 = tokens_BT[:, PROMPT:end]
        return to_numpy(subject.decode(cache, new_B1, positions_BT[:, PROMPT:])[0])

    before_B1V = step(copy.deepcopy(cache), tokens_BT)
    step(copy.deepcopy(cache), others_BT)
    yield change(before_B1V, step(cache, tokens_BT)), tokens_BT, {}


# ---- work and parts ----------------------------------------------------------------------------


def executed_flops(subject, seed):
    """A forward pass executes the FLOPs that the model claims."""
    tokens_BT = random_tokens(subject, seed)
    executed, claimed = subject.flops(tokens_BT)
    ratio = np.float64(executed / claimed)
    yield max(ratio, 1 / ratio), tokens_BT, {}


def skipped_work(subject, seed):
    """Decoding spends nothing on tokens that the model claims to skip."""
    tokens_1T = random_tokens(subject, seed, batch=1)
    executed, claimed = subject.work(tokens_1T)
    yield np.float64(executed / max(claimed, 1 / FAR)), tokens_1T, {}


def residuals_once(subject, seed):
    """A layer without its parts is the identity."""
    tokens_BT = random_tokens(subject, seed)
    for name, parts in subject.layers.items():
        identity_BTV = subject.compute(tokens_BT, without=[name])
        got_BTV = subject.compute(tokens_BT, without=parts)
        yield change(identity_BTV, got_BTV), tokens_BT, {"layer": name}


def sleeping_parts(subject, seed):
    """Each part is worth something: nats a token that a text costs without it.

    Without a text: the largest change of logits of random tokens.
    """
    has_text = subject.text is not None
    tokens_BT = subject.text if has_text else random_tokens(subject, seed)
    logits_BTV, worth = subject.compute(tokens_BT), {}
    for name in subject.parts:
        without_BTV = subject.compute(tokens_BT, without=[name])
        if has_text:
            worth[name] = _loss(without_BTV, tokens_BT) - _loss(logits_BTV, tokens_BT)
        else:
            worth[name] = float(change(logits_BTV, without_BTV).max())
    asleep = sum(nats < ASLEEP for nats in worth.values())
    yield np.float64(asleep), tokens_BT, {"worth": worth}


def _loss(logits_BTV, tokens_BT):
    """Mean nats a token of a text."""
    logits_BTV = logits_BTV[:, :-1] - logits_BTV[:, :-1].max(axis=-1, keepdims=True)
    chosen_BT = np.take_along_axis(logits_BTV, tokens_BT[:, 1:, None], 2)[..., 0]
    return float(np.mean(np.log(np.exp(logits_BTV).sum(axis=-1)) - chosen_BT))


# {property: (what a Subject must have, tolerance, unit)}; None: the tolerance of the Subject.
# Programs execute empty slots, hidden scores and a padded vocabulary; work of skipped tokens has
# no such excuse.
STD = "std of the logits"
CHECKS = {
    finite_logits: ("logits", 0, "logits of a token that are not finite"),
    determinism: ("logits", 0, STD),
    reads_its_tokens: ("logits", 0, "1: a token is not read"),
    no_look_ahead: ("logits", None, STD),
    batch_mates: ("logits", None, STD),
    row_length: ("logits", None, STD),
    padding: ("padding", None, STD),
    packed_neighbours: ("packing", None, STD),
    packed_as_if_alone: ("packing", None, STD),
    cached_decoding: ("decode", None, STD),
    chunked_prefill: ("decode", None, STD),
    copies_of_a_cache: ("decode", None, STD),
    executed_flops: ("flops", 1.4, "executed / claimed FLOPs, or its inverse"),
    skipped_work: ("work", 1.05, "executed / claimed work"),
    residuals_once: ("layers", None, STD),
    sleeping_parts: ("parts", 0, f"parts worth less than {ASLEEP} (nats a token, or std)"),
}


def name_of(prop):
    return prop.__name__.replace("_", " ")


def check(prop, subject, seed=0, **options):
    """The `Result` of a property; `options`: of the property."""
    name = name_of(prop)
    needed, tolerance, unit = CHECKS[prop]
    if needed not in subject.layouts and not getattr(subject, needed, None):
        return Result(name, NOT_APPLICABLE, unit=f"the model has no {needed}")
    tolerance = subject.tolerance if tolerance is None else tolerance
    number, reproduction = -1, {}
    for number_BT, tokens_BT, where in prop(subject, seed, **options):
        if number_BT.max() > number:
            number, reproduction = float(number_BT.max()), {"seed": seed, **where}
            if number_BT.size > 1:
                row, position = map(int, np.unravel_index(number_BT.argmax(), number_BT.shape))
                of_row = {k: v[row].tolist() for k, v in where.items() if isinstance(v, np.ndarray)}
                tokens = tokens_BT[row].tolist()
                reproduction |= dict(row=row, position=position, **of_row, tokens=tokens)
    verdict = PASS if number <= tolerance else FAIL
    return Result(name, verdict, number, tolerance, unit, reproduction)


def certify(subject, seed=0):
    """Yield the `Result` of each property; an exception in a later call than the first is a FAIL.

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
        raise UsageError(
            f"the model cannot be called on tokens {[BATCH, subject.length]} of a vocabulary of "
            f"{subject.vocab_size}: {first_line(error)}"
        ) from error
    if not np.isfinite(logits_BTV).any(axis=-1).all():
        raise UsageError("logits of random tokens are NaN or infinite: mend the model first")
    for prop in CHECKS:
        try:
            yield check(prop, subject, seed)
        except UsageError:
            raise
        except Exception as error:
            unit = first_line(error)
            yield Result(name_of(prop), FAIL, unit=unit, reproduction={"seed": seed})
