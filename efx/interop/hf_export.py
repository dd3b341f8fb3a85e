"""Write a run as a folder that transformers loads: --mode=export --workdir RUN --to FOLDER.

A dense decoder becomes a model of transformers if an architecture has exactly its settings. Other
decoders are written with modeling_efx.py, which computes them in PyTorch.
"""

import itertools
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.numpy import save_file

from efx import io, models, run_dir
from efx.config import schema
from efx.config.load import to_config
from efx.data.bpe import END_OF_TEXT, byte_of_character
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.errors import UsageError
from efx.interop.architectures import ARCHITECTURES, config_of, params_to_hf
from efx.layers.flops import count_params
from efx.logging import quantity
from efx.routing import parameters
from efx.routing.calibrate import calibrate
from efx.train import inference

# Supported versions; the tests load exports with the oldest and the newest.
TRANSFORMERS = "transformers>=4.57.1,<6"
# Copied into exports. efx never imports it, because it needs torch and transformers.
CODE = Path(__file__).with_name("modeling_efx.py")
DTYPES = ("float32", "bfloat16")
SHARD_SIZE = "5GB"  # largest size of a file


def export_run(config, workdir, folder, *, step=None, dtype=None):
    """Write the model of a run's checkpoint into a new folder.

    Args:
      config: ConfigDict, of the run.
      step: of the checkpoint; None: the newest.
      dtype: of the arrays, one of `DTYPES`; None: float32.
    Raises: UsageError, and writes nothing, for a model that cannot be exported.
    """
    dtype = dtype or DTYPES[0]
    if dtype not in DTYPES:
        raise UsageError(f"--dtype={dtype}: use {' or '.join(DTYPES)}")
    checked = to_config(config)
    check_exportable(checked.model, checked.adapter.kind)
    check_new(io.local_path(folder, "--to"))
    batches = checked.evaluate.calibrate
    splits = ("train",) if batches else ()
    built, step, params, variables = inference.restore(config, workdir, step, splits=splits)
    if batches:
        train_batches = itertools.islice(built.data.train_iterator(), batches)
        variables = calibrate(built.model, params, variables, train_batches)
    variables = {**variables, "params": params}
    written = write_model(folder, built.model, variables, built.tokenizer, dtype)
    as_kind = f"with {CODE.name}: {TRANSFORMERS} loads it with trust_remote_code=True"
    if written["model_type"] in ARCHITECTURES:
        as_kind = f"as {ARCHITECTURES[written['model_type']].name}, for {TRANSFORMERS}"
    size = quantity(count_params(params), "parameters")
    print(f"{folder}: {size} of {workdir}, step {step}, {as_kind}")
    if warning := inference.model_change_warning(built.config, run_dir.RunDir(workdir)):
        print(warning)


def write_model(folder, model, variables, tokenizer=None, dtype="float32"):
    """Write a decoder and its tokenizer into a new folder. Returns: the contents of config.json."""
    check_exportable(model.config, model.adapter.kind if hasattr(model, "adapter") else "none")
    check_new(folder)
    files = tokenizer_files(tokenizer, model.config.context) if tokenizer else {}
    without = foreign_architectures(files[run_dir.TOKENIZER_FILE]) if tokenizer else ()
    config = config_of(model, without)
    if config is not None:
        arrays = params_to_hf(variables["params"], model, config["model_type"])
    else:
        config, arrays = efx_config(model), efx_arrays(model, variables)
        files[CODE.name] = CODE.read_text(encoding="utf-8")
    config |= {"dtype": dtype, **(_special_ids(tokenizer) if tokenizer else {})}
    files["config.json"] = json.dumps(config, indent=2) + "\n"
    target = Path(folder).resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with io.replacing(target) as part:
            part.mkdir()
            for name, text in files.items():
                (part / name).write_text(text, encoding="utf-8")
            _write_arrays(part, arrays, dtype)
    except (OSError, SafetensorError) as error:
        reason = io.describe_os_error(error) if isinstance(error, OSError) else error
        raise UsageError(f"{folder} cannot be written: {reason}") from error
    return config


def check_new(folder):
    """Raise UsageError unless the folder is empty or does not exist."""
    try:
        is_new = not Path(folder).exists() or not any(Path(folder).iterdir())
    except OSError as error:
        raise UsageError(f"{folder}: {io.describe_os_error(error)}") from error
    if not is_new:
        raise UsageError(f"{folder}: is not empty; use a new folder")


def _write_arrays(folder, arrays, dtype):
    """Write safetensors files, with an index if there are several."""
    itemsize = jnp.dtype(dtype).itemsize
    split = split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.size * itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_SIZE,
    )
    for name, keys in split.filename_to_tensors.items():
        shard = {key: np.asarray(arrays[key], jnp.dtype(dtype), order="C") for key in keys}
        save_file(shard, folder / name, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / name)  # safetensors: only the owner reads
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


# ---- models of modeling_efx.py -------------------------------------------------------------------

# {setting of `config.model`: values that modeling_efx.py computes; None: decided by the preset}
_VALUES = {
    "block_kind": ("pre_norm", "post_norm", "parallel"),
    "norm": (None, "rmsnorm", "layernorm"),
    "positions": (None, "rope", "learned", "none"),
    "attention.bias": (None, "none", "qkv", "all"),
    "attention.rope_scaling.kind": ("none", "linear", "llama3"),
    "attention.qk_norm": ("none", "head", "width"),
    "attention.softcap": (0.0,),
    "mlp.kind": ("dense", "moe"),
    "mlp.activation": (None, "swiglu", "gelu", "gelu_tanh"),
    "mlp.moe.router": ("token_choice",),
    "dropout.kind": ("none", "standard"),
    "soft_experts.num": (0,),
    "dense_former.on": (False,),
    "depth_routing.kind": ("none", "mod"),
    "depth_routing.target": ("block",),
    "depth_routing.router_norm": ("none", "rms"),
    "depth_routing.gate": ("identity", "sigmoid", "tanh", "twice_sigmoid", "one"),
    "depth_routing.score": ("router",),
    "depth_routing.train_selection": ("topk", "threshold"),
    "depth_routing.causal_decision": ("aux_loss", "threshold", "predictor"),
    "depth_routing.kv_for_skipped": (False, True),
    "depth_routing.skip_mlp": (0,),
}
# Settings that modeling_efx.py computes with every value, or that do not change a trained model.
_EVERY_VALUE = frozenset(
    """family preset context width depth norm_eps init_std logit_softcap vocab_multiple scan_layers
    remat initialisation use_bias tied mup.base_width mup.zero_head

    attention.num_heads attention.num_kv_heads attention.head_dim attention.rope_theta
    attention.rope_fraction attention.no_rope_every attention.rope_scaling.factor
    attention.rope_scaling.original_context attention.rope_scaling.low_frequency_factor
    attention.rope_scaling.high_frequency_factor attention.score_factor attention.window
    attention.chunk attention.kernel

    mlp.hidden mlp.multiple_of mlp.moe.every mlp.moe.num_experts mlp.moe.expert_hidden
    mlp.moe.top_k mlp.moe.renormalise mlp.moe.capacity_factor mlp.moe.capacity mlp.moe.slack
    mlp.moe.num_shared mlp.moe.num_noop mlp.moe.computed_fraction dropout.rate dropout.sites

    depth_routing.recursions depth_routing.every depth_routing.blocks depth_routing.capacity
    depth_routing.capacity_stages depth_routing.extra_decisions depth_routing.predictor_hidden
    depth_routing.threshold_decay depth_routing.threshold_warmup depth_routing.bce_reaches_input
    depth_routing.slack""".split()
)


def check_exportable(c, adapter):
    """Raise UsageError for a model that cannot be exported.

    A setting that is in neither table must have its default.

    Args:
      c: `config.model`. adapter: kind of the adapters.
    """
    if adapter != "none":
        raise UsageError(f"config.adapter.kind={adapter!r}: cannot be exported; export the base")
    if c.family != "decoder":
        raise UsageError(f"config.model.family={c.family!r}: cannot be exported, only 'decoder'")
    unused = ("dropout.elementwise.", "dropout.attention.")
    for is_used, part in (
        (c.soft_experts.num, "soft_experts."),
        (c.depth_routing.kind != "none", "depth_routing."),
        (c.mlp.kind != "dense", "mlp.moe."),
    ):
        unused += () if is_used else (part,)
    default_of = {name: value for name, _, value in schema.leaves(type(c)())}
    for name, _, value in schema.leaves(c):
        key = name.removeprefix("config.model.")
        values = _VALUES.get(key, (default_of[name],))
        if value not in values and key not in _EVERY_VALUE and not key.startswith(unused):
            known = " or ".join(map(repr, values))
            raise UsageError(f"{name}={value!r}: cannot be exported, only {known}")


def efx_config(model):
    """config.json of `EfxConfig` in modeling_efx.py."""
    c = model.config
    a, moe, routing = c.attention, c.mlp.moe, c.depth_routing
    capacities, has_moe = routing.routed_blocks(c.depth), c.mlp.kind == "moe"
    scaling = a.rope_scaling
    rope = dict(theta=a.rope_theta, size=a.rotary_size(a.head_dim), kind=scaling.kind)
    for name in ("factor", "original_context", "low_frequency_factor", "high_frequency_factor"):
        rope[name] = getattr(scaling, name)
    return dict(
        model_type="efx",
        architectures=["EfxForCausalLM"],
        auto_map={
            "AutoConfig": f"{CODE.stem}.EfxConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.EfxForCausalLM",
        },
        vocab_size=model.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.mlp.hidden_size(c.width),
        num_hidden_layers=c.depth,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=c.context,
        tie_word_embeddings=c.tied,
        initializer_range=c.init_std,
        block_kind=c.block_kind,
        hidden_act=c.mlp.activation,
        norm=c.norm,
        norm_eps=c.norm_eps,
        use_bias=c.use_bias,
        attention_bias=a.bias,
        qk_norm=a.qk_norm,
        attention_scale=a.factor,
        attention_window=a.window,
        positions=c.positions,
        rope=rope if c.positions == "rope" else None,
        logit_scale=model.logit_scale,
        logit_softcap=c.logit_softcap,
        blocks=[
            dict(
                rope=a.of_block(i).rope_theta > 0,
                experts=has_moe and moe.in_block(i),
                capacity=capacities.get(i),
            )
            for i in range(c.depth)
        ],
        routing=dict(
            decision=routing.causal_decision,
            router_norm=routing.router_norm,
            gate=routing.gate,
            slack=routing.slack,
            kv_for_skipped=routing.kv_for_skipped,
            predictor_hidden=routing.predictor_hidden or max(1, c.width // 2),
        ),
        moe=dict(
            num_experts=moe.num_experts,
            num_noop=moe.num_noop,
            num_shared=moe.num_shared,
            expert_hidden=moe.expert_hidden or c.mlp.hidden_size(c.width),
            top_k=moe.top_k,
            renormalise=moe.renormalise,
            rate=moe.rate(),
        ),
    )


def _modules():
    """{module of efx, below its block: module of modeling_efx.py}"""
    modules = {ours: theirs for theirs, ours in ARCHITECTURES["qwen3"].modules.items()}
    block = "model.layers.{}."
    modules |= {
        "positions_embed": "model.embed_positions",
        "router": block + "router",
        "norm_router": block + "router_norm",
        "predictor/kernel_in": block + "predictor.0",
        "predictor/kernel_out": block + "predictor.2",
        "mlp/router": block + "mlp.router",
    }
    for name in ("gate", "up", "down"):
        modules[f"mlp/shared/{name}"] = f"{block}mlp.shared.{name}_proj"
        modules[f"mlp/experts/{name}"] = f"{block}mlp.experts.[].{name}_proj"
    return modules


def efx_arrays(model, variables):
    """{name in modeling_efx.py: array}.

    Raises: UsageError for an array without a name there.
    """
    modules, arrays, flat = _modules(), {}, {}
    for tree in models.unroll_variables(model, variables).values():
        flat |= flatten_dict(tree, sep="/")
    for path, array in flat.items():
        row = parameters.find(path)
        if row is not None and not row.exported(model.config.depth_routing):
            continue  # of a decision that is trained but not used
        block, module, leaf = re.fullmatch(
            r"(?:layers/block_(\d+)/)?(.*?)(?:/(kernel|scale|embedding|bias))?", path
        ).groups()
        array = np.asarray(array)
        if module == "threshold/quantile":
            arrays[f"model.layers.{block}.threshold"] = array
            continue
        if module not in modules:
            raise UsageError(f"parameter {path}: {CODE.name} does not read it")
        if module == "router":
            array = array[:, None]
        if leaf not in ("embedding", "bias") and array.ndim > 1:
            array = np.swapaxes(array, -1, -2)
        if module in ("embed", "head"):
            array = array[: model.vocab_size]
        name = modules[module].format(block) + (".bias" if leaf == "bias" else ".weight")
        if "[]" in name:  # one module for each expert
            arrays |= {name.replace("[]", str(i)): x for i, x in enumerate(array)}
        else:
            arrays[name] = array
    return arrays


# ---- the tokenizer -------------------------------------------------------------------------------

# How Qwen2's tokenizer splits a text. transformers uses this for any Qwen2, so another
# tokenizer would get other ids there.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(tokenizer, context):
    """{name: text} of the files that AutoTokenizer and `generate` read."""
    text, names = _library_form(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text never encodes to a special token
        # Without this transformers 4 also makes token_type_ids, which `generate` refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        **names,
    }
    return {
        run_dir.TOKENIZER_FILE: text,
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps(_special_ids(tokenizer), indent=2) + "\n",
    }


def foreign_architectures(text):
    """`model_type`s that a model with this tokenizer.json cannot have."""
    contents = json.loads(text)
    steps = (contents["pre_tokenizer"] or {}).get("pretokenizers", [])
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    of_qwen2 = contents["normalizer"] == {"type": "NFC"} and patterns == [QWEN2_SPLIT]
    return () if of_qwen2 else ("qwen2",)


def _special_ids(tokenizer):
    """Ids of the tokens that begin and end a document; None: there is none."""
    first = tokenizer.start[0] if len(tokenizer.start) == 1 else None
    return {"bos_token_id": first, "eos_token_id": tokenizer.eot}


def _library_form(tokenizer):
    """(tokenizer.json in the format of the `tokenizers` library, {"eos_token": name, ...})."""
    import tokenizers as library

    if not isinstance(tokenizer, ByteTokenizer | CharTokenizer):
        text = tokenizer.to_json()
        content = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
        names = {
            key.replace("_id", ""): content.get(i) for key, i in _special_ids(tokenizer).items()
        }
        return text, {key: name for key, name in names.items() if name is not None}
    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {character: i for i, character in enumerate(tokenizer.characters)}
        # A name that is no token: the library raises an error with it instead of dropping text.
        unknown = "a character outside of the vocabulary"
        inner = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token=unknown))
        inner.decoder = library.decoders.Fuse()
        return inner.to_str(), {}
    inner = library.Tokenizer(library.models.BPE(byte_of_character(), []))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = library.decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return inner.to_str(), {"eos_token": END_OF_TEXT}
