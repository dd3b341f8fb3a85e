"""Any combination of settings that a model may have keeps the contract of `efx.models`.

Settings of all families are drawn at random until they make a model. Its cached decoding must equal
the full forward pass under the causal decision, token by token and in chunks with padding; no logit
may depend on later tokens; and the documents of a packed row must not know of each other.

Two new models at each run of the slow tier. EFX_EXAMPLES=500 draws so many instead, some four CPU
seconds each. The message of a failure has the settings that it needs.
"""

import functools
import os
import random
import re
import typing

import families
import jax
import numpy as np
import pytest

from efx import models
from efx.config import schema
from efx.errors import UsageError
from efx.layers import attend
from efx.models.adapters import AdapterConfig

pytestmark = pytest.mark.slow

CONTEXT, VOCAB, CHUNK = 13, 11, 5
EXAMPLES = int(os.environ.get("EFX_EXAMPLES", 2))
SMALL = {"width": 16, "mlp.hidden": 24, "attention.rope_scaling.original_context": 6}
# They change no result, or the sizes.
UNCHANGED = {"family", "remat", "scan_layers", "attention.kernel", "context", *SMALL}
# Values by the type of a setting; one that is not a number has all its choices, and others their
# default.
NUMBERS = {
    schema.Count: (1, 2, 3),
    schema.Modules: (1, 2, 3),
    schema.Natural: (1, 2),
    schema.ModulesOrZero: (2, 3),
    schema.Positions: (1, 2),
    schema.Fraction: (0.3, 0.6),
    schema.AtLeastOne: (1.0, 1.3),
}
VALUES = {
    "depth": (1, 2, 3, 4),
    "logit_softcap": (8.0,),
    "mup.base_width": (8,),
    "attention.num_heads": (1, 2, 4),
    "attention.head_dim": (6,),
    "attention.window": (3, 4),
    "attention.softcap": (5.0,),
    "attention.chunk": (5,),
    "attention.score_factor": (0.5,),
    "attention.rope_fraction": (0.5,),
    "mlp.moe.num_experts": (2, 3, 7),
    "mlp.moe.capacity_factor": (0.4, 1.0, 1.5),
    "soft_experts.hidden_multiple": (1.0, 1.5),
    "dropout.sites": (families.NO_PROBS, ("embedding",), ("attention_output", "mlp_output")),
    "depth_routing.blocks": ((0,), (0, 2)),
    "depth_routing.capacity": (0.15, 0.3, 0.5, 0.8, 1.0, (0.3, 0.15), (0.8, 0.5, 0.3)),
    "depth_routing.extra_decisions": (("threshold", "predictor"),),
    "group_size": (2, 3, 4, 6, 8),
    "latents": ((1,), (2,), (5,), (3, 1), (4, 2), (5, 3)),
    "level_heads": ((2,), (2, 2)),
    **dict.fromkeys(("encoder_local", "decoder_local"), (0, 2, (0, 2))),
    **dict.fromkeys(("encoder_global", "decoder_global"), (0, 2, (1, 0))),
    "adapter.scale": (1.5,),
    "adapter.sites": (".*/(key|value)", ".*/(up|out)"),
    "adapter.experts": (("a", "b"), ("a", "b", "c")),
}


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Caches are read in blocks of 5 slots: the last overlaps the one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "_CACHE_BLOCK", 5)
        yield


def choices(hint):
    """The values of a setting that is a bool or a choice of names."""
    if hint is bool:
        return False, True
    options = [hint, *typing.get_args(hint)]
    literals = [typing.get_args(each) for each in options if typing.get_origin(each)]
    return sum((each for each in literals if all(isinstance(x, str) for x in each)), ())


@functools.cache
def settings_of(family):
    """{name of a setting of a model or its adapters: values}"""
    named = [
        (name.removeprefix("config.").removeprefix("model."), hint)
        for block in (models.FAMILIES[family].config(), AdapterConfig())
        for name, hint, _ in schema.leaves(block)
    ]
    values = {name: VALUES.get(name) or NUMBERS.get(hint) or choices(hint) for name, hint in named}
    return {name: each for name, each in values.items() if each and name not in UNCHANGED}


def build(settings):
    return families.make(settings, vocab_size=VOCAB, context=CONTEXT)


def draw_settings(rng, family):
    """Settings of a model; those that a check refuses beside the others keep their default."""
    settings = {"family": family, **SMALL}
    # Of a model with few settings of one kind another kind may have many.
    share = {"": 0.5}
    for name, values in settings_of(family).items():
        is_kind = name.endswith((".kind", ".num"))
        if is_kind or rng.random() < share.setdefault(name.rpartition(".")[0], rng.random()):
            settings[name] = rng.choice(values)
    if family == "latent":
        settings["level_widths"] = (8, 12)[: len(settings.setdefault("latents", (2,)))]
    while True:
        try:
            build(settings)
            return settings
        except UsageError as error:
            name = re.match(r"config\.(?:model\.)?([\w.]+)=", str(error))[1]
            if name not in settings:  # a default does not fit the others
                return draw_settings(rng, family)
            del settings[name]


def model_of(members):
    """The model of settings, or bridges between the models of several."""
    made = [build(settings) for settings in members]
    return made[0] if len(made) == 1 else families.bridge(*made, pairs=1)


def draw_members(rng):
    """Settings of a model, or of the members of bridges."""
    while True:
        drawn = rng.choices(["decoder", "decoder", "encoder_decoder", "latent"], k=2)
        members = [draw_settings(rng, family) for family in drawn[: rng.choice([1, 1, 1, 2])]]
        try:
            model_of(members)
            return members
        except UsageError:  # some models cannot have bridges
            continue


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


def check(members, batch, seed):
    """All of it, of one model."""
    model = model_of(members)
    held = Held(model, seed)
    tokens_BT = held.rng.integers(0, VOCAB, (batch, CONTEXT)).astype(np.int32)
    check_decoding(held, tokens_BT)
    check_causality(held, tokens_BT)
    # Groups are cut where the row has them: a document is as if alone where it begins with one.
    latent = [settings for settings in members if settings["family"] == "latent"]
    group = max((settings.get("group_size", 16) for settings in latent), default=1)
    # Random scores depend on the row.
    drawn = any(settings.get("depth_routing.score") == "stochastic" for settings in members)
    firsts = range(group, CONTEXT - 1, group)
    if firsts and families.can_pack(model):
        check_documents(held, tokens_BT, int(held.rng.choice(firsts)), alone=not drawn)


def failure(*arguments):
    """The error that `check` raises, or None; settings that make no model have none."""
    try:
        check(*arguments)
    except UsageError:
        return None
    except Exception as error:
        return error
    finally:
        jax.clear_caches()


def simplest(members, *arguments):
    """The settings without which the check does not fail."""
    for i, settings in enumerate(members):
        for name in [*settings][1:]:  # all but the family
            rest = {key: value for key, value in members[i].items() if key != name}
            if failure([*members[:i], rest, *members[i + 1 :]], *arguments):
                members = [*members[:i], rest, *members[i + 1 :]]
    return members


def test_any_settings():
    for _ in range(EXAMPLES):
        seed = random.SystemRandom().randrange(2**32)
        rng = random.Random(seed)
        arguments = draw_members(rng), rng.choice([1, 3, 4]), seed
        if error := failure(*arguments):
            raise AssertionError(f"seed {seed}: {simplest(*arguments)}") from error
