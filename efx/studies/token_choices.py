"""Decisions and predictions of a model for each token of a text.

The decisions are the causal ones of evaluation and sampling, as modules report them in the
collection `choices` (see `efx.layers.report`).
"""

import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from flax import linen as nn

from efx import models
from efx.errors import UsageError
from efx.layers.report import CHOICES, label

# {quantity: (kind of its values, meaning)}, in the order of the page.
QUANTITIES = {
    "computed": ("flag", "whether the block computes the token"),
    "kept": ("fraction", "fraction of the token's entries that the mask keeps"),
    "experts": ("count", "number of experts that compute the token"),
    "gate": ("number", "factor on the block's output for the token"),
    "top_expert": ("class", "the expert of the largest weight; a token without colour has none"),
    "top_weight": ("fraction", "weight of that expert"),
    "noop": ("count", "number of selected experts that compute nothing"),
    "overflow": ("count", "number of selected experts over capacity, which skip the token"),
    "score": ("number", "router score; the causal decision selects the token if it is above 0"),
    "selected": ("flag", "whether the decision selects the token, before the capacity limit"),
    "mask": ("fraction", "mean factor of the mask on the token"),
}
# {name of a sown choice: its quantity, if the name differs}
QUANTITY_OF_CHOICE = {"routed": "computed"}


class Row(NamedTuple):
    """One row of a map.

    Attributes:
      name: name of the block or site. quantity: a key of `QUANTITIES`.
      values_T: float64; NaN for tokens without a decision here.
    """

    name: str
    quantity: str
    values_T: np.ndarray


class TokenMap(NamedTuple):
    """The decisions about T tokens.

    Attributes:
      rows: [Row], in order of computation.
      entropy_T: entropy of the predicted next token, in nats.
      loss_T: loss of the next token, in nats; NaN if that token is unknown.
    """

    rows: list
    entropy_T: np.ndarray
    loss_T: np.ndarray

    def values(self, quantity):
        """Return {name: values} of the rows of one quantity."""
        return {row.name: row.values_T for row in self.rows if row.quantity == quantity}

    def at(self, index):
        """Return the map of the tokens of a slice or a mask."""
        rows = [row._replace(values_T=row.values_T[index]) for row in self.rows]
        return TokenMap(rows, self.entropy_T[index], self.loss_T[index])


def join(maps):
    """Return one TokenMap of the maps of consecutive windows of a text, by one model."""
    rows = [
        row._replace(values_T=np.concatenate([each.rows[i].values_T for each in maps]))
        for i, row in enumerate(maps[0].rows)
    ]
    entropy_T, loss_T = (
        np.concatenate([getattr(each, name) for each in maps]) for name in ("entropy_T", "loss_T")
    )
    return TokenMap(rows, entropy_T, loss_T)


class TokenMapper:
    """Maps texts with a model, by the causal decisions; the pass is compiled once for each length.

    Args:
      variables: all collections of the model.
    """

    def __init__(self, model, variables):
        self._variables = models.unroll_variables(model, variables)
        self._model = models.unrolled(model).clone(selection="causal")
        self._calls = {}  # {path of a module: indices of its calls among all calls of modules}
        counter = itertools.count()

        def count(next_fun, args, kwargs, context):
            self._calls.setdefault("/".join(context.module.path), []).append(next(counter))
            return next_fun(*args, **kwargs)

        @jax.jit
        def run(variables, ids_BT, keys, packing):
            with nn.intercept_methods(count):
                logits_BTV, state = self._model.apply(
                    variables, ids_BT, rngs=keys, mutable=[CHOICES], **packing
                )
            return jax.nn.log_softmax(logits_BTV[0].astype(jnp.float32)), state.get(CHOICES, {})

        self._run = run

    def __call__(self, ids, keys=None, next_id=None, **packing):
        """Return the TokenMap of one text.

        Args:
          ids: [T] tokens, at most `model.context` of them.
          keys: `rngs` of the model, for a stochastic control.
          next_id: the token after these, or None.
          packing: `positions_BT` and `segment_ids_BT` of a packed row, [1, T].

        Raises: UsageError if the model makes no decision per token.
        """
        row = np.asarray(ids, np.int32)[None]
        log_p_TV, tree = self._run(self._variables, row, keys or {}, packing)
        rows = self._rows(dict(_choices(jax.device_get(tree), ())), len(ids))
        if not rows:
            raise UsageError(
                "config.model.depth_routing.kind='none': the model makes no decision per token; "
                "use one with depth routing, experts, learned dropout or gates"
            )
        log_p_TV = np.asarray(log_p_TV, np.float64)
        entropy_T = scipy.special.entr(np.exp(log_p_TV)).sum(axis=-1)
        following_T = np.array([*map(int, ids[1:]), 0 if next_id is None else int(next_id)])
        loss_T = -np.take_along_axis(log_p_TV, following_T[:, None], axis=-1)[:, 0]
        if next_id is None:
            loss_T[-1] = np.nan
        return TokenMap(rows, entropy_T, loss_T)

    def _rows(self, choices, length):
        """Return [Row] of {(path of a module, name): [Choice of each of its calls]}, in order of
        computation."""
        rows = []

        def add(order, name, quantity, values_T):
            rows.append((order, Row(name, quantity, values_T)))

        for (path, kind), calls in choices.items():
            for i, choice in enumerate(calls):
                name = row_name(path) + (f" step {i}" if len(calls) > 1 else "")
                # A module that is called several times sows as often.
                order = self._calls[path][i * len(self._calls[path]) // len(calls)]
                value_T = self._on_tokens(path, choice, length)
                if kind == "weights":
                    used = choices.get((path, "served"))
                    used_TE = value_T if used is None else self._on_tokens(path, used[i], length)
                    for quantity, values_T in _of_experts(value_T, used_TE > 0).items():
                        add(order, name, quantity, values_T)
                elif kind == "mlp_computed":
                    add(order, f"{name} mlp", "computed", value_T)
                elif kind != "served":
                    add(order, name, QUANTITY_OF_CHOICE.get(kind, kind), value_T)
        kinds = list(QUANTITIES)
        rows.sort(key=lambda pair: (pair[0], kinds.index(pair[1].quantity)))
        return _without_exited([row for _, row in rows])

    def _on_tokens(self, path, choice, length):
        """Return the value of a `Choice` at each token, float64 [T, ...]; NaN without one."""
        value, part = np.asarray(choice.value, np.float64), self._model
        for name, (member, _) in self._model.members.items():
            if path.startswith(f"{name}/"):
                path, part = path.removeprefix(f"{name}/"), member
        time_RS = part.token_indices(path, np.asarray(choice.positions_BT), length)
        result = np.full((length, *value.shape[2:]), np.nan)
        result[time_RS[time_RS >= 0]] = value[time_RS >= 0]
        return result


def _choices(tree, path):
    for name, inner in tree.items():
        if isinstance(inner, tuple):
            yield ("/".join(path), name), list(inner)
        else:
            yield from _choices(inner, (*path, name))


def _without_exited(rows):
    """Return the rows with NaN for tokens that an earlier step of the recursion has skipped.

    The step then made no decision about them.
    """
    computed = {row.name: row.values_T for row in rows if row.quantity == "computed"}
    exited, exited_T = {}, np.array(False)
    for name in computed:
        if re.fullmatch(r"recursion_\d+", name):
            exited[name] = exited_T
            exited_T = exited_T | (computed[name] == 0)
    return [
        row._replace(values_T=np.where(exited.get(row.name, False), np.nan, row.values_T))
        for row in rows
    ]


def _of_experts(weights_TE, used_TE):
    """Return {quantity: [T]} from the experts' weights and whether they compute the token."""
    valid_T, any_T = ~np.isnan(weights_TE[:, 0]), used_TE.any(axis=-1)
    weights_TE = np.where(used_TE, weights_TE, -1.0)
    return {
        "experts": np.where(valid_T, used_TE.sum(axis=-1), np.nan),
        "top_expert": np.where(any_T, weights_TE.argmax(axis=-1), np.nan),
        "top_weight": np.where(any_T, weights_TE.max(axis=-1), np.nan),
    }


def redundant_quantities(rows):
    """Return the quantities that add no information about this text.

    For example `selected` if every selected token is computed, or `overflow` if it is always 0.
    """
    values = {(row.name, row.quantity): row.values_T for row in rows}
    same = {"selected": "computed", "mask": "kept"}
    redundant = {*same, "overflow", "noop"}
    for (name, quantity), values_T in values.items():
        expected_T = values[name, same[quantity]] if quantity in same else 0.0
        if not np.all((values_T == expected_T) | np.isnan(values_T)):
            redundant.discard(quantity)
    return redundant


def row_name(path):
    """Return the name of a row, e.g. `block_3 mlp_output` or `block_0 decoder`."""
    return " ".join(name for name in label(path).split("/") if name != "adapter")
