"""The parallel encoder-decoder: its formulas, its losses, and streams that run at once."""

import itertools
import math

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import LENGTH, VOCAB
from refusals import refused

from efx import losses, models, optim
from efx.config import load_config
from efx.configs import common
from efx.step import by_layer, make_eval_step

STREAMS = {"family": "encoder_decoder", "mlp.hidden": 48}


def make(changes, **options):
    return families.make({**STREAMS, **changes}, **options)


# ---- the forward pass, once more in numpy ------------------------------------------------------


def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p.get("bias", 0)


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def turned(x_TNH, places_T, theta):
    """Rotary positions: element i of the first half turns with element i of the second."""
    half = x_TNH.shape[-1] // 2
    angle_TI = places_T[:, None] * theta ** (-np.arange(half) / half)
    z_TNI = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * np.exp(1j * angle_TI)[:, None]
    return np.concatenate([z_TNI.real, z_TNI.imag], axis=-1)


def attention(q_TD, kv_SD, p, c, heads, kv_heads, q_at=None, k_at=None):
    """Causal: a query at place t sees keys at places <= t, of one sequence."""
    q_at = np.arange(len(q_TD)) if q_at is None else q_at
    k_at = np.arange(len(kv_SD)) if k_at is None else k_at
    width = q_TD.shape[1] // heads
    q = linear(q_TD, p["query"]).reshape(len(q_TD), heads, width)
    k, v = (linear(kv_SD, p[n]).reshape(len(kv_SD), kv_heads, width) for n in ("key", "value"))
    if c["positions"] == "rope":
        theta = c["attention"]["rope_theta"]
        q, k = turned(q, q_at, theta), turned(k, k_at, theta)
    out = np.zeros_like(q)
    for h, t in itertools.product(range(heads), range(len(q))):
        seen, kv = k_at <= q_at[t], h // (heads // kv_heads)
        scores = k[seen, kv] @ q[t, h] / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[seen, kv] / weights.sum()
    return linear(out.reshape(q_TD.shape), p["out"])


def mlp(x, p):
    h = linear(x, p["up"])
    return linear(h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2, p["down"])


def heads_of(c, cross):
    """(heads, of keys and values)."""
    own = c["attention"]["num_heads"]
    if not cross:
        return own, c["attention"]["num_kv_heads"] or own
    heads = c["cross_heads"] or own
    return heads, c["cross_kv_heads"] or heads


def channels(x_TD, read_SD, p, c, cross, **at):
    """Soft experts: of each channel attention and MLP, merged by a softmax over channels."""
    num = c["soft_experts"]["num"]
    n_TD, m_SD = norm(x_TD, p["norm_attention"]), read_SD
    m_SD = norm(read_SD, p["norm_encoder" if cross else "norm_attention"])
    deltas = []
    for i in range(num):
        part = {
            name: {"kernel": np.split(p["attention"][name]["kernel"], num, axis=1)[i]}
            for name in ("query", "key", "value")
        }
        part["out"] = {"kernel": p["attention"]["out"]["kernel"][i]}
        a_TD = attention(n_TD, m_SD, part, c, *heads_of(c, cross), **at)
        h_TD = norm(x_TD + a_TD, p["norm_mlp"])
        expert = jax.tree.map(lambda kernel, i=i: kernel[i], p["mlp"]["experts"])
        z_TF = mlp(h_TD, expert) + mlp(h_TD, p["mlp"]["shared"])
        deltas.append(a_TD + linear(z_TF, p["mlp"]["out"]))
    weights = np.exp(deltas) / np.exp(deltas).sum(0)
    return (weights * np.stack(deltas)).sum(0)


def self_attention(x_TD, all_SD, p, c, **at):
    return attention(
        norm(x_TD, p["norm_attention"]),
        norm(all_SD, p["norm_attention"]),
        p["attention"],
        c,
        *heads_of(c, False),
        **at,
    )


def encoder_block(x_TD, all_SD, p, c, **at):
    """The increment of the tokens x at positions q_at, which attend to those at k_at."""
    if "shared" in p["mlp"]:
        return channels(x_TD, all_SD, p, c, False, **at)
    a_TD = self_attention(x_TD, all_SD, p, c, **at)
    return a_TD + mlp(norm(x_TD + a_TD, p["norm_mlp"]), p["mlp"])


def decoder_block(x_TD, all_SD, p, c, e_TD, **at):
    """The same; cross-attention reads all of e."""
    delta_TD = np.zeros_like(x_TD)
    order = {"self_first": "sc", "cross_first": "cs", "cross_only": "c"}[c["order"]]
    for i, sublayer in enumerate(order):
        d_TD, q_at = x_TD + delta_TD, at["q_at"]
        if "soft" in p and i == len(order) - 1:
            cross = sublayer == "c"
            read_SD = e_TD if cross else d_TD
            soft_at = dict(q_at=q_at) if cross else at
            return delta_TD + channels(d_TD, read_SD, p["soft"], c, cross, **soft_at)
        if sublayer == "s":
            # Keys of computed tokens are of their state here, those of the others of the block's
            # input.
            read_SD = all_SD.copy()
            read_SD[np.isin(at["k_at"], q_at)] = d_TD
            delta_TD = delta_TD + self_attention(d_TD, read_SD, p, c, **at)
        else:
            q_TD, kv_SD = norm(d_TD, p["norm_cross"]), norm(e_TD, p["norm_encoder"])
            heads = heads_of(c, True)
            y_TD = attention(q_TD, kv_SD, p["cross_attention"], c, *heads, q_at=q_at)
            delta_TD = delta_TD + y_TD
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
SOFT = {"soft_experts.num": 3, "soft_experts.shared": 1, "soft_experts.hidden_multiple": 1.0}
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
        case("previous_layer", 0, (0,), slow=True),
        case("final", 0, (2, 2), "cross_first", slow=True, cross_heads=8, cross_kv_heads=1),
        case("final embedding", 1, (1, 1), "cross_only", decoder_input_norm=True),
        # parts of the decoder family in both streams
        case("previous_layer", 0, (0, 1), **ROPE, **{"attention.no_rope_every": 2}),
        case("previous_layer", 4, (0, 2, 4), **AVERAGES),
        case("final", 4, (4, 4, 4), slow=True, **AVERAGES),
        case("previous_layer", 0, (0, 1, 2), slow=True, **SOFT),
        case("same_layer", 0, (1, 2), "cross_first", **SOFT),
        case("final", 0, (3, 3, 3), "cross_only", slow=True, cross_heads=8, **SOFT),
        case("previous_layer", 0, (0, 1, 2), slow=True, **ROUTED),
        case("same_layer", 0, (1, 2, 3), "cross_first", **ROUTED, **ROPE),
        case("same_layer", 0, (1, 2, 3), "cross_first", **ROUTED,
             **{"depth_routing.kv_for_skipped": True}),
        case("final", 0, (2, 2), "cross_only", **ROUTED, **SOFT),
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


def test_full_capacity_and_gate_one_is_the_dense_model():
    """With top-k selection; self-attention comes second and reads all tokens."""
    changes = {"depth": 2, "cross_source": "same_layer", "order": "cross_first"}
    routing = {"depth_routing.capacity": 1.0, "depth_routing.gate": "one"}
    routing["depth_routing.kv_for_skipped"] = True
    routed = make({**changes, **ROUTED, **routing}).clone(selection="train")
    params = families.random_params(routed)

    @families.jit
    def both(params):
        dense = make(changes).apply({"params": without_routers(params)}, tokens_BT)
        return dense, routed.apply({"params": params}, tokens_BT)

    tokens_BT = families.tokens(batch=2, length=8)
    dense, result = both(params)
    np.testing.assert_allclose(result, dense, rtol=0, atol=1e-4)


def without_routers(tree):
    inner = {name: leaf for name, leaf in tree.items() if name != "router"}
    return {k: without_routers(v) if isinstance(v, dict) else v for k, v in inner.items()}


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


@pytest.mark.slow
def test_the_published_loss_collapses_and_the_default_does_not():
    """Trained with the cross-entropy, on text that has an order."""
    first_B1 = np.random.default_rng(0).integers(0, VOCAB, (8, 1))
    tokens_BT = np.int32((first_B1 + 7 * np.arange(LENGTH)) % VOCAB)
    optimizer = optax.adam(2e-2)

    def trained(gains, params, steps=150):
        """(the loss by step, parameters at the end)"""
        model = make({**changes, "embedding_loss_gains": gains})

        def objective(params):
            logits, state = model.apply({"params": params}, tokens_BT, mutable=["losses"])
            targets_BT, weights = jnp.roll(tokens_BT, -1, axis=1), jnp.ones(tokens_BT.shape)
            sums = losses.cross_entropy(logits[:, :-1], targets_BT[:, :-1], weights[:, :-1])
            extra = losses.collect_sown(state["losses"])["embedding"]
            return sums.total / sums.weights + extra, extra

        def step(carry, _):
            params, state = carry
            (_, extra), grads = jax.value_and_grad(objective, has_aux=True)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), extra

        @families.jit
        def run(params):
            (params, _), values = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
            return values, params

        return jax.device_get(run(params))

    changes = {"cross_source": "previous_layer", "init_std": 0.1}
    params = dict(families.initial(make({**changes, "embedding_loss_gains": True}))["params"])
    values, after = trained(True, params)
    assert values[0] > 0.1 and values[-1] < 1e-3
    assert np.abs(after["loss"]["norm_embedding"]["scale"]).max() < 0.3
    del params["loss"]  # the default has none
    values, _ = trained(False, params)
    assert values[0] > 0.5 and min(values) > 0.1


# ---- scanning, decoding, evaluation, costs -----------------------------------------------------


@pytest.mark.slow
def test_state_of_the_last_block_alone_unrolls():
    """Of a scanned stack; no layer of the stack has a threshold, the last block has one."""
    routing = {"kind": "mod", "blocks": (4,), "causal": "threshold"}
    model = make(
        {
            "depth": 3,
            "cross_source": "previous_layer",
            "scan_layers": True,
            **{f"depth_routing.{key}": value for key, value in routing.items()},
        }
    )
    variables = {"params": families.random_params(model), **families.random_state(model)}
    unrolled = models.unroll_variables(model, variables)
    assert "layers" not in unrolled["state"] and "layers" in unrolled["params"]
    tokens_BT = families.tokens(batch=2, length=8)

    @families.jit
    def both(variables, unrolled):
        return models.unrolled(model).apply(unrolled, tokens_BT), model.apply(variables, tokens_BT)

    np.testing.assert_allclose(*both(variables, unrolled), atol=1e-5)


def test_a_routed_decoder_block_caches_all_tokens_of_the_encoder():
    """Keys and values of cross-attention; of self-attention those of the tokens it computes."""
    size, per_token = 20, 2 * 4 * 32  # bytes of a key and a value in float32
    model = make({**ROUTED, "cross_source": "same_layer", "depth_routing.capacity": 0.3})
    slots = 9  # ceil(0.3 * 1.5 * 20)
    # Two layers: self-attention of both blocks, and cross-attention.
    assert families.cache_bytes(model, size) == 2 * per_token * (2 * slots + size)


def ledgers(changes):
    """Nominal FLOPs of 16 tokens if routed blocks compute none of them, and if they compute all."""
    model = make({**ROUTED, "cross_source": "previous_layer", "depth": 2, **changes})
    return [
        model.ledger(16, shares={path: (x, x) for path in model.blocks()}).nominal
        for x in (0.0, 1.0)
    ]


def test_realised_flops_follow_the_routed_share():
    """Keys and values of cross-attention, and their adapters, are computed for all tokens."""
    none, whole = ledgers({"depth_routing.kv_for_skipped": True})
    dense = make({"cross_source": "previous_layer", "depth": 2}).ledger(16).nominal
    assert whole == pytest.approx({**dense, "router": 3 * 2 * 16 * 32})
    keys = 5 * 2 * 16 * 32 * 2 * 32  # one encoder block, two decoder blocks with two attentions
    assert none["attention_projections"] == keys and none["mlp"] == none["attention_scores"] == 0
    none, whole = ledgers({"adapter.kind": "lora", "adapter.rank": 2, "adapter.sites": ".*/key"})
    one = 2 * 16 * 2 * (32 + 32)
    assert (none["adapters"], whole["adapters"]) == (2 * one, 5 * one)


@pytest.mark.slow
def test_evaluation_reports_experts_of_the_last_layer_alone():
    """The stack itself has none."""
    model = make({"mlp.kind": "moe", "mlp.moe.every": 2})
    params, tokens_BT = families.random_params(model), families.tokens()
    batch = {"inputs": tokens_BT, "targets": tokens_BT, "weights": np.ones(tokens_BT.shape)}
    result = families.jit(make_eval_step(model, common.base()))(params, {}, batch, 0, 0)
    assert "moe/dropped_fraction" in by_layer(result["stats"], model)
    assert np.isfinite(result["loss"])


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"cross_heads": 5}, "config.model.cross_heads=5"),
        ({"cross_kv_heads": 3}, "config.model.cross_kv_heads=3"),
        ({"depth": 1, "encoder_depth": 2}, "config.model.encoder_depth=2"),
        ({"positions": "rope", "cross_heads": 32}, "config.model.cross_heads=32"),
        ({"positions": "rope", "decoder_input_positions": True}, "decoder_input_positions=True"),
        ({"positions": "rope", "output_positions": "subtract"}, "output_positions='subtract'"),
        ({"depth_routing.kind": "recursion", "depth": 4}, "depth_routing.kind='recursion'"),
        ({**ROUTED, "depth": 4, "depth_routing.every": 5}, "depth_routing.every=5"),
        ({**ROUTED, "depth": 4, "depth_routing.blocks": (2, 7)}, "depth_routing.blocks=(2, 7)"),
        ({"soft_experts.num": 2, "mlp.kind": "moe"}, "soft_experts"),
        ({"dense_former.on": True, "scan_layers": True}, "config.model.dense_former.on=True"),
        ({"scan_layers": True, "cross_source": "final"}, "config.model.scan_layers=True"),
        ({"scan_layers": True, "depth": 4, "encoder_depth": 4}, "config.model.scan_layers=True"),
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
    assert routed(blocks=(0, 2), capacity=0.5) == {
        "layers/block_0/encoder_0": 0.5,
        "layers/block_2/encoder_0": 0.5,
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


def test_dropout_is_on_in_training_only():
    """At each site alone, of a decoder block without self-attention."""
    tokens_BT = families.tokens(batch=1, length=8)

    def dropping(*sites):
        dropout = {"dropout.kind": "standard", "dropout.rate": 0.5, "dropout.sites": sites}
        return make({**(dropout if sites else {}), "order": "cross_only", "depth": 1})

    @families.jit
    def run(params, key):
        variables = {"params": params}
        noisy = [
            dropping(site).apply(variables, tokens_BT, train=True, rngs={"dropout": key})
            for site in families.ALL_SITES
        ]
        off = dropping(*families.ALL_SITES).apply(variables, tokens_BT)
        return dropping().apply(variables, tokens_BT), off, noisy

    params = families.random_params(dropping())
    plain, off, noisy = jax.device_get(run(params, jax.random.key(0)))
    np.testing.assert_allclose(off, plain, atol=1e-5)
    for site, logits in zip(families.ALL_SITES, noisy, strict=True):
        assert np.abs(logits - plain).max() > 0.1, site


@pytest.mark.slow
def test_the_published_model_with_its_masks_is_a_variant(root, monkeypatch):
    """Two streams, learned dropout at every site of both and the weights of both penalties."""
    monkeypatch.chdir(root)

    def build(names, vocab_size):
        config = load_config(f"configs/encoder_decoder.py:{names}")
        assert config.losses["dropout_entropy"] == config.losses["dropout_l1"] == 1.0
        assert config.model.dropout.kind == "elementwise"
        context = config.data.seq_len
        model = models.build(config.model, vocab_size=vocab_size, context=context, dtype="float32")
        shapes = optim.param_paths(models.unboxed_shapes(model)["params"])
        return model.config, {path: leaf.size for path, leaf in shapes.items()}

    c, sizes = build("seed", 50257)
    assert (c.width, c.depth, c.cross_heads, c.context) == (150, 13, 10, 200)
    unmasked = sum(size for path, size in sizes.items() if "mask_" not in path)
    assert round(unmasked / 1e6, 1) == 15.8
    c, sizes = build("masks,smoke", 300)
    masks = [path for path in sizes if path.endswith("mask_phase")]
    # Every attention masks its probabilities and its output, every MLP its output.
    assert len(masks) == 1 + 3 * c.encoder_blocks + 5 * c.depth
