"""The parallel encoder-decoder: its formulas, its losses, and streams that really run at once."""

import functools
import itertools
import math
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import BATCH, LENGTH, VOCAB
from flax import linen as nn
from test_controls import Held

from efx import build, losses, models, optim, sharding
from efx.config import load_config
from efx.configs import common
from efx.errors import UsageError
from efx.evaluate import Evaluator
from efx.models.encoder_decoder.streams import EmbeddingLoss, distance, running_mean
from efx.sample import Sampler
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
    """The increment of the tokens x, at places q_at, whose keys are of those at k_at."""
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
            # Keys of the computed tokens are of what they are here, those of the others of what
            # enters the block.
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
    """The state after a block, of which the causal decision routes a share of the tokens."""
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
    for p, average in encoder:
        plain.append(through(states[-1], p, config, encoder_block))
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
    for (p, average), read in zip(decoder, reads, strict=True):
        plain.append(through(d, p, config, decoder_block, states[read]))
        d = averaged(plain, average)
    x = norm(d, params["norm_final"])
    subtracted = config["output_positions"] or ("subtract" if learned else "none")
    if subtracted != "none":
        x = x - positions[1 : length + 1]
    if subtracted == "subtract_norm":
        x = norm(x, params["norm_output"])
    return (x @ table.T)[:, :VOCAB], states


READS = [  # encoder blocks, decoder blocks, the number of the state that each of these reads
    ("same_layer", 0, 3, (1, 2, 3)),
    ("same_layer", 2, 3, (1, 2, 2)),
    ("same_layer", 3, 2, (2, 3)),
    ("previous_layer", 0, 3, (0, 1, 2)),
    ("previous_layer", 4, 3, (0, 2, 4)),
    ("previous_layer", 2, 4, (0, 0, 1, 2)),
    ("previous_layer", 0, 1, (0,)),
    ("final", 0, 2, (2, 2)),
    ("final embedding", 1, 2, (1, 1)),
    ("final", 3, 2, (3, 3)),
]
OPTIONS = [
    {"order": "self_first", "use_bias": True, "output_positions": "subtract"},
    {"order": "cross_first", "decoder_input_positions": True, "cross_heads": 8},
    {"order": "cross_only", "output_positions": "none", "decoder_input_norm": True},
    {
        "order": "cross_first",
        "output_positions": "subtract_norm",
        "decoder_input_norm": True,
        "use_bias": True,
    },
]


def check_forward(changes, reads, seed=0):
    """The model is the formulas above."""
    model = make(changes)
    assert model.config.reads == reads
    params = families.random_params(model, seed)
    tokens_BT = families.tokens(batch=2, length=10)
    logits_BTV = families.jit(model.apply)({"params": params}, tokens_BT)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    config = families.model_config({**STREAMS, **changes}).to_dict()
    for b in range(2):
        expected_TV, states = reference(np.asarray(tokens_BT[b]), wide, config, reads)
        assert max(reads) == len(states) - 1, "a block of the encoder is read by nothing"
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)


@pytest.mark.parametrize("case", range(len(READS)))
def test_forward_is_the_formulas(case):
    """All sources, orders and ends, with equal and with unequal depths."""
    source, encoder_depth, depth, reads = READS[case]
    source, _, start = source.partition(" ")
    changes = {
        "cross_source": source,
        "encoder_depth": encoder_depth,
        "depth": depth,
        "serial_start": start or "encoder",
        **OPTIONS[case % len(OPTIONS)],
    }
    check_forward(changes, reads, case)


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


@pytest.mark.parametrize(
    "changes",
    [
        {**ROPE, "cross_source": "previous_layer"},
        {"cross_heads": 8, "cross_kv_heads": 1, "cross_source": "same_layer"},
        {**AVERAGES, "cross_source": "previous_layer", "encoder_depth": 5},
        {**AVERAGES, "cross_source": "same_layer", "encoder_depth": 2},
        {**AVERAGES, "cross_source": "final", "encoder_depth": 4},
        {**SOFT, "cross_source": "previous_layer", "order": "self_first"},
        {**SOFT, "cross_source": "same_layer", "order": "cross_first"},
        {**SOFT, "cross_source": "final", "order": "cross_only", "cross_heads": 8},
        {**ROUTED, "cross_source": "previous_layer", "order": "self_first"},
        {**ROUTED, **ROPE, "cross_source": "same_layer", "order": "cross_first"},
        {
            **ROUTED,
            "cross_source": "same_layer",
            "order": "cross_first",
            "depth_routing.kv_for_skipped": True,
        },
        {**ROUTED, **SOFT, "cross_source": "final", "order": "cross_only", "depth": 2},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_parts_of_the_decoder_family_are_the_formulas(changes):
    """Rotary positions, fewer keys, averages, soft experts and routing, in both streams."""
    changes = {"depth": 3, **changes}
    check_forward(changes, make(changes).config.reads, seed=1)


@pytest.mark.parametrize("kv_for_skipped", [False, True])
@pytest.mark.parametrize("order", ["self_first", "cross_first"])
def test_full_capacity_and_gate_one_is_the_dense_model(order, kv_for_skipped):
    """Whatever self-attention comes after, keys of a computed token are of the same state."""
    changes = {"depth": 2, "cross_source": "same_layer", "order": order}
    routed = make(
        {
            **changes,
            "depth_routing.kind": "mod",
            "depth_routing.every": 1,
            "depth_routing.capacity": 1.0,
            "depth_routing.gate": "one",
            "depth_routing.kv_for_skipped": kv_for_skipped,
        }
    ).clone(selection="train")
    params, tokens_BT = families.random_params(routed), families.tokens(batch=2)
    dense = families.jit(make(changes).apply)({"params": without_routers(params)}, tokens_BT)
    result = families.jit(routed.apply)({"params": params}, tokens_BT)
    np.testing.assert_allclose(result, dense, rtol=0, atol=1e-4)


def without_routers(tree):
    """The parameters of the same model whose blocks compute all tokens."""
    inner = {name: leaf for name, leaf in tree.items() if name != "router"}
    return {k: without_routers(v) if isinstance(v, dict) else v for k, v in inner.items()}


def test_orders_and_sources_differ():
    """The comparison above could tell them apart: same parameters, other logits."""
    base = make({"cross_source": "same_layer", "depth": 2})
    params, tokens_BT = families.random_params(base), families.tokens(batch=1)
    encoder, decoder = blocks_of(params)
    alone = [{"encoder_0": p} for p, _ in encoder] + [{"decoder": p} for p, _ in decoder]
    final = {**params, "layers": {f"block_{i}": layer for i, layer in enumerate(alone)}}
    results = [
        families.jit(models.changed(base, **changes).apply)({"params": given}, tokens_BT)
        for changes, given in (
            ({}, params),
            ({"order": "cross_first"}, params),
            ({"output_positions": "none", "decoder_input_positions": True}, params),
            ({"cross_source": "final"}, final),
            ({"cross_source": "final", "serial_start": "embedding"}, final),
        )
    ]
    for a, b in itertools.combinations(results, 2):
        assert np.abs(a - b).max() > 0.1


# ---- the streams of a layer --------------------------------------------------------------------


@functools.cache
def program(source, mesh):
    """The compiled forward pass on eight devices, as text."""
    model = make({"cross_source": source, "depth": 4, "encoder_depth": 3})
    sizes = {"data": dict(data=8), "fsdp": dict(fsdp=8)}[mesh]
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | sizes)
    rules = sharding.check_rules(sharding.DEFAULT_RULES)
    boxed = models.variable_shapes(model)["params"]
    shapes = nn.unbox(boxed), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    placed = sharding.tree_shardings(boxed, mesh, rules), sharding.batch_sharding(mesh, rules)
    forward = families.jit(lambda p, t: model.apply({"params": p}, t), in_shardings=placed)
    with sharding.use(mesh, rules):
        return forward.lower(*shapes).compile().as_text()


def instructions(text):
    """{instruction of the entry: (what it reads, the scopes of all that it computes)} of HLO."""
    computations, name = {}, None
    for line in text.splitlines():
        if line.endswith("{") and "=" not in line.split("(")[0]:
            name = "ENTRY" if line.startswith("ENTRY") else re.match(r"%?([\w.\-]+)", line)[1]
            computations[name] = []
        elif name and " = " in line:
            computations[name].append(line)

    def scopes(line):
        found = set(re.findall(r'op_name="([^"]*)"', line))
        for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
            found.update(*(scopes(inner) for inner in computations[called]))
        return found

    nodes = {}
    for line in computations["ENTRY"]:
        left, right = line.split(" = ", 1)
        read = [used for used in re.findall(r"%([\w.\-]+)", right) if used in nodes]
        nodes[left.split()[-1].lstrip("%")] = read, scopes(line)
    return nodes


def depends(text, reader, read):
    """Whether a matrix product in scope `reader` needs, by whatever way, one in scope `read`.

    Of products only, since the compiler computes once what both streams make of a layer's input:
    the norm of e without its gain, the causal mask.
    """
    needs, products = {}, [0, 0]
    for name, (operands, scopes) in instructions(text).items():  # operands come first
        scopes = [scope for scope in scopes if scope.endswith("dot_general")]
        own, reads = (any(f"/{part}/" in scope for scope in scopes) for part in (read, reader))
        needs[name] = any(needs[operand] for operand in operands)
        if reads and needs[name]:
            return True
        needs[name] |= own
        products[0] += own
        products[1] += reads
    assert min(products) >= 6, f"nothing is called {reader} or {read} in this program"
    return False


@pytest.mark.parametrize("mesh", ["data", "fsdp"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_streams_of_a_layer_are_independent_in_the_compiled_program(layer, mesh):
    encoder, decoder = f"layers/block_{layer}/encoder_0", f"layers/block_{layer}/decoder"
    parallel, same = program("previous_layer", mesh), program("same_layer", mesh)
    assert not depends(parallel, decoder, encoder)
    assert not depends(parallel, encoder, decoder)
    # The analysis sees the dependence where there is one.
    assert depends(same, decoder, encoder)
    after = f"layers/block_{layer + 1}" if layer < 2 else "last/block_0"
    assert depends(parallel, f"{after}/decoder", encoder)


# ---- the embedding losses ----------------------------------------------------------------------


def test_distances_by_hand():
    c = np.float32([[[3.0, 4.0], [1.0, 0.0], [1.0, 0.0], [2.0, 0.0]]])
    s = np.float32([[[3.0, 4.0], [0.0, 2.0], [-5.0, 0.0], [1.0, 1.0]]])
    near = [1.0, 0.5, 0.0, (1 + 0.5**0.5) / 2]
    kinds = ("mse", "cosine", "log_cosine")
    run = families.jit(lambda c, s: {kind: distance(kind, c, s)[0] for kind in kinds})
    got = run(c, s)
    np.testing.assert_allclose(got["mse"], [0.0, 2.5, 18.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(got["cosine"], [1 - n for n in near], atol=1e-6)
    np.testing.assert_allclose(
        got["log_cosine"], [-math.log(max(n, 1e-6)) for n in near], atol=1e-5
    )


@pytest.mark.parametrize("kind", ["mse", "cosine", "log_cosine"])
def test_distances_have_finite_gradients(kind):
    """At zero, at equal and at opposite vectors."""
    gradient = families.jit(jax.grad(functools.partial(distance, kind)))
    one = np.float32([2.0, 0.0, 0.0])  # of which the cosines are exact
    for c in (0 * one, one, -one):
        for s in (0 * one, one):
            assert np.isfinite(gradient(c, s)).all()


def test_running_mean_restarts_with_a_document():
    x_BTD = np.random.default_rng(0).normal(size=(2, 9, 3)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5, 5]])
    whole = np.asarray(families.jit(running_mean)(x_BTD))
    packed = np.asarray(families.jit(running_mean)(x_BTD, segments))
    for b, t in itertools.product(range(2), range(9)):
        np.testing.assert_allclose(whole[b, t], x_BTD[b, : t + 1].mean(0), atol=1e-6)
        mine = (segments[b] == segments[b, t]) & (np.arange(9) <= t)
        np.testing.assert_allclose(packed[b, t], x_BTD[b, mine].mean(0), atol=1e-6)


@functools.cache
def with_losses(model):
    return jax.jit(functools.partial(model.apply, mutable=["losses"]))  # gradients are taken of it


def sown(model, params, *arguments):
    state = with_losses(model)({"params": params}, *arguments)[1]
    return losses.collect_sown(state["losses"])["embedding"]


def test_state_of_the_last_block_alone_unrolls():
    """Of a scanned stack; without any in its layers the collection has none to unroll."""
    model = families.make(
        {
            "family": "encoder_decoder",
            "depth": 3,
            "cross_source": "previous_layer",
            "depth_routing.kind": "mod",
            "depth_routing.blocks": (4,),
            "depth_routing.causal": "threshold",
            "scan_layers": True,
        }
    )
    variables = {"params": families.random_params(model), "state": families.random_state(model)}
    variables["state"] = variables["state"].get("state", variables["state"])
    tokens_BT = families.tokens(batch=2, length=8)
    unrolled = models.unroll_variables(model, variables)
    assert "layers" not in unrolled["state"] and "layers" in unrolled["params"]
    np.testing.assert_allclose(
        families.jit(models.unrolled(model).apply)(unrolled, tokens_BT),
        families.jit(model.apply)(variables, tokens_BT),
        atol=1e-5,
    )


@pytest.mark.parametrize("source, gains", [("same_layer", False), ("previous_layer", True)])
def test_loss_by_hand(source, gains):
    """Against the states of the numpy forward; two documents and padding in a row."""
    changes = {"cross_source": source, "depth": 3, "embedding_loss_gains": gains}
    model = make(changes)
    params = families.random_params(model)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    config = families.model_config({**STREAMS, **changes}).to_dict()
    tokens_BT, terms = families.tokens(batch=1, length=12), []
    for start, stop in ((0, 6), (6, 10)):
        row_T = np.asarray(tokens_BT)[0, start:stop]
        states = reference(row_T, wide, config, model.config.reads)[1]
        ones = {"scale": np.ones(32)}
        a, b = (wide["loss"][n] if gains else ones for n in ("norm_embedding", "norm_encoder"))
        c, s = norm(states[0], a), norm(states[-1], b)
        c = np.cumsum(c, axis=0) / np.arange(1, stop - start + 1)[:, None]
        terms += list(np.mean((c - s) ** 2, axis=-1))
    positions = np.array([[*range(6), *range(4), 0, 0]])
    segments = np.array([[1] * 6 + [2] * 4 + [0] * 2])
    value = sown(model, params, tokens_BT, positions, segments)
    assert len(terms) == 10
    np.testing.assert_allclose(value, np.mean(terms), rtol=1e-4)


def test_gradients_stop_at_the_encoder():
    """The loss trains the embeddings; of the encoder's output it only reads the value."""
    model = make({"cross_source": "same_layer"})
    params = families.random_params(model)
    tokens_BT = families.tokens(batch=2)
    grads = jax.jit(jax.grad(lambda p: sown(model, p, tokens_BT)))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        trained = name.startswith(("embed", "positions_embed"))
        assert (np.abs(np.asarray(grad)).max() > 0) == trained, name


def test_published_loss_is_least_at_zero_gains():
    """Exactly 0 there, whatever text and parameters are; the default has no such parameters."""
    published, default = (make({"embedding_loss_gains": gains}) for gains in (True, False))
    params = jax.device_get(families.random_params(published))
    tokens_BT = families.tokens(batch=2)
    assert sown(published, params, tokens_BT) > 0.1
    zero = {**params, "loss": jax.tree.map(np.zeros_like, params["loss"])}
    assert sown(published, zero, tokens_BT) == 0.0
    shapes = models.variable_shapes(default)["params"]
    assert "loss" not in shapes
    # Small or large embeddings, or a small output, do not help either.
    del params["loss"]
    for scale in (1e-2, 1.0, 1e2):
        smaller = jax.tree.map(lambda x, scale=scale: np.float32(scale) * x, params)
        assert sown(default, smaller, tokens_BT) > 0.1, scale


def test_the_published_loss_collapses_and_the_default_does_not():
    """When it is trained with the cross-entropy, on text that has an order."""
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
    del params["loss"]  # which the default does not have
    values, _ = trained(False, params)
    assert values[0] > 0.5 and min(values) > 0.1


def test_one_scalar_whatever_the_kind():
    for kind in ("mse", "cosine", "log_cosine"):
        x_BTD = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        _, state = jax.eval_shape(
            EmbeddingLoss(kind, False, 1e-5).init_with_output, jax.random.key(0), x_BTD, x_BTD, None
        )
        assert state["losses"]["embedding"][0].shape == ()
    assert "losses" not in jax.eval_shape(
        lambda key: models.init(make({"embedding_loss": "none"}), key), jax.random.key(0)
    )


# ---- decoding ----------------------------------------------------------------------------------


def test_a_routed_decoder_block_keeps_what_all_tokens_of_the_encoder_are():
    """Keys and values of cross-attention; of self-attention those of the tokens it computes."""
    size = 20
    model = make({**ROUTED, "cross_source": "same_layer", "depth_routing.capacity": 0.3})
    params, tokens_BT = families.random_params(model), families.tokens(batch=2, length=9)
    cache = models.init_cache(model, 2, size)
    state = families.jit(
        lambda cache: model.apply(
            {"params": params, "cache": cache},
            tokens_BT,
            jnp.tile(jnp.arange(9), (2, 1)),
            decode=True,
            cache_size=size,
            mutable=["cache"],
        )
    )(cache)[1]["cache"]
    block = state["layers"]["block_1"]["decoder"]
    assert block["cross_attention"]["cached_key"].shape[-1] == size
    assert block["attention"]["cached_key"].shape[-1] == 9  # ceil(0.3 * 1.5 * 20)
    assert list(block["cross_attention"]["used"]) == [9, 9]
    assert list(block["attention"]["used"]) == list(block["routed"])
    assert 0 < block["routed"].max() < 9


PLACES = ("block_0/encoder_0", "block_0/decoder", "last/block_0/decoder")


def routed_model(**changes):
    return make({**ROUTED, "cross_source": "previous_layer", "depth": 2, **changes})


def test_evaluation_has_a_row_for_each_routed_block():
    """Also of the layer that lies after the stack; FLOPs by what each computed."""
    model = routed_model(**{"depth_routing.also_train": ("threshold",)})
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    changes = {"data.seq_len": LENGTH, "evaluate.batch_size": 2}
    config = common.apply(common.base("encoder_decoder"), changes)
    evaluator = Evaluator(model, config, Held(), mesh, sharding.DEFAULT_RULES)
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        rows = evaluator(families.random_params(model), families.random_state(model))
    for prefix in ("router", "threshold"):
        fractions = [rows[f"eval/{prefix}/routed_fraction/{place}"] for place in PLACES]
        assert all(0 <= fraction <= 0.7 for fraction in fractions)
        assert rows[f"eval/{prefix}/routed_fraction"] == pytest.approx(np.mean(fractions))
        assert f"eval/{prefix}/accuracy/{PLACES[-1]}" in rows
        cost = rows[f"eval/{prefix}/flops_per_token"]
        none, whole = (
            model.ledger(LENGTH, shares={path: (x, x) for path in model.blocks()})
            for x in (0.0, 1.0)
        )
        assert none.nominal_per_token < cost < whole.nominal_per_token
    assert {"eval/loss_topk", "eval/loss_threshold"} <= rows.keys()


def test_realised_flops_follow_what_was_routed():
    """A ledger told that routed blocks compute everything is that of the dense model; keys and
    values of cross-attention are computed for all tokens in any case."""
    model = routed_model(**{"depth_routing.kv_for_skipped": True})
    dense = routed_model(**{"depth_routing.kind": "none"}).ledger(16).nominal
    none, whole = (
        model.ledger(16, shares={path: (x, x) for path in model.blocks()}).nominal
        for x in (0.0, 1.0)
    )
    routers = 3 * 2 * 16 * 32
    assert whole == pytest.approx({**dense, "router": routers})
    keys = 5 * 2 * 16 * 32 * 2 * 32  # one encoder block, two decoder blocks with two attentions
    assert none["attention_projections"] == keys and none["mlp"] == none["attention_scores"] == 0


def test_adapters_of_what_all_tokens_pass_are_counted_so():
    """Of a routed block the adapters of cross-attention's keys see every token."""
    model = routed_model(**{"adapter.kind": "lora", "adapter.rank": 2, "adapter.sites": ".*/key"})
    none, whole = (
        model.ledger(16, shares={path: (x, x) for path in model.blocks()}).nominal["adapters"]
        for x in (0.0, 1.0)
    )
    one = 2 * 16 * 2 * (32 + 32)
    assert whole == 5 * one and none == 2 * one


def test_capacities_may_rise_and_fall_while_it_trains():
    model = routed_model(**{"depth_routing.capacity_stages": ((0.5, 1.0),)})
    (_, whole, most), (start, _, least) = build._capacity_stages(model, LENGTH)
    assert start == 0.5 and {spec.capacity for spec in whole.blocks().values()} == {1.0}
    assert least.nominal["mlp"] == 0.4 * most.nominal["mlp"] * 13 / 12.8  # ceil(0.4 * 32)


def test_a_sampler_takes_the_model():
    """Greedy, two rows: what the full forward likes best, token by token; each routed block is
    counted."""
    model = routed_model()
    params = families.random_params(model)
    sampler = Sampler(model, batch_size=2, temperature=0.0)
    prompts = [[3, 1, 4], [1]]
    (new, *_) = sampler.tokens({"params": params}, prompts, max_new_tokens=9, seeds=[0, 1])
    texts_BT = np.zeros((2, LENGTH), np.int32)
    for row, prompt, ids in zip(texts_BT, prompts, new, strict=True):
        assert len(ids) == 9
        row[: len(prompt) + 9] = [*prompt, *ids]
    best_BT = np.argmax(families.jit(model.apply)({"params": params}, texts_BT), axis=-1)
    for prompt, ids, best_T in zip(prompts, new, best_BT, strict=True):
        assert ids == best_T[len(prompt) - 1 :][:9].tolist()
    fractions = sampler.stats["routed_fraction_by_block"]
    assert fractions.keys() == set(PLACES)
    assert all(0 < fraction < 1 for fraction in fractions.values())


def test_evaluation_with_experts_in_the_last_layer_alone():
    """They report like those of the stack, though the stack itself has nothing to report."""
    model = make({"mlp.kind": "moe", "mlp.moe.every": 2})
    params, tokens_BT = families.random_params(model), families.tokens()
    config = common.base()
    batch = {"inputs": tokens_BT, "targets": tokens_BT, "weights": np.ones(tokens_BT.shape)}
    result = families.jit(make_eval_step(model, config))(params, {}, batch, 0, 0)
    assert "moe/dropped_fraction" in by_layer(result["stats"], model)
    assert np.isfinite(result["loss"])


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"encoder_depth": -1}, r"config\.model\.encoder_depth=-1: must be at least 0"),
        ({"cross_heads": 5}, r"width=32 is not divisible by config\.model\.cross_heads=5"),
        (
            {"attention.num_heads": 5, "cross_heads": 4},
            r"width=32 is not divisible by config\.model\.attention\.num_heads=5",
        ),
        ({"depth": 1, "encoder_depth": 2}, r"config\.model\.encoder_depth=2: .*set it to 0"),
        (
            {"cross_kv_heads": 3},
            r"cross_heads=4 is not divisible by config\.model\.cross_kv_heads=3",
        ),
        (
            {"positions": "rope", "cross_heads": 32},
            r"config\.model\.cross_heads=32: rope needs an even head width, not 32 / 32 = 1",
        ),
        (
            {"positions": "rope", "attention.head_dim": 5},
            r"config\.model\.attention\.head_dim=5: rope needs an even head width",
        ),
        (
            {"positions": "rope", "decoder_input_positions": True},
            r"decoder_input_positions=True: positions='rope' has no .*; set it to False, or",
        ),
        (
            {"positions": "rope", "output_positions": "subtract"},
            r"output_positions='subtract': positions='rope' has no .*; set it to 'none', or",
        ),
        (
            {"depth_routing.kind": "recursion", "depth": 4},
            r"config\.model\.depth_routing\.kind='recursion': not in the encoder-decoder, .*'mod'",
        ),
        (
            {"depth_routing.kind": "mod", "depth": 4, "depth_routing.every": 5},
            r"config\.model\.depth_routing\.every=5: the stack has 4 blocks",
        ),
        (
            {"depth_routing.kind": "mod", "depth": 4, "depth_routing.blocks": (2, 7)},
            r"depth_routing\.blocks=\(2, 7\): expected ascending .* between 0 and 6",
        ),
        (
            {"depth_routing.kind": "mod", "depth": 4, "depth_routing.capacity": (0.5, 0.2)},
            r"depth_routing\.capacity=\(0\.5, 0\.2\): expected one value, or one for each routed",
        ),
        ({"soft_experts.num": 2, "mlp.kind": "moe"}, r"block 0 would have both soft experts and"),
        (
            {"dense_former.on": True, "scan_layers": True},
            r"scan_layers=True: not with config\.model\.dense_former\.on=True",
        ),
        (
            {"scan_layers": True, "cross_source": "final"},
            r"scan_layers=True: the \d+ layers",
        ),
        (
            {"scan_layers": True, "depth": 4, "encoder_depth": 4},
            r"scan_layers=True: the \d+ layers do not repeat",
        ),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UsageError, match=message) as error:
        make(changes)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    "order, sublayers", [("self_first", 3), ("cross_first", 3), ("cross_only", 2)]
)
def test_residual_outputs_start_by_how_many_are_added_to_their_stream(order, sublayers):
    model = make({"depth": 4, "encoder_depth": 2, "order": order})
    added = {"encoder_0": 2 * 2, "encoder_1": 2 * 2, "decoder": sublayers * 4}
    for path, spec in model.blocks().items():
        expected = model.deviations.hidden / added[path.rpartition("/")[2]] ** 0.5
        assert spec.block.std_out == pytest.approx(expected), path


def test_a_block_without_rotary_positions_has_none_in_its_cross_attention():
    model = make({"depth": 4, "positions": "rope", "attention.no_rope_every": 2})
    decoders = [spec for path, spec in model.blocks().items() if path.endswith("decoder")]
    turned = [{kind.attention.rope_theta > 0 for kind in s.kinds.values()} for s in decoders]
    assert turned == [{True}, {False}] * 2


def test_rotary_positions_have_no_table_and_no_end():
    """Nor anything that needs one by default; longer texts than in training have logits."""
    model = make({"positions": "rope"}, context=8)
    assert model.config.output_positions == "none"
    assert make({}).config.output_positions == "subtract"
    params = families.random_params(model)
    assert "positions_embed" not in params
    logits_BTV = families.jit(model.apply)({"params": params}, families.tokens(batch=1))
    assert np.isfinite(logits_BTV).all()


@pytest.mark.parametrize("changes", [{}, {"cross_source": "final"}, {"depth_routing.kind": "mod"}])
def test_averages_are_the_plain_streams_at_first(changes):
    """Bit for bit, of the same blocks, which lie in layers of their own."""
    plain, dense = (make({"depth": 3, **changes, "dense_former.on": on}) for on in (False, True))
    params = families.initial(dense, 3)["params"]
    encoder, decoder = (iter(blocks) for blocks in blocks_of(params))
    sizes = [average["alpha"].size for blocks in blocks_of(params) for _, average in blocks]
    count = plain.config.encoder_blocks
    assert sizes == [*range(2, count + 2), 2, 3, 4]  # the streams count by themselves
    tree = {}
    for path in plain.blocks():
        stack, layer, part = path.split("/")
        block, _ = next(decoder if part == "decoder" else encoder)
        tree.setdefault(stack, {}).setdefault(layer, {})[part] = block
    alike = {**params, **tree}
    tokens_BT = families.tokens(batch=2)
    np.testing.assert_array_equal(
        families.jit(dense.apply)({"params": params}, tokens_BT),
        families.jit(plain.apply)({"params": alike}, tokens_BT),
    )


def test_dropout_is_on_in_training_only():
    """At every site; of a decoder block alone, so that its attention is cross-attention."""
    sites = ("embedding", "attention_probs", "attention_output", "mlp_output")

    def dropping(*sites):
        dropout = {"dropout.kind": "standard", "dropout.rate": 0.5, "dropout.sites": sites}
        return make({**(dropout if sites else {}), "order": "cross_only", "depth": 1})

    params, tokens_BT = families.random_params(dropping()), families.tokens(batch=1)
    expected, plain = (
        np.asarray(families.jit(model.apply)({"params": params}, tokens_BT))
        for model in (dropping(), dropping(*sites))
    )
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    for site in sites:
        train = families.jit(functools.partial(dropping(site).apply, train=True))
        noisy = train({"params": params}, tokens_BT, rngs={"dropout": jax.random.key(0)})
        assert np.abs(np.asarray(noisy) - expected).max() > 0.1, site


def shapes_of(model):
    """Of the parameters."""
    return models.unboxed_shapes(model)["params"]


def test_the_published_model_with_its_masks_is_a_variant(root, monkeypatch):
    """Two streams, learned dropout at every site of both and the weights of both penalties; also
    in small."""
    monkeypatch.chdir(root)

    def build(names, vocab_size):
        config = load_config(f"configs/encoder_decoder.py:{names}")
        assert config.losses["dropout_entropy"] == config.losses["dropout_l1"] == 1.0
        return models.build(
            config.model, vocab_size=vocab_size, context=config.data.seq_len, dtype="float32"
        )

    seed, small = build("seed", 50257), build("masks,smoke", 300)
    c = seed.config
    assert (c.width, c.depth, c.cross_heads, c.context) == (150, 13, 10, 200)
    sizes = {path: leaf.size for path, leaf in optim.param_paths(shapes_of(seed)).items()}
    unmasked = sum(size for path, size in sizes.items() if "mask_" not in path)
    assert round(unmasked / 1e6, 1) == 15.8
    assert seed.config.dropout.elementwise == small.config.dropout.elementwise
    assert seed.config.dropout.kind == small.config.dropout.kind == "elementwise"
    masks = [path for path in optim.param_paths(shapes_of(small)) if path.endswith("mask_phase")]
    # Every attention masks its probabilities and what it gives, every MLP what it gives.
    assert len(masks) == 1 + 3 * small.config.encoder_blocks + 5 * small.config.depth
