"""A subset of the training documents, listed in a file by the hash of their text.

`config.data.subset` names the file; what is held out stays the same. The list needs only this file,
so such a run can be on any machine that has the corpus (an expert of cBTM is such a run).
"""

import json

from efx import io
from efx.data.disk_cache import content_key
from efx.data.sources import document_digest
from efx.errors import UsageError


class Subset:
    """The listed documents.

    Attributes:
      digests: their `document_digest`s, in hexadecimal.
      key: hash of the list.
    """

    def __init__(self, digests):
        self.digests = frozenset(digests)
        self.key = content_key(sorted(self.digests))

    def to_json(self):
        """The contents of the file."""
        return json.dumps({"sum": self.key, "documents": sorted(self.digests)}, indent=0) + "\n"

    @classmethod
    def load(cls, path):
        """Raises UsageError if the file is missing or damaged."""
        setting = f"config.data.subset={str(path)!r}"
        path = io.local_path(path, "config.data.subset")
        if not path.is_file():
            raise UsageError(
                f"{setting}: there is no such file; --mode=cluster writes one for each cluster"
            )
        try:
            # A list of all documents of a large corpus is large.
            stored = io.parse_json(path.read_text())
            subset = cls(stored["documents"])
            sound = subset.key == stored["sum"]
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise UsageError(
                f"{setting} is damaged, or not a list of documents; run --mode=cluster again"
            )
        return subset

    def pick(self, pieces):
        """Of the pieces ("train" or "eval", name, bytes) all held-out and all listed ones.

        Raises UsageError, after the last piece, if a listed document was not among them.
        """
        missing = set(self.digests)
        for split, name, data in pieces:
            digest = document_digest(data).hex()
            if split == "eval":
                yield split, name, data
            elif digest in self.digests:
                missing.discard(digest)
                yield split, name, data
        if missing:
            raise UsageError(
                f"config.data.subset: {len(missing)} of its {len(self.digests)} documents are "
                "not training documents here; use the config.data settings of its clustering, "
                "or run --mode=cluster again"
            )
