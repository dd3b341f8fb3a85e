"""Attention kernels for accelerators, in place of the one in plain XLA (`attend.py`).

Which of them runs is decided where attention is traced, by the platform of the mesh, so that a
program compiled ahead of time for other devices has their kernel. Each says what it cannot do.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.backend import get_default_device
from jax.sharding import PartitionSpec

from efx import flops, sharding
from efx.errors import UsageError, extra

LANES = 128  # splash wants lengths that are multiples of this
_RESIDUALS = "attention_residuals"  # what splash keeps for its backward pass, by name
_is_residual = jax.checkpoint_policies.save_only_these_names(_RESIDUALS)
# The primitives whose results nothing names: one of JAX for cuDNN, and programs in Pallas.
_PRIMITIVES = ("dot_product_attention_fwd_wrapper", "pallas_call")


def keeps(primitive, *args, **params):
    """A policy of `jax.checkpoint` that keeps the results of kernels of attention, so that the
    backward pass, which wants them, does not compute them again."""
    return primitive.name in _PRIMITIVES or _is_residual(primitive, *args, **params)


class Case(NamedTuple):
    """What an attention asks of a kernel, all of it known when it is traced.

    Attributes:
      window: positions that a query looks back; 0: all.
      gaps: positions do not ascend one by one, as in a routed subsequence.
      documents: rows hold several.
      split: devices share a sequence.
      probs: something is done to the probabilities.
    """

    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    window: int = 0
    softcap: float = 0.0
    gaps: bool = False
    documents: bool = False
    split: bool = False
    probs: bool = False


class Refused(UsageError):
    """A kernel that was chosen by name cannot be.

    Attributes:
      reason: why, to be read after the kernel's name.
    """

    def __init__(self, name, reason):
        super().__init__(
            f"config.model.attention.kernel={name!r}: {reason}; 'auto' selects a supported kernel"
        )
        self.reason = reason


class Kernel(NamedTuple):
    """A kernel for one platform.

    Attributes:
      refuses: Case -> why it cannot be, or None.
      run: (case, q_BTNH, k_BTKH, v_BTKH, documents, scale) -> [B, T, N, H], where `documents` are
        segment_ids_BT or None.
    """

    platform: str
    refuses: Callable
    run: Callable


class Choice(NamedTuple):
    """The kernel that an attention takes.

    Attributes:
      setting: `config.model.attention.kernel`. kernel: name of the kernel, "xla" for none.
      refused: ((name, reason), ...) of the kernels that "auto" prefers to it.
    """

    setting: str
    kernel: str
    refused: tuple = ()


def choose(name, case):
    """The `Kernel` for a case, or None for plain XLA; `Refused` for a choice that cannot be.

    Args:
      name: `config.model.attention.kernel`.
    """
    choice = _choice(name, case)
    if (choices := _taken.get()) is not None:
        choices.add(choice)
    return KERNELS.get(choice.kernel)


_taken = contextvars.ContextVar("`Choice`s of a program", default=None)


@contextlib.contextmanager
def taken():
    """The set of `Choice`s of the programs that are traced inside."""
    token = _taken.set(choices := set())
    try:
        yield choices
    finally:
        _taken.reset(token)


def as_records(choices):
    """`Choice`s as [{"setting": ..., "kernel": ..., "refused": {name: reason}}], for run.json."""
    return [choice._asdict() | {"refused": dict(choice.refused)} for choice in sorted(choices)]


def _choice(name, case):
    if name == "xla" or flops.is_counting():
        return Choice(name, "xla")
    here = sharding.platform()
    if name != "auto":
        kernel = KERNELS[name]
        reason = _refuses(kernel, case)
        if kernel.platform != here:
            reason = f"runs only on a {kernel.platform}, but the devices here are {here!r}"
        if reason:
            raise Refused(name, reason)
        return Choice(name, name)
    reasons = {}
    for candidate, kernel in KERNELS.items():
        if kernel.platform != here:
            continue
        reason = _refuses(kernel, case)
        if reason is None:
            return Choice(name, candidate, tuple(reasons.items()))
        reasons[candidate] = reason
    if reasons:
        _say_why(tuple(reasons.items()))
    return Choice(name, "xla", tuple(reasons.items()))


def _refuses(kernel, case):
    ways = sharding.ways("act_heads")
    return _first(
        (case.split, "does not support sequences sharded over devices"),
        (case.probs, "does not support dropout or masks of attention probabilities"),
        (
            case.num_heads % ways,
            f"needs a number of heads divisible by {ways} devices, not {case.num_heads}",
        ),
    ) or kernel.refuses(case)


@functools.cache
def _say_why(reasons):
    listed = "; ".join(f"{name} {reason}" for name, reason in reasons)
    logging.getLogger(__name__).warning("attention in plain XLA: %s", listed)


def _first(*conditions):
    """The reason of the first condition that holds, or None."""
    return next((reason for holds, reason in conditions if holds), None)


def _over_devices(function, q_BTNH, k_BTKH, v_BTKH, documents_BT):
    """The function on each device's own rows and heads: what a compiler cannot split. Rows that do
    not divide over the devices, such as the one of an initialisation, are computed by each. Keys
    and values lie with the queries that read them."""
    arrays = (q_BTNH, *_repeated(q_BTNH.shape[2], k_BTKH, v_BTKH))
    if documents_BT is not None:
        arrays += (documents_BT,)
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    rows = "batch" if q_BTNH.shape[0] % sharding.ways("batch") == 0 else None
    spec = nn.logical_to_mesh_axes((rows, None, "act_heads", None))
    specs = (spec, spec, spec, PartitionSpec(spec[0], None))[: len(arrays)]
    return jax.shard_map(function, in_specs=specs, out_specs=spec, check_vma=False)(*arrays)


def _repeated(num_heads, *arrays_BTKH):
    """Keys and values, each head as often as it takes for them to divide over the devices that
    share the queries' heads: over 4 devices the one of 8 queries is there 4 times."""
    heads, ways = arrays_BTKH[0].shape[2], sharding.ways("act_heads")
    enough = num_heads // heads  # then there is one for each head of queries, and these divide
    times = next(n for n in range(1, enough + 1) if enough % n == 0 and heads * n % ways == 0)
    return arrays_BTKH if times == 1 else tuple(jnp.repeat(y, times, axis=2) for y in arrays_BTKH)


def _whole_lanes(length):
    return -(-length // LANES) * LANES


def _pad(length, *arrays):
    """Arrays [B, T, ...] with zeros up to this length: no query sees what comes after it."""
    return [
        y
        if y is None
        else jnp.pad(y, ((0, 0), (0, length - y.shape[1])) + ((0, 0),) * (y.ndim - 2))
        for y in arrays
    ]


# ---- TPU ----------------------------------------------------------------------------------------


def _splash_refuses(case):
    return _first(
        (
            case.window and case.gaps,
            "does not support a window by position in a routed subsequence",
        ),
        (case.head_dim % 64, f"needs a head width that is a multiple of 64, not {case.head_dim}"),
    )


def splash(case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale, interpret=False):
    """Splash attention (jax.experimental.pallas.ops.tpu), with its backward pass in two kernels.

    `interpret` runs it without a TPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as lib

    length = _whole_lanes(case.length)
    block = next(size for size in (512, 256, LANES) if length % size == 0)
    sizes = lib.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
        block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip

    def local(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=None):
        mask = lib.CausalMask((length, length))
        if case.window:
            mask = lib.LocalMask((length, length), (case.window - 1, 0), 0)
        kernel = lib.make_splash_mha(
            lib.MultiHeadMask([mask] * q_BTNH.shape[2]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=case.softcap or None,
            residual_checkpoint_name=_RESIDUALS,
            interpret=interpret,
        )
        heads_first = [jnp.swapaxes(y, 1, 2) for y in (q_BTNH, k_BTKH, v_BTKH)]
        if segment_ids_BT is None:
            out_BNTH = jax.vmap(kernel)(*heads_first)
        else:
            segments = lib.SegmentIds(q=segment_ids_BT, kv=segment_ids_BT)
            out_BNTH = jax.vmap(kernel)(*heads_first, segments)
        return jnp.swapaxes(out_BNTH, 1, 2)

    arrays = _pad(length, q_BTNH * scale, k_BTKH, v_BTKH, segment_ids_BT)
    return _over_devices(local, *arrays)[:, : case.length].astype(q_BTNH.dtype)


# ---- GPU ----------------------------------------------------------------------------------------

_AMPERE = 8.0  # compute capability of an A100


def _capability():
    """Of the device that kernels themselves ask, which may be one of a topology; 0: of no GPU, or
    of one that counts otherwise ("gfx942" of AMD), for which there is no kernel here."""
    told = str(getattr(get_default_device(), "compute_capability", 0))
    return 0.0 if told.startswith("gfx") else float(told)


def _cudnn_refuses(case):
    capability, dtype = _capability(), jnp.dtype(case.dtype)
    reason = _first(
        (
            capability < _AMPERE,
            f"needs a GPU of compute capability 8.0 (A100) or newer, not {capability}",
        ),
        (
            dtype not in (jnp.bfloat16, jnp.float16),
            f"computes in bfloat16 or float16, not {dtype}",
        ),
        (case.documents, "supports packed documents only with a dense mask, using T x T memory"),
        (
            case.window and case.gaps,
            "does not support a window by position in a routed subsequence",
        ),
        (case.softcap, "does not support softcap"),
        (case.head_dim % 8, f"needs a head width that is a multiple of 8, not {case.head_dim}"),
        (case.head_dim > 128, f"needs a head width of at most 128, not {case.head_dim}"),
    )
    return reason or _without_cudnn()


@functools.cache
def _without_cudnn():
    """Why JAX cannot call cuDNN here, or None.

    JAX looks for the library where such an attention is traced, and raises RuntimeError without it,
    so a small one is traced. That takes no GPU: what is compiled ahead of time for one that is only
    described has cuDNN wherever the library is.
    """
    shape_BTNH = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attention, shape_BTNH, shape_BTNH, shape_BTNH)
    except RuntimeError as error:
        said = " ".join(str(error).split()).rstrip(".")
        return f"cannot be called by JAX ({said}): install {extra('cuda13')}, or `cuda12`"
    return None


def cudnn(case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale):
    """cuDNN's fused attention by way of jax.nn; splits over batch and heads by itself, if heads of
    keys and values lie as those of queries."""
    length = case.length + case.length % 2
    arrays = (q_BTNH, *_repeated(case.num_heads, k_BTKH, v_BTKH))
    arrays = (sharding.constrain(y, "batch", "length", "act_heads", None) for y in arrays)
    q_BTNH, k_BTKH, v_BTKH = _pad(length, *arrays)
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=scale,
        is_causal=True,
        local_window_size=(case.window - 1, 0) if case.window else None,
        implementation="cudnn",
    )
    return out_BTNH[:, : case.length]


# The first that can do it is taken.
KERNELS = {
    "splash": Kernel("tpu", _splash_refuses, splash),
    "cudnn": Kernel("gpu", _cudnn_refuses, cudnn),
}
