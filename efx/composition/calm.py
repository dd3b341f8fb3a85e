"""CALM: a model that reads others through bridges, against other ways to use them.

    python -m efx.composition.calm --workdir runs/calm

For each seed: an anchor on the source --base; a smaller model for each domain; then, on a mixture
of all training parts, the bridges between these frozen models, and as the control the anchor
trained for as many more steps. WORKDIR/table.md has held-out losses on every domain; "best single"
is the best of the anchor and the domains' models. Arguments after `--` go to every run, or, as in
`bridge:--config.steps=50`, to the runs whose name begins so (anchor, augment, finetune, bridge).
"""

import sys

from efx.composition import study as study_lib
from efx.errors import UsageError

BASE = "base"  # the anchor's own domain, in the table


def run(study):
    """Make the runs of one seed; returns {row: {domain: held-out loss}}."""
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
    rows["best single"] = study_lib.losses(best_losses)
    rows["anchor, trained on with the mixture"] = study.row("finetune")
    rows["bridges on the mixture (CALM)"] = study.row("bridge")
    return rows


def main(argv=None):
    return study_lib.main("calm", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
