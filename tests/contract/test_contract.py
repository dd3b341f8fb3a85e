"""Every family has the members of the contract, and each of its layers reports for itself."""

import functools

import families
import jax
import pytest

from efx.layers import batch_means
from efx.train.eval_step import by_layer


def test_every_resolved_config_resolves_to_itself():
    for name in families.FAMILIES:
        config = families.build(name).config
        assert config.resolved() == config, name


def test_a_row_with_a_new_choice_is_in_the_tests_by_default(monkeypatch):
    routing = {"depth_routing.kind": "mod", "depth_routing.gate": "twice_sigmoid"}
    rows = {"new": families.Family(routing), "same": families.Family(routing)}
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, **rows})
    for can in (families.can_scan, families.skips_tokens):
        params = families.rows_of(can, **families.CHEAP)
        assert {"new"} == {p.values[0] for p in params if not p.marks} & rows.keys()
        assert "new" in {p.values[0] for p in families.rows_of(can, **families.COSTLY)}


STREAMS = ("block_0/encoder_0", "block_0/decoder", "last/block_0/decoder")
LEVELS = [
    f"{level}/blocks/{kind}/block_0"
    for level in ("encoder_0", "decoder_0")
    for kind in ("local_0", "global_1")
]
# {name: {statistic: the layers that report it}}
REPORTING = {
    "dropout_elementwise_mod": {
        "dropout/kept": ["embedding", "block_0", "block_1"],
        "router/accuracy": ["block_0", "block_1"],
    },
    "recursion": {"router/recall": ["recursion_1", "recursion_2"]},
    "streams_moe": {
        "dropout/kept": ["embedding", *STREAMS[:2], "block_1/encoder_0", "block_1/decoder"],
        "moe/entropy": [*STREAMS[:2], "block_1/encoder_0", "block_1/decoder"],
    },
    # Of a level outside of its blocks: where it compresses, and the attention that spreads.
    "latent_masks": {
        "dropout/kept": [
            *("embedding", "block_0", "block_1", "encoder_0/compress", *LEVELS, "decoder_0"),
            "encoder_0/compress/blocks/block_0",
        ]
    },
    "scanned": {
        "dropout/kept": ["embedding", *STREAMS, "block_1/encoder_0", "block_1/decoder"],
    },
    "bridged": {"router/accuracy": ["augment_models_1/block_1"]},
}


@functools.cache
def reported(name):
    """(model, all that a pass sows)."""
    if name == "bridged":
        model = families.bridge({}, {}, {"depth_routing.kind": "mod"})
    elif name == "scanned":
        changes = {"depth": 3, "scan_layers": True}
        model = families.make({**families.FAMILIES["streams_masks"].changes, **changes})
    else:
        model = families.build(name)
    variables = {"params": families.random_params(model), **families.random_state(model)}

    @families.jit
    def sow(variables):
        collections = ["stats", batch_means.COLLECTION]
        return model.apply(variables, families.tokens(), rngs=families.keys(), mutable=collections)[
            1
        ]

    return model, jax.device_get(sow(variables))


@pytest.mark.parametrize(
    "name", families.rows(REPORTING, set(REPORTING) - {"dropout_elementwise_mod", "bridged"})
)
def test_each_layer_reports_for_itself(name):
    model, sown = reported(name)
    rows = by_layer(batch_means.sown(sown, "stats"), model)
    for statistic, layers in REPORTING[name].items():
        of_layers = {row for row in rows if row.startswith(f"{statistic}/")}
        assert of_layers == {f"{statistic}/{layer}" for layer in layers}


@pytest.mark.slow
def test_the_row_of_a_layer_is_the_mean_over_what_it_sows():
    """Here of three masks."""
    model, sown = reported("scanned")
    rows = by_layer(batch_means.sown(sown, "stats"), model)
    masks = sown["stats"]["last"]["block_0"]["decoder"]
    kept = [
        masks[f"dropout_{site}_output"]["dropout/kept"][0] for site in ("attention", "cross", "mlp")
    ]
    assert rows["dropout/kept/last/block_0/decoder"] == pytest.approx(sum(kept) / 3, rel=1e-6)
    assert rows["dropout/kept/embedding"] == sown["stats"]["dropout_embedding"]["dropout/kept"][0]
