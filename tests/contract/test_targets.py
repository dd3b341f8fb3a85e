"""Blocks of which the attention or the MLP alone is routed, in decoders and in both streams."""

import families
import pytest
from test_families import SHORT, hidden_scores
from test_prefix import check

from efx.layers import flops


def _routed(depth_routing, **settings):
    routing = dict(kind="mod", capacity=0.4, every=1, slack=1.0, causal="aux_loss")
    return families.dotted(dict(depth_routing=routing | depth_routing, **settings))


STREAMS = dict(family="encoder_decoder", mlp=dict(hidden=64), order="cross_first")
ATTENTION, MLP = dict(target="attention"), dict(target="mlp", skip_mlp=16, router_norm="rms")
TARGETS = {
    "attention": _routed(ATTENTION, attention=dict(window=9)),
    "attention_parallel": _routed(ATTENTION | dict(kv_for_skipped=True), block_kind="parallel"),
    "mlp": _routed(MLP, attention=dict(num_kv_heads=2)),
    "mlp_parallel": _routed(MLP, block_kind="parallel"),
    "streams_attention": _routed(ATTENTION, **STREAMS),
    "streams_mlp": _routed(MLP, **STREAMS),
}
SLOW = {"attention_parallel", "mlp_parallel", "streams_attention", "streams_mlp"}
every_target = pytest.mark.parametrize("name", families.rows(TARGETS, SLOW))


@every_target
def test_only_the_tokens_before_decide(name):
    assert check(TARGETS[name]) > 0


@every_target
def test_the_ledger_is_what_is_executed(name):
    """Under top-k and with the slots of a causal decision."""
    exact = {"attention.chunk": 1, "vocab_multiple": 1}
    model = families.make(TARGETS[name] | exact)
    dense = families.make(TARGETS[name] | exact | {"depth_routing.kind": "none"})
    for selection in ("train", "causal"):
        nominal = model.ledger(SHORT, selection).nominal
        executed = flops.executed(model, SHORT, train=selection == "train")
        executed -= 0 if "mlp" in name else hidden_scores(model, selection)
        assert executed == pytest.approx(sum(nominal.values()), rel=1e-12), selection
    part = "mlp" if "mlp" in name else "attention_scores"
    assert model.ledger(SHORT).nominal[part] < dense.ledger(SHORT).nominal[part]
