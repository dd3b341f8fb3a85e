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

from efx import flops, losses, models, optim, sharding
from efx.config import load_config
from efx.configs import common
from efx.errors import UsageError
from efx.models.encoder_decoder.streams import EmbeddingLoss, distance, running_mean
from efx.sample import Sampler
from efx.step import by_layer, init_state_params, make_eval_step

STREAMS = {"family": "encoder_decoder", "mlp.hidden": 48}


def make(changes, **options):
    return families.make({**STREAMS, **changes}, **options)


# ---- the forward pass, once more in numpy ------------------------------------------------------


def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p.get("bias", 0)


def linear(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def attention(q_TD, kv_TD, p, heads):
    """Causal, of one sequence: a query at t sees keys at <= t."""
    length, width = q_TD.shape
    q, k, v = (
        linear(x, p[n]).reshape(length, heads, -1)
        for x, n in ((q_TD, "query"), (kv_TD, "key"), (kv_TD, "value"))
    )
    out = np.zeros_like(q)
    for h, t in itertools.product(range(heads), range(length)):
        scores = k[: t + 1, h] @ q[t, h] / np.sqrt(width / heads)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[: t + 1, h] / weights.sum()
    return linear(out.reshape(length, width), p["out"])


def mlp(x, p):
    h = linear(x, p["up"])
    return linear(h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2, p["down"])


def encoder_block(e, p, heads):
    n = norm(e, p["norm_attention"])
    e = e + attention(n, n, p["attention"], heads)
    return e + mlp(norm(e, p["norm_mlp"]), p["mlp"])


def decoder_block(d, e, p, heads, cross_heads, order):
    for sublayer in {"self_first": "sc", "cross_first": "cs", "cross_only": "c"}[order]:
        if sublayer == "s":
            n = norm(d, p["norm_attention"])
            d = d + attention(n, n, p["attention"], heads)
        else:
            d = d + attention(
                norm(d, p["norm_cross"]),
                norm(e, p["norm_encoder"]),
                p["cross_attention"],
                cross_heads,
            )
    return d + mlp(norm(d, p["norm_mlp"]), p["mlp"])


def blocks_of(params):
    """(encoder blocks, decoder blocks) in order, wherever the layers put them."""
    layers = [params["layers"][f"block_{i}"] for i in range(len(params.get("layers", ())))]
    layers += [params["last"]["block_0"]] if "last" in params else []
    encoder = [
        layer[f"encoder_{i}"] for layer in layers for i in range(9) if f"encoder_{i}" in layer
    ]
    return encoder, [layer["decoder"] for layer in layers if "decoder" in layer]


def reference(tokens_T, params, config, reads):
    """Logits [T, V], and the encoder's states e_0 ... e_E."""
    positions = params["positions_embed"]["embedding"]
    table, length = params["embed"]["embedding"], len(tokens_T)
    states = [table[tokens_T] + positions[:length]]
    encoder, decoder = blocks_of(params)
    for p in encoder:
        states.append(encoder_block(states[-1], p, config["attention"]["num_heads"]))
    serial = config["cross_source"] == "final" and config["serial_start"] == "encoder"
    x = states[-1] if serial else states[0]
    if config["decoder_input_norm"]:
        x = norm(x, params["norm_input"])
    d = linear(x, params["decoder_input"])
    if config["decoder_input_positions"]:
        d = d + positions[1 : length + 1]
    assert len(decoder) == len(reads)
    for p, read in zip(decoder, reads, strict=True):
        d = decoder_block(
            d,
            states[read],
            p,
            config["attention"]["num_heads"],
            config["cross_heads"] or config["attention"]["num_heads"],
            config["order"],
        )
    x = norm(d, params["norm_final"])
    if config["output_positions"] != "none":
        x = x - positions[1 : length + 1]
    if config["output_positions"] == "subtract_norm":
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
    model = make(changes)
    assert model.config.reads == reads
    params = families.random_params(model, seed=case)
    tokens_BT = families.tokens(batch=2, length=10)
    logits_BTV = families.jit(model.apply)({"params": params}, tokens_BT)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    config = {**families.model_config({**STREAMS, **changes}).to_dict()}
    for b in range(2):
        expected_TV, states = reference(np.asarray(tokens_BT[b]), wide, config, reads)
        assert max(reads) == len(states) - 1, "a block of the encoder is read by nothing"
        np.testing.assert_allclose(logits_BTV[b], expected_TV, atol=2e-4)


def test_orders_and_sources_differ():
    """The comparison above could tell them apart: same parameters, other logits."""
    base = make({"cross_source": "same_layer", "depth": 2})
    params, tokens_BT = families.random_params(base), families.tokens(batch=1)
    encoder, decoder = blocks_of(params)
    alone = [{"encoder_0": p} for p in encoder] + [{"decoder": p} for p in decoder]
    final = {**params, "layers": {f"block_{i}": layer for i, layer in enumerate(alone)}}
    results = [
        models.changed(base, **changes).apply({"params": given}, tokens_BT)
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
    boxed = jax.eval_shape(lambda key: models.init(model, key)["params"], jax.random.key(0))
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
    c = jnp.array([[[3.0, 4.0], [1.0, 0.0], [1.0, 0.0], [2.0, 0.0]]])
    s = jnp.array([[[3.0, 4.0], [0.0, 2.0], [-5.0, 0.0], [1.0, 1.0]]])
    near = [1.0, 0.5, 0.0, (1 + 0.5**0.5) / 2]
    np.testing.assert_allclose(distance("mse", c, s)[0], [0.0, 2.5, 18.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(distance("cosine", c, s)[0], [1 - n for n in near], atol=1e-6)
    np.testing.assert_allclose(
        distance("log_cosine", c, s)[0], [-math.log(max(n, 1e-6)) for n in near], atol=1e-5
    )


@pytest.mark.parametrize("kind", ["mse", "cosine", "log_cosine"])
def test_distances_have_finite_gradients(kind):
    """At zero, at equal and at opposite vectors."""
    one = jnp.array([2.0, 0.0, 0.0])  # of which the cosines are exact
    for c in (0 * one, one, -one):
        for s in (0 * one, one):
            assert np.isfinite(jax.grad(lambda c, s=s: distance(kind, c, s))(c)).all()


def test_running_mean_restarts_with_a_document():
    x_BTD = np.random.default_rng(0).normal(size=(2, 9, 3)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5, 5]])
    whole, packed = running_mean(x_BTD), running_mean(x_BTD, jnp.asarray(segments))
    for b, t in itertools.product(range(2), range(9)):
        np.testing.assert_allclose(whole[b, t], x_BTD[b, : t + 1].mean(0), atol=1e-6)
        mine = (segments[b] == segments[b, t]) & (np.arange(9) <= t)
        np.testing.assert_allclose(packed[b, t], x_BTD[b, mine].mean(0), atol=1e-6)


def sown(model, params, *arguments):
    state = model.apply({"params": params}, *arguments, mutable=["losses"])[1]
    return losses.collect_sown(state["losses"])["embedding"]


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("source", ["same_layer", "previous_layer"])
def test_loss_by_hand(source, gains):
    """Against the states of the numpy forward; two documents and padding in a row."""
    changes = {"cross_source": source, "depth": 3, "embedding_loss_gains": gains}
    model = make(changes)
    params = families.random_params(model)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    config = families.model_config({**STREAMS, **changes}).to_dict()
    tokens_BT, terms = families.tokens(batch=1, length=12), []
    for start, stop in ((0, 6), (6, 10)):
        row_T = np.asarray(tokens_BT[0, start:stop])
        states = reference(row_T, wide, config, model.config.reads)[1]
        ones = {"scale": np.ones(32)}
        a, b = (wide["loss"][n] if gains else ones for n in ("norm_embedding", "norm_encoder"))
        c, s = norm(states[0], a), norm(states[-1], b)
        c = np.cumsum(c, axis=0) / np.arange(1, stop - start + 1)[:, None]
        terms += list(np.mean((c - s) ** 2, axis=-1))
    positions = jnp.asarray([[*range(6), *range(4), 0, 0]])
    segments = jnp.asarray([[1] * 6 + [2] * 4 + [0] * 2])
    value = sown(model, params, tokens_BT, positions, segments)
    assert len(terms) == 10
    np.testing.assert_allclose(value, np.mean(terms), rtol=1e-4)


def test_gradients_stop_at_the_encoder():
    """The loss trains the embeddings; of the encoder's output it only reads the value."""
    model = make({"cross_source": "same_layer"})
    params = families.random_params(model)
    grads = jax.grad(lambda p: sown(model, p, families.tokens(batch=2)))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        trained = name.startswith(("embed", "positions_embed"))
        assert (np.abs(grad).max() > 0) == trained, name


def test_published_loss_is_least_at_zero_gains():
    """Exactly 0 there, whatever text and parameters are; the default has no such parameters."""
    published, default = (make({"embedding_loss_gains": gains}) for gains in (True, False))
    params, tokens_BT = families.random_params(published), families.tokens(batch=2)
    assert sown(published, params, tokens_BT) > 0.1
    zero = {**params, "loss": jax.tree.map(jnp.zeros_like, params["loss"])}
    assert sown(published, zero, tokens_BT) == 0.0
    shapes = jax.eval_shape(lambda key: models.init(default, key)["params"], jax.random.key(0))
    assert "loss" not in shapes
    # Small or large embeddings, or a small output, do not help either.
    del params["loss"]
    for scale in (1e-2, 1.0, 1e2):
        smaller = jax.tree.map(lambda x, scale=scale: x * scale, params)
        assert sown(default, smaller, tokens_BT) > 0.1, scale


def trained(gains, steps=150):
    """The loss by step when it is trained with the cross-entropy, on text that has an order."""
    model = make({"embedding_loss_gains": gains, "cross_source": "previous_layer", "init_std": 0.1})
    params = nn.unbox(models.init(model, jax.random.key(0)))["params"]
    first_B1 = np.random.default_rng(0).integers(0, VOCAB, (8, 1))
    tokens_BT = jnp.asarray((first_B1 + 7 * np.arange(LENGTH)) % VOCAB, jnp.int32)
    optimizer = optax.adam(2e-2)

    def objective(params):
        logits, state = model.apply({"params": params}, tokens_BT, mutable=["losses"])
        targets_BT, weights = jnp.roll(tokens_BT, -1, axis=1), jnp.ones(tokens_BT.shape)
        sums = losses.cross_entropy(logits[:, :-1], targets_BT[:, :-1], weights[:, :-1])
        extra = losses.collect_sown(state["losses"])["embedding"]
        return sums.total / sums.weights + extra, extra

    @families.jit
    def step(carry, _):
        params, state = carry
        (_, extra), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), extra

    carry, values = (params, optimizer.init(params)), []
    for _ in range(steps):
        carry, value = step(carry, None)
        values.append(float(value))
    return values, carry[0]


def test_the_published_loss_collapses_and_the_default_does_not():
    values, params = trained(True)
    assert values[0] > 0.1 and values[-1] < 1e-3
    assert np.abs(params["loss"]["norm_embedding"]["scale"]).max() < 0.3
    values, _ = trained(False)
    assert values[0] > 0.5 and min(values) > 0.1


def test_one_scalar_whatever_the_kind():
    for kind in ("mse", "cosine", "log_cosine"):
        x_BTD = jnp.arange(24.0).reshape(2, 3, 4)
        _, state = EmbeddingLoss(kind, False, 1e-5).init_with_output(
            jax.random.key(0), x_BTD, x_BTD, None
        )
        assert state["losses"]["embedding"][0].shape == ()
    assert "losses" not in jax.eval_shape(
        lambda key: models.init(make({"embedding_loss": "none"}), key), jax.random.key(0)
    )


# ---- decoding ----------------------------------------------------------------------------------


def test_a_sampler_takes_the_model():
    """Greedy, two rows, scanned layers: what the full forward likes best, token by token."""
    model = make({"cross_source": "same_layer", "scan_layers": True})
    params = families.random_params(model)
    sampler = Sampler(model, batch_size=2, temperature=0.0)
    prompts = [np.array([3, 1, 4]), np.array([1])]
    (new, *_) = sampler.tokens({"params": params}, prompts, max_new_tokens=4, seeds=[0, 1])
    forward = families.jit(model.apply)
    for prompt, ids in zip(prompts, new, strict=True):
        text = [*prompt, *ids]
        padded = jnp.asarray([text + [0] * (LENGTH - len(text))])
        best_T = np.argmax(forward({"params": params}, padded)[0], axis=-1)
        assert ids == best_T[len(prompt) - 1 : len(text) - 1].tolist()


def test_evaluation_with_experts_in_the_last_layer_alone():
    """They report like those of the stack, though the stack itself has nothing to report."""
    model = make({"mlp.kind": "moe", "mlp.moe.every": 2})
    params, tokens_BT = families.random_params(model), families.tokens()
    config = common.base()
    batch = {"inputs": tokens_BT, "targets": tokens_BT, "weights": jnp.ones(tokens_BT.shape)}
    result = make_eval_step(model, config)(params, {}, batch, 0, 0)
    assert "moe/dropped_fraction" in by_layer(result["stats"], model)
    assert np.isfinite(result["loss"])


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"encoder_depth": -1}, r"config\.model\.encoder_depth=-1: must be at least 0"),
        ({"cross_heads": 5}, r"width=32 does not divide by config\.model\.cross_heads=5"),
        (
            {"attention.num_heads": 5, "cross_heads": 4},
            r"width=32 does not divide by config\.model\.attention\.num_heads=5",
        ),
        ({"depth": 1, "encoder_depth": 2}, r"config\.model\.encoder_depth=2: .*set it to 0"),
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


def test_dropout_is_on_in_training_only():
    """At every site; of a decoder block alone, so that its attention is cross-attention."""
    for site in ("embedding", "attention_probs", "attention_output", "mlp_output"):
        model = make(
            {
                "dropout.kind": "standard",
                "dropout.rate": 0.5,
                "dropout.sites": (site,),
                "order": "cross_only",
                "depth": 1,
            }
        )
        params, tokens_BT = families.random_params(model), families.tokens(batch=1)
        plain = model.apply({"params": params}, tokens_BT)
        rngs = {"dropout": jax.random.key(0)}
        noisy = model.apply({"params": params}, tokens_BT, train=True, rngs=rngs)
        assert np.abs(plain - noisy).max() > 0.1, site
        same = make({"order": "cross_only", "depth": 1}).apply({"params": params}, tokens_BT)
        np.testing.assert_allclose(plain, same, atol=1e-5)


def shapes_of(model):
    """Of the parameters."""
    return jax.eval_shape(lambda: init_state_params(model))


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


def test_published_size():
    """13 layers, 150 wide, 50,257 tokens: 15.8M parameters."""
    model = make(
        {
            "width": 150,
            "depth": 13,
            "attention.num_heads": 5,
            "cross_heads": 10,
            "vocab_multiple": 1,
            "cross_source": "final",
            "mlp.hidden": 0,
        },
        vocab_size=50257,
        context=200,
    )
    assert round(flops.count_params(shapes_of(model)) / 1e6, 1) == 15.8
