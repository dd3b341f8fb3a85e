"""A run as a folder that transformers loads: --mode=export --workdir RUN --to PATH.

A dense decoder becomes a model of an architecture that transformers has, any other decoder comes
with modeling_efx.py, which computes it. The folder is there whole or not at all.
"""

import itertools
import json

import jax

from efx import io, run_dir
from efx.config.load import to_config
from efx.data.bpe import END_OF_TEXT, byte_of_character
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.errors import UsageError, nearest
from efx.interop import hf, own_format
from efx.interop.architectures import ARCHITECTURES
from efx.interop.weights import SHARD_BYTES, WRITTEN_DTYPES
from efx.layers.flops import count_params
from efx.logging import quantity
from efx.routing.calibrate import calibrate
from efx.train import finished_run, setup

# How the tokenizer of Qwen2 splits a text. transformers makes its own of the tokens of any folder
# with this architecture, so that another tokenizer would give other ids there.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def export_run(config, workdir, folder, *, step=None, dtype=None, shard_bytes=SHARD_BYTES):
    """Write the model of a run's checkpoint into a new folder.

    Args:
      config: ConfigDict, of the run.
      folder: path that does not exist or is an empty folder.
      step: of the checkpoint; None: the newest.
      dtype: of the numbers in the files, "bfloat16" or "float16"; None: float32.
      shard_bytes: of one file; a larger model is sharded.
    Returns: the contents of config.json.
    Raises: UsageError for what cannot be exported and for a folder that cannot be written, which
      is then as it was.
    """
    dtype = dtype or "float32"
    if dtype not in WRITTEN_DTYPES:
        known = " or ".join(WRITTEN_DTYPES)
        raise UsageError(f"--dtype={dtype}: expected {known}{nearest(dtype, WRITTEN_DTYPES)}")
    if jax.process_count() > 1:
        raise UsageError("--mode=export runs in one process: start it without several processes")
    if run_dir.holds_clustering(workdir):
        raise UsageError(
            f"--workdir={workdir} is an ensemble, and these are not exported; export one of "
            "the run directories in it"
        )
    checked = to_config(config)
    own_format.check(checked.model, checked.adapter.kind)
    hf.check_new(io.local_path(folder, "--to"))
    calibration = checked.evaluate.calibrate
    splits = ("train",) if calibration else ()
    built, step, params, variables = setup.finished(config, workdir, step, splits=splits)
    if calibration:
        batches = itertools.islice(built.data.train_iterator(), calibration)
        variables = calibrate(built.model, params, variables, batches)
    files = tokenizer_files(built.tokenizer, built.model.context)
    contents = hf.save_hf(
        folder,
        params,
        built.model,
        state=variables.get("state"),
        ids=_ids(built.tokenizer),
        files=files,
        without=foreign_architectures(files[run_dir.TOKENIZER_FILE]),
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    kind = contents["model_type"]
    by = f"with {own_format.CODE.name}: {hf.TRANSFORMERS} loads it with trust_remote_code=True"
    if kind in ARCHITECTURES:
        by = f"as {ARCHITECTURES[kind].name}, for {hf.TRANSFORMERS}"
    parameters = quantity(count_params(params), "parameters")
    print(f"{folder}: {parameters} of {workdir}, step {step}, {by}")
    if other := finished_run.model_change_warning(built.config, workdir):
        print(other)
    return contents


# ---- the tokenizer -------------------------------------------------------------------------------


def tokenizer_files(tokenizer, context):
    """{name: text} of what transformers' AutoTokenizer reads, and of what generation goes by."""
    text, names = _library_form(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # Without this transformers 4 also makes token_type_ids, which `generate` refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        **names,
    }
    return {
        run_dir.TOKENIZER_FILE: text,
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps(_ids(tokenizer), indent=2) + "\n",
    }


def foreign_architectures(text):
    """The architectures that a model with this tokenizer.json cannot be exported as."""
    contents = json.loads(text)
    steps = (contents["pre_tokenizer"] or {}).get("pretokenizers", [])
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    of_qwen2 = contents["normalizer"] == {"type": "NFC"} and patterns == [QWEN2_SPLIT]
    return () if of_qwen2 else ("qwen2",)


def _ids(tokenizer):
    """The ids that begin and end a document, if there are any."""
    first = tokenizer.start[0] if len(tokenizer.start) == 1 else None
    return {"bos_token_id": first, "eos_token_id": tokenizer.eot}


def _library_form(tokenizer):
    """(tokenizer.json in the format of the `tokenizers` library, {"eos_token": name, ...})."""
    import tokenizers as library

    if not isinstance(tokenizer, ByteTokenizer | CharTokenizer):
        text = tokenizer.to_json()
        content = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
        names = {key.replace("_id", ""): content.get(i) for key, i in _ids(tokenizer).items()}
        return text, {key: name for key, name in names.items() if name is not None}
    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {character: i for i, character in enumerate(tokenizer.characters)}
        inner = library.Tokenizer(library.models.BPE(vocabulary, []))
        inner.decoder = library.decoders.Fuse()
        return inner.to_str(), {}
    inner = library.Tokenizer(library.models.BPE(byte_of_character(), []))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = library.decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT])
    return inner.to_str(), {"eos_token": END_OF_TEXT}
