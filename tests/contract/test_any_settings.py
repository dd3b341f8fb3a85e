"""Any combination of settings that a model may have keeps the contract of `efx.models`.

Settings of all families are drawn at random, and of each model that they make it is held that
cached decoding is the full forward pass under the causal decision, token by token and in chunks
with padding; that no logit depends on later tokens; and that the documents of a packed row do not
know of each other.

Two new models at each run of the slow tier. EFX_EXAMPLES=500 draws so many instead, some four CPU
seconds each, and reduces a failing one to its simplest form.
"""

import functools
import os

import families
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from efx import models
from efx.layers import attend

pytestmark = pytest.mark.slow

CONTEXT, VOCAB, CHUNK = 13, 11, 5
EXAMPLES = int(os.environ.get("EFX_EXAMPLES", 0))
REDUCE = (hypothesis.Phase.shrink,) if EXAMPLES else ()
SOME_SITES = st.lists(st.sampled_from(families.NO_PROBS), min_size=1, unique=True).map(tuple)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Caches are read in blocks of 5 slots: the last overlaps the one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "_CACHE_BLOCK", 5)
        yield


def pick(draw, prefix="", **choices):
    """{setting: one of its choices}."""
    return {prefix + key: draw(st.sampled_from(values)) for key, values in choices.items()}


def places(draw, share, count):
    """One share, or one of each of so many parts."""
    if draw(st.booleans()):
        return draw(share)
    return tuple(draw(st.lists(share, min_size=count, max_size=count)))


SHARE = st.sampled_from([0.15, 0.3, 0.5, 0.8, 1.0])


def routing(draw, depth, recursion, by_type=True, further=0):
    """`further`: blocks that are numbered after the `depth` ones, of another stream."""
    kind = draw(st.sampled_from(["none", "mod", "mod", "recursion"]))
    if kind == "none" or (kind == "recursion" and (depth < 3 or not recursion)):
        return {}
    scores = ["router", "router", "position", "stochastic", *["token_hash"] * by_type]
    changes = pick(
        draw, "depth_routing.",
        gate=["identity", "sigmoid", "tanh", "twice_sigmoid", "one"],
        score=scores, train_selection=["topk", "topk", "threshold"],
        causal_decision=["aux_loss", "predictor", "threshold"],
        extra_decisions=[(), ("threshold", "predictor")],
        predictor_hidden=[0, 5], slack=[1.0, 1.3, 2.0],
        kv_for_skipped=[False, True], skip_mlp=[0, 8],
    )  # fmt: skip
    if (
        changes["depth_routing.score"] != "router"
        and changes["depth_routing.causal_decision"] == "aux_loss"
    ):
        changes["depth_routing.causal_decision"] = "threshold"  # which needs no parameters
    if kind == "mod":
        targets = ["block", "block", "attention", "mlp", "mlp_only"]
        changes |= pick(draw, "depth_routing.", target=targets)
        if "mlp" in changes["depth_routing.target"]:  # routes no attention
            changes["depth_routing.kv_for_skipped"] = False
        if draw(st.booleans()):
            every = changes["depth_routing.every"] = draw(one_in(depth))
            count = depth // every + further // every
        else:
            numbers = st.lists(st.integers(0, depth + further - 1), min_size=1, unique=True)
            blocks = tuple(sorted(draw(numbers)))
            changes["depth_routing.blocks"], count = blocks, len(blocks)
        changes["depth_routing.capacity"] = places(draw, SHARE, count)
    else:
        recursions = changes["depth_routing.recursions"] = draw(st.sampled_from([1, 2, 3]))
        capacity = places(draw, SHARE, recursions)
        if isinstance(capacity, tuple):
            capacity = tuple(sorted(capacity, reverse=True))
        changes["depth_routing.capacity"] = capacity
    return {"depth_routing.kind": kind, **changes}


def one_in(depth):
    """Every so manieth of the blocks."""
    return st.sampled_from([1, 1, 2] if depth > 1 else [1])


def experts(draw, depth):
    changes = {"mlp.kind": "moe", "mlp.moe.every": draw(one_in(depth))} | pick(
        draw, "mlp.moe.",
        num_experts=[2, 3, 7], expert_hidden=[0, 6],
        router=["token_choice", "token_choice", "expert_choice"], top_k=[1, 2],
        renormalise=[True, False], capacity_factor=[0.4, 1.0, 1.5], capacity=[0.2, 0.5],
        slack=[1.0, 2.0], num_shared=[0, 1],
    )  # fmt: skip
    if changes["mlp.moe.router"] == "token_choice":
        changes |= pick(draw, "mlp.moe.", num_noop=[0, 0, 2])
    return changes


def masks(draw):
    changes = pick(draw, "dropout.", kind=["elementwise", "attention", "standard"])
    if changes["dropout.kind"] != "attention":
        every = st.lists(st.sampled_from(families.ALL_SITES), min_size=1, unique=True).map(tuple)
        changes |= pick(draw, "dropout.elementwise.", detach=[True, False], sharpen=[False, True])
        return {**changes, "dropout.sites": draw(every)}
    changes["dropout.sites"] = draw(SOME_SITES)
    changes |= pick(
        draw, "dropout.attention.",
        input=["hidden", "embedding", "embedding_linear"],
        rounding=["none", "stochastic", "sigmoid", "sigmoid_straight_through"],
    )  # fmt: skip
    return changes


def soft(draw, depth):
    return {"soft_experts.every": draw(one_in(depth))} | pick(
        draw, "soft_experts.",
        num=[2, 3], shared=[0, 1], multiple=[1, 2], hidden_multiple=[1.0, 1.5],
        shared_kv=[False, True], merge=["softmax", "mean", "max"],
    )  # fmt: skip


def stack(draw, depth, recursion=True, by_type=True, further=0):
    """Of a decoder's stack and of the latent one: what its blocks are, and what wraps them."""
    changes = {"depth": depth, **routing(draw, depth, recursion, by_type, further)}
    kind = draw(st.sampled_from(["dense", "moe", "soft"]))
    if kind == "moe":
        changes |= experts(draw, depth)
    elif kind == "soft":
        changes |= soft(draw, depth)
    if draw(st.booleans()):
        changes |= masks(draw)
    if draw(st.integers(0, 3)) == 0:
        changes |= pick(draw, "dense_former.", on=[True])
    return changes


def common_settings(draw):
    return pick(
        draw,
        block_kind=["pre_norm", "pre_norm", "post_norm", "parallel"],
        logit_softcap=[0.0, 8.0], use_bias=[False, True], vocab_multiple=[1, 8],
    ) | pick(
        draw, "attention.",
        num_heads=[1, 2, 4], qk_norm=["none", "head", "width"], score_factor=[1.0, 0.5],
        softcap=[0.0, 5.0], chunk=[0, 5], bias=[None, "none", "qkv", "all"],
        no_rope_every=[0, 0, 1, 2],
    ) | pick(
        draw, "attention.rope_scaling.", kind=["none", "none", "linear", "llama3"],
        original_context=[6],
    ) | {"width": 16, "mlp.hidden": 24}  # fmt: skip


@st.composite
def decoder(draw, recursion=True):
    changes = common_settings(draw) | pick(
        draw, preset=["gpt2", "llama"],
        positions=[None, "learned", "rope", "none"], norm=[None, "layernorm", "rmsnorm"],
        tied=[None, True, False], initialisation=["gpt2", "spike_no_more"],
    ) | pick(draw, "attention.", window=[0, 4], head_dim=[0, 6])  # fmt: skip
    if not changes["attention.head_dim"]:
        changes |= pick(draw, "attention.", rope_fraction=[1.0, 0.5])
    changes["attention.num_kv_heads"] = draw(st.sampled_from([0, 1]))
    changes |= {"mup.base_width": draw(st.sampled_from([0, 0, 8]))}
    return changes | stack(draw, draw(st.sampled_from([1, 2, 3, 4, 4])), recursion)


@st.composite
def encoder_decoder(draw):
    changes = common_settings(draw) | pick(
        draw, family=["encoder_decoder"], depth=[1, 2, 3], encoder_depth=[0, 0, 2, 3],
        cross_heads=[0, 8], order=["self_first", "cross_first", "cross_only"],
        cross_source=["same_layer", "previous_layer", "final"],
        serial_start=["encoder", "embedding"],
        output_positions=[None, "none", "subtract", "subtract_norm"], positions=["learned", "rope"],
        initialisation=["gpt2", "spike_no_more"],
        embedding_loss=["none", "mse", "cosine", "log_cosine"],
        embedding_loss_gains=[False, True], norm=["layernorm", "rmsnorm"],
    ) | pick(draw, "attention.", window=[0, 4])  # fmt: skip
    if changes["depth"] == 1:
        changes["encoder_depth"] = 0
    if changes["positions"] == "rope":
        changes["output_positions"] = None
    changes["attention.num_kv_heads"] = draw(st.sampled_from([0, 1]))
    changes |= {"mup.base_width": draw(st.sampled_from([0, 0, 8]))}
    depth = changes["depth"]
    parallel = changes["cross_source"] == "previous_layer"
    encoder_depth = changes["encoder_depth"] or depth - parallel
    changes |= stack(draw, depth, recursion=False, further=encoder_depth)
    absent = ("soft_experts.", "dense_former.")
    return {key: value for key, value in changes.items() if not key.startswith(absent)}


@st.composite
def latent(draw):
    group_size, latents = draw(
        st.sampled_from(
            [(4, (2,)), (3, (1,)), (6, (3, 1)), (8, (4, 2)), (2, (1,)), (16, (4,)), (8, (5, 3))]
        )
    )
    levels = len(latents)
    changes = common_settings(draw) | pick(
        draw, family=["latent"], compression=["perceiver", "transformer"],
        compression_blocks=[1, 2], block_order=["interleaved", "sequence"],
        upsampling=["repeat", "attention"], repeat=["tile", "in_place"], skip=["sum", "lerp"],
        skip_joins=["after", "before"], positions=["level", "rope", "both"],
        tied=[True, False],
        initialisation=["gpt2", "spike_no_more"],
    ) | pick(draw, "attention.", window=[0, 0, 3], head_dim=[0, 0, 6])  # fmt: skip
    for name in ("encoder_local", "encoder_global", "decoder_local", "decoder_global"):
        counts = st.lists(st.integers(0, 2), min_size=levels, max_size=levels)
        changes[name] = tuple(draw(counts))
    changes |= {
        "group_size": group_size, "latents": latents, "level_widths": (8, 12)[:levels],
        "level_heads": (2, 2)[:levels], "mlp.activation": draw(st.sampled_from([None, "swiglu"])),
        "latent_loss.kind": draw(st.sampled_from(["none", "cosine"])),
    }  # fmt: skip
    changes["attention.num_kv_heads"] = draw(st.sampled_from([0, 1]))
    changes |= stack(draw, draw(st.sampled_from([1, 2, 3, 3])), by_type=False)
    return changes


@st.composite
def adapters(draw, changes):
    sites = [r".*/(query|key|value|out|gate|up|down)", ".*/(key|value)"]
    if not changes.get("soft_experts.num") or changes["soft_experts.every"] > 1:
        sites.append(r".*/(up|out)")  # with soft experts these are not plain linear layers
    new = pick(draw, "adapter.", kind=["lora", "mlp"], rank=[2], scale=[1.5], sites=sites)
    count = draw(st.sampled_from([0, 2, 3]))
    if not count:
        return new | pick(draw, "adapter.", gate=[False, True])
    routings = ["topk", "uniform"]
    if changes.get("depth_routing.kind", "none") == "none" and changes.get("family") != "latent":
        routings += ["inclusion", "inclusion"]
    new["adapter.experts"] = tuple(f"expert_{i}" for i in range(count))
    return new | pick(
        draw, "adapter.",
        routing=routings, top_k=[1, 2], capacity=[0.3, 0.6], slack=[1.0, 1.5],
    )  # fmt: skip


@st.composite
def any_model(draw):
    """(settings of the model, or of the members of bridges; settings of the bridges or None)."""
    one = st.one_of(decoder(), decoder(), latent(), encoder_decoder())
    changes = draw(one)
    kind = draw(st.sampled_from(["plain", "plain", "plain", "adapter", "bridged"]))
    if kind == "adapter":
        changes |= draw(adapters(changes))
    if kind != "bridged":
        return (changes,), None
    # Bridges need layers that are called once and give a state for every token.
    streams = encoder_decoder().filter(lambda changes: changes["depth"] > 1)
    bridgeable = st.one_of(decoder(recursion=False), streams)
    members = draw(st.lists(bridgeable, min_size=2, max_size=3))
    return tuple(members), pick(draw, pairs=[1], num_heads=[1, 2])


def build(members, bridges):
    """The model; no check may refuse it."""
    made = [families.make(member, vocab_size=VOCAB, context=CONTEXT) for member in members]
    return made[0] if bridges is None else families.bridge(*made, **bridges)


def with_capacity_for_all(model):
    """The same with capacity for every token that routers select, in bridges too."""
    if hasattr(model, "anchor_model"):
        return model.clone(
            anchor_model=with_capacity_for_all(model.anchor_model),
            augment_models=tuple(map(with_capacity_for_all, model.augment_models)),
        )
    return families.with_capacity(model, slack=100.0)


class Held:
    """A model with random parameters, and its compiled functions."""

    def __init__(self, model, seed, variables=None):
        self.model, self.rng = model, np.random.default_rng(seed)
        self.variables = variables or {
            "params": families.random_params(model),
            **families.random_state(model),
        }
        self.forward = families.jit(functools.partial(model.apply, rngs=families.keys()))

    def logits(self, *arguments):
        return np.asarray(self.forward(self.variables, *arguments))

    def some(self, length_B):
        """Calls that read now one token, now several, another number of each row."""
        done_B = np.zeros(len(length_B), int)
        while np.any(done_B < length_B):
            width = self.rng.choice([1, CHUNK, CHUNK])
            new_B = np.minimum(self.rng.integers(0, width + 1, len(length_B)), length_B - done_B)
            done_B += new_B
            yield width, new_B

    def undecided(self, *arguments):
        """Whether errors as large as rounding move the logits, because a decision is so close."""
        before = self.logits(*arguments)

        def moved(x):
            return x * (1 + self.rng.normal(0, 1e-6, x.shape).astype(np.float32))

        for _ in range(6):
            params = jax.tree.map(moved, self.variables["params"])
            after = np.asarray(self.forward({**self.variables, "params": params}, *arguments))
            if np.abs(after - before).max() > 2e-3:
                return True
        return False

    def check(self, result, expected, where_BT, name, *arguments):
        """Equal but for rounding, at these places; the arguments are those of `expected`."""
        error_BT = np.where(where_BT, np.abs(result - expected).max(axis=-1), 0.0)
        if not error_BT.max() < 3e-4 and not self.undecided(*arguments):
            places = np.argwhere(~(error_BT < 3e-4)).tolist()
            raise AssertionError(f"{name}: {error_BT.max()} apart, at (row, place) {places}")


def check_decoding(held, tokens_BT):
    """Cached decoding is the full forward pass, read one token at a time, in chunks, or now so and
    now so, with padding."""
    expected_BTV, batch = held.logits(tokens_BT), len(tokens_BT)
    assert np.isfinite(expected_BTV).all()
    step = families.decoder(held.model, held.variables, CONTEXT)
    cache = models.init_cache(held.model, batch, CONTEXT)
    whole_B = np.full(batch, CONTEXT)
    some_B = held.rng.integers(1, CONTEXT + 1, batch)
    for name, length_B, calls in (
        ("one at a time", whole_B, families.chunks(whole_B, whole_B, 1)),
        ("in chunks", whole_B, families.chunks(whole_B, whole_B, CHUNK)),
        ("some at a time", some_B, held.some(some_B)),
    ):
        result_BTV, _ = families.read(step, cache, tokens_BT, calls)
        read_BT = np.arange(CONTEXT)[None] < length_B[:, None]
        held.check(result_BTV, expected_BTV, read_BT, name, tokens_BT)


def check_causality(held, tokens_BT):
    """Logits up to a place do not move, not by a bit, when the tokens after it change."""
    cut_B = held.rng.integers(0, CONTEXT - 1, len(tokens_BT))
    later_BT = np.arange(CONTEXT)[None] > cut_B[:, None]
    other_BT = np.where(later_BT, (tokens_BT + 1) % VOCAB, tokens_BT)
    before_BTV, after_BTV = held.logits(tokens_BT), held.logits(other_BT)
    np.testing.assert_array_equal(before_BTV[~later_BT], after_BTV[~later_BT])


def packed(lengths):
    """(positions, documents) of a row of documents so long and padding, each [T]."""
    rest = CONTEXT - sum(lengths)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(rest, int)])
    documents = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, rest])
    return positions, documents


def check_documents(held, tokens_BT, first, alone):
    """Two documents and padding in a row: changing one leaves the other as it is, also where they
    have few slots. If `alone`, the second is as if it were alone: with slots for all."""
    batch, last = len(tokens_BT), CONTEXT - 1

    def row(tokens_BT, *lengths):
        return tokens_BT, *(np.tile(y, (batch, 1)).astype(np.int32) for y in packed(lengths))

    place_1T = np.arange(CONTEXT)[None]
    second_BT = np.broadcast_to((place_1T >= first) & (place_1T < last), tokens_BT.shape)
    both = row(tokens_BT, first, last - first)
    before_BTV = held.logits(*both)
    for changed_BT in (second_BT, ~second_BT):
        other_BT = np.where(changed_BT, (tokens_BT + 1) % VOCAB, tokens_BT)
        after_BTV = held.logits(other_BT, *both[1:])
        kept_BT = ~changed_BT & (place_1T < last)
        # Routed tokens of one document move the chunks of another, which add in another order.
        np.testing.assert_allclose(after_BTV[kept_BT], before_BTV[kept_BT], atol=1e-5)
    if alone:
        held = Held(with_capacity_for_all(held.model), 0, held.variables)
        apart = row(np.roll(tokens_BT, -first, axis=1), last - first)
        apart_BTV = np.roll(held.logits(*apart), first, axis=1)
        held.check(held.logits(*both), apart_BTV, second_BT, "a document alone", *apart)


def check(members, bridges, batch, seed):
    """All of it, of one model."""
    model = build(members, bridges)
    held = Held(model, seed)
    tokens_BT = held.rng.integers(0, VOCAB, (batch, CONTEXT)).astype(np.int32)
    check_decoding(held, tokens_BT)
    check_causality(held, tokens_BT)
    # Groups are cut where the row has them: a document is as if alone where it begins with one.
    group = max(member.get("group_size", 1) for member in members)
    # Random scores depend on the row.
    drawn = any(member.get("depth_routing.score") == "stochastic" for member in members)
    firsts = range(group, CONTEXT - 1, group)
    if firsts:
        check_documents(held, tokens_BT, int(held.rng.choice(firsts)), alone=not drawn)


@hypothesis.settings(
    max_examples=EXAMPLES or 2,
    phases=(hypothesis.Phase.generate, *REDUCE),
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(any_model(), st.sampled_from([1, 3, 4]), st.integers(0, 2**16))
def test_any_settings(drawn, batch, seed):
    check(*drawn, batch, seed)
    jax.clear_caches()
