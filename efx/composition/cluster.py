"""`--mode=cluster`: cluster a corpus and describe the clusters.

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm

WORKDIR/clusters then holds the clustering, the training documents of each cluster
(`cluster_<j>.json`), a table (`table.md`) and a picture (`clusters.png`). All are functions of the
documents, `config.cluster` and `config.seed`.
"""

import jax
import numpy as np

from efx import io, run_dir
from efx.composition import CLUSTERS, documents_file
from efx.composition.clustering import ABOUT, Clustering, fit_clustering
from efx.composition.documents import SplitDocuments
from efx.config import schema
from efx.config.load import completed, to_config
from efx.data.sources import document_digest
from efx.data.subset import Subset
from efx.errors import UsageError
from efx.logging import tables

# Settings that a finished clustering depends on.
_TEXT = "source|eval_source|split|eval_fraction|max_bytes|document_bytes|text_key"
FIXED = rf"(seed|data\.({_TEXT})|cluster\..*)"


def run(config, workdir, command_line=()):
    """Cluster the documents of `config.data`, unless it is done, and print the table."""
    if jax.process_count() > 1:
        raise UsageError("--mode=cluster: runs in one process; start it without several processes")
    config, workdir = to_config(config), io.local_path(workdir)
    folder = workdir / CLUSTERS
    with run_dir.Lock(workdir) as lock:
        launch = run_dir.open_run(
            workdir,
            schema.as_dict(config),
            command_line=list(command_line),
            may_differ=[rf"(?!{FIXED}$).*"],
            completed=completed,
        )
        documents = SplitDocuments(config.data)
        if (folder / ABOUT).is_file():
            if Clustering.load(folder).about["documents"] != documents.key:
                raise UsageError(
                    f"{folder}: its documents are not those of config.data (files may have "
                    "changed); use another --workdir"
                )
            launch.commit({})
        else:
            texts = [document.text for document in documents.train]
            clustering, labels = fit_clustering(texts, config.cluster, config.seed)
            clustering.about["documents"] = documents.key
            lock.take()
            launch.commit({})
            with io.report_write_errors(folder), io.replacing(folder) as temporary:
                temporary.mkdir()
                clustering.save(temporary)
                _write_documents(temporary, documents, labels, clustering.count)
                (temporary / "table.md").write_text(table(documents, clustering, labels))
                _draw(temporary / "clusters.png", documents, clustering, labels)
    print((folder / "table.md").read_text())
    print(f"clusters: {folder}, picture: {folder / 'clusters.png'}")


def _write_documents(folder, documents, labels, count):
    digests = np.array([document_digest(document.data).hex() for document in documents.train])
    for j in range(count):
        name = documents_file("", j).name
        (folder / name).write_text(Subset(digests[labels == j].tolist()).to_json())


def table(documents, clustering, labels):
    """Return Markdown with sizes and components of the clusters, their balance and purity."""
    held_out = clustering.distances(document.text for document in documents.held_out).argmin(1)
    components = np.array([document.component for document in documents.train])
    sizes = np.array([len(document.data) for document in documents.train])
    rows = []
    for j in range(clustering.count):
        parts = [int((components[labels == j] == name).sum()) for name in documents.components]
        counts = [int((labels == j).sum()), int(sizes[labels == j].sum())]
        rows.append([j, *counts, int((held_out == j).sum()), *parts])
    titles = ["cluster", "documents", "bytes", "held out", *documents.components]
    smallest, largest = min(row[1] for row in rows), max(row[1] for row in rows)
    summary = f"{clustering.about['method']} clusters; balance {smallest / largest:.3f} "
    summary += "(smallest over largest)"
    if documents.components:
        one = np.zeros(len(labels))
        summary += f"; purity {purity(components, labels):.3f} "
        summary += f"(all in one cluster: {purity(components, one):.3f})"
    return f"{tables.markdown(titles, rows)}\n\n{summary}\n"


def purity(components, labels):
    """Return the fraction of documents that are of their cluster's most frequent component."""
    from sklearn.metrics.cluster import contingency_matrix

    return contingency_matrix(components, labels).max(axis=0).sum() / len(labels)


def _draw(path, documents, clustering, labels, max_documents=3000):
    """Draw documents by their two principal components, coloured by cluster."""
    import seaborn
    from matplotlib.figure import Figure
    from sklearn.decomposition import PCA

    picked = np.linspace(0, len(labels) - 1, min(len(labels), max_documents)).astype(int)
    embedded = clustering.embed(documents.train[i].text for i in picked)
    points = PCA(min(2, *embedded.shape), random_state=0).fit_transform(embedded)
    axes = Figure(figsize=(7, 5.5), layout="tight").subplots()
    seaborn.scatterplot(
        x=points[:, 0],
        y=points[:, -1],
        hue=[f"cluster {j}" for j in labels[picked]],
        hue_order=[f"cluster {j}" for j in range(clustering.count)],
        style=[documents.train[i].component for i in picked] if documents.components else None,
        alpha=0.6,
        s=20,
        ax=axes,
    )
    axes.set(xlabel="first principal component", ylabel="second principal component")
    axes.set_title(f"{len(labels)} training documents in {clustering.count} clusters")
    axes.figure.savefig(path, dpi=120)
