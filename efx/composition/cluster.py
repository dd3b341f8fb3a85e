"""`--mode=cluster`: cluster a corpus, write the clustering into the run directory, describe it.

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm

WORKDIR/clusters then holds the clustering (`clustering.safetensors`, `clustering.json`), the
training documents of each cluster (`cluster_<j>.json`), the table (`table.md`) and a picture
(`clusters.png`). It is a function of the documents, `config.cluster` and `config.seed`.
"""

import itertools

import jax
import numpy as np

from efx import io, run_dir
from efx.composition import CLUSTERS, documents_file
from efx.composition.clustering import ABOUT, Clustering, fit_clustering, purity
from efx.composition.documents import SplitDocuments
from efx.config import schema
from efx.config.load import completed, to_config
from efx.data.sources import document_digest
from efx.data.subset import Subset
from efx.errors import UsageError
from efx.logging import tables

# The settings that decide the documents and their clusters: a finished clustering keeps them.
_TEXT = "source|eval_source|split|eval_fraction|max_bytes|document_bytes|text_key"
FIXED = rf"(seed|data\.({_TEXT})|cluster\..*)"


def run(config, workdir, command_line=()):
    """Clusters, writes and prints, or prints a finished clustering; returns `Clustering.about`."""
    if jax.process_count() > 1:
        raise UsageError("--mode=cluster runs in one process: start it without several processes")
    config, workdir = to_config(config), io.local_path(workdir)
    with run_dir.Lock(workdir) as lock:
        launch = run_dir.open_run(
            workdir,
            schema.as_dict(config),
            command_line=list(command_line),
            may_differ=[rf"(?!{FIXED}$).*"],
            completed=completed,
        )
        documents = SplitDocuments(config.data)
        folder = workdir / CLUSTERS
        if not (folder / ABOUT).is_file():
            texts = [document.text for document in documents.train]
            clustering, labels = fit_clustering(texts, config.cluster, config.seed)
            lock.take()
            launch.commit({})
            _write(folder, documents, clustering, labels, config.cluster)
        else:
            if Clustering.load(folder).about["documents"] != documents.key:
                raise UsageError(
                    f"{folder}: its documents are not those of config.data (the files may have "
                    "changed); use another --workdir"
                )
            launch.commit({})
    print((folder / "table.md").read_text())
    print(f"clusters: {folder}, picture: {folder / 'clusters.png'}")
    return Clustering.load(folder).about


def _write(folder, documents, clustering, labels, config):
    """Writes all files of a clustering, or none of them."""
    held_out = clustering.distances(document.text for document in documents.held_out).argmin(1)
    description = describe_clusters(documents, labels, held_out, clustering.count)
    clustering.about |= {"documents": documents.key, "method": config.method, **description}
    digests = np.array([document_digest(document.data).hex() for document in documents.train])
    with io.report_write_errors(folder), io.replacing(folder) as temporary:
        temporary.mkdir()
        clustering.save(temporary)
        for j in range(clustering.count):
            name = documents_file(folder.parent, j).name
            (temporary / name).write_text(Subset(digests[labels == j].tolist()).to_json())
        (temporary / "table.md").write_text(markdown(description, config.method))
        _draw(temporary / "clusters.png", clustering, documents, labels)


def describe_clusters(documents, labels, held_out, count):
    """{"clusters": [{"documents", "bytes", "held_out", "parts": {component: documents}}], ...};
    with the purity of the clusters, and that of all documents in one cluster to compare it."""
    clusters = []
    for j in range(count):
        chosen = [documents.train[i] for i in np.flatnonzero(labels == j)]
        clusters.append({
            "documents": len(chosen),
            "bytes": sum(len(document.data) for document in chosen),
            "held_out": int((held_out == j).sum()),
            "parts": {
                component: sum(document.component == component for document in chosen)
                for component in documents.components
            },
        })  # fmt: skip
    sizes = [cluster["documents"] for cluster in clusters]
    description = {"clusters": clusters, "balance": min(sizes) / max(sizes)}
    if documents.components:
        components = [document.component for document in documents.train]
        description["purity"] = purity(labels, components)
        description["purity_of_one_cluster"] = purity(np.zeros(len(components)), components)
    return description


def markdown(description, method):
    """The table of a clustering."""
    components = list(description["clusters"][0]["parts"])
    titles = ["cluster", "documents", "bytes", "held out", *components]
    rows = [
        [j, row["documents"], row["bytes"], row["held_out"], *row["parts"].values()]
        for j, row in enumerate(description["clusters"])
    ]
    summary = f"{method} clusters; balance {description['balance']:.3f} (smallest over largest)"
    if components:
        summary += (
            f"; purity {description['purity']:.3f} (all in one cluster: "
            f"{description['purity_of_one_cluster']:.3f})"
        )
    return f"{tables.markdown(titles, rows)}\n\n{summary}\n"


def _draw(path, clustering, documents, labels, max_documents=3000):
    """Documents in the plane of their two principal components, coloured by cluster; a marker for
    each component of a mixture."""
    import matplotlib
    from sklearn.decomposition import PCA

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picked = np.linspace(0, len(labels) - 1, min(len(labels), max_documents)).astype(int)
    embedded = clustering.embed(documents.train[i].text for i in picked)
    points = np.concatenate([embedded, clustering.centres])
    dimensions = min(2, *points.shape)
    flat = PCA(dimensions, random_state=0).fit(embedded).transform(points)
    flat = np.pad(flat, ((0, 0), (0, 2 - dimensions)))
    components = np.array([documents.train[i].component for i in picked])
    figure, axes = pyplot.subplots(figsize=(7, 5.5))
    colours = pyplot.get_cmap("tab10" if clustering.count <= 10 else "tab20")
    markers = itertools.cycle("ox^sv*PD")
    for component, marker in zip(sorted(set(components)), markers, strict=False):
        in_component = components == component
        axes.scatter(
            *flat[: len(picked)][in_component].T,
            s=14,
            marker=marker,
            linewidths=0.8,
            alpha=0.6,
            color=[colours(int(j) % colours.N) for j in labels[picked][in_component]],
        )
        if component:
            axes.scatter([], [], s=24, marker=marker, color="grey", label=component)
    for j, (x, y) in enumerate(flat[len(picked) :]):
        box = dict(boxstyle="round", facecolor="white", edgecolor=colours(j % colours.N))
        axes.annotate(str(j), (x, y), ha="center", va="center", bbox=box)
    if len(set(components)) > 1:
        axes.legend(loc="best", fontsize=8)
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.set_title(f"{len(labels)} training documents in {clustering.count} clusters")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
