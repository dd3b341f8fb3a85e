"""Sampling: distribution of the tokens, end of a text, compiled programs, meshes, statistics."""

import functools
import math

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx import models, sampling
from efx.configs import common
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.layers import stack
from efx.parallel import sharding
from efx.routing.selection import HEADROOM

CONTEXT = 24
MOD = {
    "depth_routing.kind": "mod",
    "depth_routing.capacity": 0.4,
    "depth_routing.slack": 1.0,
    "depth_routing.causal": "aux_loss",
}
LETTERS = CharTokenizer("\nabcdefghijklmnopqrstuvwxyz")


@functools.cache
def build(**changes):
    """(model, parameters): a small routed one over the letters."""
    model = families.make({**MOD, **changes}, vocab_size=LETTERS.vocab_size, context=CONTEXT)
    return model, families.random_params(model)


@functools.cache
def greedy(batch_size=1):
    return sampling.Sampler(build()[0], batch_size=batch_size, temperature=0.0)


@functools.cache
def warm(batch_size=1):
    return sampling.Sampler(build()[0], batch_size=batch_size, temperature=1.0, top_k=12, top_p=0.9)


def variables():
    return {"params": build()[1]}


def make(sampler, prompts, *, n=12, seeds=None, params=None, **options):
    """The new tokens of each row, as lists."""
    seeds = list(range(len(prompts))) if seeds is None else seeds
    rows = [[] for _ in prompts]
    params = build()[1] if params is None else params
    variables = {"params": params}
    for new in sampler.tokens(variables, prompts, max_new_tokens=n, seeds=seeds, **options):
        for row, ids in zip(rows, new, strict=True):
            row += ids
    return rows


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(1, LETTERS.vocab_size, length).tolist()


def text_sampler(tokenizer=LETTERS, batch_size=1, model=None, **changes):
    """A sampler by a config.sample block."""
    config = common.base().sample
    config.update({"prompt": "a", "max_new_tokens": 30, "temperature": 0.0, **changes})
    return sampling.TextSampler(model or build()[0], tokenizer, config, batch_size=batch_size)


# ---- the tokens -----------------------------------------------------------------------------


@functools.cache
def forward():
    model, params = build()
    return families.jit(lambda tokens_1T: model.apply({"params": params}, tokens_1T))


def reference(ids, count):
    """Greedy continuation by full forward passes, with the documented rule for long texts."""
    window, new = list(ids), []
    for _ in range(count):
        if len(window) > CONTEXT:
            window = window[-(CONTEXT // 2) :]
        padded = np.zeros((1, CONTEXT), np.int32)  # nothing depends on what comes later
        padded[0, : len(window)] = window
        new.append(int(jnp.argmax(forward()(padded)[0, len(window) - 1])))
        window.append(new[-1])
    return new


@pytest.mark.parametrize("length", [1, 7, CONTEXT])
def test_greedy_is_the_argmax_of_the_full_forward(length):
    """Also after the text has outgrown the context more than once."""
    (new,) = make(greedy(), [prompt(length)], n=45)
    assert new == reference(prompt(length), 45)
    assert greedy().stats["slides"] == (length + 45 - 2 - CONTEXT // 2) // (CONTEXT // 2)


def test_rows_of_a_batch_are_as_if_alone():
    """Prompts of different lengths, outgrowing the context at different times."""
    prompts = [prompt(length, seed=length) for length in (3, CONTEXT, 16, 1)]
    for several, alone in ((greedy(4), greedy()), (warm(4), warm())):
        rows = make(several, prompts, n=40)
        assert len({tuple(row) for row in rows}) == 4
        for b, row in enumerate(rows):
            assert make(alone, [prompts[b]], n=40, seeds=[b]) == [row], b


def test_a_prompt_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(sampling, "PREFILL", 5)
    sampler = sampling.Sampler(build()[0], temperature=0.0)
    for length in (5, 23):
        assert make(sampler, [prompt(length)], n=3) == [reference(prompt(length), 3)]


def test_the_seed_decides():
    first = make(warm(), [prompt(4)], n=20, seeds=[7])
    assert first == make(warm(), [prompt(4)], n=20, seeds=[7])
    others = [make(warm(), [prompt(4)], n=20, seeds=[seed]) for seed in (8, 9, -1)]
    assert all(other != first for other in others) and others[0] != others[1]
    # What was drawn does not depend on how many tokens are drawn or shown at a time.
    assert make(warm(), [prompt(4)], n=13, seeds=[7])[0] == first[0][:13]


def options(temperature, top_k, top_p):
    return {
        "temperature": np.float32(temperature),
        "top_k": np.int32(top_k),
        "top_p": np.float32(top_p),
    }


def probabilities(logits_V, temperature, top_k, top_p):
    """By definition: sort, cut after k, cut after the first that reach top_p, renormalise."""
    p_V = np.exp((np.float64(logits_V) - logits_V.max()) / temperature)
    order = np.argsort(-p_V)
    kept = order[: top_k or len(order)]
    p_kept = p_V[kept] / p_V[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(p_kept), top_p)) + 1]
    out_V = np.zeros_like(p_V)
    out_V[kept] = p_V[kept] / p_V[kept].sum()
    return out_V


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(0.5, 0, 1.0), (1.5, 5, 0.7), (1e-3, 0, 1.0), (2.0, 99, 1.0)],
)
def test_frequencies_follow_the_settings(temperature, top_k, top_p):
    """Of 20000 draws from six tokens; the next draws are independent of them."""
    logits_V, count = np.array([0.1, 2.0, -1.0, 1.0, 0.0, 1.5], np.float32), 20_000
    keys, logits_BV = jax.vmap(jax.random.key)(jnp.arange(count)), jnp.tile(logits_V, (count, 1))
    drawn_B, next_B = (
        jax.jit(sampling.choose)(logits_BV, keys, step, options(temperature, top_k, top_p))
        for step in (5, 6)
    )
    found_V = np.bincount(drawn_B, minlength=6) / count
    expected_V = probabilities(logits_V, temperature, top_k, top_p)
    np.testing.assert_array_equal(found_V > 0, expected_V > 0.001)
    np.testing.assert_allclose(found_V, expected_V, atol=0.015)
    assert np.mean(drawn_B == next_B) == pytest.approx(np.sum(expected_V**2), abs=0.02)


@pytest.mark.parametrize(
    "probs, top_k, top_p, kept",
    [
        ([0.5, 0.3, 0.1, 0.1], 0, 0.8, [0, 1]),
        ([0.1, 0.3, 0.1, 0.5], 0, 0.81, [0, 1, 3]),  # of the tied tokens the lower id
        ([0.4, 0.3, 0.3], 0, 1e-40, [0]),
        ([0.4, 0.3, 0.2, 0.1], 2, 0.55, [0]),  # of the mass of the top k
    ],
)
def test_nucleus_is_the_smallest_set_whose_mass_reaches_top_p(probs, top_k, top_p, kept):
    logits_BV = jnp.log(jnp.array([probs], jnp.float32))
    filtered_BV = jax.jit(sampling.filter_logits)(logits_BV, np.int32(top_k), np.float32(top_p))
    assert np.flatnonzero(np.isfinite(filtered_BV[0])).tolist() == kept


# ---- the end of a text -------------------------------------------------------------------------


def test_the_end_of_a_document_ends_a_text():
    """The stop token is left out; other rows continue; an ended row counts in no statistic."""
    prompts = [prompt(5), prompt(9, seed=1)]
    first, second = (reference(ids, 20) for ids in prompts)
    stop = next(i for i in first[3:] if i not in second)  # ends the first row only
    sampler = sampling.Sampler(build()[0], batch_size=4, temperature=0.0, stop_ids=(stop,))
    rows = make(sampler, prompts * 2, n=20)
    assert rows == [first[: first.index(stop)], second] * 2
    assert sampler.stats["new_tokens"] == 2 * (len(rows[0]) + 20)


def test_text_and_stop_text():
    whole = "".join(text_sampler().stream(variables(), "abc", seed=0))
    assert whole == LETTERS.decode(reference(LETTERS.encode("abc"), 30))
    for start, stop in ((0, 3), (14, 18), (27, 30)):  # the second crosses two calls
        sampler = text_sampler(stop=whole[start:stop])
        pieces = list(sampler.stream(variables(), "abc", seed=0))
        assert "".join(pieces) == whole[: whole.index(whole[start:stop])]
        assert all(pieces)
    # A mere prefix of the stop text is returned in the end.
    assert "".join(text_sampler(stop=whole[-2:] + "!").stream(variables(), "abc", seed=0)) == whole


def test_texts_stop_row_by_row():
    prompts = ["abc", "xyz"]
    alone = ["".join(text_sampler().stream(variables(), p, seed=i)) for i, p in enumerate(prompts)]
    stop = next(alone[0][i : i + 2] for i in range(8, 28) if alone[0][i : i + 2] not in alone[1])
    sampler = text_sampler(batch_size=4, stop=stop)
    texts = sampler.texts(variables(), prompts * 2, seeds=range(4))
    assert texts == [alone[0][: alone[0].index(stop)], alone[1]] * 2
    # All rows have ended: sampling stops.
    sampler = text_sampler(batch_size=4, stop=alone[0][0], max_new_tokens=500)
    assert sampler.texts(variables(), ["abc"] * 4, seeds=range(4)) == [""] * 4
    assert sampler.stats["new_tokens"] == 4 * sampling.STREAM


def test_a_character_is_streamed_when_all_its_bytes_are_there():
    class Made:
        def tokens(self, *arguments, **keywords):
            yield from ([[i]] for i in "aé☃".encode() + b"\xe2")

    sampler = text_sampler(ByteTokenizer(), model=families.make({}, vocab_size=257))
    sampler.sampler = Made()
    assert list(sampler.stream(None, "a", seed=0)) == ["a", "é", "☃", "\N{REPLACEMENT CHARACTER}"]


def test_an_empty_prompt_is_the_start_of_a_document():
    for tokenizer, start in ((ByteTokenizer(), 256), (LETTERS, 0)):
        model = families.make({}, vocab_size=tokenizer.vocab_size)
        assert text_sampler(tokenizer, model=model, prompt="").encode("") == [start]


# ---- refusals ----------------------------------------------------------------------------------


def test_bad_prompts_are_refused():
    refused(lambda: text_sampler(prompt="a" * (CONTEXT + 1)), "config.sample.prompt")
    refused(lambda: text_sampler(prompt="Zürich"), "config.sample.prompt", "'Z'")
    refused(lambda: list(text_sampler().stream(variables(), "a" * 25, seed=0)), "prompt")


# ---- compilation -------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """The number of compilations so far in this test, cached ones included."""
    names = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(names)
    jax.monitoring.unregister_event_duration_listener(listen)


def test_everything_is_compiled_once(compiled):
    """Prefill, decoding and the empty cache, whatever prompts, seeds, settings and parameters."""
    other = jax.device_put(jax.tree.map(lambda x: x * 1.01, build()[1]), jax.devices()[0])
    before = compiled()
    sampler = sampling.Sampler(build()[0], batch_size=2, cache_size=20, top_p=0.9)
    make(sampler, [prompt(1), prompt(3)])
    assert compiled() - before == 3
    for top_k in (0, 3):
        options = dict(cache_size=20, temperature=0.7, top_k=top_k)
        sampler = sampling.Sampler(build()[0], batch_size=2, **options)
        for lengths in ((1, 4), (20, 2), (7, 19)):
            prompts = [prompt(length) for length in lengths]
            make(sampler, prompts, n=30, seeds=[5, 6])
            make(sampler, prompts, n=7, params=other)
    assert compiled() - before == 3


# ---- on a mesh ---------------------------------------------------------------------------------


def test_split_parameters_give_the_text_of_one_device_and_stay_split():
    """No device holds the whole of a split parameter while the text is made."""
    model, params = build(vocab_multiple=8)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | dict(data=2, fsdp=2, tensor=2))
    boxed = models.variable_shapes(model)["params"]
    layout = sharding.tree_shardings(boxed, mesh, sharding.DEFAULT_RULES)
    split_params = jax.device_put(params, layout)
    split_shapes = {x.shape for x in jax.tree.leaves(split_params) if not x.is_fully_replicated}
    assert len(split_shapes) >= 3
    prompts = [prompt(3, seed=1), prompt(20, seed=2)]
    sampler = sampling.Sampler(model, batch_size=2, temperature=1.0, top_k=12, top_p=0.9)
    expected = make(sampler, prompts, n=30, params=params)
    before = jax.live_arrays()
    known = set(map(id, before))
    pieces = sampler.tokens({"params": split_params}, prompts, max_new_tokens=30, seeds=[0, 1])
    rows = [[], []]
    for new in pieces:
        rows = [row + ids for row, ids in zip(rows, new, strict=True)]
        created = [x for x in jax.live_arrays() if id(x) not in known]
        assert not [x.shape for x in created if x.is_fully_replicated and x.shape in split_shapes]
    assert rows == expected


# ---- statistics --------------------------------------------------------------------------


@functools.cache
def selected():
    """Tokens [1, T] -> whether the router selects each of them [T], before the capacity limit."""
    model, params = build()

    @families.jit
    def scores(tokens_1T):
        _, state = model.apply(
            {"params": params}, tokens_1T, mutable=["intermediates"],
            capture_intermediates=lambda module, _: isinstance(module, stack.Layer),
        )  # fmt: skip
        below_TD = state["intermediates"]["layers"]["block_0"]["__call__"][0][0]
        return below_TD @ params["layers"]["block_1"]["router"] > 0

    return scores


def num_admitted(selected_T):
    """Number of tokens under the causal limit, one after the other."""
    admitted = 0
    for n, is_selected in enumerate(selected_T, start=1):
        limit = math.ceil(0.4 * n - 1e-3) + HEADROOM
        admitted += bool(is_selected) and admitted < limit
    return admitted


def test_statistics_count_the_tokens_that_the_router_selects():
    """A token counts each time that it is read, when a text outgrows the context too."""
    prompts, n = [prompt(length, seed=length) for length in (1, 5, 9, 20)], 60
    rows = make(greedy(4), prompts, n=n)
    read, routed, overflow, slides = 0, 0, 0, 0
    for ids, new in zip(prompts, rows, strict=True):
        text, start, end = ids + new, 0, 0
        while end < len(text):
            # The next window starts with the last half of this one.
            end = min(start + CONTEXT, len(text))
            tokens_1T = np.zeros((1, CONTEXT), np.int32)
            tokens_1T[0, : end - start] = text[start:end]
            selected_T = selected()(tokens_1T)[: end - start]
            count, admitted = int(np.sum(selected_T)), num_admitted(selected_T)
            read, routed = read + end - start, routed + admitted
            overflow, slides = overflow + count - admitted, slides + (end < len(text))
            start = end + 1 - CONTEXT // 2
    stats = greedy(4).stats
    assert (stats["new_tokens"], stats["slides"]) == (4 * n, slides)
    assert stats["overflow"] == overflow
    assert stats["routed_fraction"] == pytest.approx(routed / read)
    # Keys, values and positions of four rows; a few counters.
    cached = 4 * families.cache_bytes(build()[0], CONTEXT) + 4 * 4 * (CONTEXT + 14)
    assert 0 <= stats["cache_bytes"] - cached <= 4 * 32
