"""What evaluation reports of learned dropout."""

from efx.layers.report import Report
from efx.layers.routing.reports import routing_of

COMPUTED = "mlp/computed_fraction"


def _rows(model, length, passes):
    """FLOPs by what masks left to be computed, where nothing else changes how many tokens are."""
    means = passes.means["causal"]
    if COMPUTED not in means or routing_of(model) is not None:
        return {}
    parts = model.ledger(length).nominal
    closed = (1.0 - means[COMPUTED]) * parts["mlp"]
    return {"eval/flops_per_token": (sum(parts.values()) - closed) / length}


MASKS = Report(
    words={
        "dropout/kept": "; masks keep {:.1%}",
        COMPUTED: "; MLPs computed for {:.1%} of the tokens",
    },
    statistics=("dropout/", COMPUTED),
    rows=_rows,
    compared=lambda model: "masks" if model.config.dropout.learned else "",
)
