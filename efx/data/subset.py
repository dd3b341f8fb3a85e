"""A part of the training documents, listed in a file by the hash of their text.

`config.data.subset` names the file; what is held out stays the same. Reading the list takes nothing
but the file, so a run on it can be wherever the corpus is (an expert of cBTM is one).
"""

import json
from pathlib import Path

from efx.data.cache import content_key
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
        """What the file holds."""
        return json.dumps({"sum": self.key, "documents": sorted(self.digests)}, indent=0) + "\n"

    @classmethod
    def load(cls, path):
        """Raises UsageError where there is no list or its file is damaged."""
        where = f"config.data.subset={str(path)!r}"
        if not Path(path).is_file():
            raise UsageError(
                f"{where}: there is no such file; --mode=cluster makes one for each cluster"
            )
        try:
            stored = json.loads(Path(path).read_text())
            subset = cls(stored["documents"])
            sound = subset.key == stored["sum"]
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise UsageError(f"{where} is damaged, or no list of documents; make it again")
        return subset

    def pick(self, pieces):
        """Of ("train" or "eval", name, bytes) all that is held out, and what is listed.

        Raises UsageError, after the last piece, if something listed was not there to train on.
        """
        missing = set(self.digests)
        for part, name, data in pieces:
            digest = document_digest(data).hex()
            if part == "eval":
                yield part, name, data
            elif digest in self.digests:
                missing.discard(digest)
                yield part, name, data
        if missing:
            raise UsageError(
                f"config.data.subset lists {len(self.digests)} documents, of which {len(missing)}"
                " are no training documents here; give the config.data settings that the list was"
                " made with, or make it again"
            )
