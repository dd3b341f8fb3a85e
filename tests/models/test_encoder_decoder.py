"""The parallel encoder-decoder: its formulas, its losses, and streams that run at once."""

import families
import jax
import numpy as np
import pytest
from families import LENGTH, VOCAB
from formulas import attention, linear, mlp
from refusals import refused

from efx import losses, models, optim
from efx.config import load_config

STREAMS = {"family": "encoder_decoder", "mlp.hidden": 48}


def make(changes, **options):
    return families.make({**STREAMS, **changes}, **options)


# ---- the forward pass, once more in numpy ------------------------------------------------------


def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p.get("bias", 0)


def heads_of(c, cross):
    """Keywords of `attention`."""
    heads, kv_heads = c["attention"]["num_heads"], c["attention"]["num_kv_heads"]
    if cross:
        heads, kv_heads = c["cross_heads"] or heads, c["cross_kv_heads"]
    theta = c["attention"]["rope_theta"] if c["positions"] == "rope" else 0
    return dict(heads=heads, kv_heads=kv_heads, theta=theta)


def self_attention(x_TD, all_SD, p, c, **at):
    n_TD, m_SD = (norm(x, p["norm_attention"]) for x in (x_TD, all_SD))
    return attention(n_TD, m_SD, p["attention"], **heads_of(c, False), **at)


def encoder_block(x_TD, all_SD, p, c, **at):
    """The increment of the tokens x at positions q_at, which attend to those at k_at."""
    a_TD = self_attention(x_TD, all_SD, p, c, **at)
    return a_TD + mlp(norm(x_TD + a_TD, p["norm_mlp"]), p["mlp"])


def decoder_block(x_TD, all_SD, p, c, e_TD, **at):
    """The same; cross-attention reads all of e."""
    delta_TD = np.zeros_like(x_TD)
    order = {"self_first": "sc", "cross_first": "cs", "cross_only": "c"}[c["order"]]
    for sublayer in order:
        d_TD, q_at = x_TD + delta_TD, at["q_at"]
        if sublayer == "s":
            # Keys of computed tokens are of their state here, those of the others of the block's
            # input.
            read_SD = all_SD.copy()
            read_SD[np.isin(at["k_at"], q_at)] = d_TD
            delta_TD = delta_TD + self_attention(d_TD, read_SD, p, c, **at)
        else:
            q_TD, kv_SD = norm(d_TD, p["norm_cross"]), norm(e_TD, p["norm_encoder"])
            heads = heads_of(c, True)
            delta_TD = delta_TD + attention(q_TD, kv_SD, p["cross_attention"], **heads, q_at=q_at)
    return delta_TD + mlp(norm(x_TD + delta_TD, p["norm_mlp"]), p["mlp"])


def through(x_TD, p, c, block, *rest):
    """The state after a block; a routed block computes the tokens of its causal decision."""
    places = np.arange(len(x_TD))
    if "router" not in p:
        return x_TD + block(x_TD, x_TD, p, c, *rest, q_at=places, k_at=places)
    score_T = x_TD @ p["router"]
    room = round(c["depth_routing"]["capacity"] * c["depth_routing"]["slack"] * len(x_TD))
    routed = np.flatnonzero(score_T > 0)[:room]
    assert 0 < len(routed) < len(x_TD)
    keys = places if c["depth_routing"]["kv_for_skipped"] else routed
    delta = block(x_TD[routed], x_TD[keys], p, c, *rest, q_at=routed, k_at=keys)
    out_TD = x_TD.copy()
    out_TD[routed] += delta / (1 + np.exp(-score_T[routed]))[:, None]
    return out_TD


def blocks_of(params):
    """(encoder blocks, decoder blocks) in order, wherever the layers put them, each with the
    weights of the average after it, or None."""
    stack = params.get("layers", {})
    count = sum(name.startswith("block") for name in stack)
    layers = [(stack[f"block_{i}"], stack.get(f"average_{i + 1}")) for i in range(count)]
    layers += [(params["last"]["block_0"], None)] if "last" in params else []
    encoder = [
        (layer[f"encoder_{i}"], average)
        for layer, average in layers
        for i in range(9)
        if f"encoder_{i}" in layer
    ]
    return encoder, [(layer["decoder"], average) for layer, average in layers if "decoder" in layer]


def of_block(c, i):
    """The config of block i of a stream: without rotary positions in every n-th of each."""
    every = c["attention"]["no_rope_every"]
    return {**c, "positions": "none"} if every and (i + 1) % every == 0 else c


def averaged(states, average):
    if average is None:
        return states[-1]
    return sum(a * x for a, x in zip(average["alpha"], states, strict=True))


def reference(tokens_T, params, config, reads):
    """Logits [T, V], and the encoder's states e_0 ... e_E as they are read."""
    table, length = params["embed"]["embedding"], len(tokens_T)
    learned = config["positions"] == "learned"
    positions = params["positions_embed"]["embedding"] if learned else np.zeros((length + 1, 1))
    states = [table[tokens_T] + positions[:length]]
    encoder, decoder = blocks_of(params)
    plain = states[:]
    for i, (p, average) in enumerate(encoder):
        plain.append(through(states[-1], p, of_block(config, i), encoder_block))
        states.append(averaged(plain, average))
    serial = config["cross_source"] == "final" and config["serial_start"] == "encoder"
    x = states[-1] if serial else states[0]
    if config["decoder_input_norm"]:
        x = norm(x, params["norm_input"])
    d = linear(x, params["decoder_input"])
    if config["decoder_input_positions"]:
        d = d + positions[1 : length + 1]
    assert len(decoder) == len(reads)
    plain = [d]
    for i, ((p, average), read) in enumerate(zip(decoder, reads, strict=True)):
        plain.append(through(d, p, of_block(config, i), decoder_block, states[read]))
        d = averaged(plain, average)
    x = norm(d, params["norm_final"])
    subtracted = config["output_positions"] or ("subtract" if learned else "none")
    if subtracted != "none":
        x = x - positions[1 : length + 1]
    if subtracted == "subtract_norm":
        x = norm(x, params["norm_output"])
    return (x @ table.T)[:, :VOCAB], states


ROUTED = {
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": 0.4,
    "depth_routing.slack": 1.5,
}
AVERAGES = {"dense_former.on": True}
ROPE = {
    "positions": "rope",
    "attention.rope_theta": 50.0,
    "attention.num_kv_heads": 2,
    "cross_heads": 8,
    "cross_kv_heads": 2,
}
NORMED = {"output_positions": "subtract_norm", "decoder_input_norm": True, "use_bias": True}


def case(source, encoder_depth, reads, order="self_first", slow=False, **changes):
    """A row of `test_forward_is_the_formulas`. reads: number of the encoder's state that each
    decoder block reads."""
    source, _, start = source.partition(" ")
    changes |= {"cross_source": source, "encoder_depth": encoder_depth, "depth": len(reads)}
    changes |= {"order": order, "serial_start": start or "encoder"}
    return pytest.param(changes, reads, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(
    "changes, reads",
    [
        # sources, orders and ends, with equal and with unequal depths
        case("same_layer", 0, (1, 2, 3), use_bias=True, output_positions="subtract"),
        case("same_layer", 2, (1, 2, 2), "cross_first", decoder_input_positions=True),
        case("same_layer", 3, (2, 3), "cross_only", slow=True, output_positions="none"),
        case("previous_layer", 0, (0, 1, 2), "cross_first", **NORMED),
        case("previous_layer", 2, (0, 0, 1, 2), "cross_only", slow=True, cross_heads=8),
        case("final", 0, (2, 2), "cross_first", slow=True, cross_heads=8, cross_kv_heads=1),
        case("final embedding", 1, (1, 1), "cross_only", decoder_input_norm=True),
        # parts of the decoder family in both streams
        case("previous_layer", 0, (0, 1), **ROPE, **{"attention.no_rope_every": 2}),
        case("previous_layer", 4, (0, 2, 4), **AVERAGES),
        case("same_layer", 0, (1, 2, 3), "cross_first", **ROUTED, **ROPE),
        case("same_layer", 0, (1, 2, 3), "cross_first", **ROUTED,
             **{"depth_routing.kv_for_skipped": True}),
        case("final", 0, (2, 2), "cross_only", **ROUTED),
    ],
)  # fmt: skip
def test_forward_is_the_formulas(changes, reads):
    model = make(changes)
    params = families.random_params(model, seed=1)
    tokens_BT = families.tokens(batch=2, length=10)
    logits_BTV = families.jit(model.apply)({"params": params}, tokens_BT)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    config = families.model_config({**STREAMS, **changes}).to_dict()
    for b in range(2):
        expected_TV, states = reference(np.asarray(tokens_BT[b]), wide, config, reads)
        assert max(reads) == len(states) - 1, "no decoder block reads the last encoder state"
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)


# ---- the streams of a layer --------------------------------------------------------------------


def states_by_block(model, tokens_BT):
    """A compiled function from parameters to {path of a block: its output state}."""

    def is_block(module, method):
        return method == "__call__" and module.name in ("encoder_0", "decoder")

    @families.jit
    def run(params):
        _, sown = model.apply(
            {"params": params},
            tokens_BT,
            capture_intermediates=is_block,
            mutable=["intermediates"],
        )
        states = sown["intermediates"]
        return {
            f"{stack}/{layer}/{block}": outputs["__call__"][-1]
            for stack in ("layers", "last")
            for layer, blocks in states.get(stack, {}).items()
            for block, outputs in blocks.items()
        }

    return run


def poisoned(params, path):
    """The parameters with NaN in one block."""
    stack, layer, block = path.split("/")
    nan = jax.tree.map(lambda x: np.full_like(x, np.nan), params[stack][layer][block])
    return {**params, stack: {**params[stack], layer: {**params[stack][layer], block: nan}}}


def test_the_blocks_of_a_layer_do_not_read_each_other():
    """Encoder block i and decoder block i are computed at once; decoder block i + 1 reads both.
    With cross_source="same_layer" a decoder block waits for the encoder's."""
    changes = {"depth": 3, "encoder_depth": 2}
    model = make({"cross_source": "previous_layer", **changes})
    params = jax.device_get(families.random_params(model))
    run = states_by_block(model, families.tokens(batch=1, length=6))
    assert all(np.isfinite(state).all() for state in run(params).values())
    first, second = "layers/block_0", "layers/block_1"
    for path, reached in (
        (f"{first}/encoder_0", {f"{second}/encoder_0", f"{second}/decoder"}),
        (f"{first}/decoder", {f"{second}/decoder"}),
        (f"{second}/encoder_0", set()),
        (f"{second}/decoder", set()),
    ):
        finite = {name: np.isfinite(x).all() for name, x in run(poisoned(params, path)).items()}
        assert {name for name, ok in finite.items() if not ok} == {
            path, "last/block_0/decoder", *reached
        }  # fmt: skip
    same = make({"cross_source": "same_layer", **changes})
    params = jax.device_get(families.random_params(same))
    run = states_by_block(same, families.tokens(batch=1, length=6))
    states = run(poisoned(params, f"{first}/encoder_0"))
    assert np.isnan(states[f"{first}/decoder"]).all()


# ---- the embedding loss ------------------------------------------------------------------------


def embedding_loss(model, params, *arguments):
    state = model.apply({"params": params}, *arguments, mutable=["losses"])[1]
    return losses.collect_sown(state["losses"])["embedding"]


DISTANCES = {
    "mse": lambda c, s: np.mean((c - s) ** 2, axis=-1),
    "cosine": lambda c, s: (1 - cosine(c, s)) / 2,
    "log_cosine": lambda c, s: -np.log(np.maximum((1 + cosine(c, s)) / 2, 1e-6)),
}


def cosine(c, s):
    return np.sum(c * s, axis=-1) / np.linalg.norm(c, axis=-1) / np.linalg.norm(s, axis=-1)


def test_embedding_loss_by_hand():
    """Mean distance of the running mean of the embeddings from the encoder's output, against the
    states of the numpy forward pass; two documents and padding in a row."""
    variants = [
        {"cross_source": "same_layer"},
        {"cross_source": "previous_layer", "embedding_loss_gains": True, "depth": 3},
        {"cross_source": "same_layer", "embedding_loss": "cosine"},
        {"cross_source": "same_layer", "embedding_loss": "log_cosine"},
    ]
    made = [make(changes) for changes in variants]
    params = [families.random_params(model) for model in made]
    tokens_BT = families.tokens(batch=1, length=12)
    positions = np.array([[*range(6), *range(4), 0, 0]])
    segments = np.array([[1] * 6 + [2] * 4 + [0] * 2])

    @families.jit
    def run(params):
        return [
            embedding_loss(model, p, tokens_BT, positions, segments)
            for model, p in zip(made, params, strict=True)
        ]

    for changes, model, own, value in zip(variants, made, params, run(params), strict=True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), own)
        config = families.model_config({**STREAMS, **changes}).to_dict()
        terms, ones = [], {"scale": np.ones(32)}
        for start, stop in ((0, 6), (6, 10)):
            row_T = np.asarray(tokens_BT)[0, start:stop]
            states = reference(row_T, wide, config, model.config.reads)[1]
            gains = wide.get("loss", {"norm_embedding": ones, "norm_encoder": ones})
            c, s = norm(states[0], gains["norm_embedding"]), norm(states[-1], gains["norm_encoder"])
            c = np.cumsum(c, axis=0) / np.arange(1, stop - start + 1)[:, None]
            terms += list(DISTANCES[config["embedding_loss"]](c, s))
        np.testing.assert_allclose(value, np.mean(terms), rtol=1e-4, err_msg=str(changes))


def test_the_embedding_loss_trains_the_embeddings_only():
    """Of the encoder's output it reads the value; at embeddings of zero gradients are finite."""
    kinds = ("mse", "cosine", "log_cosine")
    made = [make({"cross_source": "same_layer", "embedding_loss": kind}) for kind in kinds]
    params, tokens_BT = families.random_params(made[0]), families.tokens(batch=2, length=8)

    @jax.jit
    def gradients(params):
        return [
            jax.grad(lambda p, m=model: embedding_loss(m, p, tokens_BT))(params) for model in made
        ]

    for kind, grads in zip(kinds, gradients(params), strict=True):
        for path, grad in jax.tree_util.tree_leaves_with_path(grads):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            trained = name.startswith(("embed", "positions_embed"))
            assert (np.abs(np.asarray(grad)).max() > 0) == trained, (kind, name)
    zero = jax.tree.map(np.zeros_like, jax.device_get(params))
    assert all(np.isfinite(grad).all() for grad in jax.tree.leaves(gradients(zero)))


def test_zero_gains_make_the_published_loss_zero():
    """Whatever text and parameters are; the default has no gains, and no scale helps it."""
    published, default = (make({"embedding_loss_gains": gains}) for gains in (True, False))
    assert "loss" not in families.variable_shapes(default)["params"]
    params, tokens_BT = families.random_params(published), families.tokens(batch=2, length=8)

    @families.jit
    def run(params, gain, scale):
        zero = {**params, "loss": jax.tree.map(lambda x: gain * x, params["loss"])}
        scaled = {k: jax.tree.map(lambda x: scale * x, v) for k, v in params.items() if k != "loss"}
        return embedding_loss(published, zero, tokens_BT), embedding_loss(
            default, scaled, tokens_BT
        )

    for gain, scale in ((1.0, 1.0), (0.0, 1e-2), (0.0, 1e2)):
        with_gains, without = run(params, gain, scale)
        assert with_gains == 0.0 if gain == 0.0 else with_gains > 0.1
        assert without > 0.1


# ---- scanning, decoding, evaluation, costs -----------------------------------------------------


def test_a_routed_decoder_block_caches_all_tokens_of_the_encoder():
    """Keys and values of cross-attention; of self-attention those of the tokens it computes."""
    size, per_token = 20, 2 * 4 * 32  # bytes of a key and a value in float32
    model = make({**ROUTED, "cross_source": "same_layer", "depth_routing.capacity": 0.3})
    slots = 9  # ceil(0.3 * 1.5 * 20)
    # Two layers: self-attention of both blocks, and cross-attention.
    assert families.cache_bytes(model, size) == 2 * per_token * (2 * slots + size)


def test_realised_flops_follow_the_routed_share():
    """Keys and values are computed for all tokens."""
    plain = {"cross_source": "previous_layer", "depth": 2}
    model = make({**ROUTED, **plain, "depth_routing.kv_for_skipped": True})
    none, whole = (
        model.ledger(16, shares={path: (x, x) for path in model.blocks()}).nominal
        for x in (0.0, 1.0)
    )
    dense = make(plain).ledger(16).nominal
    assert whole == pytest.approx({**dense, "router": 3 * 2 * 16 * 32})
    keys = 5 * 2 * 16 * 32 * 2 * 32  # one encoder block, two decoder blocks with two attentions
    assert none["attention_projections"] == keys and none["mlp"] == none["attention_scores"] == 0


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"cross_heads": 5}, "config.model.cross_heads=5"),
        ({"depth": 1, "encoder_depth": 2}, "config.model.encoder_depth=2"),
        ({"positions": "rope", "cross_heads": 32}, "config.model.cross_heads=32"),
        ({"positions": "rope", "decoder_input_positions": True}, "decoder_input_positions=True"),
        ({"positions": "rope", "output_positions": "subtract"}, "output_positions='subtract'"),
        ({"depth_routing.kind": "recursion", "depth": 4}, "depth_routing.kind='recursion'"),
        ({**ROUTED, "depth": 4, "depth_routing.blocks": (2, 7)}, "depth_routing.blocks=(2, 7)"),
        ({"soft_experts.num": 2, "mlp.kind": "moe"}, "soft_experts"),
        ({"dense_former.on": True, "scan_layers": True}, "config.model.dense_former.on=True"),
        ({"scan_layers": True, "cross_source": "final"}, "config.model.scan_layers=True"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: make(changes), name)


def test_blocks_are_numbered_through_both_streams():
    """`every` counts in each stream; `blocks` and capacities go through both, encoder first."""

    def routed(**changes):
        changes = {f"depth_routing.{key}": value for key, value in changes.items()}
        model = make({"depth_routing.kind": "mod", "depth": 4, **changes})  # 3 encoder blocks
        specs = model.blocks().items()
        return {path: spec.capacity for path, spec in specs if spec.routing is not None}

    assert routed(capacity=(0.1, 0.2, 0.3)) == {
        "layers/block_1/encoder_0": 0.1,
        "layers/block_1/decoder": 0.2,
        "last/block_0/decoder": 0.3,
    }
    assert routed(blocks=(3, 6), capacity=(0.5, 0.25)) == {
        "layers/block_0/decoder": 0.5,
        "last/block_0/decoder": 0.25,
    }


def test_new_models():
    """Residual outputs start smaller by the square root of how many their stream adds up, and
    averages of earlier states as the last state alone."""
    model = make({"depth": 2, "dense_former.on": True, "init_std": 0.1})
    params = families.initial(model, 3)["params"]
    encoder, decoder = blocks_of(params)
    for block, added in [*((p, 2 * 1) for p, _ in encoder), *((p, 3 * 2) for p, _ in decoder)]:
        kernels = [block[part]["out"] for part in ("attention", "cross_attention") if part in block]
        for out in (*kernels, block["mlp"]["down"]):
            assert np.std(out["kernel"]) == pytest.approx(0.1 / added**0.5, rel=0.1)
    # The streams count by themselves.
    weights = [average["alpha"] for blocks in (encoder, decoder) for _, average in blocks]
    assert [alpha.tolist() for alpha in weights] == [[0, 1], [0, 1], [0, 0, 1]]


def test_rotary_positions_have_no_table_and_no_end():
    """Nor a default that needs one; longer texts than in training have logits."""
    model = make({"positions": "rope"}, context=8)
    assert model.config.output_positions == "none"
    assert make({}).config.output_positions == "subtract"
    params = families.random_params(model)
    assert "positions_embed" not in params
    logits = jax.eval_shape(model.apply, {"params": params}, families.tokens(batch=1))
    assert logits.shape == (1, LENGTH, VOCAB)


@pytest.mark.slow
def test_the_published_model_with_its_masks_is_a_variant(root, monkeypatch):
    """Two streams, learned dropout at every site of both and the weights of both penalties."""
    monkeypatch.chdir(root)
    config = load_config("configs/encoder_decoder.py:seed")
    assert config.losses["dropout_entropy"] == config.losses["dropout_l1"] == 1.0
    assert config.model.dropout.kind == "elementwise"
    options = dict(vocab_size=50257, context=config.data.seq_len, dtype="float32")
    model = models.build(config.model, **options)
    c, params = model.config, models.unboxed_shapes(model)["params"]
    assert (c.width, c.depth, c.cross_heads, c.context) == (150, 13, 10, 200)
    sizes = {path: leaf.size for path, leaf in optim.param_paths(params).items()}
    unmasked = sum(size for path, size in sizes.items() if "mask_" not in path)
    assert round(unmasked / 1e6, 1) == 15.8
    # Every attention masks its probabilities and its output, every MLP its output.
    masks = [path for path in sizes if path.endswith("mask_phase")]
    assert len(masks) == 1 + 3 * c.encoder_blocks + 5 * c.depth
