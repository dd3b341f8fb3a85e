"""The documents of a `config.data` block as texts, for clustering and evaluation."""

from efx.data import sources
from efx.data.opened import OpenedTexts
from efx.errors import UsageError


class SplitDocuments:
    """The documents of a corpus, in order.

    Attributes:
      train: list of sources.Document, each text once.
      held_out: list of sources.Document, in the order of evaluation.
      key: hash of the documents and their split.
      components: sorted names of the components of a mixture; empty for other sources.

    Raises: UsageError if the source is no text, or documents are split in the middle.
    """

    def __init__(self, config_data):
        for key in ("source", "eval_source"):
            source = getattr(config_data, key)
            if source.startswith("tokens:"):
                raise UsageError(f"config.data.{key}={source!r}: clustering needs text; use text:")
        opened = OpenedTexts(config_data)
        if opened.origin["held_out"] and config_data.split != "documents":
            raise UsageError(
                f"config.data.split={config_data.split!r}: clustering needs whole documents; "
                "use config.data.split=documents"
            )
        self.key = opened.key()
        component_of, train, self.held_out = {}, {}, []
        for text in filter(None, (opened.source, opened.eval_source)):
            for document in text.documents():
                component_of[sources.document_digest(document.data)] = document.component
        for split, name, data in opened.pieces():
            digest = sources.document_digest(data)
            document = sources.Document(name, data, component_of[digest])
            if split == "eval":
                self.held_out.append(document)
            else:
                train.setdefault(digest, document)
        self.train = list(train.values())
        self.components = sorted(set(component_of.values()) - {""})
