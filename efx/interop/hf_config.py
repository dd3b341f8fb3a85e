"""Converts between a Hugging Face config.json and config.model."""

import operator

from efx.errors import UsageError

# The keys that a config.json may leave out, with transformers' defaults.
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
        add_cross_attention=False,
    ),
    "llama": dict(
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
    ),
}
_ACTIVATIONS = {
    "gpt2": {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
    "llama": {"silu": "swiglu"},
}
# The values that both formats have; other values of these settings cannot be written.
_PLAIN = {
    "attention.qk_norm": "none",
    "attention.scale": "sqrt",
    "attention.window": 0,
    "attention.softcap": 0.0,
    "logit_softcap": 0.0,
}


def config_from_hf(hf):
    """{dotted config key: value} that make `config.model` compute what a config.json describes.

    Args:
      hf: contents of config.json, `model_type` "gpt2" or "llama".
    Returns: changes for `config.update_from_flattened_dict`. Depth routing, dropout, remat,
      scanning and vocabulary padding are not touched; the vocabulary's size is `hf["vocab_size"]`.
    Raises: UsageError naming the key whose value efx cannot reproduce.
    """
    hf = complete(hf)
    kind = hf["model_type"]

    def only(key, *allowed):
        if hf[key] not in allowed:
            raise UsageError(
                f"config.json: {key}={hf[key]!r}: efx reproduces "
                f"{' or '.join(repr(value) for value in allowed)}"
            )

    changes = dict(_PLAIN, family="decoder", preset=kind, tied=bool(hf["tie_word_embeddings"]))
    changes["mlp.kind"] = "dense"
    if kind == "gpt2":
        only("activation_function", *_ACTIVATIONS[kind])
        only("scale_attn_weights", True)
        only("scale_attn_by_inverse_layer_idx", False)
        only("add_cross_attention", False)
        changes.update(
            {
                "context": hf["n_positions"],
                "width": hf["n_embd"],
                "depth": hf["n_layer"],
                "attention.num_heads": hf["n_head"],
                "attention.num_kv_heads": 0,
                "attention.head_dim": 0,
                "norm": "layernorm",
                "norm_eps": float(hf["layer_norm_epsilon"]),
                "use_bias": True,
                "positions": "learned",
                "mlp.activation": _ACTIVATIONS[kind][hf["activation_function"]],
                "mlp.hidden": hf["n_inner"] or 4 * hf["n_embd"],
            }
        )
    else:
        only("hidden_act", *_ACTIVATIONS[kind])
        only("mlp_bias", hf["attention_bias"])
        changes.update(
            {
                "context": hf["max_position_embeddings"],
                "width": hf["hidden_size"],
                "depth": hf["num_hidden_layers"],
                "attention.num_heads": hf["num_attention_heads"],
                "attention.num_kv_heads": hf["num_key_value_heads"] or 0,
                "attention.head_dim": hf["head_dim"] or 0,
                "norm": "rmsnorm",
                "norm_eps": float(hf["rms_norm_eps"]),
                "use_bias": bool(hf["attention_bias"]),
                "positions": "rope",
                "attention.rope_theta": _rope_theta(hf),
                "mlp.activation": _ACTIVATIONS[kind][hf["hidden_act"]],
                "mlp.hidden": hf["intermediate_size"],
            }
        )
    return {f"model.{key}": value for key, value in changes.items()}


def config_to_hf(model):
    """The config.json, as a dict, of a dense decoder. Raises UsageError if it has none."""
    c, kind = model.config, kind_of(model)
    if c.depth_routing.kind != "none":
        raise UsageError(
            f"config.model.depth_routing.kind={c.depth_routing.kind!r}: a Hugging Face "
            f"{kind} checkpoint has no place for routers; only dense models can be written"
        )
    if c.mlp.kind != "dense":
        raise UsageError(
            f"config.model.mlp.kind={c.mlp.kind!r}: a Hugging Face {kind} checkpoint has no "
            "place for experts; only dense models can be written"
        )
    if c.dropout.learned:
        raise UsageError(
            f"config.model.dropout.kind={c.dropout.kind!r}: a Hugging Face {kind} checkpoint "
            "has no place for learned masks"
        )
    if hasattr(model, "adapter"):
        raise UsageError(
            f"config.adapter.kind={model.adapter.kind!r}: a Hugging Face {kind} checkpoint has no "
            "place for adapters; write their base"
        )
    common = dict(
        model_type=kind,
        vocab_size=model.vocab_size,
        tie_word_embeddings=c.tied,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=c.init_std,
    )
    if kind == "gpt2":
        names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS[kind].items())}
        return dict(
            common,
            architectures=["GPT2LMHeadModel"],
            n_positions=c.context,
            n_embd=c.width,
            n_layer=c.depth,
            n_head=c.attention.num_heads,
            n_inner=c.mlp.hidden_size(c.width),
            layer_norm_epsilon=c.norm_eps,
            activation_function=names[c.mlp.activation],
        )
    return dict(
        common,
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=c.context,
        hidden_size=c.width,
        intermediate_size=c.mlp.hidden_size(c.width),
        num_hidden_layers=c.depth,
        num_attention_heads=c.attention.num_heads,
        num_key_value_heads=c.attention.num_kv_heads,
        head_dim=c.attention.head_dim,
        hidden_act="silu",
        rms_norm_eps=c.norm_eps,
        attention_bias=c.use_bias,
        mlp_bias=c.use_bias,
        # Before transformers 5 the first key is read, since then the second.
        rope_theta=c.attention.rope_theta,
        rope_parameters=dict(rope_theta=c.attention.rope_theta, rope_type="default"),
    )


def complete(hf):
    """config.json completed with transformers' defaults."""
    kind = hf["model_type"] if "model_type" in hf else None
    if kind not in _DEFAULTS:
        raise UsageError(
            f"config.json: model_type={kind!r}: efx reads {' and '.join(_DEFAULTS)} checkpoints"
        )
    return {**_DEFAULTS[kind], **hf}


def _rope_theta(hf):
    """The base of plain rotary embeddings; versions of transformers store it in different keys."""
    rope = dict(hf["rope_parameters"] or hf["rope_scaling"] or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", hf["rope_theta"])
    if kind != "default" or rope:
        raise UsageError(
            f"config.json: rope_parameters={hf['rope_parameters'] or hf['rope_scaling']}: efx has "
            "rotary embeddings without scaling only"
        )
    return float(theta)


def kind_of(model):
    """ "gpt2" or "llama": the format of the function of this decoder, apart from routing."""
    c = model.config
    kind = {"learned": "gpt2", "rope": "llama", "none": None}[c.positions]
    required = {
        "gpt2": {"norm": "layernorm", "attention.num_kv_heads": c.attention.num_heads},
        "llama": {"norm": "rmsnorm"},
    }
    if kind is None:
        raise UsageError("config.model.positions='none': no Hugging Face format is without")
    absent = {
        "soft_experts.num": c.soft_experts.num,
        "dense_former.on": c.dense_former.on,
        "mup.base_width": c.mup.base_width,
    }
    for name, value in absent.items():
        if value:
            raise UsageError(
                f"config.model.{name}={value}: Hugging Face's {kind} format has no place for it"
            )
    for name, value in {**_PLAIN, **required[kind]}.items():
        actual = operator.attrgetter(name)(c)
        if actual != value:
            raise UsageError(
                f"config.model.{name}={actual!r}: Hugging Face's {kind} format has {value!r}"
            )
    if c.mlp.activation not in _ACTIVATIONS[kind].values():
        raise UsageError(
            f"config.model.mlp.activation={c.mlp.activation!r}: Hugging Face's {kind} format "
            f"has {' or '.join(sorted(set(_ACTIVATIONS[kind].values())))}"
        )
    if kind == "gpt2" and c.attention.num_heads * c.attention.head_dim != c.width:
        raise UsageError(
            f"config.model.attention.head_dim={c.attention.head_dim}: Hugging Face's gpt2 format "
            f"has width / num_heads = {c.width / c.attention.num_heads:g}"
        )
    return kind
