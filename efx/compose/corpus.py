"""The documents of a corpus as texts, for what looks at whole documents: clustering, evaluation."""

from typing import NamedTuple

from efx.data import clusters, corpus, sources
from efx.data.cache import cache_root
from efx.errors import UsageError


class Text(NamedTuple):
    """A document, and the part of a mixture that it is from ("" without a mixture)."""

    digest: bytes
    name: str
    data: bytes
    part: str

    @property
    def text(self):
        return self.data.decode("utf-8", "replace")


class Corpus:
    """The documents that a `config.data` block names, split, in order.

    Attributes:
      train: list of Text, each text once.
      eval: list of Text, as evaluation sees them.
      key: `clusters.corpus_key`.
      parts: names of the parts of the mixture, in order; empty without one.

    Raises UsageError for a split that is not of whole documents, or a source that is no text.
    """

    def __init__(self, config_data):
        corpus.check_split(config_data.split, config_data.eval_fraction)
        clusters.check(config_data)
        if sources.parse(config_data.source)[0] == "tokens":
            raise UsageError(f"config.data.source={config_data.source!r}: clustering needs text")
        if config_data.split != "documents":
            raise UsageError(
                f"config.data.split={config_data.split!r}: clusters are of whole documents, which"
                " takes config.data.split=documents"
            )
        source = sources.open_source(config_data, cache_root(config_data.cache_dir))
        self.key = clusters.corpus_key(source.identity(), config_data)
        parts = {sources.document_digest(d.data): d.part for d in source.documents()}
        self.train, self.eval, seen = [], [], set()
        pieces = corpus.split_documents(source, "documents", config_data.eval_fraction)
        for split, name, data in pieces:
            digest = sources.document_digest(data)
            text = Text(digest, name, data, parts[digest])
            if split == "eval":
                self.eval.append(text)
            elif digest not in seen:
                seen.add(digest)
                self.train.append(text)
        self.parts = sorted({text.part for text in self.train + self.eval} - {""})
