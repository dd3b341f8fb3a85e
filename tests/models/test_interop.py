"""Architectures of transformers: equal logits, the same config and arrays back, refusals."""

import json

import families
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import save_file

from efx import models
from efx.configs import common
from efx.interop.architectures import (
    ARCHITECTURES,
    config_of,
    params_from_hf,
    params_to_hf,
    settings_of,
)
from efx.interop.import_run import Tensors, read_config

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
NO_ROPE = dict(num_hidden_layers=4, no_rope_layer_interval=2, num_key_value_heads=2)
# {name: (model_type, settings)}; together every setting that efx represents.
VARIANTS = {
    "gpt2": ("gpt2", {}),
    "gpt2_exact_gelu": (
        "gpt2",
        dict(activation_function="gelu", n_inner=48, tie_word_embeddings=False),
    ),
    "llama2": ("llama", dict(mlp_bias=True, num_key_value_heads=1, rope_parameters=LINEAR)),
    "llama3": (
        "llama",
        GROUPED_TIED | dict(head_dim=6, attention_bias=True, rope_parameters=LLAMA3),
    ),
    "qwen2": ("qwen2", GROUPED_TIED | dict(rms_norm_eps=1e-3)),
    "qwen3": ("qwen3", GROUPED_TIED | dict(head_dim=6, rope_parameters=LLAMA3)),
    "smollm3": ("smollm3", NO_ROPE | dict(rope_parameters=LLAMA3)),
    "neox": ("gpt_neox", dict(rope_parameters=QUARTER)),
    "neox_serial": (
        "gpt_neox",
        dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True),
    ),
    "olmo2": ("olmo2", GROUPED_TIED | dict(attention_bias=True)),
}


@pytest.fixture(scope="module")
def transformers():
    """transformers and torch, or a skip."""
    pytest.importorskip("torch", reason="torch is not installed (extra interop)")
    return pytest.importorskip(
        "transformers", reason="transformers is not installed (extra interop)"
    )


def torch_model(transformers, model_type, settings):
    """A random model of transformers in which no vector is all ones or zeros."""
    import torch

    torch.manual_seed(0)
    sizes = GPT2 if model_type == "gpt2" else LLAMA
    config = transformers.AutoConfig.for_model(model_type, **sizes | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def torch_logits(model, tokens_BT):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens_BT)).logits.numpy()


def build(folder, **changes):
    """(model, parameters) of a Hugging Face folder."""
    hf, config = read_config(folder), common.base()
    config.update_from_flattened_dict(settings_of(hf))
    config.update_from_flattened_dict({f"model.{key}": value for key, value in changes.items()})
    sizes = dict(vocab_size=hf["vocab_size"], context=32, dtype="float32")
    model = models.build(config.model, **sizes)
    return model, params_from_hf(Tensors(folder), model, hf["model_type"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_and_the_model_comes_back(variant, tmp_path, transformers):
    assert {model_type for model_type, _ in VARIANTS.values()} == ARCHITECTURES.keys()
    theirs = torch_model(transformers, *VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    tokens_BT = np.random.default_rng(0).integers(0, V, (2, T))
    expected = torch_logits(theirs, tokens_BT)
    model, params = build(tmp_path, vocab_multiple=16)
    assert params["embed"]["embedding"].shape == (48, 32) and expected.std() > 0.3
    logits = families.jit(model.apply)({"params": params}, jnp.asarray(tokens_BT, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=1e-4)

    config = config_of(model)
    arrays = params_to_hf(params, model, config["model_type"])
    save_file(
        {k: np.ascontiguousarray(x) for k, x in arrays.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(written) is type(theirs)
    np.testing.assert_array_equal(torch_logits(written, tokens_BT), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.softcap": 3.0},
        {"attention.window": 7},
        {"attention.qk_norm": "head", "block_kind": "parallel"},
        {"attention.rope_fraction": 0.5},
        {"positions": "none"},
        {"preset": "gpt2", "attention.head_dim": 6},
        {"mlp.kind": "moe"},
        {"depth_routing.kind": "mod"},
        {"dropout.kind": "elementwise"},
        {"dense_former.on": True},
        {"soft_experts.num": 2},
        {"mup.base_width": 8},
        {"adapter.kind": "lora"},
    ],
    ids=str,
)
def test_a_model_is_not_written_as_an_architecture_that_lacks_a_setting(changes):
    assert config_of(families.make({})) is not None
    assert config_of(families.make(changes)) is None


# ---- config.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type, changes, name",
    [
        ("gemma2", {}, "model_type='gemma2'"),
        ("efx", {}, "model_type='efx'"),
        ("gpt2", {"alibi": True}, "alibi=True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ("llama", {"rope_scaling": LINEAR | {"beta_fast": 32}}, "beta_fast=32"),
        ("llama", {"rope_parameters": QUARTER}, "partial_rotary_factor=0.25"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "layer_types="),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1], "num_hidden_layers": 4}, "no_rope_layers="),
    ],
)
def test_configs_that_efx_cannot_represent_are_refused(
    model_type, changes, name, tmp_path, transformers
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | changes))
    refused(lambda: settings_of(read_config(tmp_path)), "config.json", name)


# Settings as published, by versions of transformers before 5.
PUBLISHED = {
    "Llama-3.2-1B": (
        """{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "rope_interleaved": false, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "rope_type": "llama3", "original_max_position_embeddings": 8192}}""",
        {
            "attention.rope_theta": 5e5,
            "attention.rope_scaling.factor": 32.0,
            "attention.rope_scaling.original_context": 8192,
        },
    ),
    "SmolLM3-3B": (
        """{"model_type": "smollm3", "rope_scaling": null, "rope_theta": 5e6,
        "max_window_layers": 28, "no_rope_layer_interval": 4, "sliding_window": null}""",
        {"attention.no_rope_every": 4, "attention.rope_theta": 5e6, "attention.window": 0},
    ),
    "pythia-70m": (
        """{"model_type": "gpt_neox", "rotary_emb_base": 1000, "rotary_pct": 0.5}""",
        {
            "attention.rope_fraction": 0.5,
            "attention.rope_theta": 1000.0,
            "block_kind": "parallel",
        },
    ),
    "distilgpt2": (
        """{"model_type": "gpt2", "n_ctx": 1024, "n_layer": 6, "_num_labels": 1, "n_special": 0,
        "id2label": {"0": "LABEL_0"}, "predict_special_tokens": true, "use_bfloat16": false}""",
        {"depth": 6, "positions": "learned", "mlp.hidden": 3072},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name, tmp_path, transformers):
    text, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(text)
    settings = settings_of(read_config(tmp_path))
    assert {key: settings[f"model.{key}"] for key in expected} == expected


# ---- arrays --------------------------------------------------------------------------------------


def test_published_names_of_gpt2_are_read():
    """Without prefix, with buffers of the mask and a copy of the tied embedding."""
    gpt2 = models.changed(families.build("gpt2"), vocab_multiple=1)
    params = families.random_params(gpt2)
    state = params_to_hf(params, gpt2, "gpt2")
    bare = {name.removeprefix("transformer."): array for name, array in state.items()}
    bare |= {"h.0.attn.bias": np.tri(32)[None, None], "lm_head.weight": bare["wte.weight"]}
    read = params_from_hf(bare, gpt2, "gpt2")
    families.assert_trees_close(read, params, rtol=0, atol=0)


def test_arrays_that_do_not_fit_are_refused_by_name():
    model = families.make({"attention.num_kv_heads": 2, "vocab_multiple": 1})
    state = params_to_hf(families.random_params(model), model, "llama")
    key, head = "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"
    tied = models.changed(model, tied=True)
    for arrays, model_of, name in (
        (state | {key: state[key][:-1]}, model, key),
        ({name: array for name, array in state.items() if name != key}, model, "k_proj"),
        (state | {key.replace("1", "2"): state[key]}, model, "layers.2"),
        (state | {head: state[head] + 1}, tied, head),
    ):
        refused(lambda a=arrays, m=model_of: params_from_hf(a, m, "llama"), name)
