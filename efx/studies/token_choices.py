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
    "top_expert": ("class", "the expert of the largest weight"),
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


def token_map(model, variables, ids, keys=None, next_id=None):
    """Return the TokenMap of one text.

    Args:
      variables: all collections of the model. ids: [T] tokens, at most `model.context` of them.
      keys: `rngs` of the model, for a stochastic control.
      next_id: the token after these, or None.

    Raises: UsageError if the model makes no decision per token.
    """
    return map_of_pass(model, *Predictor(model, variables)(ids, keys), ids, next_id)


def map_of_pass(model, log_p_TV, decisions, ids, next_id=None):
    """Return the TokenMap of a pass of a `Predictor`."""
    rows = rows_of(model, decisions, len(ids))
    if not rows:
        raise UsageError(
            "config.model.depth_routing.kind='none': the model makes no decision per token; use "
            "one with depth routing, experts, learned dropout or gates"
        )
    p_TV = np.exp(log_p_TV := np.asarray(log_p_TV, np.float64))
    entropy_T = -np.sum(np.where(p_TV > 0, p_TV * log_p_TV, 0.0), axis=-1)
    following_T = np.array([*map(int, ids[1:]), 0 if next_id is None else int(next_id)])
    loss_T = -np.take_along_axis(log_p_TV, following_T[:, None], axis=-1)[:, 0]
    if next_id is None:
        loss_T[-1] = np.nan
    return TokenMap(rows, entropy_T, loss_T)


class Decisions(NamedTuple):
    """The decisions of one forward pass.

    Attributes:
      choices: {(path of a module, name): [Choice of each of its calls]}, NumPy arrays.
      calls: {path of a module: indices of its calls among all calls of modules}.
    """

    choices: dict
    calls: dict


class Predictor:
    """Compiled passes of a model over single rows, with the causal decisions."""

    def __init__(self, model, variables):
        self._variables = models.unroll_variables(model, variables)
        model, self._calls = models.unrolled(model).clone(selection="causal"), {}
        counter = itertools.count()

        def count(next_fun, args, kwargs, context):
            self._calls.setdefault("/".join(context.module.path), []).append(next(counter))
            return next_fun(*args, **kwargs)

        @jax.jit
        def run(variables, ids_BT, keys, packing):
            with nn.intercept_methods(count):
                logits_BTV, state = model.apply(
                    variables, ids_BT, rngs=keys, mutable=[CHOICES], **packing
                )
            return jax.nn.log_softmax(logits_BTV[0].astype(jnp.float32)), state.get(CHOICES, {})

        self._run = run

    def __call__(self, ids, keys=None, **packing):
        """Return (log p [T, V] of the next tokens, Decisions).

        Args:
          ids: [T]. packing: `positions_BT` and `segment_ids_BT` of a packed row, [1, T].
        """
        row = np.asarray(ids, np.int32)[None]
        log_p_TV, tree = self._run(self._variables, row, keys or {}, packing)
        return log_p_TV, Decisions(dict(_choices(jax.device_get(tree), ())), self._calls)


def _choices(tree, path):
    for name, inner in tree.items():
        if isinstance(inner, tuple):
            yield ("/".join(path), name), list(inner)
        else:
            yield from _choices(inner, (*path, name))


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(model, decisions, length):
    """Return [Row] of all decisions of a pass, in order of computation."""
    model, rows = models.unrolled(model), []

    def add(order, name, quantity, values_T):
        rows.append((order, Row(name, quantity, values_T)))

    for (path, kind), calls in decisions.choices.items():
        for i, choice in enumerate(calls):
            name = row_name(path) + (f" step {i}" if len(calls) > 1 else "")
            # A module that is called several times sows as often.
            order = decisions.calls[path][i * len(decisions.calls[path]) // len(calls)]
            value_T = on_tokens(model, path, choice, length)
            if kind == "weights":
                used = decisions.choices.get((path, "served"))
                used_TE = value_T if used is None else on_tokens(model, path, used[i], length)
                for quantity, values_T in _of_experts(value_T, used_TE > 0).items():
                    add(order, name, quantity, values_T)
            elif kind == "mlp_computed":
                add(order, f"{name} mlp", "computed", value_T)
            elif kind != "served":
                add(order, name, QUANTITY_OF_CHOICE.get(kind, kind), value_T)
    kinds = list(QUANTITIES)
    rows.sort(key=lambda pair: (pair[0], kinds.index(pair[1].quantity)))
    rows = [row for _, row in rows]
    exited = _exited_before(rows)
    rows = [
        row._replace(values_T=np.where(exited.get(row.name, False), np.nan, row.values_T))
        for row in rows
    ]
    redundant = _redundant_quantities(rows)
    return [row for row in rows if row.quantity not in redundant]


def _exited_before(rows):
    """Return {recursion step: [T] whether an earlier step skipped the token}.

    The step then made no decision about it.
    """
    computed = {row.name: row.values_T for row in rows if row.quantity == "computed"}
    exited, exited_T = {}, np.array(False)
    for name in computed:
        if re.fullmatch(r"recursion_\d+", name):
            exited[name] = exited_T
            exited_T = exited_T | (computed[name] == 0)
    return exited


def _of_experts(weights_TE, used_TE):
    """Return {quantity: [T]} from the experts' weights and whether they compute the token."""
    valid_T, any_T = ~np.isnan(weights_TE[:, 0]), used_TE.any(axis=-1)
    weights_TE = np.where(used_TE, weights_TE, -1.0)
    return {
        "experts": np.where(valid_T, used_TE.sum(axis=-1), np.nan),
        "top_expert": np.where(any_T, weights_TE.argmax(axis=-1), np.nan),
        "top_weight": np.where(any_T, weights_TE.max(axis=-1), np.nan),
    }


def _redundant_quantities(rows):
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


def model_parts(model):
    """Return [(prefix of its paths, model)] of a model, or of a composed one's members."""
    if not model.members:
        return [("", model)]
    return [(f"{name}/", member) for name, (member, _) in model.members.items()]


def on_tokens(model, path, choice, length):
    """Return the value of a `Choice` at each token, float64 [T, ...]; NaN without one."""
    value = np.asarray(choice.value, np.float64)
    parts = model_parts(model)
    prefix, part = next((prefix, part) for prefix, part in parts if path.startswith(prefix))
    time_RS = part.token_indices(path.removeprefix(prefix), np.asarray(choice.positions_BT), length)
    result = np.full((length, *value.shape[2:]), np.nan)
    result[time_RS[time_RS >= 0]] = value[time_RS >= 0]
    return result


def row_name(path):
    """Return the name of a row, e.g. `block_3 mlp_output` or `block_0 decoder`."""
    return " ".join(name for name in label(path).split("/") if name != "adapter")
