"""FLOPs: nominal (by formulas, one for each component of a model) and executed (traced).

Nominal FLOPs follow the papers' convention: the products that the mathematics needs. Executed ones
are the products of the traced program, including, for example, scores that the causal mask hides
and empty slots of experts. In both a multiply-add is 2 FLOPs, and training costs three times the
forward pass (each product has two gradients of the same size), less with frozen parameters
(`train_factor`). Not counted are recomputation in the backward pass (attention scores, remat), the
first forward pass of accumulation (`efx.train.step.make_train_step`), element-wise operations,
norms, softmax and lookups. The compiler's count, which has the latter, agrees with the traced one
within 2% on unrolled models (tests/contract/test_flops.py).
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from efx.parallel import sharding
from efx.parallel.sharding import only_shapes

_COUNTING = contextvars.ContextVar("counting", default=False)
TRAIN_FACTOR = 3  # forward, gradient of the input, gradient of the weights


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Nominal forward FLOPs of ONE sequence.

    Attributes:
      length: tokens in the sequence.
      nominal: {component: FLOPs}. Causal attention counts for each query the mean number of keys
        that it may see, (T+1)/2, as papers do.
      train_factor: FLOPs of training over those of the forward pass.
    """

    length: int
    nominal: dict
    train_factor: float = TRAIN_FACTOR

    @property
    def nominal_per_token(self):
        return sum(self.nominal.values()) / self.length

    def train_flops(self, tokens):
        """FLOPs of a training step on `tokens` tokens."""
        return self.train_factor * tokens * self.nominal_per_token


def matmul(rows, inner, columns):
    return 2 * rows * inner * columns


def attention_scores(pairs, num_heads, head_dim):
    """FLOPs of the scores and weighted values of `pairs` (query, key) pairs of each head."""
    return 2 * matmul(pairs, head_dim, 1) * num_heads


def causal_pairs(length, window=0):
    """Number of (query, key) pairs that a causal mask allows in one sequence."""
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def thinned_pairs(tokens, length, window=0, pairs=None):
    """Mean number of `causal_pairs(length, window)` between randomly selected tokens.

    Args:
      tokens: number of selected tokens; all selections are equally likely. The window counts
        positions of the whole sequence.
      pairs: number of pairs without a window, if `tokens` is a mean over sequences; None:
        `causal_pairs(tokens)`.
    """
    pairs = causal_pairs(tokens) if pairs is None else pairs
    if not window or window >= length:
        return pairs
    # A token always sees itself.
    fraction = (pairs - tokens) / (length * (length - 1) / 2)
    return tokens + fraction * (causal_pairs(length, window) - length)


def add(ledgers):
    """Sum of several dicts {component: FLOPs}."""
    total = collections.Counter()
    for components in ledgers:
        total.update(components)
    return dict(total)


def count_params(params):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@functools.lru_cache(maxsize=64)
def executed(model, length, batch=1, train=True):
    """FLOPs that one forward pass executes, output layer and sown losses included.

    Traces the model's initialisation (about half a second); nothing is allocated, compiled or run.

    Args:
      batch: number of sequences, of `length` tokens.
      train: the argument of the model's call: whether tokens are selected as in training.
    """

    def forward(key, tokens_BT):
        keys = {"params": key, "dropout": key, "routing": key}
        return model.init(keys, tokens_BT, train=train)

    tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    with only_shapes(), _counting(), sharding.as_one_device():
        return jaxpr_flops(forward, jax.random.key(0), tokens_BT)


@functools.lru_cache(maxsize=64)
def train_factor(model, length, batch=1, frozen=frozenset()):
    """FLOPs of a training step over those of its forward pass.

    `TRAIN_FACTOR` without frozen parameters. With them the products of the gradients that are
    computed: of a product, one for each operand that depends on a trained parameter. So gradients
    of activations reach down to the lowest trained parameter, also through frozen layers.

    Traces the step in forward mode, whose products have the size and number of those of reverse
    mode and none of which is recomputed.

    Args:
      length, batch: as in `executed`.
      frozen: paths of the parameters that are not trained, with "/".
    """
    if not frozen:
        return TRAIN_FACTOR
    keys = dict.fromkeys(("params", "dropout", "routing"), jax.random.key(0))
    tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def forward(trained, fixed, state, keys, tokens_BT):
        params = traverse_util.unflatten_dict({**trained, **fixed}, sep="/")
        variables = {"params": params, **state}
        options = dict(train=True, rngs=keys, mutable=["losses", *state])
        logits_BTV, mutated = model.apply(variables, tokens_BT, **options)
        return logits_BTV, mutated.get("losses")

    def with_gradients(trained, *arguments):
        return jax.jvp(lambda trained: forward(trained, *arguments), (trained,), (trained,))

    with only_shapes(), _counting(), sharding.as_one_device():
        init = functools.partial(model.init, train=True)
        variables = nn.unbox(jax.eval_shape(init, keys, tokens_BT))
        params = traverse_util.flatten_dict(variables["params"], sep="/")
        trained = {path: x for path, x in params.items() if path not in frozen}
        fixed = {path: x for path, x in params.items() if path in frozen}
        state = {"state": variables["state"]} if "state" in variables else {}
        arguments = trained, fixed, state, keys, tokens_BT
        return jaxpr_flops(with_gradients, *arguments) / jaxpr_flops(forward, *arguments)


@contextlib.contextmanager
def _counting():
    token = _COUNTING.set(True)
    try:
        yield
    finally:
        _COUNTING.reset(token)


def is_counting():
    """Whether FLOPs are being counted, so that no kernel may hide its products."""
    return _COUNTING.get()


def custom_vjp(nondiff_argnums):
    """Decorator `jax.custom_vjp` that has no effect while FLOPs are counted, in forward mode."""

    def decorate(function):
        custom = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

        @functools.wraps(function)
        def call(*args):
            return (function if is_counting() else custom)(*args)

        call.defvjp = custom.defvjp
        return call

    return decorate


def jaxpr_flops(function, *args):
    """FLOPs of every dot_general of a traced function.

    A scan counts its body times its length (the compiler's cost analysis counts it once), a `cond`
    its most expensive branch, a `while` its body once.
    """
    return sum(map(_walk_one, jax.make_jaxpr(function)(*args).jaxpr.eqns))


def _walk_one(equation):
    if equation.primitive.name == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        inner = math.prod(lhs[axis] for axis in contract)
        return 2 * inner * math.prod(equation.outvars[0].aval.shape)
    bodies = [sum(map(_walk_one, body.eqns)) for body in _subjaxprs(equation.params)]
    if equation.primitive.name == "cond":
        return max(bodies, default=0)
    return sum(bodies) * equation.params.get("length", 1)


def _subjaxprs(params):
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


# Dense peak FLOP/s of one device, by the first words of jax's device_kind: (bfloat16, float32 or
# tf32 as XLA runs it by default). Vendors' data sheets. By default a TPU multiplies float32 in one
# pass of bfloat16; products at the highest precision take six.
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
    """Peak FLOP/s of one device for a dtype name; None for unknown devices and CPUs."""
    kind = re.split("[ -]", (device or jax.devices()[0]).device_kind)
    for words in range(len(kind), 0, -1):
        if peaks := _PEAKS.get(" ".join(kind[:words])):
            return peaks[0 if str(dtype) == "bfloat16" else 1]
    return None
