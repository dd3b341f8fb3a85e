"""Models composed of finished runs: cBTM, PHATGOOSE and CALM.

A working directory of cBTM, "Scaling Expert Language Models with Unsupervised Domain Discovery"
(Gururangan et al. 2023, arXiv 2303.14177), holds

    clusters/      the clustering (`--mode=cluster`) and the documents of each cluster
    seed/          the run that all experts start from
    expert_<j>/    the run that continues it on the documents of cluster j
    evaluation.*   the table of `--mode=evaluate`
"""

import pathlib

import efx.studies  # noqa: F401  # reports a missing extra, which is the same

CLUSTERS, SEED = "clusters", "seed"


def expert_folder(workdir, j):
    """Return the run directory of expert j."""
    return pathlib.Path(workdir) / f"expert_{j}"


def documents_file(workdir, j):
    """Return the file that lists the training documents of cluster j, for `config.data.subset`."""
    return pathlib.Path(workdir) / CLUSTERS / f"cluster_{j}.json"
