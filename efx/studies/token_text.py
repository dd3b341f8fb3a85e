"""The tokens of a text as a reader sees them: pieces of whole characters."""

from typing import NamedTuple


class Piece(NamedTuple):
    """Characters and the tokens that make them: one token with its characters as a rule, several
    where a character is split over them.

    Attributes:
      text: bytes that are no UTF-8 are written `\\xff`, tokens without a text `⟨7⟩`, the end of a
        document `⟨end⟩`.
      count: how many tokens; the pieces of a text together have all.
    """

    text: str
    count: int


def pieces(tokenizer, ids):
    """[Piece] of these tokens."""
    ids, table = [int(i) for i in ids], tokenizer.token_bytes()
    if table is None:
        return list(_streamed(tokenizer, ids))
    result, start = [], 0
    while start < len(ids):
        text, count = _whole(table, ids, start)
        if not text:
            text = "⟨end⟩" if ids[start] == tokenizer.eot else f"⟨{ids[start]}⟩"
        result.append(Piece(text, count))
        start += count
    return result


def _whole(table, ids, start):
    """(text, count) of the fewest tokens from `start` on whose bytes end with a whole character."""
    data = b""
    for count, i in enumerate(ids[start:], 1):
        data += table[i]
        try:
            return data.decode("utf-8"), count
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                break
    return table[ids[start]].decode("utf-8", "backslashreplace"), 1


def _streamed(tokenizer, ids):
    """Of a tokenizer that joins tokens by rules of its own: a token has the text that it adds."""
    decoder, count = tokenizer.stream_decoder(), 0
    for i in ids:
        text, count = decoder.feed(i), count + 1
        if text:
            yield Piece(text, count)
            count = 0
    for i in ids[len(ids) - count :]:
        yield Piece(f"⟨{i}⟩", 1)
