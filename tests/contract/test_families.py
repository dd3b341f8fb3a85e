"""What every family of models guarantees: each property holds for every row of FAMILIES whose model
can have it; tests/families.py selects the rows of each run."""

import collections
import functools
import math
import re

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import BATCH, CHEAP, FAMILIES, LENGTH, MESHES, RARE, VOCAB, Grain, every_row
from flax import linen as nn

from efx import certify, models
from efx.certify import properties, subjects
from efx.layers import attend, flops
from efx.layers import selection as selection_lib
from efx.layers.attention import Attention
from efx.layers.mlp import MLP
from efx.layers.moe import MoE
from efx.layers.soft_experts import SoftMLP
from efx.models.costs import attentions
from efx.models.stack import Layer, convert_layers, scan_params
from efx.parallel import sharding

# ---- the forward pass --------------------------------------------------------------------------


@every_row(**CHEAP)
def test_logits_are_finite_float32_of_the_right_shape(name):
    logits_BTV = families.logits_of(name, families.tokens())
    assert logits_BTV.shape == (BATCH, LENGTH, VOCAB)
    assert logits_BTV.dtype == np.float32
    families.assert_passes(properties.finite_logits, families.subject(name))
    assert logits_BTV.std() > 0.1  # large enough for the comparisons below to mean something


@every_row(**RARE)
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
    if not families.selects_tokens(model):
        assert error_BT.max() < 0.3


@every_row(**RARE)
def test_gradients_are_summed_in_float32(name):
    """Of what is broadcast in bfloat16, a bias or a position, GPUs sum the gradient as it comes."""
    loss = families.loss_fn(families.build(name, "bfloat16"))
    jaxpr = jax.make_jaxpr(jax.grad(loss))(families.params_of(name), families.tokens())
    for equation in families.equations(jaxpr.jaxpr):
        if equation.primitive.name == "reduce_sum":
            summed, result = equation.invars[0].aval, equation.outvars[0].aval
            where = str(equation.source_info.name_stack)
            assert summed.dtype != jnp.bfloat16 or result.size == summed.size, where


@every_row(**CHEAP)
def test_causal(name):
    """Not by a bit."""
    families.assert_passes(properties.no_look_ahead, families.subject(name), tolerance=0)


@every_row(**CHEAP)
def test_each_token_is_read(name):
    families.assert_passes(properties.reads_its_tokens, families.subject(name))


@every_row(families.selects_tokens)
def test_only_topk_selection_looks_ahead(name):
    """In training; `test_causal` is able to see what training-time top-k does."""
    number = properties.check(properties.no_look_ahead, families.subject(name, "train")).number
    assert number > 0.1 if FAMILIES[name].looks_ahead else number == 0


@every_row(**CHEAP)
def test_rows_do_not_depend_on_each_other(name):
    families.assert_passes(properties.batch_mates, families.subject(name), tolerance=0)


@every_row(families.selects_tokens)
def test_rows_do_not_depend_on_each_other_in_training(name):
    families.assert_passes(properties.batch_mates, families.subject(name, "train"), tolerance=0)


# ---- decoding ----------------------------------------------------------------------------------


@every_row(**CHEAP)
def test_cached_decoding_is_the_full_forward(name, monkeypatch):
    """Caches are read in blocks of 10 slots; the last block overlaps the one before."""
    monkeypatch.setattr(attend, "_CACHE_BLOCK", 10)
    # The program for one token computes blocks for some rows only; chunks have padding.
    single = 1 if families.skips_tokens(families.build(name)) else 5
    result = properties.check(properties.cached_decoding, families.subject(name), single=single)
    assert result.number < 1e-4, result


@every_row(families.skips_tokens, **RARE)
def test_decoding_is_the_full_forward_on_a_gpu(name, monkeypatch):
    """Where routed blocks take all rows at once, without a loop, also with experts, learned masks
    and the keys of skipped tokens inside of them."""
    subject = subjects.of_model(families.build(name), families.variables_of(name))
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    assert properties.check(properties.cached_decoding, subject).number < 1e-4


@every_row(**RARE)
def test_no_check_of_efx_certify_fails(name):
    """Those above, and the others: FLOPs, the work of skipped tokens, residuals, sleeping parts."""
    model, variables = families.build(name), families.variables_of(name)
    results = certify.certify(subjects.of_model_with_parts(model, variables))
    assert not [result for result in results if result.verdict == certify.FAIL]


def rerun(jaxpr, consts, arguments, report):
    """The outputs of a traced program; `report` gets the indices of each scatter that promises that
    they are unique, int [N, K], while the program runs."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(variable):
        return variable.val if hasattr(variable, "val") else values[variable]

    def call(inner, *arguments):
        inner, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return rerun(inner, consts, arguments, report)

    def loop(inputs, cond_nconsts, body_nconsts, cond_jaxpr, body_jaxpr):
        of_body = inputs[cond_nconsts : cond_nconsts + body_nconsts]
        return jax.lax.while_loop(
            lambda carry: call(cond_jaxpr, *inputs[:cond_nconsts], *carry)[0],
            lambda carry: call(body_jaxpr, *of_body, *carry),
            inputs[cond_nconsts + body_nconsts :],
        )

    def scan(inputs, num_consts, num_carry, jaxpr, length, reverse, **_):
        def turn(carry, xs):
            outputs = call(jaxpr, *inputs[:num_consts], *carry, *xs)
            return outputs[:num_carry], outputs[num_carry:]

        carry, xs = inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
        carry, ys = jax.lax.scan(turn, carry, xs, length=length, reverse=reverse)
        return [*carry, *ys]

    def inner_program(params):
        return params.get("jaxpr") or params.get("call_jaxpr")

    def check(index, dimension_numbers):
        columns = list(index.reshape(-1, index.shape[-1]).T)
        for dim in dimension_numbers.scatter_indices_batching_dims:
            columns.append(jax.lax.broadcasted_iota(jnp.int32, index.shape[:-1], dim).ravel())
        jax.debug.callback(report, jnp.stack(columns, axis=-1))

    for equation in jaxpr.eqns:
        inputs, params = [read(variable) for variable in equation.invars], equation.params
        kind = equation.primitive.name
        if kind == "while":
            outputs = loop(inputs, **params)
        elif kind == "scan":
            outputs = scan(inputs, **params)
        elif kind == "cond":
            branches = [functools.partial(call, branch) for branch in params["branches"]]
            outputs = jax.lax.switch(inputs[0], branches, *inputs[1:])
        elif inner_program(params):
            outputs = call(inner_program(params), *inputs)
        else:
            if kind.startswith("scatter") and params["unique_indices"]:
                check(inputs[1], params["dimension_numbers"])
            # The scatter's own computation, `update_jaxpr`, is no program inside of it.
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


@every_row(families.selects_tokens, **RARE)
def test_scatters_that_promise_unique_indices_have_them(name):
    """All scatters promise it, since XLA gets those wrong that do not under a flag for GPUs, and it
    takes the promise on trust: on a CPU indices that repeat go unnoticed. Those of dropped tokens
    and of empty slots point out of range, and are unique too. In training, on packed rows, and in
    decoding, of chunks and of single tokens."""
    model, variables = families.build(name), families.variables_of(name)
    tokens_BT, positions_T = families.tokens(batch=3, length=6), np.arange(6)
    cache, repeated, seen = models.init_cache(model, 3, 12), [], []
    packed = np.tile(positions_T % 4, (3, 1)), np.repeat([[1] * 4 + [2, 0]], 3, axis=0)
    if not families.can_pack(model):
        packed = ()
    padded = np.where(positions_T < [[6], [3], [0]], positions_T, -1)

    def program(variables, cache):
        options = dict(rngs=families.keys(), mutable=True)
        model.clone(selection="train").apply(variables, tokens_BT, *packed, **options)
        decode = functools.partial(model.apply, decode=True, cache_size=12, **options)
        found = []
        for tokens, positions in ((tokens_BT, padded), (tokens_BT[:, :1], [[6], [3], [-1]])):
            logits, state = decode({**variables, "cache": cache}, tokens, jnp.int32(positions))
            cache, found = state["cache"], [*found, logits]
        return found, cache

    def report(index_NK):
        seen.append(len(index_NK))
        unique = np.unique(index_NK, axis=0)
        repeated.extend([index_NK.tolist()] * (len(unique) < len(index_NK)))

    arguments = variables, cache
    traced = jax.make_jaxpr(program)(*arguments)
    for equation in families.equations(traced.jaxpr):
        if equation.primitive.name.startswith("scatter"):
            assert equation.params["unique_indices"], equation.source_info.name_stack
    run = families.jit(lambda leaves: rerun(traced.jaxpr, traced.consts, leaves, report))
    jax.block_until_ready(run(jax.tree.leaves(arguments)))
    jax.effects_barrier()
    assert max(seen) > 3
    assert not repeated


# ---- layers: scanned, recomputed, on eight devices ---------------------------------------------

REMAT = {mesh: ("dots", "full")[i % 2] for i, mesh in enumerate(MESHES)}


def same_loss_and_grads(expected, result):
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-5)
    families.assert_trees_close(expected[1], result[1])


@functools.cache
def plain(name):
    """(model, variables, loss and gradients) of layers in a loop, on one device."""
    model = families.build(name)
    scanned = families.scanned(model)
    if scanned is not None:
        model = models.changed(model, depth=scanned.config.depth)
    params, state = families.random_params(model), families.random_state(model)
    step = families.jit(jax.value_and_grad(families.loss_fn(model)))
    return model, {"params": params, **state}, jax.device_get(step(params, families.tokens()))


@every_row(whole=Grain.SELECTIONS)
def test_every_parameter_has_a_gradient(name):
    """So that the comparison of gradients below compares something."""
    for path, grad in jax.tree_util.tree_leaves_with_path(plain(name)[2][1]):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.isfinite(grad).all(), path
        # A bias of the keys moves all scores of a query alike: its gradient is truly zero.
        assert path.endswith("key/bias") or np.abs(grad).max() > 1e-4, path


def compiled_on(mesh, model, state=None):
    """(compiled loss and gradients on a mesh, shardings of its parameters and tokens)."""
    mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, expert=1, sequence=1) | MESHES[mesh])
    rules = sharding.check_rules(sharding.DEFAULT_RULES)
    boxed = models.variable_shapes(model)["params"]
    params = sharding.tree_shardings(boxed, mesh, rules)
    tokens = sharding.batch_sharding(mesh, rules)
    step = families.jit(
        jax.value_and_grad(families.loss_fn(model, state)),
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


@pytest.mark.parametrize("mesh", MESHES)
@every_row(whole=Grain.SELECTIONS)
def test_scanned_and_recomputed_layers_on_eight_devices_are_the_plain_program(name, mesh):
    """On the row's mesh; with `--family` on each."""
    model, variables, expected = plain(name)
    scanned = families.scanned(model)
    if scanned is not None:
        stacked = {
            key: convert_layers(scan_params, tree, model.specs()) for key, tree in variables.items()
        }
        # Of arrays of numpy a layer's slice is no program.
        same, unrolled = models.unroll(scanned, jax.device_get(stacked["params"]))
        jax.tree.map(np.testing.assert_array_equal, unrolled, variables["params"])
        assert not same.config.scan_layers
        model, variables = scanned, stacked
    params = jax.device_get(variables["params"])
    state = {key: tree for key, tree in variables.items() if key != "params"}
    changed = models.changed(model, remat=REMAT[mesh])
    step, params_sharding, tokens_sharding = compiled_on(mesh, changed, state)
    split = [sharding.is_fully_replicated for sharding in jax.tree.leaves(params_sharding)]
    assert all(split) == (mesh in ("data", "sequence"))
    loss, grads = step(
        jax.device_put(params, params_sharding),
        jax.device_put(np.asarray(families.tokens()), tokens_sharding),
    )
    same_loss_and_grads(expected, (loss, models.unroll(changed, jax.device_get(grads))[1]))


def gathered_scores(model):
    """Scores of a token that devices gather from each other: XLA's TopK on CPU does not split over
    rows, and each expert has its scores."""
    counts = [int(families.skips_tokens(model))]
    counts += [b.moe.num_choices for spec in model.blocks().values() for b in spec.blocks if b.moe]
    if families.has_entrances(model):
        counts.append(model.adapter.num_experts)
    return max(counts)


@every_row(families.selects_tokens, default=Grain.NONE, whole=Grain.KINDS)
def test_devices_that_share_the_batch_gather_scores_alone(name):
    model = families.build(name)
    assert gathered(compiled_on("data", model)[0]) <= BATCH * LENGTH * gathered_scores(model)


def test_devices_that_share_a_sequence_gather_keys_alone():
    """Of two heads of 6, and of the rows that a device has."""
    step, *_ = compiled_on("sequence", families.build("llama_options"))
    assert gathered(step) <= BATCH / 2 * LENGTH * 2 * 6


def test_remat_dots_recomputes_attention_and_no_expert():
    def count(remat, **mlp):
        model = families.make({"depth": 1, "remat": remat, **families.dotted({"mlp": mlp})})
        loss, params = families.loss_fn(model), families.random_params(model)
        return flops.jaxpr_flops(jax.grad(loss), params, families.tokens(batch=2))

    none, dots, full = map(count, ("none", "dots", "full"))
    assert none < dots < full
    for router in ("token_choice", "expert_choice"):
        mlp = families.experts(router=router)
        assert count("dots", **mlp) - count("none", **mlp) == dots - none


def kept_flops(jaxpr):
    """FLOPs of a traced program whose results its backward pass keeps."""
    total = 0
    for equation in jaxpr.eqns:
        if "prevent_cse" not in equation.params:  # else a `jax.checkpoint`
            inside = sum(map(kept_flops, flops._subjaxprs(equation.params)))
            total += inside or flops._walk_one(equation)
    return total


@every_row(default=Grain.CHOICES)
def test_remat_recomputes_the_layers(name):
    """Three quarters of all FLOPs at least: what precedes the stack and follows it is kept."""
    model = models.changed(families.build(name), remat="full")
    loss, params, tokens_BT = families.loss_fn(model), families.params_of(name), families.tokens()
    kept = kept_flops(jax.make_jaxpr(loss)(params, tokens_BT).jaxpr)
    executed = flops.jaxpr_flops(loss, params, tokens_BT)
    assert kept < executed / 4, (
        f"the backward pass recomputes {executed - kept} of {executed} FLOPs"
    )


@every_row(families.can_scan, default=Grain.CHOICES)
def test_layers_can_be_scanned(name):
    """In training, evaluation and decoding."""
    model, tokens_BT = families.scanned(families.build(name)), families.tokens()
    variables = families.variable_shapes(model)

    def run(variables, cache):
        model.clone(selection="train").apply(
            variables, tokens_BT, mutable=["losses", "stats"], rngs=families.keys()
        )
        decode = dict(decode=True, cache_size=LENGTH, mutable=["cache"], rngs=families.keys())
        return model.apply({**variables, "cache": cache}, tokens_BT, tokens_BT, **decode)[0]

    cache = jax.eval_shape(lambda: models.init_cache(model, BATCH, LENGTH))
    assert jax.eval_shape(run, variables, cache).shape == (BATCH, LENGTH, VOCAB)


def check_sown(name, sown):
    """One scalar a layer, whatever B and T, under the names that the row has."""
    model = families.build(name)
    specs = model.blocks().values()
    routed = sum(spec.routing is not None for spec in specs)
    params = jax.tree_util.tree_leaves_with_path(families.params_of(name))
    # Every mask has exactly one of these.
    masks = sum(path[-1].key in ("mask_shift", "mask_phase") for path, _ in params)
    counts = {
        "router_bce": routed,
        "predictor_bce": routed,
        "embedding": 1,
        "inclusion_bce": sum(path[-1].key == "entrance" for path, _ in params),
        "latent_prediction": 1,
    }
    experts = sum(b.moe is not None for spec in specs for b in spec.blocks)
    names = [
        path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(sown.get("losses", {}))
    ]
    assert collections.Counter(names) == {
        loss: masks if loss.startswith("dropout_") else counts.get(loss, experts)
        for loss in FAMILIES[name].losses
    }
    assert all(leaf.shape == () for leaf in jax.tree.leaves(sown))


@every_row(whole=Grain.KINDS)
def test_decoding_computes_in_bfloat16(name):
    """Single tokens of one row and of several, and chunks: loops keep the dtype of the residual."""
    model = families.build(name, "bfloat16")
    step = families.decoder(model, families.variables_of(name), LENGTH)
    for batch, length in ((1, 1), (BATCH, 1), (BATCH, 5)):
        cache = jax.eval_shape(lambda: models.init_cache(model, batch, LENGTH))  # noqa: B023
        tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        logits_BTV, _ = jax.eval_shape(step, cache, tokens_BT, tokens_BT)
        assert logits_BTV.dtype == jnp.float32


@every_row()
def test_training_computes_in_bfloat16_and_sows_its_losses(name):
    """Parts compute in bfloat16, logits are float32; losses are scalars under the row's names."""
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


# ---- FLOPs -------------------------------------------------------------------------------------


SHORT = 12  # tokens: more than a window of 9, as many as the largest group of latents


def hidden_scores(model, selection):
    """FLOPs of scores that the causal mask hides and that are computed all the same, however few
    queries a chunk has: where queries attend to other places than their own, and where routed ones
    have as many keys as a window has places. Of SHORT tokens."""
    hidden = 0
    for spec in model.blocks().values():
        is_routed = spec.routing is not None and spec.routing.target != "mlp"
        for b, whole in attentions(spec) if is_routed else ():
            tokens = spec.routing.slots(spec.capacity, SHORT, selection)
            a, channels = b.attention, b.soft.num if b.soft else 1
            if whole:
                pairs = tokens * SHORT - flops.causal_pairs(SHORT, a.window) * tokens / SHORT
            else:
                pairs = flops.causal_pairs(tokens, a.window)
                pairs -= flops.thinned_pairs(tokens, SHORT, a.window)
            hidden += flops.attention_scores(pairs, channels * a.num_heads, a.head_dim)
    c = model.config
    for i in range(1, len(c.sizes)) if c.family == "latent" else ():
        if c.compression == "perceiver":  # queries are the last positions of a group
            a, inner, size = c.level_block(i).attention, c.sizes[i - 1], c.sizes[i]
            seen = flops.causal_pairs(inner, a.window)
            seen -= flops.causal_pairs(inner - size, a.window)
            pairs = c.num_groups(SHORT) * (size * inner - seen)
            hidden += flops.attention_scores(pairs, a.num_heads, a.head_dim)
    return hidden


@every_row(**CHEAP)
def test_the_ledger_is_what_is_executed(name, monkeypatch):
    """Where nothing is computed that has no use: each query visits the keys that it may see, which
    masks of probabilities prevent, experts have as many slots as there are choices, the vocabulary
    has no padding."""
    monkeypatch.setattr(selection_lib, "HEADROOM", 0)
    row = FAMILIES[name]
    exact = {"attention.chunk": 1, "vocab_multiple": 1, "mlp.moe.capacity_factor": 1.0}
    if families.build(name).config.dropout.active("attention_probs"):
        exact["dropout.sites"] = families.NO_PROBS
    model = families.make(row.changes | exact)
    for selection in ("train", "causal") if row.looks_ahead else ("train",):
        counted = flops.executed(model, SHORT, train=selection == "train")
        if model.config.family == "latent":  # a map of learned vectors is computed once for a batch
            counted = flops.executed(model, SHORT, 2, train=selection == "train") - counted
        ledger, extra = model.ledger(SHORT, selection).nominal, hidden_scores(model, selection)
        if row.changes.get("depth_routing.bce_reaches_input") is False:
            extra += ledger["router"]  # scores once more, for the loss alone
        assert counted == pytest.approx(sum(ledger.values()) + extra, rel=1e-12), selection


@every_row(families.skips_tokens, **CHEAP)
def test_measured_shares_replace_the_planned_ones(name):
    """Of as many tokens and pairs as planned they change nothing; without a token a routed part
    costs nothing, nor do its adapters."""
    model = families.build(name)
    length, planned, shares = model.stack_length(LENGTH), model.ledger(LENGTH).nominal, {}
    routed = {path: spec for path, spec in model.blocks().items() if spec.routing is not None}
    for path, spec in routed.items():
        tokens = spec.routing.slots(spec.capacity, length, "train")
        pairs = flops.causal_pairs(tokens) / flops.causal_pairs(length)
        shares[path] = tokens / length, pairs
    assert model.ledger(LENGTH, shares=shares).nominal == pytest.approx(planned)
    none = model.ledger(LENGTH, shares=dict.fromkeys(shares, (0.0, 0.0))).nominal
    target = model.config.depth_routing.target
    less = {part for part, count in none.items() if count < planned[part]}
    expected = {"block": {"mlp", "attention_scores"}, "attention": {"attention_scores"}}
    assert less >= expected.get(target, {"mlp"}) and not less & {"head", "router", "levels"}
    assert ("adapters" in less) == ("adapters" in planned)


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


def has_plain_backward(model):
    """Whether each product has two in the backward pass: no gradient stops, and none is recomputed
    beyond scores, as where probabilities are dropped."""
    r, dropout = model.config.depth_routing, model.config.dropout
    stops = not r.bce_reaches_input or "predictor" in r.trained_decisions
    drops_probs = dropout.kind != "none" and "attention_probs" in dropout.sites
    return not (families.skips_tokens(model) and stops) and not drops_probs


@every_row(has_plain_backward, **RARE)
def test_training_costs_three_times_the_forward_pass(name):
    """And the forward pass of training is the one that is counted."""
    model = families.build(name)
    loss, params = families.loss_fn(model), families.params_of(name)
    executed = flops.executed(model, LENGTH, BATCH)
    assert flops.jaxpr_flops(loss, params, families.tokens()) == executed
    overhead = recomputed(jax.make_jaxpr(loss)(params, families.tokens()).jaxpr)
    counted = flops.jaxpr_flops(jax.grad(loss), params, families.tokens())
    assert counted == flops.TRAIN_FACTOR * executed + overhead
