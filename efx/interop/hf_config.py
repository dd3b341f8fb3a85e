"""Converts between a Hugging Face config.json and config.model.

Every key of a config.json is in one of two lists: those that decide what is computed, which are
turned into settings or refused, and those that say nothing about it. A key in neither is refused,
so that nothing is computed otherwise than its config says.
"""

import dataclasses
import operator
from collections.abc import Callable

from efx.config import schema
from efx.errors import UsageError, nearest

# Keys that carry no mathematics of a forward pass: who made the file and with what, special tokens
# (the tokenizer's own file decides), how generation or training went, heads for other tasks.
SILENT = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path _num_labels architectures
    attention_dropout attention_probs_dropout_prob attn_pdrop auto_map bos_token_id
    chunk_size_feed_forward classifier_dropout classifier_dropout_prob do_sample dtype embd_pdrop
    eos_token_id finetuning_task gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range is_llama_config label2id max_length max_window_layers model_type n_ctx
    num_labels output_attentions output_hidden_states output_past pad_token_id
    predict_special_tokens prefix pretraining_tp problem_type reorder_and_upcast_attn resid_pdrop
    return_dict summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params temperature tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache""".split()
)
# Keys that decide what is computed where they are not what they are here.
_PLAIN_KEYS = {
    "add_cross_attention": (False,),
    "is_decoder": (False, True),  # of a class that can also encode; here it decodes either way
    "is_encoder_decoder": (False,),
    "n_special": (0,),  # rows of the embedding besides vocab_size
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}
# What they are if a config.json leaves them out: transformers' defaults.
_LLAMA = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    hidden_act="silu",
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    rope_theta=10000.0,
    rope_scaling=None,
    rope_parameters=None,
)
_WINDOWS = dict(use_sliding_window=False, sliding_window=None, layer_types=None)
_QWEN = dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    **_WINDOWS,
    max_window_layers=28,
)
_DEFAULTS = {
    "gpt2": dict(
        vocab_size=50257,
        n_positions=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
    ),
    "gpt_neox": dict(
        vocab_size=50432,
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
        hidden_act="gelu",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        attention_bias=True,
        rotary_pct=0.25,
        partial_rotary_factor=None,
        rotary_emb_base=10000.0,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters=None,
    ),
    "llama": _LLAMA,
    "olmo2": {key: value for key, value in _LLAMA.items() if key != "mlp_bias"}
    | dict(vocab_size=50304, rms_norm_eps=1e-5),
    "qwen2": {key: value for key, value in _LLAMA.items() if not key.endswith("_bias")} | _QWEN,
    "qwen3": {key: value for key, value in _LLAMA.items() if key != "mlp_bias"}
    | _QWEN
    | dict(head_dim=128),
    "smollm3": _LLAMA
    | dict(
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_theta=2000000.0,
        **_WINDOWS,
        no_rope_layers=None,
        no_rope_layer_interval=4,
    ),
}
_ACTIVATIONS = {
    "gpt2": {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
    "gpt_neox": {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    },
    "llama": {"silu": "swiglu"},
}
# The values of settings that a config.json which says nothing of them means.
_PLAIN = {
    "attention.qk_norm": "none",
    "attention.score_factor": 1.0,
    "attention.window": 0,
    "attention.softcap": 0.0,
    "attention.rope_fraction": 1.0,
    "attention.no_rope_every": 0,
    "attention.rope_scaling.kind": "none",
    "block_kind": "pre_norm",
    "logit_softcap": 0.0,
}
# Parts that no such checkpoint has.
_ABSENT = {"soft_experts.num": 0, "dense_former.on": False, "mup.base_width": 0}


class _Keys:
    """The keys of a config.json, completed, by their kinds; UsageError for a wrong one."""

    def __init__(self, hf):
        self._hf = hf

    def __getitem__(self, key):
        return self._hf[key]

    def refuse(self, key, what, value=None):
        value = self._hf[key] if value is None else value
        raise UsageError(f"config.json: {key}={value!r}: {what}")

    def only(self, key, *allowed):
        value = self._hf[key]
        if not any(value == each and type(value) is type(each) for each in allowed):
            self.refuse(key, f"efx reproduces {' or '.join(map(repr, allowed))}")
        return value

    def flag(self, key):
        return self.only(key, True, False)

    def count(self, key, absent=None):
        """A number of things; `absent` in the place of null, if that may be."""
        value = self._hf[key]
        if value is None and absent is not None:
            return absent
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "expected a whole number, at least 1", value)
        return value

    def number(self, key):
        return self.positive(key, self._hf[key])

    def positive(self, key, value):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise UsageError(f"config.json: {key}={value!r}: expected a number above 0")
        return float(value)

    def choice(self, key, names):
        """What stands for the value in {value: ours}."""
        return names[self.only(key, *names)]


def config_from_hf(hf):
    """{dotted config key: value} that make `config.model` compute what a config.json describes.

    Args:
      hf: contents of config.json, whose `model_type` is one of `ARCHITECTURES`.
    Returns: changes for `config.update_from_flattened_dict`. Depth routing, dropout, remat,
      scanning and vocabulary padding are not touched; the vocabulary's size is `hf["vocab_size"]`.
    Raises: UsageError naming the key that efx does not know, or whose value it cannot reproduce.
    """
    hf = complete(hf)
    kind, keys = hf["model_type"], _Keys(hf)
    _check_known(hf, kind)
    for key in hf.keys() & _PLAIN_KEYS.keys():
        if hf[key] is not None:
            keys.only(key, *_PLAIN_KEYS[key])
    keys.count("vocab_size")
    changes = {
        **_PLAIN,
        **_ABSENT,
        "family": "decoder",
        "preset": "gpt2" if kind == "gpt2" else "llama",
        "mlp.kind": "dense",
        "tied": keys.flag("tie_word_embeddings"),
        **ARCHITECTURES[kind].settings(keys),
    }
    return {f"model.{key}": value for key, value in changes.items()}


def _check_known(hf, kind):
    known = _DEFAULTS[kind].keys() | _PLAIN_KEYS.keys() | SILENT
    for key in sorted(hf.keys() - known):
        raise UsageError(
            f"config.json: {key}={hf[key]!r}: efx does not support this setting of {kind}"
            + nearest(key, _DEFAULTS[kind])
        )


def _bias(keys):
    """`attention.bias` of architectures that have it at all projections or at none."""
    return "all" if keys.flag("attention_bias") else "none"


def _gpt2(keys):
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    width = keys.count("n_embd")
    return {
        "context": keys.count("n_positions"),
        "width": width,
        "depth": keys.count("n_layer"),
        "attention.num_heads": keys.count("n_head"),
        "attention.num_kv_heads": 0,
        "attention.head_dim": 0,
        "attention.bias": "all",
        "norm": "layernorm",
        "norm_eps": keys.number("layer_norm_epsilon"),
        "use_bias": True,
        "positions": "learned",
        "mlp.activation": keys.choice("activation_function", _ACTIVATIONS["gpt2"]),
        "mlp.hidden": keys.count("n_inner", absent=4 * width),
    }


def _gpt_neox(keys):
    fraction = keys["partial_rotary_factor"] or keys["rotary_pct"]
    theta = keys["rope_theta"] or keys["rotary_emb_base"]
    parallel = keys.flag("use_parallel_residual")
    return {
        "context": keys.count("max_position_embeddings"),
        "width": keys.count("hidden_size"),
        "depth": keys.count("num_hidden_layers"),
        "attention.num_heads": keys.count("num_attention_heads"),
        "attention.num_kv_heads": 0,
        "attention.head_dim": 0,
        "attention.bias": _bias(keys),
        "block_kind": "parallel" if parallel else "pre_norm",
        "norm": "layernorm",
        "norm_eps": keys.number("layer_norm_eps"),
        "use_bias": True,
        "positions": "rope",
        "mlp.activation": keys.choice("hidden_act", _ACTIVATIONS["gpt_neox"]),
        "mlp.hidden": keys.count("intermediate_size"),
        **_rope(keys, theta, fraction),
    }


def _llama(keys):
    heads = keys.count("num_attention_heads")
    return {
        "context": keys.count("max_position_embeddings"),
        "width": keys.count("hidden_size"),
        "depth": keys.count("num_hidden_layers"),
        "attention.num_heads": heads,
        "attention.num_kv_heads": keys.count("num_key_value_heads", absent=heads),
        "attention.head_dim": keys.count("head_dim", absent=0) if keys["head_dim"] else 0,
        "attention.bias": "none",
        "norm": "rmsnorm",
        "norm_eps": keys.number("rms_norm_eps"),
        "use_bias": False,
        "positions": "rope",
        "mlp.activation": keys.choice("hidden_act", _ACTIVATIONS["llama"]),
        "mlp.hidden": keys.count("intermediate_size"),
        **_rope(keys, keys["rope_theta"]),
    }


def _with_biases(keys):
    return {**_llama(keys), "attention.bias": _bias(keys), "use_bias": keys.flag("mlp_bias")}


def _olmo2(keys):
    return {
        **_llama(keys),
        "attention.bias": _bias(keys),
        "attention.qk_norm": "width",
        "block_kind": "post_norm",
    }


def _qwen2(keys):
    return {**_llama(keys), "attention.bias": "qkv", "attention.window": _window(keys)}


def _qwen3(keys):
    return {
        **_llama(keys),
        "attention.bias": _bias(keys),
        "attention.qk_norm": "head",
        "attention.window": _window(keys),
    }


def _smollm3(keys):
    depth, layers = keys.count("num_hidden_layers"), keys["no_rope_layers"]
    if layers is None:
        every = keys.count("no_rope_layer_interval")
    else:
        if (
            not isinstance(layers, list)
            or len(layers) < depth
            or any(layer not in (0, 1) for layer in layers)
        ):
            keys.refuse("no_rope_layers", f"expected 0 or 1 for each of the {depth} layers")
        layers = layers[:depth]
        every = layers.index(0) + 1 if 0 in layers else 0
        if layers != [int(not every or (i + 1) % every != 0) for i in range(depth)]:
            keys.refuse(
                "no_rope_layers",
                "efx reproduces layers without rotary positions at equal distances",
            )
    changes = {**_with_biases(keys), "attention.no_rope_every": every}
    windowed = [every and (i + 1) % every == 0 for i in range(depth)]
    return changes | {"attention.window": _window_of(keys, windowed)}


def _window(keys):
    """`attention.window` of a Qwen, whose layers from number `max_window_layers` on have one."""
    first = keys["max_window_layers"]
    if first != 0 or isinstance(first, bool):
        first = keys.count("max_window_layers")
    return _window_of(keys, [i >= first for i in range(keys.count("num_hidden_layers"))])


def _window_of(keys, windowed):
    """`attention.window`. windowed: which layers have one if `layer_types` does not say so."""
    used = keys.flag("use_sliding_window") and keys["sliding_window"] is not None
    kinds = ["full_attention", "sliding_attention"]
    types = keys["layer_types"]
    if types is None:
        types = [kinds[bool(used and each)] for each in windowed]
    known = isinstance(types, list) and len(types) == len(windowed)
    if not known or any(each not in kinds for each in types):
        keys.refuse("layer_types", f"expected one of {', '.join(kinds)} for each layer")
    if set(types) == {"full_attention"}:
        return 0
    if len(set(types)) > 1 or not used:
        keys.refuse("layer_types", "efx supports one attention.window for all layers", types)
    return keys.count("sliding_window")


# The further keys of each kind of scaled rotary positions, and ours.
_ROPE_SCALING = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context",
    },
}


def _rope(keys, theta, fraction=None):
    """Settings of rotary positions; versions of transformers store them in different keys.

    Args:
      theta, fraction: what the keys outside of `rope_parameters` say. fraction None: the
        architecture turns whole heads.
    """
    name = "rope_scaling" if keys["rope_scaling"] else "rope_parameters"
    rope = keys[name] or {}
    if not isinstance(rope, dict):
        keys.refuse(name, "expected a block of settings")
    given = dict(rope)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    theta = keys.positive(f"{name}.rope_theta", given.pop("rope_theta", theta))
    whole = fraction is None
    fraction = keys.positive(
        f"{name}.partial_rotary_factor", given.pop("partial_rotary_factor", fraction or 1.0)
    )
    if fraction > 1 or (whole and fraction < 1):
        raise UsageError(
            f"config.json: {name}.partial_rotary_factor={fraction}: efx reproduces "
            + ("1.0" if whole else "at most 1.0")
        )
    if not isinstance(kind, str) or kind not in _ROPE_SCALING:
        raise UsageError(
            f"config.json: {name}.rope_type={kind!r}: efx reproduces "
            f"{', '.join(map(repr, _ROPE_SCALING))}"
        )
    scaling = {"kind": "none" if kind == "default" else kind}
    for theirs, ours in _ROPE_SCALING[kind].items():
        if theirs not in given:
            raise UsageError(f"config.json: {name}.{theirs} is missing, but {kind!r} needs it")
        number = keys.positive(f"{name}.{theirs}", given.pop(theirs))
        scaling[ours] = int(number) if ours == "original_context" else number
    for key, value in given.items():
        raise UsageError(
            f"config.json: {name}.{key}={value!r}: efx does not support this setting of "
            f"{kind!r} rotary positions"
        )
    return {
        "attention.rope_theta": theta,
        "attention.rope_fraction": fraction,
        **{f"attention.rope_scaling.{key}": value for key, value in scaling.items()},
    }


# ---- from settings to a config.json -------------------------------------------------------------


def _named(kind, activation):
    """What a format calls an activation, of several names the first; one that it lacks, anything:
    what is written is read again and compared."""
    names = _ACTIVATIONS[kind]
    return next((theirs for theirs, ours in names.items() if ours == activation), next(iter(names)))


def _write_gpt2(c):
    return dict(
        n_positions=c.context,
        n_embd=c.width,
        n_layer=c.depth,
        n_head=c.attention.num_heads,
        n_inner=c.mlp.hidden_size(c.width),
        layer_norm_epsilon=c.norm_eps,
        activation_function=_named("gpt2", c.mlp.activation),
    )


def _write_gpt_neox(c):
    turned = {"partial_rotary_factor": c.attention.rope_fraction}
    return dict(
        _write_sizes(c),
        layer_norm_eps=c.norm_eps,
        hidden_act=_named("gpt_neox", c.mlp.activation),
        attention_bias=c.attention.bias == "all",
        use_parallel_residual=c.block_kind == "parallel",
        # Before transformers 5.
        rotary_pct=c.attention.rope_fraction,
        rotary_emb_base=c.attention.rope_theta,
        **_write_rope(c.attention, turned),
    )


def _write_sizes(c):
    return dict(
        max_position_embeddings=c.context,
        hidden_size=c.width,
        intermediate_size=c.mlp.hidden_size(c.width),
        num_hidden_layers=c.depth,
        num_attention_heads=c.attention.num_heads,
    )


def _write_rope(a, further=()):
    """Before transformers 5 the first keys are read, since then the last."""
    theta = a.rope_theta or 1.0  # without rotary positions, which reading it again shows
    scaling = dict(rope_type="default" if a.rope_scaling.kind == "none" else a.rope_scaling.kind)
    for theirs, ours in _ROPE_SCALING[scaling["rope_type"]].items():
        scaling[theirs] = getattr(a.rope_scaling, ours)
    return dict(
        rope_theta=theta,
        **({} if scaling["rope_type"] == "default" else {"rope_scaling": scaling}),
        rope_parameters=dict(scaling, rope_theta=theta, **dict(further)),
    )


def _write_common(c):
    return dict(
        _write_sizes(c),
        num_key_value_heads=c.attention.num_kv_heads,
        head_dim=c.attention.head_dim,
        hidden_act="silu",
        rms_norm_eps=c.norm_eps,
        **_write_rope(c.attention),
    )


def _write_bias(c):
    return dict(attention_bias=c.attention.bias == "all")


def _write_window(c):
    window = c.attention.window
    return dict(
        use_sliding_window=window > 0,
        sliding_window=window or None,
        layer_types=["sliding_attention" if window else "full_attention"] * c.depth,
    )


def _write_llama(c):
    return dict(_write_common(c), **_write_bias(c), mlp_bias=c.use_bias)


def _write_olmo2(c):
    return dict(_write_common(c), **_write_bias(c))


def _write_qwen2(c):
    return dict(_write_common(c), **_write_window(c))


def _write_qwen3(c):
    return dict(_write_common(c), **_write_bias(c), **_write_window(c))


def _write_smollm3(c):
    layers = [int(c.attention.of_block(i).rope_theta > 0) for i in range(c.depth)]
    return dict(_write_llama(c), **_write_window(c), no_rope_layers=layers)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A `model_type` of transformers.

    Attributes:
      settings: _Keys -> settings of `config.model`.
      write: config of a decoder -> keys of config.json; of settings that the architecture lacks
        something else, which reading it again shows.
      model_class: that has a language model's output layer.
      name: for people.
    """

    settings: Callable
    write: Callable
    model_class: str
    name: str


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2, _write_gpt2, "GPT2LMHeadModel", "GPT-2"),
    "gpt_neox": Architecture(_gpt_neox, _write_gpt_neox, "GPTNeoXForCausalLM", "GPT-NeoX, Pythia"),
    "llama": Architecture(_with_biases, _write_llama, "LlamaForCausalLM", "Llama 2 and 3, SmolLM2"),
    "olmo2": Architecture(_olmo2, _write_olmo2, "Olmo2ForCausalLM", "OLMo 2"),
    "qwen2": Architecture(_qwen2, _write_qwen2, "Qwen2ForCausalLM", "Qwen2, Qwen2.5"),
    "qwen3": Architecture(_qwen3, _write_qwen3, "Qwen3ForCausalLM", "Qwen3"),
    "smollm3": Architecture(_smollm3, _write_smollm3, "SmolLM3ForCausalLM", "SmolLM3"),
}


def config_to_hf(model):
    """The config.json, as a dict, of a dense decoder: that of an architecture that has its settings
    exactly. Raises UsageError naming the setting for which there is none."""
    config, problem = find_architecture(model)
    if config is None:
        raise UsageError(problem)
    return config


def find_architecture(model, without=()):
    """(config.json of an architecture that has the settings of a decoder exactly, or None; which
    setting none of them has). without: architectures that do not count."""
    if problem := _without_place(model):
        return None, problem
    c, nearest_one = model.config, None
    c = schema.replaced(with_biases(c), {"mlp.hidden": c.mlp.hidden_size(c.width)})
    for kind, architecture in ARCHITECTURES.items():
        config = dict(
            model_type=kind,
            architectures=[architecture.model_class],
            vocab_size=model.vocab_size,
            tie_word_embeddings=c.tied,
            dtype="float32",
            # Some architectures have ids by default, of tokens that may not be there.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=c.init_std,
            **architecture.write(c),
        )
        differences = _differences(c, config)
        if not differences and kind not in without:
            return config, ""
        if differences and (nearest_one is None or len(differences) < len(nearest_one[1])):
            nearest_one = kind, differences
    kind, differences = nearest_one
    name, (ours, theirs) = next(iter(differences.items()))
    return None, f"{name}={ours!r}: Hugging Face's {kind} format has {theirs!r}"


def with_biases(c):
    """A config whose function is the same with biases of zero, if these are all that a GPT-2 has
    in addition."""
    if c.positions == "learned" and not c.use_bias and c.attention.bias == "none":
        return schema.replaced(c, {"use_bias": True, "attention.bias": "all"})
    return c


def _differences(c, hf):
    """{setting: (its value, that of a config.json)} where these differ."""
    changes = {key.removeprefix("model."): value for key, value in config_from_hf(hf).items()}
    del changes["preset"]
    heads = changes["attention.num_heads"]
    changes["attention.num_kv_heads"] = changes["attention.num_kv_heads"] or heads
    changes["attention.head_dim"] = changes["attention.head_dim"] or changes["width"] // heads
    read = schema.replaced(c, changes)
    return {
        name: (ours, theirs)
        for (name, _, ours), (_, _, theirs) in zip(
            schema.leaves(c), schema.leaves(read), strict=True
        )
        if ours != theirs
    }


def _without_place(model):
    """What of a decoder no architecture has a place for, in one line, or ""."""
    c = model.config
    checkpoint = "a Hugging Face checkpoint does not support"
    if hasattr(model, "adapter"):
        return (
            f"config.adapter.kind={model.adapter.kind!r}: {checkpoint} adapters; write their base"
        )
    if c.positions == "none":
        return "config.model.positions='none': every Hugging Face format has positions"
    if c.depth_routing.kind != "none":
        return (
            f"config.model.depth_routing.kind={c.depth_routing.kind!r}: {checkpoint} routers; only "
            "dense models can be written"
        )
    if c.mlp.kind != "dense":
        return (
            f"config.model.mlp.kind={c.mlp.kind!r}: {checkpoint} experts; only dense models can be "
            "written"
        )
    if c.dropout.learned:
        return f"config.model.dropout.kind={c.dropout.kind!r}: {checkpoint} learned masks"
    for name, value in _ABSENT.items():
        actual = operator.attrgetter(name)(c)
        if actual != value:
            return f"config.model.{name}={actual}: {checkpoint} it"
    return ""


def complete(hf):
    """config.json completed with transformers' defaults."""
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if kind == "efx":
        raise UsageError(
            "config.json: model_type='efx': efx cannot import its own exports; use the exported "
            "run directory"
        )
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise UsageError(
            f"config.json: model_type={kind!r}: efx reads "
            + ", ".join(f"{name} ({each.name})" for name, each in ARCHITECTURES.items())
        )
    return {**_DEFAULTS[kind], **hf}
