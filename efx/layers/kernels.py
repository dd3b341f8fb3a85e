"""Attention kernels: splash for TPUs, cuDNN for GPUs. `attend.py` has attention in plain XLA.

A kernel is chosen when attention is traced, by the platform of the mesh, so that a program compiled
ahead of time for other devices has their kernel.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from efx.errors import UsageError, extra
from efx.layers import flops
from efx.parallel import sharding

_RESIDUALS = "attention_residuals"  # name of what splash saves for its backward pass
_is_residual = jax.checkpoint_policies.save_only_these_names(_RESIDUALS)
_KERNEL_PRIMITIVES = ("dot_product_attention_fwd_wrapper", "pallas_call")


def saves_kernel_results(primitive, *args, **params):
    """Policy of `jax.checkpoint`: do not run attention kernels again in the backward pass."""
    return primitive.name in _KERNEL_PRIMITIVES or _is_residual(primitive, *args, **params)


class Case(NamedTuple):
    """Shape and mask of one attention, by which a kernel is chosen.

    Attributes:
      window: positions that a query looks back; 0: all.
      has_gaps: positions are not consecutive, as in a routed subsequence.
      is_packed: rows hold several documents.
      is_sharded: sequences are sharded over devices.
      has_probs_dropout: dropout or a mask changes the probabilities.
    """

    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    window: int = 0
    softcap: float = 0.0
    has_gaps: bool = False
    is_packed: bool = False
    is_sharded: bool = False
    has_probs_dropout: bool = False


class Kernel(NamedTuple):
    """A kernel for one platform.

    Attributes:
      run: (case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT or None, scale) -> [B, T, N, H].
    """

    platform: str
    run: Callable


# ---- choice ------------------------------------------------------------------------------------


def choose(setting, case):
    """The `Kernel` for a case, or None for plain XLA. Logs each choice once.

    Args:
      setting: `config.model.attention.kernel`; "auto" is the kernel of the platform where it
        supports the case.
    Raises:
      UsageError: the setting names a kernel that does not support the case.
    """
    name = setting
    if setting == "auto":
        platform = sharding.platform()
        name = next((name for name, k in KERNELS.items() if k.platform == platform), "xla")
    if flops.is_counting():
        name = "xla"
    reason = None if name == "xla" else _unsupported(name, case)
    if reason and setting != "auto":
        raise UsageError(
            f"config.model.attention.kernel={name!r}: {reason}; 'auto' selects a supported kernel"
        )
    if reason:
        _log_once(logging.WARNING, f"attention in plain XLA: {name} {reason}")
        return None
    _log_once(logging.INFO, f"attention by {name}")
    return KERNELS.get(name)


@functools.cache
def _log_once(level, message):
    logging.getLogger(__name__).log(level, message)


def _unsupported(name, case):
    """The reason why a kernel cannot compute a case on these devices, or None."""
    platform, ways = sharding.platform(), sharding.shard_count("act_heads")
    if KERNELS[name].platform != platform:
        return f"runs only on a {KERNELS[name].platform}, but the devices here are {platform!r}"
    checks = [
        (case.is_sharded, "does not support sequences sharded over devices"),
        (case.has_probs_dropout, "does not support dropout or masks of attention probabilities"),
        (case.window and case.has_gaps, "does not support windows in routed subsequences"),
        (case.num_heads % ways, f"needs a multiple of {ways} heads, not {case.num_heads}"),
    ]
    width = case.head_dim
    if name == "splash":
        checks.append((width % 64, f"needs a head width that is a multiple of 64, not {width}"))
    if name == "cudnn":
        capability, dtype = _compute_capability(), jnp.dtype(case.dtype)
        is_half, missing = dtype in (jnp.bfloat16, jnp.float16), _cudnn_missing()
        checks += [
            (capability < 8, f"needs compute capability 8.0 (A100) or newer, not {capability}"),
            (not is_half, f"computes in bfloat16 or float16, not {dtype}"),
            (case.is_packed, "supports packed documents only with a dense T x T mask"),
            (case.softcap, "does not support softcap"),
            (width % 8, f"needs a head width that is a multiple of 8, not {width}"),
            (width > 128, f"needs a head width of at most 128, not {width}"),
            (missing, missing),
        ]
    return next((reason for is_unsupported, reason in checks if is_unsupported), None)


def _repeat_kv_heads(num_heads, *arrays_BTKH):
    """Repeat heads of keys and values until they divide over the devices that shard query heads:
    over 4 devices the one kv head of 8 query heads is repeated 4 times."""
    kv_heads, ways = arrays_BTKH[0].shape[2], sharding.shard_count("act_heads")
    groups = num_heads // kv_heads
    times = next(n for n in range(1, groups + 1) if groups % n == 0 and kv_heads * n % ways == 0)
    return [jnp.repeat(y, times, axis=2) if times > 1 else y for y in arrays_BTKH]


def _pad_length(y, length):
    """Pad y [B, T, ...] with zeros to this length; causal queries do not see them."""
    return jnp.pad(y, ((0, 0), (0, length - y.shape[1])) + ((0, 0),) * (y.ndim - 2))


# ---- TPU ---------------------------------------------------------------------------------------

_LANES = 128  # splash needs lengths that are multiples of this


def splash(case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale, interpret=False):
    """Splash attention (jax.experimental.pallas.ops.tpu). `interpret` runs it without a TPU."""
    from jax.experimental.pallas.ops.tpu import splash_attention as lib

    length = -(-case.length // _LANES) * _LANES
    block = next(size for size in (512, 256, _LANES) if length % size == 0)
    names = "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq".split()
    sizes = lib.BlockSizes(**{f"block_{name}": block for name in names})

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
        arrays = [jnp.swapaxes(y, 1, 2) for y in (q_BTNH, k_BTKH, v_BTKH)]
        if segment_ids_BT is not None:
            arrays.append(lib.SegmentIds(q=segment_ids_BT, kv=segment_ids_BT))
        return jnp.swapaxes(jax.vmap(kernel)(*arrays), 1, 2)

    arrays = [q_BTNH * scale, *_repeat_kv_heads(case.num_heads, k_BTKH, v_BTKH)]
    arrays += [] if segment_ids_BT is None else [segment_ids_BT]
    arrays = [_pad_length(y, length) for y in arrays]
    if not jax.sharding.get_abstract_mesh().empty:
        # The partitioner cannot split a kernel. Rows that do not divide over the devices, such as
        # the one of initialisation, are computed by each of them.
        rows = "batch" if q_BTNH.shape[0] % sharding.shard_count("batch") == 0 else None
        spec = nn.logical_to_mesh_axes((rows, None, "act_heads", None))
        specs = (spec, spec, spec, PartitionSpec(spec[0], None))[: len(arrays)]
        local = jax.shard_map(local, in_specs=specs, out_specs=spec, check_vma=False)
    return local(*arrays)[:, : case.length].astype(q_BTNH.dtype)


# ---- GPU ---------------------------------------------------------------------------------------


def _compute_capability():
    """Compute capability of JAX's default device; 0.0 for AMD ("gfx942") and other devices."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    capability = str(getattr(device, "compute_capability", 0))
    return 0.0 if capability.startswith("gfx") else float(capability)


@functools.cache
def _cudnn_missing():
    """The reason why JAX cannot call cuDNN, or None.

    JAX raises RuntimeError without the library when it traces such an attention; that takes no GPU.
    """
    shape_BTNH = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attention, shape_BTNH, shape_BTNH, shape_BTNH)
    except RuntimeError as error:
        message = " ".join(str(error).split()).rstrip(".")
        return f"cannot be called by JAX ({message}): install {extra('cuda13')}, or `cuda12`"
    return None


def cudnn(case, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, scale):
    """cuDNN's fused attention. The partitioner splits it over batch and heads if keys and values
    are sharded like queries."""
    arrays = (q_BTNH, *_repeat_kv_heads(case.num_heads, k_BTKH, v_BTKH))
    arrays = (sharding.constrain(y, "batch", "length", "act_heads", None) for y in arrays)
    out_BTNH = jax.nn.dot_product_attention(
        *(_pad_length(y, case.length + case.length % 2) for y in arrays),
        scale=scale,
        is_causal=True,
        local_window_size=(case.window - 1, 0) if case.window else None,
        implementation="cudnn",
    )
    return out_BTNH[:, : case.length]


KERNELS = {"splash": Kernel("tpu", splash), "cudnn": Kernel("gpu", cudnn)}
