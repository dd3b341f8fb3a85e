"""What every family of models keeps: each property of the contract on each row of FAMILIES.

What a feature can break on its own (causality, cached decoding, the ledger) is held on every row.
What belongs to the machinery (jit, bfloat16, scanned and recomputed layers, devices, packed rows)
is compiled on REPRESENTATIVES, which between them have every mechanism; the training of the other
rows is traced, for its shapes.
"""

import collections
import dataclasses
import functools
import math
import re
import typing

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import BATCH, FAMILIES, LENGTH, NAMES, VOCAB
from flax import linen as nn

from efx import flops, models, settings, sharding
from efx.layers import attend
from efx.layers.attention import Attention
from efx.layers.config import DepthRoutingConfig, DropoutConfig, MLPConfig, MoEConfig
from efx.layers.mlp import MLP
from efx.layers.routing import plans
from efx.layers.routing.moe import MoE
from efx.layers.routing.soft_experts import SoftMLP
from efx.layers.stack import Layer, period, scan_params
from efx.models.adapters.config import AdapterConfig
from efx.settings import is_block

# {row: what it stands for}
REPRESENTATIVES = {
    "llama_options": "attention: grouped heads, a window, a norm of queries and keys, softcaps",
    "mod_options": "routed blocks, top-k in training and the router's sign as the causal decision",
    "mod_threshold": "decisions by a running quantile, which is a variable beside the parameters",
    "mod_stochastic": "slots that are drawn anew from a key",
    "recursion": "a shared stack, and slots inside of slots",
    "mode_staged": "experts that tokens choose, no-op ones too, inside of routed blocks",
    "moe_expert_choice": "experts that choose tokens",
    "dropout_elementwise_mod": "elementwise masks, a predictor that decides, the gpt2 preset",
    "streams_masks": "the encoder-decoder, masks by attention",
    "latent_parts": "the latent family, soft experts, averages of earlier states, muP",
    "adapter_mod": "LoRA, adapters mixed by token, slots at fixed positions, a skip MLP",
    "adapter_inclusion": "adapters that are small MLPs, of which each may be left out",
}
# What no representative has, and why.
UNREPRESENTED = {
    ("family", "bridged"): "made of other models: test_calm.py has all of this for it",
    ("dropout.kind", "standard"): "is nothing outside of training: test_models.py",
    ("depth_routing.train_selection", "position"): "the row mod_fixed; test_controls.py",
    ("adapter.routing", "uniform"): "a mean, as adapters mixed by token are with equal weights",
}

# Settings whose choices are mechanisms each.
KINDS = {
    "depth_routing.kind": DepthRoutingConfig,
    "depth_routing.train_selection": DepthRoutingConfig,
    "depth_routing.causal": DepthRoutingConfig,
    "mlp.kind": MLPConfig,
    "mlp.moe.router": MoEConfig,
    "dropout.kind": DropoutConfig,
    "adapter.kind": AdapterConfig,
    "adapter.routing": AdapterConfig,
}
SWITCHES = ("depth_routing.kv_for_skipped", "depth_routing.skip_mlp", "mlp.moe.num_noop")

every_family = pytest.mark.parametrize("name", NAMES)
every_representative = pytest.mark.parametrize("name", REPRESENTATIVES)
# Places after which tokens are changed, one for each row of a batch.
CUTS = (0, 1, 4, 11, 12, 17, 25, 30)


# ---- the representatives -----------------------------------------------------------------------


def mechanisms(name):
    """(setting, choice) of what a row has in use, and the blocks of settings that it changes."""
    changes = FAMILIES[name].changes
    c, adapter = families.build(name).config, families.small_config(changes).adapter
    routing, moe = c.depth_routing, c.mlp.moe
    yield from (("block", key.partition(".")[0]) for key in changes if "." in key)
    yield from (("switch", key) for key in SWITCHES if changes.get(key))
    yield "family", c.family
    yield "mlp.kind", c.mlp.kind
    yield "dropout.kind", c.dropout.kind
    yield "adapter.kind", adapter.kind
    yield "depth_routing.kind", routing.kind
    if routing.kind != "none":
        yield "depth_routing.train_selection", routing.train_selection
    if routing.kind != "none" and not routing.control:
        yield "depth_routing.causal", routing.causal
    if c.mlp.kind == "moe":
        yield "mlp.moe.router", moe.router
    if adapter.experts:
        yield "adapter.routing", adapter.routing


def test_every_mechanism_has_a_representative():
    """Every family, block of settings, kind of routing, of experts, of dropout and of adapters."""
    wanted = {("family", family) for family in models.FAMILIES} | {("block", "adapter")}
    wanted |= {("switch", key) for key in SWITCHES}
    for key, cls in KINDS.items():
        choices = typing.get_args(typing.get_type_hints(cls)[key.rpartition(".")[2]])
        wanted |= {(key, choice) for choice in choices}
    for cls, _ in models.FAMILIES.values():
        blocks = (name for name, hint in typing.get_type_hints(cls).items() if is_block(hint))
        wanted |= {("block", name) for name in blocks}
    represented = {each for name in REPRESENTATIVES for each in mechanisms(name)}
    assert wanted - represented == set(UNREPRESENTED)
    assert set(REPRESENTATIVES) <= {name for name, *_ in SCANNED} | set(UNSCANNED)


# ---- the forward pass --------------------------------------------------------------------------


@every_family
def test_logits_are_finite_float32_of_the_right_shape(name):
    logits_BTV = families.logits_of(name, families.tokens())
    assert logits_BTV.shape == (BATCH, LENGTH, VOCAB)
    assert logits_BTV.dtype == np.float32
    assert np.isfinite(logits_BTV).all()
    assert logits_BTV.std() > 0.1  # large enough for the comparisons below to mean something


@every_representative
def test_bfloat16_is_close(name):
    model = families.build(name, "bfloat16")
    run = families.jit(functools.partial(model.apply, rngs=families.keys()))
    logits_BTV = run(families.variables_of(name), families.tokens())
    exact_BTV = families.logits_of(name, families.tokens())
    assert logits_BTV.dtype == np.float32
    assert not np.array_equal(logits_BTV, exact_BTV)
    error_BT = np.abs(logits_BTV - exact_BTV).max(axis=-1) / exact_BTV.std()
    # A token whose score is next to nothing may be routed in one and not in the other; most
    # tokens, and without routing all, differ by rounding.
    assert np.median(error_BT) < 0.1
    if not FAMILIES[name].routed and not FAMILIES[name].rounds:
        assert error_BT.max() < 0.3


@pytest.mark.parametrize("name", [*REPRESENTATIVES, "latent_memory"])
def test_gradients_are_summed_in_float32(name):
    """Of what is broadcast in bfloat16, a bias or a position, GPUs sum the gradient as it comes."""
    loss = families.loss_fn(families.build(name, "bfloat16"))
    jaxpr = jax.make_jaxpr(jax.grad(loss))(families.params_of(name), families.tokens())
    for equation in families.equations(jaxpr.jaxpr):
        if equation.primitive.name == "reduce_sum":
            summed, result = equation.invars[0].aval, equation.outvars[0].aval
            where = str(equation.source_info.name_stack)
            assert summed.dtype != jnp.bfloat16 or result.size == summed.size, where


@pytest.mark.parametrize("name", ["mod_options"])
def test_jit_is_no_jit(name):
    eager_BTV = families.build(name).apply(families.variables_of(name), families.tokens())
    np.testing.assert_allclose(eager_BTV, families.logits_of(name, families.tokens()), atol=2e-5)


def changed_after_cuts():
    """(tokens, the same with every token of row b after CUTS[b] changed)."""
    tokens_BT = families.tokens()
    later_BT = np.arange(LENGTH)[None] > np.array(CUTS)[:, None]
    return tokens_BT, jnp.where(later_BT, (tokens_BT + 1) % VOCAB, tokens_BT), later_BT


@every_family
def test_causal(name):
    """Logits up to t do not move, not by a bit, when tokens after t change."""
    before_BT, after_BT, later_BT = changed_after_cuts()
    changed_BT = np.any(
        families.logits_of(name, before_BT) != families.logits_of(name, after_BT), axis=-1
    )
    assert not np.any(changed_BT & ~later_BT)
    assert np.all(changed_BT[later_BT])


@every_representative
def test_only_topk_selection_looks_ahead(name):
    """The test above has teeth: it sees what training-time top-k does."""
    before_BT, after_BT, later_BT = changed_after_cuts()
    moved_BT = np.abs(
        families.logits_of(name, before_BT, "train") - families.logits_of(name, after_BT, "train")
    ).max(axis=-1)
    leak = np.max(moved_BT[~later_BT])
    assert leak > 0.1 if FAMILIES[name].looks_ahead else leak == 0


@pytest.mark.parametrize(
    "name, selection",
    [*((name, "causal") for name in NAMES), *((name, "train") for name in REPRESENTATIVES)],
)
def test_rows_do_not_depend_on_each_other(name, selection):
    tokens_BT = families.tokens()
    others_BT = families.tokens(seed=1).at[3].set(tokens_BT[3])
    a = families.logits_of(name, tokens_BT, selection)
    b = families.logits_of(name, others_BT, selection)
    np.testing.assert_array_equal(a[3], b[3])
    assert np.all(np.any(a[:3] != b[:3], axis=(1, 2)))


def roomy(model):
    """The same with room for every token that routers pick."""
    moe = dataclasses.replace(model.config.mlp.moe, capacity_factor=100.0, slack=100.0)
    changes = dict(mlp=dataclasses.replace(model.config.mlp, moe=moe))
    if "depth_routing" in settings.names_of(type(model.config)):
        changes["depth_routing"] = dataclasses.replace(model.config.depth_routing, slack=100.0)
    model = models.changed(model, **changes)
    if hasattr(model, "adapter"):
        model = model.clone(adapter=dataclasses.replace(model.adapter, slack=100.0))
    return model


@every_representative
def test_packed_documents_are_as_if_alone(name):
    """Two documents and padding in a row, positions restarted, against the documents alone."""
    model, params = roomy(families.build(name)), families.variables_of(name)
    tokens_BT, size = families.tokens(), 12
    starts = np.repeat([0, size], size)
    positions = np.concatenate([np.arange(2 * size) - starts, np.zeros(LENGTH - 2 * size, int)])
    segments = np.repeat([1, 2, 0], [size, size, LENGTH - 2 * size])
    rows = [jnp.asarray(np.tile(row, (BATCH, 1)), jnp.int32) for row in (positions, segments)]
    packed = families.jit(functools.partial(model.apply, rngs=families.keys()))(
        params, tokens_BT, *rows
    )
    # A document that comes first is alone, as far as its own logits go: models are causal.
    first = families.logits_of(name, tokens_BT)[:, :size]
    second = families.logits_of(name, jnp.roll(tokens_BT, -size, axis=1))[:, :size]
    if name == "mod_stochastic":  # alone it draws other places
        assert np.isfinite(packed).all()
        return
    np.testing.assert_allclose(packed[:, :size], first, atol=2e-5)
    np.testing.assert_allclose(packed[:, size : 2 * size], second, atol=2e-5)
    assert np.isfinite(packed).all()


# Tokens of the prompts that the rows of a batch begin with, read in chunks of 5.
PROMPTS = np.array([10, 9, 7, 6, 5, 4, 2, 1])


def assert_no_two_alike(jaxpr):
    """All its scatters say that no two entries go to one place, without which XLA gets them wrong
    under a flag for GPUs."""
    scatters = re.findall(r" = scatter[\w-]*\[.*?unique_indices=(\w+)", str(jaxpr), re.S)
    assert set(scatters) == {"True"}


@every_family
def test_cached_decoding_is_the_full_forward(name, monkeypatch):
    """Prompts of different lengths in two chunks with padding, then one token of each row at a
    time, at its own place, until the rows end one after the other; of representatives by a program
    for one token, of others by that of chunks, with padding. Caches are read in blocks of 10 slots,
    of which the last overlaps the one before."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", 10)
    cache = decoded_as_in_full(name, size=1 if name in REPRESENTATIVES else 5)
    if name == "mod_options":  # its room is short: what does not fit is left out, and counted
        overflow = [cache["layers"][f"block_{i}"]["overflow"] for i in (0, 1)]
        assert np.sum(overflow) > 0
    if name == "moe":
        assert np.sum(cache["layers"]["block_1"]["mlp"]["dropped"]) > 0


@pytest.mark.parametrize(
    "name", ["mod_options", "mod_context", "mode_staged", "dropout_elementwise_mod"]
)
def test_decoding_is_the_full_forward_on_a_gpu(name, monkeypatch):
    """Where routed blocks take all rows at once, without a loop, also with experts, learned masks
    and what caches hold for skipped tokens inside of them."""
    expected_BTV = families.logits_of(name, families.tokens())
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    traced = []
    decoded_as_in_full(name, size=1, expected_BTV=expected_BTV, traced=traced)
    assert "while[" not in str(traced[-1])


def decoded_as_in_full(name, size, expected_BTV=None, traced=None):
    """The cache at the end. size: tokens of the program for a token at a time."""
    model, params = families.build(name), families.params_of(name)
    tokens_BT, done_B = np.asarray(families.tokens()), np.zeros(BATCH, int)
    if expected_BTV is None:
        expected_BTV = families.logits_of(name, families.tokens())

    @families.jit
    def decode(cache, tokens_BT, positions_BT):
        logits_BTV, state = model.apply(
            {"params": params, "cache": cache, **families.state_of(name)},
            tokens_BT,
            positions_BT,
            decode=True,
            cache_size=LENGTH,
            mutable=["cache"],
            rngs=families.keys(),
        )
        return logits_BTV, state["cache"]

    # The wide angles of these masks make 7e-5 of logits of a relative change of 1e-7 in parameters.
    atol = 3e-4 if name == "latent_masks" else 1e-4
    cache = models.init_cache(model, BATCH, LENGTH)
    ends = [(5, 5, PROMPTS)] * 2 + [(size, 1, np.full(BATCH, LENGTH))] * (LENGTH - min(PROMPTS))
    sizes, traced = set(), [] if traced is None else traced
    for size, new, end_B in ends:
        place_BT = done_B[:, None] + np.arange(size)
        inside_BT = (place_BT < end_B[:, None]) & (np.arange(size) < new)
        place_BT = np.minimum(place_BT, LENGTH - 1)
        read_BT = np.where(inside_BT, np.take_along_axis(tokens_BT, place_BT, axis=1), 0)
        read_BT, place_BT = jnp.asarray(read_BT), np.where(inside_BT, place_BT, -1)
        arguments = cache, read_BT, jnp.asarray(place_BT, jnp.int32)
        if size not in sizes:
            sizes.add(size)
            traced.append(decode.trace(*arguments).jaxpr)
            assert_no_two_alike(traced[-1])
        logits_BTV, cache = decode(*arguments)
        wanted_BTV = np.take_along_axis(expected_BTV, place_BT[..., None], axis=1)
        np.testing.assert_allclose(
            np.asarray(logits_BTV)[inside_BT], wanted_BTV[inside_BT], atol=atol, err_msg=f"{done_B}"
        )
        done_B = done_B + inside_BT.sum(axis=1)
    assert np.all(done_B == LENGTH)
    return cache


# ---- layers: scanned, recomputed ---------------------------------------------------------------


def same_loss_and_grads(expected, result):
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-5)
    families.assert_trees_close(expected[1], result[1])


@every_representative
def test_every_parameter_has_a_gradient(name):
    """So that the comparisons of gradients below compare something."""
    for path, grad in jax.tree_util.tree_leaves_with_path(sized(name, 2)[2][1]):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.isfinite(grad).all(), path
        # A bias of the keys moves all scores of a query alike: its gradient is truly zero.
        assert path.endswith("key/bias") or np.abs(grad).max() > 1e-4, path


@functools.cache
def sized(name, depth):
    """(a row's model with so many layers, parameters, loss and gradients on one device)."""
    if "recursion" in name:
        depth = max(depth, 3)  # it has no fewer
    model = models.changed(families.build(name), depth=depth)
    params = families.random_params(model)
    step = families.jit(jax.value_and_grad(families.loss_fn(model)))
    return model, params, jax.device_get(step(params, families.tokens()))


SCANNED = [
    ("llama_options", 2, "none"),
    ("mod_options", 2, "dots"),
    ("mod_threshold", 4, "full"),
    ("mode_staged", 2, "full"),
    ("moe_expert_choice", 2, "none"),
    ("dropout_elementwise_mod", 2, "full"),
    ("adapter_mod", 2, "dots"),
    ("mod_parallel", 4, "full"),
    ("adapter_inclusion", 2, "full"),
    # Of families whose representatives cannot be scanned.
    ("streams_parallel", 5, "full"),
    ("latent_mod", 2, "dots"),
]
# Representatives whose layers do not repeat a pattern, or draw from other keys where they are
# scanned, and what to recompute in them.
UNSCANNED = {
    "recursion": "dots",
    "latent_parts": "full",
    "streams_masks": "full",
    "mod_stochastic": "dots",
}


@pytest.mark.parametrize("name, depth, remat", SCANNED)
def test_scan_is_the_loop(name, depth, remat):
    model, params, expected = sized(name, depth)
    assert period(model.specs()) < depth
    scanned = models.changed(model, scan_layers=True, remat=remat)
    stacked = {**params, "layers": scan_params(params["layers"], model.specs())}
    # Of arrays of numpy a layer's slice is no program.
    same, unrolled = models.unroll(scanned, jax.device_get(stacked))
    jax.tree.map(np.testing.assert_array_equal, unrolled, params)
    assert not same.config.scan_layers
    step = families.jit(jax.value_and_grad(families.loss_fn(scanned)))
    loss, grads = jax.device_get(step(stacked, families.tokens()))
    same_loss_and_grads(expected, (loss, models.unroll(scanned, grads)[1]))


@pytest.mark.parametrize("name, remat", [*UNSCANNED.items(), ("mod_options", "dots")])
def test_remat_changes_nothing(name, remat):
    model, params, expected = sized(name, 2)
    step = families.jit(jax.value_and_grad(families.loss_fn(models.changed(model, remat=remat))))
    result = step(params, families.tokens())
    same_loss_and_grads(expected, result)


@pytest.mark.parametrize("name", ["gpt2", "mod_options"])
def test_remat_recomputes(name):
    def count(remat):
        loss = families.loss_fn(models.changed(families.build(name), remat=remat))
        return flops.jaxpr_flops(jax.grad(loss), families.params_of(name), families.tokens())

    assert count("none") < count("dots") < count("full")


@pytest.mark.parametrize("name", ["moe", "moe_expert_choice", "latent_parts"])
def test_products_of_experts_and_channels_are_kept(name):
    """By remat `dots`, which computes again only what attends: what is not linear in widths."""

    def count(remat):
        model = models.changed(families.build(name), remat=remat)
        jaxpr = jax.make_jaxpr(jax.grad(families.loss_fn(model)))(
            families.params_of(name), families.tokens()
        )
        experts = r"dot_general\[\s*dimension_numbers=\(\(\[2\], \[1\]\), \(\[0\], \[0\]\)\)"
        return len(re.findall(experts, str(jaxpr)))

    assert 0 < count("none") == count("dots") < count("full")


@pytest.mark.parametrize("qk_norm", ["none", "head"])
def test_gpus_keep_rotated_queries_and_keys(monkeypatch, qk_norm):
    """By remat `dots`, and nothing beside them; under a norm its gradient needs both."""
    changes = {"remat": "dots", "attention.kernel": "xla", "attention.qk_norm": qk_norm}
    model = families.make(changes)
    params = families.random_params(model)

    def gradient(platform):
        monkeypatch.setattr(sharding, "platform", lambda: platform)
        function = jax.grad(families.loss_fn(model))
        jaxpr = jax.make_jaxpr(function)(params, families.tokens())
        rotations = [
            e for e in families.equations(jaxpr.jaxpr) if e.primitive.name == "concatenate"
        ]
        kept = _kept_by_remat(families.loss_fn(model), params)
        return len(rotations), kept, families.jit(function)(params, families.tokens())

    cpu, gpu = gradient("cpu"), gradient("gpu")
    assert cpu[0] - gpu[0] == (2 * model.config.depth if qk_norm == "none" else 0)
    assert cpu[1] == gpu[1]
    families.assert_trees_close(cpu[2], gpu[2])


def _kept_by_remat(loss, params):
    """Bytes that the backward pass finds."""
    pullback = jax.eval_shape(lambda params: jax.vjp(loss, params, families.tokens())[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REPRESENTATIVES])
def test_other_rows_train_by_their_shapes(name):
    """The forward pass of training in bfloat16, recomputed: parts compute in bfloat16, logits are
    float32; and what is sown. What a gradient passes through has representatives."""
    model = models.changed(families.build(name, "bfloat16"), remat="full")
    model, parts = model.clone(selection="train"), (Layer, Attention, MLP, MoE, SoftMLP)

    def apply(variables, tokens_BT):
        return model.apply(
            variables,
            tokens_BT,
            mutable=["intermediates", "losses", "stats"],
            capture_intermediates=lambda m, method: isinstance(m, parts) and method == "__call__",
            rngs=families.keys(),
        )

    logits_BTV, sown = jax.eval_shape(apply, families.variables_of(name), families.tokens())
    states = jax.tree_util.tree_leaves_with_path(sown.pop("intermediates"))
    check_sown(name, sown)
    assert (logits_BTV.shape, logits_BTV.dtype) == ((BATCH, LENGTH, VOCAB), jnp.float32)
    outputs = [leaf for path, leaf in states if jax.tree_util.DictKey("__call__") in path]
    assert {leaf.dtype for leaf in outputs} == {jnp.dtype(jnp.bfloat16)}
    assert len(outputs) >= 2 * model.config.depth


# ---- devices -----------------------------------------------------------------------------------

MESHES = {
    "data": dict(data=8),
    "mixed": dict(data=2, fsdp=2, tensor=2),
    "expert": dict(data=2, fsdp=2, expert=2),
    "sequence": dict(data=2, sequence=4),
    "places and features": dict(data=2, tensor=2, sequence=2),
}


EXPERTS = ("mlp.kind", "moe")
# {row: scores of a token that devices may gather}: XLA's TopK on CPU does not split over rows, and
# in expert choice every expert has its scores.
GATHERED = {
    "mod_options": 1,
    "recursion": 1,
    "mode_staged": 1,
    "moe_expert_choice": 4,
    "adapter_inclusion": 3,
    "latent_mod": 1,
}


# {row: numbers of each token that devices which share a sequence gather at most: its key of two
# heads of 6, or 32 numbers of every second, which are the routed ones}.
KEYS_OF_ALL = {"llama_options": 12, "mod_options": 16, "mode_staged": 16}


def compiled_on(mesh, model):
    """(compiled loss and gradients on a mesh, shardings of its parameters and tokens)."""
    mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, expert=1, sequence=1) | MESHES[mesh])
    rules = sharding.check_rules(sharding.DEFAULT_RULES)
    boxed = models.variable_shapes(model)["params"]
    params = sharding.tree_shardings(boxed, mesh, rules)
    tokens = sharding.batch_sharding(mesh, rules)
    step = families.jit(
        jax.value_and_grad(families.loss_fn(model)),
        in_shardings=(params, tokens),
        out_shardings=(sharding.replicated(mesh), params),
    )
    shapes = nn.unbox(boxed), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    with sharding.use(mesh, rules):
        lowered = step.lower(*shapes)
        return lowered.compile(), params, tokens


def gathered(compiled):
    """Elements of the largest array that devices gather from each other."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather(?:-start)?\(", compiled.as_text())
    return max((math.prod(map(int, shape.split(","))) for shape in shapes), default=0)


@pytest.mark.parametrize(
    "name, mesh",
    [
        *((name, "expert" if EXPERTS in mechanisms(name) else "mixed") for name in REPRESENTATIVES),
        # Routing included, a device needs no other's tokens.
        *((name, "data") for name in GATHERED),
        *((name, "sequence") for name in KEYS_OF_ALL),
        # Latents that follow memory tokens in a row of which a device has a part.
        ("latent_mod", "places and features"),
    ],
)
def test_eight_devices_are_one(name, mesh):
    model, params, expected = sized(name, 2)
    step, params_sharding, tokens_sharding = compiled_on(mesh, model)
    params = jax.device_put(jax.device_get(params), params_sharding)
    block = params["layers"]["block_0"]
    mlp = next((block[part] for part in ("encoder_0", "decoder") if part in block), block)["mlp"]
    kernel = mlp.get("experts", mlp)["up"]["kernel"]
    assert len(kernel.sharding.device_set) == 8
    assert kernel.is_fully_replicated == (mesh in ("data", "sequence"))
    tokens_BT = jax.device_put(np.asarray(families.tokens()), tokens_sharding)
    result = step(params, tokens_BT)
    same_loss_and_grads(expected, jax.device_get(result))
    if mesh == "data":
        assert gathered(step) <= BATCH * LENGTH * GATHERED[name]
    if mesh == "sequence":
        # A device has a half of the rows and a quarter of each: it gets the keys of the others.
        assert gathered(step) == BATCH // 2 * LENGTH * KEYS_OF_ALL[name]


def test_careless_routing_would_gather_the_batch(monkeypatch):
    """The check above sees the obvious way to write it, indices of rows and places at once."""

    def fancy(x_BT, plan, fill=0):
        rows_B1 = jnp.arange(x_BT.shape[0])[:, None]
        return x_BT.at[rows_B1, plan.indices_BC].get(mode="fill", fill_value=fill)

    monkeypatch.setattr(plans, "gather", fancy)
    model = sized("mod_options", 1)[0]
    assert gathered(compiled_on("data", model)[0]) >= BATCH * LENGTH // 2 * model.config.width


# ---- what a model says about itself ------------------------------------------------------------


SHORT = 12  # tokens: more than a window of 9, as many as the largest group of latents


def hidden_scores(model, selection):
    """FLOPs of scores that the causal mask hides and that are computed all the same, however few
    queries a chunk has: where queries attend to other places than their own, and where routed ones
    have as many keys as a window has places. Of SHORT tokens."""
    hidden = 0
    for spec in model.blocks().values():
        for b, whole in spec.attentions if spec.routing is not None else ():
            tokens = spec.routing.slots(spec.capacity, SHORT, selection)
            a, channels = b.attention, b.soft.num if b.soft else 1
            if whole:
                pairs = tokens * SHORT - flops.causal_pairs(SHORT, a.window) * tokens / SHORT
            else:
                pairs = flops.causal_pairs(tokens, a.window)
                pairs -= flops.thinned_pairs(tokens, SHORT, a.window)
            hidden += flops.attention_scores(pairs, channels * a.num_heads, a.head_dim)
    c = model.config
    for level in model.levels(encoder=True) if c.family == "latent" else ():
        if c.compression == "perceiver":  # whose queries are the last places of a group
            a, groups = level.block.attention, -(-SHORT // c.group_size)
            seen = flops.causal_pairs(level.inner, a.window)
            seen -= flops.causal_pairs(level.inner - level.places, a.window)
            pairs = groups * (level.places * level.inner - seen)
            hidden += flops.attention_scores(pairs, a.num_heads, a.head_dim)
    return hidden


@every_family
def test_the_ledger_is_what_is_executed(name):
    """Where nothing is computed that has no use: each query visits the keys that it may see,
    experts have as much room as there are choices, the vocabulary has no padding."""
    row = FAMILIES[name]
    exact = {"attention.chunk": 1, "vocab_multiple": 1, "mlp.moe.capacity_factor": 1.0}
    model = families.make(row.changes | exact)
    for selection in ("train", "causal") if row.routed else ("train",):
        counted = flops.executed(model, SHORT, train=selection == "train")
        if "latent" in name:  # where a linear map of learned vectors is computed once for a batch
            counted = flops.executed(model, SHORT, 2, train=selection == "train") - counted
        ledger, extra = model.ledger(SHORT, selection).nominal, hidden_scores(model, selection)
        if row.changes.get("depth_routing.bce_reaches_input") is False:
            extra += ledger["router"]  # scores once more, for the loss alone
        assert counted == pytest.approx(sum(ledger.values()) + extra, rel=1e-12), selection


def recomputed(jaxpr):
    """FLOPs of scores, half of an attention's products, that its backward pass computes again. The
    output layer, which has a backward pass of its own, too, is a single product."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "custom_vjp_call":
            inside = families.equations(equation.params["call_jaxpr"].jaxpr)
            if sum(inner.primitive.name == "dot_general" for inner in inside) > 1:
                total += flops._walk_one(equation) // 2
        else:
            total += sum(map(recomputed, flops._subjaxprs(equation.params)))
    return total


@every_representative
def test_training_costs_three_times_the_forward_pass(name):
    """And the forward pass of training is the one that is counted."""
    model = families.build(name)
    loss, params = families.loss_fn(model), families.params_of(name)
    executed = flops.executed(model, LENGTH, BATCH)
    forward = jax.make_jaxpr(loss)(params, families.tokens()).jaxpr
    assert flops._walk(forward) == executed
    extra = recomputed(forward)  # overhead
    if FAMILIES[name].changes.get("depth_routing.bce_reaches_input") is False:
        # The scores for the loss alone pass no gradient on to what they are made of.
        extra -= BATCH * model.ledger(LENGTH).nominal["router"]
    for spec in model.blocks().values():
        if spec.routing is not None and "predictor" in spec.routing.trained:
            # The predictor passes no gradient on to what it reads.
            extra -= BATCH * flops.matmul(LENGTH, model.config.width, spec.routing.predictor_hidden)
    counted = flops.jaxpr_flops(jax.grad(loss), params, families.tokens())
    assert counted == flops.TRAIN_FACTOR * executed + extra


@every_representative
def test_sown_values_are_scalars(name):
    """As those of the other rows are, where their training is traced."""
    model = families.build(name)
    tokens_BT = jax.ShapeDtypeStruct((3, 7), jnp.int32)
    _, sown = jax.eval_shape(
        lambda params, tokens_BT: model.apply(
            {"params": params, **families.state_of(name)},
            tokens_BT,
            mutable=["losses", "stats"],
            rngs=families.keys(),
        ),
        families.params_of(name),
        tokens_BT,
    )
    check_sown(name, sown)


def check_sown(name, sown):
    """One scalar a layer, whatever B and T, under the names that the row has."""
    model = families.build(name)
    specs = model.blocks().values()
    routed = sum(spec.routing is not None for spec in specs)
    # Every mask has exactly one of these.
    masks = sum(
        path[-1].key in ("mask_shift", "mask_phase")
        for path, _ in jax.tree_util.tree_leaves_with_path(families.params_of(name))
    )
    experts = sum(b.moe is not None for spec in specs for b in spec.blocks)
    entrances = sum(
        path[-1].key == "entrance"
        for path, _ in jax.tree_util.tree_leaves_with_path(families.params_of(name))
    )
    counts = {
        "router_bce": routed,
        "predictor_bce": routed,
        "embedding": 1,
        "inclusion_bce": entrances,
        "latent_prediction": 1,
    }
    names = [
        path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(sown.get("losses", {}))
    ]
    assert collections.Counter(names) == {
        loss: masks if loss.startswith("dropout_") else counts.get(loss, experts)
        for loss in FAMILIES[name].losses
    }
    assert all(leaf.shape == () for leaf in jax.tree.leaves(sown))
