"""A model that reads others through bridges, against other ways to use them.

    python -m efx.studies.calm --config configs/calm.py --workdir runs/calm

For each seed: an anchor, trained on the source --base; a smaller model for each domain, trained on
nothing else; then, on a mixture of the base's and the domains' training parts, the bridges between
the frozen anchor and all of these, and as the control the anchor itself, trained for as many more
steps. Each run is a separate `python -m efx.main`, so an interrupted study continues where it
stopped. Held-out losses of all of them on every domain go to WORKDIR/table.md and table.json; "best
single" is for each domain the best of the anchor and the domains' models. Arguments after `--` go
to every run; those that begin with a name, as in `bridge:--config.steps=50`, go to the runs whose
name begins with it (anchor, augment, finetune, bridge).
"""

import sys

from efx.errors import UsageError
from efx.studies import composition

BASE = "base"  # the anchor's own domain, in the table


def run(study):
    """{row: {column: held-out loss}} of one seed."""
    if BASE in study.domains:
        raise UsageError(
            f"--domain={BASE}=...: this name is taken by the anchor's own domain; use another"
        )
    domains = dict(study.domains)
    anchor = study.run("anchor", "", study.base)
    singles = {
        name: study.run(f"augment_{name}", "augment", source) for name, source in domains.items()
    }
    runs = {BASE: "anchor", **{name: f"augment_{name}" for name in domains}}
    study.domains = {BASE: study.base, **domains}
    mixture = study.mixture(runs)
    study.run("finetune", "finetune", mixture, **{"init.run": anchor})
    members = {"model.anchor": anchor, "model.augment": tuple(singles.values())}
    study.run("bridge", "bridge", mixture, **members)
    rows = {"anchor": study.row("anchor")}
    for name in domains:
        rows[f"model of {name}"] = study.row(f"augment_{name}")
    best_losses = {name: min(row[name] for row in rows.values()) for name in study.domains}
    rows["best single"] = composition.losses(best_losses)
    rows["anchor, trained on with the mixture"] = study.row("finetune")
    rows["bridges on the mixture (CALM)"] = study.row("bridge")
    return rows


def main(argv=None):
    return composition.main("calm", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
