"""--mode=import: a run directory that works like any other, or one line and nothing written."""

import json
import shutil
import struct

import families
import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from efx import main, run_dir
from efx.config.load import config_of_run
from efx.data import bpe, load_tokenizer
from efx.interop import hf, weights
from efx.train import setup

pytestmark = pytest.mark.usefixtures("one_device")
TEXT = "The quick brown fox jumps over the lazy dog. " * 90
IDS, ROWS = 280, 288  # of the tokenizer, and of the embedding
FIRST, LAST = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"


def tokenizer_of(ids):
    return bpe.train_bpe([TEXT, *map(chr, range(999))], ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama in two shards, of bfloat16, float16 and float32, with its tokenizer."""
    path = tmp_path_factory.mktemp("hf") / "llama"
    changes = {"attention.num_kv_heads": 2, "vocab_multiple": 1, "mlp.hidden": 24}
    model = families.make(changes, vocab_size=ROWS, context=40)
    hf.save_hf(path, families.random_params(model), model)
    arrays = load_file(path / weights.SINGLE)
    (path / weights.SINGLE).unlink()
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


def read_run(workdir):
    """(model, variables as numpy) of a run at step 0."""
    built, step, params, state = setup.finished(config_of_run(workdir), workdir)
    assert step == 0
    return built.model, jax.tree.map(np.asarray, {"params": params, **state})


def test_the_run_has_the_parameters_of_the_folder(folder, imported):
    """Rows of the embedding without a token are left out."""
    model, variables = read_run(imported)
    params = variables["params"]
    assert model.vocab_size == IDS
    config, whole, expected = hf.load_hf(folder, config_of_run(imported))
    assert whole.vocab_size == ROWS and config.model == config_of_run(imported).model
    embeddings = (tree["embed"]["embedding"][:IDS] for tree in (params, expected))
    np.testing.assert_array_equal(*embeddings)
    heads = (tree["head"]["kernel"][:, :IDS] for tree in (params, expected))
    np.testing.assert_array_equal(*heads)
    families.assert_trees_close(params["layers"], expected["layers"], rtol=0, atol=0)
    first = load_file(folder / LAST)["model.layers.1.mlp.up_proj.weight"]
    up = params["layers"]["block_1"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(up, first.T.astype(np.float32))


@pytest.fixture(scope="module")
def routed(folder, tmp_path_factory):
    """The run directory of that Llama with routed blocks, trained as another config says."""
    workdir = tmp_path_factory.mktemp("runs") / "mod"
    options = {
        "data.seq_len": 16,
        "model.context": 32,
        "model.scan_layers": True,
        "model.vocab_multiple": 16,
        "model.depth_routing.causal": "threshold",
        "model.depth_routing.also_train": "('predictor',)",
        "model.depth_routing.every": 1,
        "model.depth_routing.skip_mlp": 8,
        "model.depth_routing.slack": 3.0,
    }
    assert import_run(folder, workdir, "--config", "mod:smoke", **options) == 0
    return workdir


def test_depth_routing_and_training_are_those_of_a_given_config(routed, imported):
    """Dense arrays are kept, each router is drawn."""
    model, variables = read_run(routed)
    assert model.config.depth_routing.kind == "mod" and model.config.width == 32
    assert model.config.context == 32 and config_of_run(routed).steps == 30
    block = variables["params"]["layers"]["units"]["block_0"]
    assert block["router"].shape == (2, 32) and {"predictor", "skip_mlp"} <= block.keys()
    assert 0.005 < block["router"].std() < 0.05 and not np.array_equal(*block["router"])
    dense = read_run(imported)[1]["params"]["layers"]
    for i in (0, 1):
        kernel = dense[f"block_{i}"]["attention"]["key"]["kernel"]
        np.testing.assert_array_equal(block["attention"]["key"]["kernel"][i], kernel)


@pytest.mark.slow
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


# ---- tokenizers --------------------------------------------------------------------------------


def library_tokenizer(kind):
    """A tokenizer of the library as Llama 3 or Llama 2 have it."""
    import tokenizers as library

    models, pre, decoders = library.models, library.pre_tokenizers, library.decoders
    if kind == "sentencepiece":
        vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
        vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
        vocabulary |= {piece: 259 + i for i, piece in enumerate(["▁", "t", "h", "e", "▁t", "he"])}
        merges = [("▁", "t"), ("h", "e")]
        model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        inner = library.Tokenizer(model)
        inner.normalizer = library.normalizers.Sequence(
            [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
        )
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            + [decoders.Strip(" ", 1, 0)]
        )
        first, ends = "<s>", ["<s>", "</s>"]
    else:
        vocabulary = {piece: i for i, piece in enumerate(pre.ByteLevel.alphabet())}
        inner = library.Tokenizer(models.BPE(vocabulary | {"th": 256, "Ġth": 257}, [("t", "h")]))
        pattern = library.Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+")
        inner.pre_tokenizer = pre.Sequence(
            [pre.Split(pattern, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        inner.decoder = decoders.ByteLevel()
        first, ends = "<|begin_of_text|>", ["<|begin_of_text|>", "<|end_of_text|>"]
    inner.add_special_tokens(ends)
    inner.post_processor = library.processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, inner.token_to_id(first))]
    )
    return inner, first, ends[-1]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_tokenizers(kind, tmp_path):
    """The ids are the library's, the special tokens are known, and text comes back, also token by
    token and where a character is several."""
    inner, first, end = library_tokenizer(kind)
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.vocab_size == inner.get_vocab_size()
    assert ours.start == (inner.token_to_id(first),)
    assert ours.eot == inner.token_to_id(end)
    for text in ("the 12345 the thé", "日本 \n\tx", end + " the"):
        ids = ours.encode(text).tolist()
        assert ours.eot not in ids
        inner.encode_special_tokens = True
        assert [*ours.start, *ids] == inner.encode(text).ids
        assert ours.decode([*ours.start, *ids, ours.eot]) == text
        decoder = ours.stream_decoder()
        assert "".join(map(decoder.feed, [*ours.start, *ids])) + decoder.finish() == text


# ---- bad input ---------------------------------------------------------------------------------


def edit_json(name, **changes):
    """Changes keys of a file; None removes one."""

    def edit(folder):
        contents = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in contents.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return edit


def edit_arrays(change):
    """Rewrites the last shard after change(arrays)."""

    def edit(folder):
        arrays = load_file(folder / LAST)
        change(arrays)
        save_file(arrays, folder / LAST)

    return edit


def edit_bytes(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def remove(name):
    return lambda folder: (folder / name).unlink()


def use_tokenizer(ids):
    return lambda folder: tokenizer_of(ids).save(folder / "tokenizer.json")


UP = "model.layers.1.mlp.up_proj.weight"
NORM = {"model.norm.weight": np.ones(32, np.float32)}
# What is done to the folder, and what the message names.
DAMAGE = {
    "missing shard": (remove(LAST), LAST),
    "no weights": (remove(INDEX), "model.safetensors"),
    "shard elsewhere": (edit_json(INDEX, weight_map={"x": "../x.safetensors"}), "../x.safetensors"),
    "truncated": (edit_bytes(LAST, lambda data: data[:-100]), LAST),
    "header of exabytes": (edit_bytes(LAST, lambda d: struct.pack("<Q", 2**62) + d[8:]), LAST),
    "integers": (edit_arrays(lambda a: a.update({UP: a[UP].astype(np.int16)})), f"{LAST}: {UP}"),
    "array in two shards": (edit_arrays(lambda a: a.update(NORM)), "model.norm.weight"),
    "no config": (remove("config.json"), "config.json"),
    "deep": (edit_bytes("config.json", lambda _: b"[" * 200_000), "config.json"),
    "many layers": (edit_json("config.json", num_hidden_layers=9999), "9999 layers"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json"),
    "empty tokenizer": (edit_bytes("tokenizer.json", lambda _: b"{}"), "tokenizer.json"),
    "larger tokenizer": (use_tokenizer(300), "tokenizer.json"),
}


def error_line(capsys):
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert "Traceback" not in captured.err
    return line


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_hostile_folders_are_refused_in_one_line(folder, tmp_path, capsys, damage):
    """Nothing is made by their numbers, and no run directory."""
    edit, name = DAMAGE[damage]
    shutil.copytree(folder, tmp_path / "llama")
    edit(tmp_path / "llama")
    assert import_run(tmp_path / "llama", tmp_path / "run", **{"data.seq_len": 16}) == 2
    assert name in error_line(capsys) and not (tmp_path / "run").exists()


def test_settings_that_contradict_the_folder_are_refused(folder, tmp_path, capsys):
    for setting, value in (
        ("model.width", 64),
        ("model.context", 64),
        ("data.seq_len", 64),
        ("data.tokenizer", "bytes"),
        ("adapter.kind", "lora"),
        ("model.dropout.kind", "elementwise"),
    ):
        given = {"data.seq_len": 16, setting: value}
        assert import_run(folder, tmp_path / "run", **given) == 2, setting
        name = "config.model.context" if setting == "data.seq_len" else f"config.{setting}={value}"
        assert name in error_line(capsys).replace("'", ""), setting
        assert not (tmp_path / "run").exists()


def test_other_refusals(folder, imported, tmp_path, capsys):
    """They leave a run as it was."""
    before = sorted(path.name for path in imported.iterdir())
    new = ("--workdir", tmp_path / "run")
    for arguments, name in (
        (("--mode=import", "--from", tmp_path / "nothing", *new), "nothing"),
        (("--mode=import", "--from", folder, *new, "--config", "latent:smoke"), "family='latent'"),
        (("--mode=import", "--from", folder, "--workdir", imported), str(imported)),
        (("--mode=import", *new), "--from"),
        (("--workdir", imported, "--from", folder), "--from"),
    ):
        assert run(*arguments) == 2, name
        assert name in error_line(capsys)
    assert sorted(path.name for path in imported.iterdir()) == before
    assert not (tmp_path / "run").exists()
    assert run_dir.recorded_config(imported)["model"]["width"] == 32
