"""What evaluation reports of learned dropout."""

from efx.layers import costs
from efx.layers.report import Report
from efx.layers.stack import label
from efx.routing.reports import routing_of

COMPUTED = "mlp/computed_fraction"


def _rows(model, length, passes):
    """FLOPs by what masks left to be computed, where nothing else changes how many tokens are."""
    means = passes.means["causal"]
    if COMPUTED not in means or routing_of(model) is not None:
        return {}
    begins = f"{COMPUTED}/"
    shares = {
        name.removeprefix(begins): share for name, share in means.items() if name.startswith(begins)
    }
    specs = {label(path): (path, spec) for path, spec in model.blocks().items()}
    if not shares.keys() <= specs.keys():
        return {}  # MLPs in levels of latents, whose FLOPs no block states
    places = {stage.path: len(stage.tokens_S) for stage in model.stages(length)}
    total = sum(model.ledger(length).nominal.values())
    for name, share in shares.items():
        path, spec = specs[name]
        mlps = (costs.mlp_flops(block, places[path])["mlp"] for block in spec.blocks)
        total -= (1.0 - share) * sum(mlps)
    return {"eval/flops_per_token": total / length}


MASKS = Report(
    words={
        "dropout/kept": "; masks keep {:.1%}",
        COMPUTED: "; MLPs computed for {:.1%} of the tokens",
    },
    statistics=("dropout/", COMPUTED),
    rows=_rows,
    compared=lambda model: "masks" if model.config.dropout.learned else "",
)
