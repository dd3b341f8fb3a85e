"""--mode=export: folders that transformers loads and that compute the same."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Literal

import families
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from run_files import largest_file
from safetensors.numpy import load_file
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

from efx.config import schema
from efx.data import bpe
from efx.data.tokenizers import ByteTokenizer, CharTokenizer
from efx.interop import hf_export, import_run
from efx.models.decoder import DecoderConfig
from efx.routing.config import DepthRoutingConfig

pytestmark = pytest.mark.usefixtures("one_device")

NORMED = dict(kind="mod", every=1, capacity=0.5, slack=1.0, router_norm="rms")
OWN = {
    "predictor": dict(depth_routing=dict(causal_decision="predictor", **NORMED)),
    "mod_gate_one": dict(depth_routing=dict(causal_decision="aux_loss", gate="one", **NORMED)),
    "all_keys": dict(
        attention=dict(num_kv_heads=2, window=9),
        depth_routing=dict(causal_decision="threshold", kv_for_skipped=True, **NORMED),
    ),
    "post_norm": dict(
        block_kind="post_norm",
        use_bias=True,
        attention=dict(num_kv_heads=2, window=9, qk_norm="width"),
        depth_routing=dict(causal_decision="threshold", **NORMED),
        mlp=families.experts(),
    ),
}
DEFAULT = ("neox", "mod_parallel", "moe", "mode_staged", "predictor", "post_norm", "all_keys")
SLOW = {"mod_options", "mod_threshold", "mod_capacity_list", "moe_switch", "mode_integrated", "mup"}


@pytest.fixture(scope="module")
def checks(transformers, tmp_path_factory):  # noqa: F811
    """The functions of load_exports.py."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        import load_exports

        yield load_exports


@pytest.fixture
def load(checks):
    return checks.load


def logits_of(model, tokens_BT):
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens_BT)).long()).logits.numpy()


def write(path, name):
    """Export a row of FAMILIES or OWN with tokens and efx's logits."""
    own = name in OWN
    model = families.make(families.dotted(OWN[name]) if own else families.FAMILIES[name].changes)
    variables = {"params": families.random_params(model), **families.random_state(model)}
    tokens_BT = families.tokens()
    logits_BTV = np.asarray(families.jit(model.apply)(variables, tokens_BT))
    config = hf_export.write_model(path, model, variables)
    np.save(path / "tokens.npy", np.asarray(tokens_BT, np.int64))
    np.save(path / "logits.npy", logits_BTV)
    assert logits_BTV.std() > 0.3
    return config


@pytest.mark.parametrize("name", families.rows([*DEFAULT, *sorted(SLOW)], SLOW))
def test_an_export_computes_the_logits_of_efx(name, tmp_path, checks):
    config = write(tmp_path / "new", name)
    is_dense = config["model_type"] != "efx"
    assert is_dense == (name == "neox")
    checks.check_logits(tmp_path / "new")


CHECKS = ("generation", "outputs", "packed_rows", "training", "idle_blocks")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["post_norm", "mod_parallel", "all_keys"])
def test_an_export_generates_and_trains(check, name, tmp_path, checks):
    write(tmp_path / "new", name)
    getattr(checks, f"check_{check}")(tmp_path / "new")


@pytest.mark.parametrize("name", ["predictor", "mod_gate_one"])
def test_decisions_that_learn_nothing_have_gradients(name, tmp_path, checks):
    """A predictor, and a router whose gate is 1."""
    write(tmp_path / "new", name)
    checks.check_idle_blocks(tmp_path / "new")


def test_a_routed_block_caches_the_tokens_that_it_computes(tmp_path, checks):
    write(tmp_path / "new", "mod")
    model, computed = checks.load(tmp_path / "new"), 0
    tokens_BT, _ = checks.tokens_and_logits(tmp_path / "new")

    def count(_, inputs, out):
        nonlocal computed
        computed = computed + (inputs[0] != out).any(dim=-1).sum(dim=1)

    model.model.layers[1].register_forward_hook(count)
    cache = None
    for chunk_BT in tokens_BT.split([9, 1, 22], dim=1):
        cache = model(chunk_BT, past_key_values=cache, use_cache=True).past_key_values
    cached_B = (cache.entries[1][0] >= 0).sum(dim=1)
    assert computed.tolist() == cached_B.tolist() and 0 < cached_B.sum() < 0.8 * tokens_BT.numel()
    assert cache.entries[1][1].shape[1] == cached_B.max() < cache.entries[0][1].shape[1]


# Arguments of pip. The oldest supported transformers has the packages that it does not share with
# the installed one, the newest has all that it needs.
OLDEST = (
    "--no-deps",
    "transformers==" + re.search(r">=([\d.]+)", hf_export.TRANSFORMERS)[1],
    "datasets==4.4.1",
    "huggingface_hub==0.36.2",
    "tokenizers==0.22.2",
    *("requests", "urllib3", "certifi", "idna", "charset-normalizer"),
)
VERSIONS = {"oldest": OLDEST, "newest": (hf_export.TRANSFORMERS,)}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_exports_pass_the_checks_with_other_transformers(version, tmp_path):
    packages, script = tmp_path / "packages", pathlib.Path(__file__).with_name("load_exports.py")
    command = [sys.executable, "-m", "pip", "install", "--target", packages, *VERSIONS[version]]
    done = subprocess.run(command, capture_output=True, text=True)
    if "(from versions: none)" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    write(tmp_path / "new", "post_norm")
    variables = {"HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = str(packages)
    command = [sys.executable, "-P", script, tmp_path / "new"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- runs ----------------------------------------------------------------------------------------


def test_a_dense_run_becomes_a_model_of_transformers(
    imported,  # noqa: F811
    folder,  # noqa: F811
    tmp_path,
    load,
    monkeypatch,
):
    """Imported and exported, its arrays are those of the first folder; in bfloat16 shards, too."""
    import torch

    path, small = tmp_path / "new/llama", tmp_path / "small"
    assert run("--mode=export", "--workdir", imported, "--to", path) == 0
    theirs = load(path)
    assert type(theirs).__module__.startswith("transformers.models.llama")
    first, written = import_run.Tensors(folder), load_file(path / "model.safetensors")
    assert written.keys() == first.keys()
    for name, array in written.items():
        expected = np.asarray(first[name]).astype(np.float32)
        np.testing.assert_array_equal(array, expected[: len(array)])  # without unused rows
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1

    monkeypatch.setattr(hf_export, "SHARD_SIZE", 10_000)
    assert run("--mode=export", "--workdir", imported, "--to", small, "--dtype=bfloat16") == 0
    shards = [file.stat().st_size for file in small.glob("*.safetensors")]
    assert len(shards) > 3 and sum(shards) < 0.6 * (path / "model.safetensors").stat().st_size
    small = load(small, dtype="auto")
    for name, array in theirs.state_dict().items():
        assert torch.equal(array.to(torch.bfloat16), small.state_dict()[name]), name


def test_a_routed_run_becomes_a_model_with_code(routed, tmp_path, load, transformers):  # noqa: F811
    """Also from scanned layers and a padded vocabulary; transformers saves it again."""
    path = tmp_path / "mod"
    assert run("--mode=export", "--workdir", routed, "--to", path, "--step=0") == 0
    theirs, (model, variables) = load(path), read_run(routed)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, IDS, (2, 32)), jnp.int32)
    expected = families.jit(model.apply)(variables, tokens_BT)
    np.testing.assert_allclose(logits_of(theirs, tokens_BT), expected, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    inputs = tokenizer("The quick", return_tensors="pt")
    assert theirs.generate(**inputs, max_new_tokens=4).shape == (1, inputs.input_ids.shape[1] + 4)
    theirs.save_pretrained(tmp_path / "again")
    np.testing.assert_allclose(logits_of(load(tmp_path / "again"), tokens_BT), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_exported_tokenizers_have_the_ids_of_efx(kind, tmp_path, transformers):  # noqa: F811
    text = "The  quick\n brown fox jumps, the <|endoftext|> dog "
    makers = {
        "bytes": ByteTokenizer,
        "chars": lambda: CharTokenizer(text),
        "bpe": lambda: bpe.train_bpe([TEXT], 270),
    }
    ours = makers[kind]()
    for name, contents in hf_export.tokenizer_files(ours, 32).items():
        (tmp_path / name).write_text(contents)
    for model_type in ("gpt2", "llama", "smollm3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ids = theirs(text).input_ids
        assert ids == ours.encode(text).tolist() and theirs.decode(ids) == text, model_type
        assert theirs.eos_token_id == ours.eot and len(theirs) == ours.vocab_size
        if kind == "chars":
            with pytest.raises(Exception, match="character outside of the vocabulary"):
                theirs("the cat")


def test_a_qwen2_with_another_tokenizer_is_not_a_qwen2_of_transformers(tmp_path):
    model = families.make({"attention.bias": "qkv"})
    variables, tokenizer = {"params": families.random_params(model)}, bpe.train_bpe([TEXT], 270)
    written = hf_export.write_model(tmp_path / "other", model, variables, tokenizer)
    assert written["model_type"] == "efx"
    assert hf_export.write_model(tmp_path / "x", model, variables)["model_type"] == "qwen2"


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, setting",
    [
        ("latent", "family='latent'"),
        ("recursion", "depth_routing.kind='recursion'"),
        ("mod_fixed", "depth_routing.score='position'"),
        ("mod_context", "depth_routing.skip_mlp=16"),
        ("moe_expert_choice", "mlp.moe.router='expert_choice'"),
        ("dropout_attention", "dropout.kind='attention'"),
        ("soft", "soft_experts.num=4"),
        ("averages", "dense_former.on=True"),
        ("llama_options", "attention.softcap=5.0"),
    ],
)
def test_models_that_cannot_be_exported_are_refused(name, setting):
    changes = families.FAMILIES[name].changes
    config = families.make(changes).config
    if name == "averages":
        config = families.make({"dense_former.on": True}).config
    refused(lambda: hf_export.check_exportable(config, "none"), f"config.model.{setting}")


def test_settings_that_the_exporter_does_not_know_are_refused():
    """A new field with another value than its default, and a new value of a known field."""

    @schema.block("config.model.depth_routing")
    class NewRouting(DepthRoutingConfig):
        gate: Literal["sigmoid", "softplus"] = "sigmoid"
        temperature: float = 1.0

    @schema.block("config.model")
    class NewConfig(DecoderConfig):
        depth_routing: NewRouting = NewRouting()
        sink: bool = False

    def check(sink=False, **routing):
        changed = dict(depth_routing=NewRouting(kind="mod", **routing), sink=sink)
        hf_export.check_exportable(NewConfig(**changed).resolved(), "none")

    check()
    refused(lambda: check(temperature=0.5), "config.model.depth_routing.temperature=0.5", "1.0")
    refused(lambda: check(gate="softplus"), "config.model.depth_routing.gate='softplus'")
    refused(lambda: check(sink=True), "config.model.sink=True")


def test_bad_commands_write_nothing(routed, tmp_path, capsys):  # noqa: F811
    full, new = tmp_path / "full", tmp_path / "x"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    for arguments, name in (
        ([], "--to"),
        (["--to", full], str(full)),
        (["--to", "gs://a/b"], "--to=gs://a/b"),
        (["--to", new, "--dtype=float8"], "--dtype=float8"),
        (["--to", new, "--config", "latent:smoke"], "config.model.family='latent'"),
        (["--to", new, "--config.adapter.kind=lora"], "config.adapter.kind='lora'"),
    ):
        assert run("--mode=export", "--workdir", routed, *arguments) == 2, arguments
        assert name in error_line(capsys)
    model = families.build("mod")
    variables = {"params": families.params_of("mod")}
    with largest_file(10_000):
        refused(lambda: hf_export.write_model(new, model, variables), str(new))
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]
