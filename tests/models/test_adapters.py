"""Adapters, gates and composed experts: formulas, frozen parameters, compositions of runs.

The rows `adapter...` of test_families.py hold causality, cached decoding, scan, devices and ledger.
"""

import functools
import math
import shutil

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from formulas import gelu
from refusals import refused

from efx import build, checkpoint, losses, models, train, use
from efx.config import config_of_run
from efx.configs import common, phatgoose
from efx.interop.hf_config import config_to_hf

# ---- formulas ----------------------------------------------------------------------------------

EXPERTS, WIDTH, ROWS, LENGTH = 4, 16, 3, 9
SITE = {
    "depth": 1, "width": WIDTH, "attention.num_heads": 2,
    "adapter.kind": "lora", "adapter.rank": 3, "adapter.scale": 1.5, "adapter.sites": ".*/up",
}  # fmt: skip
COMPOSED = {"adapter.experts": tuple("abcd")}
INCLUSION = {
    **COMPOSED,
    "adapter.routing": "inclusion",
    "adapter.capacity": 0.3,
    "adapter.slack": 1.4,
}
VARIANTS = {
    "lora": {},
    "mlp gate": {"adapter.kind": "mlp", "adapter.gate": True},
    "lora top 1": {**COMPOSED, "adapter.top_k": 1},
    "mlp top 2": {**COMPOSED, "adapter.kind": "mlp", "adapter.top_k": 2},
    "uniform": {**COMPOSED, "adapter.routing": "uniform"},
    "inclusion causal": INCLUSION,
    "inclusion train": INCLUSION,
}


def adapted_layer(model, params, tokens_BT):
    """(input and output of the adapted layer, statistics of its adapter, the inclusion loss)"""
    captured = dict(
        capture_intermediates=lambda module, method: module.name in ("norm_mlp", "up"),
        mutable=["intermediates", "stats", "losses"],
    )
    _, sown = model.apply({"params": params}, tokens_BT, **captured)
    block = sown["intermediates"]["layers"]["block_0"]
    stats = sown.get("stats", {}).get("layers", {}).get("block_0", {}).get("mlp", {})
    loss = losses.collect_sown(sown["losses"])["inclusion_bce"] if "losses" in sown else 0.0
    return (
        block["norm_mlp"]["__call__"][-1],
        block["mlp"]["up"]["__call__"][-1],
        stats.get("up", {}).get("adapter", {}),
        loss,
    )


@functools.cache
def computed():
    """{variant: (kernel and adapter's arrays, input, output, statistics, loss)} of one program."""
    made = {
        name: families.make(SITE | changes).clone(
            selection="train" if name == "inclusion train" else "causal"
        )
        for name, changes in VARIANTS.items()
    }
    params = {name: families.random_params(model) for name, model in made.items()}
    tokens_BT = families.tokens(batch=ROWS, length=LENGTH)

    @families.jit
    def run(params):
        return {name: adapted_layer(made[name], params[name], tokens_BT) for name in made}

    results = jax.device_get(run(params))
    layers = {name: params[name]["layers"]["block_0"]["mlp"]["up"] for name in made}
    return {name: (*parts(layers[name]), *results[name]) for name in made}


def parts(layer):
    """(W, the adapter's arrays) in float64."""
    return np.float64(layer["kernel"]), {k: np.float64(v) for k, v in layer["adapter"].items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def standardised(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


def adapter(name, u, a, e=None):
    """adapter(u), or that of expert e."""
    down, up = (a["down"], a["up"]) if e is None else (a["down"][e], a["up"][e])
    return (gelu(u @ down) if "mlp" in name else u @ down) @ up


@pytest.mark.parametrize("name", ["lora", "mlp gate"])
def test_one_adapter_is_the_formula(name):
    kernel, a, u, y, _, _ = computed()[name]
    u = np.float64(u)
    added = adapter(name, u, a)
    if "gate" in name:
        added = added * sigmoid(u @ a["gate"])[..., None]
    np.testing.assert_allclose(y, u @ kernel + 1.5 * added, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["lora top 1", "mlp top 2", "uniform"])
def test_a_composition_is_the_formula_of_the_paper(name):
    """Token by token: softmax(affinity / sqrt(D)) over the experts of largest affinity."""
    kernel, a, u, y, _, _ = computed()[name]
    for b, t in np.ndindex(ROWS, LENGTH):
        x = np.float64(u[b, t])
        if name == "uniform":
            best, weights = range(EXPERTS), np.full(EXPERTS, 1 / EXPERTS)
        else:
            affinity = np.array([standardised(v) @ standardised(x) for v in a["gate"]])
            best = np.argsort(-affinity)[: int(name[-1])]
            weights = np.exp(affinity[best] / math.sqrt(WIDTH))
            weights /= weights.sum()
        added = sum(w * adapter(name, x, a, e) for e, w in zip(best, weights, strict=True))
        np.testing.assert_allclose(y[b, t], x @ kernel + 1.5 * added, rtol=3e-5, atol=3e-5)
    assert ("gate" in a) == (name != "uniform")


@pytest.mark.parametrize("selection", ["causal", "train"])
def test_inclusion_is_the_formula(selection):
    """The decision, the slots of an expert in order of time, the weights, loss and statistics."""
    name = f"inclusion {selection}"
    kernel, a, u, y, stats, loss = computed()[name]
    used, dropped, selected_all, bce = 0, 0, 0, []
    for b in range(ROWS):
        x = np.float64(u[b])
        logits = x @ a["entrance"].T + a["entrance_bias"]
        expected = x @ kernel
        for e in range(EXPERTS):
            best = np.sort(np.argsort(-logits[:, e])[: math.ceil(0.3 * LENGTH)])
            selected = np.flatnonzero(logits[:, e] > 0)
            admitted = selected[: math.ceil(0.42 * LENGTH)]
            run = best if selection == "train" else admitted
            target = np.isin(np.arange(LENGTH), best)
            bce.append(np.log1p(np.exp(-np.where(target, 1, -1) * logits[:, e])))
            for t in run:
                expected[t] += 1.5 * sigmoid(logits[t, e]) * adapter(name, x[t], a, e)
            used, selected_all = used + len(run), selected_all + len(selected)
            dropped += len(selected) - len(admitted)
        np.testing.assert_allclose(y[b], expected, rtol=3e-5, atol=3e-5)
    assert dropped > 0, "the case has a full expert"
    (experts,), (lost,) = stats["adapter/experts_per_token"], stats["adapter/dropped_fraction"]
    assert experts == pytest.approx(used / (ROWS * LENGTH))
    assert lost == pytest.approx(dropped / selected_all)
    assert loss == pytest.approx(np.mean(bce), rel=1e-4)


def test_padding_takes_no_slots_and_counts_in_no_statistic():
    changes = {**INCLUSION, "adapter.slack": 1.0}
    model, size = families.make(SITE | changes), 4
    params, tokens_BT = families.random_params(model), families.tokens(batch=2, length=10)
    positions = np.tile([*range(size), *range(10 - size)], (2, 1))
    segments = np.tile([0] * size + [1] * (10 - size), (2, 1))

    @families.jit
    def run(tokens_BT):
        logits, sown = model.apply(
            {"params": params}, tokens_BT, positions, segments, mutable=["stats", "losses"]
        )
        return logits[:, size:], sown

    other_BT = tokens_BT.at[:, :size].set(families.tokens(seed=1, batch=2, length=size))
    jax.tree.map(np.testing.assert_array_equal, run(tokens_BT), run(other_BT))


@pytest.mark.parametrize("changes", [{"adapter.gate": True}, {**COMPOSED, "adapter.top_k": 2}])
def test_gates_are_float32_in_bfloat16_models(changes):
    """A change of the gate that bfloat16 rounds away moves the logits."""
    model = families.make(SITE | changes, "bfloat16")
    params = jax.device_get(families.random_params(model))
    adapter = params["layers"]["block_0"]["mlp"]["up"]["adapter"]
    gate = np.float32(jnp.bfloat16(adapter["gate"]))
    sign = np.random.default_rng(0).choice([-1, 1], gate.shape)

    @families.jit
    def run(gate):
        site = {**params["layers"]["block_0"]["mlp"]["up"], "adapter": {**adapter, "gate": gate}}
        mlp = {**params["layers"]["block_0"]["mlp"], "up": site}
        layers = {"block_0": {**params["layers"]["block_0"], "mlp": mlp}}
        return model.apply({"params": {**params, "layers": layers}}, families.tokens())

    assert np.any(run(gate) != run(np.float32(gate * (1 + sign * 2.0**-10))))


@pytest.mark.parametrize(
    "changes",
    [
        {"depth_routing.kind": "mod", "adapter.kind": "lora"},
        {"family": "encoder_decoder", "adapter.kind": "mlp"},
    ],
    ids=["decoder", "encoder_decoder"],
)
def test_a_new_adapter_changes_no_bit(changes):
    """The base's parameters lie at their paths, those of adapters beside them."""
    changes = {"depth": 1, "depth_routing.every": 1, "width": 16, **changes}
    base = families.make({**changes, "adapter.kind": "none"})
    adapted, tokens_BT = families.make(changes), families.tokens(batch=2)
    flat = checkpoint.files.flatten(families.random_params(base))
    new = checkpoint.files.flatten(families.initial(adapted)["params"])
    assert set(flat) < set(new)
    assert all(path[-2] == "adapter" for path in set(new) - set(flat))

    @families.jit
    def both(old, new):
        return base.apply({"params": old}, tokens_BT), adapted.apply({"params": new}, tokens_BT)

    np.testing.assert_array_equal(*both(unflatten_dict(flat), unflatten_dict(new | flat)))


# ---- runs --------------------------------------------------------------------------------------

RUN = {
    "steps": 2, "data.seq_len": 16, "data.batch_size": 8, "data.max_bytes": 20_000,
    "optim.schedule.warmup_steps": 1, "optim.schedule.decay_steps": 2, "checkpoint.every": 2,
    "evaluate.every": 0, "evaluate.batch_size": 8, "evaluate.max_batches": 2, "sample.every": 0,
    "log.every": 1, "log.tensorboard": False, "optim.learning_rate": 1e-2, "sample.prompt": "ab",
    "sample.max_new_tokens": 4,
}  # fmt: skip
SMALL = {"model.width": 16, "model.depth": 2, "model.attention.num_heads": 2}
ADAPTERS = {"adapter.rank": 4, "adapter.sites": ".*/(query|up)", "data.tokenizer": "bytes"}


def config_of(variant, text, **changes):
    config = phatgoose.get_config()
    for name in filter(None, variant.split(",")):
        common.apply(config, phatgoose.VARIANTS[name])
    return common.apply(
        config, {**RUN, **SMALL, **ADAPTERS, "data.source": f"text:{text}", **changes}
    )


def params_at(run):
    """{path: array} of the newest checkpoint."""
    _, _, params, variables = build.finished(config_of_run(run), run)
    tree = {"params": params, **variables}
    return {"/".join(path): np.asarray(x) for path, x in checkpoint.files.flatten(tree).items()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("abcdevwxyz "), 12_000)))
    return path


ROUTED = {"model.depth_routing.kind": "mod", "model.depth_routing.causal": "threshold"}
PLAIN = {"model.depth_routing.kind": "none", "model.scan_layers": True}


def start(folder, name, variant, text, action=train.train_and_evaluate, **changes):
    """The folder of a run; its second block is routed by a threshold."""
    config = config_of(variant, text, **{**ROUTED, **changes})
    action(config, folder / name)
    return str(folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text, one_device):
    """The folder of a base, of an expert with gates, of one that is untrained and of both."""
    folder = tmp_path_factory.mktemp("runs")
    base = start(folder, "base", "", text)
    gated = {"init.run": base, "adapter.gate": True}
    a = start(folder, "a", "adapter", text, **gated)
    b = start(folder, "b", "adapter", text, train.compose, seed=1, **gated)
    composed = {"init.run": base, "adapter.experts": (a, b)}
    start(folder, "compose", "compose", text, train.compose, **composed)
    return folder


def changed(old, new):
    """Paths whose arrays differ; `new` has all paths of `old`."""
    return {path for path in old if not np.array_equal(old[path], new[path])}


def test_the_base_of_an_adapter_keeps_every_bit(runs):
    base, adapter = params_at(runs / "base"), params_at(runs / "a")
    weights = {path: base[path] for path in base if path.startswith("params/")}
    assert not changed(weights, adapter)
    assert all(np.any(adapter[path]) for path in adapter.keys() - base.keys())


def test_a_composition_holds_its_base_and_experts_as_they_are(runs):
    """The thresholds too, without which it would route nothing."""
    base, composed = params_at(runs / "base"), params_at(runs / "compose")
    assert not changed(base, composed)
    assert any(np.any(base[path]) for path in base if path.endswith("quantile"))
    found = [path for path in composed if "/adapter/" in path]
    assert {path.rsplit("/", 1)[1] for path in found} == {"down", "up", "gate"}
    for e, expert in enumerate(params_at(runs / name) for name in "ab"):
        assert all(np.array_equal(composed[path][e], expert[path]) for path in found)


@pytest.mark.slow
def test_later_stages_train_gates_only(runs, text, tmp_path):
    """Of a finished adapter, and of a composition, whose training starts from its step 0."""
    adapter, composed = params_at(runs / "a"), params_at(runs / "compose")
    gates = {path for path in composed if path.endswith("/gate")}
    start(tmp_path, "gate", "gate", text, **{"init.run": str(runs / "a")})
    shutil.copytree(runs / "compose", tmp_path / "joint")
    train.train_and_evaluate(config_of_run(runs / "compose"), tmp_path / "joint")
    for before, after in ((adapter, "gate"), (composed, "joint")):
        paths = changed(before, params_at(tmp_path / after))
        assert {path for path in paths if path.startswith("params/")} == gates


@pytest.mark.slow
def test_entrances_of_scanned_layers_train_alone(text, tmp_path, one_device):
    """Experts of scanned layers are [layer, expert, ...]; evaluation reports their usage."""
    base = start(tmp_path, "base", "", text, train.compose, **PLAIN)  # at step 0
    given = {"init.run": base, **PLAIN}
    a = start(tmp_path, "a", "adapter", text, train.compose, **{**given, "adapter.gate": True})
    given |= {"adapter.experts": (a,), "adapter.top_k": 1}
    start(tmp_path, "inclusion", "inclusion", text, **given)
    base, expert, inclusion = (params_at(tmp_path / name) for name in ("base", "a", "inclusion"))
    assert not changed(base, inclusion)
    for path in expert.keys() - base.keys():
        if not path.endswith("/gate"):
            assert np.array_equal(inclusion[path][:, 0], expert[path]), path
    config = config_of_run(tmp_path / "inclusion")
    metrics = use.evaluate(config, tmp_path / "inclusion")
    used = metrics["eval/adapter/experts_per_token"]
    assert 0 < used < 1
    assert metrics["eval/adapter/usage/expert_0"] == pytest.approx(used)
    assert "eval/adapter/usage/expert_0/block_1" in metrics
    assert use.sample(config, tmp_path / "inclusion")["new_tokens"] == 4


@pytest.mark.slow
def test_runs_that_do_not_go_together_are_refused(runs, text, tmp_path):
    a, b, base = (str(runs / name) for name in ("a", "b", "base"))
    other = start(tmp_path, "other", "", text, train.compose, seed=5)  # at step 0
    plain = start(tmp_path, "plain", "adapter", text, train.compose, **{"init.run": base})
    for changes, name in [
        ({"adapter.experts": (a, base)}, "config.adapter.kind='none'"),
        ({"adapter.rank": 5}, "config.adapter.rank=4"),
        ({"adapter.experts": (a, plain)}, plain),  # without gates
        ({"adapter.experts": (a, str(runs / "compose"))}, str(runs / "compose")),
        ({"init.run": other}, f"config.init.run={other}"),
    ]:
        given = {"init.run": base, "adapter.experts": (a, b), **changes}
        refused(
            lambda given=given: start(tmp_path, "c", "compose", text, train.compose, **given), name
        )
        shutil.rmtree(tmp_path / "c", ignore_errors=True)


# ---- settings, costs ---------------------------------------------------------------------------

LORA = {"adapter.kind": "lora"}
TWO = {**LORA, "adapter.experts": ("a", "b")}
MOD = {"depth_routing.kind": "mod", "depth_routing.every": 1, "depth_routing.capacity": 0.5}
BETWEEN_LEVELS = {**families.FAMILIES["latent"].changes, **TWO, "adapter.sites": ".*/residual"}
# MLPs that compute open tokens alone do not know which tokens these are.
SKIPPING = {
    "dropout.kind": "attention",
    "dropout.sites": ("mlp_output",),
    "dropout.attention.input": "embedding",
    "dropout.attention.granularity": "token",
    "dropout.attention.skip_tile": 4,
}


@pytest.mark.parametrize(
    "changes, name",
    [
        ({**LORA, "adapter.sites": ".*/qwery"}, "config.adapter.sites='.*/qwery'"),
        ({**TWO, "adapter.top_k": 3}, "config.adapter.top_k=3"),
        ({**TWO, **MOD, "adapter.routing": "inclusion"}, "config.adapter.routing='inclusion'"),
        ({**BETWEEN_LEVELS, "adapter.routing": "inclusion"}, "config.adapter.routing='inclusion'"),
        ({**LORA, **SKIPPING, "adapter.gate": True}, "skip_tile=4"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: families.make(changes), name)


def test_an_adapted_model_is_not_exported_as_its_base():
    refused(lambda: config_to_hf(families.make(LORA)), "config.adapter.kind='lora'")


@pytest.mark.parametrize(
    "pattern, changes",
    [
        (r"layers/block_\d/.*/query", {}),
        ("layers/block_[13]/.*/query", {"depth_routing.kind": "mod", "depth_routing.every": 2}),
    ],
)
def test_sites_of_scanned_layers_are_those_of_unrolled_ones(pattern, changes):
    """Or are refused: a scan has one set of adapters for all layers that it computes as one."""

    def adapted(pattern, scan_layers):
        settings = {"depth": 4, "scan_layers": scan_layers, **LORA, **changes}
        return families.make({**settings, "adapter.sites": pattern})

    def sites(model):
        _, params = models.unroll(model, jax.device_get(families.random_params(model)))
        return {path for path in flatten_dict(params, sep="/") if "/adapter/" in path}

    unrolled = sites(adapted(pattern, False))
    assert unrolled and sites(adapted(pattern, True)) == unrolled
    one = "layers/block_1/.*/query"
    refused(lambda: adapted(one, True), one)


def test_realised_flops_of_adapters_follow_the_routed_share():
    changes = {**MOD, **LORA, "adapter.sites": ".*/block_[0-9]+/.*"}
    changes |= {"depth_routing.kind": "recursion", "depth": 4}
    model = families.make(changes)
    routed = [path for path, spec in model.blocks().items() if spec.routing is not None]

    def cost(share):
        shares = {path: (share, share) for path in routed}
        return model.ledger(16, shares=shares).nominal["adapters"]

    everything = families.make({**changes, "depth_routing.capacity": 1.0}).ledger(16)
    assert cost(1.0) == everything.nominal["adapters"] > model.ledger(16).nominal["adapters"]
    assert cost(0.25) - cost(0.0) == pytest.approx((cost(1.0) - cost(0.0)) / 4)
