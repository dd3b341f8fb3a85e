"""`--mode=cluster`: cluster a corpus and describe the clusters.

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm

WORKDIR/clusters then holds the clustering, the training documents of each cluster
(`cluster_<j>.json`) and a table (`table.md`). All are functions of the documents, `config.cluster`
and `config.seed`.
"""

import jax
import numpy as np
import pandas as pd

from efx import io, run_dir
from efx.composition import CLUSTERS, documents_file
from efx.composition.clustering import ABOUT, Clustering, fit_clustering
from efx.config import schema
from efx.config.load import to_config
from efx.data import sources
from efx.data.disk_cache import content_key
from efx.data.held_out import Subset
from efx.data.texts import Texts
from efx.errors import UsageError
from efx.logging import tables


def split_documents(config_data):
    """Return (training documents, held-out documents, hash of both) of a `config.data` block.

    They are lists of sources.Document, in order; a text occurs once in the first.

    Raises: UsageError if the source is no text, or documents are split in the middle.
    """
    for setting, source in config_data.specs().items():
        if source.startswith("tokens:"):
            raise UsageError(f"{setting}={source!r}: clustering needs text; use text:")
    if not config_data.eval_source and config_data.split != "documents":
        raise UsageError(
            f"config.data.split={config_data.split!r}: clustering needs whole documents; "
            "use config.data.split=documents"
        )
    texts = Texts(config_data)
    component_of, documents = {}, {"train": [], "eval": []}
    for text in texts.all():
        for document in text.source.documents():
            component_of[sources.document_digest(document.data)] = document.component
    for split, found in texts.documents().items():
        for data in found:
            # A document that held-out text was cut out of is of no component.
            component = component_of.get(sources.document_digest(data), "")
            documents[split].append(sources.Document("", data, component=component))
    train = {sources.document_digest(document.data): document for document in documents["train"]}
    key = content_key(texts.record, texts.subset and texts.subset.key)
    return list(train.values()), documents["eval"], key


def run(config, workdir, command_line=()):
    """Cluster the documents of `config.data`, unless it is done, and print the table."""
    if jax.process_count() > 1:
        raise UsageError("--mode=cluster: runs in one process; start it without several processes")
    config, workdir = to_config(config), io.local_path(workdir)
    plain, folder = schema.as_dict(config), workdir / CLUSTERS
    # All settings may differ: `about` has those of the clustering, the others are for the ensemble.
    launch = run_dir.open_run(workdir, plain, command_line=list(command_line), may_differ=[".*"])
    train, held_out, documents = split_documents(config.data)
    about = {"documents": documents, "cluster": plain["cluster"], "seed": config.seed}
    is_done = (folder / ABOUT).is_file()
    if is_done and Clustering.load(folder).about != about:
        raise UsageError(
            f"{folder}: its clusters are of other documents, config.cluster or config.seed; use "
            "another --workdir"
        )
    if not is_done:
        clustering, labels = fit_clustering([d.text for d in train], config.cluster, config.seed)
        clustering.about.update(about)
    launch.commit({})
    if not is_done:
        digests = np.array([sources.document_digest(document.data).hex() for document in train])
        with io.report_write_errors(folder), io.replacing(folder) as temporary:
            temporary.mkdir()
            clustering.save(temporary)
            for j in range(config.cluster.count):
                members = Subset(digests[labels == j].tolist())
                (temporary / documents_file(workdir, j).name).write_text(members.to_json())
            nearest = clustering.distances(document.text for document in held_out).argmin(1)
            (temporary / "table.md").write_text(_table(train, labels, nearest))
    print((folder / "table.md").read_text())
    print(f"clusters: {folder}")


def _table(train, labels, held_out_labels):
    """Return Markdown with the sizes of the clusters, and their documents of each component."""
    sizes = pd.Series([len(document.data) for document in train]).groupby(labels)
    counts = np.bincount(held_out_labels, minlength=labels.max() + 1)
    columns = {"documents": sizes.size(), "bytes": sizes.sum(), "held out": counts}
    components = pd.crosstab(labels, np.array([document.component for document in train]))
    table = pd.DataFrame(columns).join(components.drop(columns="", errors="ignore"))
    return tables.markdown(["cluster", *table.columns], table.reset_index().to_numpy()) + "\n"
