"""Running quantiles of router scores, by which the decision "threshold" decides (Expert Threshold,
arXiv 2603.11535).

A routed layer reads its quantile and says what the scores of a batch are; nothing of the same step
depends on what that makes of the quantile. So the training step moves the quantiles of all layers
together, and devices exchange for all of them what they would exchange for one.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

COLLECTION = "scores"
# The quantile that every score exceeds: finite, since averages of infinities are not numbers.
BELOW_ALL = -1e30
_SIGN = np.uint32(1 << 31)


@struct.dataclass
class Scores:
    """What a layer sows into `COLLECTION`.

    Attributes:
      score_BT: float32 [*L, B, T]; *L if layers are scanned. valid_BT: bool [*L, B, T], or None:
        all count.
      share: of the scores, to exceed the quantile. decay: of the running average.
    """

    score_BT: jax.Array
    valid_BT: jax.Array | None
    share: float = struct.field(pytree_node=False)
    decay: float = struct.field(pytree_node=False)


def begun_anew(variables, now):
    """Variables whose quantiles count as those of no step, if `now`, a bool: the next batch's are
    then taken as they are."""

    def change(path, x):
        return jnp.where(now, 0, x) if path[-1].key == "quantile_steps" else x

    return jax.tree_util.tree_map_with_path(change, variables)


def followed(averages, before, sown):
    """Running averages with those of quantiles moved by the scores of a batch.

    Where none of a layer's scores counts (no token reached it) its quantile stays as it is.

    Args:
      averages: the collection "state" after a batch. before: the same before it.
      sown: the collection `COLLECTION` of that batch; where it came in several parts, arrays have
        one more axis, the last.
    """
    averages, before = flatten_dict(averages), flatten_dict(before)
    alike = collections.defaultdict(list)
    for path, (scores,) in flatten_dict(sown).items():  # under the name of what follows them
        quantile = before[path]
        shape = scores.score_BT.shape[quantile.ndim :]
        alike[shape, scores.valid_BT is None].append((path, quantile, scores))
    for (shape, all_count), members in alike.items():

        def of_layers(name, shape=shape, members=members):
            arrays = [getattr(scores, name).reshape(-1, *shape) for *_, scores in members]
            return jnp.concatenate(arrays)

        sizes = [quantile.size for _, quantile, _ in members]
        share_L = np.repeat([scores.share for *_, scores in members], sizes)
        valid_LBT = None if all_count else of_layers("valid_BT")
        new_L = jax.vmap(of_batch)(of_layers("score_BT"), np.float32(share_L), valid_LBT)
        for (path, old, scores), new in zip(
            members, jnp.split(new_L, np.cumsum(sizes)[:-1]), strict=True
        ):
            steps, new = before[*path[:-1], "quantile_steps"], new.reshape(old.shape)
            moves = ~jnp.isnan(new)
            # The first value is taken as it is: an average that starts at 0 had to forget it.
            decay = jnp.where(steps == 0, 0.0, scores.decay)
            averages[path] = jnp.where(moves, decay * old + (1.0 - decay) * new, old)
            averages[*path[:-1], "quantile_steps"] = steps + moves
    return unflatten_dict(averages)


def of_batch(scores_BT, share, valid_BT=None):
    """The value that so large a share of the valid scores exceed; a scalar. Any axes will do.

    Half-way between the two neighbouring scores, so that it is exceeded by floor(share n) of n, one
    at least; `BELOW_ALL` where that is all of them. NaN where nothing is valid, or where a score of
    these two is not finite.

    Nothing is sorted: on a mesh that would gather the scores of the whole batch on every device.
    The score is found by its bits, a byte at a time, from how many scores have which byte, sums of
    which the devices exchange. They are exact for up to 2**24 scores.
    """
    valid_BT = jnp.ones_like(scores_BT, bool) if valid_BT is None else valid_BT
    count = jnp.sum(valid_BT)
    share_of_count = jnp.floor(share * count + 1e-3)
    above = jnp.clip(share_of_count, 1, jnp.maximum(count - 1, 1))
    bits_BT = jax.lax.bitcast_convert_type(scores_BT.astype(jnp.float32), jnp.uint32)
    # Numbers whose order is that of the scores: of negative ones all bits are turned, of the others
    # the sign.
    order_BT = jnp.where(bits_BT >> 31 == 1, ~bits_BT, bits_BT | _SIGN)
    every = tuple(range(scores_BT.ndim))

    def add_byte(i, carry):
        prefix, larger = carry  # how many scores are larger than all that begin so
        shift = (24 - 8 * i).astype(jnp.uint32)
        begins_BT = valid_BT & ((order_BT ^ prefix) >> shift < 256)
        byte_BT = order_BT >> shift & 255
        # How many have each byte is a product of the two halves of the byte, one-hot: of 32
        # comparisons in place of 256.
        high = jax.nn.one_hot(byte_BT >> 4, 16) * begins_BT[..., None]
        low = jax.nn.one_hot(byte_BT & 15, 16)
        number = jnp.tensordot(high, low, axes=(every, every)).ravel()
        at_least = larger + jnp.cumsum(number[::-1])[::-1]
        byte = jnp.maximum(jnp.sum(at_least >= above) - 1, 0)
        return prefix | byte.astype(jnp.uint32) << shift, at_least[byte] - number[byte]

    order, _ = jax.lax.fori_loop(0, 4, add_byte, (jnp.uint32(0), jnp.float32(0)))
    bits = jnp.where(order >> 31 == 1, order ^ _SIGN, ~order)
    upper = jax.lax.bitcast_convert_type(bits, jnp.float32)
    lower = jnp.max(jnp.where(valid_BT & (order_BT < order), scores_BT, -jnp.inf))
    # The next is the same where so many scores are equal, or where there is no other.
    equal = jnp.sum(valid_BT & (order_BT >= order)) > above
    middle = 0.5 * (upper + jnp.where(equal | ~jnp.isfinite(lower), upper, lower))
    quantile = jnp.where(share_of_count < count, middle, BELOW_ALL)
    return jnp.where((count > 0) & jnp.isfinite(middle), quantile, jnp.nan)
