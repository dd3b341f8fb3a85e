"""Sources made of sources: a mixture of several, and documents cut into pieces."""

from efx.data import sources
from efx.data.disk_cache import content_key
from efx.errors import UsageError


def parse(name, argument):
    """The components of `mix:A,B,...`, each the name of a source; UsageError if one cannot be."""
    components = argument.split(",")
    for component in components:
        kind = sources.parse(component)[0]
        if kind in ("mix", "tokens"):
            raise UsageError(f"{name}: {component!r} cannot be part of a mixture; use text sources")
    if len(set(components)) < len(components) or len(components) < 2:
        raise UsageError(
            f"{name}: a mixture needs two or more different parts, separated by commas"
        )
    return components


class Mixture:
    """The documents of several sources, one source after another.

    Each document names its component, for reports only: training never reads it.
    """

    def __init__(self, name, components):
        self.name, self._components = name, components

    def identity(self):
        """Hash of the content of all components."""
        return content_key("mix", [source.identity() for _, source in self._components])

    def documents(self):
        """Yields the Documents of every component."""
        for component, source in self._components:
            for document in source.documents():
                yield sources.Document(document.name, document.data, component)


class Topics:
    """Python's language reference, as `help()` shows it: prose with a little code in it."""

    def __init__(self, name, max_bytes):
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UsageError(
                f"{name}: this Python does not include its language reference; use text:PATH"
            ) from error
        self.name, self._topics, self._max_bytes = name, topics, max_bytes

    def identity(self):
        """Hash of the texts."""
        return content_key("pydoc", [d.data.decode() for d in self.documents()])

    def documents(self):
        """Yields a Document a topic, by name."""
        topics = (
            sources.Document(f"topic {topic}", self._topics[topic].encode())
            for topic in sorted(self._topics)
        )
        return sources.limited(topics, self._max_bytes)


class Pieces:
    """The documents of a source, each cut into pieces of at most `size` bytes, 16 or more.

    A piece ends after a line if one ends in its second half, and never inside a character.
    """

    def __init__(self, source, size):
        self.name, self._source, self._size = source.name, source, size

    def identity(self):
        """Hash of the content and of where it is cut."""
        return content_key("pieces", self._size, self._source.identity())

    def documents(self):
        """Yields the pieces as Documents."""
        for document in self._source.documents():
            start = 0
            while start < len(document.data):
                piece = self._first_piece(document.data[start : start + self._size + 1])
                name = document.name if not start else f"{document.name} from byte {start}"
                yield sources.Document(name, piece, document.component)
                start += len(piece)

    def _first_piece(self, data):
        """The first piece of `data`, which is one byte longer than a piece if more text follows."""
        if len(data) <= self._size:
            return data
        newline = data.rfind(b"\n", self._size // 2, self._size)
        if newline >= 0:
            return data[: newline + 1]
        return sources.whole_characters(data[: self._size])
