"""Clusters of documents without labels: tf-idf, truncated SVD, balanced k-means.

After cBTM (arXiv 2303.14177, section 2.2): tf-idf of words without English stop words, in which
all numbers are one word; an SVD to 100 dimensions; vectors of length one; k-means with clusters of
equal size. A new text belongs to the nearest centre.
"""

import dataclasses
import functools
import json
import pathlib
import re

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from efx import io
from efx.config.run import ClusterConfig
from efx.config.schema import make
from efx.data.disk_cache import content_key
from efx.errors import UsageError, extra

try:
    from k_means_constrained import KMeansConstrained
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer
    from sklearn.metrics.pairwise import euclidean_distances
    from sklearn.preprocessing import normalize
except ImportError as error:
    raise UsageError(
        f"clustering needs {extra('studies')}: {error.name} is not installed"
    ) from None

ARRAYS, ABOUT = "clustering.safetensors", "clustering.json"
_WORD = re.compile(r"\b\w\w+\b")
_NUMBER = "#NUMBER"


def words(text):
    """Return the words of a text, in lower case, without English stop words."""
    normalised = (_NUMBER if word[0].isdigit() else word for word in _WORD.findall(text.lower()))
    return [word for word in normalised if word not in ENGLISH_STOP_WORDS]


@dataclasses.dataclass(frozen=True)
class Clustering:
    """k centres in the space of embedded texts.

    Attributes:
      centres: float32[k, R].
      vocabulary: the words of the tf-idf. idf: float32[words]. components: float32[R, words].
      about: JSON-able facts; "documents" is the key of the clustered documents.
    """

    vocabulary: list
    idf: np.ndarray
    components: np.ndarray
    centres: np.ndarray
    about: dict

    @property
    def count(self):
        return len(self.centres)

    @functools.cached_property
    def _tfidf(self):
        tfidf = TfidfVectorizer(analyzer=words, vocabulary=self.vocabulary)
        tfidf.idf_ = self.idf.astype(np.float64)
        return tfidf

    def embed(self, texts):
        """Return float32[n, R], rows of length one; zeros for a text without known words."""
        return _embed(self._tfidf.transform(texts), self.components)

    def distances(self, texts):
        """Return float32[n, k], squared distances of the embedded texts from the centres."""
        return euclidean_distances(self.embed(texts), self.centres, squared=True)

    def save(self, folder):
        """Write the two files into an existing directory."""
        arrays = {"idf": self.idf, "components": self.components, "centres": self.centres}
        save_file(arrays, str(pathlib.Path(folder) / ARRAYS))
        about = {"vocabulary": self.vocabulary, **self.about}
        (pathlib.Path(folder) / ABOUT).write_text(json.dumps(about, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, folder):
        """Read a clustering; UsageError if there is none, or it is damaged."""
        folder = pathlib.Path(folder)
        for name in (ARRAYS, ABOUT):
            if not (folder / name).is_file():
                raise UsageError(f"{folder} has no clustering (no {name}): run --mode=cluster")
        try:
            about = io.read_json(folder / ABOUT)
            return cls(about.pop("vocabulary"), **load_file(str(folder / ARRAYS)), about=about)
        except (ValueError, TypeError, KeyError, SafetensorError) as error:
            raise UsageError(
                f"the clustering in {folder} is damaged: delete it and run --mode=cluster again"
            ) from error


def _embed(tfidf, components):
    return normalize(tfidf @ components.T.astype(np.float64)).astype(np.float32)


def fit_clustering(texts, config, seed):
    """Cluster texts by a `config.cluster` block; returns (Clustering, labels int[n]).

    The clusters of the fitted texts have equal sizes (floor or ceiling of n / k). Texts beyond
    `config.fit_documents` join the nearest centre.
    """
    config = make(ClusterConfig, config)
    n, k = len(texts), config.count
    if n < k:
        raise UsageError(
            f"config.cluster.count={k}: there are {n} different training documents; use fewer "
            "clusters, or a smaller config.data.document_bytes"
        )
    if config.fit_documents < k:
        raise UsageError(
            f"config.cluster.fit_documents={config.fit_documents}: must be at least "
            f"config.cluster.count={k}"
        )
    state = int(content_key("clusters", seed)[:8], 16)
    rng = np.random.default_rng(state)
    fitted = np.sort(rng.permutation(n)[: config.fit_documents])
    min_documents = min(config.min_documents, len(fitted))
    tfidf = TfidfVectorizer(analyzer=words, max_features=config.features, min_df=min_documents)
    try:
        sparse = tfidf.fit_transform([texts[i] for i in fitted])
    except ValueError:
        sparse = None  # no word is frequent enough
    if sparse is None or sparse.shape[1] < 2:
        raise UsageError(
            f"config.cluster.min_documents={config.min_documents}: fewer than two words occur in "
            f"so many of the {len(fitted)} documents; use a smaller number"
        )
    dimensions = min(config.dimensions, *sparse.shape)
    svd = TruncatedSVD(dimensions, random_state=state).fit(sparse)
    embedded = _embed(sparse, svd.components_)
    if config.method == "random":
        fitted_labels = rng.permutation(np.arange(len(fitted)) % k)
    elif k == 1:
        fitted_labels = np.zeros(len(fitted), np.int64)
    else:
        kmeans = KMeansConstrained(
            k,
            size_min=len(fitted) // k,
            size_max=-(-len(fitted) // k),
            n_init=config.restarts,
            max_iter=config.iterations,
            random_state=state % 2**31,
            n_jobs=1,
        )
        fitted_labels = kmeans.fit_predict(embedded.astype(np.float64))
    clustering = Clustering(
        tfidf.get_feature_names_out().tolist(),
        tfidf.idf_.astype(np.float32),
        np.ascontiguousarray(svd.components_, np.float32),
        np.stack([embedded[fitted_labels == j].mean(0) for j in range(k)]),
        {"dimensions": dimensions, "method": config.method},
    )
    if config.method == "random":
        labels = rng.permutation(np.arange(n) % k)
    else:
        labels = clustering.distances(texts).argmin(1)
    labels[fitted] = fitted_labels
    return clustering, labels
