"""--mode=import: a run directory that works like any other, or one line and nothing written."""

import json
import shutil

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file
from test_interop import torch_model, transformers  # noqa: F401

from efx import main
from efx.config.load import config_of_run
from efx.data import bpe, load_tokenizer
from efx.interop.import_run import INDEX
from efx.train import inference

pytestmark = pytest.mark.usefixtures("one_device")
TEXT = "The quick brown fox jumps over the lazy dog. " * 90
IDS, ROWS = 280, 288  # of the tokenizer, and of the embedding
FIRST, LAST = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
UP = "model.layers.1.mlp.up_proj.weight"


def tokenizer_of(ids):
    return bpe.train_bpe([TEXT, *map(chr, range(999))], ids)


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):  # noqa: F811
    """A Llama in two shards, of bfloat16, float16 and float32, with its tokenizer."""
    path = tmp_path_factory.mktemp("hf") / "llama"
    sizes = dict(vocab_size=ROWS, num_key_value_heads=2, max_position_embeddings=40)
    torch_model(transformers, "llama", sizes).save_pretrained(path)
    arrays = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    last = {name: array for name, array in arrays.items() if "layers.1" in name}
    first = {name: array.astype(bfloat16) for name, array in arrays.items() if name not in last}
    last |= {name: array.astype(np.float16) for name, array in last.items() if "mlp" in name}
    save_file(first, path / FIRST)
    save_file(last, path / LAST)
    shard_of = dict.fromkeys(first, FIRST) | dict.fromkeys(last, LAST)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    tokenizer_of(IDS).save(path / "tokenizer.json")
    (path.parent / "text.txt").write_text(TEXT)
    return path


def run(*arguments, **settings):
    given = [f"--config.{key}={value}" for key, value in settings.items()]
    return main.main(["efx", *map(str, arguments), *given])


def import_run(folder, workdir, *arguments, **settings):
    return run("--mode=import", "--from", folder, "--workdir", workdir, *arguments, **settings)


def error_line(capsys):
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert "Traceback" not in captured.err
    return line


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
    """Its run directory."""
    workdir = tmp_path_factory.mktemp("runs") / "llama"
    settings = {
        "data.source": f"text:{folder.parent / 'text.txt'}",
        "data.seq_len": 16,
        "evaluate.max_batches": 2,
        "log.tensorboard": False,
        "optim.schedule.warmup_steps": 1,
        "sample.max_new_tokens": 8,
        "steps": 2,
    }
    assert import_run(folder, workdir, **settings) == 0
    return workdir


@pytest.fixture(scope="module")
def routed(folder, tmp_path_factory):
    """A run of the same Llama with routed, scanned blocks, by a config of its own."""
    workdir = tmp_path_factory.mktemp("runs") / "mod"
    options = {
        "data.seq_len": 16,
        "model.context": 32,
        "model.scan_layers": True,
        "model.vocab_multiple": 16,
        "model.depth_routing.causal_decision": "threshold",
        "model.depth_routing.extra_decisions": "('predictor',)",
        "model.depth_routing.every": 1,
        "model.depth_routing.slack": 3.0,
    }
    assert import_run(folder, workdir, "--config", "mod:smoke", **options) == 0
    return workdir


def read_run(workdir):
    """(model, variables as numpy) of a run at step 0."""
    built, step, params, state = inference.restore(config_of_run(workdir), workdir)
    assert step == 0
    return built.model, jax.tree.map(np.asarray, {"params": params, **state})


def test_the_run_has_the_parameters_of_the_folder(folder, imported):
    """Rows of the embedding without a token are left out."""
    model, variables = read_run(imported)
    first, last, params = load_file(folder / FIRST), load_file(folder / LAST), variables["params"]
    assert model.vocab_size == IDS
    for array, expected in (
        (params["embed"]["embedding"][:IDS], first["model.embed_tokens.weight"][:IDS]),
        (params["head"]["kernel"][:, :IDS], first["lm_head.weight"][:IDS].T),
        (params["layers"]["block_1"]["mlp"]["up"]["kernel"], last[UP].T),
    ):
        np.testing.assert_array_equal(array, expected.astype(np.float32))


def test_depth_routing_and_training_are_those_of_a_given_config(routed, imported):
    """Dense arrays are kept, each router is drawn."""
    model, variables = read_run(routed)
    assert model.config.depth_routing.kind == "mod" and model.config.width == 32
    assert model.config.context == 32 and config_of_run(routed).steps == 30
    block = variables["params"]["layers"]["units"]["block_0"]
    assert block["router"].shape == (2, 32) and "predictor" in block
    assert 0.005 < block["router"].std() < 0.05 and not np.array_equal(*block["router"])
    dense = read_run(imported)[1]["params"]["layers"]
    for i in (0, 1):
        kernel = dense[f"block_{i}"]["attention"]["key"]["kernel"]
        np.testing.assert_array_equal(block["attention"]["key"]["kernel"][i], kernel)


def test_an_imported_run_is_trained_and_sampled(imported, capsys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(imported, copy)
    assert run("--workdir", copy, **{"sample.every": 0, "evaluate.every": 1}) == 0
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert 40 > losses[1] > losses[2]
    capsys.readouterr()
    assert run("--mode=sample", "--workdir", imported, "--prompt", "The quick") == 0
    assert "The quick" in capsys.readouterr().out


def test_a_tokenizer_in_the_style_of_sentencepiece(tmp_path):
    """Ids are the library's, special tokens are known, text comes back, also token by token."""
    import tokenizers as library

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {piece: 259 + i for i, piece in enumerate(["▁", "t", "h", "e", "▁t", "he"])}
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    inner = library.Tokenizer(library.models.BPE(vocabulary, [("▁", "t"), ("h", "e")], **options))
    normalizers, decoders = library.normalizers, library.decoders
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    inner.encode_special_tokens = True
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert (ours.vocab_size, ours.start, ours.eot) == (inner.get_vocab_size(), (1,), 2)
    for text in ("the 12345 the thé", "日本 \n\tx", "</s> the"):
        ids = ours.encode(text).tolist()
        assert ours.eot not in ids and [1, *ids] == inner.encode(text).ids
        assert ours.decode([1, *ids, 2]) == text
        decoder = ours.stream_decoder()
        assert "".join(map(decoder.feed, [1, *ids])) + decoder.finish() == text


# ---- bad input -----------------------------------------------------------------------------------


def write_json(name, **changes):
    def edit(folder):
        contents = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(contents))

    return edit


# {name: (what happens to the folder, what the message names)}
DAMAGE = {
    "missing shard": (lambda folder: (folder / LAST).unlink(), LAST),
    "shard elsewhere": (write_json(INDEX, weight_map={"x": "../x.safetensors"}), INDEX),
    "truncated": (lambda folder: (folder / LAST).write_bytes(b"\x08" * 99), LAST),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "more layers": (write_json("config.json", num_hidden_layers=3), "layers.2"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "other tokenizer": (lambda f: tokenizer_of(300).save(f / "tokenizer.json"), "tokenizer.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused_in_one_line(folder, tmp_path, capsys, damage):
    edit, name = DAMAGE[damage]
    shutil.copytree(folder, tmp_path / "llama")
    edit(tmp_path / "llama")
    assert import_run(tmp_path / "llama", tmp_path / "run", **{"data.seq_len": 16}) == 2
    assert name in error_line(capsys) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting, value",
    [
        ("model.width", 64),
        ("model.context", 64),
        ("data.tokenizer", "bytes"),
        ("adapter.kind", "lora"),
        ("model.dropout.kind", "elementwise"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(folder, tmp_path, capsys, setting, value):
    assert import_run(folder, tmp_path / "run", **{"data.seq_len": 16, setting: value}) == 2
    assert f"config.{setting}={value}" in error_line(capsys).replace("'", "")
    assert not (tmp_path / "run").exists()


def test_bad_commands_are_refused_and_a_run_stays(folder, imported, tmp_path, capsys):
    def files():
        return {p: p.stat().st_mtime for p in imported.rglob("*") if p.name != ".lock"}

    before = files()
    new = ("--workdir", tmp_path / "run")
    for arguments, name in (
        (("--mode=import", "--from", tmp_path / "nothing", *new), "nothing"),
        (("--mode=import", "--from", folder, *new, "--config", "latent:smoke"), "family='latent'"),
        (("--mode=import", "--from", folder, "--workdir", imported), str(imported)),
        (("--workdir", imported, "--from", folder), "--from"),
    ):
        assert run(*arguments) == 2, name
        assert name in error_line(capsys)
    assert files() == before and not (tmp_path / "run").exists()
