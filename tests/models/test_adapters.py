"""Adapters, gates and composed experts: formulas, what stays frozen, order, bad input, pictures.

The properties that every model has (causality, cached decoding, scan, devices, ledger) are checked
by the rows `adapter...` of test_families.py.
"""

import functools
import math
import re
import shutil

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from efx import build, checkpoint, models, runfolder, train, use
from efx.configs import common
from efx.errors import UsageError
from efx.layers.info import CallInfo, Mode, Tokens
from efx.layers.linear import Linear
from efx.models.adapters import layers as adapters
from efx.models.adapters import model as adapters_model
from efx.models.adapters.config import AdapterConfig

EXPERTS, RANK, WIDTH, FEATURES = 4, 3, 6, 5


def settings(**changes):
    c = {**common.base().adapter, "kind": "lora", "rank": RANK, "scale": 1.5, "sites": ".*"}
    c |= changes
    return AdapterConfig(**c)


class One(nn.Module):
    """A single adapted linear layer, told about its tokens."""

    config: adapters.AdapterConfig
    inner: bool = False

    @nn.compact
    def __call__(self, x, info=None):
        if not self.inner:
            with nn.intercept_methods(adapters.Interceptor(self.config, self.path, 0)):
                return One(self.config, True, name="layer")(x, info)
        return Linear(FEATURES, ("embed", "mlp"), 0.3, name="up")(x)


def case(config, rows=2, length=7, seed=0):
    """(module, parameters in which nothing is zero, x, info)."""
    rng = np.random.default_rng(seed)
    x_BTD = np.float32(rng.normal(size=(rows, length, WIDTH)))
    info = CallInfo(Tokens(np.arange(length)[None]))
    module = One(config)
    shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), x_BTD, info)))
    params = jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes["params"])
    return module, params, x_BTD, info


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def parts(params):
    """(W, the adapter's arrays) in float64."""
    layer = params["layer"]["up"]
    return np.float64(layer["kernel"]), {k: np.float64(v) for k, v in layer["adapter"].items()}


def standardised(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.parametrize("kind", ["lora", "mlp"])
@pytest.mark.parametrize("gate", [False, True])
def test_one_adapter(kind, gate):
    module, params, x, info = case(settings(kind=kind, gate=gate))
    kernel, a = parts(params)
    u = np.float64(x)
    h = u @ a["down"]
    expected = (gelu(h) if kind == "mlp" else h) @ a["up"]
    if gate:
        expected = expected / (1 + np.exp(-(u @ a["gate"])))[..., None]
    result = families.jit(module.apply)({"params": params}, x, info)
    np.testing.assert_allclose(result, u @ kernel + 1.5 * expected, rtol=2e-5, atol=2e-5)


def test_a_gate_multiplies_in_float32_under_bfloat16():
    """An adapter that repeats the first feature of its input: its product with gate and scale is
    exact but for one rounding."""
    config = settings(rank=1, gate=True)
    module = adapters.Adapter(config, FEATURES, ("embed", "mlp"), jnp.bfloat16)
    first_D = np.eye(WIDTH, dtype=np.float32)[0]
    u_C = np.linspace(1, 3, 40).astype(jnp.bfloat16)
    params = {"down": first_D[:, None], "up": np.ones((1, FEATURES), np.float32), "gate": first_D}
    y_CF = families.jit(module.apply)(
        {"params": params}, u_C[:, None] * first_D.astype(u_C.dtype), None
    )
    u_C1 = np.float64(u_C)[:, None]
    exact_C1 = 1.5 * u_C1 / (1 + np.exp(-u_C1))
    assert y_CF.dtype == jnp.bfloat16
    step_C1 = 2.0 ** (np.floor(np.log2(exact_C1)) - 7)
    assert np.all(np.abs(np.float64(y_CF) - exact_C1) <= 0.501 * step_C1)


def test_affinities_are_of_float32_under_bfloat16():
    rng = np.random.default_rng(0)
    u_CD, gate_ED = jnp.asarray(rng.normal(size=(40, 64)), jnp.bfloat16), rng.normal(size=(3, 64))
    run = families.jit(adapters.affinities)
    wide_CE = run(u_CD.astype(jnp.float32), np.float32(gate_ED))
    np.testing.assert_allclose(run(u_CD, np.float32(gate_ED)), wide_CE, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("kind", ["lora", "mlp"])
def test_composition_is_the_papers(kind, top_k):
    """Token by token, straight from the formula."""
    config = settings(kind=kind, experts=tuple("abcd"), top_k=top_k)
    module, params, x, info = case(config)
    kernel, a = parts(params)
    result = np.asarray(families.jit(module.apply)({"params": params}, x, info))
    for b, t in np.ndindex(*x.shape[:2]):
        u = np.float64(x[b, t])
        affinity = np.array([standardised(v) @ standardised(u) for v in a["gate"]])
        chosen = np.argsort(-affinity)[:top_k]
        weights = softmax(affinity[chosen] / math.sqrt(WIDTH))
        expected = u @ kernel
        for e, w in zip(chosen, weights, strict=True):
            h = u @ a["down"][e]
            expected = expected + 1.5 * w * ((gelu(h) if kind == "mlp" else h) @ a["up"][e])
        np.testing.assert_allclose(result[b, t], expected, rtol=3e-5, atol=3e-5)


def test_uniform_is_the_mean():
    module, params, x, info = case(settings(experts=tuple("abcd"), routing="uniform"))
    kernel, a = parts(params)
    u = np.float64(x)
    mean = np.mean([u @ a["down"][e] @ a["up"][e] for e in range(EXPERTS)], axis=0)
    result = families.jit(module.apply)({"params": params}, x, info)
    np.testing.assert_allclose(result, u @ kernel + 1.5 * mean, rtol=2e-5, atol=2e-5)
    assert "gate" not in a


@pytest.mark.parametrize("selection", ["causal", "train"])
def test_inclusion_leaves_experts_out(selection):
    """The decision, the room of an expert in order of time, and the weights."""
    config = settings(
        experts=tuple("abcd"), routing="inclusion", capacity=0.3, slack=1.4, sites=".*"
    )
    length = 9
    module, params, x, info = case(config, rows=3, length=length)
    kernel, a = parts(params)
    info = info.replace(mode=Mode(selection=selection))
    apply = functools.partial(module.apply, mutable=["stats", "losses", "choices"])
    result, sown = jax.device_get(families.jit(apply)({"params": params}, x, info))
    used, dropped, wanted_all = 0, 0, 0
    bce = []
    for b in range(len(x)):
        u = np.float64(x[b])
        logits = u @ a["entrance"].T + a["entrance_bias"]
        expected = u @ kernel
        for e in range(EXPERTS):
            best = np.sort(np.argsort(-logits[:, e])[: math.ceil(0.3 * length)])
            wanted = np.flatnonzero(logits[:, e] > 0)
            fits = wanted[: math.ceil(0.42 * length)]
            run = best if selection == "train" else fits
            target = np.isin(np.arange(length), best)
            bce.append(np.log1p(np.exp(-np.where(target, 1, -1) * logits[:, e])))
            for t in run:
                w = 1 / (1 + np.exp(-logits[t, e]))
                expected[t] += 1.5 * w * (u[t] @ a["down"][e] @ a["up"][e])
            used, wanted_all = used + len(run), wanted_all + len(wanted)
            dropped += len(wanted) - len(fits)
        np.testing.assert_allclose(result[b], expected, rtol=3e-5, atol=3e-5)
    assert dropped > 0, "the case has an expert that is full"
    stats = {k: float(v[0]) for k, v in sown["stats"]["layer"]["up"]["adapter"].items()}
    assert stats["adapter/experts_per_token"] == pytest.approx(used / x[..., 0].size)
    assert stats["adapter/dropped_fraction"] == pytest.approx(dropped / wanted_all)
    loss = sown["losses"]["layer"]["up"]["adapter"]["inclusion_bce"][0]
    assert float(loss) == pytest.approx(np.mean(bce), rel=1e-4)
    weights = sown["choices"]["layer"]["up"]["adapter"]["weights"][0].value
    assert weights.shape == (3, length, EXPERTS) and (np.asarray(weights) > 0).sum() == used


def test_padding_takes_no_room_and_counts_in_nothing():
    config = settings(experts=tuple("abcd"), routing="inclusion", capacity=0.3, slack=1.0)
    module, params, x, info = case(config, length=10)
    info = info.with_tokens(segment_ids_BT=np.repeat([[0] * 4 + [1] * 6], 2, axis=0))
    apply = families.jit(functools.partial(module.apply, mutable=["stats"]))

    def run(x):
        result, sown = apply({"params": params}, x, info)
        return np.asarray(result)[:, 4:], sown

    a, b = run(x), run(np.where(np.arange(10)[:, None] < 4, -3 * x, x))
    np.testing.assert_array_equal(a[0], b[0])
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


@pytest.mark.parametrize("kind", ["lora", "mlp"])
def test_a_new_adapter_adds_nothing(kind):
    """Its second matrix starts at zero."""
    module, _, x, info = case(settings(kind=kind))
    fresh = jax.jit(lambda key: nn.unbox(module.init(key, x, info)))(jax.random.key(0))
    adapter = jax.device_get(fresh["params"]["layer"]["up"]["adapter"])
    assert not np.any(adapter["up"]) and np.all(adapter["down"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"depth_routing.kind": "mod", "depth_routing.capacity": 0.5},
        {"mlp.kind": "moe"},
        {"family": "encoder_decoder"},
    ],
)
def test_a_new_adapter_changes_nothing(changes):
    """On any family: the base's parameters at their paths, its logits to the bit."""
    base = families.make(changes)
    adapted = families.make({**changes, "adapter.kind": "lora"})
    flat = checkpoint.files.flatten(families.random_params(base))
    new = checkpoint.files.flatten(families.random_params(adapted, seed=1))
    assert set(flat) < set(new)
    assert all(path[-2] == "adapter" for path in set(new) - set(flat))
    new = {path: 0 * np.asarray(leaf) if path[-1] == "up" else leaf for path, leaf in new.items()}
    state, tokens_BT = families.random_state(base), families.tokens()
    expected, result = (
        families.jit(model.apply)({"params": unflatten_dict(params), **state}, tokens_BT)
        for model, params in ((base, flat), (adapted, new | flat))
    )
    np.testing.assert_array_equal(result, expected)


def permuted(tree, order):
    def one(path, leaf):
        return np.asarray(leaf)[order] if path[-2].key == "adapter" else leaf

    return jax.tree_util.tree_map_with_path(one, tree)


@pytest.mark.parametrize("name", ["adapter_streams", "adapter_inclusion"])
def test_the_order_of_experts_does_not_matter(name):
    params = families.params_of(name)
    expected = families.logits_of(name, families.tokens())
    other = families.forward(name)(permuted(params, [2, 0, 1]), families.tokens())
    np.testing.assert_allclose(other, expected, atol=2e-5)
    swapped = families.forward(name)(permuted(params, [0, 0, 1]), families.tokens())
    assert np.abs(np.asarray(swapped) - expected).max() > 1e-2  # experts do matter


# ---- runs --------------------------------------------------------------------------------------

TINY = {
    "steps": 4, "data.seq_len": 32, "data.batch_size": 8, "data.max_bytes": 30_000,
    "model.width": 32, "model.depth": 2, "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 1, "optim.schedule.decay_steps": 4, "checkpoint.every": 2,
    "evaluate.every": 0, "evaluate.batch_size": 8, "evaluate.max_batches": 2, "sample.every": 0,
    "log.every": 1, "log.tensorboard": False, "mesh.data": -1, "adapter.rank": 4,
    "optim.learning_rate": 1e-2, "sample.prompt": "ab", "sample.max_new_tokens": 12,
    "adapter.sites": ".*/(query|up)",  # of an attention and an MLP; all take thrice as long
}  # fmt: skip


def config_of(variant, text, **changes):
    from efx.configs import phatgoose

    config = phatgoose.get_config()
    for name in filter(None, variant.split(",")):
        common.apply(config, phatgoose.VARIANTS[name])
    return common.apply(config, {**TINY, "data.source": f"text:{text}", **changes})


def params_at(run):
    """{path: array} of the newest checkpoint."""
    _, _, params, variables = build.finished(config_in(run), run)
    tree = {"params": params, **variables}
    return {"/".join(path): np.asarray(x) for path, x in checkpoint.files.flatten(tree).items()}


def config_in(run):
    from efx.config import config_of_run

    return config_of_run(run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, one_device):
    """{name: run folder}: a base, two experts with gates, and what is composed of them."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for name, letters in (("a", "abcde "), ("b", "vwxyz "), ("both", "abcdevwxyz ")):
        (folder / f"{name}.txt").write_text("".join(rng.choice(list(letters), 12_000)))

    def do(name, variant, text, action=train.train_and_evaluate, **changes):
        action(config_of(variant, folder / f"{text}.txt", **changes), folder / name)
        return str(folder / name)

    base = do("base", "", "both", **{"data.tokenizer": "bytes"})
    adapter = do("adapter_a", "adapter", "a", **{"init.run": base})
    gate_a = do("gate_a", "gate", "a", **{"init.run": adapter})
    # The other expert has its gates trained with it: one run instead of two.
    gate_b = do("gate_b", "adapter", "b", **{"init.run": base, "adapter.gate": True})
    composed = {"init.run": base, "adapter.experts": (gate_a, gate_b)}
    do("compose", "compose", "both", train.compose, **composed)
    do("joint", "joint", "both", **composed)
    do("inclusion", "inclusion", "both", **composed)
    return {path.name: path for path in folder.iterdir() if path.is_dir()} | {"folder": folder}


def test_what_is_frozen_keeps_every_bit(runs):
    base, gate = params_at(runs["base"]), params_at(runs["gate_a"])
    adapter, joint = params_at(runs["adapter_a"]), params_at(runs["joint"])
    weights = [path for path in base if path.startswith("params/")]
    for other in (adapter, gate, joint, params_at(runs["inclusion"])):
        for path in weights:
            assert base[path].tobytes() == other[path].tobytes(), path
    for path in adapter.keys() - base.keys():
        assert adapter[path].tobytes() == gate[path].tobytes(), path
        assert np.any(adapter[path] != 0), path
    moved = [path for path in joint if path.endswith("/gate")]
    composed = params_at(runs["compose"])
    assert moved and all(np.any(joint[path] != composed[path]) for path in moved)
    for path in composed:
        if path not in moved and path.startswith("params/"):
            assert composed[path].tobytes() == joint[path].tobytes(), path


def test_a_composition_holds_its_experts_as_they_are(runs):
    composed = params_at(runs["compose"])
    experts = [params_at(runs[f"gate_{name}"]) for name in "ab"]
    found = [path for path in composed if "/adapter/" in path]
    assert {path.rsplit("/", 1)[1] for path in found} == {"down", "up", "gate"}
    for path in found:
        for e, expert in enumerate(experts):
            assert composed[path][e].tobytes() == expert[path].tobytes(), path


def test_experts_of_scanned_layers_are_stacked_behind_the_layers(runs, tmp_path):
    """An adapter of layers that are scanned is [layer, expert, ...]; its experts are what theirs
    are."""
    text = runs["folder"] / "both.txt"

    def run(name, variant, action, **changes):
        config = config_of(variant, text, **{"model.scan_layers": True, "steps": 2, **changes})
        action(config, tmp_path / name)
        return tmp_path / name

    base = run("base", "", train.train_and_evaluate, **{"data.tokenizer": "bytes"})
    adapter = {"init.run": str(base), "adapter.gate": True}
    experts = [
        run(name, "adapter", train.train_and_evaluate, **adapter, seed=seed)
        for seed, name in enumerate("ab")
    ]
    composed = run("compose", "compose", train.compose, **{
        "init.run": str(base), "adapter.experts": tuple(map(str, experts)),
    })  # fmt: skip
    values = params_at(composed)
    found = [path for path in values if "/units/" in path and "/adapter/" in path]
    assert {path.rsplit("/", 1)[1] for path in found} == {"down", "up", "gate"}
    for e, expert in enumerate(map(params_at, experts)):
        for path in found:
            assert values[path][:, e].tobytes() == expert[path].tobytes(), path


def test_running_averages_are_the_bases(runs, tmp_path):
    """The threshold of a routed base, without which the composition would route nothing."""
    text, mod = runs["folder"] / "both.txt", {
        "model.depth_routing.kind": "mod", "model.depth_routing.causal": "threshold", "steps": 2,
        "model.depth": 1, "model.depth_routing.every": 1, "optim.schedule.decay_steps": 2,
    }  # fmt: skip
    train.train_and_evaluate(config_of("", text, **mod), tmp_path / "base")
    mod["init.run"] = str(tmp_path / "base")
    train.compose(config_of("adapter", text, **mod), tmp_path / "adapter")  # an untrained expert
    mod["adapter.experts"] = (str(tmp_path / "adapter"),)
    train.compose(config_of("uniform", text, **mod), tmp_path / "composed")
    base, composed = params_at(tmp_path / "base"), params_at(tmp_path / "composed")
    states = [path for path in base if path.startswith("state/")]
    assert all(np.array_equal(base[path], composed[path]) for path in states)
    assert any(base[path] != 0 for path in states if path.endswith("quantile"))


def test_adding_an_expert_retrains_nothing(runs, tmp_path):
    experts = tuple(str(runs[name]) for name in ("gate_b", "gate_a"))
    shutil.copytree(runs["gate_a"], tmp_path / "third")
    experts += (str(tmp_path / "third"),)
    changes = {"init.run": str(runs["base"]), "adapter.experts": experts}
    config = config_of("compose", runs["folder"] / "both.txt", **changes)
    train.compose(config, tmp_path / "more")
    two, three = params_at(runs["compose"]), params_at(tmp_path / "more")
    for path in two:
        if "/adapter/" in path:
            assert two[path].tobytes() == three[path][[1, 0]].tobytes(), path


def test_a_composition_evaluates_samples_and_says_who_was_used(runs, capsys):
    for name in ("compose", "inclusion"):
        metrics = use.evaluate(config_in(runs[name]), runs[name])
        used = metrics["eval/adapter/experts_per_token"]
        assert used == pytest.approx(2) if name != "inclusion" else 0 < used < 2
        shares = [metrics[f"eval/adapter/usage/expert_{e}"] for e in range(2)]
        assert sum(shares) == pytest.approx(used, rel=1e-4)
        assert "eval/adapter/usage/expert_1/block_1" in metrics
        stats = use.sample(config_in(runs[name]), runs[name])
        assert stats["new_tokens"] == 12
    text = capsys.readouterr().out
    assert "experts a token" in text


def test_composing_again_and_training_on(runs, capsys, tmp_path):
    config = config_in(runs["compose"])
    train.compose(config, runs["compose"])
    assert "composed already" in capsys.readouterr().out
    # Step 0 of a composition is where joint training starts.
    shutil.copytree(runs["compose"], tmp_path / "on")
    train.train_and_evaluate(config, tmp_path / "on")
    a, b = params_at(tmp_path / "on"), params_at(runs["joint"])
    assert all(a[path].tobytes() == b[path].tobytes() for path in b)


def test_a_base_with_other_settings_of_its_model_was_taken_in_silence(runs, tmp_path, capsys):
    """A window changes no parameter, and so was not seen."""
    changes = {"init.run": str(runs["base"]), "adapter.experts": (str(runs["gate_a"]),)}
    text, said = runs["folder"] / "both.txt", "not the model of .*: config"
    changes |= {"adapter.top_k": 1}
    train.compose(config_of("compose", text, **changes), tmp_path / "same")
    assert not re.search(said, capsys.readouterr().out)
    changes |= {"model.attention.window": 3, "model.remat": "full"}
    train.compose(config_of("compose", text, **changes), tmp_path / "other")
    lines = re.findall(said + ".*", capsys.readouterr().out)
    assert [line.split(": ")[-1] for line in lines] == ["config.model.attention.window=0"] * 2
    assert "base:" in lines[0] and "gate_a:" in lines[1]


def test_resume_is_exact(runs, tmp_path):
    changes = {"init.run": str(runs["base"])}
    text = runs["folder"] / "a.txt"
    train.train_and_evaluate(config_of("adapter", text, steps=2, **changes), tmp_path / "x")
    train.train_and_evaluate(config_of("adapter", text, **changes), tmp_path / "x")
    a, b = params_at(tmp_path / "x"), params_at(runs["adapter_a"])
    assert all(a[path].tobytes() == b[path].tobytes() for path in b)


def test_map_of_tokens(runs):
    from efx.studies.token_map import made_of

    made, ids, _, _ = made_of(runs["inclusion"], "abcde vwxyz")
    count = made.of("experts")
    assert "block_0 mlp up" in count and len(ids) == 11
    assert all(row_T.shape == (11,) and row_T.max() <= 2 for row_T in count.values())
    with pytest.raises(UsageError, match="no decision per token"):
        made_of(runs["base"], "abcde vwxyz")


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "none", "experts": ("a",)}, r"config\.adapter\.experts.*needs.*kind"),
        ({"kind": "none", "gate": True}, r"config\.adapter\.gate=True"),
        ({"rank": 0}, r"config\.adapter\.rank=0"),
        ({"scale": 0.0}, r"config\.adapter\.scale=0\.0"),
        ({"sites": "layers/(.*"}, r"config\.adapter\.sites.*not a regular expression"),
        (
            {"sites": ".*/qwery"},
            r"sites='\.\*/qwery' matches none of the 14.*such as layers/block_0",
        ),
        ({"sites": "head"}, r"sites='head' matches none"),
        (
            {"experts": ("a", "b"), "top_k": 3},
            r"config\.adapter\.top_k=3.*config\.adapter\.experts, 2",
        ),
        ({"experts": ("a", "a")}, r"config\.adapter\.experts.*has a run twice"),
        ({"capacity": 1.5}, r"config\.adapter\.capacity=1\.5"),
        ({"slack": 0.5}, r"config\.adapter\.slack=0\.5"),
        ({"rnk": 3}, r"config\.adapter\.rnk is not a setting \(did you mean 'rank'\?\)"),
    ],
)
def test_bad_settings_are_one_line(changes, words):
    adapter = {**common.base().adapter, "kind": "lora", **changes}
    with pytest.raises(UsageError, match=words):
        models.build(
            families.model_config({}), vocab_size=9, context=8, dtype="float32", adapter=adapter
        )


def test_an_adapted_model_is_not_written_as_its_base():
    from efx.interop.hf_config import config_to_hf

    with pytest.raises(UsageError, match=r"config\.adapter\.kind='lora'.*not support adapters"):
        config_to_hf(families.make({"adapter.kind": "lora"}))


def test_sites_of_scanned_layers_are_those_of_unrolled_ones():
    """A pattern that names layers means the same with scan_layers, or is refused: a scan has one
    set of adapters for all layers that it computes as one."""

    def adapted(scan_layers, sites, **changes):
        changes = {"depth": 4, "scan_layers": scan_layers, "adapter.kind": "lora", **changes}
        return families.make({**changes, "adapter.sites": sites})

    def adapters_of(model):
        _, params = models.unroll(model, families.random_params(model))
        return {path for path in flatten_dict(params, sep="/") if "/adapter/" in path}

    def check_same(*arguments, **changes):
        unrolled = adapters_of(adapted(False, *arguments, **changes))
        assert unrolled and adapters_of(adapted(True, *arguments, **changes)) == unrolled

    check_same(r"layers/block_\d/.*/query")
    mod = {"depth_routing.kind": "mod", "depth_routing.every": 2}
    check_same("layers/block_[13]/.*/query", **mod)
    words = r"matches layers/block_1/\S+ but not layers/block_0/\S+, .*scan_layers=True"
    with pytest.raises(UsageError, match=words):
        adapted(True, "layers/block_1/.*/query")
    with pytest.raises(UsageError, match="matches .*block_1/.* but not .*block_3/.*"):
        adapted(True, "layers/block_1/.*/query", **mod)


def test_inclusion_needs_to_know_the_tokens():
    """Which are padding is not known of layers between levels, which map other tokens."""
    changes = {
        **families.FAMILIES["latent"].changes,
        "adapter.kind": "lora",
        "adapter.experts": ("a", "b"),
        "adapter.sites": ".*/residual",
    }
    families.make({**changes, "adapter.routing": "uniform"})
    with pytest.raises(UsageError, match=r"\S*/residual, outside of the layers"):
        families.make({**changes, "adapter.routing": "inclusion"})


@pytest.mark.parametrize(
    "changes",
    [
        {"depth_routing.kind": "mod"},
        {"depth_routing.kind": "recursion", "depth": 4},
        {"family": "latent", "group_size": 4, "latents": (2,), "depth_routing.kind": "mod"},
    ],
    ids=["blocks", "steps", "latents"],
)
def test_flops_follow_what_was_routed(changes):
    """Adapters of routed blocks cost what their blocks were seen to compute; the ledger of measured
    shares is linear in them."""
    changes = {"depth_routing.capacity": 0.5, "depth_routing.every": 1, **changes}
    plain = families.make(changes)
    model = adapters_model.adapt(plain, settings(sites=".*/block_[0-9]+/.*"))
    routed = [path for path, spec in model.blocks().items() if spec.routing is not None]

    def cost(share):
        shares = {path: (share, share) for path in routed}
        return model.ledger(16, shares=shares).nominal["adapters"]

    whole = families.make({**changes, "depth_routing.capacity": 1.0})
    whole = adapters_model.adapt(whole, settings(sites=".*/block_[0-9]+/.*"))
    everything = whole.ledger(16).nominal["adapters"]
    assert cost(1.0) == everything > model.ledger(16).nominal["adapters"]
    assert cost(0.25) - cost(0.0) == pytest.approx((cost(1.0) - cost(0.0)) / 4)


def test_flops_of_a_gate_are_counted_where_there_is_one():
    """One product of D for each token and site; an adapter alone has a gate if its config says."""
    changes = {"width": 16, "depth": 2, "adapter.kind": "lora", "adapter.sites": ".*/query"}
    plain, gated = (
        families.make({**changes, "adapter.gate": gate}).ledger(8).nominal["adapters"]
        for gate in (False, True)
    )
    assert gated - plain == 2 * (2 * 8 * 16)


def test_mlps_of_open_tokens_alone_do_not_say_which_these_are():
    """What an adapter reports or decides is of tokens that it does not know there."""
    model = families.make(
        {
            "dropout.kind": "attention",
            "dropout.sites": ("mlp_output",),
            "dropout.attention.input": "embedding",
            "dropout.attention.granularity": "token",
            "dropout.attention.rounding": "stochastic",
            "dropout.attention.skip_tile": 4,
        }
    )
    adapters_model.adapt(model, settings())  # which asks for nothing
    for changes in ({"gate": True}, {"experts": ("x", "y")}):
        adapters_model.adapt(model, settings(sites=".*/attention/query", **changes))
        with pytest.raises(UsageError, match="matches .*/mlp/.*skip_tile=4"):
            adapters_model.adapt(model, settings(**changes))


def test_inclusion_and_depth_routing_do_not_mix():
    with pytest.raises(UsageError, match=r"routing='inclusion'.*depth_routing\.kind='mod'"):
        families.make(
            {
                "depth_routing.kind": "mod",
                "adapter.kind": "lora",
                "adapter.experts": ("a", "b"),
                "adapter.routing": "inclusion",
            }
        )


def test_bad_experts_are_one_line(runs, tmp_path):
    good = tuple(str(runs[f"gate_{name}"]) for name in "ab")
    other = tmp_path / "other"
    train.compose(config_of("", runs["folder"] / "both.txt", seed=5), other)  # at step 0
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(runs["gate_a"] / runfolder.CONFIG_FILE, unfinished)
    for changes, words in [
        (
            {"init.run": ""},
            r"config\.adapter\.kind=.lora.: config\.init\.run is empty",
        ),
        ({"adapter.experts": (good[0], "nowhere")}, r"experts=nowhere: there is no such run"),
        ({"adapter.experts": (good[0], str(unfinished))}, r"unfinished"),
        ({"adapter.experts": (good[0], str(runs["base"]))}, r"has config\.adapter\.kind='none'"),
        ({"adapter.rank": 5}, r"gate_a has config\.adapter\.rank=4, not 5"),
        ({"adapter.experts": (good[0], str(runs["adapter_a"]))}, r"adapter_a has no gates"),
        (
            {"adapter.experts": (good[0], str(runs["joint"]))},
            r"joint is itself composed of experts",
        ),
        ({"init.run": str(other)}, r"base model of .*gate_a is not config\.init\.run=.*other"),
    ]:
        given = {"init.run": str(runs["base"]), "adapter.experts": good, **changes}
        config = config_of("compose", runs["folder"] / "both.txt", **given)
        with pytest.raises(UsageError, match=words) as error:
            train.compose(config, tmp_path / "composed")
        assert "\n" not in str(error.value)
        shutil.rmtree(tmp_path / "composed", ignore_errors=True)
