"""The parallel encoder-decoder: its formulas, its embedding loss and its settings."""

import families
import formulas
import jax
import numpy as np
import pytest
from families import VOCAB
from formulas import attention, linear, mlp
from refusals import refused

from efx import models
from efx.config.load import load_config
from efx.models.encoder_decoder import EmbeddingLoss
from efx.train import losses, optim

STREAMS = {"family": "encoder_decoder", "mlp.hidden": 48}


def make(changes, **options):
    return families.make({**STREAMS, **changes}, **options)


# ---- the forward pass in numpy -----------------------------------------------------------------

ORDERS = {"self_first": "sc", "cross_first": "cs", "cross_only": "c"}


def norm(x, p):
    return formulas.norm(x, p, "layernorm")


def after_block(x_TD, p, c, e_TD=None):
    """The state after an encoder block, or a decoder block that reads e, dense or routed."""
    everything, parallel = np.arange(len(x_TD)), c["block_kind"] == "parallel"
    theta = c["attention"]["rope_theta"] if c["positions"] == "rope" else 0
    heads, kv_heads = c["attention"]["num_heads"], c["attention"]["num_kv_heads"]
    for_skipped = c["depth_routing"]["kv_for_skipped"]

    def attend(at):
        """Increment of the attentions of the tokens `at`, the only ones that are computed."""
        delta_TD = np.zeros_like(x_TD[at])
        for sublayer in "s" if e_TD is None else ORDERS[c["order"]]:
            d_TD = x_TD[at] + (0 if parallel else delta_TD)
            if sublayer == "s":
                read_SD, k_at = x_TD.copy(), everything if for_skipped else at
                read_SD[at] = d_TD
                q_TD, kv_SD = (norm(y, p["norm_attention"]) for y in (d_TD, read_SD[k_at]))
                options = dict(heads=heads, kv_heads=kv_heads, k_at=k_at)
                y_TD = attention(q_TD, kv_SD, p["attention"], q_at=at, theta=theta, **options)
            else:
                q_TD, kv_SD = norm(d_TD, p["norm_cross"]), norm(e_TD, p["norm_encoder"])
                options = dict(heads=c["cross_heads"] or heads, theta=theta)
                y_TD = attention(q_TD, kv_SD, p["cross_attention"], q_at=at, **options)
            delta_TD = delta_TD + y_TD
        return delta_TD

    def increment(at):
        a_TD = attend(at)
        m_TD = norm(x_TD[at] if parallel else x_TD[at] + a_TD, p["norm_mlp"])
        return a_TD + mlp(m_TD, p["mlp"])

    if "router" not in p:
        return x_TD + increment(everything)
    score_T, out_TD = x_TD @ p["router"], x_TD.copy()
    at = np.flatnonzero(score_T > 0)
    assert 0 < len(at) < len(x_TD)
    out_TD[at] += increment(at) / (1 + np.exp(-score_T[at]))[:, None]
    return out_TD


def reference(tokens_T, params, c, reads):
    """(logits [T, V], encoder states e_0 .. e_E)."""
    table, length = params["embed"]["embedding"], len(tokens_T)
    learned, every = c["positions"] == "learned", c["attention"]["no_rope_every"]
    positions = params["positions_embed"]["embedding"] if learned else np.zeros((length + 1, 1))
    next_TD = positions[1 : length + 1]
    stacks = params.get("layers", {}), params.get("last", {})
    layers = [stack[f"block_{i}"] for stack in stacks for i in range(len(stack))]

    def of_block(i):
        return {**c, "positions": "none"} if every and (i + 1) % every == 0 else c

    states = [table[tokens_T] + positions[:length]]
    encoder = [layer[name] for layer in layers for name in sorted(layer) if "encoder" in name]
    for i, p in enumerate(encoder):
        states.append(after_block(states[-1], p, of_block(i)))
    serial = c["cross_source"] == "final" and c["serial_start"] == "encoder"
    x_TD = states[-1] if serial else states[0]
    x_TD = norm(x_TD, params["norm_input"]) if c["decoder_input_norm"] else x_TD
    d_TD = linear(x_TD, params["decoder_input"]) + next_TD * c["decoder_input_positions"]
    decoder = [layer["decoder"] for layer in layers if "decoder" in layer]
    for i, (p, read) in enumerate(zip(decoder, reads, strict=True)):
        d_TD = after_block(d_TD, p, of_block(i), states[read])
    x_TD = norm(d_TD, params["norm_final"])
    output_positions = c["output_positions"] or ("subtract" if learned else "none")
    x_TD = x_TD - next_TD * (output_positions != "none")
    if output_positions == "subtract_norm":
        x_TD = norm(x_TD, params["norm_output"])
    return (x_TD @ table.T)[:, :VOCAB], states


def embedding_distance(kind, c_TD, s_TD):
    if kind == "mse":
        return np.mean((c_TD - s_TD) ** 2, axis=-1)
    lengths = np.linalg.norm(c_TD, axis=-1) * np.linalg.norm(s_TD, axis=-1)
    p_T = (1 + np.sum(c_TD * s_TD, axis=-1) / lengths) / 2
    return 1 - p_T if kind == "cosine" else -np.log(p_T)


def running_mean(x_TD):
    return np.cumsum(x_TD, axis=0) / np.arange(1, len(x_TD) + 1)[:, None]


ROPE = {
    "positions": "rope",
    "attention.rope_theta": 50.0,
    "attention.num_kv_heads": 2,
    "cross_heads": 8,
}
NORMED = {"output_positions": "subtract_norm", "decoder_input_norm": True, "use_bias": True}


def routed(**changes):
    """Every block routed. A token is selected if its score is positive: 10 tokens fit."""
    changes = dict(kind="mod", every=1, capacity=0.4, causal_decision="aux_loss") | changes
    return {f"depth_routing.{name}": value for name, value in changes.items()}


def case(source, encoder_depth, reads, order="self_first", slow=False, **changes):
    """reads: index of the encoder state that each decoder block reads."""
    source, _, start = source.partition(" ")
    changes |= {"cross_source": source, "encoder_depth": encoder_depth, "depth": len(reads)}
    changes |= {"order": order, "serial_start": start or "encoder"}
    return pytest.param(changes, reads, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(
    "changes, reads",
    [
        case("same_layer", 0, (1, 2, 3), use_bias=True, output_positions="subtract"),
        case("same_layer", 2, (1, 2, 2), "cross_first", decoder_input_positions=True),
        case("same_layer", 3, (2, 3), "cross_only", slow=True, output_positions="none"),
        case("previous_layer", 0, (0, 1, 2), "cross_first", embedding_loss="cosine", **NORMED),
        case("previous_layer", 2, (0, 0, 1, 2), "cross_only", slow=True, cross_heads=8),
        case("previous_layer", 0, (0, 1), **ROPE, **{"attention.no_rope_every": 2}),
        case("final embedding", 1, (1, 1), "cross_only", decoder_input_norm=True),
        case("final", 0, (2, 2), "cross_only", **routed()),
        case("same_layer", 0, (1, 2), "cross_first", **routed(), **ROPE),
        case("same_layer", 0, (1, 2), "cross_first", **routed(kv_for_skipped=True)),
        case("previous_layer", 0, (0, 1), block_kind="parallel", **routed()),
    ],
)
def test_forward_and_decoding_are_the_formulas(changes, reads):
    """Logits and embedding loss; of routed models also the logits of prefill and decoding."""
    model, tokens_BT = make(changes), families.tokens(batch=2, length=10)
    params = families.random_params(model, seed=1)
    apply = families.jit(
        lambda params: model.apply({"params": params}, tokens_BT, mutable=["losses"])
    )
    logits_BTV, sown = apply(params)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    config = families.model_config({**STREAMS, **changes}).to_dict()
    ones, distances = {"scale": np.ones(32)}, []
    for b in range(2):
        expected_TV, states = reference(np.asarray(tokens_BT[b]), wide, config, reads)
        assert max(reads) == len(states) - 1, "no decoder block reads the last encoder state"
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)
        c_TD, s_TD = running_mean(norm(states[0], ones)), norm(states[-1], ones)
        distances.append(embedding_distance(config["embedding_loss"], c_TD, s_TD))
    loss = losses.collect_sown(sown["losses"])["embedding"]
    np.testing.assert_allclose(loss, np.mean(distances), rtol=1e-4)
    if changes.get("depth_routing.kind"):
        variables, empty = {"params": params}, models.init_cache(model, 2, 10)
        prefill, step = (families.decoder(model, variables, 10, kind) for kind in ("first", True))
        first_BTV, _ = families.read(prefill, empty, tokens_BT[:, :4], [(4, np.array([4, 4]))])
        np.testing.assert_allclose(first_BTV, logits_BTV[:, :4], atol=1e-4)
        calls = families.chunks(np.array([4, 6]), np.array([10, 10]), 4)
        decoded_BTV, _ = families.read(step, empty, tokens_BT, calls)
        np.testing.assert_allclose(decoded_BTV, logits_BTV, atol=1e-4)


# ---- the embedding loss ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mse", "cosine", "log_cosine"])
def test_embedding_loss_by_hand(kind):
    """Two documents and padding in a row; the encoder's output gets no gradient."""
    rng, module = np.random.default_rng(0), EmbeddingLoss(kind, gains=True, eps=1e-5)
    arrays = rng.normal(size=(2, 1, 12, 8)).astype(np.float32)
    segments_BT = np.array([[1] * 6 + [2] * 4 + [0] * 2])
    params = {
        name: {leaf: rng.normal(size=8).astype(np.float32) for leaf in ("scale", "bias")}
        for name in ("norm_embedding", "norm_encoder")
    }

    def loss(arrays, params):
        _, sown = module.apply({"params": params}, *arrays, segments_BT, mutable=["losses"])
        return losses.collect_sown(sown["losses"])["embedding"]

    embedded_TD, e_TD = (norm(x[0], p) for x, p in zip(arrays, params.values(), strict=True))
    distances = [
        embedding_distance(kind, running_mean(embedded_TD[start:stop]), e_TD[start:stop])
        for start, stop in ((0, 6), (6, 10))
    ]
    value, gradient = jax.value_and_grad(loss)(arrays, params)
    np.testing.assert_allclose(value, np.mean(np.concatenate(distances)), rtol=1e-4)
    assert np.abs(gradient[0]).max() > 0 and np.abs(gradient[1]).max() == 0
    zeros = jax.tree.map(np.zeros_like, (arrays, params))
    assert np.isfinite(jax.grad(loss)(*zeros)).all()  # with embeddings of zero
    if kind == "mse":  # the minimum into which the published form collapses
        assert loss(arrays, zeros[1]) == 0


def test_the_default_embedding_loss_has_no_gains():
    """So no parameters can make it zero."""
    assert "loss" in families.variable_shapes(make({"embedding_loss_gains": True}))["params"]
    assert "loss" not in families.variable_shapes(make({}))["params"]


# ---- costs, initial values, settings -----------------------------------------------------------


def test_cross_attention_caches_keys_of_all_tokens():
    """Self-attention caches routed tokens."""
    size, per_token = 20, 2 * 4 * 32  # bytes of a key and a value in float32
    model = make({**routed(slack=1.0), "cross_source": "same_layer"})
    slots = 8 + 4  # 0.4 * 20, and those of every sequence
    assert families.cache_bytes(model, size) == 2 * per_token * (2 * slots + size)


def test_residual_outputs_start_smaller_by_the_root_of_their_number():
    params = families.initial(make({"depth": 2, "init_std": 0.1}), 3)["params"]
    first, last = params["layers"]["block_0"], params["last"]["block_0"]
    for block, number in ((first["encoder_0"], 2), (first["decoder"], 6), (last["decoder"], 6)):
        kernels = [block[part]["out"] for part in ("attention", "cross_attention") if part in block]
        for out in (*kernels, block["mlp"]["down"]):
            assert np.std(out["kernel"]) == pytest.approx(0.1 / number**0.5, rel=0.1)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"cross_heads": 5}, "config.model.cross_heads=5"),
        ({"depth": 1, "encoder_depth": 2}, "config.model.encoder_depth=2"),
        ({"positions": "rope", "cross_heads": 32}, "config.model.cross_heads=32"),
        ({"positions": "rope", "decoder_input_positions": True}, "decoder_input_positions=True"),
        ({"positions": "rope", "output_positions": "subtract"}, "output_positions='subtract'"),
        ({"depth_routing.kind": "recursion", "depth": 4}, "depth_routing.kind='recursion'"),
        ({**routed(blocks=(2, 7)), "depth": 4}, "depth_routing.blocks=(2, 7)"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: make(changes), name)


def test_blocks_are_numbered_through_both_streams():
    """`every` counts in each stream; `blocks` and capacities go through both, encoder first."""

    def capacities(**changes):
        specs = make({**routed(**changes), "depth": 4}).blocks()  # 3 encoder blocks
        return {path: spec.capacity for path, spec in specs.items() if spec.routing is not None}

    assert capacities(every=2, capacity=(0.1, 0.2, 0.3)) == {
        "layers/block_1/encoder_0": 0.1,
        "layers/block_1/decoder": 0.2,
        "last/block_0/decoder": 0.3,
    }
    assert capacities(blocks=(3, 6), capacity=(0.5, 0.25)) == {
        "layers/block_0/decoder": 0.5,
        "last/block_0/decoder": 0.25,
    }


def test_rotary_positions_have_no_table_and_no_end():
    model = make({"positions": "rope"}, context=8)
    params = families.random_params(model)
    assert "positions_embed" not in params
    jax.eval_shape(model.apply, {"params": params}, families.tokens(batch=1))


@pytest.mark.slow
def test_the_published_model_with_its_masks_is_a_variant(root, monkeypatch):
    """15.8M parameters without masks; masks at every site of both streams, and both penalties."""
    monkeypatch.chdir(root)
    config = load_config("configs/encoder_decoder.py:seed")
    assert config.losses["dropout_entropy"] == config.losses["dropout_l1"] == 1.0
    options = dict(vocab_size=50257, context=config.data.seq_len, dtype="float32")
    model = models.build(config.model, **options)
    c, params = model.config, models.unboxed_shapes(model)["params"]
    assert (c.width, c.depth, c.cross_heads, c.context) == (150, 13, 10, 200)
    sizes = {path: leaf.size for path, leaf in optim.param_paths(params).items()}
    unmasked = sum(size for path, size in sizes.items() if "mask_" not in path)
    assert round(unmasked / 1e6, 1) == 15.8
    # Attention probabilities, attention outputs and MLP outputs.
    masks = [path for path in sizes if path.endswith("mask_phase")]
    assert len(masks) == 1 + 3 * c.num_encoder_blocks + 5 * c.depth
