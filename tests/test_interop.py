"""Hugging Face parity: same weights, same logits; checkpoints in and out."""

import json

import jax
import numpy as np
import pytest

from configs import common
from efx import models
from efx.errors import UsageError
from efx.interop import hf

torch = pytest.importorskip("torch", reason="the extra `interop` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `interop` is not installed")

VOCAB, LENGTH = 61, 24


def gpt2(**changes):
    """A random GPT2LMHeadModel whose biases and norms are not at their trivial values."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=4, **changes
    )
    return _shaken(transformers.GPT2LMHeadModel(config))


def llama(**changes):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        **changes,
    )
    return _shaken(transformers.LlamaForCausalLM(config))


def _shaken(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


CASES = {
    "gpt2": lambda: gpt2(),
    "gpt2_exact_gelu": lambda: gpt2(activation_function="gelu"),
    "llama": lambda: llama(),
    "llama_gqa": lambda: llama(num_key_value_heads=2),
    "llama_tied_bias": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-6
    ),
}


def tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)


def theirs(model):
    with torch.no_grad():
        return model(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal(name, scan, tmp_path):
    """Loaded from a folder that transformers wrote, in float32 to 1e-4."""
    reference = CASES[name]()
    reference.save_pretrained(tmp_path)
    config = common.base()
    config.model.scan_layers = scan
    _, model, params = hf.load_hf(tmp_path, config)
    logits = model.apply({"params": params}, tokens())
    expected = theirs(reference)
    assert expected.std() > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_efx_writes(name, tmp_path):
    reference = CASES[name]()
    reference.save_pretrained(tmp_path / "in")
    _, model, params = hf.load_hf(tmp_path / "in", common.base())
    hf.save_hf(tmp_path / "out", params, model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(reference)
    np.testing.assert_allclose(theirs(again), theirs(reference), atol=1e-5)
    with pytest.raises(UsageError, match="is not empty"):
        hf.save_hf(tmp_path / "out", params, model)


def test_a_dense_checkpoint_becomes_mixture_of_depths(tmp_path):
    """Same parameters plus fresh routers; at capacity 1 and gate 1 the same logits exactly."""
    reference = llama()
    reference.save_pretrained(tmp_path)
    config = common.base()
    common.apply(
        config,
        {
            "model.depth_routing.kind": "mod",
            "model.depth_routing.capacity": 1.0,
            "model.depth_routing.gate": "one",
        },
    )
    config, model, params = hf.load_hf(tmp_path, config)
    assert "router" in params["layers"]["block_1"] and "router" not in params["layers"]["block_0"]
    logits = model.clone(selection="train").apply({"params": params}, tokens())
    np.testing.assert_allclose(logits, theirs(reference), atol=1e-4)
    with pytest.raises(UsageError, match="no place for routers"):
        hf.save_hf(tmp_path / "out", params, model)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"model_type": "mamba"}, "mamba"),
        ({"num_hidden_layers": 4}, "layers.3"),
        ({"hidden_size": 64}, "shape|head_dim|does not"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, change, words):
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=words) as error:
        hf.load_hf(tmp_path, common.base())
    assert "\n" not in str(error.value)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(UsageError, match="config.json"):
        hf.load_hf(tmp_path, common.base())


def test_padding_of_the_vocabulary_is_not_exported(tmp_path):
    config = common.base()
    common.apply(config, {"model.vocab_multiple": 16, "model.width": 32, "model.depth": 1})
    model = models.build(config.model, vocab_size=VOCAB, context=32, dtype="float32")
    from flax import linen as nn

    params = nn.unbox(models.init(model, jax.random.key(0)))["params"]
    assert params["embed"]["embedding"].shape[0] == 64
    hf.save_hf(tmp_path, params, model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    logits = model.apply({"params": params}, tokens())
    np.testing.assert_allclose(logits, theirs(again), atol=1e-4)
