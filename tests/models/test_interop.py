"""Hugging Face checkpoints: the same logits, out and in again, and everything refused by name."""

import dataclasses
import json

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import models
from efx.configs import common
from efx.errors import UsageError
from efx.interop import hf, hf_config
from efx.layers.stack import scan_params

V, T = 45, 24
GPT2 = dict(
    vocab_size=V,
    n_positions=32,
    n_embd=32,
    n_layer=2,
    n_head=4,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
)
LLAMA = dict(
    vocab_size=V,
    max_position_embeddings=32,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.2,
    bos_token_id=None,
    pad_token_id=None,
    eos_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=50.0,
    factor=4.0,
    low_freq_factor=0.5,
    high_freq_factor=2.0,
    original_max_position_embeddings=16,
)
QK_BIAS_TIED = dict(num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True)
NEOX = LLAMA | dict(
    rope_parameters=dict(rope_type="default", rope_theta=50.0, partial_rotary_factor=0.25),
)
# With every setting that is not the usual one of each architecture.
NEW_VARIANTS = {
    "llama3": ("llama", LLAMA | QK_BIAS_TIED | dict(rope_parameters=LLAMA3)),
    "llama_linear": (
        "llama",
        LLAMA
        | dict(
            mlp_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=50.0, factor=3.0)
        ),
    ),
    "qwen2": (
        "qwen2",
        LLAMA | dict(num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-3),
    ),
    "qwen2_window": (
        "qwen2",
        LLAMA
        | dict(use_sliding_window=True, sliding_window=7, max_window_layers=0)
        | dict(num_key_value_heads=1),
    ),
    "qwen3": ("qwen3", LLAMA | QK_BIAS_TIED | dict(head_dim=6, rope_parameters=LLAMA3)),
    "smollm3": (
        "smollm3",
        LLAMA
        | dict(num_hidden_layers=4, no_rope_layer_interval=2, mlp_bias=True, num_key_value_heads=2)
        | dict(attention_bias=False, rope_parameters=LLAMA3),
    ),
    "neox": ("gpt_neox", NEOX),
    "neox_serial": (
        "gpt_neox",
        NEOX | dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True),
    ),
    "olmo2": ("olmo2", LLAMA | QK_BIAS_TIED | dict(rope_parameters=LLAMA3)),
}
VARIANTS = {
    "gpt2": ("gpt2", GPT2),
    "gpt2_exact_gelu": (
        "gpt2",
        GPT2 | dict(activation_function="gelu", n_inner=48, tie_word_embeddings=False),
    ),
    "llama": ("llama", LLAMA),
    "llama_gqa_tied": (
        "llama",
        LLAMA
        | dict(
            num_key_value_heads=2,
            head_dim=6,
            tie_word_embeddings=True,
            rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
        ),
    ),
    "llama_bias": (
        "llama",
        LLAMA | dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    ),
}


def tokens(length=T):
    return np.random.default_rng(0).integers(0, V, (2, length))


@pytest.fixture(scope="module")
def transformers():
    """transformers and torch, or a skip; neither ever downloads anything here."""
    pytest.importorskip("torch", reason="torch is not installed (extra interop)")
    return pytest.importorskip(
        "transformers", reason="transformers is not installed (extra interop)"
    )


@pytest.fixture(scope="module")
def theirs(transformers):
    """variant -> a random Hugging Face model in which no vector is all ones or zeros."""
    import torch

    classes = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    }
    made = {}

    def make(variant):
        if variant not in made:
            kind, options = (VARIANTS | NEW_VARIANTS)[variant]
            torch.manual_seed(0)
            config, model = classes[kind]
            made[variant] = model(config(**options)).eval()
            with torch.no_grad():
                for parameter in made[variant].parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.3 * torch.randn_like(parameter))
        return made[variant]

    return make


def logits_of(their_model):
    import torch

    with torch.no_grad():
        return their_model(torch.tensor(tokens())).logits.numpy()


def base(**changes):
    return common.apply(common.base(), {f"model.{key}": value for key, value in changes.items()})


def ours(hf_config, **changes):
    """The efx model of a config.json."""
    config = common.apply(common.base(), hf.config_from_hf(hf_config))
    common.apply(config, {f"model.{key}": value for key, value in changes.items()})
    return models.build(
        config.model, vocab_size=hf_config["vocab_size"], context=8, dtype="float32"
    )


def apply(model, params):
    return families.jit(model.apply)({"params": params}, jnp.asarray(tokens(), jnp.int32))


# ---- against transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("variant", [*VARIANTS, *NEW_VARIANTS])
def test_logits_are_theirs(theirs, variant):
    """Of whole sequences, and of the new architectures token by token from the cache."""
    their_model = theirs(variant)
    model = ours(their_model.config.to_dict())
    params = hf.params_from_hf(their_model.state_dict(), model)
    expected = logits_of(their_model)
    assert expected.std() > 0.3
    np.testing.assert_allclose(apply(model, params), expected, atol=1e-4)
    if variant in NEW_VARIANTS:
        np.testing.assert_allclose(decoded(model, params), expected, atol=1e-4)


def decoded(model, params, chunk=6):
    """Logits by cached decoding, so many tokens at a time."""

    @families.jit
    def step(cache, tokens_BT, positions_BT):
        variables, options = {"params": params, "cache": cache}, dict(decode=True, cache_size=T)
        logits_BTV, new = model.apply(
            variables, tokens_BT, positions_BT, mutable=["cache"], **options
        )
        return logits_BTV, new["cache"]

    cache, result, tokens_BT = models.init_cache(model, 2, T), [], jnp.asarray(tokens(), jnp.int32)
    for start in range(0, T, chunk):
        positions_BT = jnp.tile(jnp.arange(start, start + chunk, dtype=jnp.int32), (2, 1))
        logits_BTV, cache = step(cache, tokens_BT[:, start : start + chunk], positions_BT)
        result.append(logits_BTV)
    return np.concatenate(result, axis=1)


@pytest.mark.parametrize("variant", [*VARIANTS, *NEW_VARIANTS])
def test_out_and_in_again(theirs, variant, tmp_path, transformers):
    """What transformers saves is read; what efx saves is what transformers saved."""
    their_model = theirs(variant)
    their_model.save_pretrained(tmp_path / "theirs")
    config, model, params = hf.load_hf(tmp_path / "theirs", base(scan_layers=True))
    assert config.model.width == 32 and model.config.scan_layers and "units" in params["layers"]
    hf.save_hf(tmp_path / "ours", params, model)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(their_model)
    state, expected = back.state_dict(), their_model.state_dict()
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert np.array_equal(state[name].numpy(), value.numpy()), name
    np.testing.assert_array_equal(logits_of(back), logits_of(their_model))
    again = hf.load_hf(tmp_path / "ours", base(scan_layers=True))[2]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_transformers_reads_a_model_of_ours(transformers, tmp_path):
    """A padded vocabulary is cut; a GPT-2 without biases gets biases of zero; what transformers
    itself gives none of its models is read as well."""
    windows = {"attention.window": 7, "attention.head_dim": 6, "attention.no_rope_every": 2}
    for i, changes in enumerate([{"preset": "gpt2", "use_bias": False}, windows]):
        model = families.make({"vocab_multiple": 16, **changes})
        params = families.random_params(model)
        hf.save_hf(tmp_path / str(i), params, model)
        their_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(i)).eval()
        assert their_model.config.vocab_size == V
        np.testing.assert_allclose(apply(model, params), logits_of(their_model), atol=1e-4)


def test_shards_and_half_precision(theirs, tmp_path):
    """Several files with an index; bfloat16 arrays, which numpy has not by itself."""
    import torch

    their_model = type(theirs("llama"))(theirs("llama").config).to(torch.bfloat16)
    their_model.load_state_dict(theirs("llama").state_dict())
    their_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _, model, params = hf.load_hf(tmp_path, base())
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    direct = hf.params_from_hf(their_model.state_dict(), model)
    jax.tree.map(np.testing.assert_array_equal, params, direct)


# ---- without transformers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """(model, parameters, state dict, config.json) of a Llama of ours."""
    model = families.make({"attention.num_kv_heads": 2, "vocab_multiple": 1})
    params = families.random_params(model)
    return model, params, *hf.params_to_hf(params, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "gpt2"},
        {"preset": "gpt2", "mlp.activation": "gelu_tanh", "tied": False},
        {"attention.num_kv_heads": 2},
        {"use_bias": True, "tied": True, "mlp.hidden": 40},
    ],
)
def test_round_trip(changes, tmp_path):
    model = families.make({**changes, "vocab_multiple": 16})
    params = families.random_params(model)
    params["embed"]["embedding"] = params["embed"]["embedding"].at[V:].set(0)
    if "head" in params:
        params["head"]["kernel"] = params["head"]["kernel"].at[:, V:].set(0)
    state, config = hf.params_to_hf(params, model)
    assert json.loads(json.dumps(config)) == config
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in state.values())
    same = ours(config, vocab_multiple=16, init_std=model.config.init_std)
    same = models.changed(same, dropout=model.config.dropout, attention=model.config.attention)
    assert models.changed(same, mlp=model.config.mlp) == model
    assert same.config.mlp.hidden == model.config.mlp.hidden_size(32)
    jax.tree.map(np.testing.assert_array_equal, hf.params_from_hf(state, same), params)
    hf.save_hf(tmp_path / "new", params, model)
    config = base(vocab_multiple=16)
    _, _, loaded = hf.load_hf(tmp_path / "new", config)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert config.model.width == 128  # the given config is not changed


def test_names_with_and_without_prefix(llama):
    """Published GPT-2 files have no prefix, and buffers of the mask."""
    model, params, state, _ = llama
    bare = {name.removeprefix("model."): array for name, array in state.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
    assert "embed_tokens.weight" in bare
    jax.tree.map(np.testing.assert_array_equal, hf.params_from_hf(bare, model), params)

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


ROUTING = dict(kind="mod", capacity=0.5)


@pytest.mark.parametrize("further", [{}, dict(causal="predictor", skip_mlp=8)])
@pytest.mark.parametrize("scan", [False, True])
def test_dense_to_mod(scan, further):
    """The dense arrays as they are, what is of routing as the model itself would make it."""
    dense = models.changed(families.make({"depth": 4}), scan_layers=scan)
    routed = models.changed(
        dense, depth_routing=dataclasses.replace(dense.config.depth_routing, **ROUTING, **further)
    )
    params = families.random_params(families.make({"depth": 4}))
    given = params
    if scan:
        given = {**params, "layers": scan_params(params["layers"], dense.specs())}
    mod = hf.mod_from_dense(given, routed, jax.random.key(5))
    shapes = models.variable_shapes(routed)["params"]
    assert jax.tree.map(jnp.shape, mod) == jax.tree.map(jnp.shape, nn.unbox(shapes))
    layers = models.unroll(routed, mod)[1]["layers"]
    routers = [np.asarray(layers[f"block_{i}"]["router"]) for i in (1, 3)]
    dense_part = {
        name: {k: v for k, v in layer.items() if k not in ("router", "predictor", "skip_mlp")}
        for name, layer in layers.items()
    }
    assert all(0.005 < router.std() < 0.05 for router in routers)
    assert not np.array_equal(*routers)
    jax.tree.map(np.testing.assert_array_equal, dense_part, params["layers"])
    again = hf.mod_from_dense(given, routed, jax.random.key(5))
    other = hf.mod_from_dense(given, routed, jax.random.key(6))
    jax.tree.map(np.testing.assert_array_equal, again, mod)
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, other, mod)))
    assert "router" not in given["layers"]["units" if scan else "block_1"]  # left as it was


def test_a_converted_model_starts_as_the_dense_one(llama):
    """At capacity 1 with gate one, before any training."""
    model, params, state, _ = llama
    routing = dataclasses.replace(model.config.depth_routing, kind="mod", capacity=1.0, gate="one")
    routed = models.changed(model, depth_routing=routing).clone(selection="train")
    mod = hf.params_from_hf(state, routed, jax.random.key(0))
    np.testing.assert_allclose(apply(routed, mod), apply(model, params), atol=1e-5)


def test_load_into_a_config_with_routing(llama, tmp_path):
    model, params, _, _ = llama
    hf.save_hf(tmp_path / "dense", params, model)
    config, routed, mod = hf.load_hf(tmp_path / "dense", base(**{"depth_routing.kind": "mod"}))
    assert config.model.depth_routing.kind == "mod" and config.model.attention.num_kv_heads == 2
    assert mod["layers"]["block_1"]["router"].shape == (32,)
    learned = base(**{"dropout.kind": "elementwise"})
    with pytest.raises(UsageError, match=r"config\.model\.dropout\.kind='elementwise': .*masks"):
        hf.load_hf(tmp_path / "dense", learned)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("gpt2", dict(model_type="bert"), "model_type='bert': efx reads gpt2 .*olmo2.*qwen3"),
        ("gpt2", dict(model_type=["gpt2"]), "model_type=.*: efx reads gpt2"),
        ("gemma2", {}, "model_type='gemma2': efx reads gpt2"),
        ("efx", {}, "model_type='efx': efx cannot import its own exports"),
        ("gpt2", dict(alibi=True), "alibi=True: efx does not support this setting of gpt2"),
        (
            "llama",
            dict(quantization_config=dict(bits=4)),
            "quantization_config=.*does not support this setting of llama",
        ),
        ("llama", dict(rope_interleaved=True), "rope_interleaved=True: efx reproduces False"),
        ("llama", dict(hidden_size="32"), "hidden_size='32': expected a whole number"),
        ("llama", dict(num_hidden_layers=-1), "num_hidden_layers=-1: expected a whole number"),
        ("llama", dict(num_attention_heads=None), "num_attention_heads=None: expected a whole"),
        ("llama", dict(rms_norm_eps=0), "rms_norm_eps=0: expected a number above 0"),
        ("llama", dict(tie_word_embeddings=1), "tie_word_embeddings=1: efx reproduces True"),
        ("gpt2", dict(activation_function="relu"), "activation_function='relu'.*'gelu_new'"),
        ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights=False"),
        (
            "gpt2",
            dict(scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx=True",
        ),
        ("gpt2", dict(add_cross_attention=True), "add_cross_attention=True"),
        ("gpt2", dict(n_special=3), "n_special=3: efx reproduces 0"),
        ("llama", dict(hidden_act="relu"), "hidden_act='relu': efx reproduces 'silu'"),
        (
            "llama",
            dict(rope_scaling=dict(type="yarn", factor=2.0)),
            "rope_scaling.rope_type='yarn': efx reproduces 'default', 'linear', 'llama3'",
        ),
        ("llama", dict(rope_scaling="linear"), "rope_scaling='linear': expected a block"),
        (
            "llama",
            dict(rope_scaling=dict(type=["linear"])),
            r"rope_scaling\.rope_type=\['linear'\]: efx reproduces",
        ),
        (
            "llama",
            dict(rope_scaling=dict(type="linear", factor=2.0, beta_fast=32)),
            "rope_scaling.beta_fast=32: efx does not support this setting of 'linear'",
        ),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4)),
            "rope_parameters.factor is missing, but 'llama3' needs it",
        ),
        (
            "llama",
            dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)),
            "rope_parameters.partial_rotary_factor=0.5: efx reproduces 1.0",
        ),
        ("qwen2", dict(use_mrope=True), "use_mrope=True: efx reproduces False"),
        (
            "qwen2",
            dict(use_sliding_window=True, sliding_window=8, max_window_layers=28),
            "layer_types=.*one attention.window for all layers",
        ),
        ("qwen3", dict(layer_types=["linear_attention"] * 32), "layer_types=.*expected one of"),
        (
            "smollm3",
            dict(no_rope_layers=[1, 0, 1, 1], num_hidden_layers=4),
            "no_rope_layers=.*equal distances",
        ),
        ("smollm3", dict(no_rope_layers=[1, 0]), "no_rope_layers=.*for each of the 36 layers"),
        ("gpt_neox", dict(rotary_pct=1.5), "partial_rotary_factor=1.5: efx reproduces at most"),
        (
            "olmo2",
            dict(mlp_bias=False),
            "mlp_bias=False: efx does not support this setting of olmo2",
        ),
    ],
)
def test_configs_that_efx_cannot_reproduce(kind, changes, message):
    with pytest.raises(UsageError, match=rf"config\.json: .*{message}"):
        hf.config_from_hf({"model_type": kind, **changes})


def test_defaults_are_those_of_transformers(transformers):
    """A config.json that says nothing but its kind is the same as one that says everything."""
    for kind in hf_config.ARCHITECTURES:
        full = transformers.AutoConfig.for_model(kind).to_dict()
        said, silent = hf.config_from_hf(full), hf.config_from_hf({"model_type": kind})
        for settings in (said, silent):
            head_dim = settings.pop("model.attention.head_dim")
            heads = settings["model.attention.num_heads"]
            settings["head_dim"] = head_dim or settings["model.width"] // heads
            settings["kv"] = settings.pop("model.attention.num_kv_heads") or heads
        assert said == silent, kind


# What config.json files of published models say, versions of transformers before 5 having written
# them, and what has to come of it.
PUBLISHED = {
    "SmolLM2-135M": (
        dict(
            attention_bias=False, hidden_act="silu", hidden_size=576, intermediate_size=1536,
            is_llama_config=True, max_position_embeddings=8192, model_type="llama",
            num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1,
            rms_norm_eps=1e-5, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
            tie_word_embeddings=True, vocab_size=49152,
        ) | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        {"attention.rope_theta": 1e5, "attention.num_kv_heads": 3, "tied": True},
    ),
    "gpt2-medium": (
        dict(
            activation_function="gelu_new", layer_norm_epsilon=1e-5, model_type="gpt2", n_ctx=1024,
            n_embd=1024, n_head=16, n_layer=24, n_positions=1024, n_special=0,
            predict_special_tokens=True, vocab_size=50257,
        ),
        {"width": 1024, "depth": 24, "positions": "learned"},
    ),
    "distilgpt2": (
        dict(
            _num_labels=1, activation_function="gelu_new", id2label={"0": "LABEL_0"},
            layer_norm_epsilon=1e-5, model_type="gpt2", n_ctx=1024, n_embd=768, n_head=12,
            n_layer=6, n_positions=1024, output_past=True, use_bfloat16=False, vocab_size=50257,
        ),
        {"width": 768, "depth": 6},
    ),
    "Llama-3.2-1B": (
        dict(
            attention_bias=False, head_dim=64, hidden_act="silu", hidden_size=2048,
            intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False,
            model_type="llama", num_attention_heads=32, num_hidden_layers=16,
            num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0,
            rope_scaling=dict(
                factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3",
                original_max_position_embeddings=8192,
            ),
            tie_word_embeddings=True, vocab_size=128256,
        ),
        {
            "attention.rope_theta": 5e5,
            "attention.rope_scaling.kind": "llama3",
            "attention.rope_scaling.factor": 32.0,
            "attention.rope_scaling.original_context": 8192,
            "attention.rope_scaling.low_frequency_factor": 1.0,
            "attention.rope_scaling.high_frequency_factor": 4.0,
        },
    ),
    "Qwen2.5-0.5B": (
        dict(
            hidden_act="silu", hidden_size=896, intermediate_size=4864, max_window_layers=24,
            max_position_embeddings=32768, model_type="qwen2", num_attention_heads=14,
            num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6,
            sliding_window=32768, tie_word_embeddings=True, use_mrope=False,
            use_sliding_window=False, vocab_size=151936,
        ),
        {"attention.bias": "qkv", "use_bias": False, "attention.window": 0},
    ),
    "Qwen3-0.6B": (
        dict(
            attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=1024,
            intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28,
            model_type="qwen3", num_attention_heads=16, num_hidden_layers=28,
            num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000,
            sliding_window=None, tie_word_embeddings=True, use_sliding_window=False,
            vocab_size=151936,
        ),
        {"attention.bias": "none", "attention.qk_norm": "head", "attention.head_dim": 128},
    ),
    "SmolLM3-3B": (
        dict(
            attention_bias=False, hidden_act="silu", hidden_size=2048, intermediate_size=11008,
            layer_types=["full_attention"] * 36, max_position_embeddings=65536,
            max_window_layers=28, mlp_bias=False, model_type="smollm3", no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9, num_attention_heads=16, num_hidden_layers=36,
            num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None,
            rope_theta=5e6, sliding_window=None, use_sliding_window=False, vocab_size=128256,
        ),
        {"attention.no_rope_every": 4, "tied": True},
    ),
    "pythia-70m": (
        dict(
            hidden_act="gelu", hidden_size=512, intermediate_size=2048, layer_norm_eps=1e-5,
            max_position_embeddings=2048, model_type="gpt_neox", num_attention_heads=8,
            num_hidden_layers=6, rotary_emb_base=10000, rotary_pct=0.25,
            tie_word_embeddings=False, use_parallel_residual=True, vocab_size=50304,
        ),
        {"attention.rope_fraction": 0.25, "block_kind": "parallel", "use_bias": True},
    ),
    "OLMo-2-0425-1B": (
        dict(
            attention_bias=False, hidden_act="silu", hidden_size=2048, intermediate_size=8192,
            max_position_embeddings=4096, model_type="olmo2", num_attention_heads=16,
            num_hidden_layers=16, num_key_value_heads=16, rms_norm_eps=1e-6, rope_scaling=None,
            rope_theta=500000, tie_word_embeddings=False, vocab_size=100352,
        ),
        {"attention.qk_norm": "width", "block_kind": "post_norm"},
    ),
}  # fmt: skip
EVERYWHERE = dict(
    architectures=["AForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=0,
    eos_token_id=[1, 2],
    initializer_range=0.02,
    torch_dtype="bfloat16",
    transformers_version="4.46.0",
    use_cache=True,
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    contents, expected = PUBLISHED[name]
    settings = hf.config_from_hf(EVERYWHERE | contents)
    assert {key: settings[f"model.{key}"] for key in expected} == expected
    common.apply(common.base(), settings)


def test_defaults_of_transformers():
    gpt2 = hf.config_from_hf({"model_type": "gpt2"})
    assert (gpt2["model.width"], gpt2["model.mlp.hidden"], gpt2["model.tied"]) == (768, 3072, True)
    old = hf.config_from_hf({"model_type": "llama", "rope_theta": 5e5, "num_key_value_heads": 8})
    assert (old["model.attention.rope_theta"], old["model.attention.num_kv_heads"]) == (5e5, 8)
    assert old["model.norm_eps"] == 1e-6 and old["model.mlp.hidden"] == 11008


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention.qk_norm": "width"}, r"config\.model\.attention\.qk_norm='width'.*'none'"),
        ({"attention.scale": "mup"}, r"config\.model\.attention\.scale='mup'"),
        ({"attention.softcap": 3.0}, r"config\.model\.attention\.softcap=3\.0"),
        ({"logit_softcap": 3.0}, r"config\.model\.logit_softcap=3\.0"),
        ({"block_kind": "parallel"}, r"config\.model\.block_kind='parallel'.*'pre_norm'"),
        ({"block_kind": "post_norm"}, r"config\.model\.block_kind='post_norm'.*'pre_norm'"),
        (
            {"attention.bias": "qkv", "attention.qk_norm": "head"},
            r"config\.model\.attention\.qk_norm='head'.*qwen2 format has 'none'",
        ),
        ({"preset": "gpt2", "attention.bias": "none"}, r"attention\.bias='none'.*has 'all'"),
        ({"attention.rope_fraction": 0.5}, r"config\.model\.attention\.rope_fraction=0\.5"),
        ({"norm": "layernorm"}, r"config\.model\.norm='layernorm'.*llama format has 'rmsnorm'"),
        ({"mlp.activation": "gelu"}, r"config\.model\.mlp\.activation='gelu'.*swiglu"),
        ({"positions": "none"}, r"config\.model\.positions='none'"),
        (
            {"preset": "gpt2", "attention.num_kv_heads": 2},
            r"config\.model\.attention\.num_kv_heads=2.*gpt2 format has 4",
        ),
        ({"preset": "gpt2", "attention.head_dim": 6}, r"config\.model\.attention\.head_dim=6.* 8"),
        ({"depth_routing.kind": "mod"}, r"config\.model\.depth_routing\.kind='mod'.*routers"),
        ({"dropout.kind": "elementwise"}, r"config\.model\.dropout\.kind='elementwise'.*masks"),
    ],
)
def test_models_that_no_architecture_has(changes, message):
    with pytest.raises(UsageError, match=message):
        hf_config.config_to_hf(families.make(changes))


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({"preset": "gpt2", "use_bias": False}, "gpt2"),
        ({"attention.rope_scaling.kind": "linear"}, "llama"),
        ({"attention.bias": "qkv", "attention.head_dim": 6}, "qwen2"),
        ({"attention.qk_norm": "head", "attention.window": 4}, "qwen3"),
        ({"attention.window": 4}, "smollm3"),
        ({"attention.no_rope_every": 2}, "smollm3"),
        ({"norm": "layernorm", "use_bias": True, "mlp.activation": "gelu"}, "gpt_neox"),
        ({"block_kind": "post_norm", "attention.qk_norm": "width"}, "olmo2"),
    ],
)
def test_an_architecture_that_has_the_settings(changes, kind):
    assert hf_config.config_to_hf(families.make(changes))["model_type"] == kind


def refused(state, model, message, key=None):
    with pytest.raises(UsageError, match=message) as error:
        hf.params_from_hf(state, model, key)
    assert "\n" not in str(error.value)


def test_arrays_that_do_not_fit(llama):
    model, _, state, _ = llama
    key = "model.layers.1.self_attn.k_proj.weight"
    refused(
        {**state, key: state[key][:-1]},
        model,
        r"layers\.1\.self_attn\.k_proj\.weight has shape \(15, 32\), .*needs \(16, 32\)",
    )
    refused(
        {**state, "model.embed_tokens.weight": np.ones((V + 1, 32))},
        model,
        r"embed_tokens\.weight has shape \(46, 32\), .* needs \(45, 32\)",
    )
    less = {name: array for name, array in state.items() if "layers.1" not in name}
    refused(less, model, r"lacks layers\.1\.\S+, layers\.1\.\S+, .* and 6 more")
    refused(
        {**state, "model.layers.2.mlp.up_proj.weight": state[key]},
        model,
        r"has arrays without a counterpart in this model: layers\.2\.mlp\.up_proj\.weight",
    )
    refused(
        {**state, "lm_head.weight": state["lm_head.weight"] + 1},
        models.changed(model, tied=True),
        r"lm_head\.weight differs from embed_tokens\.weight",
    )
    routing = dataclasses.replace(model.config.depth_routing, **ROUTING)
    refused(state, models.changed(model, depth_routing=routing), "routed blocks: pass a PRNG key")


def test_folders_that_do_not_fit(llama, tmp_path):
    model, params, _, config = llama

    def load(message):
        with pytest.raises(UsageError, match=message) as error:
            hf.load_hf(tmp_path, base())
        assert "\n" not in str(error.value)

    load(r"config\.json does not exist: not a Hugging Face checkpoint")
    (tmp_path / "config.json").write_text("{")
    load(r"config\.json cannot be read")
    (tmp_path / "config.json").write_text(json.dumps(config))
    load(r"model\.safetensors does not exist; efx reads weights from safetensors only")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    load(r"model\.safetensors cannot be read")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    load(r"model-00001-of-00002\.safetensors does not exist")


def test_nothing_is_overwritten(llama, tmp_path):
    model, params, _, _ = llama
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty \(notes\.txt\); use a new folder"):
        hf.save_hf(tmp_path, params, model)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match=r"notes\.txt cannot be written"):
        hf.save_hf(tmp_path / "notes.txt", params, model)
