"""Clusters of documents without labels: tf-idf, truncated SVD, balanced k-means.

After cBTM (arXiv 2303.14177, section 2.2): tf-idf of words without English stop words, in which
all numbers are one word; an SVD to 100 dimensions; vectors of length one; k-means with clusters of
equal size. A new text belongs to the nearest centre.
"""

import dataclasses
import json
import re

import numpy as np
from k_means_constrained import KMeansConstrained
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.preprocessing import normalize

from efx import io
from efx.data.disk_cache import content_key
from efx.errors import UsageError

ARRAYS, ABOUT = "clustering.safetensors", "clustering.json"
WORDS = 50_000  # the most frequent, each in at least two documents
DIMENSIONS = 100  # of the truncated SVD
FIT_DOCUMENTS = 20_000  # the others join the nearest cluster


def words(text):
    """Return the words of a text in lower case, without English stop words."""
    found = re.findall(r"\b\w\w+\b", text.lower())
    normalised = ("#NUMBER" if word[0].isdigit() else word for word in found)
    return [word for word in normalised if word not in ENGLISH_STOP_WORDS]


@dataclasses.dataclass(frozen=True)
class Clustering:
    """k centres in the space of embedded texts.

    Attributes:
      tfidf: a fitted TfidfVectorizer.
      components: [R, words]. centres: float32[k, R].
      about: JSON-able facts about the clustered documents.
    """

    tfidf: TfidfVectorizer
    components: np.ndarray
    centres: np.ndarray
    about: dict = dataclasses.field(default_factory=dict)

    def distances(self, texts):
        """Return float32[n, k]: squared distances of the embedded texts from the centres."""
        embedded = _embed(self.tfidf.transform(texts), self.components)
        return euclidean_distances(embedded, self.centres, squared=True)

    def save(self, folder):
        """Write the two files into an existing directory."""
        arrays = {"idf": self.tfidf.idf_, "components": self.components, "centres": self.centres}
        save_file(arrays, str(folder / ARRAYS))
        about = {"vocabulary": self.tfidf.get_feature_names_out().tolist(), **self.about}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, folder):
        """Read a clustering; UsageError if it is missing or damaged."""
        try:
            about, arrays = io.read_json(folder / ABOUT), load_file(str(folder / ARRAYS))
            tfidf = TfidfVectorizer(analyzer=words, vocabulary=about.pop("vocabulary"))
            tfidf.idf_ = arrays["idf"]
            return cls(tfidf, arrays["components"], arrays["centres"], about)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise UsageError(
                f"{folder}: its clustering is missing or damaged; delete this directory and run "
                "--mode=cluster"
            ) from error


def _embed(sparse, components):
    """Return float32[n, R], rows of length one; zeros for a text without known words."""
    return normalize(sparse @ components.T.astype(np.float64)).astype(np.float32)


def fit_clustering(texts, config, seed):
    """Cluster texts by `config.cluster`; returns (Clustering, labels int[n]).

    The clusters of the fitted texts have equal sizes (floor or ceiling of n / k).
    """
    k, fit_count = config.count, min(len(texts), FIT_DOCUMENTS)
    if fit_count < k:
        raise UsageError(
            f"config.cluster.count={k}: there are {fit_count} different training documents to fit; "
            "use fewer clusters, or a smaller config.data.document_bytes"
        )
    state = int(content_key("clusters", seed)[:8], 16)
    rng = np.random.default_rng(state)
    fitted = np.sort(rng.permutation(len(texts))[:fit_count])
    tfidf = TfidfVectorizer(analyzer=words, max_features=WORDS, min_df=2)
    try:
        sparse = tfidf.fit_transform([texts[i] for i in fitted])
        svd = TruncatedSVD(min(DIMENSIONS, *sparse.shape), random_state=state).fit(sparse)
    except ValueError as error:
        raise UsageError(
            f"config.data.source: fewer than two words occur in two of the {fit_count} documents; "
            "use more text"
        ) from error
    embedded = _embed(sparse, svd.components_)
    is_random = config.method == "random"
    if is_random or k == 1:
        fitted_labels = rng.permutation(np.arange(fit_count) % k)
    else:
        kmeans = KMeansConstrained(
            k,
            size_min=fit_count // k,
            size_max=-(-fit_count // k),
            n_init=3,
            max_iter=20,
            random_state=state % 2**31,
            n_jobs=1,
        )
        fitted_labels = kmeans.fit_predict(embedded.astype(np.float64))
    centres = np.stack([embedded[fitted_labels == j].mean(0) for j in range(k)])
    clustering = Clustering(tfidf, np.ascontiguousarray(svd.components_, np.float32), centres)
    if is_random:
        labels = rng.permutation(np.arange(len(texts)) % k)
    else:
        labels = clustering.distances(texts).argmin(1)
    labels[fitted] = fitted_labels
    return clustering, labels
