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


def run(study):
    """Make the runs of one seed; returns {row: {domain: held-out loss}}."""
    base = study.run("base", "", study.base)
    experts = []
    for name, source in study.domains.items():
        adapter = study.run(f"adapter_{name}", "adapter", source, **{"init.run": base})
        experts.append(study.run(f"gate_{name}", "gate", source, **{"init.run": adapter}))
    mixture = study.mixture({name: f"adapter_{name}" for name in study.domains})
    composed = {"init.run": base, "adapter.experts": tuple(experts)}
    composed["adapter.top_k"] = min(2, len(experts))
    study.run("compose", "compose", mixture, mode="compose", **composed)
    study.run("uniform", "uniform", mixture, mode="compose", **composed)
    study.run("joint", "joint", mixture, **composed)
    study.run("inclusion", "inclusion", mixture, **composed)
    study.run("adapter_of_all", "adapter", mixture, **{"init.run": base})
    rows = {"base": study.row("base")}
    for name in study.domains:
        rows[f"adapter {name}"] = study.row(f"adapter_{name}")
    losses_of_own_adapters = {name: rows[f"adapter {name}"][name] for name in study.domains}
    rows["oracle: the domain's own adapter"] = study_lib.losses(losses_of_own_adapters)
    rows["one adapter on the mixture"] = study.row("adapter_of_all")
    rows["uniform merge"] = study.row("uniform")
    rows["gates, each trained alone (PHATGOOSE)"] = study.row("compose")
    rows["gates trained together"] = study.row("joint")
    rows["adapters that select tokens"] = study.row("inclusion")
    return rows


def main(argv=None):
    return study_lib.main("phatgoose", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
