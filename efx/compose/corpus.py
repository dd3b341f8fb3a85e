"""The documents of a corpus as texts, for what looks at whole documents: clustering, evaluation."""

from typing import NamedTuple

from efx.data import clusters, sources, split
from efx.data.opened import Opened
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
        split.check(config_data.split, config_data.eval_fraction)
        clusters.check(config_data)
        for key in ("source", "eval_source"):
            if getattr(config_data, key).startswith("tokens:"):
                raise UsageError(
                    f"config.data.{key}={getattr(config_data, key)!r}: clustering needs text"
                )
        splits = not config_data.eval_source or config_data.withhold
        if splits and config_data.split != "documents":
            raise UsageError(
                f"config.data.split={config_data.split!r}: clusters are of whole documents, which"
                " takes config.data.split=documents"
            )
        opened = Opened(config_data)
        self.key = clusters.corpus_key(opened.origin, config_data)
        texts = [one for one in (opened.source, opened.eval_source) if one]
        every = (document for text in texts for document in text.documents())
        parts = {sources.document_digest(d.data): d.part for d in every}
        self.train, self.eval, seen = [], [], set()
        for part, name, data in opened.pieces():
            digest = sources.document_digest(data)
            text = Text(digest, name, data, parts[digest])
            if part == "eval":
                self.eval.append(text)
            elif digest not in seen:
                seen.add(digest)
                self.train.append(text)
        self.parts = sorted({text.part for text in self.train + self.eval} - {""})
