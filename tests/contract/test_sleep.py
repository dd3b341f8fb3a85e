"""Of every row whose parts can sleep, evaluation logs metrics that move when they do."""

import re

import families
import jax
from families import every_row

from efx.layers import batch_means
from efx.train import health
from efx.train.eval_step import by_layer

# Ends of the paths of parameters; at 0 a block, its parts and latents add nothing, the choices of
# experts do not depend on the token, and masks are open.
ADD = (
    "out/kernel",
    "out/bias",
    "down/kernel",
    "down/bias",
    "linear/kernel",
    "linear/bias",
    "adapter/up",
)
CHOOSE = "mlp/router", "adapter/gate", "adapter/entrance", "adapter/entrance_bias"
MASK = tuple(f"mask_{name}" for name in "frequency phase shift linear query key value".split())
# No parameter at 0 closes a gate.
GATES = {"router/gate/(.+)", "moe/weight/(.+)", "adapter/gate/(.+)"}


def can_sleep(model):
    specs = model.blocks().values()
    experts = [block.moe for spec in specs for block in spec.blocks if block.moe]
    routed = [spec for spec in specs if spec.routing]
    adapter = getattr(model, "adapter", None)
    composed = adapter and adapter.experts and adapter.routing != "uniform"
    parts = experts, routed, composed, model.config.dropout.learned
    return any(parts) or model.config.family != "decoder"


def matching(metrics, is_met):
    """Patterns of the rules that meet a condition for some metric."""
    return {
        rule.metric
        for rule in health.RULES
        for name, value in metrics.items()
        if re.fullmatch(f"eval/{rule.metric}", name) and is_met(rule, value)
    }


@every_row(can_sleep)
def test_a_part_that_sleeps_is_seen(name):
    model, state, params = families.build(name), families.state_of(name), families.params_of(name)

    @families.jit
    def evaluate(params):
        _, sown = model.apply(
            {"params": params, **state},
            families.tokens(),
            rngs=families.keys(),
            mutable=["stats", batch_means.COLLECTION],
        )
        return by_layer(batch_means.sown(sown, "stats"), model)

    def metrics(params):
        return {f"eval/{key}": float(value) for key, value in evaluate(params).items()}

    def asleep(path, leaf):
        is_edited = "/".join(key.key for key in path).endswith(ADD + CHOOSE + MASK)
        return 0 * leaf if is_edited else leaf

    awake, edited = metrics(params), metrics(jax.tree_util.tree_map_with_path(asleep, params))
    assert not [line for rule in health.RULES if (line := rule.line(awake))]
    increments = [key for key in awake if "/increment" in key]
    for key in increments:
        assert awake[key] > 0.05 and edited[key] < 1e-6, key
    # A token that always chooses all experts has no choice.
    rules = matching(awake, lambda rule, value: value < 1 or "usage" not in rule.metric)
    fired = {rule.metric for rule in health.RULES if rule.line(edited)}
    assert rules - GATES <= fired and (rules or increments)
