"""How a feature of a model reports itself: metrics of an evaluation, and decisions per token."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct

from efx.layers import batch_means


class Report(NamedTuple):
    """Evaluation metrics of one feature; see `efx.train.evaluator.REPORTS` for all of them.

    Attributes:
      words: {metric: text in the line about an evaluation}; metrics are logged as `eval/<name>`.
      statistics: prefixes of sown `stats` that become metrics as they are, under the causal
        decisions.
      rows: further metrics, of (model, tokens of a sequence, `efx.train.evaluator.Passes`).
      selections: of a model, the values of `TokenContext.selection` that are evaluated beside
        "causal".
    """

    words: dict
    statistics: tuple = ()
    rows: Callable = lambda model, length, passes: {}
    selections: Callable = lambda model: ()


def health_requested(module, call):
    """Whether to sow how much a part of the model does: in evaluation by the causal decisions, so
    that no step of training or of sampling computes it."""
    is_evaluation = call.selection == "causal" and not call.train and not call.decode
    return is_evaluation and batch_means.is_collecting(module)


def sow_increment(module, name, increment_BTD, stream_BTD, valid_BT, call):
    """Sow the norm of an increment over that of the stream that it is added to, by the sums of
    squares over the valid tokens, if `health_requested`."""
    if health_requested(module, call):
        both_BTX = jnp.stack(
            [jnp.sum(jnp.square(y.astype(jnp.float32)), -1) for y in (increment_BTD, stream_BTD)],
            axis=-1,
        )
        ratio = batch_means.over(both_BTX, valid_BT, _root_of_ratio)
        batch_means.sow(module, "stats", f"{name}/increment", ratio)


def _root_of_ratio(mean_X):
    return jnp.sqrt(mean_X[0] / jnp.maximum(mean_X[1], jnp.finfo(jnp.float32).tiny))


# Names of the modules of a block. The mask of the embedding is in no block.
_IN_A_BLOCK = re.compile("(cross_)?attention|(skip_)?mlp|soft|dropout_(?!embedding$).*")


def layer_of(path):
    """Path of the layer of the module at this path; of a module outside layers, such as the mask of
    the embedding, its own path."""
    names = path.split("/")
    parts = (i for i, name in enumerate(names) if _IN_A_BLOCK.fullmatch(name))
    return "/".join(names[: next(parts, None)])


def label(path):
    """Name of a layer in reports: `block_1`, of two streams `block_1/decoder`, of a mask in no
    layer `embedding`."""
    names = (name for name in path.split("/") if name != "layers")
    return "/".join(name.removeprefix("dropout_") for name in names)


# Collection of decisions per token. Training and evaluation do not request it, so their programs do
# not compute it; studies do.
CHOICES = "choices"


@struct.dataclass
class Choice:
    """The decision of a layer about each token of its input.

    Attributes:
      value: [B, T, ...].
      positions_BT: positions of these tokens; negative: a slot without a token.
    """

    value: Any
    positions_BT: Any


def choices_requested(module):
    """Whether the caller collects choices, so that they are worth computing."""
    return module.is_mutable_collection(CHOICES) and not module.is_initializing()


def sow_choice(module, name, value, call):
    """Sow a `Choice`, if requested.

    Args:
      value: [B, T, ...]. call: of these tokens; None: all tokens of the sequence, in order.
    """
    if not choices_requested(module):
        return
    rows, length = value.shape[:2]
    positions_BT = jnp.arange(length)[None] if call is None else call.positions_BT
    positions_BT = jnp.broadcast_to(positions_BT, (rows, length))
    module.sow(CHOICES, name, Choice(value, positions_BT))
