"""Read and write Hugging Face checkpoints of `hf_config.ARCHITECTURES`; add routers to dense
parameters.

    config, model, params = load_hf("path/to/gpt2", common.base())   # config.json, *.safetensors
    save_hf("path/to/new", params, model)                            # transformers loads this

Needs numpy and safetensors only. The functions without a folder work on dicts: a state dict
(names to numpy, jax or torch arrays) and the contents of config.json.
"""

import contextlib
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError

from efx import io, models
from efx.errors import UsageError
from efx.interop import hf_config, own_format
from efx.interop.hf_config import complete, config_from_hf, config_to_hf, find_architecture
from efx.interop.weights import (
    SHARD_BYTES,
    NewArray,
    StoredArray,
    Weights,
    in_a_line,
    read_json,
    size_of,
    write,
)
from efx.layers.stack import scan_params, unroll_params
from efx.routing import parameters
from efx.train import memory

# Supported versions; the tests load exports with the oldest and the newest.
TRANSFORMERS = "transformers>=4.57.1,<6"
# Buffers in some checkpoints, which are no parameters.
_BUFFERS = re.compile(
    r"h\.\d+\.attn\.(masked_)?bias"
    r"|layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)"
    r"|layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.(original_)?inv_freq"
)
_PREFIX = {
    "gpt2": "transformer.",
    "gpt_neox": "gpt_neox.",
    "llama": "model.",
    "olmo2": "model.",
}
# A module with query, key and value interleaved by head: [N, 3, H] and not [3, N, H].
_BY_HEAD = "attention.query_key_value"

# (module in the state dict, modules of efx, concatenated if there are several).
_MODULES = {
    "gpt2": (
        ("wte", "embed"),
        ("wpe", "positions_embed"),
        ("h.{}.ln_1", "norm_attention"),
        ("h.{}.attn.c_attn", "attention/query attention/key attention/value"),
        ("h.{}.attn.c_proj", "attention/out"),
        ("h.{}.ln_2", "norm_mlp"),
        ("h.{}.mlp.c_fc", "mlp/up"),
        ("h.{}.mlp.c_proj", "mlp/down"),
        ("ln_f", "norm_final"),
        ("lm_head", "head"),
    ),
    "gpt_neox": (
        ("embed_in", "embed"),
        ("layers.{}.input_layernorm", "norm_attention"),
        (f"layers.{{}}.{_BY_HEAD}", "attention/query attention/key attention/value"),
        ("layers.{}.attention.dense", "attention/out"),
        ("layers.{}.post_attention_layernorm", "norm_mlp"),
        ("layers.{}.mlp.dense_h_to_4h", "mlp/up"),
        ("layers.{}.mlp.dense_4h_to_h", "mlp/down"),
        ("final_layer_norm", "norm_final"),
        ("lm_head", "head"),
    ),
    "llama": (
        ("embed_tokens", "embed"),
        ("layers.{}.input_layernorm", "norm_attention"),
        ("layers.{}.self_attn.q_proj", "attention/query"),
        ("layers.{}.self_attn.k_proj", "attention/key"),
        ("layers.{}.self_attn.v_proj", "attention/value"),
        ("layers.{}.self_attn.q_norm", "attention/norm_query"),
        ("layers.{}.self_attn.k_norm", "attention/norm_key"),
        ("layers.{}.self_attn.o_proj", "attention/out"),
        ("layers.{}.post_attention_layernorm", "norm_mlp"),
        ("layers.{}.mlp.gate_proj", "mlp/gate"),
        ("layers.{}.mlp.up_proj", "mlp/up"),
        ("layers.{}.mlp.down_proj", "mlp/down"),
        ("norm", "norm_final"),
        ("lm_head", "head"),
    ),
}
# Llama with the norms after attention and MLP.
_AFTER = {
    "norm_attention": "layers.{}.post_attention_layernorm",
    "norm_mlp": "layers.{}.post_feedforward_layernorm",
}
_MODULES["olmo2"] = tuple(
    (_AFTER[ours] if ours in _AFTER else theirs, ours) for theirs, ours in _MODULES["llama"]
)
# Names of the output layer in files of other versions of transformers.
_HEAD_NAMES = {"embed_out.weight": "lm_head.weight"}


def params_from_hf(state_dict, model, key=None, rows=0):
    """Parameters of efx (nested dict, float32) from a state dict.

    Args:
      state_dict: {name: array} with or without the prefix of the language-model class; `Weights`,
        or arrays of numpy, jax or torch.
      model: of `models.build`; unrolled or scanned, dense or with routed blocks.
      key: PRNG key for the new parameters of routed blocks.
      rows: number of rows of the checkpoint's embedding; those beyond the vocabulary are dropped.
        0: as many as the model has tokens.
    Raises: UsageError for arrays that are missing, unknown, or of another shape, and for learned
      dropout, because no checkpoint has masks.
    """
    check_dropout(model.config)
    dense, style = _dense(model), _style(model)
    whole = state_dict.folder if isinstance(state_dict, Weights) else "Hugging Face checkpoint"
    state = {name.removeprefix(_PREFIX[style]): array for name, array in state_dict.items()}
    state = {name: array for name, array in state.items() if not _BUFFERS.fullmatch(name)}
    for name in _HEAD_NAMES.keys() & state.keys():
        state[_HEAD_NAMES[name]] = state.pop(name)
    if dense.config.tied:
        _drop_tied_head(state, f"{_MODULES[style][0][0]}.weight")
    stored = dense.clone(vocab_size=rows or dense.vocab_size)
    shapes, flat = _shapes(dense), {}
    arrays = _arrays(dense, style, shapes)
    missing = [name for name, *_ in arrays if name not in state]
    unknown = sorted(state.keys() - {name for name, *_ in arrays})
    for verb, names in (
        ("lacks", missing),
        ("has arrays without a counterpart in this model:", unknown),
    ):
        if names:
            others = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UsageError(f"{whole} {verb} {', '.join(names[:3])}{others}")
    for name, paths, transposed in arrays:  # all shapes, before the first array is read
        expected = _oriented(_joined_shape(paths, shapes, stored), transposed)
        if tuple(state[name].shape) != expected:
            is_stored = isinstance(state[name], StoredArray)
            raise UsageError(
                f"{state[name].path if is_stored else whole}: {name} has shape "
                f"{tuple(state[name].shape)}, this model needs {expected}"
            )
    for name, paths, transposed in arrays:
        array = _numpy(state.pop(name))
        array = array.T if transposed else array
        for path, block in zip(paths, _parts(name, array, paths, shapes, stored), strict=True):
            block = block[tuple(slice(n) for n in _unpadded_shape(path, shapes[path], dense))]
            padding = [(0, a - b) for a, b in zip(shapes[path], block.shape, strict=True)]
            flat[path] = np.pad(block, padding) if np.any(padding) else np.ascontiguousarray(block)
    return mod_from_dense(unflatten_dict(flat, sep="/"), model, key)


def _joined_shape(paths, shapes, model):
    """The shape of the concatenation of these parameters."""
    shapes_of_parts = [_unpadded_shape(path, shapes[path], model) for path in paths]
    return (*shapes_of_parts[0][:-1], sum(shape[-1] for shape in shapes_of_parts))


def _parts(name, array, paths, shapes, model):
    """Split an array of a checkpoint into these parameters."""
    if _BY_HEAD in name:
        heads = model.config.attention.num_heads
        by_head = array.reshape(*array.shape[:-1], heads, len(paths), -1)
        return [by_head[..., i, :].reshape(*array.shape[:-1], -1) for i, _ in enumerate(paths)]
    ends = np.cumsum([_unpadded_shape(path, shapes[path], model)[-1] for path in paths])[:-1]
    return np.split(array, ends, axis=-1)


def _style(model):
    """The key of `_MODULES` for a decoder."""
    c = model.config
    if c.positions == "learned":
        return "gpt2"
    if c.norm == "layernorm":
        return "gpt_neox"
    return "olmo2" if c.block_kind == "post_norm" else "llama"


def params_to_hf(params, model):
    """(state dict of numpy float32 arrays, config.json dict) of a dense decoder.

    A GPT-2 without biases gets biases of zero.
    """
    config = config_to_hf(model)
    return {array.name: array.read() for array in arrays_of(params, model)}, config


def arrays_of(params, model):
    """`NewArray`s of a dense decoder that `config_to_hf` has an architecture for."""
    model, params = models.unroll(model, params)
    kind, flat, arrays = _style(model), flatten_dict(params, sep="/"), []

    def name_of(name):
        if name != "lm_head.weight":
            return _PREFIX[kind] + name
        # Newer versions of transformers read the older name too.
        return "embed_out.weight" if kind == "gpt_neox" else name

    shapes = {path: array.shape for path, array in flat.items()}
    no_biases = hf_config.with_biases(model.config) != model.config
    entries = _arrays(model, kind, shapes)
    for path in sorted(flat.keys() - {path for _, paths, _ in entries for path in paths}):
        raise UsageError(
            f"config.model.family={model.config.family!r}: the format {kind} does not have the "
            f"parameter {path}"
        )
    for name, paths, transposed in entries:
        shape = _joined_shape(paths, shapes, model)
        read = functools.partial(_read, name, paths, flat, shapes, model, transposed)
        arrays.append(NewArray(name_of(name), _oriented(shape, transposed), read))
        if no_biases and paths[0].endswith(("kernel", "scale")) and name != "lm_head.weight":
            bias = name_of(name).replace("weight", "bias")
            zeros = functools.partial(np.zeros, shape[-1:], np.float32)
            arrays.append(NewArray(bias, shape[-1:], zeros))
    return arrays


def _read(name, paths, flat, shapes, model, transposed):
    """An array of a checkpoint, float32, from the parameters that are its parts."""
    parts = [
        _numpy(flat[path])[tuple(slice(n) for n in _unpadded_shape(path, shapes[path], model))]
        for path in paths
    ]
    if _BY_HEAD in name:
        heads = model.config.attention.num_heads
        parts = [part.reshape(*part.shape[:-1], heads, -1) for part in parts]
        array = np.stack(parts, axis=-2).reshape(*parts[0].shape[:-2], -1)
    else:
        array = np.concatenate(parts, axis=-1)
    return np.ascontiguousarray(array.T if transposed else array)


def mod_from_dense(params, model, key=None):
    """Parameters of `model`, which may have routed blocks, from those of the dense model.

    Args:
      params: of the dense model, unrolled or scanned.
      model: may differ from it in `config.model.depth_routing` and scanning.
      key: PRNG key of new parameters; not needed if no block is routed.
    Returns: the dense arrays, unchanged, and routers, predictors and skip MLPs as the model
      initialises them.
    """
    layers = params["layers"]
    if "units" in layers:
        layers = unroll_params(layers, _dense(model).specs())
    if any(spec.routing is not None for spec in model.blocks().values()):
        if key is None:
            raise UsageError("the model has routed blocks: pass a PRNG key for their routers")
        layers = {name: {**layer} for name, layer in layers.items()}
        for name, fresh in _new_routing_params(model, key).items():
            layers.setdefault(name, {}).update(fresh)
    if model.config.scan_layers:
        layers = scan_params(layers, model.specs())
    return {**params, "layers": layers}


def load_hf(folder, config):
    """(config, model, params) of a Hugging Face folder: config.json and *.safetensors.

    Args:
      folder: local path.
      config: an efx config; returned is a copy with `config.model` changed to the checkpoint's
        model. Its depth routing stays: with `kind="mod"` the result is the checkpoint with fresh
        routers, drawn with `config.seed`.
    """
    folder = Path(folder)
    hf = read_config(folder)
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(settings_of(folder, hf))
    weights = Weights(folder)
    check_size(folder, config.model, hf["vocab_size"], weights)
    model = models.build(
        config.model,
        vocab_size=hf["vocab_size"],
        context=config.model.context,
        dtype=config.train.dtype,
    )
    params = params_from_hf(weights, model, jax.random.key(config.seed))
    return config, model, params


def read_config(folder):
    """The config.json of a folder, completed."""
    path = Path(folder) / "config.json"
    return _in_file(path, complete, read_json(path))


def settings_of(folder, hf):
    """`config_from_hf` of such a config.json."""
    return _in_file(Path(folder) / "config.json", config_from_hf, hf)


def _in_file(path, function, *arguments):
    """Call a function; its errors name the path in place of "config.json"."""
    try:
        return function(*arguments)
    except UsageError as error:
        raise UsageError(str(error).replace("config.json", str(path), 1)) from None


def check_dropout(model_config):
    """Raise UsageError if dropout is learned."""
    if model_config.dropout.learned:
        raise UsageError(
            f"config.model.dropout.kind={model_config.dropout.kind!r}: a Hugging Face "
            "checkpoint has no learned masks; import it without, and train them in a run with "
            "config.init.run"
        )


def check_size(folder, model_config, vocab_size, weights):
    """Raise UsageError if a config.json describes a larger model than its files hold, before
    anything is built from its numbers."""
    c = model_config
    head_dim = c.attention.head_dim or c.width // c.attention.num_heads
    of_layer = c.attention.num_heads * head_dim + c.mlp.hidden
    least = c.width * (vocab_size + c.depth * of_layer)
    if least > weights.size:
        raise UsageError(
            f"{Path(folder) / 'config.json'} describes a model of more than {least:,} "
            f"parameters in {c.depth} layers, but the files have {weights.size:,}"
        )


def save_hf(
    folder,
    params,
    model,
    *,
    state=None,
    ids=None,
    files=None,
    without=(),
    dtype="float32",
    shard_bytes=SHARD_BYTES,
):
    """Write a decoder to a new folder that transformers loads; all of it or nothing.

    The folder has config.json and the parameters, and modeling_efx.py if no architecture of
    transformers has the model's settings (`own_format`).

    Args:
      state: the model's collection of this name, if it has one.
      ids: {"bos_token_id": ..., "eos_token_id": ...} for config.json.
      files: {name: text} of further files.
      without: architectures that are not used.
      dtype, shard_bytes: as in `write`.
    Returns: the contents of config.json.
    Raises: UsageError for a setting that cannot be exported, or a folder that cannot be written.
    """
    folder, files = Path(folder), dict(files or {})
    config, _ = find_architecture(model, without)
    if config is not None:
        arrays = arrays_of(params, model)
    else:
        config, arrays = own_format.config_of(model), own_format.arrays_of(params, state, model)
        files[own_format.CODE.name] = own_format.CODE.read_text(encoding="utf-8")
    config |= {"dtype": dtype, **(ids or {})}
    files["config.json"] = json.dumps(config, indent=2) + "\n"
    check_new(folder)
    target = folder.resolve()  # has a name, and is no link
    created = [path for path in target.parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(folder, target, size_of(arrays, dtype) + sum(map(len, files.values())))
        with io.replacing(target) as part:
            part.mkdir()
            for name, text in files.items():
                (part / name).write_text(text, encoding="utf-8")
            write(part, arrays, dtype, shard_bytes)
            for path in part.iterdir():  # safetensors writes files that others cannot read
                shutil.copymode(part / "config.json", path)
    except BaseException as error:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise UsageError(f"{folder} cannot be written: {_reason(error)}") from error
        raise
    return config


def check_new(folder):
    """Raise UsageError unless this path does not exist or is an empty folder."""
    try:
        existing = sorted(path.name for path in Path(folder).iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {_reason(error)}") from error
    if existing:
        raise UsageError(f"{folder} is not empty ({existing[0]}); use a new folder")


def _check_space(folder, target, needed):
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise UsageError(
            f"{folder} needs {memory.in_words(needed)}, but its disk has "
            f"{memory.in_words(free)} free; free space, or use another folder"
        )


def _reason(error):
    return io.describe_os_error(error) if isinstance(error, OSError) else in_a_line(error)


def _arrays(model, style, shapes):
    """[(name in the state dict, paths of efx, transposed)] of every array in `shapes`."""
    entries = []
    for theirs, ours in _MODULES[style]:
        for i in range(model.config.depth) if "{}" in theirs else (None,):
            name = theirs.format(i)
            parent = "" if i is None else f"layers/block_{i}/"
            for leaf in ("kernel", "scale", "embedding", "bias"):
                paths = tuple(f"{parent}{module}/{leaf}" for module in ours.split())
                if paths[0] in shapes:
                    transposed = leaf == "kernel" and (style != "gpt2" or name == "lm_head")
                    suffix = "bias" if leaf == "bias" else "weight"
                    entries.append((f"{name}.{suffix}", paths, transposed))
    return entries


def _dense(model):
    """The same model without routing, unrolled."""
    return models.changed(model, **{"depth_routing.kind": "none", "scan_layers": False})


def _shapes(model):
    """{path: shape} of the model's parameters."""
    tree = models.unboxed_shapes(model)["params"]
    return {path: leaf.shape for path, leaf in flatten_dict(tree, sep="/").items()}


def _new_routing_params(model, key):
    """{layer: {name in `parameters.TABLE`: initial parameters}}. Jitted, so that no other parameter
    is computed."""
    model, names = models.changed(model, scan_layers=False), set(parameters.param_names())

    def init(key):
        layers = nn.unbox(models.init(model, key))["params"]["layers"]
        return {
            name: {part: layer[part] for part in names & layer.keys()}
            for name, layer in layers.items()
        }

    return jax.device_get(jax.jit(init)(key))


def _unpadded_shape(path, shape, model):
    """The shape of a parameter without the padding of the vocabulary."""
    if path == "embed/embedding":
        return (model.vocab_size, *shape[1:])
    return (*shape[:-1], model.vocab_size) if path == "head/kernel" else shape


def _drop_tied_head(state, table):
    head = state.pop("lm_head.weight", None)
    if head is None or table not in state:
        return
    if not np.array_equal(_numpy(head), _numpy(state[table])):
        raise UsageError(
            f"Hugging Face checkpoint: lm_head.weight differs from {table}, but "
            "config.model.tied=True shares them"
        )


def _oriented(shape, transposed):
    return shape[::-1] if transposed else shape


def _numpy(array):
    """float32 numpy array of a numpy, jax or torch array."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().float()
    return np.asarray(array).astype(np.float32)
