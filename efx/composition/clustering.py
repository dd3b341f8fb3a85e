"""Clusters of documents without labels: tf-idf, truncated SVD, balanced k-means.

After cBTM (Gururangan et al. 2023, arXiv 2303.14177, section 2.2): words weighted by tf-idf,
numbers made one word, English stop words left out; an SVD down to 100 dimensions; vectors of length
one; k-means whose clusters have equal sizes while it is fitted. A new text belongs to the nearest
centre. A clustering is stored as arrays (safetensors) and JSON.
"""

import json
import re
from pathlib import Path

import numpy as np

from efx import io
from efx.config.run import ClusterConfig
from efx.config.schema import make
from efx.data.disk_cache import content_key
from efx.errors import UsageError, extra

ARRAYS, ABOUT = "clustering.safetensors", "clustering.json"
_WORD = re.compile(r"\b\w\w+\b")
_NUMBER = "#NUMBER"
_AT_ONCE = 4096  # texts embedded at a time


def _check_installed():
    try:
        import k_means_constrained  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"clustering needs {extra('studies')}: {error.name} is not installed"
        ) from None


def words(text):
    """The words of a text, lower case, without English stop words; numbers are all one word."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    normalised = (_NUMBER if word[0].isdigit() else word for word in _WORD.findall(text.lower()))
    return [word for word in normalised if word not in ENGLISH_STOP_WORDS]


class Clustering:
    """k centres in the space of embedded texts.

    Attributes:
      centres: float32[k, R].
      vocabulary: the words of the tf-idf; idf: float32[words]; components: float32[R, words].
      about: JSON-able facts, such as `documents`, the key of the clustered documents.
      fingerprint: hash of everything that decides the cluster of a text.
    """

    def __init__(self, vocabulary, idf, components, centres, about):
        _check_installed()
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.vocabulary, self.about = list(vocabulary), about
        self.idf, self.components, self.centres = (
            np.ascontiguousarray(x, np.float32) for x in (idf, components, centres)
        )
        self._tfidf = TfidfVectorizer(analyzer=words, vocabulary=self.vocabulary)
        self._tfidf.idf_ = self.idf.astype(np.float64)

    @property
    def count(self):
        return len(self.centres)

    @property
    def fingerprint(self):
        arrays = [x.tobytes().hex() for x in (self.idf, self.components, self.centres)]
        return content_key(self.vocabulary, *arrays)

    def embed(self, texts):
        """float32[n, R], rows of length one; zero for a text without a known word."""
        texts, rows = list(texts), [np.zeros((0, len(self.components)), np.float32)]
        for i in range(0, len(texts), _AT_ONCE):
            sparse = self._tfidf.transform(texts[i : i + _AT_ONCE])
            rows.append(_unit(sparse @ self.components.T.astype(np.float64)))
        return np.concatenate(rows)

    def distances(self, texts):
        """float32[n, k]: squared distances of the embedded texts from the centres.

        A text without a known word is embedded at the origin, nearest to the broadest cluster.
        """
        return squared_distances(self.embed(texts), self.centres)

    def save(self, folder):
        """Writes the two files into a folder that exists."""
        from safetensors.numpy import save_file

        names = ("idf", "components", "centres")
        save_file({name: getattr(self, name) for name in names}, str(Path(folder) / ARRAYS))
        about = {"fingerprint": self.fingerprint, "vocabulary": self.vocabulary, **self.about}
        (Path(folder) / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder):
        """Raises UsageError if there is no clustering, or it is damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        for name in (ARRAYS, ABOUT):
            if not (folder / name).is_file():
                raise UsageError(f"{folder} has no clustering (no {name}): run --mode=cluster")
        try:
            about = io.read_json(folder / ABOUT)
            stored, vocabulary = about.pop("fingerprint"), about.pop("vocabulary")
            clustering = cls(vocabulary, about=about, **load_file(str(folder / ARRAYS)))
            sound = clustering.fingerprint == stored
        except UsageError:
            raise
        except (ValueError, TypeError, KeyError, SafetensorError):
            sound = False
        if not sound:
            raise UsageError(f"the clustering in {folder} is damaged: run --mode=cluster again")
        return clustering


def squared_distances(x, centres):
    """||x_i - c_j||^2 [n, k] of two arrays of rows."""
    products = x @ centres.T
    norms = np.square(x).sum(1)[:, None] + np.square(centres).sum(1)[None]
    return np.maximum(norms - 2 * products, 0).astype(np.float32)


def _unit(x):
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return (x / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def fit_clustering(texts, config, seed):
    """(Clustering, labels int64[n]) of texts, by a `config.cluster` block.

    The clusters of the texts that were fitted on have equal sizes (floor or ceiling of n / k). If
    there are more texts than `config.fit_documents`, the others belong to the nearest centre.

    Raises UsageError: fewer texts than clusters, or no word in common.
    """
    config = make(ClusterConfig, config)
    n, k = len(texts), config.count
    if min(n, config.fit_documents) < k:
        fewer = f"{n} different training documents" if n < k else "config.cluster.fit_documents"
        raise UsageError(
            f"config.cluster.count={k}: must be at most {fewer}"
            + (
                f"={config.fit_documents}"
                if n >= k
                else ("; config.data.document_bytes splits them into more")
            )
        )
    _check_installed()
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    state = int(content_key("clusters", seed)[:8], 16)
    rng = np.random.default_rng(state)
    chosen = np.sort(rng.permutation(n)[: config.fit_documents])
    tfidf = TfidfVectorizer(
        analyzer=words, max_features=config.features, min_df=min(config.min_documents, len(chosen))
    )
    try:
        sparse = tfidf.fit_transform([texts[i] for i in chosen])
    except ValueError as error:
        raise UsageError(
            f"config.cluster.min_documents={config.min_documents}: no word occurs in that many "
            f"of the {len(chosen)} documents; use a smaller number"
        ) from error
    if sparse.shape[1] < 2:
        raise UsageError(
            f"config.cluster.min_documents={config.min_documents}: only one word occurs in "
            f"that many of the {len(chosen)} documents, and clustering needs two; use a "
            "smaller number"
        )
    # An SVD has no more dimensions than the smaller side of the matrix.
    dimensions = min(config.dimensions, *sparse.shape)
    svd = TruncatedSVD(dimensions, random_state=state).fit(sparse)
    embedded = _unit(sparse @ svd.components_.T)
    if config.method == "random":
        fitted = rng.permutation(np.arange(len(chosen)) % k)
    else:
        fitted = _balanced(embedded, config, state)
    centres = np.stack([embedded[fitted == j].mean(0) for j in range(k)])
    about = {"dimensions": dimensions, "words": len(tfidf.idf_)}
    vocabulary = tfidf.get_feature_names_out().tolist()
    clustering = Clustering(vocabulary, tfidf.idf_, svd.components_, centres, about)
    if config.method == "random":
        labels = rng.permutation(np.arange(n) % k)
    else:
        labels = clustering.distances(texts).argmin(1)
    labels[chosen] = fitted
    return clustering, labels


def _balanced(embedded, config, state):
    n, k = len(embedded), config.count
    if k == 1:
        return np.zeros(n, np.int64)
    from k_means_constrained import KMeansConstrained

    model = KMeansConstrained(
        k,
        size_min=n // k,
        size_max=-(-n // k),
        n_init=config.restarts,
        max_iter=config.iterations,
        random_state=state % 2**31,
        n_jobs=1,
    )
    return model.fit_predict(embedded.astype(np.float64)).astype(np.int64)


def purity(labels, components):
    """Fraction of documents that are of their cluster's most frequent component."""
    labels, components = np.asarray(labels), np.asarray(components)
    largest = [
        np.unique(components[labels == j], return_counts=True)[1].max() for j in np.unique(labels)
    ]
    return float(np.sum(largest) / len(labels))
