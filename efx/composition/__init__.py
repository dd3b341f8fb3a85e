"""cBTM: clusters of documents, one expert trained on each, a sparse ensemble of them.

"Scaling Expert Language Models with Unsupervised Domain Discovery" (Gururangan et al. 2023, arXiv
2303.14177). A folder of it:

    WORKDIR/clusters/      the clustering (`--mode=cluster`) and the documents of each cluster
    WORKDIR/seed/          the run that all experts start from
    WORKDIR/expert_<j>/    the run that continues from it on the documents of cluster j
    WORKDIR/evaluation.*   the table and numbers of `--mode=evaluate`
"""

import pathlib

CLUSTERS, SEED = "clusters", "seed"


def expert_folder(workdir, j):
    """The run directory of expert j."""
    return pathlib.Path(workdir) / f"expert_{j}"


def documents_file(workdir, j):
    """The file that lists the training documents of cluster j, for `config.data.subset`."""
    return pathlib.Path(workdir) / CLUSTERS / f"cluster_{j}.json"
