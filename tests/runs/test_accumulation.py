"""Batches of unequal rows add up: micro-batches to the big batch, those of an evaluation to it."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from efx import optim, sharding, step
from efx.data.pipeline import Data
from efx.data.stream import Stream
from efx.data.tokenizers import ByteTokenizer
from efx.models.latent import loss as latent_loss

ROWS, LENGTH = 8, 16

# Together these sow every loss that there is; under names of their own, so that a new loss that is
# in none of them is noticed.
ALL_ROUTED = {
    "depth_routing.kind": "mod",
    "depth_routing.capacity": 0.5,
    "depth_routing.every": 1,
    "depth_routing.causal": "predictor",
    "depth_routing.also_train": ("aux_loss", "threshold"),
    "mlp.kind": "moe",
    "mlp.moe.num_experts": 4,
    "mlp.moe.expert_hidden": 16,
    "mlp.moe.num_noop": 1,
    "dropout.kind": "elementwise",
    "dropout.elementwise.detach": False,
    "scan_layers": True,
}
# What a variant follows, with a vocabulary padded like its own.
TEACHERS = {"routed blocks, experts, masks": {"depth": 1}}
VARIANTS = {
    "routed blocks, experts, masks": ALL_ROUTED,
    "expert choice, inclusion": {
        "mlp.kind": "moe",
        "mlp.moe.num_experts": 3,
        "mlp.moe.expert_hidden": 16,
        "depth": 1,
        "mlp.moe.router": "expert_choice",
        "adapter.kind": "lora",
        "adapter.rank": 2,
        "adapter.experts": ("a", "b"),
        "adapter.routing": "inclusion",
        "adapter.sites": ".*/query",
    },
    "types of tokens": {
        "depth_routing.kind": "mod",
        "depth_routing.capacity": 0.5,
        "depth_routing.every": 1,
        "depth_routing.train_selection": "token_hash",
        "depth": 1,
    },
    "streams": {
        "family": "encoder_decoder",
        "embedding_loss": "log_cosine",
        "depth": 1,
        "embedding_loss_gains": True,
        "mlp.hidden": 32,
        "dropout.kind": "attention",
        "dropout.sites": families.NO_PROBS,
        "dropout.attention.rounding": "none",
    },
    "latents": {
        "family": "latent",
        "group_size": 4,
        "latents": (2,),
        "level_widths": (16,),
        "level_heads": (2,),
        "encoder_local": 0,
        "decoder_global": 0,
        "depth": 1,
        "latent_loss.kind": "siglip",
        "adapter.kind": "lora",
        "adapter.rank": 2,
        "adapter.experts": ("a", "b"),
        "adapter.sites": ".*/(query|up)",  # of attention and MLP; all take four times as long
    },
}
# Of which no two batches are alike, nor the big one and its micro-batches.
DROPOUT = {"depth": 1, "dropout.kind": "standard", "dropout.rate": 0.5}


def packed(rows=ROWS, length=LENGTH):
    """Rows of two documents and padding, of which every second row has far more."""
    rng = np.random.default_rng(0)
    segments_BT = np.zeros((rows, length), np.int32)
    positions_BT = np.zeros((rows, length), np.int32)
    for row, segments in enumerate(segments_BT):
        for segment, size in enumerate([3, 1 + row // 2] if row % 2 else [length // 2, 5], 1):
            start = np.count_nonzero(segments)
            segments[start : start + size] = segment
            positions_BT[row, start : start + size] = np.arange(size)
    tokens = rng.integers(0, families.VOCAB, (2, rows, length)).astype(np.int32)
    weights_BT = (segments_BT > 0).astype(np.float32)
    return {
        "inputs": tokens[0],
        "targets": tokens[1],
        "weights": weights_BT,
        "positions": positions_BT,
        "segment_ids": segments_BT,
    }


def gradient_keeper():
    """An optimiser that leaves everything as it is and keeps the gradient."""

    def update(gradient, state, params):
        state = gradient, optim.GradNormState(optax.tree.norm(gradient))
        return jax.tree.map(jnp.zeros_like, gradient), state

    zero = optim.GradNormState(jnp.zeros(()))
    return optax.GradientTransformation(lambda params: (params, zero), update)


def changes_of(name):
    return DROPOUT if name == "dropout" else VARIANTS[name]


def settings(name, accumulation):
    config = families.small_config(changes_of(name))
    config.train.accumulation = accumulation
    for loss in config.losses:
        config.losses[loss] = 0.7
    return config


def one_step(name, batch, accumulation, mesh=None, number=0, seed=0):
    """(gradient, state variables, metrics) of one step of a variant, the step of this number."""
    config = settings(name, accumulation)
    model = families.make(changes_of(name), context=LENGTH)
    params, variables = families.random_params(model), families.random_state(model)
    teacher = families.make(TEACHERS[name], context=LENGTH) if name in TEACHERS else None
    taught = teacher and {"params": families.random_params(teacher, seed=1)}
    train_step = step.make_train_step(
        model, gradient_keeper(), lambda count: 0.0, config, total_steps=9, teacher=teacher
    )
    zero = jnp.zeros((), jnp.int32)
    opt_state = params, optim.GradNormState(jnp.zeros(()))
    state = step.TrainState(zero + number, params, opt_state, variables, zero, zero)
    if mesh is None:
        state, metrics = families.jit(train_step)(state, batch, np.uint32(seed), taught)
    else:
        with sharding.use(mesh, sharding.DEFAULT_RULES):
            placement = sharding.Placement(mesh, sharding.DEFAULT_RULES, ROWS)
            batch = placement(batch)
            state, metrics = families.jit(train_step)(state, batch, np.uint32(0), taught)
    return state.opt_state[0], state.variables, jax.device_get(metrics)


@functools.cache
def step_of(name, accumulation):
    return one_step(name, packed(), accumulation)


def check(name, got, averages, metrics):
    gradient, wanted, expected = step_of(name, 1)
    families.assert_trees_close(got, gradient, rtol=2e-5, atol=1e-7)
    families.assert_trees_close(averages, wanted, rtol=2e-5, atol=1e-7)
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_of_unequal_rows_are_the_big_batch(name):
    """Gradient of every parameter with every sown loss, running averages, and every logged number.
    With the mean of the micro-batches' losses routers were off by more than their whole gradient.
    """
    check(name, *step_of(name, 2))


@pytest.mark.parametrize("count", [3, 4])
def test_what_does_not_move_keeps_every_bit(count):
    """The running averages of frozen models, after micro-batches of unequal rows."""
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    rows = np.random.default_rng(1).integers(0, 2, (count, 2, 16))
    batches = {"inputs": jnp.zeros_like(rows), "segment_ids": jnp.asarray(rows)}
    whole = jax.jit(step._of_whole_batch)({"q": np.stack([x] * count, axis=-1)}, batches)
    np.testing.assert_array_equal(whole["q"], x)


def test_every_micro_batch_draws_for_itself():
    """Two that are alike have other elements dropped: their gradient is not that of one of them."""
    one, two = (jax.tree.map(lambda x, n=n: np.repeat(x[:1], n, axis=0), packed()) for n in (1, 2))
    of_one, of_two = (
        one_step("dropout", batch, count)[0]["layers"]["block_0"]["mlp"]["up"]["kernel"]
        for batch, count in ((one, 1), (two, 2))
    )
    assert np.abs(of_one).max() > 1e-3
    assert np.isclose(of_one, of_two, rtol=0.01, atol=0).mean() < 0.2


def test_every_step_and_every_seed_draws_for_itself():
    """The same batch at another step, or with another seed, has other elements dropped."""

    def gradient(**of):
        return one_step("dropout", packed(), 1, **of)[0]["layers"]["block_0"]["mlp"]["up"]["kernel"]

    first, *others = gradient(), gradient(number=1), gradient(seed=1)
    np.testing.assert_array_equal(first, gradient())
    for other in others:
        assert np.isclose(first, other, rtol=0.01, atol=0).mean() < 0.2


def test_micro_batches_are_the_big_batch_on_a_mesh():
    name = "routed blocks, experts, masks"
    mesh = sharding.make_mesh(dict(data=2, fsdp=1, tensor=2, expert=2, sequence=1))
    check(name, *one_step(name, packed(), 2, mesh))


def evaluation():
    """A function of batches: loss and statistics of one variant over all of them."""
    name = "expert choice, inclusion"
    model = families.make(VARIANTS[name], context=LENGTH)
    evaluate = families.jit(step.make_eval_step(model, settings(name, 1)))
    params = families.random_params(model)

    def run(parts):
        sums = [evaluate(params, {}, part, 0, 0) for part in parts]
        sums = jax.tree.map(lambda *x: sum(x), *jax.device_get(sums))
        return {"loss": sums["loss"], **step.by_layer(sums["stats"], model)}

    return run


def same_numbers(got, expected):
    assert {"moe/dropped_fraction", "moe/max_load/block_0"} <= expected.keys() == got.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=2e-5, err_msg=key)


def test_evaluation_does_not_depend_on_how_its_rows_are_batched():
    """Losses and statistics of the split: those were means of the batches' means."""
    run, batch = evaluation(), packed()
    parts = [{k: v[rows] for k, v in batch.items()} for rows in np.split(np.arange(ROWS), 4)]
    same_numbers(run(parts), run([batch]))


def test_what_fills_up_the_last_batch_of_an_evaluation_is_not_measured():
    """A batch of twice as many rows as there are: statistics were half of rows of zeros."""
    config = ConfigDict(dict(seq_len=LENGTH, packing=False))
    tokens = np.random.default_rng(0).integers(1, families.VOCAB, 4 * LENGTH + 1)
    streams = {"eval": Stream([tokens.astype(np.uint16)])}
    data = Data(config, 0, ByteTokenizer(), streams, None, None, "key")
    run = evaluation()
    same_numbers(run(data.eval_batches(8)), run(data.eval_batches(4)))


def test_these_are_all_losses():
    found = set()
    for name in VARIANTS:
        found |= {key for key in step_of(name, 1)[2] if key.startswith("losses/")}
    assert found == {f"losses/{loss}" for loss in settings(name, 1).losses if loss != "z_loss"}


def test_what_accumulation_does_not_do_as_the_big_batch_would():
    """As `make_train_step` says: negatives from the whole batch are those of the micro-batch."""
    x_BTD = np.float32(np.random.default_rng(1).normal(size=(4, 5, 8)))
    pairs_BT = np.ones((4, 5), bool)
    sigmoid_loss = families.jit(latent_loss.sigmoid_loss, static_argnums=(3, 4, 5))

    def loss(rows, candidates):
        z_BTD = x_BTD[np.array(rows)]
        return jax.device_get(
            sigmoid_loss(z_BTD, -z_BTD, pairs_BT[: len(rows)], 1.0, -2.0, candidates)
        )

    for candidates, exact in (("row", True), ("batch", False)):
        together = jax.tree.map(np.add, loss([0, 2], candidates), loss([1, 3], candidates))
        whole = loss(range(4), candidates).value()
        assert np.allclose(together.value(), whole, rtol=1e-5) == exact
