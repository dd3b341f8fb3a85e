"""--mode=import: a run folder that can be used like any other, or one line and nothing written."""

import json
import re
import shutil
import struct

import families
import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from efx import build, main, runfolder, use
from efx.checkpoint.files import CheckpointError
from efx.checkpoint.manager import Checkpointer
from efx.config import config_of_run
from efx.data import bpe, load_tokenizer
from efx.interop import hf

pytestmark = pytest.mark.usefixtures("one_device")
TEXT = "The quick brown fox jumps over the lazy dog. " * 90
IDS, ROWS = 280, 288  # of the tokenizer, and of the embedding
# Three kinds of numbers in two files.
SHARDS = {"model-00001-of-00002.safetensors": bfloat16, "model-00002-of-00002.safetensors": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama in two shards, of bfloat16, float16 and float32, with a text and its tokenizer."""
    path = tmp_path_factory.mktemp("hf") / "llama"
    changes = {"attention.num_kv_heads": 2, "tied": True, "vocab_multiple": 1, "mlp.hidden": 24}
    model = families.make(changes, vocab_size=ROWS)
    hf.save_hf(path, families.random_params(model), model)
    state = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    first = {name: array for name, array in state.items() if "layers.1" not in name}
    rest = {name: array for name, array in state.items() if "layers.1" in name}
    first = {name: array.astype(bfloat16) for name, array in first.items()}
    rest = {
        name: array.astype(np.float16) if "mlp" in name else array for name, array in rest.items()
    }
    shard_of = {}
    for shard, arrays in zip(SHARDS, (first, rest), strict=True):
        save_file(arrays, path / shard)
        shard_of |= dict.fromkeys(arrays, shard)
    index = json.dumps({"metadata": {}, "weight_map": shard_of})
    (path / "model.safetensors.index.json").write_text(index)
    bpe.train_bpe([TEXT, *map(chr, range(300))], IDS).save(path / "tokenizer.json")
    (path.parent / "text.txt").write_text(TEXT)
    return path


def run(*arguments, **settings):
    given = [f"--config.{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return main.main(["efx", *map(str, arguments), *given])


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
    """Its run folder."""
    workdir = tmp_path_factory.mktemp("runs") / "llama"
    source = f"text:{folder.parent / 'text.txt'}"
    settings = dict(data__source=source, data__seq_len=16, log__tensorboard=False)
    settings |= dict(evaluate__max_batches=2, sample__max_new_tokens=8, steps=2)
    settings["optim__schedule__warmup_steps"] = 1
    assert run("--mode=import", "--from", folder, "--workdir", workdir, **settings) == 0
    return workdir


def parameters(workdir):
    """(model, parameters as numpy) of a run."""
    setup, step, params, _ = build.finished(config_of_run(workdir), workdir)
    return setup.model, step, jax.tree.map(np.asarray, params)


def test_the_run_has_the_parameters(folder, imported):
    model, step, params = parameters(imported)
    assert step == 0 and model.vocab_size == IDS
    config, whole, expected = hf.load_hf(folder, config_of_run(imported))
    assert whole.vocab_size == ROWS and config.model == config_of_run(imported).model
    np.testing.assert_array_equal(
        params["embed"]["embedding"][:IDS], expected["embed"]["embedding"][:IDS]
    )
    families.assert_trees_close(params["layers"], expected["layers"], rtol=0)
    tokens_BT = np.random.default_rng(0).integers(0, IDS, (2, 16)).astype(np.int32)
    logits, theirs = (
        families.jit(m.apply)({"params": p}, tokens_BT)
        for m, p in ((model, params), (whole, expected))
    )
    np.testing.assert_allclose(logits, theirs[..., :IDS], atol=1e-5)


def test_the_run_is_used_like_any_other(imported, capsys, tmp_path):
    """Evaluated, sampled from, trained on in its folder, and in another with routed blocks."""
    loss = use.evaluate(config_of_run(imported), imported)["eval/loss"]
    assert 3 < loss < 40
    assert run("--mode=sample", "--workdir", imported, "--prompt", "The quick") == 0
    assert "The quick" in capsys.readouterr().out
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(imported, copy)
    assert run("--workdir", copy, sample__every=0) == 0
    last = runfolder_rows(copy)[-1]
    assert last["step"] == 2 and last["eval/loss"] < loss
    routed = {"model.depth_routing.kind": "mod", "init.missing": ".*/router"}
    routed |= {"init.run": imported, "sample.every": 0}
    assert run("--config", imported, "--workdir", other, **routed) == 0
    assert json.loads((other / "run.json").read_text())["origin"]["run"] == str(imported)
    assert (other / "tokenizer.json").read_text() == (imported / "tokenizer.json").read_text()


def runfolder_rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_a_config_may_say_how_it_trains(folder, tmp_path):
    """Depth routing and training are the config's, the model is the folder's."""
    workdir = tmp_path / "run"
    options = {"model.context": 12, "data.seq_len": 12, "model.scan_layers": True}
    options |= {"model.depth_routing.every": 1, "model.depth_routing.causal": "predictor"}
    options["model.depth_routing.skip_mlp"] = 8
    arguments = ("--mode=import", "--config", "mod:smoke", "--from", folder, "--workdir", workdir)
    assert run(*arguments, **options) == 0
    model, _, params = parameters(workdir)
    assert model.config.depth_routing.kind == "mod" and model.config.width == 32
    assert model.config.context == 12 and config_of_run(workdir).steps == 30
    assert params["layers"]["units"]["block_0"]["router"].shape == (2, 32)
    assert {"predictor", "skip_mlp"} <= params["layers"]["units"]["block_0"].keys()
    assert params["layers"]["units"]["block_0"]["attention"]["key"]["kernel"].shape == (2, 32, 16)


# ---- tokenizers --------------------------------------------------------------------------------


def library_tokenizer(kind):
    """A tokenizer of the library as Llama 3, Llama 2 or Qwen have it."""
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
        if kind == "normalised":
            inner.normalizer, first, ends = library.normalizers.NFC(), "", ["<|endoftext|>"]
    inner.add_special_tokens(ends)
    if first:
        inner.post_processor = library.processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, inner.token_to_id(first))]
        )
    return inner, first, ends[-1]


@pytest.mark.parametrize("kind", ["byte_level", "normalised", "sentencepiece"])
def test_tokenizers(kind, tmp_path):
    """The ids are the library's, the special tokens are known, and text comes back, also token by
    token and where a character is several."""
    inner, first, end = library_tokenizer(kind)
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.vocab_size == inner.get_vocab_size()
    assert ours.start == ((inner.token_to_id(first),) if first else ())
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
    def edit(folder):
        contents = json.loads((folder / name).read_text())
        for key, value in changes.items():
            contents.pop(key, None)
            if value is not None:
                contents[key] = value
        (folder / name).write_text(json.dumps(contents))

    return edit


def edit_arrays(change, shard=1):
    """Rewrites a shard after change(arrays)."""

    def edit(folder):
        path = folder / list(SHARDS)[shard]
        arrays = load_file(path)
        change(arrays)
        save_file(arrays, path)

    return edit


def edit_header(change, shard=1):
    """Rewrites the header of a shard and leaves its numbers."""

    def edit(folder):
        path = folder / list(SHARDS)[shard]
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return edit


def edit_bytes(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def add_to_index(name, shard):
    def edit(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][name] = shard
        path.write_text(json.dumps(index))

    return edit


def cut_tokenizer(ids):
    return lambda folder: bpe.train_bpe([TEXT] if ids < 280 else [TEXT, *map(chr, range(999))],
                                        ids).save(folder / "tokenizer.json")  # fmt: skip


LAST, QUERY = list(SHARDS)[1], "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
BAD = {
    "missing shard": (lambda f: (f / LAST).unlink(), rf"{LAST} does not exist; efx reads weights"),
    "no weights": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        r"model\.safetensors does not exist",
    ),
    "index without map": (
        edit_json("model.safetensors.index.json", weight_map=None),
        r"index\.json: weight_map is not a table",
    ),
    "index out of the folder": (
        add_to_index("x", "../../secret.safetensors"),
        r"index\.json: weight_map lists x in '\.\./\.\./secret\.safetensors', not a file name",
    ),
    "index of what is not there": (add_to_index("x", LAST), rf"{LAST} lacks x, .*index"),
    "truncated": (edit_bytes(LAST, lambda data: data[:-100]), rf"{LAST} cannot be read"),
    "no header": (edit_bytes(LAST, lambda data: data[:5]), rf"{LAST} cannot be read"),
    "a header of exabytes": (
        edit_bytes(LAST, lambda data: struct.pack("<Q", 2**62) + data[8:]),
        rf"{LAST} cannot be read",
    ),
    "a header that is no JSON": (
        edit_bytes(LAST, lambda data: data[:8] + b"[" * 64 + data[72:]),
        rf"{LAST} cannot be read",
    ),
    "an array of exabytes": (
        edit_header(lambda h: h[QUERY].update(shape=[2**31, 2**31])),
        rf"{LAST} cannot be read",
    ),
    "more numbers than there are": (
        edit_header(lambda h: h[QUERY].update(shape=[2**33, 2**33])),
        rf"{LAST} cannot be read",
    ),
    "an array beyond the file": (
        edit_header(lambda h: h[QUERY].update(data_offsets=[0, 2**50])),
        rf"{LAST} cannot be read",
    ),
    "integers": (
        edit_arrays(lambda a: a.update({UP: a[UP].astype(np.int16)})),
        rf"{LAST}: {UP} has type I16; efx reads F32, BF16, F16",
    ),
    "another shape": (
        edit_arrays(lambda a: a.update({QUERY: a[QUERY][:-1].copy()})),
        rf"{LAST}: layers\.1\.self_attn\.q_proj\.weight has shape \(31, 32\), .* needs \(32, 32\)",
    ),
    "in two files": (
        edit_arrays(lambda a: a.update({"model.norm.weight": np.ones(32, np.float32)})),
        rf"model\.norm\.weight is in both .*{LAST} and .*{list(SHARDS)[0]}",
    ),
    "another array": (
        edit_arrays(lambda a: a.update({"model.layers.1.mlp.router.weight": a[QUERY]})),
        r"llama has arrays without a counterpart in this model: layers\.1\.mlp\.router\.weight",
    ),
    "an architecture": (
        edit_json("config.json", model_type="mamba"),
        r"llama/config\.json: model_type='mamba': efx reads gpt2",
    ),
    "a key": (
        edit_json("config.json", attention_sinks=4),
        r"llama/config\.json: attention_sinks=4: efx does not support this setting of llama",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json does not exist"),
    "a list": (
        edit_bytes("config.json", lambda _: b"[1]"),
        r"config\.json: model_type=None: efx reads gpt2",
    ),
    "deep": (
        edit_bytes("config.json", lambda _: b"[" * 200_000),
        r"config\.json cannot be read",
    ),
    "ten thousand layers": (
        edit_json("config.json", num_hidden_layers=9999),
        r"config\.json describes a model of more than .* in 9999 layers, but the files have",
    ),
    "as wide as the sea": (
        edit_json("config.json", hidden_size=2**30),
        r"config\.json describes a model of more than",
    ),
    "another layer": (
        edit_json("config.json", num_hidden_layers=3),
        r"llama lacks layers\.2\.",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json"),
    "a tokenizer that is none": (
        edit_bytes("tokenizer.json", lambda _: b"{}"),
        r"tokenizer\.json is not a tokenizer",
    ),
    "a larger tokenizer": (
        cut_tokenizer(300),
        r"tokenizer\.json has 300 ids, but the embedding has 288 rows \(vocab_size",
    ),
    "a smaller tokenizer": (
        cut_tokenizer(260),
        r"tokenizer\.json has 260 ids for 288 rows of the embedding .* at most 5%",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_folders(folder, tmp_path, capsys, what):
    """One line that names file and key; nothing is made."""
    damage, words = BAD[what]
    copy = tmp_path / "llama"
    shutil.copytree(folder, copy)
    damage(copy)
    refused(copy, tmp_path, capsys, words)


def refused(folder, tmp_path, capsys, words, *arguments, **settings):
    settings = {"data.seq_len": 16, **settings}
    workdir = tmp_path / "run"
    flags = ("--mode=import", "--from", folder, "--workdir", workdir)
    assert run(*flags, *arguments, **settings) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert "Traceback" not in captured.err and captured.out == ""
    assert re.search(words, line), line
    assert not workdir.exists()


def test_a_full_disk_leaves_no_folder(folder, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise CheckpointError("checkpoint 0 could not be saved: the disk is full")

    monkeypatch.setattr(Checkpointer, "wait", full)
    refused(folder, tmp_path, capsys, "the disk is full")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"model.width": 64}, r"config\.model\.width=64: the model of --from has 32"),
        ({"model.attention.rope_theta": 5.0}, r"attention\.rope_theta=5\.0: the model of --from"),
        ({"model.context": 64}, r"config\.model\.context=64: the model of --from has 32"),
        ({"data.seq_len": 64}, r"config\.model\.context=32: must be at least .*seq_len=64"),
        ({"data.tokenizer": "bytes"}, r"config\.data\.tokenizer='bytes': the model of --from="),
        ({"adapter.kind": "lora"}, r"config\.adapter\.kind='lora': import the model without"),
        (
            {"model.dropout.kind": "elementwise"},
            r"dropout\.kind='elementwise': a Hugging Face checkpoint has no",
        ),
    ],
)
def test_settings_that_contradict_the_folder(folder, tmp_path, capsys, settings, words):
    refused(folder, tmp_path, capsys, words, **settings)


def test_other_refusals(folder, imported, tmp_path, capsys):
    refused(tmp_path / "nothing", tmp_path, capsys, r"--from=.*nothing: there is no such folder")
    words = r"config\.model\.family='latent': --mode=import writes a decoder"
    refused(folder, tmp_path, capsys, words, "--config", "latent:smoke")
    before = sorted(path.name for path in imported.iterdir())
    assert run("--mode=import", "--from", folder, "--workdir", imported) == 2
    assert "has a run; use a new folder" in capsys.readouterr().err
    assert run("--mode=import", "--workdir", tmp_path / "run") == 2
    assert "--from is missing" in capsys.readouterr().err
    assert run("--workdir", imported, "--from", folder) == 2
    assert "--from goes with --mode=import or convert, not train" in capsys.readouterr().err
    assert sorted(path.name for path in imported.iterdir()) == before
    assert runfolder.recorded_config(imported)["model"]["width"] == 32
