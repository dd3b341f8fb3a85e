"""What evaluation reports of depth routing and of experts.

How well a causal decision predicts the top-k, which looks ahead, is asked of the pass in which the
top-k decides what each router sees; how many tokens a decision routes, and what that costs, of the
pass in which it decides itself.
"""

from efx.layers.report import Report
from efx.layers.stack import label
from efx.settings import replaced

# How well a decision agrees with the top-k.
AGREEMENT = ("accuracy", "precision", "recall")


def routing_of(model):
    """The `DepthRoutingConfig` of a model some of whose layers are routed, else None."""
    routings = (spec.routing for spec in model.blocks().values())
    return next((routing for routing in routings if routing is not None), None)


def _moe_of(model):
    moes = (block.moe for spec in model.blocks().values() for block in spec.blocks)
    return next((moe for moe in moes if moe is not None), None)


def _as_measured(model, means):
    """The model with the share of the choices that its experts were seen to compute."""
    computed = means.get("moe/computed_fraction")
    if computed is None or _moe_of(model) is None:
        return model
    changes = {"mlp.moe.computed_fraction": min(max(computed, 1e-9), 1.0)}
    return model.clone(config=replaced(model.config, changes))


def _depth_selections(model):
    """Top-k, and every decision that is trained beside the one that samples. A control does in
    evaluation what it does in training, with other random numbers."""
    routing = routing_of(model)
    if routing is None:
        return ()
    return ("off",) if routing.is_control else ("topk", *routing.trained_decisions[1:], "off")


def _depth_rows(model, length, passes):
    routing = routing_of(model)
    if routing is None:
        return {}
    if routing.is_control:
        rows = passes.loss("causal", routing.train_selection) | passes.loss("off", "routed_off")
        return rows | _routed(model, length, "router", passes.means["causal"])
    first, *others = routing.trained_decisions
    rows = passes.loss("topk", "topk") | passes.loss("off", "routed_off")
    for name in others:
        rows |= passes.loss(name, name)
    for name in routing.trained_decisions:
        prefix, selection = ("router", "causal") if name == first else (name, name)
        rows |= passes.statistics("topk", [f"{prefix}/{key}" for key in AGREEMENT])
        rows |= _routed(model, length, prefix, passes.means[selection])
    return rows


def _routed(model, length, prefix, means):
    """How many tokens are computed, and what that costs."""
    rows, key = {}, f"{prefix}/decided_fraction"
    for tail in [name.removeprefix(key) for name in means if name.startswith(key)]:
        overflow = means[f"{prefix}/overflow_fraction{tail}"]
        rows[f"eval/{prefix}/routed_fraction{tail}"] = means[key + tail] - overflow
        rows[f"eval/{prefix}/overflow_fraction{tail}"] = overflow
    blocks = [value for name, value in rows.items() if "/routed_fraction/" in name]
    rows[f"eval/{prefix}/routed_fraction_min"] = min(blocks)
    rows[f"eval/{prefix}/routed_fraction_max"] = max(blocks)
    shares = {}
    for path, spec in model.blocks().items():
        if spec.routing is not None:
            routed = rows[f"eval/{prefix}/routed_fraction/{label(path)}"]
            shares[path] = (routed, means[f"{prefix}/pairs_fraction/{label(path)}"])
    ledger = _as_measured(model, means).ledger(length, shares=shares)
    return rows | {f"eval/{prefix}/flops_per_token": ledger.nominal_per_token}


DEPTH = Report(
    words={
        "router/accuracy": "; decision accuracy {:.1%}",
        "router/routed_fraction": ", routed {:.1%}",
        "router/routed_fraction_min": " (by block {:.1%}",
        "router/routed_fraction_max": " to {:.1%})",
    },
    rows=_depth_rows,
    selections=_depth_selections,
)


def _expert_selections(model):
    moe = _moe_of(model)
    if moe is None:
        return ()
    return ("topk",) * moe.looks_ahead + ("off",) * (moe.num_noop > 0)


def _expert_rows(model, length, passes):
    """The loss under a selection that looks ahead, if there is one; FLOPs by what experts computed,
    where nothing else changes how many tokens are."""
    rows, moe, causal = {}, _moe_of(model), passes.means["causal"]
    if "topk" in passes.means and passes.statistics("causal", ["moe/"]):
        rows |= passes.statistics("topk", ["moe/accuracy"]) | passes.loss("topk", "topk")
    if moe is not None and moe.num_noop:
        rows |= passes.loss("off", "routed_off")
    if moe is not None and "moe/computed_fraction" in causal:
        rows["eval/moe/counted_fraction"] = moe.counted_fraction
        if routing_of(model) is None:
            ledger = _as_measured(model, causal).ledger(length)
            rows["eval/moe/flops_per_token"] = ledger.nominal_per_token
    return rows


EXPERTS = Report(
    words={
        "moe/dropped_fraction": "; experts full for {:.1%}",
        "moe/computed_fraction": ", computed {:.1%} of the choices",
        "moe/counted_fraction": " (counted as {:.1%})",
    },
    statistics=("moe/",),
    rows=_expert_rows,
    selections=_expert_selections,
)
