"""The documents that a `config.data` block names, as texts: for clustering and for evaluation."""

from efx.data import sources
from efx.data.opened import OpenedTexts
from efx.errors import UsageError


class SplitDocuments:
    """The documents of a corpus, split, in order.

    Attributes:
      train: list of sources.Document, each text once.
      held_out: list of sources.Document, in the order of evaluation.
      key: hash of the documents and of which of them are for training.
      components: names of the components of a mixture, sorted; empty without one.

    Raises UsageError for a split that is not of whole documents, or a source that is no text.
    """

    def __init__(self, config_data):
        for key in ("source", "eval_source"):
            source = getattr(config_data, key)
            if source.startswith("tokens:"):
                raise UsageError(f"config.data.{key}={source!r}: clustering needs a source of text")
        opened = OpenedTexts(config_data)
        if opened.origin["held_out"] and config_data.split != "documents":
            raise UsageError(
                f"config.data.split={config_data.split!r}: clustering needs whole documents; "
                "use config.data.split=documents"
            )
        self.key = opened.key()
        texts = [text for text in (opened.source, opened.eval_source) if text]
        component_of = {
            sources.document_digest(document.data): document.component
            for text in texts
            for document in text.documents()
        }
        train, self.held_out = {}, []
        for split, name, data in opened.pieces():
            digest = sources.document_digest(data)
            document = sources.Document(name, data, component_of[digest])
            if split == "eval":
                self.held_out.append(document)
            else:
                train.setdefault(digest, document)
        self.train = list(train.values())
        self.components = sorted(
            {document.component for document in self.train + self.held_out} - {""}
        )
