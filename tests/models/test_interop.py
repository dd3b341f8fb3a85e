"""Hugging Face checkpoints: the logits of transformers, the same arrays out and in again."""

import json

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx import models
from efx.configs import common
from efx.interop import hf, hf_config

V, T = 45, 24
COMMON = dict(vocab_size=V, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
GPT2 = COMMON | dict(n_positions=32, n_embd=32, n_layer=2, n_head=4)
LLAMA = COMMON | dict(
    max_position_embeddings=32,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=50.0,
    factor=4.0,
    low_freq_factor=0.5,
    high_freq_factor=2.0,
    original_max_position_embeddings=16,
)
LINEAR = dict(rope_type="linear", rope_theta=50.0, factor=3.0)
QUARTER = dict(rope_type="default", rope_theta=50.0, partial_rotary_factor=0.25)
GROUPED_TIED = dict(num_key_value_heads=2, tie_word_embeddings=True)
# (model_type, settings); together every setting that is not the usual one of an architecture.
VARIANTS = {
    "gpt2": ("gpt2", {}),
    "gpt2_exact_gelu": (
        "gpt2",
        dict(activation_function="gelu", n_inner=48, tie_word_embeddings=False),
    ),
    "llama3": (
        "llama",
        GROUPED_TIED
        | dict(head_dim=6, attention_bias=True, rms_norm_eps=1e-3, rope_parameters=LLAMA3),
    ),
    "llama_linear": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1, rope_parameters=LINEAR),
    ),
    "qwen2": ("qwen2", GROUPED_TIED | dict(rms_norm_eps=1e-3)),
    "qwen2_window": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=0, num_key_value_heads=1),
    ),
    "qwen3": (
        "qwen3",
        GROUPED_TIED | dict(attention_bias=True, head_dim=6, rope_parameters=LLAMA3),
    ),
    "smollm3": (
        "smollm3",
        dict(num_hidden_layers=4, no_rope_layer_interval=2, num_key_value_heads=2)
        | dict(mlp_bias=True, attention_bias=False, rope_parameters=LLAMA3),
    ),
    "neox": ("gpt_neox", dict(rope_parameters=QUARTER)),
    "neox_serial": (
        "gpt_neox",
        dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)
        | dict(rope_parameters=QUARTER),
    ),
    "olmo2": ("olmo2", GROUPED_TIED | dict(attention_bias=True, rope_parameters=LLAMA3)),
}


@pytest.fixture(scope="module")
def transformers():
    """transformers and torch, or a skip; neither ever downloads anything here."""
    pytest.importorskip("torch", reason="torch is not installed (extra interop)")
    return pytest.importorskip(
        "transformers", reason="transformers is not installed (extra interop)"
    )


def torch_model(transformers, variant):
    """A random model of transformers in which no vector is all ones or zeros."""
    import torch

    kind, options = VARIANTS[variant]
    torch.manual_seed(0)
    sizes = GPT2 if kind == "gpt2" else LLAMA
    config = transformers.AutoConfig.for_model(kind, **sizes | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens():
    return np.random.default_rng(0).integers(0, V, (2, T))


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens())).logits.numpy()


def base(**changes):
    return common.apply(common.base(), {f"model.{key}": value for key, value in changes.items()})


def logits(model, params):
    return families.jit(model.apply)({"params": params}, jnp.asarray(tokens(), jnp.int32))


# ---- against transformers ----------------------------------------------------------------------


SLOW = ("gpt2_exact_gelu", "qwen2_window", "neox_serial")


@pytest.mark.parametrize("variant", families.rows(VARIANTS, SLOW))
def test_logits_and_arrays_are_those_of_transformers(variant, tmp_path, transformers):
    """A folder that transformers saved is read, into a padded vocabulary and scanned layers; what
    efx writes of it is the same model again."""
    torch_side = torch_model(transformers, variant)
    torch_side.save_pretrained(tmp_path / "theirs")
    given = base(scan_layers=True, vocab_multiple=16)
    _, model, params = hf.load_hf(tmp_path / "theirs", given)
    assert given.model.width == 128  # the given config is not changed
    assert params["embed"]["embedding"].shape == (48, 32) and "units" in params["layers"]
    expected = torch_logits(torch_side)
    assert expected.std() > 0.3
    np.testing.assert_allclose(logits(model, params), expected, atol=1e-4)

    hf.save_hf(tmp_path / "ours", params, model)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(written) is type(torch_side)
    arrays = torch_side.state_dict()
    assert written.state_dict().keys() == arrays.keys()
    for name, array in written.state_dict().items():
        np.testing.assert_array_equal(array.numpy(), arrays[name].numpy(), name)
    np.testing.assert_array_equal(torch_logits(written), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "gpt2", "use_bias": False},
        {"attention.window": 7, "attention.head_dim": 6, "attention.no_rope_every": 2},
    ],
)
def test_models_of_efx_load_in_transformers(changes, transformers, tmp_path):
    """A GPT-2 without biases gets biases of zero; a SmolLM3 may have a window."""
    model = families.make({"vocab_multiple": 16, **changes})
    params = families.random_params(model)
    hf.save_hf(tmp_path / "new", params, model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert loaded.config.vocab_size == V
    np.testing.assert_allclose(logits(model, params), torch_logits(loaded), atol=1e-4)


# ---- without transformers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """(model, parameters, state dict, config.json) of a Llama of ours."""
    model = families.make({"attention.num_kv_heads": 2, "vocab_multiple": 1})
    params = families.random_params(model)
    return model, params, *hf.params_to_hf(params, model)


def test_published_gpt2_names_are_read():
    """These have no prefix, buffers of the attention mask and a copy of the tied table."""
    gpt2 = models.changed(families.build("gpt2"), vocab_multiple=1)
    params = families.random_params(gpt2)
    state, _ = hf.params_to_hf(params, gpt2)
    bare = {name.removeprefix("transformer."): array for name, array in state.items()}
    bare |= {
        "h.0.attn.bias": np.tri(32)[None, None],
        "h.1.attn.masked_bias": np.float32(-1e4),
        "lm_head.weight": bare["wte.weight"],
    }
    jax.tree.map(np.testing.assert_array_equal, hf.params_from_hf(bare, gpt2), params)


# ---- config.json -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, changes, name",
    [
        ("gemma2", {}, "model_type='gemma2'"),
        ("gpt2", {"alibi": True}, "alibi=True"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type='yarn'"),
        ("llama", {"rope_scaling": LINEAR | {"beta_fast": 32}}, "rope_scaling.beta_fast=32"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.factor"),
        ("llama", {"rope_parameters": QUARTER}, "rope_parameters.partial_rotary_factor=0.25"),
        ("gpt_neox", {"rotary_pct": 1.5}, "partial_rotary_factor=1.5"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "layer_types="),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1], "num_hidden_layers": 4}, "no_rope_layers="),
        ("olmo2", {"mlp_bias": False}, "mlp_bias=False"),
    ],
)
def test_configs_that_efx_cannot_reproduce_are_refused(kind, changes, name):
    refused(lambda: hf.config_from_hf({"model_type": kind, **changes}), "config.json", name)


def test_missing_keys_have_the_defaults_of_transformers(transformers):
    for kind in hf_config.ARCHITECTURES:
        full = transformers.AutoConfig.for_model(kind).to_dict()
        complete, empty = hf.config_from_hf(full), hf.config_from_hf({"model_type": kind})
        for settings in (complete, empty):
            head_dim = settings.pop("model.attention.head_dim")
            heads = settings["model.attention.num_heads"]
            settings["head_dim"] = head_dim or settings["model.width"] // heads
            settings["kv"] = settings.pop("model.attention.num_kv_heads") or heads
        assert complete == empty, kind


# Keys that most published files have, and the others of each, as versions of transformers before 5
# wrote them.
IN_MOST_FILES = {
    "architectures": ["AForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
}
PUBLISHED = {
    "distilgpt2": """
        "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 6, "n_ctx": 1024,
        "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "_num_labels": 1, "id2label": {"0": "LABEL_0"},
        "output_past": true, "predict_special_tokens": true, "n_special": 0,
        "use_bfloat16": false""",
    "Llama-3.2-1B": """
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "vocab_size": 128256, "tie_word_embeddings": true,
        "attention_bias": false, "mlp_bias": false, "hidden_act": "silu", "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192}""",
    "SmolLM3-3B": """
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "max_position_embeddings": 65536, "vocab_size": 128256, "attention_bias": false,
        "mlp_bias": false, "hidden_act": "silu", "max_window_layers": 28, "pretraining_tp": 2,
        "no_rope_layer_interval": 4, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 5e6,
        "sliding_window": null, "use_sliding_window": false""",
    "pythia-70m": """
        "model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048,
        "num_attention_heads": 8, "num_hidden_layers": 6, "max_position_embeddings": 2048,
        "vocab_size": 50304, "tie_word_embeddings": false, "hidden_act": "gelu",
        "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "use_parallel_residual": true""",
}
BY_LAYER = {
    "SmolLM3-3B": {"layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9},
}
SETTINGS = {
    "distilgpt2": {"width": 768, "depth": 6, "positions": "learned", "mlp.hidden": 3072},
    "Llama-3.2-1B": {
        "attention.rope_theta": 5e5,
        "attention.rope_scaling.kind": "llama3",
        "attention.rope_scaling.factor": 32.0,
        "attention.rope_scaling.original_context": 8192,
        "attention.rope_scaling.low_frequency_factor": 1.0,
        "attention.rope_scaling.high_frequency_factor": 4.0,
    },
    "SmolLM3-3B": {"attention.no_rope_every": 4, "tied": True},
    "pythia-70m": {"attention.rope_fraction": 0.25, "block_kind": "parallel", "use_bias": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    contents = json.loads(f"{{{PUBLISHED[name]}}}") | BY_LAYER.get(name, {})
    settings = hf.config_from_hf(IN_MOST_FILES | contents)
    expected = SETTINGS[name]
    assert {key: settings[f"model.{key}"] for key in expected} == expected
    common.apply(common.base(), settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.bias": "qkv", "attention.qk_norm": "head"},
        {"attention.softcap": 3.0},
        {"block_kind": "parallel"},
        {"positions": "none"},
        {"preset": "gpt2", "attention.head_dim": 6},
    ],
)
def test_a_model_is_not_written_as_an_architecture_without_its_settings(changes):
    name, value = list(changes.items())[-1]
    model = families.make(changes)
    refused(lambda: hf.params_to_hf({}, model), f"config.model.{name}={value!r}")


def test_arrays_that_do_not_fit_are_refused_by_name(llama):
    model, _, state, _ = llama
    key, head = "layers.1.self_attn.k_proj.weight", "lm_head.weight"
    array = state[f"model.{key}"]
    cut, extra = {f"model.{key}": array[:-1]}, {"model.layers.2.mlp.up_proj.weight": array}
    less = {name: array for name, array in state.items() if "layers.1" not in name}
    tied = models.changed(model, tied=True)
    routed = models.changed(model, **{"depth_routing.kind": "mod"})
    for arrays, model_of, name in (
        (state | cut, model, key),
        (state | {"model.embed_tokens.weight": np.ones((V + 1, 32))}, model, "embed_tokens.weight"),
        (less, model, "layers.1."),
        (state | extra, model, "layers.2.mlp.up_proj.weight"),
        (state | {head: state[head] + 1}, tied, head),
        (state, routed, "PRNG key"),
    ):
        refused(lambda a=arrays, m=model_of: hf.params_from_hf(a, m), name)
