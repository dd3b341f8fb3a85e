"""--mode=export: folders that transformers loads and that compute the same, or one line and nothing
written."""

import ast
import copy
import errno
import importlib.util
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
from safetensors import SafetensorError
from safetensors.numpy import load_file
from test_documents import POSITIONS_T, SEGMENTS_T, packed
from test_import import IDS, TEXT, folder, imported, parameters, run  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx import build, models
from efx.config import config_of_run
from efx.data import bpe
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.errors import UsageError
from efx.interop import export_run, hf, own_format, weights
from efx.layers import positions
from efx.layers.routing import depth
from efx.layers.stack import scan_params

T = families.LENGTH
FIRST = 12  # tokens that the cache gets at first


@pytest.fixture(scope="module")
def load(transformers, tmp_path_factory):  # noqa: F811
    """folder -> the model in it, by whatever code it brings, and nobody asked."""
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

# Of tests/families.py: between them, and the next, every setting that the file knows.
OWN = (
    "llama_options", "mup", "mod_options", "mod_parallel", "mod_threshold", "mod_context", "moe",
    "moe_switch", "moe_expert_choice", "mode_staged", "dropout_elementwise_mod",
    "dropout_attention_mod", "dropout_embedding_moe",
)  # fmt: skip
MASKS_OF_ONE_ATTENTION = {
    "dropout.kind": "attention",
    "dropout.sites": families.NO_PROBS,
    "dropout.attention.input": "embedding_linear",
    "dropout.attention.rounding": "sigmoid",
    "dropout.attention.granularity": "token",
    "dropout.attention.num_heads": 2,
    "attention.window": 9,
}


@pytest.mark.parametrize("name", [*OWN, "masks_of_one_attention"])
def test_the_logits_are_those_of_efx(name, tmp_path, load):
    """Of whole sequences; in pieces from the cache, with padding before the texts."""
    import torch

    tokens_BT = np.asarray(families.tokens())
    if name in families.FAMILIES:
        model, params = families.build(name), families.params_of(name)
        state, expected = families.state_of(name), families.logits_of(name, families.tokens())
    else:
        model = families.make(MASKS_OF_ONE_ATTENTION)
        params, state = families.random_params(model), {}
        expected = families.jit(model.apply)({"params": params}, families.tokens())
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


def test_every_gate_is_in_the_file(transformers):  # noqa: F811
    import torch

    spec = importlib.util.spec_from_file_location("modeling_efx", own_format.CODE)
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    score_T = np.linspace(-3, 3, 7, dtype=np.float32)
    assert exported.GATES.keys() == depth.GATES.keys()
    for name, gate in depth.GATES.items():
        theirs_T = exported.GATES[name](torch.tensor(score_T)).numpy()
        np.testing.assert_allclose(theirs_T, gate(score_T), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["none", "linear", "llama3"])
def test_rotary_positions(kind, transformers):  # noqa: F811
    import torch

    spec = importlib.util.spec_from_file_location("modeling_efx", own_format.CODE)
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    changes = {**families.LLAMA3, "attention.rope_scaling.kind": kind, "attention.head_dim": 16}
    a = families.make({**changes, "attention.rope_fraction": 0.5}).config.attention
    x_BTNH = np.random.default_rng(0).normal(size=(1, 40, 2, 16)).astype(np.float32)
    positions_BT = np.arange(40)[None] * 3
    found = code.turned(torch.tensor(x_BTNH), torch.tensor(positions_BT), own_format.rope_of(a))
    expected = positions.rope(jnp.asarray(x_BTNH), jnp.asarray(positions_BT), a)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_the_code_stands_by_itself():
    tree = ast.parse(own_format.CODE.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in nodes]
    used = {name.partition(".")[0] for name in names}
    assert used == {"functools", "math", "typing", "torch", "transformers"}


def test_the_cache_holds_the_tokens_that_a_block_computed(tmp_path, load):
    hf.save_hf(tmp_path / "new", families.params_of("mod"), families.build("mod"))
    theirs = load(tmp_path / "new")
    changed, cache, routed = [], None, theirs.layers[1]
    routed.register_forward_hook(
        lambda _, inputs, out: changed.append((inputs[0] != out).any(dim=-1).sum(dim=1))
    )
    for piece_BT in np.split(np.asarray(families.tokens()), (9, 10, 20), axis=1):
        _, cache = logits_of(theirs, piece_BT, past_key_values=cache)
    changed_B = sum(changed)
    held_B = (cache.kept["layers.1.attention"][0] >= 0).sum(dim=1)
    assert changed_B.tolist() == held_B.tolist() and 0 < int(changed_B.sum()) < 0.8 * 8 * T
    assert cache.kept["layers.1.attention"][1].shape[1] == int(held_B.max())
    assert cache.kept["layers.0.attention"][1].shape[1] == T
    with pytest.raises(ValueError, match=f"more than max_position_embeddings={T} tokens"):
        logits_of(theirs, families.tokens()[:, :1], past_key_values=cache)


@pytest.fixture(scope="module")
def mod(tmp_path_factory, load):
    """A Mixture-of-Depths in transformers."""
    path = tmp_path_factory.mktemp("exports") / "mod"
    hf.save_hf(path, families.params_of("mod"), families.build("mod"))
    return load(path)


def test_a_copied_cache_continues_a_prefix(mod):
    """Into several rows too; a cache that cannot forget tokens refuses to."""
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
    for size in (5, 8):
        _, cache = logits_of(mod, inputs[:, :3])
        pieces = mod.generate(inputs, past_key_values=cache, prefill_chunk_size=size, **options)
        assert pieces.tolist() == whole


def test_accumulated_gradients_are_those_of_the_batch(mod, tmp_path, transformers):  # noqa: F811
    """By transformers' Trainer, of rows that count 3 and 30 tokens."""
    import torch

    ids_BT = np.asarray(families.tokens(), np.int64)[:2]
    rows = [
        {"input_ids": ids_T, "labels": np.where(np.arange(T) < count, ids_T, -100)}
        for ids_T, count in zip(ids_BT, (4, 31), strict=True)
    ]

    def trained(batch_size):
        model = copy.deepcopy(mod)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=2 // batch_size,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        new, old = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, mod))
        return (new - old).detach()

    one_by_one, together = trained(1), trained(2)
    assert (one_by_one - together).norm() < 1e-4 * together.norm()


# The documents of these have room for all of their tokens, or for a share of them.
@pytest.mark.parametrize("name, has_room", [("mod_context", True), ("mode_staged", False)])
def test_a_packed_row_is_its_documents(name, has_room, tmp_path, load):
    """The logits are those of efx for packed rows, and where no block is full those of each
    document alone."""
    import torch

    model, variables = families.build(name), {"params": families.params_of(name)}
    state = families.state_of(name)
    tokens_BT = families.tokens(batch=2)
    expected = families.jit(model.apply)(
        {**variables, **state}, tokens_BT, packed(POSITIONS_T, 2), packed(SEGMENTS_T, 2)
    )
    hf.save_hf(tmp_path / "new", variables["params"], model, state=state.get("state"))
    theirs = load(tmp_path / "new")
    options = dict(
        position_ids=torch.tensor(POSITIONS_T)[None],
        attention_mask=torch.tensor(packed(SEGMENTS_T > 0, 2).tolist()),
    )
    found, cache = logits_of(theirs, tokens_BT, **options)
    for document in (1, 2, 3):
        is_here_T = SEGMENTS_T == document
        np.testing.assert_allclose(found[:, is_here_T], expected[:, is_here_T], atol=1e-4)
        if has_room:
            alone, _ = logits_of(theirs, tokens_BT[:, is_here_T])
            np.testing.assert_allclose(found[:, is_here_T], alone, atol=1e-4)
    assert cache is None
    with pytest.raises(ValueError, match="position_ids do not continue the rows"):
        logits_of(theirs, tokens_BT, use_cache=True, **options)


def test_scanned_layers_and_a_padded_vocabulary(tmp_path):
    """The same files as of unrolled layers."""
    changes = {"depth": 4, "depth_routing.kind": "mod", "depth_routing.causal": "threshold"}
    model = families.make({**changes, "vocab_multiple": 16})
    params, state = families.random_params(model), families.random_state(model)["state"]
    hf.save_hf(tmp_path / "unrolled", params, model, state=state)
    scanned = models.changed(model, scan_layers=True)
    params, state = (
        {**tree, "layers": scan_params(tree["layers"], scanned.specs())} for tree in (params, state)
    )
    hf.save_hf(tmp_path / "scanned", params, scanned, state=state)
    arrays = [load_file(tmp_path / name / weights.SINGLE) for name in ("unrolled", "scanned")]
    families.assert_trees_close(*arrays, rtol=0, atol=0)
    assert arrays[0]["embed.weight"].shape == (families.VOCAB, 32)
    assert arrays[0]["layers.3.quantile"].shape == ()


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(folder, tmp_path_factory):  # noqa: F811
    """The run folder of that Llama with routed blocks, at step 0."""
    workdir = tmp_path_factory.mktemp("runs") / "mod"
    arguments = ("--mode=import", "--config", "mod:smoke", "--from", folder, "--workdir", workdir)
    options = {"model.context": 32, "data.seq_len": 16, "model.depth_routing.every": 1}
    assert run(*arguments, **options, **{"model.depth_routing.slack": 3.0}) == 0
    return workdir


def test_a_dense_run_is_a_model_of_transformers(imported, folder, tmp_path, load, capsys):  # noqa: F811
    """Imported and exported, its arrays are those of the first folder; sharded and in bfloat16."""
    path = tmp_path / "new/llama"
    assert run("--mode=export", "--workdir", imported, "--to", path) == 0
    assert "as Llama 2 and 3" in capsys.readouterr().out
    theirs = load(path, trust_remote_code=False)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    first = weights.Weights(folder)
    written = load_file(path / "model.safetensors")
    assert written.keys() == first.keys()
    for name, array in written.items():
        expected = np.asarray(first[name]).astype(np.float32)
        np.testing.assert_array_equal(array, expected[: len(array)])  # but for rows without tokens
    assert written["model.embed_tokens.weight"].shape[0] == IDS
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert len(modes) == 1  # whoever may read one file may read all

    options = dict(dtype="bfloat16", shard_bytes=10_000)
    config = config_of_run(imported)
    contents = export_run.export_run(config, imported, tmp_path / "small", **options)
    assert contents["dtype"] == "bfloat16"
    shards = sorted(tmp_path.glob("small/*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "small" / weights.SINGLE).exists()
    sizes = [sum(array.nbytes for array in load_file(shard).values()) for shard in shards]
    assert max(sizes) == 2 * IDS * 32 > 10_000 >= sorted(sizes)[-2]  # the embedding, by itself
    index = json.loads((tmp_path / "small/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    small = load(tmp_path / "small")
    import torch

    assert small.dtype == torch.bfloat16
    for name, array in theirs.state_dict().items():
        assert torch.equal(array.to(torch.bfloat16), small.state_dict()[name]), name


def test_a_routed_run_brings_its_code(routed, tmp_path, load, capsys, transformers):  # noqa: F811
    """With it the text that is generated is the same with and without a cache, in a batch and by
    beams."""
    path = tmp_path / "mod"
    assert run("--mode=export", "--workdir", routed, "--to", path, "--step=0") == 0
    said = capsys.readouterr().out
    assert "modeling_efx.py: transformers>=4.57.1,<6 loads it with trust_remote_code" in said
    assert "not the model that was trained" not in said
    changed = "--config.model.depth_routing.slack=1.5"
    assert run("--mode=export", "--workdir", routed, "--to", tmp_path / "other", changed) == 0
    words = "config.model.depth_routing.slack=1.5 (trained with 3.0)"
    assert words in capsys.readouterr().out
    theirs, (model, _, params) = load(path), parameters(routed)
    assert type(theirs).__name__ == "EfxForCausalLM"
    variables = build.finished(config_of_run(routed), routed)[3]
    tokens_BT = np.random.default_rng(0).integers(0, IDS, (2, 32))
    tokens_BT = jnp.asarray(tokens_BT, jnp.int32)
    expected = families.jit(model.apply)({"params": params, **variables}, tokens_BT)
    np.testing.assert_allclose(logits_of(theirs, tokens_BT)[0], expected, atol=1e-4)

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    inputs = tokenizer(["The quick", "over the lazy dog. The"], return_tensors="pt", padding=True)
    for options in ({}, {"num_beams": 2}):
        options |= dict(max_new_tokens=12, do_sample=False)
        with_cache = theirs.generate(**inputs, **options)
        assert with_cache.tolist() == theirs.generate(**inputs, use_cache=False, **options).tolist()
    alone = tokenizer("The quick", return_tensors="pt")
    whole = theirs.generate(**alone, max_new_tokens=12, do_sample=False)
    batch = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert whole[0, -12:].tolist() == batch[0, -12:].tolist()
    some = theirs.generate(**alone, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    rest = dict(max_new_tokens=7, do_sample=False, past_key_values=some.past_key_values)
    assert theirs.generate(some.sequences, **rest).tolist() == whole.tolist()
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        theirs.generate(**alone, max_new_tokens=5, prompt_lookup_num_tokens=2)
    theirs.save_pretrained(tmp_path / "again")  # their own writing keeps the code
    np.testing.assert_array_equal(
        *(logits_of(m, tokens_BT)[0] for m in (theirs, load(tmp_path / "again")))
    )


# ---- the versions of transformers ----------------------------------------------------------------

# The oldest that is supported, with the packages that it does not share with the newest.
OLDEST = (
    "transformers==" + re.search(r">=([\d.]+)", hf.TRANSFORMERS)[1],
    "huggingface_hub==0.36.2",
    "tokenizers==0.22.2",
    *("requests", "urllib3", "certifi", "idna", "charset-normalizer"),
)


@pytest.fixture
def oldest(request, tmp_path):
    """The folder of the oldest transformers, installed once; skips if there is no index."""
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    parent = tmp_path if cache is None else cache.mkdir("transformers")
    path = parent / "-".join(OLDEST[:3])
    if not path.exists():
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", part, *OLDEST]
        done = subprocess.run(command, capture_output=True, text=True)
        if "(from versions: none)" in done.stderr:
            pytest.skip("the package index cannot be reached")
        assert done.returncode == 0, done.stderr
        part.rename(path)
    return path


@pytest.fixture(scope="module")
def exports(tmp_path_factory, routed):
    """A folder of exports, with efx's logits: a run with routed blocks, and a GPT-NeoX."""
    path = tmp_path_factory.mktemp("versions")
    assert run("--mode=export", "--workdir", routed, "--to", path / "mod") == 0
    neox = families.make(families.FAMILIES["neox"].changes, vocab_size=IDS)
    params = families.random_params(neox)
    files = export_run.tokenizer_files(bpe.train_bpe([TEXT], 270), T)
    assert hf.save_hf(path / "neox", params, neox, files=files)["model_type"] == "gpt_neox"
    mod, _, mod_params = parameters(routed)
    state = build.finished(config_of_run(routed), routed)[3]
    tokens_BT = np.random.default_rng(0).integers(0, 270, (2, T))
    for name, model, variables in (
        ("mod", mod, {"params": mod_params, **state}),
        ("neox", neox, {"params": params}),
    ):
        logits = families.jit(model.apply)(variables, jnp.asarray(tokens_BT, jnp.int32))
        np.save(path / name / "tokens.npy", tokens_BT)
        np.save(path / name / "logits.npy", logits)
    return path


@pytest.mark.parametrize("version", ["oldest", "newest"])
def test_exports_load_with_the_claimed_versions(
    version,
    exports,
    request,
    tmp_path,
    transformers,  # noqa: F811
):
    """The logits are those of efx, and the tokenizer's output is what `generate` takes."""
    assert hf.TRANSFORMERS in own_format.CODE.read_text()
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = ""
    if version == "oldest":
        environment["PYTHONPATH"] = str(request.getfixturevalue("oldest"))
    script = pathlib.Path(__file__).with_name("load_exports.py")
    command = [sys.executable, "-P", script, exports]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "smollm3"])
def test_the_ids_are_those_of_efx(kind, model_type, tmp_path, transformers):  # noqa: F811
    text = "The  quick\n brown fox jumps, the dog "
    ours = {
        "bytes": lambda: ByteTokenizer(),
        "chars": lambda: CharTokenizer(text),
        "bpe": lambda: bpe.train_bpe([TEXT], 270),
    }[kind]()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, contents in export_run.tokenizer_files(ours, 32).items():
        (tmp_path / name).write_text(contents)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(text).input_ids
    assert ids == ours.encode(text).tolist() and theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eot and len(theirs) == ours.vocab_size


def test_a_qwen2_has_its_own_tokenizer(tmp_path):
    """transformers makes a tokenizer of that kind of any folder with this architecture."""
    import tokenizers as library

    ours = bpe.train_bpe([TEXT], 270)
    assert export_run.foreign_architectures(ours.to_json()) == ("qwen2",)
    inner = library.Tokenizer.from_str(ours.to_json())
    inner.normalizer = library.normalizers.NFC()
    split = library.pre_tokenizers.Split(library.Regex(export_run.QWEN2_SPLIT), "isolated")
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = library.pre_tokenizers.Sequence([split, byte_level])
    assert export_run.foreign_architectures(inner.to_str()) == ()
    model = families.make({"attention.bias": "qkv"})
    params = families.random_params(model)
    assert hf.save_hf(tmp_path / "a", params, model)["model_type"] == "qwen2"
    assert hf.save_hf(tmp_path / "b", params, model, without=("qwen2",))["model_type"] == "efx"


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, words",
    [
        ("mod_stochastic", r"depth_routing\.train_selection='stochastic': a control has no router"),
        ("mod_fixed", r"depth_routing\.train_selection='position'"),
        ("recursion", r"depth_routing\.kind='recursion': shared blocks are not exported"),
        ("soft", r"soft_experts\.num=4: soft experts are not exported"),
        ("averages", r"dense_former\.on=True: averages of earlier states are not exported"),
        ("latent", r"family='latent': only decoders are exported"),
        ("streams_same", r"family='encoder_decoder': only decoders are exported"),
    ],
)
def test_models_that_are_not_exported(name, words, tmp_path):
    config = families.build(name).config
    with pytest.raises(UsageError, match=rf"config\.model\.{words}") as error:
        own_format.check(config, "none")
    assert "\n" not in str(error.value)


def refused(capsys, words, *arguments):
    assert run("--mode=export", *arguments) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert words in line and captured.out == "" and "Traceback" not in captured.err


def test_bad_input_is_one_line(routed, tmp_path, capsys, monkeypatch):
    """Nothing is left of an export that fails."""
    to = ("--workdir", routed, "--to")
    refused(capsys, "--to is missing: a new folder", "--workdir", routed)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    refused(capsys, "full is not empty (notes.txt); use a new folder", *to, tmp_path / "full")
    refused(capsys, "notes.txt is a file, not a folder", *to, tmp_path / "full/notes.txt/new")
    refused(capsys, "--to=gs://a/b: must be a folder on a disk", *to, "gs://a/b")
    refused(capsys, "--dtype=float8: expected float32", *to, tmp_path / "x", "--dtype=float8")
    refused(capsys, "there is no checkpoint 7", *to, tmp_path / "x", "--step=7")
    refused(capsys, "not a run folder", "--workdir", tmp_path / "none", "--to", tmp_path / "x")
    latent = ("--config", "latent:smoke")
    refused(capsys, "config.model.family='latent': only decoders", *to, tmp_path / "x", *latent)
    lora = "--config.adapter.kind=lora"
    refused(capsys, "config.adapter.kind='lora': adapters are not", *to, tmp_path / "x", lora)
    (tmp_path / "ensemble/clusters").mkdir(parents=True)
    (tmp_path / "ensemble/clusters/clustering.json").write_text("{}")
    shutil.copy(routed / "config.json", tmp_path / "ensemble")
    ensemble = ("--workdir", tmp_path / "ensemble", "--to", tmp_path / "x")
    refused(capsys, "is an ensemble, and these are not exported", *ensemble)

    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        refused(capsys, "KiB, but its disk has 97.7 KiB free", *to, tmp_path / "deep/x")
    no_space = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (OSError(errno.ENOSPC, "No space"), SafetensorError(no_space)):
        words = "the disk is full" if isinstance(error, OSError) else no_space
        with monkeypatch.context() as patch:

            def full(arrays, path, error=error, **_):
                path.write_bytes(b"half of it")
                raise error

            patch.setattr(weights, "save_file", full)
            refused(capsys, f"deep/x cannot be written: {words}", *to, tmp_path / "deep/x")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ensemble", "full"] and len(list((tmp_path / "full").iterdir())) == 1


def test_numbers_that_a_type_cannot_hold(tmp_path):
    large = np.array([1.0, -1e6], np.float32)
    with pytest.raises(UsageError, match=r"w has values up to 1e\+06, too large for float16"):
        weights.write(tmp_path, [weights.NewArray("w", (2,), lambda: large)], "float16")
    weights.write(tmp_path, [weights.NewArray("w", (2,), lambda: large)], "bfloat16")
