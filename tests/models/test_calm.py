"""Bridges between finished models: start, formula, causality, decoding, runs, bad input."""

import functools
import shutil

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from test_adapters import params_at
from test_families import CUTS, changed_after_cuts, compiled_on, same_loss_and_grads

from efx import build, checkpoint, flops, models, train, use
from efx.configs import calm, common
from efx.errors import UsageError
from efx.layers.info import CallInfo, Tokens
from efx.layers.stack import Layer
from efx.models.bridged.config import BridgedConfig
from efx.models.bridged.model import Bridge, spaced

LENGTH, BATCH, VOCAB = families.LENGTH, families.BATCH, families.VOCAB
DECODER = {"depth": 3, "attention.num_kv_heads": 2}
STREAMS = {"family": "encoder_decoder", "width": 24, "depth": 3, "cross_source": "same_layer"}
MOD = {"preset": "gpt2", "width": 40, "depth": 2, "depth_routing.kind": "mod",
       "depth_routing.capacity": 0.5}  # fmt: skip
CASES = {
    "decoder_reads_two": (DECODER, STREAMS, MOD),
    "streams_read": (STREAMS, DECODER),
    "mod_reads": (MOD, DECODER),
    "adapted_read": (
        {**DECODER, "adapter.kind": "lora"},
        {**MOD, "adapter.kind": "mlp", "adapter.rank": 3},
    ),
}
# Of the bridges of a case.
OPTIONS = {"streams_read": {"qk_norm": "width", "window": 9, "softcap": 5.0}}
every_case = pytest.mark.parametrize("name", CASES)


def settings(count, **changes):
    config = {
        **common.base("bridged").model,
        "anchor": "a",
        "augment": tuple("bcd"[: count - 1]),
        **changes,
    }
    return config


def bridged(*members, **changes):
    members = [each if isinstance(each, nn.Module) else families.make(each) for each in members]
    config = settings(len(members), **changes)
    return models.build(config, vocab_size=VOCAB, context=LENGTH, dtype="float32", members=members)


@functools.cache
def case(name):
    """(model, its variables)"""
    model = bridged(*CASES[name], **OPTIONS.get(name, {}))
    return model, {"params": families.random_params(model), **families.random_state(model)}


@functools.cache
def forward(name):
    """The compiled model of a case, for all tests of this file."""
    return families.jit(case(name)[0].apply)


def fresh(variables):
    """With the bridges as they start."""

    def one(path, leaf):
        started = path[1].key.startswith("bridges_") and path[-2].key == "out"
        return np.zeros_like(leaf) if started else leaf

    return jax.tree_util.tree_map_with_path(one, variables)


def test_a_new_bridge_adds_nothing():
    """Its output matrix starts at zero."""
    attention = BridgedConfig(num_heads=2).attention(8)
    bridge = Bridge(attention, norm="none", std=0.02, dtype=jnp.float32)
    states, info = (np.ones((1, 4, 8)), np.ones((1, 4, 6))), CallInfo(Tokens(np.arange(4)[None]))
    made = jax.jit(lambda key: nn.unbox(bridge.init(key, *states, info)))(jax.random.key(0))
    kernels = {key: np.asarray(each["kernel"]) for key, each in made["params"]["attention"].items()}
    assert {key for key, kernel in kernels.items() if not np.any(kernel)} == {"out"}


@every_case
def test_it_starts_as_the_anchor(name):
    model, variables = case(name)
    start = fresh(variables)
    anchor = {kind: tree["anchor_model"] for kind, tree in start.items() if "anchor_model" in tree}
    expected = np.asarray(families.jit(model.anchor_model.apply)(anchor, families.tokens()))
    np.testing.assert_array_equal(forward(name)(start, families.tokens()), expected)
    moved = np.asarray(forward(name)(variables, families.tokens()))
    assert np.abs(moved - expected).max() > 0.1


def attention(q_TD, a_SD, params, c):
    """CrossAttn(q, a W_proj), causal, one sequence, in float64."""
    params = jax.tree.map(np.float64, params)
    kernel = {key: params["attention"][key]["kernel"] for key in ("query", "key", "value", "out")}
    context = np.float64(a_SD) @ params["project"]["kernel"]

    def heads(x, norm=None):
        x = x.reshape(len(x), c.num_heads, -1)
        if c.qk_norm == "head" and norm:
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)
            x = x * params["attention"][norm]["scale"]
        return x

    q = heads(np.float64(q_TD) @ kernel["query"], "norm_query")
    k, v = heads(context @ kernel["key"], "norm_key"), heads(context @ kernel["value"])
    out = np.zeros_like(q)
    for t in range(len(q)):
        first = max(0, t + 1 - c.window) if c.window else 0
        for h in range(c.num_heads):
            s = k[first : t + 1, h] @ q[t, h] / np.sqrt(q.shape[-1])
            s = c.softcap * np.tanh(s / c.softcap) if c.softcap else s
            w = np.exp(s - s.max())
            out[t, h] = w @ v[first : t + 1, h] / w.sum()
    return out.reshape(len(q), -1) @ kernel["out"]


def layer_states(model, variables, tokens_BT):
    """What leaves each layer of a model."""
    run = functools.partial(
        model.apply,
        capture_intermediates=lambda m, _: isinstance(m, Layer),
        mutable=["intermediates"],
        method="features",
    )
    _, seen = families.jit(run)(variables, tokens_BT)
    layers = jax.device_get(seen["intermediates"]["layers"])
    return [layers[f"block_{i}"]["__call__"][-1] for i in range(len(model.specs()))]


@pytest.mark.parametrize("options", [{}, {"qk_norm": "head", "window": 9, "softcap": 2.0}])
def test_the_formula(options):
    """Two pairs of layers of each of two models: layer by layer against numpy's cross-attention."""
    members = {}, {"width": 24, "attention.num_heads": 2}, {"width": 40, "depth": 4}
    model = bridged(*members, num_heads=4, **options)
    params = families.random_params(model)
    tokens_BT = families.tokens(batch=1)
    states = [layer_states(augment, {"params": params[f"augment_models_{a}"]}, tokens_BT)
              for a, augment in enumerate(model.augment_models)]  # fmt: skip

    def bridge(h_BTD, pair, *layers):
        """What pair `pair` adds to the anchor's state from these layers of the others."""
        added = [attention(h_BTD[0], states[a][layer][0], params[f"bridges_{2 * a + pair}"],
                           model.config)
                 for a, layer in enumerate(layers)]  # fmt: skip
        return h_BTD + sum(added)[None]

    b_model, b_params = model.anchor_model, params["anchor_model"]
    h = bridge(layer_states(b_model, {"params": b_params}, tokens_BT)[0], 0, 0, 1)
    info = CallInfo(Tokens(np.arange(LENGTH, dtype=np.int32)[None]))
    layer = Layer(b_model.specs()[1])
    run = families.jit(layer.apply)
    h = run({"params": b_params["layers"]["block_1"]}, np.float32(h), info)
    h = bridge(h, 1, 1, 3)
    expected = np.float64(h) / np.sqrt(np.mean(np.float64(h) ** 2, -1, keepdims=True) + 1e-5)
    expected = expected * np.float64(b_params["norm_final"]["scale"])
    expected = expected @ np.float64(b_params["head"]["kernel"])[:, :VOCAB]
    result = families.jit(model.apply)({"params": params}, tokens_BT)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "pairs, depth, layers",
    [
        (1, 4, [3]),
        (2, 4, [1, 3]),
        (2, 5, [2, 4]),
        (3, 7, [2, 4, 6]),
        (4, 4, [0, 1, 2, 3]),
    ],
)
def test_pairs_are_evenly_spaced(pairs, depth, layers):
    assert spaced(pairs, depth) == layers


def test_bridges_train_through_members_that_skip():
    """MLPs that compute open tokens alone have no gradient: a member's compute all, which is the
    same."""
    masked = {
        "depth": 2,
        "dropout.kind": "attention",
        "dropout.sites": ("mlp_output",),
        "dropout.attention.input": "embedding_linear",
        "dropout.attention.granularity": "token",
    }
    skipping = {**masked, "dropout.attention.skip_tile": 4}
    plain, model = (bridged(member, {"depth": 2}, pairs=2) for member in (masked, skipping))
    params, tokens_BT = families.random_params(model), families.tokens()

    def loss(model, bridges, params):
        logits_BTV = model.apply({"params": {**params, **bridges}}, tokens_BT, train=True)
        return jnp.mean(jnp.square(logits_BTV))

    bridges = {name: tree for name, tree in params.items() if name.startswith("bridges")}
    expected, got = (
        families.jit(jax.value_and_grad(functools.partial(loss, m)))(bridges, params)
        for m in (plain, model)
    )
    assert bridges and max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(got[1])) > 1e-4
    families.assert_trees_close(expected, got)


@every_case
def test_causal(name):
    _, variables = case(name)
    before_BT, after_BT, later_BT = changed_after_cuts()
    before, after = (np.asarray(forward(name)(variables, x)) for x in (before_BT, after_BT))
    changed_BT = np.any(before != after, axis=-1)
    assert not np.any(changed_BT & ~later_BT)
    assert np.all(changed_BT[later_BT]) and len(CUTS) == BATCH


@every_case
def test_cached_decoding_is_the_full_forward(name):
    """Chunks of 7 tokens, then one at a time: of one case by a program for one token, of the
    others by that of the chunks, with padding."""
    model, variables = case(name)
    tokens_BT = np.asarray(families.tokens())
    expected_BTV = np.asarray(forward(name)(variables, tokens_BT))

    @families.jit
    def decode(cache, tokens_BT, positions_BT):
        logits_BTV, state = model.apply(
            {**variables, "cache": cache},
            tokens_BT,
            positions_BT,
            decode=True,
            cache_size=LENGTH,
            mutable=["cache"],
        )
        return logits_BTV, state["cache"]

    # Bridges read states that no norm has made small, so that rounding grows in their scores:
    # parameters moved by one rounding move a few entries by 1.5e-4. The logits of a wrong cache
    # differ by 0.1 and more.
    tolerance = 5e-4 if name in ("mod_reads", "adapted_read") else 1e-4
    cache, start = models.init_cache(model, BATCH, LENGTH), 0
    assert any(key.startswith("bridges_") for key in cache)
    calls = [(7, 7)] + [(1, 1 if name == "mod_reads" else 7)] * (LENGTH - 7)
    for length, size in calls:
        given_BT, positions_BT = np.zeros((BATCH, size), np.int32), np.full((BATCH, size), -1)
        given_BT[:, :length] = tokens_BT[:, start : start + length]
        positions_BT[:, :length] = np.arange(start, start + length)
        logits_BTV, cache = decode(cache, given_BT, np.int32(positions_BT))
        np.testing.assert_allclose(
            np.asarray(logits_BTV)[:, :length],
            expected_BTV[:, start : start + length],
            atol=tolerance,
            err_msg=f"at {start}",
        )
        start += length


REPORTS = ("mod_context", "dropout_embedding_moe", "streams_masks")
REFUSED = ("recursion", "adapter_recursion", "latent", "latent_levels", "latent_memory")


@pytest.mark.parametrize(
    "name",
    [
        "mod_context",
        "dropout_embedding_moe",
        "streams_masks",
        "soft_options",
        "adapter",
        *REFUSED,
    ],
)
def test_every_family_is_anchor_and_member_or_is_refused(name):
    """What is taken can be traced: forward, the gradient of a training step, a cached call. (That
    the numbers are right, the cases above say.)"""
    changes = families.FAMILIES[name].changes
    if name in REFUSED:
        for members, key in (((changes, {}), "anchor=a"), (({}, changes), "augment=b")):
            with pytest.raises(
                UsageError, match=rf"config\.model\.{key}: a .* cannot have bridges"
            ):
                bridged(*members, pairs=1)
        return
    model = bridged(changes, changes, pairs=1)
    variables = models.unboxed_shapes(model)
    params = variables.pop("params")
    tokens_BT = families.tokens(batch=2)

    def loss(params, variables, key):
        logits, _ = model.apply(
            {"params": params, **variables},
            tokens_BT,
            train=True,
            mutable=["losses", "stats", "state"],
            rngs={"dropout": key, "routing": key},
        )
        return jnp.mean(logits)

    def decode(params, variables, cache):
        return model.apply(
            {"params": params, **variables, "cache": cache},
            tokens_BT,
            jnp.tile(jnp.arange(LENGTH)[None], (2, 1)),
            decode=True,
            cache_size=LENGTH,
            mutable=["cache"],
        )

    jax.eval_shape(jax.grad(loss), params, variables, jax.random.key(0))
    report = functools.partial(
        model.apply, mutable=["losses", "stats"], rngs={"routing": jax.random.key(0)}
    )
    _, reported = jax.eval_shape(report, variables | {"params": params}, tokens_BT)
    # Bridges learn by the cross-entropy alone, not by what trained the members.
    assert "losses" not in reported and ("stats" in reported) == (name in REPORTS)
    cache = jax.eval_shape(lambda: models.init_cache(model, 2, LENGTH))
    logits, state = jax.eval_shape(decode, params, variables, cache)
    assert logits.shape == (2, LENGTH, VOCAB)
    assert jax.tree.structure(state["cache"]) == jax.tree.structure(cache)


@every_case
def test_what_it_says_about_itself(name):
    model, variables = case(name)
    counted = flops.jaxpr_flops(lambda v: model.apply(v, families.tokens()), variables)
    assert counted == flops.executed(model, LENGTH, BATCH)
    # The same without padding and with attention that visits what its mask allows, which that of
    # bridges cannot be told: 10 tokens are one chunk of theirs.
    members = [each | {"attention.chunk": 1, "vocab_multiple": 1} for each in CASES[name]]
    options = OPTIONS.get(name, {})
    model, bridges = bridged(*members, **options), (len(members) - 1) * settings(2)["pairs"]
    unseen = 10 * 10 - flops.causal_pairs(10, options.get("window", 0))
    hidden = bridges * flops.attention_scores(unseen, 1, model.anchor_model.config.width)
    assert flops.executed(model, 10) == sum(model.ledger(10).nominal.values()) + hidden


def test_eight_devices_are_one():
    """On a mesh that splits the batch and the parameters, these in both ways."""
    members = {"depth": 2}, {"depth": 1, "width": 24, "attention.num_heads": 2}
    model = bridged(*members, pairs=1)
    # From the host, since cutting arrays of a device is a program for each shape.
    params, tokens_BT = jax.device_get((families.random_params(model), families.tokens()))
    loss = families.jit(jax.value_and_grad(families.loss_fn(model)))
    expected = jax.device_get(loss(params, tokens_BT))
    step, params_sharding, tokens_sharding = compiled_on("mixed", model)
    params = jax.device_put(params, params_sharding)
    assert not params["bridges_0"]["project"]["kernel"].is_fully_replicated
    result = step(params, jax.device_put(tokens_BT, tokens_sharding))
    same_loss_and_grads(expected, jax.device_get(result))


def test_documents_of_a_row_do_not_mix():
    run, (_, variables) = forward("streams_read"), case("streams_read")
    tokens_BT = np.asarray(families.tokens())
    segments = np.int32(np.tile(np.repeat([1, 2], LENGTH // 2), (BATCH, 1)))
    positions = np.int32(np.tile(np.arange(LENGTH) % (LENGTH // 2), (BATCH, 1)))
    packed = np.asarray(run(variables, tokens_BT, positions, segments))
    second = np.roll(tokens_BT, -(LENGTH // 2), axis=1)
    alone = np.asarray(run(variables, second))[:, : LENGTH // 2]
    np.testing.assert_allclose(packed[:, LENGTH // 2 :], alone, atol=3e-5)


# ---- runs --------------------------------------------------------------------------------------

TINY = {
    "steps": 4, "data.seq_len": 32, "data.batch_size": 8, "data.max_bytes": 30_000,
    "optim.schedule.warmup_steps": 1, "optim.schedule.decay_steps": 4, "checkpoint.every": 2,
    "evaluate.every": 0, "evaluate.batch_size": 8, "evaluate.max_batches": 2, "sample.every": 0,
    "log.every": 1, "log.tensorboard": False, "optim.learning_rate": 1e-2, "sample.prompt": "ab",
    "sample.max_new_tokens": 12,
}  # fmt: skip
SMALL = {"model.width": 32, "model.depth": 2, "model.attention.num_heads": 2}
OTHER = {
    "model.width": 24, "model.depth": 2, "model.attention.num_heads": 2, "model.scan_layers": True,
    "model.depth_routing.kind": "mod", "model.depth_routing.causal": "threshold",
    "model.depth_routing.every": 1, "model.depth_routing.capacity": 0.5,
    "model.vocab_multiple": 100,
}  # fmt: skip


def config_of(variant, text, **changes):
    return common.apply(
        calm.get_config(variant), {**TINY, "data.source": f"text:{text}", **changes}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, one_device):
    """{name: run folder}: an anchor, a scanned and routed model, the bridges between them."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for name, letters in (("a", "abcde "), ("b", "vwxyz ")):
        (folder / f"{name}.txt").write_text("".join(rng.choice(list(letters), 12_000)))
    train.train_and_evaluate(config_of("", folder / "a.txt", **SMALL), folder / "anchor")
    train.train_and_evaluate(config_of("", folder / "b.txt", **OTHER), folder / "other")
    train.train_and_evaluate(config_of("bridge", folder / "b.txt", **between(folder)),
                             folder / "bridged")  # fmt: skip
    return folder


def between(folder, **changes):
    return {"model.anchor": str(folder / "anchor"), "model.augment": (str(folder / "other"),),
            "model.num_heads": 2, **changes}  # fmt: skip


def test_only_bridges_train(runs):
    trained, anchor = params_at(runs / "bridged"), params_at(runs / "anchor")
    other = checkpoint.files.flatten(models.unroll_variables(*scanned_variables(runs / "other")))
    other = {"/".join(path): np.asarray(leaf) for path, leaf in other.items()}
    compared = 0
    for path, value in trained.items():
        for name, base in (("anchor_model", anchor), ("augment_models_0", other)):
            if f"/{name}/" in path:
                own = base[path.replace(f"/{name}/", "/")]
                own = own[: len(value)] if path.endswith("embedding") else own  # padded for itself
                assert value.tobytes() == own.tobytes(), path
                compared += 1
    moved = [path for path in trained if "/bridges_" in path]
    assert compared == len(trained) - len(moved) == len(anchor) + len(other) - 1  # its head
    assert any(path.startswith("state/") and np.any(trained[path]) for path in trained)
    assert all(np.any(trained[path]) for path in moved)


def scanned_variables(run):
    from efx.config import config_of_run

    e, _, params, variables = build.finished(config_of_run(run), run)
    assert e.model.config.scan_layers
    return e.model, {"params": params, **variables}


def test_composing_gives_the_anchor_and_runs_evaluate_and_sample(runs, tmp_path, capsys):
    from efx.config import config_of_run

    text = runs / "a.txt"
    train.compose(config_of("bridge", text, **between(runs)), tmp_path / "start")
    start = use.evaluate(config_of_run(tmp_path / "start"), tmp_path / "start")
    anchor = use.evaluate(config_of_run(runs / "anchor"), runs / "anchor")
    assert start["eval/loss"] == pytest.approx(anchor["eval/loss"], abs=1e-6)
    config = config_of_run(runs / "bridged")
    assert np.isfinite(use.evaluate(config, runs / "bridged")["eval/loss"])
    assert use.sample(config, runs / "bridged")["new_tokens"] == 12


def test_resume_is_exact(runs, tmp_path):
    for steps in (2, 4):
        config = config_of("bridge", runs / "b.txt", **between(runs, steps=steps))
        train.train_and_evaluate(config, tmp_path / "x")
    a, b = params_at(tmp_path / "x"), params_at(runs / "bridged")
    assert all(a[path].tobytes() == b[path].tobytes() for path in b)


def test_bridges_follow_a_teacher_whose_vocabulary_was_padded(runs, tmp_path):
    """Members and teacher are padded for the devices of now, whatever their own runs were."""
    changes = {"train.teacher": str(runs / "other"), "losses.distill": 1.0}
    changes |= {"steps": 1, "optim.schedule.decay_steps": 0}
    config = config_of("bridge", runs / "b.txt", **between(runs, **changes))
    train.train_and_evaluate(config, tmp_path / "x")
    (rows,) = {
        len(x) for path, x in params_at(tmp_path / "x").items() if path.endswith("embedding")
    }
    assert rows < 300 == len(params_at(runs / "other")["params/embed/embedding"])


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pairs": 0}, r"config\.model\.pairs=0: must be at least 1"),
        ({"pairs": 3}, r"config\.model\.pairs=3: must be from 1 to 2, the layers of .*anchor=a"),
        (
            {"num_heads": 5},
            r"config\.model\.num_heads=5: the anchor's width of 32 is not divisible",
        ),
        ({"augment": ("b", "c")}, r"needs run folders: config\.model\.anchor"),
        ({"pears": 2}, r"config\.model\.pears is not a setting \(did you mean 'pairs'\?\)"),
    ],
)
def test_bad_settings_are_one_line(changes, words):
    with pytest.raises(UsageError, match=words):
        bridged({}, {}, **changes)


def test_members_that_cannot_be_bridged():
    recursion = {"depth": 4, "depth_routing.kind": "recursion", "depth_routing.capacity": 0.5}
    with pytest.raises(
        UsageError, match=r"config\.model\.augment=b: a Decoder cannot have bridges"
    ):
        bridged({}, recursion)
    # Latents of a group may be as many as the tokens of the rows that it is checked with.
    latents = [
        families.make(
            {
                "family": "latent",
                "group_size": 4,
                "latents": (count,),
                "level_widths": (24,),
                "level_heads": (3,),
            }
        )
        for count in (1, 2)
    ]
    for members, key in (
        ((latents[1], {}), "anchor=a"),
        (({}, latents[0]), "augment=b"),
        (({}, latents[1]), "augment=b"),
    ):
        with pytest.raises(UsageError, match=rf"{key}: a Latent .* a state for each token"):
            bridged(*members)
    short = families.make({}, context=LENGTH // 2)
    with pytest.raises(UsageError, match=r"augment=b: its context is 16 tokens"):
        bridged({}, short)


def test_bad_runs_are_one_line(runs, tmp_path):
    text = runs / "b.txt"
    chars = config_of("", text, **{**SMALL, "model.depth": 1, "data.tokenizer": "chars"})
    train.compose(chars, tmp_path / "chars")  # at step 0
    for changes, words in [
        ({"model.anchor": ""}, r"config\.model\.anchor='': there is no such run folder"),
        ({"model.augment": ("gone",)}, r"config\.model\.augment='gone': there is no such run"),
        ({"model.augment": (str(tmp_path / "chars"),)}, r"chars: its tokenizer differs"),
        ({"data.tokenizer": "chars"}, r"config\.model\.anchor=.* was trained with 'bytes'"),
        (
            {"model.augment": (str(runs / "bridged"),)},
            r"bridged: this run is itself made of other runs",
        ),
        ({"adapter.kind": "lora"}, r"config\.adapter\.kind='lora': not with.*bridged"),
    ]:
        config = config_of("bridge", text, **{**between(runs), **changes})
        with pytest.raises(UsageError, match=words) as error:
            train.compose(config, tmp_path / "composed")
        assert "\n" not in str(error.value)
        shutil.rmtree(tmp_path / "composed", ignore_errors=True)
