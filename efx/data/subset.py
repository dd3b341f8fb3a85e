"""A subset of the training documents, listed in a file by the hash of their text.

`config.data.subset` names the file. The held-out text stays the same. A run needs only this file
and the corpus, so it can be on any machine that has both (an expert of cBTM is such a run).
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
        """Read a file. Raises UsageError if it is missing or damaged."""
        setting = f"config.data.subset={str(path)!r}"
        path = io.local_path(path, "config.data.subset")
        try:
            # Not limited in size: the list of a large corpus is long.
            stored = io.parse_json(path.read_text())
            subset = cls(stored["documents"])
            if subset.key != stored["sum"]:
                raise ValueError("it does not match its checksum")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{setting} is missing or damaged ({error}); --mode=cluster writes such a file for "
                "each cluster"
            ) from error
        return subset

    def select(self, pieces):
        """The pieces ("train" or "eval", name, bytes) that are held out or listed.

        Raises:
          UsageError: after the last piece, if a listed document was not among them.
        """
        missing = set(self.digests)
        for split, name, data in pieces:
            digest = document_digest(data).hex()
            if split == "eval" or digest in self.digests:
                yield split, name, data
                if split == "train":
                    missing.discard(digest)
        if missing:
            raise UsageError(
                f"config.data.subset: {len(missing)} of its {len(self.digests)} documents are "
                "not training documents here; use the config.data settings of its clustering, "
                "or run --mode=cluster again"
            )
