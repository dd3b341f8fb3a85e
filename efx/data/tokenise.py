"""From documents to token shards in the cache, and to a trained tokenizer.

The shards hold all documents of a source; which of them are held out is decided where they are read
(`held_out`), so the text is tokenised once for every split. A process that is stopped resumes after
its last shard.
"""

import contextlib
import itertools
import json
import logging
import shutil
import sys
import time

import numpy as np

from efx import io
from efx.data import bpe, tokenizers
from efx.data.disk_cache import cache_write_error, cached_folder, content_key, locked
from efx.data.shards import ROW, ShardWriter, is_intact, text_row, write_meta
from efx.errors import UsageError
from efx.logging import Progress

log = logging.getLogger(__name__)

# Raise these when the same text gives other tokens, or another tokenizer, than before.
_VERSION, _TOKENIZER_VERSION = 1, 6
_SHARD_TOKENS = 1 << 24
_SAMPLE_BYTES = 1 << 27  # of training text that a tokenizer is trained on
_LOG_SECONDS, _LIVE_SECONDS = 5, 0.2  # between two lines, and two updates of the live one


@contextlib.contextmanager
def _reading(work, parts):
    """Show how much of a list of `sources.Part` was read, the rate, and the time left: beside a
    spinner in a terminal, else by a line every few seconds.

    Yields: a function that counts bytes.
    """
    total, done, start = sum(part.size for part in parts), 0, time.monotonic()
    shown = start
    with Progress(stream=sys.stderr) as progress, progress.phase(work) as show:
        show, seconds = (show, _LIVE_SECONDS) if progress.is_live else (log.info, _LOG_SECONDS)

        def count(size):
            nonlocal done, shown
            done += size
            now = time.monotonic()
            if now - shown < seconds:
                return
            shown, rate = now, done / (now - start)
            show(
                f"{work}: {done / 1e6:.0f} of some {total / 1e6:.0f} MB, {rate / 1e6:.2g} MB/s, "
                f"{max(0, total - done) / rate:.0f} s left"
            )

        yield count


# ---- tokens --------------------------------------------------------------------------------------


def prepare(source, tokenizer, root, shard=(1, 1)):
    """The folder with the token shards of a `Source`.

    None if other machines have parts left to prepare.

    Args:
      root: the cache folder.
      shard: (I, N): prepare each N-th part from the I-th on.

    Raises:
      UsageError: the text cannot be read or encoded, or the cache cannot be written.
    """
    folder = root / "prepared" / content_key(_VERSION, source.identity, tokenizer.fingerprint)
    try:
        if (folder / "meta.json").exists():
            if _is_intact(folder):
                return folder
            log.warning("the cache entry %s is damaged; building it again", folder)
            (folder / "meta.json").unlink()
        folder.mkdir(parents=True, exist_ok=True)
        index, count = shard
        parts = list(enumerate(source.parts))[index - 1 :: count]
        with _reading(f"tokenising {source.name}", [part for _, part in parts]) as count_bytes:
            for number, part in parts:
                _prepare_part(folder, number, part, tokenizer, count_bytes)
        try:
            source.check_unchanged()
        except UsageError:
            shutil.rmtree(folder)
            raise
        states = [_read_state(folder, number) for number in range(len(source.parts))]
        if not all(state["finished"] for state in states):
            return None
        shards = [each for state in states for each in state["shards"]]
        if not shards:
            raise _empty(source)
        write_meta(folder, tokenizer, shards, any(state["is_cut"] for state in states))
        return folder
    except OSError as error:
        raise cache_write_error(root, error) from error


def _is_intact(folder):
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        meta = io.parse_json((folder / "meta.json").read_text())
        has_tokenizer = (folder / "tokenizer.json").exists()
        return has_tokenizer and all(is_intact(folder, each) for each in meta["shards"])
    return False


def _prepare_part(folder, number, part, tokenizer, count_bytes):
    """Write the shards of a part, behind those that are there."""
    with locked(folder / f"{number:05d}.lock"):
        state = _read_state(folder, number)
        if state["finished"]:
            return
        shards = state["shards"]
        done = sum(shard["rows"] for shard in shards)
        writer = ShardWriter(folder, tokenizer, begins=not shards or shards[-1]["ends"])

        def write():
            if writer.rows:
                shards.append(writer.write(f"{number:05d}-{len(shards):05d}"))
            io.write_text(folder / f"{number:05d}.json", json.dumps(state))

        documents = itertools.islice(part.documents(), done, None)
        for document, ids in tokenizer.encode_documents(documents):
            row = text_row(document.data, document.ends)
            writer.add(ids, row, document.name, document.data)
            state["is_cut"] |= document.is_cut
            count_bytes(len(document.data))
            if writer.tokens >= _SHARD_TOKENS:
                write()
        state["finished"] = True
        write()


def _read_state(folder, number):
    """What is done of a part: its shards up to the first damaged one."""
    state = {"shards": [], "finished": False, "is_cut": False}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = io.parse_json((folder / f"{number:05d}.json").read_text())
        intact = itertools.takewhile(lambda shard: is_intact(folder, shard), stored["shards"])
        shards = list(intact)
        if len(shards) == len(stored["shards"]):
            return stored
        state["shards"] = shards
    return state


# ---- tokenizers ----------------------------------------------------------------------------------


def train_tokenizer(spec, sources, training_text, key, root):
    """The tokenizer that `config.data.tokenizer` (`spec`) names, trained unless it is cached.

    Args:
      sources: list of Source; `chars` takes the characters of all of them.
      training_text: function that returns an iterator over Documents of training text.
      key: JSON-able, everything that the text depends on.
    """
    kind, size = tokenizers.parse(spec)

    def build(folder):
        log.info("training the tokenizer %s", spec)
        if kind == "chars":
            characters = set()
            for document in itertools.chain.from_iterable(s.documents() for s in sources):
                characters.update(_decoded(document))
            tokenizer = tokenizers.CharTokenizer(characters)
        else:
            tokenizer = bpe.train_bpe(map(_decoded, training_text()), size)
        for source in sources:
            source.check_unchanged()
        tokenizer.save(folder / "tokenizer.json")

    key = content_key(kind, _TOKENIZER_VERSION, size, key)
    folder = cached_folder(root, "tokenizers", key, build)
    return tokenizers.load_tokenizer(folder / "tokenizer.json")


def _decoded(document):
    with tokenizers.prefix_errors(document.name):
        return tokenizers.decode_utf8(document.data, "chars, bpe")


def rows_of(source):
    """ROW[n] of the documents of a Source, without tokens."""
    rows = []
    with _reading(f"reading {source.name}", source.parts) as count_bytes:
        for document in source.documents():
            rows.append(text_row(document.data, document.ends).tobytes())
            count_bytes(len(document.data))
    source.check_unchanged()
    if not rows:
        raise _empty(source)
    return np.frombuffer(b"".join(rows), ROW)


def _empty(source):
    return UsageError(f"{source.name}: there is no text; use files that are not empty")


def sample(source, rows, is_trained):
    """Yield Documents of training text, `_SAMPLE_BYTES` from all over the source.

    Of its `rows_of`, those that `is_trained` (bool[n]) are training text.
    """
    every = max(1, int(rows["bytes"][is_trained].sum()) // _SAMPLE_BYTES)
    chosen = is_trained & (np.cumsum(is_trained) % every == 0)
    return itertools.compress(source.documents(), chosen)
