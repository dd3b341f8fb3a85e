"""The text of each token."""


def texts(tokenizer, ids):
    """Return one text for each token.

    A character split over several tokens is the text of the last one; bytes that are no UTF-8 are
    written `\\xff`, tokens without a text `⟨7⟩`, the end of a document `⟨end⟩`.
    """
    decoder, found, pending = tokenizer.stream_decoder(), [], 0
    for i in map(int, ids):
        text = "⟨end⟩" if i == tokenizer.eot else decoder.feed(i)
        found.append(text or "")
        pending = 0 if text else pending + 1
    for k in range(len(found) - pending, len(found)):
        found[k] = f"⟨{int(ids[k])}⟩"
    return found
