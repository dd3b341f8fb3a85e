"""`--mode=cluster`: cluster a corpus, write the clustering into the run folder, describe it.

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm

WORKDIR/clusters then holds the clustering (`clustering.safetensors`, `clustering.json`), the
cluster of each training document (`documents.json`), the table (`table.md`) and a picture
(`clusters.png`). It is a function of the documents, `config.cluster` and `config.seed`.
"""

import pathlib
import shutil
import tempfile

import numpy as np

from efx import runfolder
from efx.compose import clustering as clustering_lib
from efx.compose.corpus import Corpus
from efx.compose.members import FOLDER
from efx.data import clusters
from efx.errors import UsageError

# What may change without another clustering: nothing that the documents or their clusters come of.
_TEXT = "source|eval_source|withhold|split|eval_fraction|max_bytes|document_bytes|text_key"
FIXED = rf"(seed|data\.({_TEXT})|cluster\..*)"


def run(config, workdir, command_line=()):
    """Cluster, write, print; returns the facts of the table. Done already: prints them again."""
    clustering_lib.check(config.cluster)
    workdir = pathlib.Path(workdir)
    with runfolder.Lock(workdir) as lock:
        launch = runfolder.open_run(
            workdir,
            config.to_dict(),
            command_line=list(command_line),
            may_differ=[rf"(?!{FIXED}$).*"],
        )
        read = Corpus(config.data)
        folder = workdir / FOLDER
        if not (folder / clusters.FILE).is_file():
            texts = [document.text for document in read.train]
            found, labels = clustering_lib.fit(texts, config.cluster, config.seed)
            found.about = {"corpus": read.key, **found.about}
            lock.take()
            launch.commit({})
            _write(folder, read, found, labels, config.cluster)
        else:
            if clusters.Documents.load(folder).corpus != read.key:
                raise UsageError(
                    f"{folder} is a clustering of documents that config.data no longer names (have "
                    "the files changed?); use another --workdir"
                )
            launch.commit({})
    print((folder / "table.md").read_text())
    print(f"clusters: {folder}, picture: {folder / 'clusters.png'}")
    return clustering_lib.Clustering.load(folder).about


def _write(folder, read, found, labels, config):
    """All files of a clustering, there at once or not at all."""
    heldout = found.distances(document.text for document in read.eval).argmin(1)
    facts = describe(read, labels, heldout, found.count)
    found.about |= {"method": config.method, **facts}
    documents = clusters.Documents(
        folder,
        found.fingerprint,
        read.key,
        found.count,
        {text.digest.hex(): int(j) for text, j in zip(read.train, labels, strict=True)},
    )
    with runfolder.writing(folder):
        part = pathlib.Path(tempfile.mkdtemp(prefix=".clusters-", dir=folder.parent))
        try:
            found.save(part)
            (part / clusters.FILE).write_text(documents.to_json())
            (part / "table.md").write_text(markdown(facts, config.method))
            _draw(part / "clusters.png", found, read, labels)
            part.chmod(0o755)  # a temporary folder is its owner's alone
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def describe(read, labels, heldout, count):
    """{"clusters": [{"documents", "bytes", "held_out", "parts": {part: documents}}], ...}; the
    purity that all documents in one cluster would have stands beside that of the clusters."""
    rows = []
    for j in range(count):
        own = [text for text, label in zip(read.train, labels, strict=True) if label == j]
        rows.append({
            "documents": len(own),
            "bytes": sum(len(text.data) for text in own),
            "held_out": int((heldout == j).sum()),
            "parts": {part: sum(text.part == part for text in own) for part in read.parts},
        })  # fmt: skip
    sizes = [row["documents"] for row in rows]
    facts = {"clusters": rows, "balance": min(sizes) / max(sizes)}
    if read.parts:
        of = [text.part for text in read.train]
        facts["purity"] = clustering_lib.purity(labels, of)
        facts["purity_of_one_cluster"] = clustering_lib.purity(np.zeros(len(of)), of)
    return facts


def markdown(facts, method):
    """The table of a clustering."""
    parts = list(facts["clusters"][0]["parts"])
    titles = ["cluster", "documents", "bytes", "held out", *parts]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for j, row in enumerate(facts["clusters"]):
        cells = [j, row["documents"], row["bytes"], row["held_out"], *row["parts"].values()]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    line = f"{method} clusters; balance {facts['balance']:.3f} (smallest over largest)"
    if parts:
        line += (
            f"; purity {facts['purity']:.3f} (all in one cluster: "
            f"{facts['purity_of_one_cluster']:.3f})"
        )
    return "\n".join([*lines, "", line]) + "\n"


def _draw(path, found, read, labels, most=3000):
    """Documents in the plane of their two principal components, coloured by cluster; a marker for
    each part of a mixture."""
    import matplotlib
    from sklearn.decomposition import PCA

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picked = np.linspace(0, len(read.train) - 1, min(len(read.train), most)).astype(int)
    embedded = found.embed(read.train[i].text for i in picked)
    both = np.concatenate([embedded, found.centres])
    dimensions = min(2, *both.shape)
    flat = PCA(dimensions, random_state=0).fit(embedded).transform(both)
    flat = np.pad(flat, ((0, 0), (0, 2 - dimensions)))
    of = np.array([read.train[i].part for i in picked])
    figure, axes = pyplot.subplots(figsize=(7, 5.5))
    colours = pyplot.get_cmap("tab10" if found.count <= 10 else "tab20")
    for part, marker in zip(sorted(set(of)), "ox^sv*PD" * len(of), strict=False):
        here = of == part
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
    if len(set(of)) > 1:
        axes.legend(loc="best", fontsize=8)
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.set_title(f"{len(labels)} training documents in {found.count} clusters")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
