"""The documents of one cluster: what an expert of cBTM trains on.

A clustering (`--mode=cluster`) leaves `documents.json` in its folder: the cluster of every training
document, by the hash of its text. Reading it takes nothing but that file, so an expert can train
wherever the corpus is.
"""

import json
from pathlib import Path

from efx.data.cache import content_key
from efx.data.sources import document_digest
from efx.errors import UsageError

FILE = "documents.json"


def corpus_key(origin, config_data):
    """Hash of the documents and of which of them are for training; origin: `Opened.origin`."""
    parts = [origin["source"], config_data.split, config_data.eval_fraction]
    if config_data.eval_source:
        parts += [origin["eval_source"], config_data.withhold]
    return content_key(*parts)


class Documents:
    """Which training documents belong to a cluster; held-out text is the same for all clusters.

    Attributes:
      clustering: fingerprint of the clustering.
      count: how many clusters there are.
    """

    def __init__(self, folder, clustering, corpus, count, clusters):
        self.folder, self.clustering, self.corpus = Path(folder), clustering, corpus
        self.count, self.clusters = count, clusters

    def contents(self):
        """What is stored, without the checksum."""
        return {
            "clustering": self.clustering,
            "corpus": self.corpus,
            "count": self.count,
            "clusters": self.clusters,
        }

    def to_json(self):
        """The text of documents.json."""
        stored = self.contents()
        return json.dumps({"sum": content_key(stored), **stored}, indent=0, sort_keys=True) + "\n"

    @classmethod
    def load(cls, folder):
        """Raises UsageError where there is no clustering or its file is damaged."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise UsageError(
                f"config.data.clusters={str(folder)!r} holds no clustering (no {FILE}); make one"
                " with --mode=cluster"
            )
        try:
            stored = json.loads(path.read_text())
            total = stored.pop("sum")
            found = cls(folder, **stored)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path} is damaged ({error}); run --mode=cluster again") from error
        if content_key(found.contents()) != total:
            raise UsageError(f"{path} is damaged (its checksum differs); run --mode=cluster again")
        return found

    def members(self, cluster, key):
        """The Members of a cluster of the corpus `key`; UsageError for another or none."""
        where = f"config.data.clusters={str(self.folder)!r}"
        if cluster >= self.count:
            raise UsageError(
                f"config.data.cluster={cluster}: {where} has {self.count} clusters, from 0"
            )
        if key != self.corpus:
            raise UsageError(
                f"{where} is a clustering of other documents; give the config.data settings that"
                " it was made with, or run --mode=cluster again"
            )
        chosen = frozenset(bytes.fromhex(d) for d, c in self.clusters.items() if c == cluster)
        return Members(self.clustering, cluster, chosen)


class Members:
    """The documents of one cluster. `key` tells them from every other selection.

    Attributes:
      origin: {"clustering": its fingerprint, "cluster": number}, which a run records.
    """

    def __init__(self, clustering, cluster, digests):
        self.origin = {"clustering": clustering, "cluster": cluster}
        self.key, self._digests = content_key(clustering, cluster), digests

    def pick(self, pieces):
        """Of ("train" or "eval", name, bytes) all that is held out, and the cluster's own."""
        for part, name, data in pieces:
            if part == "eval" or document_digest(data) in self._digests:
                yield part, name, data


def members(config_data, origin):
    """The Members that `config_data` asks for, or None for all documents; origin: of the text."""
    if config_data.cluster < 0:
        return None
    documents = Documents.load(config_data.clusters)
    return documents.members(config_data.cluster, corpus_key(origin, config_data))
