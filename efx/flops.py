"""FLOPs: nominal ones are stated by each model, component by component; executed ones are traced.

Nominal FLOPs follow the papers' convention: the products that the mathematics needs. Executed ones
are the products in the traced program, which also computes, for example, a part of the scores that
the causal mask hides, and slots of experts that no token fills. In both a multiply-add is 2 FLOPs,
and training costs three times the forward pass (each product has two gradients of the same size).
Recomputation in the backward pass (attention scores; under remat whatever its policy drops) is
overhead and not counted, nor is the forward pass that accumulation makes first for a loss that
needs the whole batch (`efx.step.make_train_step`). Element-wise operations, norms, softmax and
lookups are not counted either; the compiler's own count, which has them, agrees with the traced one
within 2% on unrolled models (tests/contract/test_flops.py).
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from efx import sharding
from efx.sharding import only_shapes

_COUNTING = contextvars.ContextVar("counting", default=False)
TRAIN_FACTOR = 3  # forward, gradient of the input, gradient of the weights


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Nominal forward FLOPs of ONE sequence of `length` tokens.

    Attributes:
      length: tokens in the sequence.
      nominal: {component: FLOPs} by the papers' convention: causal attention counts every query
        against the mean number of keys that it may see, (T+1)/2.
    """

    length: int
    nominal: dict

    @property
    def nominal_per_token(self):
        return sum(self.nominal.values()) / self.length

    def train_flops(self, tokens):
        """FLOPs of a training step on `tokens` tokens."""
        return TRAIN_FACTOR * tokens * self.nominal_per_token


def matmul(rows, inner, columns):
    return 2 * rows * inner * columns


def attention_scores(pairs, num_heads, head_dim):
    """Scores and weighted values of `pairs` (query, key) pairs a head."""
    return 2 * matmul(pairs, head_dim, 1) * num_heads


def causal_pairs(length, window=0):
    """(query, key) pairs that a causal mask allows in one sequence."""
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def thinned_pairs(tokens, length, window=0, pairs=None):
    """Of `causal_pairs(length, window)` those whose query and key both are among so many of the
    tokens, as many as there are in the mean when each token is as likely as the others. A window
    looks back over places of the whole sequence.

    pairs: how many there are without a window, where `tokens` is a mean over sequences; None:
      `causal_pairs(tokens)`.
    """
    pairs = causal_pairs(tokens) if pairs is None else pairs
    if not window or window >= length:
        return pairs
    # A token always sees itself.
    share = (pairs - tokens) / (length * (length - 1) / 2)
    return tokens + share * (causal_pairs(length, window) - length)


def add(ledgers):
    """{component: FLOPs} summed over several such dicts."""
    total = {}
    for components in ledgers:
        for name, value in components.items():
            total[name] = total.get(name, 0) + value
    return total


def count_params(params):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@functools.lru_cache(maxsize=64)
def executed(model, length, batch=1, train=True):
    """FLOPs that one forward pass over `batch` sequences of `length` tokens executes, output layer
    and sown losses included.

    The pass is that of the model's initialisation, traced: nothing is allocated, compiled or run,
    and it takes about half a second. `train` is the argument of the model's call: whether tokens
    are selected as in training. A pass over whole sequences has no product inside a `cond` or
    `while`, for which `jaxpr_flops` is not exact; tokens that `skip_tile` leaves out in evaluation
    count as computed.
    """

    def forward(key, tokens_BT):
        keys = {"params": key, "dropout": key, "routing": key}
        return model.init(keys, tokens_BT, train=train)

    tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    with only_shapes(), _counting(), sharding.as_one_device():
        return jaxpr_flops(forward, jax.random.key(0), tokens_BT)


@contextlib.contextmanager
def _counting():
    token = _COUNTING.set(True)
    try:
        yield
    finally:
        _COUNTING.reset(token)


def is_counting():
    """Whether what is traced now is traced to be counted, and no kernel is to hide its products."""
    return _COUNTING.get()


def jaxpr_flops(function, *args):
    """FLOPs of every dot_general in a traced function, scan bodies times their length.

    The compiler's cost analysis counts a scanned body once; this does not. A `cond` counts its
    most expensive branch, a `while` body once.
    """
    return _walk(jax.make_jaxpr(function)(*args).jaxpr)


def _walk(jaxpr):
    return sum(map(_walk_one, jaxpr.eqns))


def _walk_one(equation):
    if equation.primitive.name == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        inner = math.prod(lhs[axis] for axis in contract)
        return 2 * inner * math.prod(equation.outvars[0].aval.shape)
    inner = [_walk(sub) for sub in _subjaxprs(equation.params)]
    if equation.primitive.name == "cond":
        return max(inner, default=0)
    return sum(inner) * equation.params.get("length", 1)


def interpreted_flops(function, *args):
    """FLOPs of every dot_general that runs for these arguments: every iteration of a `while`, the
    branch of a `cond` that is taken. The function is interpreted step by step, which is slow."""
    closed = jax.make_jaxpr(function)(*args)
    return _interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args))[1]


def _interpret(jaxpr, consts, arguments):
    """(results, FLOPs)"""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    total = 0

    def interpret(closed, arguments):
        nonlocal total
        outputs, count = _interpret(closed.jaxpr, closed.consts, arguments)
        total += count
        return outputs

    def read(variable):
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs, params = [read(variable) for variable in equation.invars], equation.params
        if equation.primitive.name == "while":
            body_start = params["cond_nconsts"]
            carry_start = body_start + params["body_nconsts"]
            outputs = inputs[carry_start:]
            while interpret(params["cond_jaxpr"], (*inputs[:body_start], *outputs))[0]:
                outputs = interpret(
                    params["body_jaxpr"], (*inputs[body_start:carry_start], *outputs)
                )
        elif equation.primitive.name == "cond":
            outputs = interpret(params["branches"][int(inputs[0])], inputs[1:])
        elif equation.primitive.name in ("jit", "pjit", "closed_call"):
            outputs = interpret(params["jaxpr"], inputs)
        elif equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            outputs = interpret(params["call_jaxpr"], inputs)
        else:
            total += _walk_one(equation)
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars], total


def _subjaxprs(params):
    for value in params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


# Dense peak FLOP/s of one device, without sparsity, by the words with which jax's device_kind
# begins: (bfloat16, float32 or tf32 as XLA runs it by default). Vendors' data sheets. By default a
# TPU multiplies float32 in one pass of bfloat16; only a product at the highest precision takes six.
_PEAKS = {
    "TPU v4": (275e12, 275e12),
    "TPU v5 lite": (197e12, 197e12),
    "TPU v5e": (197e12, 197e12),
    "TPU v5p": (459e12, 459e12),
    "TPU v5": (459e12, 459e12),
    "TPU v6 lite": (918e12, 918e12),
    "TPU v6e": (918e12, 918e12),
    "NVIDIA A10": (125e12, 62.5e12),
    "NVIDIA A100": (312e12, 156e12),
    "NVIDIA H100": (989e12, 494e12),
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA H100 NVL": (835e12, 417e12),
    "NVIDIA H200": (989e12, 494e12),
    "NVIDIA H200 NVL": (835e12, 417e12),
    "NVIDIA GH200": (989e12, 494e12),
    "NVIDIA B200": (2250e12, 1100e12),
    "NVIDIA L4": (121e12, 60e12),
    "NVIDIA L40S": (362e12, 183e12),
    "Tesla T4": (65e12, 8.1e12),
    "Tesla V100": (125e12, 15.7e12),
    "Tesla V100 PCIE": (112e12, 14e12),
}


def device_peak(dtype, device=None):
    """Peak FLOP/s of one device for a dtype name, or None where it is not known (any CPU)."""
    kind = re.split("[ -]", (device or jax.devices()[0]).device_kind)
    for words in range(len(kind), 0, -1):
        if peaks := _PEAKS.get(" ".join(kind[:words])):
            return peaks[0 if str(dtype) == "bfloat16" else 1]
    return None


def cpu_flops_per_second(size=1024, repeats=5):
    """FLOP/s of a large float32 product on this CPU, measured in a fraction of a second.

    NumPy, about as fast as XLA there, needs no compiled program and no mesh.
    """
    x, seconds = np.ones((size, size), np.float32), []
    for _ in range(repeats):
        start = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - start)
    return matmul(size, size, size) / min(seconds)
