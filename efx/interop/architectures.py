"""Dense decoders of Hugging Face transformers as decoders of efx, and back.

`ARCHITECTURES` has a row for each `model_type`. A row maps keys of config.json to settings of
`config.model`, and modules of the state dict to modules of efx; import and export read the same
row. All functions work on dicts and arrays: neither torch nor transformers is needed.
"""

import dataclasses
import operator
import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import models
from efx.config import schema
from efx.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A `model_type` of transformers.

    Attributes:
      name: for people.
      model_class: the class with an output layer.
      settings: {key of config.json: setting of `config.model`, or (setting, {value in config.json:
        value of the setting})}.
      modules: {module of the state dict: modules of efx, several if their arrays are one array}.
        "{}" is the number of the layer.
      fixed: {setting of `config.model`: value} where config.json has no key for it.
      partial_rope: config.json may rotate a part of each head.
      by_head: joined arrays are interleaved by head, [N, 3, H], not one after another, [3, N, H].
      transposed: matrices are stored as [out, in]. The output layer always is.
      no_rope: config.json has layers without positions.
    """

    name: str
    model_class: str
    settings: dict
    modules: dict
    fixed: dict
    partial_rope: bool = False
    by_head: bool = False
    transposed: bool = True
    no_rope: bool = False


# ---- the table -----------------------------------------------------------------------------------

# No architecture has other values; rows and keys of config.json replace some of them.
_FIXED = {
    "family": "decoder",
    "preset": "llama",
    "norm": "rmsnorm",
    "use_bias": False,
    "positions": "rope",
    "block_kind": "pre_norm",
    "logit_softcap": 0.0,
    "mlp.kind": "dense",
    "attention.bias": "none",
    "attention.qk_norm": "none",
    "attention.score_factor": 1.0,
    "attention.window": 0,
    "attention.softcap": 0.0,
    "attention.rope_fraction": 1.0,
    "attention.no_rope_every": 0,
    "attention.rope_scaling.kind": "none",
    "soft_experts.num": 0,
    "dense_former.on": False,
    "mup.base_width": 0,
}
_BIAS = {"attention_bias": ("attention.bias", {False: "none", True: "all"})}
_SIZES = {
    "hidden_size": "width",
    "intermediate_size": "mlp.hidden",
    "max_position_embeddings": "context",
    "num_attention_heads": "attention.num_heads",
    "num_hidden_layers": "depth",
    "tie_word_embeddings": "tied",
}
_LLAMA = _SIZES | {
    "head_dim": "attention.head_dim",
    "hidden_act": ("mlp.activation", {"silu": "swiglu"}),
    "num_key_value_heads": "attention.num_kv_heads",
    "rms_norm_eps": "norm_eps",
}
_LLAMA_MODULES = {
    "model.embed_tokens": "embed",
    "model.layers.{}.input_layernorm": "norm_attention",
    "model.layers.{}.self_attn.q_proj": "attention/query",
    "model.layers.{}.self_attn.k_proj": "attention/key",
    "model.layers.{}.self_attn.v_proj": "attention/value",
    "model.layers.{}.self_attn.q_norm": "attention/norm_query",
    "model.layers.{}.self_attn.k_norm": "attention/norm_key",
    "model.layers.{}.self_attn.o_proj": "attention/out",
    "model.layers.{}.post_attention_layernorm": "norm_mlp",
    "model.layers.{}.mlp.gate_proj": "mlp/gate",
    "model.layers.{}.mlp.up_proj": "mlp/up",
    "model.layers.{}.mlp.down_proj": "mlp/down",
    "model.norm": "norm_final",
    "lm_head": "head",
}
_OLMO2_MODULES = {
    **_LLAMA_MODULES,
    "model.layers.{}.post_attention_layernorm": "norm_attention",
    "model.layers.{}.post_feedforward_layernorm": "norm_mlp",
}
del _OLMO2_MODULES["model.layers.{}.input_layernorm"]
_QKV = "attention/query attention/key attention/value"


def _row(name, model_class, settings, modules, fixed=(), **flags):
    return Architecture(name, model_class, settings, modules, _FIXED | dict(fixed), **flags)


ARCHITECTURES = {
    "gpt2": _row(
        "GPT-2",
        "GPT2LMHeadModel",
        {
            "activation_function": (
                "mlp.activation",
                {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
            ),
            "layer_norm_epsilon": "norm_eps",
            "n_embd": "width",
            "n_head": "attention.num_heads",
            "n_inner": "mlp.hidden",
            "n_layer": "depth",
            "n_positions": "context",
            "tie_word_embeddings": "tied",
        },
        {
            "transformer.wte": "embed",
            "transformer.wpe": "positions_embed",
            "transformer.h.{}.ln_1": "norm_attention",
            "transformer.h.{}.attn.c_attn": _QKV,
            "transformer.h.{}.attn.c_proj": "attention/out",
            "transformer.h.{}.ln_2": "norm_mlp",
            "transformer.h.{}.mlp.c_fc": "mlp/up",
            "transformer.h.{}.mlp.c_proj": "mlp/down",
            "transformer.ln_f": "norm_final",
            "lm_head": "head",
        },
        {"preset": "gpt2", "norm": "layernorm", "positions": "learned"}
        | {"use_bias": True, "attention.bias": "all"},
        transposed=False,
    ),
    "gpt_neox": _row(
        "GPT-NeoX, Pythia",
        "GPTNeoXForCausalLM",
        {
            **_SIZES,
            **_BIAS,
            "hidden_act": (
                "mlp.activation",
                {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"},
            ),
            "layer_norm_eps": "norm_eps",
            "use_parallel_residual": ("block_kind", {True: "parallel", False: "pre_norm"}),
        },
        {
            "gpt_neox.embed_in": "embed",
            "gpt_neox.layers.{}.input_layernorm": "norm_attention",
            "gpt_neox.layers.{}.attention.query_key_value": _QKV,
            "gpt_neox.layers.{}.attention.dense": "attention/out",
            "gpt_neox.layers.{}.post_attention_layernorm": "norm_mlp",
            "gpt_neox.layers.{}.mlp.dense_h_to_4h": "mlp/up",
            "gpt_neox.layers.{}.mlp.dense_4h_to_h": "mlp/down",
            "gpt_neox.final_layer_norm": "norm_final",
            "embed_out": "head",
        },
        {"norm": "layernorm", "use_bias": True},
        partial_rope=True,
        by_head=True,
    ),
    "llama": _row(
        "Llama 2 and 3, SmolLM2",
        "LlamaForCausalLM",
        {**_LLAMA, **_BIAS, "mlp_bias": "use_bias"},
        _LLAMA_MODULES,
    ),
    "olmo2": _row(
        "OLMo 2",
        "Olmo2ForCausalLM",
        {**_LLAMA, **_BIAS},
        _OLMO2_MODULES,
        {"block_kind": "post_norm", "attention.qk_norm": "width"},
    ),
    "qwen2": _row(
        "Qwen2, Qwen2.5",
        "Qwen2ForCausalLM",
        _LLAMA,
        _LLAMA_MODULES,
        {"attention.bias": "qkv"},
    ),
    "qwen3": _row(
        "Qwen3",
        "Qwen3ForCausalLM",
        {**_LLAMA, **_BIAS},
        _LLAMA_MODULES,
        {"attention.qk_norm": "head"},
    ),
    "smollm3": _row(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        {**_LLAMA, **_BIAS, "mlp_bias": "use_bias"},
        _LLAMA_MODULES,
        no_rope=True,
    ),
}
# {kind of rotary positions: {its key in config.json: field of `attention.rope_scaling`}}
_ROPE = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context",
    },
}


# ---- config.json ---------------------------------------------------------------------------------


def _refuse(key, value, remedy):
    raise UsageError(f"config.json: {key}={value!r}: {remedy}")


def settings_of(hf):
    """{key: value} for `config.update_from_flattened_dict`: the model that a config.json describes.

    Depth routing, dropout, scanning and padding of the vocabulary are not among them.

    Args:
      hf: contents of config.json, with the defaults of transformers.
    Raises: UsageError naming a key or value that efx cannot represent.
    """
    row = ARCHITECTURES[hf["model_type"]]
    settings = dict(row.fixed)
    for key, ours in row.settings.items():
        value = hf.get(key)
        if isinstance(ours, tuple):
            ours, values = ours
            if value not in values:
                _refuse(key, value, f"efx has {' or '.join(map(repr, values))}")
            value = values[value]
        settings[ours] = value
    width, heads = settings["width"], settings["attention.num_heads"]
    for ours, default in (
        ("attention.num_kv_heads", heads),
        ("attention.head_dim", width // max(1, heads)),
        ("mlp.hidden", 4 * width),
    ):
        settings[ours] = settings.get(ours) or default
    if settings["positions"] == "rope":
        settings |= _rope(hf["rope_parameters"], row.partial_rope)
    if set(hf.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        _refuse("layer_types", hf["layer_types"], "efx imports full attention in all layers")
    if row.no_rope:
        settings["attention.no_rope_every"] = _no_rope_every(hf)
    return {f"model.{key}": value for key, value in settings.items()}


def _rope(rope, partial):
    rope = dict(rope)
    kind, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta")
    fraction = rope.pop("partial_rotary_factor", 1.0)
    rope.pop("type", None)
    if kind not in _ROPE:
        _refuse("rope_parameters.rope_type", kind, f"efx has {', '.join(_ROPE)}")
    if not (0 < fraction <= 1 if partial else fraction == 1):
        _refuse("rope_parameters.partial_rotary_factor", fraction, "efx cannot represent it")
    for key in rope.keys() ^ _ROPE[kind].keys():
        _refuse(f"rope_parameters.{key}", rope.get(key), f"not as rope_type={kind!r} has it")
    scaling = {"kind": "none" if kind == "default" else kind}
    scaling |= {_ROPE[kind][key]: value for key, value in rope.items()}
    return {
        "attention.rope_theta": float(theta),
        "attention.rope_fraction": float(fraction),
        **{f"attention.rope_scaling.{name}": value for name, value in scaling.items()},
    }


def _no_rope_every(hf):
    layers = hf["no_rope_layers"]  # 1: the layer has rotary positions
    every = layers.index(0) + 1 if 0 in layers else 0
    if layers != [int(not every or (i + 1) % every != 0) for i in range(hf["num_hidden_layers"])]:
        _refuse("no_rope_layers", layers, "efx has layers without positions at equal distances")
    return every


def config_of(model, without=()):
    """The config.json of a decoder as the first architecture with exactly its settings, or None.

    Args:
      without: `model_type`s that are not used.
    """
    c = model.config
    if (
        c.family != "decoder"
        or hasattr(model, "adapter")
        or c.depth_routing.kind != "none"
        or c.dropout.learned
    ):
        return None
    c = schema.replaced(c, {"mlp.hidden": c.mlp.hidden_size(c.width)})
    for model_type, row in ARCHITECTURES.items():
        config = _written(row, model_type, model.vocab_size, c)
        settings = {key.removeprefix("model."): x for key, x in settings_of(config).items()}
        if model_type not in without and schema.replaced(c, settings | {"preset": c.preset}) == c:
            return config
    return None


def _written(row, model_type, vocab_size, c):
    """config.json of an architecture. A setting that it lacks gets another value, by which
    `config_of` notices it."""
    config = dict(
        model_type=model_type,
        architectures=[row.model_class],
        vocab_size=vocab_size,
        dtype="float32",
        # Some architectures have default ids, of tokens that may not exist.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=c.init_std,
    )
    for key, ours in row.settings.items():
        ours, values = ours if isinstance(ours, tuple) else (ours, None)
        value = operator.attrgetter(ours)(c)
        if values is not None:
            value = next((theirs for theirs in values if values[theirs] == value), [*values][0])
        config[key] = value
    a = c.attention
    if row.fixed["positions"] == "rope":
        kind = "default" if a.rope_scaling.kind == "none" else a.rope_scaling.kind
        rope = {key: getattr(a.rope_scaling, ours) for key, ours in _ROPE[kind].items()}
        rope["rope_type"] = kind
        # transformers 4 reads the first two, transformers 5 the last.
        config["rope_theta"] = a.rope_theta
        config["rope_scaling"] = None if kind == "default" else dict(rope)
        config["rope_parameters"] = rope | {"rope_theta": a.rope_theta}
    if row.partial_rope:
        config["rotary_pct"], config["rotary_emb_base"] = a.rope_fraction, a.rope_theta
        config["rope_parameters"]["partial_rotary_factor"] = a.rope_fraction
    if row.no_rope:
        config["no_rope_layers"] = [int(a.of_block(i).rope_theta > 0) for i in range(c.depth)]
    return config


# ---- arrays --------------------------------------------------------------------------------------

# Arrays in some checkpoints that are no parameters.
_BUFFERS = re.compile(r".*\.(attn|attention)\.(masked_)?bias|.*inv_freq")


def params_from_hf(arrays, model, model_type, rows=0):
    """Parameters (nested dict of numpy float32) of a dense decoder with unrolled layers.

    Args:
      arrays: {name in the state dict: array}, with or without the prefix of the class.
      model: the decoder; scanning and depth routing are ignored.
      rows: rows of the embedding in `arrays`; those from `model.vocab_size` on are dropped. 0: as
        many as the model has tokens.
    Raises: UsageError for arrays that are missing, unknown, or of another shape.
    """
    row = ARCHITECTURES[model_type]
    model = models.changed(model, **{"depth_routing.kind": "none", "scan_layers": False})
    tree = models.unboxed_shapes(model)["params"]
    shapes = {path: leaf.shape for path, leaf in flatten_dict(tree, sep="/").items()}
    entries = [*_entries(row, model.config, shapes)]
    prefix = next(iter(row.modules)).split(".")[0] + "."
    names = {}
    for name in arrays:
        if not _BUFFERS.fullmatch(name):
            is_bare = prefix + name in {expected for expected, *_ in entries}
            names[prefix + name if is_bare else name] = name
    head = names.pop(f"{[*row.modules][-1]}.weight", None) if model.config.tied else None
    for verb, wrong in (
        ("lacks", {name for name, *_ in entries} - names.keys()),
        ("has arrays that this model lacks:", names.keys() - {name for name, *_ in entries}),
    ):
        if wrong:
            raise UsageError(f"the Hugging Face checkpoint {verb} {', '.join(sorted(wrong)[:3])}")
    if head and not np.array_equal(arrays[head], arrays[names[entries[0][0]]]):
        raise UsageError(f"{head}: differs from the embedding in spite of tie_word_embeddings=true")
    flat = {}
    for name, paths, transposed in entries:
        array = np.asarray(arrays[names[name]]).astype(np.float32)
        array = array.T if transposed else array
        stored = [_without_padding(path, shapes[path], rows or model.vocab_size) for path in paths]
        expected = (*stored[0][:-1], sum(shape[-1] for shape in stored))
        if array.shape != expected:
            raise UsageError(
                f"{name}: has shape {array.shape}; config.json describes {expected} (as [in, out])"
            )
        heads = model.config.attention.num_heads if row.by_head and len(paths) > 1 else 1
        by_head = array.reshape(*array.shape[:-1], heads, len(paths), -1)
        for i, path in enumerate(paths):
            used = _without_padding(path, shapes[path], model.vocab_size)
            part = by_head[..., i, :].reshape(stored[i])[tuple(map(slice, used))]
            flat[path] = np.pad(
                part, [(0, n - m) for n, m in zip(shapes[path], part.shape, strict=True)]
            )
    return unflatten_dict(flat, sep="/")


def params_to_hf(params, model, model_type):
    """{name in the state dict: float32 array} of a dense decoder; many arrays are views.

    Raises: UsageError for a parameter without a name in the state dict.
    """
    row = ARCHITECTURES[model_type]
    model, params = models.unroll(model, params)
    flat = flatten_dict(params, sep="/")
    arrays, heads = {}, model.config.attention.num_heads if row.by_head else 1
    entries = [*_entries(row, model.config, {path: x.shape for path, x in flat.items()})]
    for name, paths, transposed in entries:
        parts = []
        for path in paths:
            part = np.asarray(flat.pop(path), np.float32)
            shape = _without_padding(path, part.shape, model.vocab_size)
            parts.append(part[tuple(map(slice, shape))])
        if len(paths) > 1:
            lead = parts[0].shape[:-1]
            parts = [part.reshape(*lead, heads, -1) for part in parts]
            parts = [np.concatenate(parts, axis=-1).reshape(*lead, -1)]
        arrays[name] = parts[0].T if transposed else parts[0]
    for path in flat:
        raise UsageError(f"config.model.family='decoder': {row.name} has no parameter {path}")
    return arrays


def _entries(row, c, shapes):
    """Yield (name in the state dict, paths of efx, transposed) of every array in `shapes`."""
    suffixes = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
    for module, ours in row.modules.items():
        for i in range(c.depth) if "{}" in module else [0]:
            parent = f"layers/block_{i}/" if "{}" in module else ""
            for leaf, suffix in suffixes.items():
                paths = [f"{parent}{part}/{leaf}" for part in ours.split()]
                if paths[0] in shapes:
                    transposed = leaf == "kernel" and (row.transposed or ours == "head")
                    yield f"{module.format(i)}.{suffix}", paths, transposed


def _without_padding(path, shape, rows):
    """The shape of a parameter with so many rows of the vocabulary."""
    if path == "embed/embedding":
        return (rows, *shape[1:])
    return (*shape[:-1], rows) if path == "head/kernel" else shape
