"""Attention kernels for accelerators, interpreted, against plain XLA; and which one is selected."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx import sharding
from efx.layers import attend, kernels
from efx.layers.kernels import KERNELS, Case
from efx.layers.stack import REMAT_POLICIES

SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 2]], [90, 80, 30], axis=1)
SHARDED = dict.fromkeys(sharding.MESH_AXES, 1) | {"data": 2, "tensor": 4}
HALF = Case(200, 2, 2, 64, jnp.bfloat16)
FULL = HALF._replace(dtype=jnp.float32)


def loss_and_gradients(attention, q, k, v, weight):
    """The loss, the weighted outputs, and the gradients of queries, keys and values."""

    def value(q, k, v):
        out = weight * attention(q, k, v)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def arrays(rows, length, heads, kv_heads, width):
    rng = np.random.default_rng(0)
    shapes = ((rows, length, n, width) for n in (heads, kv_heads, kv_heads, heads))
    return [np.float32(rng.normal(size=shape)) for shape in shapes]


def assert_close(got, wanted):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=2e-3), got, wanted)


@pytest.mark.parametrize(
    "kv_heads, segments, options",
    [(1, None, dict(window=33, softcap=3.0)), (2, SEGMENTS, dict(window=20))],
    ids=["grouped_window_softcap", "documents_window"],
)
def test_splash_equals_plain_xla(kv_heads, segments, options):
    """Values and gradients of everything that is not padding, at a length that is padded to 256."""
    length = SEGMENTS.shape[1]
    q, k, v, weight = arrays(2, length, 2, kv_heads, 64)
    if segments is not None:
        weight = weight * (segments > 0)[..., None, None]
    case = Case(length, 2, kv_heads, 64, q.dtype, documents=segments is not None, **options)

    def splash(*qkv):
        return KERNELS["splash"].run(case, *qkv, segments, 0.2, interpret=True)

    def plain(*qkv):
        places = np.arange(length)[None]
        return attend.attend(
            *qkv, scale=0.2, kernel="xla", positions_BT=places, segment_ids_BT=segments, **options
        )

    got = loss_and_gradients(splash, q, k, v, weight)
    assert_close(got, loss_and_gradients(plain, q, k, v, weight))


def test_splash_on_devices_that_rows_and_kv_heads_do_not_divide_over():
    """4 devices have 2 heads of queries each, with copies of the keys and values that these read.
    A number of rows that 2 devices do not divide, such as the 1 of initialisation, is on both."""
    q, k, v, weight = arrays(3, 128, 8, 2, 16)
    case = Case(128, 8, 2, 16, q.dtype)
    wanted = loss_and_gradients(
        lambda *qkv: attend.attend(*qkv, scale=0.2, kernel="xla"), q, k, v, weight
    )
    with sharding.use(sharding.make_mesh(SHARDED), sharding.DEFAULT_RULES):
        got = loss_and_gradients(
            lambda *qkv: KERNELS["splash"].run(case, *qkv, None, 0.2, interpret=True),
            *(q, k, v, weight),
        )
    assert_close(got, wanted)


def test_keys_and_values_are_sharded_as_queries_for_cudnn(monkeypatch):
    """Otherwise the compiler refuses cuDNN's attention."""
    found = {}

    def plain(*qkv, scale, **_):
        for name, y in zip("qkv", qkv, strict=True):

            def note(layout, name=name, shape=y.shape):
                found[name] = layout.shard_shape(shape)

            jax.debug.inspect_array_sharding(y, callback=note)
        return attend.attend(*qkv, scale=scale, kernel="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    q, k, *_ = arrays(2, 128, 8, 1, 16)
    case = Case(128, 8, 1, 16, q.dtype)
    with sharding.use(sharding.make_mesh(SHARDED), sharding.DEFAULT_RULES):
        jax.jit(lambda q, k, v: KERNELS["cudnn"].run(case, q, k, v, None, 0.2))(q, k, k)
    assert found == {"q": (1, 128, 2, 16), "k": (1, 128, 1, 16), "v": (1, 128, 1, 16)}


@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_remat_does_not_run_a_kernel_again(name):
    """Policies that keep the results of products keep those of kernels."""
    if name == "cudnn" and (reason := kernels._without_cudnn()):
        pytest.skip(reason)
    x = jnp.ones((4, 256, 4, 64), jnp.bfloat16)
    case = Case(256, 4, 4, 64, x.dtype)
    interpreted = {} if name == "cudnn" else {"interpret": True}

    def kernels_in(remat):
        def value(x):
            y = 2 * jnp.sin(x)
            return jnp.sum(KERNELS[name].run(case, y, y, y, None, 0.2, **interpreted) ** 2)

        if remat != "none":
            value = jax.checkpoint(value, policy=REMAT_POLICIES[remat])
        with sharding.use(sharding.make_mesh(SHARDED), sharding.DEFAULT_RULES):
            jaxpr = jax.make_jaxpr(jax.grad(value))(x)
        return len(re.findall(r"\b(pallas_call|dot_product_attention_\w+)\[", str(jaxpr)))

    assert 2 <= kernels_in("none") == kernels_in("dots") == kernels_in("full") - 1


@pytest.fixture
def devices_of(monkeypatch):
    """A function that makes kernels be selected for devices of one kind; returns a list with an
    entry for each time that JAX looks for cuDNN."""

    def select(platform, capability="8.0", has_cudnn=True):
        searches = []

        def dot_product_attention(q, k, v, *, implementation):
            searches.append(implementation)
            if not has_cudnn:
                raise RuntimeError("cuDNN not found.")
            return q

        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(sharding, "platform", lambda: platform)
        monkeypatch.setattr(kernels, "get_default_device", lambda: device)
        monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
        return searches

    caches = kernels._without_cudnn, kernels._say_why
    for cache in caches:
        cache.cache_clear()
    yield select
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    "platform, capability, case, taken",
    [
        ("tpu", "", HALF._replace(window=8), True),
        ("tpu", "", HALF._replace(gaps=True), True),
        ("tpu", "", HALF._replace(window=8, gaps=True), False),
        ("tpu", "", HALF._replace(head_dim=32), False),
        ("tpu", "", HALF._replace(probs=True), False),
        ("tpu", "", HALF._replace(split=True), False),
        ("gpu", "8.0", HALF._replace(window=8), True),
        ("gpu", "12.0", HALF._replace(dtype=jnp.float16, head_dim=128), True),
        ("gpu", "9.0", HALF._replace(window=8, gaps=True), False),
        ("gpu", "9.0", HALF._replace(documents=True), False),
        ("gpu", "9.0", HALF._replace(softcap=5.0), False),
        ("gpu", "9.0", HALF._replace(head_dim=36), False),
        ("gpu", "9.0", HALF._replace(head_dim=136), False),
        ("gpu", "9.0", FULL, False),
        ("gpu", "7.5", HALF, False),  # the GPU of Colab
        ("gpu", "gfx942", HALF, False),  # AMD: a platform that JAX calls a GPU as well
    ],
)
def test_auto_takes_the_kernel_of_the_platform_where_it_can(
    platform, capability, case, taken, devices_of
):
    """Otherwise plain XLA, and naming the kernel is refused. run.json has the reason."""
    name = {"tpu": "splash", "gpu": "cudnn"}[platform]
    devices_of(platform, capability)
    with kernels.taken() as choices:
        chosen = kernels.choose("auto", case)
    (record,) = kernels.as_records(choices)
    if taken:
        assert chosen == KERNELS[name] == kernels.choose(name, case)
        assert record == {"setting": "auto", "kernel": name, "refused": {}}
    else:
        assert chosen is None
        assert record["kernel"] == "xla" and list(record["refused"]) == [name]
        refused(lambda: kernels.choose(name, case), f"config.model.attention.kernel={name!r}")


def test_xla_is_taken_on_a_cpu_and_where_it_is_set(devices_of):
    assert kernels.choose("auto", HALF) is None
    refused(lambda: kernels.choose("splash", HALF), "splash", "tpu", "cpu")
    devices_of("tpu")
    assert kernels.choose("xla", HALF) is None


def test_a_missing_cudnn_is_looked_for_and_reported_once(devices_of, caplog):
    searches = devices_of("gpu", has_cudnn=False)
    for _ in range(3):
        assert kernels.choose("auto", HALF) is None
    assert searches == ["cudnn"]
    (record,) = caplog.records
    assert "cuDNN not found" in record.getMessage()
    refused(lambda: kernels.choose("cudnn", HALF), "kernel='cudnn'", "cuDNN not found")


def test_heads_that_do_not_divide_over_the_devices_are_in_plain_xla(devices_of):
    devices_of("gpu")
    case = HALF._replace(num_heads=6, num_kv_heads=6)
    with sharding.use(sharding.make_mesh(SHARDED), sharding.DEFAULT_RULES):
        assert kernels.choose("auto", HALF._replace(num_heads=8)) == KERNELS["cudnn"]
        assert kernels.choose("auto", case) is None
        refused(lambda: kernels.choose("cudnn", case), "kernel='cudnn'")


def test_the_platform_is_that_of_the_mesh_of_the_trace(monkeypatch):
    """A program compiled ahead of time for other devices has their kernel."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    seen = []
    with sharding.use(sharding.make_mesh(SHARDED), sharding.DEFAULT_RULES):
        jax.eval_shape(lambda x: seen.append(sharding.platform()) or x, 1.0)
    assert seen == ["cpu"]
