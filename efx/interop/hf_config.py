"""What a Hugging Face config.json says, as config.model, and the other way round."""

from efx.errors import UsageError

# What a config.json may leave out, with transformers' own defaults.
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
# What efx's attention can do and neither format can say.
_PLAIN = dict(
    qk_norm="none",
    attention_scale="sqrt",
    window=0,
    attention_softcap=0.0,
    logit_softcap=0.0,
)


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
                "num_heads": hf["n_head"],
                "num_kv_heads": 0,
                "head_dim": 0,
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
                "num_heads": hf["num_attention_heads"],
                "num_kv_heads": hf["num_key_value_heads"] or 0,
                "head_dim": hf["head_dim"] or 0,
                "norm": "rmsnorm",
                "norm_eps": float(hf["rms_norm_eps"]),
                "use_bias": bool(hf["attention_bias"]),
                "positions": "rope",
                "rope_theta": _rope_theta(hf),
                "mlp.activation": _ACTIVATIONS[kind][hf["hidden_act"]],
                "mlp.hidden": hf["intermediate_size"],
            }
        )
    return {f"model.{key}": value for key, value in changes.items()}


def config_to_hf(model):
    """The config.json, as a dict, of a dense decoder. Raises UsageError where there is none."""
    model, kind = model.resolved(), kind_of(model)
    if model.depth_routing.kind != "none":
        raise UsageError(
            f"config.model.depth_routing.kind={model.depth_routing.kind!r}: a Hugging Face "
            f"{kind} checkpoint has no place for routers; only dense models can be written"
        )
    if model.mlp.kind != "dense":
        raise UsageError(
            f"config.model.mlp.kind={model.mlp.kind!r}: a Hugging Face {kind} checkpoint has no "
            "place for experts; only dense models can be written"
        )
    if model.dropout.learned:
        raise UsageError(
            f"config.model.dropout.kind={model.dropout.kind!r}: a Hugging Face {kind} checkpoint "
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
        tie_word_embeddings=model.tied,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=model.init_std,
    )
    if kind == "gpt2":
        names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS[kind].items())}
        return dict(
            common,
            architectures=["GPT2LMHeadModel"],
            n_positions=model.context,
            n_embd=model.width,
            n_layer=model.depth,
            n_head=model.num_heads,
            n_inner=model.mlp.hidden_size(model.width),
            layer_norm_epsilon=model.norm_eps,
            activation_function=names[model.mlp.activation],
        )
    return dict(
        common,
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=model.context,
        hidden_size=model.width,
        intermediate_size=model.mlp.hidden_size(model.width),
        num_hidden_layers=model.depth,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_act="silu",
        rms_norm_eps=model.norm_eps,
        attention_bias=model.use_bias,
        mlp_bias=model.use_bias,
        # Before transformers 5 the first key is read, since then the second.
        rope_theta=model.rope_theta,
        rope_parameters=dict(rope_theta=model.rope_theta, rope_type="default"),
    )


def complete(hf):
    """config.json with the keys that it leaves to transformers' defaults."""
    kind = hf["model_type"] if "model_type" in hf else None
    if kind not in _DEFAULTS:
        raise UsageError(
            f"config.json: model_type={kind!r}: efx reads {' and '.join(_DEFAULTS)} checkpoints"
        )
    return {**_DEFAULTS[kind], **hf}


def _rope_theta(hf):
    """The base of plain rotary embeddings; transformers has had two places for it."""
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
    """ "gpt2" or "llama": the format that computes what this decoder computes, but for routing."""
    model = model.resolved()
    kind = {"learned": "gpt2", "rope": "llama", "none": None}[model.positions]
    wanted = {
        "gpt2": dict(norm="layernorm", num_kv_heads=model.num_heads),
        "llama": dict(norm="rmsnorm"),
    }
    if kind is None:
        raise UsageError("config.model.positions='none': no Hugging Face format is without")
    for name, value in {**_PLAIN, **wanted[kind]}.items():
        if getattr(model, name) != value:
            raise UsageError(
                f"config.model.{name}={getattr(model, name)!r}: Hugging Face's {kind} format "
                f"has {value!r}"
            )
    absent = {
        "soft_experts.num": model.soft_experts.num,
        "dense_former.on": model.dense_former.on,
        "mup.base_width": model.mup.base_width,
    }
    for name, value in absent.items():
        if value:
            raise UsageError(
                f"config.model.{name}={value}: Hugging Face's {kind} format has no place for it"
            )
    if model.mlp.activation not in _ACTIVATIONS[kind].values():
        raise UsageError(
            f"config.model.mlp.activation={model.mlp.activation!r}: Hugging Face's {kind} format "
            f"has {' or '.join(sorted(set(_ACTIVATIONS[kind].values())))}"
        )
    if kind == "gpt2" and model.num_heads * model.head_dim != model.width:
        raise UsageError(
            f"config.model.head_dim={model.head_dim}: Hugging Face's gpt2 format has "
            f"width / num_heads = {model.width / model.num_heads:g}"
        )
    return kind
