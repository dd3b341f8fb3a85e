"""`--mode=cluster`: cluster a corpus, write the clustering into the run folder, describe it.

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm

WORKDIR/clusters then holds the clustering (`clustering.safetensors`, `clustering.json`), the
training documents of each cluster (`cluster_<j>.json`), the table (`table.md`) and a picture
(`clusters.png`). It is a function of the documents, `config.cluster` and `config.seed`.
"""

import pathlib

import numpy as np

from efx import atomic, run_settings, runfolder, settings, tables
from efx.cbtm import CLUSTERS, documents_file
from efx.cbtm.clustering import ABOUT, Clustering, fit, purity
from efx.cbtm.documents import Documents
from efx.data.sources import document_digest
from efx.data.subset import Subset
from efx.errors import UsageError

# What may change without another clustering: nothing that the documents or their clusters come of.
_TEXT = "source|eval_source|withhold|split|eval_fraction|max_bytes|document_bytes|text_key"
FIXED = rf"(seed|data\.({_TEXT})|cluster\..*)"


def run(config, workdir, command_line=()):
    """Cluster, write, print; returns the facts of the table. Done already: prints them again."""
    config, workdir = run_settings.check(config), pathlib.Path(workdir)
    with runfolder.Lock(workdir) as lock:
        launch = runfolder.open_run(
            workdir,
            settings.as_dict(config),
            command_line=list(command_line),
            may_differ=[rf"(?!{FIXED}$).*"],
        )
        documents = Documents(config.data)
        folder = workdir / CLUSTERS
        if not (folder / ABOUT).is_file():
            texts = [document.text for document in documents.train]
            clustering, labels = fit(texts, config.cluster, config.seed)
            lock.take()
            launch.commit({})
            _write(folder, documents, clustering, labels, config.cluster)
        else:
            if Clustering.load(folder).about["documents"] != documents.key:
                raise UsageError(
                    f"{folder} is a clustering of documents that config.data no longer names (have "
                    "the files changed?); use another --workdir"
                )
            launch.commit({})
    print((folder / "table.md").read_text())
    print(f"clusters: {folder}, picture: {folder / 'clusters.png'}")
    return Clustering.load(folder).about


def _write(folder, documents, clustering, labels, config):
    """All files of a clustering, there at once or not at all."""
    held_out = clustering.distances(document.text for document in documents.held_out).argmin(1)
    facts = describe(documents, labels, held_out, clustering.count)
    clustering.about |= {"documents": documents.key, "method": config.method, **facts}
    digests = np.array([document_digest(document.data).hex() for document in documents.train])
    with runfolder.writing(folder), atomic.replacing(folder) as part:
        part.mkdir()
        clustering.save(part)
        for j in range(clustering.count):
            name = documents_file(folder.parent, j).name
            (part / name).write_text(Subset(digests[labels == j].tolist()).to_json())
        (part / "table.md").write_text(markdown(facts, config.method))
        _draw(part / "clusters.png", clustering, documents, labels)


def describe(documents, labels, held_out, count):
    """{"clusters": [{"documents", "bytes", "held_out", "parts": {part: documents}}], ...}; the
    purity that all documents in one cluster would have stands beside that of the clusters."""
    rows = []
    for j in range(count):
        chosen = [documents.train[i] for i in np.flatnonzero(labels == j)]
        rows.append({
            "documents": len(chosen),
            "bytes": sum(len(document.data) for document in chosen),
            "held_out": int((held_out == j).sum()),
            "parts": {part: sum(d.component == part for d in chosen) for part in documents.parts},
        })  # fmt: skip
    sizes = [row["documents"] for row in rows]
    facts = {"clusters": rows, "balance": min(sizes) / max(sizes)}
    if documents.parts:
        parts = [document.component for document in documents.train]
        facts["purity"] = purity(labels, parts)
        facts["purity_of_one_cluster"] = purity(np.zeros(len(parts)), parts)
    return facts


def markdown(facts, method):
    """The table of a clustering."""
    parts = list(facts["clusters"][0]["parts"])
    titles = ["cluster", "documents", "bytes", "held out", *parts]
    rows = [
        [j, row["documents"], row["bytes"], row["held_out"], *row["parts"].values()]
        for j, row in enumerate(facts["clusters"])
    ]
    line = f"{method} clusters; balance {facts['balance']:.3f} (smallest over largest)"
    if parts:
        line += (
            f"; purity {facts['purity']:.3f} (all in one cluster: "
            f"{facts['purity_of_one_cluster']:.3f})"
        )
    return f"{tables.markdown(titles, rows)}\n\n{line}\n"


def _draw(path, clustering, documents, labels, most=3000):
    """Documents in the plane of their two principal components, coloured by cluster; a marker for
    each part of a mixture."""
    import matplotlib
    from sklearn.decomposition import PCA

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picked = np.linspace(0, len(labels) - 1, min(len(labels), most)).astype(int)
    embedded = clustering.embed(documents.train[i].text for i in picked)
    both = np.concatenate([embedded, clustering.centres])
    dimensions = min(2, *both.shape)
    flat = PCA(dimensions, random_state=0).fit(embedded).transform(both)
    flat = np.pad(flat, ((0, 0), (0, 2 - dimensions)))
    parts = np.array([documents.train[i].component for i in picked])
    figure, axes = pyplot.subplots(figsize=(7, 5.5))
    colours = pyplot.get_cmap("tab10" if clustering.count <= 10 else "tab20")
    for part, marker in zip(sorted(set(parts)), "ox^sv*PD" * len(parts), strict=False):
        here = parts == part
        axes.scatter(
            *flat[: len(picked)][here].T,
            s=14,
            marker=marker,
            linewidths=0.8,
            alpha=0.6,
            color=[colours(int(j) % colours.N) for j in labels[picked][here]],
        )
        if part:
            axes.scatter([], [], s=24, marker=marker, color="grey", label=part)
    for j, (x, y) in enumerate(flat[len(picked) :]):
        box = dict(boxstyle="round", facecolor="white", edgecolor=colours(j % colours.N))
        axes.annotate(str(j), (x, y), ha="center", va="center", bbox=box)
    if len(set(parts)) > 1:
        axes.legend(loc="best", fontsize=8)
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.set_title(f"{len(labels)} training documents in {clustering.count} clusters")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
