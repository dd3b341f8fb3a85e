"""Evaluation metrics of depth routing and of experts.

A decision's agreement with top-k is measured in the pass that routes by top-k, so that every router
sees what it saw in training. The number of tokens that a decision routes, and their cost, is
measured in the pass that routes by this decision.
"""

from efx.config.schema import replaced
from efx.layers.report import Report, label

AGREEMENT = ("accuracy", "precision", "recall")
HEALTH = ("router/gate", "router/score_std", "router/increment")


def routing_of(model):
    """The `DepthRoutingConfig` of a model with routed blocks, else None."""
    routings = (spec.routing for spec in model.blocks().values())
    return next((routing for routing in routings if routing is not None), None)


def _moe_of(model):
    moes = (block.moe for spec in model.blocks().values() for block in spec.blocks)
    return next((moe for moe in moes if moe is not None), None)


def _with_measured_experts(model, means):
    """The model with the fraction of choices that its experts were measured to compute."""
    computed = means.get("moe/computed_fraction")
    if computed is None or _moe_of(model) is None:
        return model
    changes = {"mlp.moe.computed_fraction": min(max(computed, 1e-9), 1.0)}
    return model.clone(config=replaced(model.config, changes))


def _depth_selections(model):
    """Top-k, further trained decisions, and no routed blocks at all."""
    routing = routing_of(model)
    if routing is None:
        return ()
    return "topk", *routing.trained_decisions[1:], "off"


def _depth_rows(model, length, passes):
    """Losses of all ways to route (`eval/loss_topk`, `eval/loss_routed_off`), worth and gates of
    routed blocks, agreement with top-k, and routed fractions."""
    routing = routing_of(model)
    if routing is None:
        return {}
    rows = passes.loss("off", "routed_off") | _health_rows(routing, passes)
    first, *others = routing.trained_decisions
    rows |= passes.loss("topk", "topk")
    for name in others:
        rows |= passes.loss(name, name)
    for name in routing.trained_decisions:
        prefix, selection = ("router", "causal") if name == first else (name, name)
        rows |= passes.statistics("topk", [f"{prefix}/{key}" for key in AGREEMENT])
        rows |= _routed_rows(model, length, prefix, passes.means[selection])
    return rows


def _health_rows(routing, passes):
    """Worth of all routed blocks; gates, scores and increments of those that select any token."""
    decided, rows = passes.statistics("causal", ["router/decided_fraction/"]), {}
    for name, value in passes.statistics("causal", HEALTH).items():
        block = name.split("/", 3)[3:]
        if not block or decided[f"eval/router/decided_fraction/{block[0]}"] > 0:
            rows[name] = value
    gates = [value for name, value in rows.items() if name.startswith("eval/router/gate/")]
    if gates and routing.gate != "one":
        rows |= {"eval/router/gate_min": min(gates), "eval/router/gate_max": max(gates)}
    return rows | {"eval/router/worth": passes.worth()}


def _routed_rows(model, length, prefix, means):
    """Fractions of routed tokens, over all blocks and by block, and FLOPs per token."""
    rows, key = {}, f"{prefix}/decided_fraction"
    for tail in [name.removeprefix(key) for name in means if name.startswith(key)]:
        overflow = means[f"{prefix}/overflow_fraction{tail}"]
        rows[f"eval/{prefix}/routed_fraction{tail}"] = means[key + tail] - overflow
        rows[f"eval/{prefix}/overflow_fraction{tail}"] = overflow
    measured, capacities = {}, []
    for path, spec in model.blocks().items():
        if spec.routing is not None:
            capacities.append(spec.capacity)
            routed = rows[f"eval/{prefix}/routed_fraction/{label(path)}"]
            measured[path] = (routed, means[f"{prefix}/pairs_fraction/{label(path)}"])
    fractions = [tokens for tokens, _ in measured.values()]
    rows[f"eval/{prefix}/routed_fraction_min"] = min(fractions)
    rows[f"eval/{prefix}/routed_fraction_max"] = max(fractions)
    rows[f"eval/{prefix}/capacity"] = sum(capacities) / len(capacities)
    ledger = _with_measured_experts(model, means).ledger(length, shares=measured)
    return rows | {f"eval/{prefix}/flops_per_token": ledger.nominal_per_token}


DEPTH = Report(
    words={
        "router/routed_fraction": "\n  routed blocks: {:.1%} of tokens",
        "router/worth": ", worth {:z.3f} nats",
        "router/gate_min": ", gates {:.2g}",
        "router/gate_max": " to {:.2g}",
        "router/routed_fraction_min": ", by block {:.1%}",
        "router/routed_fraction_max": " to {:.1%}",
        "router/capacity": " (capacity {:.1%})",
        "router/accuracy": "\n  causal decisions agree with top-k on {:.1%} of tokens",
    },
    rows=_depth_rows,
    selections=_depth_selections,
)


def _expert_selections(model):
    """Top-k if experts choose tokens; no experts at all if a token may choose none (MoDE)."""
    moe = _moe_of(model)
    if moe is None:
        return ()
    return ("topk",) * moe.looks_ahead + ("off",) * (moe.num_noop > 0)


def _expert_rows(model, length, passes):
    rows, moe, causal = {}, _moe_of(model), passes.means["causal"]
    if moe is None:
        return rows
    if "topk" in passes.means and passes.statistics("causal", ["moe/"]):
        rows |= passes.statistics("topk", ["moe/accuracy"]) | passes.loss("topk", "topk")
    if moe.num_noop:
        rows |= passes.loss("off", "routed_off")
        if routing_of(model) is None:  # else the same pass switches routed blocks off too
            rows["eval/moe/worth"] = passes.worth()
    if "moe/computed_fraction" in causal:
        rows["eval/moe/counted_fraction"] = moe.counted_fraction
        if routing_of(model) is None:
            ledger = _with_measured_experts(model, causal).ledger(length)
            rows["eval/moe/flops_per_token"] = ledger.nominal_per_token
    return rows


EXPERTS = Report(
    words={
        "moe/overflow_fraction": "\n  experts: overflow for {:.1%}",
        "moe/computed_fraction": ", computed {:.1%} of the choices",
        "moe/counted_fraction": " (counted as {:.1%})",
    },
    statistics=("moe/",),
    rows=_expert_rows,
    selections=_expert_selections,
)
