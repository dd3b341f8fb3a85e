"""CALM: a model that reads others through bridges, against other ways to use them.

    python -m efx.composition.calm --workdir runs/calm

For each seed: an anchor on the source --base; a smaller model for each domain; then, on a mixture
of all training parts, the bridges between these frozen models, and as the control the anchor
trained for as many more steps. WORKDIR/table.md has held-out losses on every domain; "best single"
is the best of the anchor and the domains' models. Arguments after `--` go to every run, or, as in
`bridge:--config.steps=50`, to the runs whose name begins so (anchor, augment, finetune, bridge).
"""

import sys

import numpy as np

from efx.composition import study as study_lib
from efx.errors import UsageError

BASE = "base"  # the anchor's own domain, in the table


def plan(study):
    """Add the runs of one seed."""
    if BASE in study.domains:
        raise UsageError(
            f"--domain={BASE}=...: this name is taken by the anchor's own domain; use another"
        )
    anchor = study.run("anchor", "", study.base)
    augment = [
        study.run(f"augment_{name}", "augment", source) for name, source in study.domains.items()
    ]
    study.mixed = list(study.runs)
    study.domains = {BASE: study.base, **study.domains}
    study.run("finetune", "finetune", study.mixture, **{"init.run": anchor})
    members = {"model.anchor": anchor, "model.augment": tuple(augment)}
    study.run("bridge", "bridge", study.mixture, **members)


def rows(study):
    """Return {row: {domain: held-out loss}}."""
    losses = {"anchor": study.row("anchor")}
    for name in list(study.domains)[1:]:
        losses[f"model of {name}"] = study.row(f"augment_{name}")
    single = list(losses.values())
    # fmin ignores the NaN of a model that diverged.
    best = {domain: np.fmin.reduce([row[domain] for row in single]) for domain in study.domains}
    losses["best single"] = best
    losses["anchor, trained on with the mixture"] = study.row("finetune")
    losses["bridges on the mixture (CALM)"] = study.row("bridge")
    return losses


def main(argv=None):
    return study_lib.main("calm", __doc__, plan, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
