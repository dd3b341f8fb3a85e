"""Adapters, gates and composed experts: formulas, causal limits, frozen parameters, refusals.

The rows `adapter...` of families.py hold causality, cached decoding, scan, devices and ledger.
"""

import functools
import math
import shutil

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from formulas import gelu
from refusals import refused

from efx import checkpoint, models
from efx.config.load import config_of_run
from efx.configs import common, phatgoose
from efx.layers.token_context import TokenContext
from efx.models.adapters import Adapter, AdapterConfig
from efx.train import inference, trainer

# ---- formulas ----------------------------------------------------------------------------------

EXPERTS, WIDTH, FEATURES, ROWS, LENGTH = 4, 16, 6, 2, 48
CAPACITY, SLACK = 0.3, 1.2
COMPOSED = {"experts": tuple("abcd")}
INCLUSION = {**COMPOSED, "routing": "inclusion", "capacity": CAPACITY, "slack": SLACK}


CALL = TokenContext(jnp.arange(LENGTH)[None])


def adapter_of(dtype=jnp.float32, **changes):
    """(adapter, parameters, input [B, T, D])"""
    config = AdapterConfig(**{"kind": "lora", "rank": 3, "scale": 1.5, **changes})
    adapter, rng = Adapter(config, FEATURES, ("embed", "mlp"), dtype), np.random.default_rng(0)
    x_BTD = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    shapes = nn.unbox(jax.eval_shape(adapter.init, jax.random.key(0), x_BTD, CALL)["params"])
    params = {k: jnp.float32(rng.normal(scale=0.5, size=shapes[k].shape)) for k in sorted(shapes)}
    return adapter, params, x_BTD


def applied(call=CALL, **changes):
    """(parameters and input in float64, output, statistics and losses)"""
    adapter, params, x_BTD = adapter_of(**changes)
    y_BTF, sown = adapter.apply({"params": params}, x_BTD, call, mutable=["stats", "losses"])
    sown = {name: float(values[-1]) for tree in sown.values() for name, values in tree.items()}
    return jax.tree.map(np.float64, params), np.float64(x_BTD), y_BTF, sown


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def standardised(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


def by_hand(a, x, e=..., activation=lambda h: h):
    """1.5 adapter(x), or that of expert e."""
    return 1.5 * activation(x @ a["down"][e]) @ a["up"][e]


def test_single_and_uniform_adapters_are_the_formula():
    a, x, y, _ = applied()
    np.testing.assert_allclose(y, by_hand(a, x), rtol=3e-5, atol=3e-5)
    a, x, y, _ = applied(kind="mlp", gate=True)
    expected = by_hand(a, x, activation=gelu) * sigmoid(x @ a["gate"])[..., None]
    np.testing.assert_allclose(y, expected, rtol=3e-5, atol=3e-5)
    a, x, y, _ = applied(**COMPOSED, routing="uniform")
    expected = sum(by_hand(a, x, e) for e in range(EXPERTS)) / EXPERTS
    np.testing.assert_allclose(y, expected, rtol=3e-5, atol=3e-5)
    assert set(a) == {"down", "up"}, "no gates"


@pytest.mark.parametrize("kind, top_k", [("lora", 1), ("mlp", 2)])
def test_topk_is_the_formula_of_the_paper(kind, top_k):
    """Token by token: softmax(affinity / sqrt(D)) over the experts of largest affinity."""
    a, x, y, _ = applied(**COMPOSED, kind=kind, top_k=top_k)
    activation = gelu if kind == "mlp" else lambda h: h
    for b, t in np.ndindex(ROWS, LENGTH):
        affinity = standardised(a["gate"]) @ standardised(x[b, t])
        best = np.argsort(-affinity)[:top_k]
        weights = np.exp(affinity[best] / math.sqrt(WIDTH))
        weights /= weights.sum()
        experts = [by_hand(a, x[b, t], e, activation) for e in best]
        np.testing.assert_allclose(y[b, t], weights @ experts, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("selection", ["causal", "train"])
def test_inclusion_is_the_formula(selection):
    """Selection, causal limit ceil(rate n) + 4, weights, loss and statistics, token by token."""
    a, x, y, sown = applied(CALL.replace(selection=selection), **INCLUSION)
    used, num_admitted, num_selected, bce = 0, 0, 0, []
    for b in range(ROWS):
        logits, expected = x[b] @ a["entrance"].T + a["entrance_bias"], np.zeros_like(y[b])
        for e in range(EXPERTS):
            topk = np.sort(np.argsort(-logits[:, e])[: math.ceil(CAPACITY * LENGTH)])
            admitted = []
            for t in np.flatnonzero(logits[:, e] > 0):
                if len(admitted) < math.ceil(round(CAPACITY * SLACK * (t + 1), 6)) + 4:
                    admitted.append(t)
            is_target = np.isin(np.arange(LENGTH), topk)
            bce.append(np.log1p(np.exp(-np.where(is_target, 1, -1) * logits[:, e])))
            run = topk if selection == "train" else admitted
            for t in run:
                expected[t] += sigmoid(logits[t, e]) * by_hand(a, x[b, t], e)
            used, num_admitted = used + len(run), num_admitted + len(admitted)
            num_selected += np.sum(logits[:, e] > 0)
        np.testing.assert_allclose(y[b], expected, rtol=3e-5, atol=3e-5)
    assert num_admitted < num_selected, "no token was dropped"
    assert sown["adapter/experts_per_token"] == pytest.approx(used / (ROWS * LENGTH))
    assert sown["adapter/overflow_fraction"] == pytest.approx(1 - num_admitted / num_selected)
    assert sown["inclusion_bce"] == pytest.approx(np.mean(bce), rel=1e-4)


def test_statistics_do_not_count_tokens_of_packed_rows_beyond_the_slots():
    """Documents of one token each admit every selected token, more than there are slots."""
    segment_ids_BT = jnp.tile(1 + jnp.arange(LENGTH), (ROWS, 1))
    call = TokenContext(jnp.zeros_like(segment_ids_BT), segment_ids_BT)
    a, x, _, sown = applied(call, **INCLUSION | {"capacity": 0.2})
    slots = math.ceil(0.2 * SLACK * LENGTH) + 4
    selected_BE = np.sum(x @ a["entrance"].T + a["entrance_bias"] > 0, axis=1)
    computed = np.minimum(selected_BE, slots).sum()
    assert computed < selected_BE.sum()
    assert sown["adapter/experts_per_token"] == pytest.approx(computed / (ROWS * LENGTH))
    assert sown["adapter/overflow_fraction"] == pytest.approx(1 - computed / selected_BE.sum())


def test_inclusion_is_deterministic_and_sums_over_experts_in_float32():
    """Scatters have unique indices; the gradient of a bfloat16 input is summed in float32."""
    adapter, params, x_BTD = adapter_of(jnp.bfloat16, **INCLUSION)
    call = CALL.replace(selection="train")

    def loss(params, x_BTD):
        return jnp.sum(adapter.apply({"params": params}, x_BTD, call).astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x_BTD).jaxpr
    scatters = [e for e in families.equations(jaxpr) if e.primitive.name.startswith("scatter")]
    assert len(scatters) > 2
    for equation in scatters:
        assert equation.params["unique_indices"], equation
        assert equation.invars[0].aval.dtype != jnp.bfloat16, equation


def test_padding_takes_no_slots_and_counts_in_no_statistic():
    adapter, params, x_BTD = adapter_of(**INCLUSION)
    is_padding_BT = jnp.tile(jnp.arange(LENGTH)[None] < 9, (ROWS, 1))
    call = CALL.replace(segment_ids_BT=1 - is_padding_BT)

    def results(x_BTD):
        y, sown = adapter.apply({"params": params}, x_BTD, call, mutable=["stats", "losses"])
        return y[:, 9:], sown

    other_BTD = x_BTD.at[:, :9].add(1.0)
    jax.tree.map(np.testing.assert_array_equal, results(x_BTD), results(other_BTD))


@pytest.mark.parametrize("changes", [{"gate": True}, {**COMPOSED, "top_k": 2}])
def test_gates_are_float32_in_bfloat16_models(changes):
    """A change of the gate that bfloat16 rounds away changes the output."""
    adapter, params, x_BTD = adapter_of(jnp.bfloat16, **changes)
    sign = np.random.default_rng(0).choice([-1, 1], params["gate"].shape)

    def output(gate):
        return np.float32(adapter.apply({"params": {**params, "gate": gate}}, x_BTD, CALL))

    gate = params["gate"].astype(jnp.bfloat16).astype(jnp.float32)
    assert np.any(output(gate) != output(gate * (1 + sign * 2.0**-10)))


# ---- models ------------------------------------------------------------------------------------

SITE = {
    "depth": 1, "width": WIDTH, "attention.num_heads": 2,
    "adapter.kind": "lora", "adapter.rank": 3, "adapter.scale": 1.5, "adapter.sites": ".*/up",
}  # fmt: skip


def test_the_adapter_is_added_to_its_linear_layer():
    model = families.make(SITE)
    params = families.random_params(model)
    _, sown = families.jit(
        lambda params: model.apply(
            {"params": params},
            families.tokens(),
            capture_intermediates=lambda module, _: module.name in ("norm_mlp", "up"),
            mutable=["intermediates"],
        )
    )(params)
    block = sown["intermediates"]["layers"]["block_0"]
    linear = params["layers"]["block_0"]["mlp"]["up"]
    (u,), (y,) = block["norm_mlp"]["__call__"], block["mlp"]["up"]["__call__"]
    expected = u @ linear["kernel"] + by_hand(linear["adapter"], u)
    np.testing.assert_allclose(y, expected, rtol=3e-5, atol=3e-5)


def test_a_new_adapter_changes_no_bit():
    """The base's parameters keep their paths, those of adapters lie beside them."""
    changes = {"depth": 2, "width": 16, "depth_routing.kind": "mod"}
    base, tokens_BT = families.make(changes), families.tokens(batch=2)
    adapted = families.make({**changes, "adapter.kind": "mlp"})
    flat = checkpoint.arrays.leaves_by_path(families.random_params(base))
    new = checkpoint.arrays.leaves_by_path(families.initial(adapted)["params"])
    assert set(flat) < set(new)
    assert all(path[-2] == "adapter" for path in set(new) - set(flat))

    state = families.random_state(base)

    @families.jit
    def both(old, new):
        runs = (base, old), (adapted, new)
        return [model.apply({"params": params, **state}, tokens_BT) for model, params in runs]

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
    _, _, params, variables = inference.restore(config_of_run(run), run)
    tree = {"params": params, **variables}
    return {
        "/".join(path): np.asarray(x) for path, x in checkpoint.arrays.leaves_by_path(tree).items()
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("abcdevwxyz "), 12_000)))
    return path


ROUTED = {"model.depth_routing.kind": "mod", "model.depth_routing.causal_decision": "threshold"}
PLAIN = {"model.depth_routing.kind": "none", "model.scan_layers": True}


def start(folder, name, variant, text, train=True, **changes):
    """The folder of a run; its second block is routed by a threshold."""
    config = config_of(variant, text, **{**ROUTED, **changes})
    trainer.train_and_evaluate(config, folder / name, train=train)
    return str(folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text, one_device):
    """The folder of a base, of an expert with gates, of one that is untrained and of both."""
    folder = tmp_path_factory.mktemp("runs")
    base = start(folder, "base", "", text)
    gated = {"init.run": base, "adapter.gate": True}
    a = start(folder, "a", "adapter", text, **gated)
    b = start(folder, "b", "adapter", text, False, seed=1, **gated)
    composed = {"init.run": base, "adapter.experts": (a, b)}
    start(folder, "compose", "compose", text, False, **composed)
    return folder


def changed(old, new):
    """Paths whose arrays differ; `new` has all paths of `old`."""
    return {path for path in old if not np.array_equal(old[path], new[path])}


def test_base_and_experts_of_a_composition_keep_every_bit(runs):
    """The thresholds of routers too."""
    base, a, b, composed = (params_at(runs / name) for name in ("base", "a", "b", "compose"))
    weights = {path: base[path] for path in base if path.startswith("params/")}
    assert not changed(weights, a) and not changed(base, composed)
    assert any(np.any(base[path]) for path in base if path.endswith("quantile"))
    assert all(np.any(a[path]) for path in a.keys() - base.keys()), "the adapter is trained"
    stacked = [path for path in composed if "/adapter/" in path]
    assert {path.rsplit("/", 1)[1] for path in stacked} == {"down", "up", "gate"}
    for e, expert in enumerate((a, b)):
        assert all(np.array_equal(composed[path][e], expert[path]) for path in stacked)


def test_a_composition_warns_of_an_expert_that_is_never_used(runs, text, tmp_path, capsys):
    """Gates that are not trained are equal, so all tokens use the first expert."""
    base = str(runs / "base")
    gated = {"init.run": base, "adapter.gate": True}
    c = start(tmp_path, "c", "adapter", text, False, seed=2, **gated)
    composed = {"init.run": base, "adapter.experts": (str(runs / "b"), c), "adapter.top_k": 1}
    capsys.readouterr()
    start(tmp_path, "both", "compose", text, False, **composed)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "expert_1 of config.adapter.experts is never used: by 0 of the tokens" in line


@pytest.mark.slow
def test_later_stages_train_gates_only(runs, text, tmp_path):
    """A finished adapter, and a composition, which starts from its step 0."""
    adapter, composed = params_at(runs / "a"), params_at(runs / "compose")
    gates = {path for path in composed if path.endswith("/gate")}
    start(tmp_path, "gate", "gate", text, **{"init.run": str(runs / "a")})
    shutil.copytree(runs / "compose", tmp_path / "joint")
    trainer.train_and_evaluate(config_of_run(runs / "compose"), tmp_path / "joint")
    for before, after in ((adapter, "gate"), (composed, "joint")):
        paths = changed(before, params_at(tmp_path / after))
        assert {path for path in paths if path.startswith("params/")} == gates


@pytest.mark.slow
def test_entrances_of_scanned_layers_train_alone(text, tmp_path, one_device):
    """Experts of scanned layers are [layer, expert, ...]; evaluation reports their usage."""
    base = start(tmp_path, "base", "", text, False, **PLAIN)  # at step 0
    given = {"init.run": base, **PLAIN}
    a = start(tmp_path, "a", "adapter", text, False, **given, **{"adapter.gate": True})
    given |= {"adapter.experts": (a,), "adapter.top_k": 1}
    start(tmp_path, "inclusion", "inclusion", text, **given)
    base, expert, inclusion = (params_at(tmp_path / name) for name in ("base", "a", "inclusion"))
    assert not changed(base, inclusion)
    for path in expert.keys() - base.keys():
        if not path.endswith("/gate"):
            assert np.array_equal(inclusion[path][:, 0], expert[path]), path
    config = config_of_run(tmp_path / "inclusion")
    metrics = inference.evaluate(config, tmp_path / "inclusion")
    assert 0 < metrics["eval/adapter/experts_per_token"] < 1
    assert "eval/adapter/usage/expert_0/block_1" in metrics
    assert inference.sample(config, tmp_path / "inclusion")["new_tokens"] == 4


@pytest.mark.slow
def test_runs_that_do_not_fit_together_are_refused(runs, text, tmp_path):
    a, b, base = (str(runs / name) for name in ("a", "b", "base"))
    other = start(tmp_path, "other", "", text, False, seed=5)  # at step 0
    plain = start(tmp_path, "plain", "adapter", text, False, **{"init.run": base})
    for changes, name in [
        ({"adapter.experts": (a, base)}, "config.adapter.kind='none'"),
        ({"adapter.rank": 5}, "config.adapter.rank=4"),
        ({"adapter.experts": (a, plain)}, plain),  # without gates
        ({"adapter.experts": (a, str(runs / "compose"))}, str(runs / "compose")),
        ({"init.run": other}, f"config.init.run={other}"),
    ]:
        given = {"init.run": base, "adapter.experts": (a, b), **changes}
        compose = functools.partial(start, tmp_path, "c", "compose", text, False, **given)
        refused(compose, name)
        shutil.rmtree(tmp_path / "c", ignore_errors=True)


# ---- settings, costs ---------------------------------------------------------------------------

LORA = {"adapter.kind": "lora"}
TWO = {**LORA, "adapter.experts": ("a", "b")}
ENTRANCES = {**TWO, "adapter.routing": "inclusion"}
STREAMS = {"family": "encoder_decoder"}
MOD = {"depth_routing.kind": "mod", "depth_routing.every": 1, "depth_routing.capacity": 0.5}


@pytest.mark.parametrize(
    "changes, name",
    [
        ({**LORA, "adapter.sites": ".*/qwery"}, "config.adapter.sites='.*/qwery'"),
        ({**TWO, "adapter.top_k": 3}, "config.adapter.top_k=3"),
        ({**ENTRANCES, **MOD}, "config.model.depth_routing.kind='mod'"),
        ({**ENTRANCES, "family": "latent"}, "config.model.family='latent'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(changes, name):
    refused(lambda: families.make(changes), name)


def test_sites_of_scanned_layers_are_those_of_unrolled_ones():
    """Or are refused: a scan has one set of adapters for all layers that it computes as one."""

    def adapted(pattern, scan_layers):
        changes = {"depth": 4, "depth_routing.kind": "mod", "scan_layers": scan_layers, **LORA}
        return families.make({**changes, "adapter.sites": pattern})

    def sites(model):
        _, params = models.unroll(model, jax.device_get(families.random_params(model)))
        return {path for path in flatten_dict(params, sep="/") if "/adapter/" in path}

    both, one = "layers/block_[13]/.*/query", "layers/block_1/.*/query"
    unrolled = sites(adapted(both, False))
    assert unrolled and sites(adapted(both, True)) == unrolled
    refused(lambda: adapted(one, True), one)
