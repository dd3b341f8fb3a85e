"""Attention kernels for accelerators: against the one in plain XLA by interpretation, and which of
them is chosen."""

import re
import types

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efx import sharding
from efx.errors import UsageError
from efx.layers import attend, attention_kernels
from efx.layers.attention_kernels import KERNELS, Case
from efx.layers.stack import REMAT_POLICIES

LENGTH = 200  # no multiple of 128
SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 2]], [90, 80, 30], axis=1)
CASES = {
    ("splash", "causal"): {},
    ("splash", "window"): dict(window=33),
    ("splash", "softcap"): dict(softcap=3.0),
    ("splash", "documents"): dict(segments=SEGMENTS),
    ("splash", "documents_window"): dict(segments=SEGMENTS, window=20),
    ("splash", "grouped"): dict(kv_heads=1),
    ("triton", "causal"): {},
    ("triton", "documents"): dict(segments=SEGMENTS),
    ("triton", "grouped"): dict(kv_heads=1),
}


def positions(segments):
    return np.concatenate([np.arange(n) for n in np.unique(segments, return_counts=True)[1]])


@pytest.mark.parametrize("name, case", CASES)
def test_a_kernel_is_attention_in_plain_xla(name, case, monkeypatch):
    """Values and gradients of everything that is no padding."""
    options = dict(CASES[name, case])
    segments, kv_heads = options.pop("segments", None), options.pop("kv_heads", 2)
    on(monkeypatch, "tpu" if name == "splash" else "gpu")
    rng, width = np.random.default_rng(0), 64 if name == "splash" else 16
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, LENGTH, heads, width)), jnp.float32)
        for heads in (2, kv_heads, kv_heads)
    )
    weight = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    if segments is not None:
        weight = weight * (segments > 0)[..., None, None]
        segments = jnp.asarray(segments, jnp.int32)
    asked = Case(LENGTH, 2, kv_heads, width, q.dtype, documents=segments is not None, **options)
    assert KERNELS[name].refuses(asked) is None

    def loss(function):
        def value(q, k, v):
            out = function(q, k, v)
            return jnp.sum(out * weight), out * (weight != 0)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    def plain(q, k, v):
        place = jnp.arange(LENGTH)[None]
        return attend.attend(
            q, k, v, scale=0.2, kernel="xla", positions_BT=place, segment_ids_BT=segments, **options
        )

    got = loss(lambda *qkv: KERNELS[name].run(asked, *qkv, segments, 0.2, interpret=True))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=2e-3), got, loss(plain)
    )


@pytest.mark.parametrize("sizes", [{}, {"data": 4, "tensor": 2}])
@pytest.mark.parametrize("name", ["splash", "triton", "cudnn"])
def test_recomputing_runs_no_kernel_again(name, sizes, monkeypatch):
    """Where results of products are kept, those of kernels are as well."""
    if name == "cudnn" and (reason := attention_kernels._without_cudnn()):
        pytest.skip(reason)
    on(monkeypatch, "tpu" if name == "splash" else "gpu")
    devices = jax.devices() if sizes else jax.devices()[:1]
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | sizes, devices)
    x = jnp.ones((4, 256, 2, 64), jnp.bfloat16)
    case = Case(256, 2, 2, 64, x.dtype)
    interpreted = {} if name == "cudnn" else {"interpret": True}

    def kernels(remat):
        def value(x):
            y = 2 * jnp.sin(x)
            return jnp.sum(KERNELS[name].run(case, y, y, y, None, 0.2, **interpreted) ** 2)

        if remat != "none":
            value = jax.checkpoint(value, policy=REMAT_POLICIES[remat])
        with sharding.use(mesh, sharding.DEFAULT_RULES):
            jaxpr = jax.make_jaxpr(jax.grad(value))(x)
        return len(re.findall(r"\b(pallas_call|dot_product_attention_\w+)\[", str(jaxpr)))

    assert 2 <= kernels("none") == kernels("dots") == kernels("full") - 1


SHARED = {"7.5": 65_536, "8.0": 166_912, "8.9": 101_376, "9.0": 232_448, "12.0": 101_376}


NO_CUDNN = "cannot be called by JAX (cuDNN not found)"


def on(monkeypatch, platform, capability="8.0", tokamax=None, without_cudnn=None, lacks=""):
    """As if kernels were chosen for a device of this kind, with this release of tokamax, which says
    this if it cannot be imported, and with cuDNN unless there is a reason why not."""
    device = types.SimpleNamespace()
    if platform == "gpu":
        device.compute_capability = capability
        device.shared_memory_per_block_optin = SHARED.get(capability, 0)
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    monkeypatch.setattr(attention_kernels, "get_default_device", lambda: device)
    monkeypatch.setattr(attention_kernels, "_tokamax", lambda: tokamax)
    monkeypatch.setattr(attention_kernels, "_tokamax_lacks", lambda: lacks)
    monkeypatch.setattr(attention_kernels, "_without_cudnn", lambda: without_cudnn)
    attention_kernels._say_why.cache_clear()


HALF = Case(LENGTH, 2, 2, 64, jnp.bfloat16)


@pytest.mark.parametrize(
    "platform, case, expected",
    [
        ("cpu", HALF, None),
        ("tpu", HALF, "splash"),
        ("tpu", HALF._replace(window=8), "splash"),
        ("tpu", HALF._replace(window=8, gaps=True), None),
        ("tpu", HALF._replace(gaps=True), "splash"),
        ("tpu", HALF._replace(head_dim=32), None),
        ("tpu", HALF._replace(probs=True), None),
        ("gpu", HALF, "cudnn"),
        ("gpu", HALF._replace(documents=True), "triton"),
        ("gpu", HALF._replace(dtype=jnp.float32), "triton"),
        ("gpu", HALF._replace(softcap=5.0), None),
    ],
)
def test_the_first_that_can_is_taken(platform, case, expected, monkeypatch):
    on(monkeypatch, platform)
    with attention_kernels.taken() as choices:
        chosen = attention_kernels.choose("auto", case)
    assert chosen == (expected and KERNELS[expected])
    assert [choice.kernel for choice in choices] == [expected or "xla"]
    assert attention_kernels.choose("xla", case) is None


@pytest.mark.parametrize(
    "capability, case, expected",
    [
        # The shape of configs/mod.py on the GPU that Colab has for nothing.
        ("7.5", HALF._replace(dtype=jnp.float32, head_dim=32), None),
        ("7.5", HALF._replace(dtype=jnp.float16), None),
        ("8.0", HALF._replace(dtype=jnp.float32, head_dim=32), "triton"),
        ("8.9", HALF._replace(dtype=jnp.float32), "triton"),
        ("8.9", HALF._replace(head_dim=128, documents=True), "triton"),
        ("9.0", HALF._replace(head_dim=128, documents=True), "triton"),
        ("12.0", HALF._replace(head_dim=128, documents=True), "triton"),
        # More shared memory than there is, by the compilers for these.
        ("8.0", HALF._replace(dtype=jnp.float32, head_dim=128), None),
        ("9.0", HALF._replace(dtype=jnp.float32, head_dim=128), None),
        ("gfx942", HALF, None),  # AMD: a platform that JAX calls a GPU as well
    ],
)
def test_a_gpu_gets_what_compiles_for_it(capability, case, expected, monkeypatch):
    on(monkeypatch, "gpu", capability)
    assert attention_kernels.choose("auto", case) == (expected and KERNELS[expected])


@pytest.mark.parametrize(
    "name, line",
    [
        ("cudnn", r"needs a GPU of compute capability 8\.0 \(A100\) or newer, not 7\.5"),
        ("triton", r"needs a GPU of compute capability 8\.0 \(A100\) or newer, not 7\.5"),
    ],
)
def test_a_gpu_that_is_too_old_is_one_line(name, line, monkeypatch):
    on(monkeypatch, "gpu", "7.5")
    with pytest.raises(UsageError, match=line):
        attention_kernels.choose(name, HALF)


TRIED = "0.0.17"  # with jax 0.11


@pytest.mark.parametrize(
    "case, capability, jax_version, tokamax, refused",
    [
        (HALF, "9.0", "0.11.2", TRIED, None),
        (HALF, "10.0", "0.11.2", TRIED, None),
        (HALF, "9.0", "0.10.2", "0.0.12", None),
        (
            HALF._replace(documents=True, window=8, gaps=True, softcap=5.0),
            *("9.0", "0.11.2", TRIED, None),
        ),
        (HALF, "8.0", "0.11.2", TRIED, "compute capability 9.0"),
        (HALF, "12.0", "0.11.2", TRIED, "up to 10.x .B200., not 12.0"),
        (HALF, "9.0", "0.11.2", None, "is not installed: .*mosaic"),
        (HALF, "9.0", "0.11.2", "0.0.12", "tokamax 0.0.17 .*for jax 0.11.2, but 0.0.12 is"),
        (HALF, "9.0", "0.10.2", TRIED, "tokamax 0.0.12 .*for jax 0.10.2, but 0.0.17 is"),
        (HALF, "9.0", "0.12.0", TRIED, "with no tokamax for jax 0.12.0"),
        (HALF._replace(dtype=jnp.float32), "9.0", "0.11.2", TRIED, "not float32"),
        (HALF._replace(head_dim=512), "9.0", "0.11.2", TRIED, "at most 256"),
        (HALF._replace(probs=True), "9.0", "0.11.2", TRIED, "not support dropout"),
    ],
)
def test_mosaic_takes_every_interval(case, capability, jax_version, tokamax, refused, monkeypatch):
    on(monkeypatch, "gpu", capability, tokamax)
    monkeypatch.setattr(jax, "__version__", jax_version)
    if refused:
        with pytest.raises(UsageError, match=f"kernel='mosaic': .*{refused}"):
            attention_kernels.choose("mosaic", case)
        assert attention_kernels.choose("auto", case) != KERNELS["mosaic"]
    else:
        for name in ("auto", "mosaic"):
            assert attention_kernels.choose(name, case) == KERNELS["mosaic"]


def test_a_mosaic_that_cannot_be_imported_is_passed_over(monkeypatch):
    """As one that lacks a package of its own: every step of `auto` failed of it on an H100."""
    on(monkeypatch, "gpu", "9.0", TRIED, lacks="No module named 'xprof'")
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    with pytest.raises(UsageError, match="kernel='mosaic': .*imported: No module named 'xprof'"):
        attention_kernels.choose("mosaic", HALF)
    assert attention_kernels.choose("auto", HALF) == KERNELS["cudnn"]


def test_the_extra_brings_what_goes_with_the_pinned_jax(root):
    """For Python 3.12, of which the extra is."""
    extra = re.search(r'mosaic = \["tokamax==([\d.]+);', (root / "pyproject.toml").read_text())[1]
    pins = (root / "requirements.txt").read_text()
    jax_version = re.search(r'^jax==(.+) ; python_version >= "3.12"$', pins, re.M)[1]
    assert attention_kernels._TOKAMAX[jax_version.rpartition(".")[0]] == extra


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("documents", [False, True])
def test_a_kernel_of_intervals_gets_the_first_key_of_each_query(window, documents, monkeypatch):
    """By a stand-in that attends to the intervals it is given: mosaic runs on GPUs alone."""

    def run(case, q_BTNH, k_BTKH, v_BTKH, first_BT, scale):
        place_1S = jnp.arange(case.length)[None]
        if first_BT is None:
            first_BT = jnp.zeros((1, case.length), int)
        seen_BTS = (place_1S <= place_1S.T)[None] & (place_1S[None] >= first_BT[..., None])
        scores_BNTS = scale * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTKH)
        probs_BNTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BNTS, -1e30))
        return jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v_BTKH)

    on(monkeypatch, "gpu")
    kernel = KERNELS["mosaic"]._replace(refuses=lambda case: None, run=run)
    monkeypatch.setitem(KERNELS, "mosaic", kernel)
    rng = np.random.default_rng(0)
    q, k, v = (np.float32(rng.normal(size=(2, LENGTH, 2, 16))) for _ in range(3))
    segments = np.int32(SEGMENTS) if documents else None

    @families.jit
    def attended(q, k, v, segments, place):
        return [
            attend.attend(
                q, k, v, scale=0.2, kernel=name, window=window, segment_ids_BT=segments,
                positions_BT=place,
            )
            for name in ("mosaic", "xla")
        ]  # fmt: skip

    both = attended(q, k, v, segments, np.arange(LENGTH)[None])
    np.testing.assert_allclose(*both, atol=1e-5)


def test_falling_back_is_said_once(monkeypatch, caplog):
    on(monkeypatch, "tpu")
    for _ in range(3):
        attention_kernels.choose("auto", HALF._replace(head_dim=40))
    (record,) = caplog.records
    assert "splash needs a head width that is a multiple of 64, not 40" in record.getMessage()


@pytest.mark.parametrize(
    "case, expected, said",
    [
        (HALF, "triton", f"attention by triton: cudnn {NO_CUDNN}"),
        (
            HALF._replace(head_dim=40),
            None,
            f"attention in plain XLA: mosaic .*; cudnn {re.escape(NO_CUDNN)}; triton needs",
        ),
        # What cuDNN would not have taken either is not its absence.
        (HALF._replace(documents=True), "triton", None),
    ],
)
def test_without_cudnn_the_next_is_taken_and_it_is_said_once(
    case, expected, said, monkeypatch, caplog
):
    on(monkeypatch, "gpu", without_cudnn=NO_CUDNN)
    for _ in range(2):
        chosen = attention_kernels.choose("auto", case)
        assert chosen == (expected and KERNELS[expected])
    records = [record.getMessage() for record in caplog.records]
    assert len(records) == (said is not None)
    if said:
        assert records[0].startswith(said) or re.match(said, records[0])
        with pytest.raises(attention_kernels.Refused, match=re.escape(NO_CUDNN)) as error:
            attention_kernels.choose("cudnn", case)
        assert error.value.reason == NO_CUDNN and "\n" not in str(error.value)


def test_jax_is_asked_once_whether_there_is_cudnn(monkeypatch):
    """Where an attention is traced, which is what JAX promises to raise at."""
    asked, found = [], [RuntimeError("cuDNN not found."), None]

    def attention(*arrays, implementation):
        asked.append((implementation, *(y.shape for y in arrays)))
        if found[0]:
            raise found[0]
        return arrays[0]

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    try:
        for said in ("cannot be called by JAX (cuDNN not found): install the extra", None):
            attention_kernels._without_cudnn.cache_clear()
            reasons = {attention_kernels._without_cudnn() for _ in range(3)}
            assert len(reasons) == 1
            assert reasons == {None} if said is None else reasons.pop().startswith(said)
            found.pop(0)
    finally:
        attention_kernels._without_cudnn.cache_clear()
    assert asked == 2 * [("cudnn", *3 * [(1, 128, 1, 64)])]


@pytest.mark.parametrize(
    "platform, name, case, line",
    [
        ("cpu", "splash", HALF, "runs only on a tpu, but the devices here are 'cpu'"),
        ("gpu", "cudnn", HALF._replace(softcap=1.0), "does not support softcap"),
        ("tpu", "splash", HALF._replace(gaps=True, window=4), "not support a window by position"),
    ],
)
def test_a_choice_that_cannot_be_is_one_line(platform, name, case, line, monkeypatch):
    on(monkeypatch, platform)
    with pytest.raises(UsageError, match=rf"config\.model\.attention\.kernel='{name}': .*{line}"):
        attention_kernels.choose(name, case)


def test_the_platform_is_the_mesh_it_is_traced_under():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        seen = []
        jax.eval_shape(lambda x: seen.append(sharding.platform()) or x, 1.0)
    assert seen == ["cpu"]


@pytest.mark.parametrize("rows, of_each_device", [(16, 2), (1, 1), (12, 12)])
def test_rows_that_do_not_divide_are_on_every_device(rows, of_each_device):
    """As the one row of an initialisation: a mesh of many TPUs could not start otherwise."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = [("batch", "data"), ("act_heads", None), ("act_kv_heads", None)]
    seen = []

    def local(q_BTNH, k_BTKH, v_BTKH):
        seen.append(q_BTNH.shape[0])
        return q_BTNH + k_BTKH + v_BTKH

    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 2, 1, 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        out = jax.jit(lambda x: attention_kernels._over_devices(local, x, x, x, None))(x)
    np.testing.assert_array_equal(out, 3 * x)
    assert seen == [of_each_device]


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_devices_that_share_few_keys_and_values_have_those_of_their_queries(kv_heads, monkeypatch):
    """4 devices with 2 heads of queries each; what they compute is in plain XLA here."""
    from jax.experimental.pallas.ops.gpu import attention as lib

    def plain(q_BTNH, k_BTNH, v_BTNH, segment_ids_BT, *, sm_scale, **_):
        assert q_BTNH.shape == k_BTNH.shape == (1, 128, 2, 16)
        return attend.attend(q_BTNH, k_BTNH, v_BTNH, scale=sm_scale, kernel="xla")

    monkeypatch.setattr(lib, "mha", plain)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = [("batch", "data"), ("act_heads", "tensor"), ("act_kv_heads", "tensor")]
    rng = np.random.default_rng(0)
    q, k, v = (np.float32(rng.normal(size=(2, 128, n, 16))) for n in (8, kv_heads, kv_heads))
    case = Case(128, 8, kv_heads, 16, q.dtype)

    def loss(function):
        value = jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(function(*qkv))), (0, 1, 2))
        # An empty array within a `shard_map` ends the process in the partitioner of jaxlib 0.11.2.
        assert all(x.size for x in jax.make_jaxpr(value)(q, k, v).consts)
        return jax.jit(value)(q, k, v)

    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        got = loss(lambda *qkv: KERNELS["triton"].run(case, *qkv, None, 0.2))
    wanted = loss(lambda *qkv: attend.attend(*qkv, scale=0.2, kernel="xla"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5), got, wanted)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_of_keys_lie_as_cudnn_wants_them(kv_heads, monkeypatch):
    """It refuses in the compiler what lies otherwise than the queries."""
    found = {}

    def plain(*arrays, scale, **_):
        for name, y in zip("qkv", arrays, strict=True):

            def note(layout, name=name, shape=y.shape):
                found[name] = layout.shard_shape(shape)

            jax.debug.inspect_array_sharding(y, callback=note)
        return attend.attend(*arrays, scale=scale, kernel="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = [
        ("batch", "data"), ("length", None), ("act_heads", "tensor"), ("act_kv_heads", "tensor"),
    ]  # fmt: skip
    q, k = np.zeros((2, 128, 8, 16), np.float32), np.zeros((2, 128, kv_heads, 16), np.float32)
    case = Case(128, 8, kv_heads, 16, q.dtype)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        jax.jit(lambda q, k, v: KERNELS["cudnn"].run(case, q, k, v, None, 0.2))(q, k, k)
    assert found == {"q": (1, 128, 2, 16), "k": (1, 128, 1, 16), "v": (1, 128, 1, 16)}


def test_heads_that_do_not_divide_over_the_devices_are_in_plain_xla(monkeypatch):
    on(monkeypatch, "gpu")
    monkeypatch.setattr(sharding, "ways", lambda name: {"act_heads": 4}[name])
    case = HALF._replace(num_heads=6, num_kv_heads=6)
    assert attention_kernels.choose("auto", case) is None
    with pytest.raises(UsageError, match="needs a number of heads divisible by 4 devices, not 6"):
        attention_kernels.choose("cudnn", case)
