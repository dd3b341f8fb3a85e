"""FAMILIES: every family and variant of model as one small example, for tests of what all share.

A new family adds its rows here and is then held to every property in test_families.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx import flops, losses, models
from efx.configs import common

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

    @property
    def routed(self):
        kinds = ("depth_routing.kind", "mlp.kind", "adapter.routing")
        return any(kind in self.changes for kind in kinds)

    @property
    def packs(self):
        """Whether it takes packed documents."""
        return not any(self.changes.get(f"memory_{kind}") for kind in ("local", "global"))

    @property
    def rounds(self):
        """Whether it computes masks of zeros and ones."""
        return self.changes.get("dropout.attention.rounding") == "stochastic"


def _moe(losses=("load_balance", "router_z"), looks_ahead=False, **changes):
    changes = {
        "mlp.kind": "moe",
        "mlp.moe.num_experts": 4,
        "mlp.moe.expert_hidden": 24,
        "mlp.moe.capacity_factor": 1.0,
        **changes,
    }
    return Family(changes, looks_ahead, losses)


PENALTIES = ("dropout_alternate_entropy", "dropout_entropy", "dropout_l1", "dropout_squared_l1")
ALL_SITES = ("embedding", "attention_probs", "attention_output", "mlp_output")
NO_PROBS = tuple(site for site in ALL_SITES if site != "attention_probs")


# So short a context and so many turns that all three parts of the frequencies occur.
LLAMA3 = {
    "attention.rope_theta": 50.0,
    "attention.rope_scaling.kind": "llama3",
    "attention.rope_scaling.factor": 4.0,
    "attention.rope_scaling.original_context": 16,
    "attention.rope_scaling.low_frequency_factor": 0.5,
    "attention.rope_scaling.high_frequency_factor": 2.0,
}


def _mod(looks_ahead=True, losses=("router_bce",), **changes):
    changes = {"depth_routing.kind": "mod", "depth_routing.capacity": 0.5, **changes}
    return Family(changes, looks_ahead, losses)


def _adapted(looks_ahead=False, losses=(), kind="lora", experts=0, **changes):
    changes = {
        "adapter.kind": kind,
        "adapter.rank": 3,
        "adapter.scale": 1.5,
        **changes,
        "adapter.experts": tuple(f"expert_{i}" for i in range(experts)),
    }
    return Family(changes, looks_ahead, losses)


def _streams(*losses, row=None, **changes):
    row = row or Family({})
    changes = {"family": "encoder_decoder", "mlp.hidden": 64, **row.changes, **changes}
    return dataclasses.replace(row, changes=changes, losses=(*losses, *row.losses, "embedding"))


def _latent(row=None, **changes):
    row = row or Family({})
    changes = {
        "family": "latent",
        "group_size": 4,
        "latents": (2,),
        "level_widths": (24,),
        "level_heads": (3,),
        **row.changes,
        **changes,
    }
    return dataclasses.replace(row, changes=changes)


FAMILIES = {
    "gpt2": Family({"preset": "gpt2", "attention.chunk": 20}),
    "llama": Family({}),
    "llama_options": Family(
        {
            "attention.num_kv_heads": 2,
            "attention.window": 9,
            "attention.chunk": 20,
            "attention.qk_norm": "head",
            "attention.head_dim": 6,
            "attention.softcap": 5.0,
            "logit_softcap": 8.0,
            "attention.scale": "mup",
            "tied": True,
            "use_bias": True,
        }
    ),
    "neox": Family(
        {
            "norm": "layernorm",
            "use_bias": True,
            "mlp.activation": "gelu",
            "block_kind": "parallel",
            "attention.rope_fraction": 0.5,
            "attention.rope_theta": 5.0,
            "attention.rope_scaling.kind": "linear",
            "attention.rope_scaling.factor": 3.0,
            "attention.chunk": 20,
        }
    ),
    "post_norm": Family(
        {
            "block_kind": "post_norm",
            "attention.qk_norm": "width",
            "attention.num_kv_heads": 2,
            "attention.bias": "qkv",
            "attention.no_rope_every": 2,
            "attention.chunk": 20,
            **LLAMA3,
        }
    ),
    "mod": _mod(),
    "mod_options": _mod(
        **{
            "attention.num_kv_heads": 2,
            "attention.window": 9,
            "attention.chunk": 10,
            "attention.qk_norm": "width",
            "depth_routing.every": 1,
            "depth_routing.slack": 1.0,
            "depth_routing.gate": "tanh",
            "depth_routing.bce_reaches_input": False,
        }
    ),
    "mod_parallel": _mod(
        **{
            "block_kind": "parallel",
            "attention.rope_fraction": 0.5,
            "attention.bias": "all",
            "attention.qk_norm": "head",
            "attention.no_rope_every": 2,
            **LLAMA3,
        }
    ),
    "mod_capacity_list": _mod(
        losses=("predictor_bce", "router_bce"),
        **{
            "preset": "gpt2",
            "depth_routing.blocks": (0, 1),
            "depth_routing.gate": "identity",
            "depth_routing.capacity": (0.25, 0.75),
            "depth_routing.causal": "predictor",
            "depth_routing.also_train": ("aux_loss",),
            "depth_routing.predictor_hidden": 6,
        },
    ),
    "mod_stochastic": _mod(
        looks_ahead=False,
        losses=(),
        **{
            "depth_routing.train_selection": "stochastic",
        },
    ),
    "mod_fixed": _mod(
        looks_ahead=False,
        losses=(),
        **{
            "depth_routing.train_selection": "position",
            "depth_routing.every": 1,
        },
    ),
    "mod_threshold": _mod(
        looks_ahead=False,
        losses=(),
        **{
            "depth_routing.causal": "threshold",
            "depth_routing.train_selection": "threshold",
            "depth_routing.slack": 1.2,
        },
    ),
    "mod_context": _mod(
        **{
            "block_kind": "post_norm",
            "attention.bias": "qkv",
            "depth_routing.kv_for_skipped": True,
            "depth_routing.skip_mlp": 16,
            "attention.num_kv_heads": 2,
            "attention.window": 9,
            "depth_routing.every": 1,
            "depth_routing.also_train": ("threshold",),
        }
    ),
    "recursion": _mod(
        **{
            "depth": 4,
            "depth_routing.kind": "recursion",
            "depth_routing.recursions": 3,
            "depth_routing.capacity": (1.0, 0.7, 0.4),
            "attention.num_kv_heads": 2,
            "attention.chunk": 10,
        }
    ),
    "recursion_context": _mod(
        **{
            "depth": 4,
            "depth_routing.kind": "recursion",
            "depth_routing.capacity": (0.7, 0.4),
            "depth_routing.kv_for_skipped": True,
            "depth_routing.skip_mlp": 16,
            "attention.window": 9,
            "attention.num_kv_heads": 2,
        }
    ),
    "moe": _moe(**{"mlp.moe.num_shared": 1}),
    "moe_switch": _moe(
        **{
            "preset": "gpt2",
            "mlp.moe.every": 2,
            "mlp.moe.num_experts": 3,
            "mlp.moe.top_k": 1,
            "mlp.moe.renormalise": False,
            "mlp.moe.capacity_factor": 1.25,
        }
    ),
    "moe_expert_choice": _moe(
        ("expert_bce",),
        looks_ahead=True,
        **{
            "mlp.moe.router": "expert_choice",
            "mlp.moe.capacity": 0.4,
            "mlp.moe.slack": 1.0,
        },
    ),
    "mode_staged": _moe(
        ("router_bce", "load_balance", "router_z"),
        looks_ahead=True,
        **{
            "depth_routing.kind": "mod",
            "depth_routing.capacity": 0.5,
            "depth_routing.every": 1,
            "mlp.moe.num_noop": 2,
        },
    ),
    "dropout_elementwise": Family(
        {
            "attention.chunk": 20,
            "attention.num_kv_heads": 2,
            "attention.window": 9,
            "dropout.kind": "elementwise",
            "dropout.elementwise.detach": False,
        },
        losses=PENALTIES,
    ),
    "dropout_elementwise_mod": _mod(
        losses=("predictor_bce", *PENALTIES),
        **{
            "preset": "gpt2",
            "depth_routing.causal": "predictor",
            "depth_routing.predictor_hidden": 6,
            "dropout.kind": "elementwise",
            "depth_routing.kv_for_skipped": True,
            "depth_routing.every": 1,
            "dropout.elementwise.detach": False,
        },
    ),
    "dropout_attention": Family(
        {
            "attention.chunk": 20,
            "attention.window": 9,
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS,
            "dropout.attention.num_heads": 2,
            "dropout.attention.rounding": "none",
        },
        losses=PENALTIES,
    ),
    "dropout_attention_mod": _mod(
        losses=("router_bce", *PENALTIES),
        **{
            "depth_routing.every": 1,
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS,
            "dropout.attention.rounding": "stochastic",
        },
    ),
    "dropout_embedding_moe": _moe(
        ("load_balance", "router_z", *PENALTIES),
        **{
            "preset": "gpt2",
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS,
            "dropout.attention.input": "embedding",
            "mlp.moe.every": 2,
            "dropout.attention.rounding": "sigmoid_straight_through",
        },
    ),
    "mode_integrated": _moe(**{"mlp.moe.num_noop": 2, "mlp.moe.capacity_factor": 1.25}),
    "soft": Family(
        {
            "soft_experts.num": 4,
            "soft_experts.shared": 1,
            "soft_experts.hidden_multiple": 1.5,
            "attention.chunk": 20,
        }
    ),
    "soft_options": Family(
        {
            "block_kind": "parallel",
            "attention.bias": "qkv",
            "preset": "gpt2",
            "soft_experts.num": 3,
            "soft_experts.shared_kv": True,
            "attention.num_kv_heads": 2,
            "soft_experts.merge": "max",
            "soft_experts.multiple": 2,
            "attention.qk_norm": "width",
            "attention.window": 9,
            "attention.scale": "mup",
            "soft_experts.hidden_multiple": 1.0,
        }
    ),
    "soft_mod": _mod(
        losses=("router_bce", *PENALTIES),
        **{
            "soft_experts.num": 2,
            "soft_experts.every": 2,
            "soft_experts.merge": "mean",
            "block_kind": "post_norm",
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS[1:],
            "dropout.attention.rounding": "none",
            "depth_routing.kv_for_skipped": True,
            "soft_experts.hidden_multiple": 1.0,
        },
    ),
    "averages": Family(
        {
            "dense_former.on": True,
            "depth": 3,
            "attention.chunk": 20,
            "dropout.kind": "attention",
            "dropout.sites": ("attention_output", "mlp_output"),
            "dropout.attention.granularity": "token",
            "dropout.attention.rounding": "none",
        },
        losses=PENALTIES,
    ),
    "averages_mod": _mod(
        **{
            "preset": "gpt2",
            "depth": 5,
            "dense_former.on": True,
            "dense_former.dilation": 2,
            "dense_former.period": 2,
        }
    ),
    "mup": Family({"mup.base_width": 16, "initialisation": "spike_no_more", "preset": "gpt2"}),
    "streams_same": _streams(
        **{
            "cross_source": "same_layer",
            "cross_heads": 8,
            "attention.chunk": 20,
            "use_bias": True,
            "output_positions": "subtract_norm",
            "embedding_loss_gains": True,
            "mup.base_width": 16,
            "initialisation": "spike_no_more",
        }
    ),
    "streams_parallel": _streams(
        **{
            "cross_source": "previous_layer",
            "order": "cross_first",
            "depth": 3,
            "encoder_depth": 4,
            "decoder_input_norm": True,
            "decoder_input_positions": True,
            "attention.chunk": 10,
            "embedding_loss": "log_cosine",
            "attention.window": 9,
            "attention.qk_norm": "head",
            "logit_softcap": 8.0,
        }
    ),
    "streams_final": _streams(
        *PENALTIES,
        **{
            "cross_source": "final",
            "order": "cross_only",
            "block_kind": "post_norm",
            "serial_start": "embedding",
            "encoder_depth": 3,
            "norm": "rmsnorm",
            "output_positions": "none",
            "embedding_loss": "cosine",
            "mlp.activation": "swiglu",
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS,
            "dropout.attention.input": "embedding",
            "dropout.attention.rounding": "none",
        },
    ),
    "streams_masks": _streams(
        *PENALTIES,
        **{
            "cross_source": "previous_layer",
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS,
            "dropout.attention.rounding": "none",
        },
    ),
    "streams_moe": dataclasses.replace(
        _moe(
            **{
                "family": "encoder_decoder",
                "cross_source": "same_layer",
                "mlp.moe.every": 2,
                "attention.chunk": 20,
                "dropout.kind": "elementwise",
            }
        ),
        losses=("embedding", "load_balance", "router_z", *PENALTIES),
    ),
    "streams_mod": _streams(
        row=_mod(**{"depth_routing.every": 1, "depth_routing.also_train": ("threshold",)}),
        **{
            "cross_source": "previous_layer",
            "positions": "rope",
            "attention.rope_fraction": 0.5,
            "attention.no_rope_every": 2,
            "block_kind": "parallel",
            "attention.num_kv_heads": 2,
            "attention.chunk": 10,
            "cross_heads": 8,
            "cross_kv_heads": 4,
            "dense_former.on": True,
        },
    ),
    "streams_mod_context": _streams(
        row=_mod(losses=("router_bce", "load_balance", "router_z")),
        **{
            "cross_source": "same_layer",
            "order": "cross_first",
            "depth_routing.blocks": (1, 2, 3),
            "depth_routing.capacity": (0.5, 0.7, 0.3),
            "depth_routing.slack": 1.0,
            "depth_routing.kv_for_skipped": True,
            "depth_routing.skip_mlp": 16,
            "attention.window": 9,
            "mlp.kind": "moe",
            "mlp.moe.every": 2,
            "mlp.moe.num_experts": 4,
            "mlp.moe.capacity_factor": 1.0,
        },
    ),
    "streams_soft_mod": _streams(
        *PENALTIES,
        row=_mod(**{"depth_routing.every": 1}),
        **{
            "cross_source": "final",
            "soft_experts.num": 2,
            "soft_experts.every": 2,
            "soft_experts.shared": 1,
            "soft_experts.shared_kv": True,
            "soft_experts.hidden_multiple": 1.0,
            "cross_kv_heads": 2,
            "dense_former.on": True,
            "positions": "rope",
            "dropout.kind": "attention",
            "dropout.sites": NO_PROBS,
            "dropout.attention.rounding": "none",
        },
    ),
    "latent": _latent(),
    "latent_levels": _latent(
        **{
            "group_size": 12,
            "latents": (5, 2),
            "level_widths": (16, 24),
            "level_heads": (2, 3),
            "compression": "transformer",
            "compression_blocks": 2,
            "upsampling": "attention",
            "upsampling_norm": False,
            "skip": "lerp",
            "repeat": "in_place",
            "block_order": "sequence",
            "attention.chunk": 5,
            "encoder_local": (2, 1),
            "encoder_global": (1, 0),
            "decoder_global": (0, 1),
            "positions": "both",
            "attention.qk_norm": "head",
            "use_bias": True,
            "tied": False,
            "logit_softcap": 8.0,
            "mlp.activation": "swiglu",
        }
    ),
    "latent_memory": _latent(
        **{
            "group_size": 6,
            "memory_local": 2,
            "memory_global": 3,
            "positions": "rope",
            "block_kind": "parallel",
            "attention.rope_fraction": 0.5,
            "attention.no_rope_every": 2,
            "level_heads": (2,),
            "attention.num_heads": 2,
            "attention.scale": "mup",
            "skip_joins": "before",
        }
    ),
    "latent_mod": _latent(
        _mod(
            **{
                "depth_routing.every": 1,
                "depth_routing.also_train": ("threshold",),
                "group_size": 6,
                "memory_global": 2,
                "depth_routing.slack": 1.2,
            }
        )
    ),
    "latent_moe": _latent(_moe(**{"mlp.moe.every": 2, "level_widths": (16,), "level_heads": ()})),
    "latent_parts": _latent(
        Family(
            {
                "soft_experts.num": 3,
                "soft_experts.every": 2,
                "soft_experts.shared": 1,
                "dense_former.on": True,
                "latent_loss.kind": "cosine",
                "mup.base_width": 16,
                "initialisation": "spike_no_more",
                "upsampling": "attention",
                "positions": "level",
            },
            losses=("latent_prediction",),
        )
    ),
    "latent_window": _latent(
        Family({}, losses=PENALTIES),
        **{
            "group_size": 12,
            "latents": (5,),
            "memory_local": 1,
            "memory_global": 2,
            "upsampling": "attention",
            "positions": "both",
            "attention.window": 4,
            "attention.head_dim": 6,
            "attention.num_kv_heads": 2,
            "level_heads": (),
            "soft_experts.num": 2,
            "soft_experts.shared_kv": True,
            "soft_experts_in": "levels",
            "soft_experts.hidden_multiple": 1.0,
            "dropout.kind": "elementwise",
        },
    ),
    "latent_masks": _latent(
        Family(
            {
                "dropout.kind": "attention",
                "dropout.sites": NO_PROBS,
                "memory_local": 1,
                "memory_global": 1,
                "upsampling": "attention",
                "dropout.attention.input": "embedding_linear",
                "dropout.attention.rounding": "none",
            },
            losses=PENALTIES,
        )
    ),
    "latent_hidden_masks": _latent(
        Family(
            {
                "dropout.kind": "attention",
                "dropout.sites": NO_PROBS,
                "compression": "transformer",
                "compression_blocks": 2,
                "block_kind": "post_norm",
                "attention.window": 3,
                "dropout.attention.rounding": "none",
            },
            losses=PENALTIES,
        )
    ),
    "adapter": _adapted(kind="mlp", **{"preset": "gpt2", "adapter.gate": True}),
    "adapter_mod": _adapted(
        experts=3,
        **{
            "depth_routing.kind": "mod",
            "depth_routing.train_selection": "token_hash",
            "depth_routing.capacity": 0.5,
            "adapter.routing": "topk",
            "adapter.sites": ".*/(query|key|up)",
            "depth_routing.kv_for_skipped": True,
            "depth_routing.skip_mlp": 16,
            "depth_routing.every": 1,
        },
    ),
    "adapter_recursion": _adapted(
        experts=2,
        looks_ahead=True,
        losses=("router_bce",),
        **{
            "depth": 4,
            "depth_routing.kind": "recursion",
            "depth_routing.recursions": 2,
            "depth_routing.capacity": 0.5,
            "adapter.routing": "uniform",
        },
    ),
    "adapter_streams": _adapted(
        experts=3,
        losses=("embedding",),
        **{
            "family": "encoder_decoder",
            "mlp.hidden": 64,
            "adapter.routing": "topk",
            "adapter.sites": ".*/(query|up|out)",
        },
    ),
    "adapter_latent": _latent(
        _adapted(
            experts=2,
            looks_ahead=True,
            losses=("inclusion_bce",),
            **{
                "adapter.routing": "inclusion",
                "adapter.capacity": 0.4,
                "adapter.slack": 1.0,
                "adapter.sites": ".*/(query|up)",  # of each kind; all take eight times as long
                "memory_local": 2,
                "upsampling": "attention",
            },
        )
    ),
    "adapter_inclusion": _adapted(
        experts=3,
        kind="mlp",
        looks_ahead=True,
        losses=("inclusion_bce",),
        **{
            "adapter.routing": "inclusion",
            "adapter.capacity": 0.4,
            "adapter.slack": 1.0,
            "adapter.sites": ".*/(value|gate|down)",
            "attention.num_kv_heads": 2,
            "attention.chunk": 20,
        },
    ),
}
NAMES = tuple(FAMILIES)


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


def logits_of(name, tokens_BT, selection="causal"):
    return np.asarray(forward(name, selection)(params_of(name), tokens_BT))


def loss_fn(model):
    """(params, tokens) -> scalar: cross-entropy and all sown losses, routed as in training."""
    model = model.clone(selection="train")
    state = random_state(model)

    def loss(params, tokens_BT):
        logits, sown = model.apply(
            {"params": params, **state}, tokens_BT, mutable=["losses"], rngs=keys()
        )
        targets_BT = jnp.roll(tokens_BT, -1, axis=1)
        sums = losses.cross_entropy(logits, targets_BT, jnp.ones(targets_BT.shape))
        extra = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(sown))
        return sums.total / sums.weights + 0.1 * extra

    return loss


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
