"""Micro-batches add up to the big batch, and evaluation batches to the whole split."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import RARE, every_row
from ml_collections import ConfigDict

from efx.data.batches import Data
from efx.data.shards import Stream, TokenSplit
from efx.data.tokenizers import ByteTokenizer
from efx.parallel import sharding
from efx.train import eval_step, step

ROWS, LENGTH = 8, 16

TEACHER = {"depth": 1}
ROUTED = families.dotted(
    dict(
        depth_routing=dict(
            kind="mod",
            capacity=0.5,
            every=1,
            causal_decision="predictor",
            extra_decisions=("aux_loss", "threshold"),
        ),
        mlp=dict(kind="moe", moe=dict(num_experts=4, expert_hidden=16, num_noop=1)),
        dropout=dict(kind="elementwise", elementwise=dict(detach=False)),
        scan_layers=True,
    )
)
SELECTIVE = families.dotted(
    dict(
        depth=1,
        mlp=dict(kind="moe", moe=dict(num_experts=3, expert_hidden=16, router="expert_choice")),
        adapter=dict(
            kind="lora", rank=2, experts=("a", "b"), routing="inclusion", sites=".*/query"
        ),
    )
)
# No two draws of these masks are alike.
DROPOUT = {"depth": 1, "dropout.kind": "standard", "dropout.rate": 0.5}
EXPERTS = {"depth": 1, "mlp.kind": "moe", "mlp.moe.num_experts": 4, "mlp.moe.expert_hidden": 16}


def packed():
    """Rows of two documents; every second row has far more padding."""
    tokens = np.random.default_rng(0).integers(0, families.VOCAB, (2, ROWS, LENGTH))
    segments, positions = [], []
    for row in range(ROWS):
        first, second = (3, 1 + row // 2) if row % 2 else (LENGTH // 2, 5)
        padding = LENGTH - first - second
        segments.append(np.repeat([1, 2, 0], [first, second, padding]))
        positions.append(np.r_[:first, :second, [0] * padding])
    return {
        "inputs": np.int32(tokens[0]),
        "targets": np.int32(tokens[1]),
        "weights": np.float32(np.sign(segments)),
        "positions": np.int32(positions),
        "segment_ids": np.int32(segments),
    }


KEEP_GRADIENT = optax.chain(
    optax.snapshot("gradient", lambda gradient: gradient),
    optax.snapshot("grad_norm", optax.tree.norm),
    optax.set_to_zero(),
)


def settings(changes, accumulation, loss_chunk=0):
    config = families.small_config(changes)
    config.train.update(accumulation=accumulation, loss_chunk=loss_chunk)
    config.losses.update(dict.fromkeys(config.losses, 0.7))
    return config


def make_step(changes, accumulation, teacher_changes=None, loss_chunk=0):
    """(train_step(state, batch, seed, number=0), the state of step 0) of a model."""
    model = families.make(changes, context=LENGTH)
    params, variables = families.random_params(model), families.random_state(model)
    teacher = teacher_variables = None
    if teacher_changes is not None:
        teacher = families.make(teacher_changes, context=LENGTH)
        teacher_variables = {"params": families.random_params(teacher, seed=1)}
    config = settings(changes, accumulation, loss_chunk)
    train_step = step.make_train_step(
        model, KEEP_GRADIENT, lambda count: 0.0, config, total_steps=9, teacher=teacher
    )
    state = step.state_of({"params": params, **variables}, KEEP_GRADIENT)

    def run(state, batch, seed=0, number=0):
        state = state.replace(step=jnp.int32(number))
        return train_step(state, batch, jnp.uint32(seed), teacher_variables)

    return run, state


def gradient_of(state):
    return optax.tree.get(state.opt_state, "gradient")


def results(state, metrics):
    return jax.device_get(
        {"gradient": gradient_of(state), "averages": state.variables, "metrics": metrics}
    )


def assert_same_step(got, expected):
    assert got["metrics"].keys() == expected["metrics"].keys()
    for part, atol in (("gradient", 1e-7), ("averages", 1e-7), ("metrics", 1e-6)):
        families.assert_trees_close(got[part], expected[part], rtol=2e-5, atol=atol)


def test_micro_batches_of_unequal_rows_are_the_big_batch():
    """Gradients and metrics, with a loss that is not linear in the means of the batch."""
    (whole, state), (micro, _) = (make_step(EXPERTS, accumulation) for accumulation in (1, 4))
    batch = packed()
    got = results(*families.jit(micro)(state, batch))
    assert_same_step(got, results(*families.jit(whole)(state, batch)))


def rows_of_micro_batches():
    """16 rows, half of them padding: one of two micro-batches has all tokens, or each has half."""
    rows = packed()
    apart = jax.tree.map(lambda x: np.stack([x, 0 * x], axis=1).reshape(-1, LENGTH), rows)
    mixed = jax.tree.map(lambda x: np.concatenate([x, 0 * x]), rows)
    return apart, mixed


@functools.cache
def step_with_teacher():
    """(compiled step, state, its results with all tokens in one micro-batch)."""
    run, state = make_step(ROUTED, 2, TEACHER, loss_chunk=5)
    compiled = families.jit(run)
    return compiled, state, results(*compiled(state, rows_of_micro_batches()[0]))


def test_a_step_with_a_teacher_does_not_depend_on_the_distribution_of_rows():
    compiled, state, expected = step_with_teacher()
    assert_same_step(results(*compiled(state, rows_of_micro_batches()[1])), expected)


@every_row(lambda model: not families.draws(model), **RARE)
def test_a_step_does_not_depend_on_the_distribution_of_rows_over_micro_batches(name):
    """Gradients with every sown loss, running averages, and metrics."""
    batches, names = rows_of_micro_batches(), ["inputs", "targets", "weights"]
    if not families.can_pack(families.build(name)):
        batches = [{key: batch[key] for key in names} for batch in batches]
    run, state = make_step(families.FAMILIES[name].changes, 2, loss_chunk=5)
    compiled = families.jit(run)
    expected, got = (results(*compiled(state, batch)) for batch in batches)
    assert_same_step(got, expected)


@pytest.mark.slow
def test_micro_batches_on_a_mesh_are_those_of_one_device():
    run, state = make_step(ROUTED, 2, TEACHER, loss_chunk=5)
    mesh = sharding.make_mesh(dict(data=2, fsdp=1, tensor=2, expert=2, sequence=1))
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        placement = sharding.Placement(mesh, sharding.DEFAULT_RULES, 2 * ROWS)
        batch = placement(rows_of_micro_batches()[1])
        got = results(*families.jit(run)(state, batch))
    assert_same_step(got, step_with_teacher()[2])


def test_the_gradient_of_micro_batches_is_that_of_the_reported_objective():
    """With dropout: the means of the batch and the gradients come from the same masks."""
    run, state = make_step({**EXPERTS, **DROPOUT}, 4)
    batch = packed()

    @families.jit
    @functools.partial(jax.grad, has_aux=True)
    def exact_and_given(params):
        after, metrics = run(state.replace(params=params), batch)
        return metrics["train/objective"], gradient_of(after)

    exact, given = exact_and_given(state.params)
    families.assert_trees_close(given, exact, rtol=1e-4, atol=1e-6)


def test_micro_batches_steps_and_seeds_draw_different_masks():
    run, state = make_step(DROPOUT, 2)
    first_row = jax.tree.map(lambda x: x[:1], packed())
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), first_row)
    once = jax.tree.map(lambda x: np.concatenate([x, 0 * x]), first_row)
    step_of = families.jit(run)

    def gradient(batch, seed=0, number=0):
        gradients = gradient_of(step_of(state, batch, seed, number)[0])
        return gradients["layers"]["block_0"]["mlp"]["up"]["kernel"]

    one = gradient(once)
    assert np.abs(one).max() > 1e-3
    np.testing.assert_array_equal(one, gradient(once))
    for other in (gradient(twice), gradient(once, seed=1), gradient(once, number=1)):
        assert np.isclose(one, other, rtol=0.01, atol=0).mean() < 0.2


@functools.cache
def evaluation():
    """A function: batches -> loss and statistics over all of them."""
    changes = SELECTIVE
    model = families.make(changes, context=LENGTH)
    evaluate = families.jit(eval_step.make_eval_step(model, settings(changes, 1)))
    params = families.random_params(model)

    def run(batches):
        sums = [evaluate(params, {}, batch, 0, 0) for batch in batches]
        sums = jax.tree.map(lambda *x: sum(x), *jax.device_get(sums))
        return {"loss": sums["loss"], **eval_step.by_layer(sums["stats"], model)}

    return run


def same_numbers(got, expected):
    assert {"moe/overflow_fraction", "moe/max_load/block_0"} <= expected.keys() == got.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=2e-5, err_msg=key)


def test_evaluation_does_not_depend_on_how_its_rows_are_batched():
    """Losses and statistics of packed rows that are unequally full."""
    batch = packed()
    parts = [{k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4)]
    same_numbers(evaluation()(parts), evaluation()([batch]))


def test_rows_that_fill_up_the_last_evaluation_batch_are_not_measured():
    config = ConfigDict(dict(source="text:x", seq_len=LENGTH, packing=False, mixture=()))
    tokens = np.random.default_rng(0).integers(1, families.VOCAB, 6 * LENGTH + 1)
    splits = {"eval": TokenSplit("text", Stream([tokens.astype(np.uint16)]))}
    data = Data(config, 0, ByteTokenizer(), splits, "key")
    same_numbers(evaluation()(data.eval_batches(4)), evaluation()(data.eval_batches(2)))
