"""Routed layers in plain numpy. Nothing is gathered: tokens are computed all together, a mask hides
those that are not routed from the others, and their own results are dropped."""

import functools
import math
from fractions import Fraction

import families
import jax
import numpy as np
from formulas import linear, mlp, norm, rotated
from scipy import special

from efx.layers.selection import HEADROOM
from efx.layers.token_context import TokenContext
from efx.models.stack import Layer

ROWS, LENGTH = 3, 16
OPTIONS = {
    "preset": "llama",
    "attention.num_kv_heads": 2,
    "depth": 1,
    "depth_routing.kind": "mod",
    "depth_routing.every": 1,
    "depth_routing.capacity": 0.5,
    "depth_routing.causal_decision": "aux_loss",
}
GATES = {
    "identity": lambda r: r,
    "sigmoid": special.expit,
    "tanh": np.tanh,
    "twice_sigmoid": lambda r: 2 * special.expit(r),
    "one": np.ones_like,
}


def np_topk(score_T, slots, valid_T=True):
    """Mask of the largest scores of valid tokens, of equal ones the earlier."""
    order = np.argsort(-score_T, kind="stable")
    selected_T = np.zeros(len(score_T), bool)
    selected_T[order[np.broadcast_to(valid_T, score_T.shape)[order]][:slots]] = True
    return selected_T


def np_admit(selected_T, rate, counts_T, admitted=0, headroom=HEADROOM):
    """Mask of the selected tokens that fit under ceil(rate n) + headroom, one after another."""
    mask_T = np.zeros(len(selected_T), bool)
    for t, (selected, n) in enumerate(zip(selected_T, counts_T, strict=True)):
        limit = math.ceil(Fraction(str(min(rate, 1))) * int(n)) + headroom
        mask_T[t] = selected and (rate >= 1 or admitted < limit)
        admitted += mask_T[t]
    return mask_T


def np_attention(x_TD, p, b, positions_T, visible_TS):
    """Masked attention of all T tokens of one row."""
    a, heads = b.attention, {}
    counts = {"query": a.num_heads, "key": a.num_kv_heads, "value": a.num_kv_heads}
    for name, count in counts.items():
        y = linear(x_TD, p[name])
        if a.qk_norm == "width" and name != "value":
            y = norm(y, p[f"norm_{name}"], "rmsnorm", b.norm_eps)
        y = y.reshape(len(y), count, a.head_dim)
        if a.rope_theta and name != "value":
            y = rotated(y, positions_T, a.rope_theta)
        heads[name] = np.repeat(y, a.num_heads // count, axis=1)
    scores = np.einsum("tnh,snh->nts", heads["query"], heads["key"]) / np.sqrt(a.head_dim)
    weights = special.softmax(np.where(visible_TS, scores, -np.inf), axis=-1)
    out = np.einsum("nts,snh->tnh", weights, heads["value"]).reshape(len(x_TD), -1)
    return linear(out, p["out"])


def np_layer(x_TD, p, spec, choose=None, positions_T=None, seen_T=None):
    """(output, routed tokens) of a pre-norm or parallel layer on one row.

    Args:
      choose: scores [T] -> mask of the routed tokens; None: all.
      seen_T: the tokens that others attend to; None: as the spec says.
    """
    b, r = spec.blocks[0], spec.routing
    target = "block" if r is None else r.target
    time = np.arange(len(x_TD))
    positions_T = time if positions_T is None else positions_T
    all_T = np.ones(len(x_TD), bool)

    def attention(routed_T):
        seen = all_T if r is not None and (r.kv_for_skipped or target == "mlp") else routed_T
        seen = seen if seen_T is None else seen_T
        visible_TS = (time[None] <= time[:, None]) & seen[None]
        if b.attention.window:
            visible_TS &= positions_T[:, None] - positions_T[None] < b.attention.window
        visible_TS |= np.eye(len(x_TD), dtype=bool)  # skipped tokens, whose rows are dropped
        h_TD = norm(x_TD, p["norm_attention"], b.norm, b.norm_eps)
        return np_attention(h_TD, p["attention"], b, positions_T, visible_TS)

    def increment_of_mlp(y_TD):
        h_TD = norm(y_TD, p["norm_mlp"], b.norm, b.norm_eps)
        return mlp(h_TD, p["mlp"], b.mlp.activation)

    def route(y_TD):
        """(routed tokens, gate)"""
        if choose is None or "router" not in p:
            return all_T if choose is None else choose(None), np.ones((len(x_TD), 1))
        read_TD = y_TD
        if r.router_norm == "rms":
            read_TD = norm(y_TD, p["norm_router"], "rmsnorm", b.norm_eps)
        score_T = read_TD @ p["router"]
        return choose(score_T), GATES[r.gate](score_T)[:, None]

    def add(start_TD, part_TD, routed_T, gate_T1, read_TD):
        skipped_TD = start_TD
        if r is not None and r.skip_mlp:
            q = p["skip_mlp"]
            h_TD = norm(read_TD, q["norm"], b.norm, b.norm_eps)
            skipped_TD = start_TD + mlp(h_TD, q["mlp"], b.mlp.activation)
        return np.where(routed_T[:, None], start_TD + gate_T1 * part_TD, skipped_TD)

    def read_by_mlp(y_TD):
        return x_TD if b.kind == "parallel" else y_TD

    if target == "mlp":
        y_TD = x_TD + attention(all_T)
        read_TD = read_by_mlp(y_TD)
        routed_T, gate_T1 = route(read_TD)
        return add(y_TD, increment_of_mlp(read_TD), routed_T, gate_T1, read_TD), routed_T
    routed_T, gate_T1 = route(x_TD)
    if target == "mlp_only":
        return add(x_TD, increment_of_mlp(x_TD), routed_T, gate_T1, x_TD), routed_T
    a_TD = attention(routed_T)
    if target == "attention":
        y_TD = add(x_TD, a_TD, routed_T, gate_T1, x_TD)
        return y_TD + increment_of_mlp(read_by_mlp(y_TD)), routed_T
    delta_TD = a_TD + increment_of_mlp(read_by_mlp(x_TD + a_TD))
    return add(x_TD, delta_TD, routed_T, gate_T1, x_TD), routed_T


# ---- the layer of efx --------------------------------------------------------------------------


def dotted(changes):
    return {key.replace("__", "."): value for key, value in changes.items()}


@functools.cache
def layer(dtype="float32", **changes):
    """(a routed layer, its parameters in float64)."""
    model = families.make({**OPTIONS, **dotted(changes)}, dtype)
    params = families.random_params(model)["layers"]["block_0"]
    return Layer(model.specs()[0]), jax.tree.map(np.float64, params)


def activations(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, LENGTH, 32)).astype(np.float32)


def run(module, params, x_BTD, selection="train", segments=None, positions=None, state=None):
    """(output, losses and statistics) of a layer."""
    positions = np.arange(x_BTD.shape[1])[None] if positions is None else positions
    call = TokenContext(positions, segments, selection=selection)
    variables = {"params": jax.tree.map(np.float32, params), **(state or {})}

    @families.jit
    def apply(variables, x_BTD, call):
        return module.apply(variables, x_BTD, call, mutable=["losses", "stats"])

    out_BTD, sown = jax.device_get(apply(variables, x_BTD, call))
    return out_BTD, {key: value[0] for part in sown.values() for key, value in part.items()}


def topk(slots):
    """`choose` of `np_layer`: the largest scores."""
    return lambda score_T: np_topk(score_T, slots)


def positive(rate, threshold=0.0):
    """`choose`: scores above the threshold, under the causal limit."""
    return lambda score_T: np_admit(score_T > threshold, rate, np.arange(len(score_T)) + 1)
