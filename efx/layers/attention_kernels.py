"""Attention kernels for accelerators, in place of the one in plain XLA (`attend.py`).

Which of them runs is decided where attention is traced, by the platform of the mesh, so that a
program compiled ahead of time for other devices has their kernel. Each says what it cannot do.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.backend import get_default_device
from jax.sharding import PartitionSpec

from efx import sharding
from efx.errors import UsageError, extra

LANES = 128  # splash wants lengths that are multiples of this
RESIDUALS = "attention_residuals"  # what a kernel keeps for its backward pass, by name


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


class Kernel(NamedTuple):
    """A kernel for one platform.

    Attributes:
      refuses: Case -> why it cannot be, or None.
      run: (case, q_BTNH, k_BTKH, v_BTKH, documents, scale) -> [B, T, N, H], where `documents` are
        segment_ids_BT or, for a kernel of intervals, first_BT (`attend.first_visible`); or None.
      intervals: every mask is told as the first key of each query.
    """

    platform: str
    refuses: Callable
    run: Callable
    intervals: bool = False


def choose(name, case):
    """The `Kernel` for a case, or None for plain XLA; UsageError for a choice that cannot be.

    Args:
      name: `config.model.attention.kernel`.
    """
    if name == "xla":
        return None
    here = sharding.platform()
    if name != "auto":
        kernel = KERNELS[name]
        reason = _refuses(kernel, case)
        if kernel.platform != here:
            reason = f"runs on a {kernel.platform} only, and the devices here are of kind {here!r}"
        if reason:
            raise UsageError(
                f"config.model.attention.kernel={name!r}: {reason}; 'auto' takes what is possible"
            )
        return kernel
    reasons = {}
    for candidate, kernel in KERNELS.items():
        if kernel.platform == here:
            reasons[candidate] = _refuses(kernel, case)
            if reasons[candidate] is None:
                return kernel
    if reasons:
        _say_why(tuple(reasons.items()))
    return None


def _refuses(kernel, case):
    if case.split:
        return "has no place for a sequence that devices share"
    if case.probs:
        return "has no place for dropout or masks of attention probabilities"
    return kernel.refuses(case)


@functools.cache
def _say_why(reasons):
    logging.getLogger(__name__).warning(
        "attention in plain XLA: %s", "; ".join(f"{name} {reason}" for name, reason in reasons)
    )


def _first(*conditions):
    """The reason of the first condition that holds, or None."""
    return next((reason for holds, reason in conditions if holds), None)


def _over_devices(function, q_BTNH, k_BTKH, v_BTKH, documents_BT):
    """The function on each device's own rows and heads: what a compiler cannot split. Rows that do
    not divide over the devices, such as the one of an initialisation, are computed by each."""
    arrays = (q_BTNH, k_BTKH, v_BTKH)
    if documents_BT is not None:
        arrays += (documents_BT,)
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    rows = "batch" if q_BTNH.shape[0] % sharding.ways("batch") == 0 else None
    q_spec = nn.logical_to_mesh_axes((rows, None, "act_heads", None))
    kv_spec = nn.logical_to_mesh_axes((rows, None, "act_kv_heads", None))
    specs = (q_spec, kv_spec, kv_spec, PartitionSpec(q_spec[0], None))[: len(arrays)]
    return jax.shard_map(function, in_specs=specs, out_specs=q_spec, check_vma=False)(*arrays)


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
        (case.window and case.gaps, "has no window by position in a routed subsequence"),
        (case.head_dim % 64, f"wants a head width that is a multiple of 64, not {case.head_dim}"),
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
            residual_checkpoint_name=RESIDUALS,
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


def _cudnn_refuses(case):
    half = jnp.dtype(case.dtype) in (jnp.bfloat16, jnp.float16)
    return _first(
        (not half, f"computes in bfloat16 or float16, not {jnp.dtype(case.dtype)}"),
        (case.documents, "has packed documents only by a dense mask, which takes T x T memory"),
        (case.window and case.gaps, "has no window by position in a routed subsequence"),
        (case.softcap, "has no softcap"),
        (case.head_dim % 8, f"wants a head width that is a multiple of 8, not {case.head_dim}"),
        (case.head_dim > 128, f"wants a head width of at most 128, not {case.head_dim}"),
    )


def cudnn(case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale):
    """cuDNN's fused attention by way of jax.nn; splits over batch and heads by itself."""
    length = case.length + case.length % 2
    q_BTNH, k_BTKH, v_BTKH = _pad(length, q_BTNH, k_BTKH, v_BTKH)
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


def _triton_refuses(case):
    power = case.head_dim & (case.head_dim - 1) == 0
    return _first(
        (case.window, "has no window"),
        (case.softcap, "has no softcap"),
        (
            not power or not 16 <= case.head_dim <= 128,
            f"wants a head width of 16, 32, 64 or 128, not {case.head_dim}",
        ),
    )


def triton(case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale, interpret=False):
    """JAX's attention in Pallas for Triton; keys and values are repeated for grouped heads."""
    from jax.experimental.pallas.ops.gpu import attention as lib

    length = _whole_lanes(case.length)
    groups = case.num_heads // case.num_kv_heads

    def local(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT=None):
        k_BTNH, v_BTNH = (jnp.repeat(y, groups, axis=2) for y in (k_BTKH, v_BTKH))
        return lib.mha(
            q_BTNH, k_BTNH, v_BTNH, segment_ids_BT, sm_scale=scale, causal=True, interpret=interpret
        )

    arrays = _pad(length, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
    return _over_devices(local, *arrays)[:, : case.length]


_HOPPER = 9.0  # the compute capability of an H100


def _mosaic_refuses(case):
    if importlib.util.find_spec("tokamax") is None:
        return f"is not installed: {extra('mosaic')}, with Python 3.12 or newer"
    half = jnp.dtype(case.dtype) in (jnp.bfloat16, jnp.float16)
    # The device that the kernel itself asks, which may be one of a topology.
    capability = float(getattr(get_default_device(), "compute_capability", 0))
    return _first(
        (not half, f"computes in bfloat16 or float16, not {jnp.dtype(case.dtype)}"),
        (case.head_dim > 256, f"wants a head width of at most 256, not {case.head_dim}"),
        (capability < _HOPPER, "wants a GPU of compute capability 9.0 (H100) or newer"),
    )


def mosaic(case, q_BTNH, k_BTKH, v_BTKH, first_BT, scale):
    """Flash attention of tokamax in Pallas for Mosaic: windows and documents are intervals of keys,
    of which it skips what no query of a block may see."""
    from tokamax._src.ops.attention import base
    from tokamax._src.ops.attention import pallas_mosaic_gpu as lib

    # It tells of every shape that nobody has tuned; its rule for these is what is wanted.
    logging.getLogger("absl").addFilter(_not_of_tuning)

    def local(q_BTNH, k_BTKH, v_BTKH, first_BT=None):
        first_B1T = None if first_BT is None else first_BT[:, None]
        return lib.PallasMosaicGpuFlashAttention()(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            logits_scale=scale,
            logits_soft_cap=case.softcap or None,
            mask=base.Mask(k_start=first_B1T, is_causal=True),
        )

    if first_BT is not None:
        first_BT = jnp.broadcast_to(first_BT, (q_BTNH.shape[0], case.length))
    length = _whole_lanes(case.length)  # first keys are told in blocks of queries
    arrays = _pad(length, q_BTNH, k_BTKH, v_BTKH, first_BT)
    return _over_devices(local, *arrays)[:, : case.length].astype(q_BTNH.dtype)


def _not_of_tuning(record):
    return not record.getMessage().startswith("Autotuning cache miss")


# The first that can do it is taken.
KERNELS = {
    "splash": Kernel("tpu", _splash_refuses, splash),
    "mosaic": Kernel("gpu", _mosaic_refuses, mosaic, intervals=True),
    "cudnn": Kernel("gpu", _cudnn_refuses, cudnn),
    "triton": Kernel("gpu", _triton_refuses, triton),
}
