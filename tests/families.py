"""FAMILIES: every family and variant of model as one small example, for tests of what all share.

A test marked `every_row` holds each row to a property that its model can have. A row is a set of
mechanisms, which are read from its settings: the default tests take rows that between them have
every mechanism of one `Grain`, `--all` those of a finer one, and `--family NAME` the row NAME.
"""

import dataclasses
import enum
import functools
import itertools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import certify, models
from efx.certify import subjects
from efx.certify.properties import check, chunks, read  # noqa: F401
from efx.configs import common
from efx.errors import UsageError
from efx.layers import flops
from efx.models.stack import period
from efx.train import losses

BATCH, LENGTH, VOCAB = 8, 32, 45


@dataclasses.dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
      changes: of `config.model`, dotted; those of `config.adapter` begin with "adapter.".
      looks_ahead: its selection in training depends on later tokens.
      losses: names of the losses that it sows.
    """

    changes: dict
    looks_ahead: bool = False
    losses: tuple = ()


def dotted(settings, prefix=""):
    """{"block.name": value} of nested settings."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _row(losses=(), looks_ahead=False, **settings):
    return Family(dotted(settings), looks_ahead, losses)


def _mod(losses=("router_bce",), looks_ahead=True, depth_routing=None, **settings):
    routing = dict(kind="mod", capacity=0.5, causal_decision="aux_loss") | (depth_routing or {})
    return _row(losses, looks_ahead, depth_routing=routing, **settings)


def _control(name, **depth_routing):
    routing = dict(kind="mod", capacity=0.5, score=name, gate="one")
    return _row(depth_routing=routing | depth_routing)


def experts(**changes):
    """Settings of `mlp`: four small experts."""
    moe = dict(num_experts=4, expert_hidden=24, capacity_factor=1.0)
    return dict(kind="moe", moe=moe | changes)


def masks(**changes):
    """Settings of `dropout`: masks that attention decides, in float32 without rounding."""
    settings = dict(rounding="none") | changes
    return dict(kind="attention", sites=NO_PROBS, attention=settings)


def adapters(kind="lora", experts=0, **changes):
    """Settings of `adapter`."""
    names = tuple(f"expert_{i}" for i in range(experts))
    return dict(kind=kind, rank=3, scale=1.5, **changes, experts=names)


def _streams(losses=(), looks_ahead=False, mlp=None, **settings):
    settings = dict(family="encoder_decoder", mlp=dict(hidden=64) | (mlp or {})) | settings
    return _row((*losses, "embedding"), looks_ahead, **settings)


def _latent(losses=(), looks_ahead=False, **settings):
    sizes = dict(group_size=4, latents=(2,), level_widths=(24,), level_heads=(3,))
    return _row(losses, looks_ahead, family="latent", **sizes | settings)


PENALTIES = ("dropout_alternate_entropy", "dropout_entropy", "dropout_l1", "dropout_squared_l1")
MOE_LOSSES = ("load_balance", "router_z")
ALL_SITES = ("embedding", "attention_probs", "attention_output", "mlp_output")
NO_PROBS = tuple(site for site in ALL_SITES if site != "attention_probs")

# So short a context and so many turns that all three parts of the frequencies occur.
ROPE_LLAMA3 = dict(
    rope_theta=50.0,
    rope_scaling=dict(
        kind="llama3",
        factor=4.0,
        original_context=16,
        low_frequency_factor=0.5,
        high_frequency_factor=2.0,
    ),
)
LLAMA3 = dotted({"attention": ROPE_LLAMA3})
ROPE_LINEAR = dict(rope_fraction=0.5, rope_theta=5.0, rope_scaling=dict(kind="linear", factor=3.0))
# What a block does for tokens that it skips.
FOR_SKIPPED = dict(kv_for_skipped=True, skip_mlp=16)
SMALL_PREDICTOR = dict(causal_decision="predictor", predictor_hidden=6)

FAMILIES = {
    "gpt2": _row(preset="gpt2", attention=dict(chunk=20)),
    "llama": _row(),
    "llama_options": _row(
        logit_softcap=8.0,
        tied=True,
        use_bias=True,
        attention=dict(
            num_kv_heads=2,
            window=9,
            chunk=20,
            qk_norm="head",
            head_dim=6,
            softcap=5.0,
            score_factor=0.5,
        ),
    ),
    "neox": _row(
        norm="layernorm",
        use_bias=True,
        mlp=dict(activation="gelu"),
        block_kind="parallel",
        attention=dict(chunk=20, **ROPE_LINEAR),
    ),
    "mod": _mod(),
    "mod_options": _mod(
        attention=dict(num_kv_heads=2, window=9, chunk=10, qk_norm="width"),
        depth_routing=dict(every=1, slack=1.0, gate="tanh", bce_reaches_input=False),
    ),
    "mod_parallel": _mod(
        block_kind="parallel",
        attention=dict(
            rope_fraction=0.5, bias="all", qk_norm="head", no_rope_every=2, **ROPE_LLAMA3
        ),
    ),
    "mod_capacity_list": _mod(
        ("predictor_bce", "router_bce"),
        preset="gpt2",
        depth_routing=dict(
            blocks=(0, 1),
            gate="identity",
            capacity=(0.25, 0.75),
            extra_decisions=("aux_loss",),
            **SMALL_PREDICTOR,
        ),
    ),
    "mod_stochastic": _control("stochastic"),
    "mod_fixed": _control("position", every=1),
    "mod_norm": _mod((), depth_routing=dict(score="norm", causal_decision="threshold", gate="one")),
    "mod_gumbel": _mod((), depth_routing=dict(score="gumbel", causal_decision="threshold")),
    "mod_threshold": _mod(
        (),
        False,
        depth_routing=dict(causal_decision="threshold", train_selection="threshold", slack=1.2),
    ),
    "mod_context": _mod(
        block_kind="post_norm",
        attention=dict(bias="qkv", num_kv_heads=2, window=9),
        depth_routing=dict(every=1, extra_decisions=("threshold",), **FOR_SKIPPED),
    ),
    "mod_attention": _mod(
        attention=dict(window=9), depth_routing=dict(target="attention", every=1, capacity=0.4)
    ),
    "mod_mlp": _mod(
        block_kind="parallel",
        attention=dict(num_kv_heads=2),
        depth_routing=dict(target="mlp", every=1, capacity=0.4, skip_mlp=16, router_norm="rms"),
    ),
    "mod_mlp_only": _mod((), depth_routing=dict(target="mlp_only", causal_decision="threshold")),
    "recursion": _mod(
        depth=4,
        attention=dict(num_kv_heads=2, chunk=10),
        depth_routing=dict(kind="recursion", recursions=3, capacity=(1.0, 0.7, 0.4)),
    ),
    "recursion_context": _mod(
        MOE_LOSSES,
        depth=4,
        attention=dict(window=9, num_kv_heads=2),
        mlp=experts(),
        depth_routing=dict(
            kind="recursion",
            capacity=(0.6, 0.3),
            causal_decision="threshold",
            slack=1.0,
            **FOR_SKIPPED,
        ),
    ),
    "moe": _row(MOE_LOSSES, mlp=experts(num_shared=1)),
    "moe_switch": _row(
        MOE_LOSSES,
        preset="gpt2",
        mlp=experts(every=2, num_experts=3, top_k=1, renormalise=False, capacity_factor=1.25),
    ),
    "moe_expert_choice": _row(
        ("expert_bce",), True, mlp=experts(router="expert_choice", capacity=0.4, slack=1.0)
    ),
    "mode_staged": _mod(
        ("router_bce", *MOE_LOSSES), depth_routing=dict(every=1), mlp=experts(num_noop=2)
    ),
    "mode_integrated": _row(MOE_LOSSES, mlp=experts(num_noop=2, capacity_factor=1.25)),
    "dropout_elementwise_mod": _mod(
        ("predictor_bce", *PENALTIES),
        preset="gpt2",
        attention=dict(window=9),
        depth_routing=dict(every=1, kv_for_skipped=True, **SMALL_PREDICTOR),
        dropout=dict(kind="elementwise", elementwise=dict(detach=False)),
    ),
    "dropout_attention": _row(PENALTIES, attention=dict(chunk=20, window=9), dropout=masks()),
    "dropout_attention_mod": _mod(
        ("router_bce", *PENALTIES),
        depth_routing=dict(every=1),
        dropout=masks(rounding="stochastic"),
    ),
    "dropout_embedding_moe": _row(
        (*MOE_LOSSES, *PENALTIES),
        preset="gpt2",
        dropout=masks(input="embedding", rounding="sigmoid_straight_through"),
        mlp=experts(every=2),
    ),
    "soft": _row(soft_experts=dict(num=4, shared=1, hidden_multiple=1.5), attention=dict(chunk=20)),
    "soft_options": _row(
        preset="gpt2",
        block_kind="parallel",
        attention=dict(bias="qkv", num_kv_heads=2, qk_norm="width", window=9, score_factor=0.5),
        soft_experts=dict(num=3, shared_kv=True, merge="max", multiple=2, hidden_multiple=1.0),
    ),
    "soft_mod": _mod(
        ("router_bce", *PENALTIES),
        block_kind="post_norm",
        depth_routing=dict(kv_for_skipped=True, gate="identity"),
        dropout=masks() | dict(sites=NO_PROBS[1:]),
        soft_experts=dict(num=2, every=2, merge="max", multiple=2, hidden_multiple=1.0),
    ),
    "averages": _row(
        PENALTIES,
        depth=3,
        dense_former=dict(on=True),
        attention=dict(chunk=20, **ROPE_LINEAR),
        mup=dict(base_width=16),
        dropout=masks() | dict(sites=NO_PROBS[1:]),
    ),
    "mup": _row(preset="gpt2", mup=dict(base_width=16), initialisation="spike_no_more"),
    "streams_parallel": _streams(
        cross_source="previous_layer",
        order="cross_first",
        depth=3,
        encoder_depth=4,
        decoder_input_norm=True,
        decoder_input_positions=True,
        attention=dict(chunk=10, window=9, qk_norm="head"),
        embedding_loss="log_cosine",
        logit_softcap=8.0,
    ),
    "streams_masks": _streams(PENALTIES, cross_source="previous_layer", dropout=masks()),
    "streams_moe": _streams(
        (*MOE_LOSSES, *PENALTIES),
        cross_source="same_layer",
        cross_heads=8,
        output_positions="subtract_norm",
        embedding_loss_gains=True,
        mup=dict(base_width=16),
        attention=dict(chunk=20, bias="qkv"),
        mlp=experts(),
        dropout=dict(kind="elementwise"),
    ),
    "streams_mod": _streams(
        ("router_bce",),
        True,
        cross_source="previous_layer",
        positions="rope",
        block_kind="parallel",
        attention=dict(rope_fraction=0.5, no_rope_every=2, num_kv_heads=2, chunk=10),
        cross_heads=8,
        depth_routing=dict(
            kind="mod",
            target="attention",
            blocks=(0, 2),
            capacity=(0.5, 0.7),
            causal_decision="aux_loss",
            extra_decisions=("threshold",),
        ),
    ),
    "streams_mod_serial": _streams(
        ("router_bce", *PENALTIES),
        True,
        cross_source="final",
        positions="rope",
        depth_routing=dict(kind="mod", capacity=0.5, every=1, causal_decision="aux_loss"),
        dropout=masks(),
    ),
    "latent": _latent(),
    "latent_levels": _latent(
        group_size=12,
        latents=(5, 2),
        level_widths=(16, 24),
        level_heads=(2, 3),
        compression="transformer",
        compression_blocks=2,
        upsampling="attention",
        upsampling_norm=False,
        skip="lerp",
        repeat="in_place",
        block_order="sequence",
        encoder_local=(2, 1),
        encoder_global=(1, 0),
        decoder_global=(0, 1),
        positions="both",
        attention=dict(chunk=5, qk_norm="head"),
        use_bias=True,
        tied=False,
        logit_softcap=8.0,
        mlp=dict(activation="swiglu"),
    ),
    "latent_memory": _latent(
        group_size=6,
        memory_local=2,
        memory_global=3,
        positions="rope",
        block_kind="parallel",
        level_heads=(2,),
        attention=dict(rope_fraction=0.5, no_rope_every=2, num_heads=2, score_factor=0.5),
        skip_joins="before",
    ),
    "latent_mod": _latent(
        ("router_bce",),
        True,
        group_size=6,
        depth_routing=dict(
            kind="mod",
            capacity=0.5,
            every=1,
            causal_decision="aux_loss",
            extra_decisions=("threshold",),
            slack=1.2,
        ),
    ),
    "latent_moe": _latent(MOE_LOSSES, mlp=experts(every=2), level_widths=(16,), level_heads=()),
    "latent_parts": _latent(
        ("latent_prediction",),
        soft_experts=dict(num=3, every=2, shared=1),
        dense_former=dict(on=True),
        latent_loss=dict(kind="cosine"),
        mup=dict(base_width=16),
        initialisation="spike_no_more",
        upsampling="attention",
        positions="level",
    ),
    "latent_window": _latent(
        PENALTIES,
        group_size=12,
        latents=(5,),
        upsampling="attention",
        positions="both",
        attention=dict(window=4, head_dim=6, num_kv_heads=2),
        level_heads=(),
        soft_experts=dict(num=2, shared_kv=True, hidden_multiple=1.0),
        skip_joins="before",
        dropout=dict(kind="elementwise"),
    ),
    "latent_masks": _latent(
        PENALTIES,
        compression="transformer",
        compression_blocks=2,
        block_kind="post_norm",
        attention=dict(window=3),
        memory_local=1,
        memory_global=1,
        upsampling="attention",
        dropout=masks(input="embedding_linear"),
    ),
    "adapter": _row(preset="gpt2", adapter=adapters("mlp", gate=True)),
    "adapter_mod": _row(
        looks_ahead=True,
        depth_routing=dict(
            kind="mod", score="token_hash", gate="one", capacity=0.5, every=1, **FOR_SKIPPED
        ),
        adapter=adapters(experts=3, routing="topk", sites=".*/(query|key|up)"),
    ),
    "adapter_recursion": _row(
        ("router_bce",),
        True,
        depth=4,
        depth_routing=dict(
            kind="recursion", recursions=2, capacity=0.5, causal_decision="aux_loss"
        ),
        adapter=adapters(experts=2, routing="uniform"),
    ),
    "adapter_streams": _streams(
        order="cross_only", adapter=adapters(experts=3, routing="topk", sites=".*/(query|up|out)")
    ),
    "adapter_latent": _latent(
        memory_local=2,
        upsampling="attention",
        # Of each kind of site one; all take eight times as long.
        adapter=adapters(experts=2, routing="topk", sites=".*/(query|up)"),
    ),
    "adapter_inclusion": _row(
        ("inclusion_bce",),
        True,
        attention=dict(num_kv_heads=2, chunk=20),
        adapter=adapters(
            "mlp",
            experts=3,
            routing="inclusion",
            capacity=0.4,
            slack=1.0,
            sites=".*/(value|gate|down)",
        ),
    ),
}


class Grain(enum.IntEnum):
    """How finely the mechanisms of rows are told apart, and so how many rows have all of them."""

    NONE = 0  # no row
    ONE = 1  # the row with the most mechanisms
    KINDS = 2  # families, and kinds of parts, such as `mlp.kind`
    SELECTIONS = 3  # and values of settings that select tokens, such as `train_selection`
    CHOICES = 4  # and values of all settings that have names as values
    ALL = 5  # and all other settings that a row changes, and pairs of kinds


def mechanisms(name, grain):
    """The mechanisms of a row: "family=latent", "mlp.kind=moe", "attention.window"."""
    found = {each: [] for each in Grain}
    for key, value in FAMILIES[name].changes.items():
        values = value if isinstance(value, tuple) else (value,)
        each = Grain.CHOICES
        if re.fullmatch(r"family|\w+\.kind", key):
            each = Grain.KINDS
        elif key.endswith(("selection", "score", "router", "routing", "target")):
            each = Grain.SELECTIONS
        is_choice = all(isinstance(value, str) for value in values)
        if not is_choice or key in ("adapter.experts", "adapter.sites"):
            found[Grain.ALL].append(key)
        else:
            found[each] += [f"{key}={value}" for value in values]
    found[Grain.ALL] += itertools.combinations(found[Grain.KINDS], 2)
    return {mechanism for each in Grain if each <= grain for mechanism in found[each]}


def cover(names, grain, chosen=()):
    """Rows that have all mechanisms of `names`: `chosen`, then those with the most new ones."""
    chosen = [*chosen]
    if grain <= Grain.ONE:
        return chosen or cover(names, Grain.KINDS)[: int(grain)]
    found = {name: mechanisms(name, grain) for name in names}
    missing = set().union(*found.values()).difference(*(found[name] for name in chosen))
    while missing:
        chosen.append(max(found, key=lambda name: len(found[name] & missing)))
        missing -= found[chosen[-1]]
    return chosen


# Grains of the rows that the default tests and that `--all` take.
CHEAP = dict(default=Grain.CHOICES, whole=Grain.ALL)
COSTLY = dict(default=Grain.KINDS, whole=Grain.CHOICES)
RARE = dict(default=Grain.ONE, whole=Grain.KINDS)  # for what seldom differs between rows


def every_row(can=lambda model: True, **grains):
    """Mark a test of a property, with an argument `name`, that every row has.

    Args:
      can: predicate on a row's model, whether it can have the property.
      grains: CHEAP, COSTLY, RARE or others.
    """
    return pytest.mark.every_row(can, **{**COSTLY, **grains})


def rows_of(can, default, whole, only=None):
    """Parameters of a test marked `every_row`; `only`: the one row, or None."""
    names = [name for name in ([only] if only else FAMILIES) if can(build(name))]
    if only:
        return names
    by_default = cover(names, default)
    return rows(cover(names, whole, by_default), set(names) - set(by_default))


MESHES = {
    "data": dict(data=8),
    "mixed": dict(data=2, fsdp=2, tensor=2),
    "expert": dict(data=2, fsdp=2, expert=2),
    "sequence": dict(data=2, sequence=4),
    "places and features": dict(data=2, tensor=2, sequence=2),
}


def mesh_of(name):
    """The mesh on which the suite holds a row to a property; it depends on no other row."""
    return list(MESHES)[zlib.crc32(name.encode()) % len(MESHES)]


def rows(names, slow):
    """Names of rows, or tuples that begin with one, as parameters of a test; some are slow."""
    params = []
    for each in names:
        values = each if isinstance(each, tuple) else (each,)
        marks = [pytest.mark.slow] if values[0] in slow else []
        params.append(pytest.param(*values, marks=marks))
    return params


def small_config(changes):
    """A config: two layers, 32 wide, large weights so that everything matters."""
    config = common.base(changes.get("family", "decoder"))
    small = {
        "width": 32,
        "depth": 2,
        "attention.num_heads": 4,
        "init_std": 0.2,
        "vocab_multiple": 16,
        "mlp.multiple_of": 16,
    }
    for key, value in {**small, **changes}.items():
        if key == "family":
            continue
        key = key if key.startswith("adapter.") else f"model.{key}"
        common.apply(config, {key: value})
    return config


def model_config(changes):
    """The `config.model` of it."""
    return small_config(changes).model


def make(changes, dtype="float32", vocab_size=VOCAB, context=LENGTH):
    """A small model with `config.model` and `config.adapter` changed so."""
    config = small_config(changes)
    return models.build(
        config.model, vocab_size=vocab_size, context=context, dtype=dtype, adapter=config.adapter
    )


@functools.cache
def build(name, dtype="float32"):
    """The model of a row."""
    return make(FAMILIES[name].changes, dtype)


def skips_tokens(model):
    """Whether it has routed blocks."""
    return any(spec.routing is not None for spec in model.blocks().values())


def has_entrances(model):
    """Whether it has adapters that select their tokens."""
    return hasattr(model, "adapter") and model.adapter.has_entrances


def selects_tokens(model):
    """Whether it has a limited number of slots for tokens: in routed blocks, experts, adapters."""
    blocks = [b for spec in model.blocks().values() for b in spec.blocks]
    return skips_tokens(model) or has_entrances(model) or any(b.moe for b in blocks)


def draws(model):
    """Whether training draws random numbers, which are others in each micro-batch."""
    dropout = model.config.dropout
    rounds = dropout.kind == "attention" and dropout.attention.rounding == "stochastic"
    selects = skips_tokens(model) and refuses(
        lambda: jax.eval_shape(model.apply, variable_shapes(model), tokens(batch=1))
    )
    return selects or rounds or dropout.kind == "standard"


def can_pack(model):
    """Whether a row may hold several documents."""
    return not refuses(model.check_packing)


@functools.cache
def scanned(model):
    """The same with scanned layers, as few as repeat a pattern; None if they cannot be scanned."""
    depth = model.config.depth
    for each in (depth, depth + 1, 2 * depth):
        changed = models.changed(model, depth=each, scan_layers=True)
        if not refuses(lambda: period(changed.config.resolved() and changed.specs())):  # noqa: B023
            return changed
    return None


def can_scan(model):
    return scanned(model) is not None


def refuses(function):
    try:
        function()
    except UsageError:
        return True
    return False


def with_capacity(model, share=1.0, slack=1.0):
    """The same with `share` of its capacities, and this slack."""
    c, moe = model.config, model.config.mlp.moe
    changes = {
        "mlp.moe.capacity": share * moe.capacity,
        "mlp.moe.capacity_factor": share * slack,
        "mlp.moe.slack": slack,
    }
    if skips_tokens(model):
        r, key = c.depth_routing, "depth_routing."
        several = r.capacity if isinstance(r.capacity, tuple) else (r.capacity,)
        less = tuple(1.0 if each == 1 else share * each for each in several)
        changes[key + "capacity"] = less if isinstance(r.capacity, tuple) else less[0]
        changes[key + "slack"] = slack
    model = models.changed(model, **changes)
    if has_entrances(model):
        a = model.adapter
        model = model.clone(
            adapter=dataclasses.replace(a, capacity=share * a.capacity, slack=slack)
        )
    return model


@functools.cache
def params_of(name):
    """Parameters of a row's model in which no vector is all ones or zeros."""
    return random_params(build(name))


# Standard deviations of what is not 0.3. Phases so wide that masks open and close.
STD = {
    "kernel": 0.2,
    "embedding": 0.2,
    "mask_query": 0.2,
    "mask_key": 0.2,
    "mask_value": 0.1,
    "mask_linear": 0.1,
    "mask_shift": 1.2,
    "mask_phase": 1.0,
}


def constant(values, dtype):
    """A device array that may be kept, whether or not a function is being traced as it is made."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.asarray(values, dtype))  # of numpy: there is nothing to compile


@functools.cache
def variable_shapes(model):
    """Shapes of the variables of a model. Tracing an initialisation is half of what a test of a
    small model costs."""
    return models.unboxed_shapes(model)


def random_params(model, seed=0):
    """Parameters in which nothing is all ones or zeros: matrices N(0, 0.2^2), vectors 0.3 about
    their initial value. Drawn by numpy, because compiling initialisers takes seconds a model."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        kind = path[-1].key
        centre = 1.0 if kind == "scale" else 0.0
        # What all masks read passes three more matrices before it is an angle.
        std = 0.4 if path[0].key == "mask_input" else STD.get(kind, 0.3)
        return constant(rng.normal(centre, std, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, variable_shapes(model)["params"])


def initial(model, seed=0):
    """The variables of a new model, unboxed."""
    return jit(lambda seed: nn.unbox(models.init(model, jax.random.key(seed))))(np.uint32(seed))


@functools.cache
def state_of(name):
    """Collections beside the parameters of a row's model."""
    return random_state(build(name))


def random_state(model):
    """{"state": ...} of a model that keeps running averages, past their warm-up; else {}."""
    shapes, rng = variable_shapes(model), np.random.default_rng(1)

    def draw(path, leaf):
        if path[-1].key == "share":  # of the text, which types of tokens have
            return constant(rng.dirichlet(np.ones(leaf.shape)), leaf.dtype)
        if leaf.dtype == jnp.int32:
            return constant(np.full(leaf.shape, 1000), leaf.dtype)
        return constant(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype)

    if "state" not in shapes:
        return {}
    return {"state": jax.tree_util.tree_map_with_path(draw, shapes["state"])}


def variables_of(name):
    return {"params": params_of(name), **state_of(name)}


def cache_bytes(model, cache_size):
    """Bytes of keys and values that decoding one sequence of so many tokens keeps."""
    cache = jax.eval_shape(lambda: models.init_cache(model, 1, cache_size))
    return sum(
        leaf.size * leaf.dtype.itemsize
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
        if path[-1].key in ("cached_key", "cached_value")
    )


def tokens(seed=0, batch=BATCH, length=LENGTH):
    """Random tokens [B, T]."""
    rng = np.random.default_rng(seed)
    return constant(rng.integers(0, VOCAB, (batch, length)), np.int32)


def jit(function, **options):
    """jax.jit with little optimisation: a third of the compile time, the same program."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def keys(seed=0):
    """`rngs` of a forward pass; a stochastic control has none of its own."""
    return {"routing": jax.random.key(seed)}


@functools.cache
def forward(name, selection="causal"):
    """Compiled (params, tokens) -> logits; `selection="train"` chooses tokens as training does."""
    model, state = build(name).clone(selection=selection), state_of(name)
    return jit(
        lambda params, tokens_BT: model.apply({"params": params, **state}, tokens_BT, rngs=keys())
    )


@functools.cache
def subject(name, selection="causal", share=None, slack=1.0):
    """The `certify.Subject` of a row; `share` and `slack`: see `with_capacity`."""
    model = build(name).clone(selection=selection)
    if share is not None:
        model = with_capacity(model, share, slack)
    return subjects.of_model(model, variables_of(name))


def assert_passes(prop, subject, tolerance=None):
    """A property of efx.certify holds; `tolerance`: in its place, for the same number."""
    result = check(prop, subject)
    limit = result.tolerance if tolerance is None else tolerance
    assert result.verdict == certify.PASS and result.number <= limit, result


def logits_of(name, tokens_BT, selection="causal"):
    return np.asarray(forward(name, selection)(params_of(name), tokens_BT))


def loss_fn(model, state=None):
    """(params, tokens) -> scalar: cross-entropy and all sown losses, routed as in training."""
    model = model.clone(selection="train")
    state = random_state(model) if state is None else state

    def loss(params, tokens_BT):
        logits, sown = model.apply(
            {"params": params, **state}, tokens_BT, mutable=["losses"], rngs=keys()
        )
        targets_BT = jnp.roll(tokens_BT, -1, axis=1)
        sums = losses.cross_entropy(logits, targets_BT, jnp.ones(targets_BT.shape))
        extra = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(sown))
        return sums.total / sums.weights + 0.1 * extra

    return loss


def decoder(model, variables, cache_size, decode=True):
    """Compiled (cache, tokens, positions) -> (logits, cache)."""

    @jit
    def step(cache, tokens_BT, positions_BT):
        logits_BTV, state = model.apply(
            {**variables, "cache": cache},
            tokens_BT,
            positions_BT,
            decode=decode,
            cache_size=cache_size,
            mutable=["cache"],
            rngs=keys(),
        )
        return logits_BTV, state["cache"]

    return step


def bridge(*members, **changes):
    """Models, or settings of such, with bridges between them."""
    made = [each if isinstance(each, nn.Module) else make(each) for each in members]
    runs = tuple(f"run_{i}" for i in range(len(made)))
    config = {**common.base("bridged").model, "anchor": runs[0], "augment": runs[1:], **changes}
    return models.build(
        config,
        vocab_size=made[0].vocab_size,
        context=made[0].config.context,
        dtype="float32",
        members=made,
    )


def assert_trees_close(a, b, rtol=1e-4, atol=1e-6):
    """Equal up to float noise, relative to the largest entry of each array; names the path."""
    a, b = jax.tree_util.tree_flatten_with_path(a)[0], jax.tree_util.tree_leaves(b)
    assert len(a) == len(b)
    for (path, x), y in zip(a, b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape, jax.tree_util.keystr(path)
        scale = np.abs(x).max(initial=0.0)
        np.testing.assert_allclose(
            x, y, rtol=0, atol=atol + rtol * scale, err_msg=jax.tree_util.keystr(path)
        )


def equations(jaxpr):
    """All equations of a traced program, those of what it calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in flops._subjaxprs(equation.params):
            yield from equations(inner)
