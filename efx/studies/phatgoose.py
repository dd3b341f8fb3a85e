"""Adapters trained apart and composed by their gates, against other ways to use them.

    python -m efx.studies.phatgoose --config configs/phatgoose.py --workdir runs/phatgoose

For each seed: a base model; for each domain an adapter and its gates; then, without training, the
composition by top-k and the uniform merge; and, trained on a mixture of the domains, gates trained
together, entrances that may leave an expert out, and one adapter for everything as the control.
Each run is a separate `python -m efx.main`, so an interrupted study continues where it stopped.
Held-out losses of all of them on every domain go to WORKDIR/table.md and table.json; "oracle" is
each domain's own adapter. Arguments after `--` go to every run; those that begin with a name, as in
`adapter:--config.steps=50`, go to the runs whose name begins with it (base, adapter, gate, compose,
uniform, joint, inclusion).
"""

import sys

from efx.studies import composition


def run(study):
    """{row: {column: held-out loss}} of one seed."""
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
    rows["oracle: the domain's own adapter"] = composition.losses(losses_of_own_adapters)
    rows["one adapter on the mixture"] = study.row("adapter_of_all")
    rows["uniform merge"] = study.row("uniform")
    rows["gates, each trained alone (PHATGOOSE)"] = study.row("compose")
    rows["gates trained together"] = study.row("joint")
    rows["entrances that may leave out"] = study.row("inclusion")
    return rows


def main(argv=None):
    return composition.main("phatgoose", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
