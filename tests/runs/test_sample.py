"""Sampling: distribution of the tokens, end of a text, compiled programs, meshes, statistics."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx import models, sampling
from efx.configs import common
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.parallel import sharding

CONTEXT = 24
MOD = {
    "depth_routing.kind": "mod",
    "depth_routing.capacity": 0.4,
    "depth_routing.slack": 1.0,
    "depth_routing.causal_decision": "aux_loss",
}
LETTERS = CharTokenizer("\nabcdefghijklmnopqrstuvwxyz")
GREEDY, WARM = dict(temperature=0.0), dict(temperature=1.0, top_k=12, top_p=0.9)


@functools.cache
def build(**changes):
    """(model, its variables): a small routed one over the letters."""
    model = families.make({**MOD, **changes}, vocab_size=LETTERS.vocab_size, context=CONTEXT)
    return model, {"params": families.random_params(model)}


def sampler_of(batch_size=1, **options):
    return sampling.Sampler(build()[0], batch_size=batch_size, **options)


def generate(sampler, prompts, *, n=12, seeds=None, variables=None):
    """The new tokens of each row, as lists."""
    seeds = range(len(prompts)) if seeds is None else seeds
    rows = [[] for _ in prompts]
    for new in sampler.tokens(variables or build()[1], prompts, max_new_tokens=n, seeds=seeds):
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
    model, variables = build()
    return families.jit(lambda tokens_1T: model.apply(variables, tokens_1T))


def reference(ids, count):
    """Greedy continuation by full forward passes, with the documented rule for long texts."""
    window, new = list(ids), []
    for _ in range(count):
        if len(window) > CONTEXT:
            window = window[-(CONTEXT // 2) :]
        padded = np.zeros((1, CONTEXT), np.int32)  # nothing depends on later tokens
        padded[0, : len(window)] = window
        new.append(int(jnp.argmax(forward()(padded)[0, len(window) - 1])))
        window.append(new[-1])
    return new


@pytest.mark.parametrize("length", [1, 7, CONTEXT])
def test_greedy_is_the_argmax_of_the_full_forward(length):
    """Also after the text has outgrown the context more than once."""
    assert generate(sampler_of(**GREEDY), [prompt(length)], n=45) == [reference(prompt(length), 45)]


@pytest.mark.parametrize("options", [GREEDY, WARM])
def test_a_row_does_not_depend_on_its_batch(options):
    """Prompts of different lengths, outgrowing the context at different times."""
    prompts = [prompt(length, seed=length) for length in (3, CONTEXT, 16, 1)]
    rows = generate(sampler_of(4, **options), prompts, n=40)
    assert len(set(map(tuple, rows))) == 4
    for b, row in enumerate(rows):
        assert generate(sampler_of(**options), [prompts[b]], n=40, seeds=[b]) == [row], b


def test_a_prompt_may_be_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(sampling, "PREFILL", 5)
    for length in (5, 23):
        new = generate(sampler_of(**GREEDY), [prompt(length)], n=3)
        assert new == [reference(prompt(length), 3)]


def test_the_seed_decides():
    sampler, ids = sampler_of(**WARM), [prompt(4)]
    (first,), *others = (generate(sampler, ids, n=20, seeds=[seed])[:1] for seed in (7, 8, 9, -1))
    assert len({tuple(first), *(tuple(row) for (row,) in others)}) == 4
    # Also where fewer tokens are drawn.
    assert generate(sampler, ids, n=13, seeds=[7]) == [first[:13]]


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
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn_B, next_B = (jax.jit(sampling.choose)(logits_BV, keys, i, options) for i in (5, 6))
    found_V = np.bincount(drawn_B, minlength=6) / count
    expected_V = probabilities(logits_V, temperature, top_k, top_p)
    np.testing.assert_array_equal(found_V > 0, expected_V > 0.001)
    np.testing.assert_allclose(found_V, expected_V, atol=0.015)
    assert np.mean(drawn_B == next_B) == pytest.approx(np.sum(expected_V**2), abs=0.02)


@pytest.mark.parametrize(
    "probs, top_k, top_p, kept",
    [
        ([0.5, 0.3, 0.1, 0.1], 0, 0.8, [0, 1]),
        ([0.1, 0.3, 0.2, 0.4], 0, 0.71, [1, 2, 3]),
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
    sampler = sampler_of(4, **GREEDY, stop_ids=(stop,))
    rows = generate(sampler, prompts * 2, n=20)
    assert rows == [first[: first.index(stop)], second] * 2
    assert sampler.stats["new_tokens"] == 2 * (len(rows[0]) + 20)


def test_text_and_stop_text():
    whole = "".join(text_sampler().stream(build()[1], "abc", seed=0))
    assert whole == LETTERS.decode(reference(LETTERS.encode("abc"), 30))
    for start, stop in ((0, 3), (14, 18), (27, 30)):  # the second crosses two calls
        sampler = text_sampler(stop=whole[start:stop])
        pieces = list(sampler.stream(build()[1], "abc", seed=0))
        assert "".join(pieces) == whole[: whole.index(whole[start:stop])]
        assert all(pieces)
    # A mere prefix of the stop text is returned in the end.
    assert "".join(text_sampler(stop=whole[-2:] + "!").stream(build()[1], "abc", seed=0)) == whole


def test_texts_stop_row_by_row():
    prompts = ["abc", "xyz"]
    alone = ["".join(text_sampler().stream(build()[1], p, seed=i)) for i, p in enumerate(prompts)]
    stop = next(alone[0][i : i + 2] for i in range(8, 28) if alone[0][i : i + 2] not in alone[1])
    sampler = text_sampler(batch_size=4, stop=stop)
    texts = sampler.texts(build()[1], prompts * 2, seeds=range(4))
    assert texts == [alone[0][: alone[0].index(stop)], alone[1]] * 2
    # All rows have ended: sampling stops.
    sampler = text_sampler(batch_size=4, stop=alone[0][0], max_new_tokens=500)
    assert sampler.texts(build()[1], ["abc"] * 4, seeds=range(4)) == [""] * 4
    assert sampler.sampler.stats["new_tokens"] == 4 * sampling.STREAM


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
    refused(lambda: list(text_sampler().stream(build()[1], "a" * 25, seed=0)), "prompt")


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
    generate(sampler_of(2, cache_size=20, top_p=0.9), [prompt(1), prompt(3)])
    assert compiled() - before == 3
    for top_k in (0, 3):
        sampler = sampler_of(2, cache_size=20, temperature=0.7, top_k=top_k)
        for lengths in ((1, 4), (20, 2), (7, 19)):
            prompts = [prompt(length) for length in lengths]
            generate(sampler, prompts, n=30, seeds=[5, 6])
            generate(sampler, prompts, n=7, variables=other)
    assert compiled() - before == 3


# ---- on a mesh ---------------------------------------------------------------------------------


def test_split_parameters_give_the_text_of_one_device_and_stay_split():
    """No device holds the whole of a split parameter while the text is made."""
    model, variables = build(vocab_multiple=8)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | dict(data=2, fsdp=2, tensor=2))
    boxed = {"params": models.variable_shapes(model)["params"]}
    layout = sharding.tree_shardings(boxed, mesh, sharding.DEFAULT_RULES)
    split = jax.device_put(variables, layout)
    split_shapes = {x.shape for x in jax.tree.leaves(split) if not x.is_fully_replicated}
    assert len(split_shapes) >= 3
    prompts = [prompt(3, seed=1), prompt(20, seed=2)]
    sampler = sampling.Sampler(model, batch_size=2, **WARM)
    expected, rows = generate(sampler, prompts, n=30, variables=variables), [[], []]
    known = jax.live_arrays()
    for new in sampler.tokens(split, prompts, max_new_tokens=30, seeds=[0, 1]):
        rows = [row + ids for row, ids in zip(rows, new, strict=True)]
        created = {id(x): x for x in jax.live_arrays()}
        for x in known:
            created.pop(id(x), None)
        whole = [x.shape for x in created.values() if x.is_fully_replicated]
        assert not split_shapes.intersection(whole)
    assert rows == expected


# ---- statistics --------------------------------------------------------------------------


def test_statistics_count_each_token_as_often_as_it_is_read():
    """The sampler's decisions are those of the full forward pass; a text that outgrows the context
    is read again from its last half."""
    model, variables = build()
    prompts = [prompt(length, seed=length) for length in (1, 5, 9, 20)]
    sampler = sampler_of(4, **GREEDY)
    rows = generate(sampler, prompts, n=60)

    @families.jit
    def sown(tokens_1T):
        _, sown = model.apply(variables, tokens_1T, mutable=["stats"])
        return sown["stats"]["layers"]["block_1"]

    read = selected = overflow = 0
    for ids, new in zip(prompts, rows, strict=True):
        text = ids + new
        while text:
            window = text[:CONTEXT]
            stats = sown(np.int32([window]))
            read += len(window)
            selected += len(window) * float(stats["router/decided_fraction"][0])
            overflow += len(window) * float(stats["router/overflow_fraction"][0])
            text = text[CONTEXT + 1 - CONTEXT // 2 :] if len(text) > CONTEXT else []
    assert sampler.stats["new_tokens"] == 4 * 60
    assert sampler.stats["overflow"] == round(overflow) > 0
    assert sampler.stats["selected"] == round(selected)
    assert sampler.stats["routed_fraction"] == pytest.approx((selected - overflow) / read)
    # Keys, values and positions of four rows; a few counters.
    cached = 4 * families.cache_bytes(model, CONTEXT) + 4 * 4 * (CONTEXT + 14)
    assert 0 <= sampler.stats["cache_bytes"] - cached <= 4 * 32
