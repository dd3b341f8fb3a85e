"""Bridges between finished models: formula, causality, decoding, frozen members, runs."""

import functools
import re
import shutil

import families
import jax
import numpy as np
import pytest
from formulas import attention, norm
from refusals import refused
from test_adapters import RUN, SMALL, params_at
from test_families import compiled_on, same_loss_and_grads

from efx import checkpoint, models
from efx.certify import properties, subjects
from efx.config.load import config_of_run
from efx.configs import calm, common
from efx.layers import flops
from efx.models import bridges
from efx.train import inference, trainer

LENGTH, BATCH, VOCAB = families.LENGTH, families.BATCH, families.VOCAB
DECODER = {"depth": 3, "attention.num_kv_heads": 2}
STREAMS = {"family": "encoder_decoder", "width": 24, "depth": 3, "cross_source": "same_layer"}
MOD = {"preset": "gpt2", "width": 40, "depth": 2, "depth_routing.kind": "mod",
       "depth_routing.capacity": 0.5}  # fmt: skip
LORA, MLP = {"adapter.kind": "lora"}, {"adapter.kind": "mlp", "adapter.rank": 3}
CASES = {
    "decoder_reads_two": (DECODER, STREAMS, MOD),
    "streams_read": (STREAMS, DECODER),
    "adapted_mod_reads": ({**MOD, **MLP}, {**DECODER, **LORA}),
}
every_case = pytest.mark.parametrize("name", families.rows(CASES, {"adapted_mod_reads"}))


@functools.cache
def case(name):
    """(model, its variables)"""
    model = families.bridge(*CASES[name])
    return model, {"params": families.random_params(model), **families.random_state(model)}


@functools.cache
def forward(name):
    """The compiled model of a case, for all tests of this file."""
    return families.jit(case(name)[0].apply)


# ---- the forward pass --------------------------------------------------------------------------


@every_case
def test_bridges_with_zero_outputs_are_the_anchor_bit_for_bit(name):
    model, variables = case(name)

    def started(path, leaf):
        is_output = path[1].key.startswith("bridges_") and path[-2].key == "out"
        return np.zeros_like(leaf) if is_output else leaf

    start = jax.tree_util.tree_map_with_path(started, variables)
    anchor = {kind: tree["anchor_model"] for kind, tree in start.items() if "anchor_model" in tree}
    expected = np.asarray(families.jit(model.anchor_model.apply)(anchor, families.tokens()))
    np.testing.assert_array_equal(forward(name)(start, families.tokens()), expected)
    moved = np.asarray(forward(name)(variables, families.tokens()))
    assert np.abs(moved - expected).max() > 0.1


def test_new_bridges_have_an_output_matrix_of_zero():
    model = families.bridge({"depth": 1}, {"depth": 1, "width": 16}, pairs=1)
    new = checkpoint.arrays.leaves_by_path(families.initial(model)["params"])
    zero = ["/".join(path) for path, x in new.items() if path[0] == "bridges_0" and not np.any(x)]
    assert zero == ["bridges_0/attention/out/kernel"]


def layer_states(model, params, tokens_BT):
    """Outputs [T, D] of the layers of a decoder, for one row."""
    options = dict(
        capture_intermediates=lambda module, _: re.fullmatch(r"block_\d+", module.name or ""),
        mutable=["intermediates"],
        method="features",
    )
    _, seen = families.jit(functools.partial(model.apply, **options))({"params": params}, tokens_BT)
    layers = jax.device_get(seen["intermediates"]["layers"])
    return [layers[f"block_{i}"]["__call__"][-1][0] for i in range(len(layers))]


def one_layer(params, layer, h_TD):
    """The output of one layer of the anchor for given states, computed by a model of that layer
    alone with the states as the rows of its embedding table."""
    model = families.make({"depth": 1})
    table = np.pad(np.float32(h_TD), ((0, 48 - len(h_TD)), (0, 0)))
    layers = {"block_0": params["layers"][f"block_{layer}"]}
    params = {**params, "embed": {"embedding": table}, "layers": layers}
    return layer_states(model, params, np.arange(len(h_TD), dtype=np.int32)[None])[0]


def test_forward_is_the_formula():
    """Two pairs of layers, evenly spaced, of each of two models: layer by layer against numpy's
    cross-attention."""
    members = {}, {"width": 24, "attention.num_heads": 2}, {"width": 40, "depth": 5}
    model = families.bridge(*members, num_heads=4)
    params = jax.device_get(families.random_params(model))
    wide = jax.tree.map(np.float64, params)
    tokens_BT = families.tokens(batch=1)
    states = [
        layer_states(augment, params[f"augment_models_{a}"], tokens_BT)
        for a, augment in enumerate(model.augment_models)
    ]

    def bridge(h_TD, pair, *layers):
        """The anchor's state plus the increment of pair `pair` from these layers of the others."""
        added = 0
        for a, layer in enumerate(layers):
            p = wide[f"bridges_{2 * a + pair}"]
            context = states[a][layer] @ p["project"]["kernel"]
            added = added + attention(h_TD, context, p["attention"], 4)
        return h_TD + added

    anchor = params["anchor_model"]
    h_TD = bridge(layer_states(model.anchor_model, anchor, tokens_BT)[0], 0, 0, 2)
    h_TD = bridge(one_layer(anchor, 1, h_TD), 1, 1, 4)
    expected = norm(h_TD, anchor["norm_final"]) @ anchor["head"]["kernel"][:, :VOCAB]
    result = families.jit(model.apply)({"params": params}, tokens_BT)
    np.testing.assert_allclose(result[0], expected, rtol=2e-4, atol=2e-4)


def test_bridges_connect_the_decoder_of_two_streams():
    streams = families.make({**STREAMS, "cross_source": "previous_layer"})
    paths = ["layers/block_0/decoder", "layers/block_1/decoder", "last/block_0/decoder"]
    assert bridges.layer_paths(streams) == paths


@every_case
def test_causal(name):
    families.assert_passes(properties.no_look_ahead, subjects.of_model(*case(name)), tolerance=0)


@every_case
def test_cached_decoding_is_the_full_forward(name):
    """A chunk of 7 tokens, then one at a time, with padding."""
    model, variables = case(name)
    step = families.decoder(model, variables, LENGTH)
    cache = models.init_cache(model, BATCH, LENGTH)
    assert any(key.startswith("bridges_") for key in cache)
    calls = families.chunks(np.full(BATCH, 7), np.full(BATCH, LENGTH), 7, 7)
    logits_BTV, _ = families.read(step, cache, families.tokens(), calls)
    # States that bridges read have no norm, so rounding grows; a wrong cache differs by 0.1.
    tolerance = 2e-3 if name == "adapted_mod_reads" else 1e-4
    expected = forward(name)(variables, families.tokens())
    np.testing.assert_allclose(logits_BTV, expected, atol=tolerance)


def test_losses_of_members_are_not_those_of_the_bridged_model():
    """But their reports are."""
    changes = families.FAMILIES["mod_context"].changes
    model = families.bridge(changes, changes)
    options = dict(train=True, mutable=["losses", "stats"], rngs=families.keys())
    run = functools.partial(model.apply, **options)
    _, sown = jax.eval_shape(run, families.variable_shapes(model), families.tokens())
    assert "losses" not in sown and "stats" in sown


@pytest.mark.parametrize("name", ["decoder_reads_two", "streams_read"])
def test_the_ledger_is_what_is_executed(name):
    """Without padding of the vocabulary, and with attention that visits no masked key; bridges
    visit 10 tokens as one chunk."""
    members = [each | {"attention.chunk": 1, "vocab_multiple": 1} for each in CASES[name]]
    model = families.bridge(*members)
    bridges = (len(members) - 1) * model.config.pairs
    unseen = 10 * 10 - flops.causal_pairs(10)
    hidden = bridges * flops.attention_scores(unseen, 1, model.anchor_model.config.width)
    assert flops.executed(model, 10) == sum(model.ledger(10).nominal.values()) + hidden


@pytest.mark.slow
def test_eight_devices_are_one():
    """On a mesh that splits the batch and the parameters, these in both ways."""
    members = {"depth": 2}, {"depth": 1, "width": 24, "attention.num_heads": 2}
    model = families.bridge(*members, pairs=1)
    # From the host, since cutting arrays of a device is a program for each shape.
    params, tokens_BT = jax.device_get((families.random_params(model), families.tokens()))
    loss = families.jit(jax.value_and_grad(families.loss_fn(model)))
    expected = jax.device_get(loss(params, tokens_BT))
    step, params_sharding, tokens_sharding = compiled_on("mixed", model)
    params = jax.device_put(params, params_sharding)
    assert not params["bridges_0"]["project"]["kernel"].is_fully_replicated
    result = step(params, jax.device_put(tokens_BT, tokens_sharding))
    same_loss_and_grads(expected, jax.device_get(result))


# ---- runs --------------------------------------------------------------------------------------

OTHER = {
    "model.width": 24, "model.depth": 2, "model.attention.num_heads": 2, "model.scan_layers": True,
    "model.depth_routing.kind": "mod", "model.depth_routing.causal_decision": "threshold",
    "model.depth_routing.every": 1, "model.depth_routing.capacity": 0.5,
    "model.vocab_multiple": 100,
}  # fmt: skip


def config_of(variant, text, **changes):
    return common.apply(calm.get_config(variant), {**RUN, "data.source": f"text:{text}", **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory, one_device):
    """The folder of an anchor, a scanned and routed model and the bridges between them."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for name, letters in (("a", "abcde "), ("b", "vwxyz ")):
        (folder / f"{name}.txt").write_text("".join(rng.choice(list(letters), 12_000)))
    config = config_of("", folder / "a.txt", **SMALL)
    trainer.train_and_evaluate(config, folder / "anchor", train=False)  # at step 0
    trainer.train_and_evaluate(config_of("", folder / "b.txt", **OTHER), folder / "other")
    trainer.train_and_evaluate(config_of("bridge", folder / "b.txt", **between(folder)),
                             folder / "bridged")  # fmt: skip
    return folder


def between(folder, **changes):
    return {"model.anchor": str(folder / "anchor"), "model.augment": (str(folder / "other"),),
            "model.num_heads": 2, **changes}  # fmt: skip


def test_only_bridges_train(runs):
    trained, anchor = params_at(runs / "bridged"), params_at(runs / "anchor")
    other = checkpoint.arrays.leaves_by_path(
        models.unroll_variables(*scanned_variables(runs / "other"))
    )
    other = {"/".join(path): np.asarray(leaf) for path, leaf in other.items()}
    moved = {path for path in trained if "/bridges_" in path}
    assert len(trained) - len(moved) == len(anchor) + len(other) - 1  # no head of the other
    for path in trained.keys() - moved:
        base = anchor if "/anchor_model/" in path else other
        own = base[re.sub("/(anchor_model|augment_models_0)/", "/", path)]
        own = own[: len(trained[path])] if path.endswith("embedding") else own  # without padding
        assert trained[path].tobytes() == own.tobytes(), path
    assert any(path.startswith("state/") and np.any(trained[path]) for path in trained)
    assert all(np.any(trained[path]) for path in moved)


def scanned_variables(run):
    e, _, params, variables = inference.restore(config_of_run(run), run)
    assert e.model.config.scan_layers
    return e.model, {"params": params, **variables}


def test_a_bridged_run_evaluates_and_samples(runs):
    config = config_of_run(runs / "bridged")
    assert np.isfinite(inference.evaluate(config, runs / "bridged")["eval/loss"])
    assert inference.sample(config, runs / "bridged")["new_tokens"] == 4


# ---- refusals ----------------------------------------------------------------------------------


def test_members_and_settings_that_do_not_fit_are_refused_by_name():
    recursion, latents = (families.FAMILIES[name].changes for name in ("recursion", "latent"))
    short = families.make({}, context=LENGTH // 2)
    for members, options, name in (
        (({}, {}), {"pairs": 3}, "config.model.pairs=3"),
        (({}, {}), {"num_heads": 5}, "config.model.num_heads=5"),
        (({}, recursion), {}, "config.model.augment=run_1"),
        ((latents, {}), {}, "config.model.anchor=run_0"),
        (({}, latents), {}, "config.model.augment=run_1"),
        (({}, short), {}, "config.model.augment=run_1"),
    ):
        refused(lambda members=members, options=options: families.bridge(*members, **options), name)


def test_runs_that_cannot_be_bridged_are_refused(runs, tmp_path):
    text = runs / "b.txt"
    chars = config_of("", text, **{**SMALL, "model.depth": 1, "data.tokenizer": "chars"})
    trainer.train_and_evaluate(chars, tmp_path / "chars", train=False)  # at step 0
    for changes, name in [
        ({"model.anchor": ""}, "config.model.anchor=''"),
        ({"model.augment": ("gone",)}, "config.model.augment='gone'"),
        ({"model.augment": (str(tmp_path / "chars"),)}, "config.model.anchor="),
        ({"data.tokenizer": "chars"}, "config.model.anchor="),
        ({"model.augment": (str(runs / "bridged"),)}, "bridged"),
        ({"adapter.kind": "lora"}, "config.adapter.kind='lora'"),
    ]:
        config = config_of("bridge", text, **{**between(runs), **changes})
        run = tmp_path / "composed"
        refused(lambda c=config: trainer.train_and_evaluate(c, run, train=False), name)  # noqa: B023
        shutil.rmtree(tmp_path / "composed", ignore_errors=True)
