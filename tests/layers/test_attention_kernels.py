"""Attention kernels, interpreted, against plain XLA; and which kernel is chosen."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from efx.layers import attend, kernels
from efx.layers.kernels import KERNELS, Case
from efx.models.stack import REMAT_POLICIES
from efx.parallel import sharding

SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 2]], [90, 80, 30], axis=1)
SHARDED = dict.fromkeys(sharding.MESH_AXES, 1) | {"data": 2, "tensor": 4}
HALF = Case(200, 2, 2, 64, jnp.bfloat16)


def on_mesh():
    return sharding.use(sharding.make_mesh(SHARDED), sharding.DEFAULT_RULES)


def arrays(rows, length, heads, kv_heads, width):
    rng = np.random.default_rng(0)
    shapes = ((rows, length, n, width) for n in (heads, kv_heads, kv_heads, heads))
    return [np.float32(rng.normal(size=shape)) for shape in shapes]


def loss_and_gradients(attention, q, k, v, weight):
    def loss(q, k, v):
        out = weight * attention(q, k, v)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def assert_close(got, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=2e-3), got, expected)


def test_splash_equals_plain_xla():
    """Values and gradients except at padding, at a length that is padded to 256."""
    length, options = SEGMENTS.shape[1], dict(window=33, softcap=3.0)
    q, k, v, weight = arrays(2, length, 2, 1, 64)
    weight = weight * (SEGMENTS > 0)[..., None, None]
    case = Case(length, 2, 1, 64, q.dtype, is_packed=True, **options)

    def splash(*qkv):
        return KERNELS["splash"].run(case, *qkv, SEGMENTS, 0.2, interpret=True)

    def plain(*qkv):
        return attend.attend(*qkv, scale=0.2, kernel="xla", segment_ids_BT=SEGMENTS, **options)

    got, expected = (loss_and_gradients(f, q, k, v, weight) for f in (splash, plain))
    assert_close(got, expected)


def test_splash_on_devices_that_rows_and_kv_heads_do_not_divide_over():
    """4 devices have 2 query heads each, and copies of the keys and values that these read. 2
    devices do not divide the rows, such as the one of initialisation: both compute all."""
    q, k, v, weight = arrays(3, 128, 8, 2, 16)
    case = Case(128, 8, 2, 16, q.dtype)

    def splash(*qkv):
        return KERNELS["splash"].run(case, *qkv, None, 0.2, interpret=True)

    def plain(*qkv):
        return attend.attend(*qkv, scale=0.2, kernel="xla")

    with on_mesh():
        got = loss_and_gradients(splash, q, k, v, weight)
    assert_close(got, loss_and_gradients(plain, q, k, v, weight))


def test_keys_and_values_are_sharded_like_queries_for_cudnn(monkeypatch):
    """Otherwise the compiler rejects cuDNN's attention."""
    shapes = {}

    def plain(*qkv, scale, **_):
        for name, y in zip("qkv", qkv, strict=True):

            def note(layout, name=name, shape=y.shape):
                shapes[name] = layout.shard_shape(shape)

            jax.debug.inspect_array_sharding(y, callback=note)
        return attend.attend(*qkv, scale=scale, kernel="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    q, k, *_ = arrays(2, 128, 8, 1, 16)
    case = Case(128, 8, 1, 16, q.dtype)
    with on_mesh():
        jax.jit(lambda q, k, v: KERNELS["cudnn"].run(case, q, k, v, None, 0.2))(q, k, k)
    assert shapes == {"q": (1, 128, 2, 16), "k": (1, 128, 1, 16), "v": (1, 128, 1, 16)}


@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_remat_does_not_run_a_kernel_again(name):
    if name == "cudnn" and (reason := kernels._cudnn_missing()):
        pytest.skip(reason)
    x = jnp.ones((4, 256, 4, 64), jnp.bfloat16)
    case, options = Case(256, 4, 4, 64, x.dtype), {"splash": {"interpret": True}, "cudnn": {}}

    def kernels_in(remat):
        def loss(x):
            y = 2 * jnp.sin(x)
            return jnp.sum(KERNELS[name].run(case, y, y, y, None, 0.2, **options[name]) ** 2)

        if remat != "none":
            loss = jax.checkpoint(loss, policy=REMAT_POLICIES[remat])
        with on_mesh():
            jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
        return len(re.findall(r"\b(pallas_call|dot_product_attention_\w+)\[", str(jaxpr)))

    assert 2 <= kernels_in("none") == kernels_in("dots") == kernels_in("full") - 1


@pytest.fixture
def devices_of(monkeypatch):
    """A function that makes devices of one kind the default; returns the searches for cuDNN."""
    for name in ("_cudnn_missing", "_log_once"):
        monkeypatch.setattr(kernels, name, functools.cache(getattr(kernels, name).__wrapped__))

    def select(platform, capability="8.0", has_cudnn=True):
        searches = []

        def dot_product_attention(q, k, v, *, implementation):
            searches.append(implementation)
            if not has_cudnn:
                raise RuntimeError("cuDNN not found.")
            return q

        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(sharding, "platform", lambda: platform)
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
        monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
        return searches

    return select


SUPPORTED = [
    ("tpu", "", dict(window=8)),
    ("tpu", "", dict(has_gaps=True)),
    ("gpu", "8.0", dict(window=8)),
    ("gpu", "12.0", dict(dtype=jnp.float16, head_dim=128)),
]
UNSUPPORTED = [
    ("tpu", "", dict(window=8, has_gaps=True)),
    ("tpu", "", dict(head_dim=32)),
    ("tpu", "", dict(has_probs_dropout=True)),
    ("tpu", "", dict(is_sharded=True)),
    ("gpu", "9.0", dict(is_packed=True)),
    ("gpu", "9.0", dict(softcap=5.0)),
    ("gpu", "9.0", dict(head_dim=36)),
    ("gpu", "9.0", dict(head_dim=136)),
    ("gpu", "9.0", dict(dtype=jnp.float32)),
    ("gpu", "7.5", {}),  # the GPU of Colab
    ("gpu", "gfx942", {}),  # AMD, which JAX calls a GPU as well
]


@pytest.mark.parametrize("platform, capability, changes", SUPPORTED + UNSUPPORTED)
def test_auto_chooses_the_kernel_of_the_platform_if_it_supports_the_case(
    platform, capability, changes, devices_of, caplog
):
    """Otherwise plain XLA, with a warning of the reason, and naming the kernel is an error."""
    name, case = {"tpu": "splash", "gpu": "cudnn"}[platform], HALF._replace(**changes)
    devices_of(platform, capability)
    caplog.set_level("INFO", "efx")
    chosen = kernels.choose("auto", case)
    if (platform, capability, changes) in SUPPORTED:
        assert chosen == KERNELS[name] == kernels.choose(name, case)
        assert caplog.messages == [f"attention by {name}"]
    else:
        assert chosen is None
        assert caplog.messages[0].startswith(f"attention in plain XLA: {name} ")
        refused(lambda: kernels.choose(name, case), f"config.model.attention.kernel={name!r}")


def test_a_cpu_runs_plain_xla(devices_of):
    q, k, v, _ = arrays(1, 8, 2, 2, 4)
    named = dict(scale=1.0, kernel="splash")
    refused(lambda: attend.attend(q, k, v, **named), "kernel='splash'", "tpu", "cpu")
    devices_of("tpu")
    assert kernels.choose("xla", HALF) is None


def test_a_missing_cudnn_is_reported_once(devices_of, caplog):
    searches = devices_of("gpu", has_cudnn=False)
    for _ in range(3):
        assert kernels.choose("auto", HALF) is None
    assert searches == ["cudnn"]
    (record,) = caplog.records
    assert "cuDNN not found" in record.getMessage()
    refused(lambda: kernels.choose("cudnn", HALF), "kernel='cudnn'", "cuDNN not found")


def test_heads_that_do_not_divide_over_the_devices_run_in_plain_xla(devices_of):
    devices_of("gpu")
    with on_mesh():
        chosen = [kernels.choose("auto", HALF._replace(num_heads=heads)) for heads in (8, 6)]
    assert chosen == [KERNELS["cudnn"], None]


def test_the_platform_is_that_of_the_traced_mesh(monkeypatch):
    """A program compiled ahead of time for other devices has their kernel."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    platforms = []
    with on_mesh():
        jax.eval_shape(lambda x: platforms.append(sharding.platform()) or x, 1.0)
    assert platforms == ["cpu"]
