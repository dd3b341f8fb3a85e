"""PHATGOOSE: adapters trained apart and composed by their gates, against other ways to use them.

    python -m efx.composition.phatgoose --workdir runs/phatgoose

For each seed: a base model; for each domain an adapter and its gates; without training, their
composition by top-k and their uniform merge; and, trained on a mixture of the domains, gates
trained together, adapters that select tokens, and one adapter for everything as the control.
WORKDIR/table.md has held-out losses on every domain; "oracle" is each domain's own adapter.
Arguments after `--` go to every run, or, as in `adapter:--config.steps=50`, to the runs whose name
begins so (base, adapter, gate, compose, uniform, joint, inclusion).
"""

import sys

from efx.composition import study as study_lib

ROWS = {
    "one adapter on the mixture": "adapter_of_all",
    "uniform merge": "uniform",
    "gates, each trained alone (PHATGOOSE)": "compose",
    "gates trained together": "joint",
    "adapters that select tokens": "inclusion",
}


def plan(study):
    """Add the runs of one seed."""
    base = study.run("base", "", study.base)
    experts = []
    for name, source in study.domains.items():
        adapter = study.run(f"adapter_{name}", "adapter", source, **{"init.run": base})
        experts.append(study.run(f"gate_{name}", "gate", source, **{"init.run": adapter}))
    study.mixed = [f"adapter_{name}" for name in study.domains]
    composed = {"init.run": base, "adapter.experts": tuple(experts)}
    composed["adapter.top_k"] = min(2, len(experts))
    for name in ("compose", "uniform"):
        study.run(name, name, study.mixture, mode="compose", **composed)
    for name in ("joint", "inclusion"):
        study.run(name, name, study.mixture, **composed)
    study.run("adapter_of_all", "adapter", study.mixture, **{"init.run": base})


def rows(study):
    """Return {row: {domain: held-out loss}}."""
    losses = {"base": study.row("base")}
    losses |= {f"adapter {name}": study.row(f"adapter_{name}") for name in study.domains}
    own = {name: losses[f"adapter {name}"][name] for name in study.domains}
    losses["oracle: the domain's own adapter"] = own
    return losses | {row: study.row(name) for row, name in ROWS.items()}


def main(argv=None):
    return study_lib.main("phatgoose", __doc__, plan, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
