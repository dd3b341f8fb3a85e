"""--mode=export: folders that transformers loads and that compute the same, or one line and nothing
written."""

import copy
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import families
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from run_files import largest_file
from safetensors.numpy import load_file
from test_documents import POSITIONS_T, SEGMENTS_T, packed
from test_import import (  # noqa: F401
    IDS,
    TEXT,
    error_line,
    folder,
    imported,
    read_run,
    routed,
    run,
)
from test_interop import transformers  # noqa: F401

from efx.config.load import config_of_run
from efx.data import bpe
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.interop import export_run, hf, import_run, own_format, weights

pytestmark = pytest.mark.usefixtures("one_device")
T = families.LENGTH
FIRST = 12  # tokens that the cache gets at first


@pytest.fixture(scope="module")
def load(transformers, tmp_path_factory):  # noqa: F811
    """folder -> the model in it, with the code that comes with it."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)

        def load(path, **options):
            path, options = str(path), {"trust_remote_code": True, **options}
            return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()

        yield load


def logits_of(model, tokens_BT, **options):
    """(float32 logits, cache) of one of their models."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor(np.asarray(tokens_BT)).long(), **options)
    return out.logits.numpy(), out.past_key_values


# ---- modeling_efx.py -----------------------------------------------------------------------------

# Of tests/families.py. They and OWN cover every setting that the file knows but gates.
DEFAULT = ("llama_options", "mod_parallel", "mod_context", "moe", "dropout_attention_mod")
SLOW = set(
    "mup mod_options mod_threshold moe_switch moe_expert_choice mode_staged "
    "dropout_elementwise_mod dropout_embedding_moe".split()
)
NORMED = dict(kind="mod", every=1, capacity=0.5, slack=1.0, router_norm="rms")
OWN = {
    "masks_of_one_attention": {
        "dropout.kind": "attention",
        "dropout.sites": families.NO_PROBS,
        "dropout.attention.input": "embedding_linear",
        "dropout.attention.rounding": "sigmoid",
        "dropout.attention.granularity": "token",
        "dropout.attention.num_heads": 2,
        "attention.window": 9,
        "attention.rope_scaling.kind": "linear",
        "attention.rope_scaling.factor": 3.0,
    },
    "routed_attention": families.dotted(
        {
            "depth_routing": dict(target="attention", causal="predictor", kv_for_skipped=True)
            | NORMED
        }
    ),
    "routed_mlp": families.dotted(
        {
            "depth_routing": dict(target="mlp", causal="threshold", skip_mlp=16, **NORMED),
            "mlp": families.experts(),
        }
    ),
    "routed_mlp_parallel": families.dotted(
        {"block_kind": "parallel", "depth_routing": dict(target="mlp", causal="aux_loss", **NORMED)}
    ),
}


def build(name):
    """(model, parameters, state) of a row of families or of OWN."""
    model = families.make(OWN[name] if name in OWN else families.FAMILIES[name].changes)
    return model, families.random_params(model), families.random_state(model)


@pytest.mark.parametrize("name", families.rows([*DEFAULT, *OWN, *sorted(SLOW)], SLOW))
def test_logits_of_an_export_are_those_of_efx(name, tmp_path, load):
    """Of whole rows; in pieces from the cache, with padding before the texts."""
    import torch

    tokens_BT = np.asarray(families.tokens(batch=3))
    model, params, state = build(name)
    expected = families.jit(model.apply)({"params": params, **state}, jnp.asarray(tokens_BT))
    hf.save_hf(tmp_path / "new", params, model, state=state.get("state"))
    theirs = load(tmp_path / "new")
    assert expected.std() > 0.3
    np.testing.assert_allclose(logits_of(theirs, tokens_BT)[0], expected, atol=1e-4)
    # Row i begins with i padding tokens.
    width, rows = T + len(tokens_BT), range(len(tokens_BT))
    padded_BT, mask_BT = np.zeros((2, len(tokens_BT), width), np.int64)
    for i in rows:
        padded_BT[i, i : i + T], mask_BT[i, i : i + T] = tokens_BT[i], 1
    cache, found = None, []
    for start, end in ((0, FIRST), (FIRST, FIRST + 1), (FIRST + 1, width)):
        options = dict(attention_mask=torch.tensor(mask_BT[:, :end]), past_key_values=cache)
        logits, cache = logits_of(theirs, padded_BT[:, start:end], **options)
        found.append(logits)
    found = np.concatenate(found, axis=1)
    for i in rows:
        np.testing.assert_allclose(found[i, i : i + T], expected[i], atol=1e-4)


def test_the_code_of_an_export_does_not_import_efx():
    text = own_format.CODE.read_text()
    packages = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    assert packages == {"functools", "math", "typing", "torch", "transformers"}


@pytest.fixture(scope="module")
def mod(tmp_path_factory, load):
    """A Mixture-of-Depths in transformers."""
    path = tmp_path_factory.mktemp("exports") / "mod"
    hf.save_hf(path, families.params_of("mod"), families.build("mod"))
    return load(path)


def test_a_routed_block_caches_the_tokens_that_it_computed(mod):
    mod, computed, cache = copy.deepcopy(mod), 0, None

    def count(_, inputs, out):
        nonlocal computed
        computed = computed + (inputs[0] != out).any(dim=-1).sum(dim=1)

    mod.layers[1].register_forward_hook(count)
    for piece_BT in np.split(np.asarray(families.tokens()), (9, 10, 20), axis=1):
        _, cache = logits_of(mod, piece_BT, past_key_values=cache)
    held_B = (cache.entries["layers.1.attention"][0] >= 0).sum(dim=1)
    assert computed.tolist() == held_B.tolist() and 0 < int(computed.sum()) < 0.8 * 8 * T
    assert cache.entries["layers.1.attention"][1].shape[1] == int(held_B.max())
    assert cache.entries["layers.0.attention"][1].shape[1] == T
    with pytest.raises(ValueError, match=f"max_position_embeddings={T}"):
        logits_of(mod, families.tokens()[:, :1], past_key_values=cache)


def test_a_copied_cache_continues_a_prefix(mod):
    """Into several rows too; it refuses to forget tokens."""
    tokens_BT = np.asarray(families.tokens())
    expected, _ = logits_of(mod, tokens_BT)
    _, prefix = logits_of(mod, tokens_BT[:1, :FIRST])
    found, _ = logits_of(mod, tokens_BT[:1, FIRST:], past_key_values=copy.deepcopy(prefix))
    np.testing.assert_allclose(found, expected[:1, FIRST:], atol=1e-4)
    repeated = copy.deepcopy(prefix)
    repeated.batch_repeat_interleave(2)
    rows_BT = np.stack([tokens_BT[0], np.r_[tokens_BT[0, :FIRST], tokens_BT[1, FIRST:]]])
    found, _ = logits_of(mod, rows_BT[:, FIRST:], past_key_values=repeated)
    np.testing.assert_allclose(found, logits_of(mod, rows_BT)[0][:, FIRST:], atol=1e-4)
    assert prefix.get_seq_length() == FIRST
    with pytest.raises(NotImplementedError, match="cannot forget tokens"):
        prefix.crop(-1)


def test_generate_prefills_in_chunks(mod):
    import torch

    inputs = torch.tensor(np.asarray(families.tokens())[:1, :16]).long()
    options = dict(max_new_tokens=4, do_sample=False)
    whole = mod.generate(inputs, **options).tolist()
    _, cache = logits_of(mod, inputs[:, :3])
    pieces = mod.generate(inputs, past_key_values=cache, prefill_chunk_size=5, **options)
    assert pieces.tolist() == whole


def test_losses_of_micro_batches_add_up_to_that_of_the_batch(mod):
    """As transformers' Trainer accumulates them, of rows that count 3 and 30 tokens."""
    import torch

    ids_BT = torch.tensor(np.asarray(families.tokens()[:2], np.int64))
    labels_BT = torch.where(torch.arange(T) < torch.tensor([[4], [31]]), ids_BT, -100)
    parts = [
        mod(ids_BT[b : b + 1], labels=labels_BT[b : b + 1], num_items_in_batch=33).loss
        for b in range(2)
    ]
    whole = mod(ids_BT, labels=labels_BT).loss
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize(
    "name, drops_tokens",
    [
        ("mod_context", False),
        ("routed_mlp", True),
        pytest.param("mode_staged", True, marks=pytest.mark.slow),
    ],
)
def test_a_packed_row_is_its_documents(name, drops_tokens, tmp_path, load):
    """The logits are those of efx for packed rows; without dropped tokens they are those of each
    document alone, too (the causal limit of a document has no headroom in packed rows)."""
    import torch

    model, params, state = build(name)
    tokens_BT = families.tokens(batch=2)
    expected = families.jit(model.apply)(
        {"params": params, **state}, tokens_BT, packed(POSITIONS_T, 2), packed(SEGMENTS_T, 2)
    )
    hf.save_hf(tmp_path / "new", params, model, state=state.get("state"))
    theirs = load(tmp_path / "new")
    options = dict(
        position_ids=torch.tensor(POSITIONS_T)[None],
        attention_mask=torch.tensor(packed(SEGMENTS_T > 0, 2).tolist()),
    )
    found, cache = logits_of(theirs, tokens_BT, **options)
    for document in (1, 2, 3):
        is_here_T = SEGMENTS_T == document
        np.testing.assert_allclose(found[:, is_here_T], expected[:, is_here_T], atol=1e-4)
        if not drops_tokens:
            alone, _ = logits_of(theirs, tokens_BT[:, is_here_T])
            np.testing.assert_allclose(found[:, is_here_T], alone, atol=1e-4)
    assert cache is None
    with pytest.raises(ValueError, match="position_ids do not continue the rows"):
        logits_of(theirs, tokens_BT, use_cache=True, **options)


# ---- runs ----------------------------------------------------------------------------------------


def test_a_dense_run_is_a_model_of_transformers(imported, folder, tmp_path, load):  # noqa: F811
    """Imported and exported, its arrays are those of the first folder; sharded and in bfloat16."""
    import torch

    path = tmp_path / "new/llama"
    assert run("--mode=export", "--workdir", imported, "--to", path) == 0
    theirs = load(path, trust_remote_code=False)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    first, written = import_run.Tensors(folder), load_file(path / weights.SINGLE)
    assert written.keys() == first.keys()
    for name, array in written.items():
        expected = np.asarray(first[name]).astype(np.float32)
        np.testing.assert_array_equal(array, expected[: len(array)])  # but for rows without tokens
    assert written["model.embed_tokens.weight"].shape[0] == IDS
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1

    options = dict(dtype="bfloat16", shard_bytes=10_000)
    export_run.export_run(config_of_run(imported), imported, tmp_path / "small", **options)
    shards = tmp_path.glob("small/*.safetensors")
    sizes = sorted(sum(array.nbytes for array in load_file(path).values()) for path in shards)
    # The embedding and the head are alone in theirs.
    assert sizes[-1] == sizes[-2] == 2 * IDS * 32 > 10_000 >= sizes[-3]
    small = load(tmp_path / "small")
    assert small.dtype == torch.bfloat16
    for name, array in theirs.state_dict().items():
        assert torch.equal(array.to(torch.bfloat16), small.state_dict()[name]), name


def test_a_routed_run_brings_its_code(routed, tmp_path, load, transformers):  # noqa: F811
    """Scanned layers and a padded vocabulary become plain ones. It generates the same text with a
    cache and without, in a batch, by beams and resumed."""
    path = tmp_path / "mod"
    assert run("--mode=export", "--workdir", routed, "--to", path, "--step=0") == 0
    theirs, (model, variables) = load(path), read_run(routed)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, IDS, (2, 32)), jnp.int32)
    expected = families.jit(model.apply)(variables, tokens_BT)
    np.testing.assert_allclose(logits_of(theirs, tokens_BT)[0], expected, atol=1e-4)
    assert theirs.config.vocab_size == IDS

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    inputs = tokenizer(["The quick", "over the lazy dog. The"], return_tensors="pt", padding=True)
    alone = tokenizer("The quick", return_tensors="pt")

    def generate(inputs, **options):
        options = dict(max_new_tokens=12, do_sample=False) | options
        return theirs.generate(**inputs, **options)

    for beams in (1, 2):
        with_cache = generate(inputs, num_beams=beams).tolist()
        assert with_cache == generate(inputs, num_beams=beams, use_cache=False).tolist()
    whole = generate(alone)
    assert whole[0, -12:].tolist() == generate(inputs)[0, -12:].tolist()
    part = generate(alone, max_new_tokens=5, return_dict_in_generate=True)
    resumed = dict(input_ids=part.sequences, past_key_values=part.past_key_values)
    assert generate(resumed, max_new_tokens=7).tolist() == whole.tolist()
    with pytest.raises(ValueError, match="assisted generation"):
        generate(alone, prompt_lookup_num_tokens=2)
    theirs.save_pretrained(tmp_path / "again")  # their own writing keeps the code
    again = load(tmp_path / "again")
    np.testing.assert_array_equal(*(logits_of(m, tokens_BT)[0] for m in (theirs, again)))


# ---- the versions of transformers ----------------------------------------------------------------

# The oldest supported one, with the packages that it does not share with the newest.
OLDEST = (
    "transformers==" + re.search(r">=([\d.]+)", hf.TRANSFORMERS)[1],
    "huggingface_hub==0.36.2",
    "tokenizers==0.22.2",
    *("requests", "urllib3", "certifi", "idna", "charset-normalizer"),
)


@pytest.fixture
def oldest(tmp_path):
    """The folder of the oldest transformers; skips if there is no index."""
    path = tmp_path / "oldest"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", path, *OLDEST]
    done = subprocess.run(command, capture_output=True, text=True)
    if "(from versions: none)" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_exports_load_with_the_oldest_transformers(oldest, routed, tmp_path):  # noqa: F811
    """A run with routed blocks and a GPT-NeoX: the logits are those of efx, and the tokenizer's
    output is what `generate` takes. All other tests are of the newest."""
    assert run("--mode=export", "--workdir", routed, "--to", tmp_path / "exports/mod") == 0
    neox = families.make(families.FAMILIES["neox"].changes, vocab_size=IDS)
    params = families.random_params(neox)
    files = export_run.tokenizer_files(bpe.train_bpe([TEXT], 270), T)
    hf.save_hf(tmp_path / "exports/neox", params, neox, files=files)
    tokens_BT = np.random.default_rng(0).integers(0, 270, (2, T))
    pairs = {"mod": read_run(routed), "neox": (neox, {"params": params})}
    for name, (model, variables) in pairs.items():
        logits = families.jit(model.apply)(variables, jnp.asarray(tokens_BT, jnp.int32))
        np.save(tmp_path / "exports" / name / "tokens.npy", tokens_BT)
        np.save(tmp_path / "exports" / name / "logits.npy", logits)
    environment = {"HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = os.environ | environment | {"PYTHONPATH": str(oldest)}
    script = pathlib.Path(__file__).with_name("load_exports.py")
    command = [sys.executable, "-P", script, tmp_path / "exports"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_exported_tokenizers_have_the_ids_of_efx(kind, tmp_path, transformers):  # noqa: F811
    text = "The  quick\n brown fox jumps, the dog "
    makers = {
        "bytes": ByteTokenizer,
        "chars": lambda: CharTokenizer(text),
        "bpe": lambda: bpe.train_bpe([TEXT], 270),
    }
    ours = makers[kind]()
    for name, contents in export_run.tokenizer_files(ours, 32).items():
        (tmp_path / name).write_text(contents)
    for model_type in ("gpt2", "llama", "smollm3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ids = theirs(text).input_ids
        assert ids == ours.encode(text).tolist() and theirs.decode(ids) == text, model_type
        assert theirs.eos_token_id == ours.eot and len(theirs) == ours.vocab_size


def test_a_qwen2_without_its_own_tokenizer_is_exported_with_the_code_of_efx(tmp_path):
    """transformers makes a tokenizer of Qwen2's kind of any folder with this architecture."""
    model = families.make({"attention.bias": "qkv"})
    without = export_run.foreign_architectures(bpe.train_bpe([TEXT], 270).to_json())
    config = hf.save_hf(tmp_path / "x", families.random_params(model), model, without=without)
    assert config["model_type"] == "efx"


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, setting", [("soft", "soft_experts.num=4"), ("latent", "family='latent'")]
)
def test_models_that_are_not_exported_are_refused(name, setting):
    config = families.build(name).config
    refused(lambda: own_format.check(config, "none"), f"config.model.{setting}")


def test_bad_commands_write_nothing(routed, tmp_path, capsys):  # noqa: F811
    full, new = tmp_path / "full", tmp_path / "x"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    (tmp_path / "ensemble/clusters").mkdir(parents=True)
    (tmp_path / "ensemble/clusters/clustering.json").write_text("{}")
    shutil.copy(routed / "config.json", tmp_path / "ensemble")
    for arguments, name in (
        ([], "--to"),
        (["--to", full], "notes.txt"),
        (["--to", "gs://a/b"], "--to=gs://a/b"),
        (["--to", new, "--dtype=float8"], "--dtype=float8"),
        (["--to", new, "--config", "latent:smoke"], "config.model.family='latent'"),
        (["--to", new, "--config.adapter.kind=lora"], "config.adapter.kind='lora'"),
        (["--to", new, "--workdir", tmp_path / "ensemble"], "ensemble"),
    ):
        assert run("--mode=export", "--workdir", routed, *arguments) == 2, arguments
        assert name in error_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ensemble", "full"]
    assert [path.name for path in full.iterdir()] == ["notes.txt"]


def test_an_export_that_cannot_be_written_leaves_no_folder(tmp_path):
    model, params, path = families.build("mod"), families.params_of("mod"), tmp_path / "deep/x"
    with largest_file(10_000):
        refused(lambda: hf.save_hf(path, params, model), str(path))
    assert not list(tmp_path.iterdir())


def test_numbers_that_a_type_cannot_hold_are_refused(tmp_path):
    large = weights.NewArray("w", (2,), lambda: np.array([1.0, -1e6], np.float32))
    refused(lambda: weights.write(tmp_path, [large], "float16"), "w", "float16")
    weights.write(tmp_path, [large], "bfloat16")
