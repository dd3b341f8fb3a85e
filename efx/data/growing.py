"""Training text that is tokenised while it is trained on: a folder of token files that grows.

    progress.json     what there is: for each file its tokens and checksums, and how far in the text
                      it goes; whether that is all
    00000.bin ...     token ids; all files but the last hold equally many
    tokenizer.json    what makes them

The files are written by a process of their own (`main`), in the order of the text. It goes on where
an earlier one was interrupted, stays a bounded number of tokens ahead of the training, and ends
with the process that started it. Of several that share the folder one writes at a time, whoever
needs more. What a file holds depends on the text and the tokenizer alone.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np

from efx import atomic
from efx.data.disk_cache import checksums, content_key, locked
from efx.data.shards import token_dtype
from efx.data.tokenizers import load_tokenizer
from efx.errors import PassingError, UsageError
from efx.signals import STOPPING

# To be raised whenever the same input gives other tokens than before.
_VERSION = 1
_SHARD_TOKENS = 1 << 22
_TOKENS_AHEAD = 1 << 28  # of what was asked for, so that a long text does not fill the disk
_CHECKED_SHARDS = 32  # whose content is compared when a folder is opened; the sizes of all are
_OPEN_SHARDS = 64  # at once
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the tokens go.

    Attributes:
      shards: for each file (tokens, pieces of text that it and those before it hold whole, tokens
        of the next piece that they hold, checksums).
      finished: whether the text goes no further.
    """

    shards: tuple = ()
    finished: bool = False

    @property
    def tokens(self):
        return sum(shard[0] for shard in self.shards)

    @property
    def position(self):
        """(pieces that are tokens already, tokens of the next one that are)"""
        return tuple(self.shards[-1][1:3]) if self.shards else (0, 0)

    @classmethod
    def read(cls, folder):
        """That of a folder; of one without, or with a damaged one, none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads((folder / "progress.json").read_text())
            if stored["sum"] == content_key(stored["value"]):
                return cls(tuple(stored["value"]["shards"]), stored["value"]["finished"])
        return cls()

    def write(self, folder):
        """Takes the place of an earlier one."""
        value = {"shards": list(self.shards), "finished": self.finished}
        text = json.dumps({"sum": content_key(value), "value": value})
        atomic.write_text(folder / "progress.json", text)

    def intact(self, folder):
        """As far as the files are as they were written."""
        checked = set(np.linspace(0, len(self.shards) - 1, _CHECKED_SHARDS).astype(int))
        for number, (*_, (size, *sums)) in enumerate(self.shards):
            path = _path(folder, number)
            try:
                same = path.stat().st_size == size
                same = same and (number not in checked or checksums(path) == [size, *sums])
            except OSError:
                same = False
            if not same:
                return Progress(self.shards[:number])
        return self


def _path(folder, number):
    return folder / f"{number:05d}.bin"


class GrowingTokens:
    """The tokens of a training split, of which there are more and more.

    Args:
      name: of the text, for messages.
      key: hash of everything that the text depends on.
      config_data, origin: what the text is opened by, see `opened.OpenedTexts`.
    """

    def __init__(self, name, key, tokenizer, root, config_data, origin):
        self._name = name
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._shard_tokens = _SHARD_TOKENS
        key = content_key("growing", _VERSION, key, tokenizer.fingerprint, self._shard_tokens)
        self._folder = root / "growing" / key
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / "lock", wait=False) as mine:
                if mine is not None:  # else another process writes, which has looked already
                    progress = Progress.read(self._folder)
                    if (whole := progress.intact(self._folder)) != progress:
                        whole.write(self._folder)
            tokenizer.save(self._folder / "tokenizer.json")
        except OSError as error:
            raise UsageError(_cannot_write(root, error)) from error
        self._progress, self._writer, self._asked = Progress.read(self._folder), None, 0
        job = {
            "config_data": {**dataclasses.asdict(config_data), "on_change": "error"},
            "origin": origin,
            "folder": str(self._folder),
            "root": str(root),
            "shard_tokens": self._shard_tokens,
        }
        self._job = (json.dumps(job) + "\n").encode()
        # Of a function that does not hold this object, which ends its process when it goes. They
        # are read, not mapped: what is mapped counts as memory of the process.
        self._opened = functools.lru_cache(_OPEN_SHARDS)(functools.partial(_opened, self._folder))

    def __len__(self):
        """Tokens so far."""
        return self._progress.tokens

    @property
    def finished(self):
        """Whether there will be no more."""
        return self._progress.finished

    def begin(self):
        """Has the first tokens made meanwhile, whatever else is to be done before training."""
        if not self.finished:
            self._ask(_TOKENS_AHEAD)

    def wait(self, count):
        """Waits until there are `count` tokens, or all; returns how many there are then.

        Raises UsageError if there will not be any more, because the text cannot be read.
        """
        while not self.finished:
            self._ask(count + _TOKENS_AHEAD)
            if len(self) >= count:
                break
            ended = self._writer.poll()  # asked first: what it wrote at last counts
            self._progress = Progress.read(self._folder)
            if len(self) >= count or self.finished:
                continue
            if ended is not None:
                raise self._failure(ended)
            time.sleep(_POLL_SECONDS)
        return len(self)

    def _ask(self, count):
        """Has the process write so many tokens; starts it if it is not there."""
        if self._writer is None:
            # What tells a whole job to stop (Slurm, a machine that shuts down) tells this process
            # too, and training may need tokens for its last steps. From the first line on, since
            # imports take half a second.
            script = (
                "import signal, sys\n"
                f"for number in {[int(number) for number in STOPPING]}:\n"
                "    signal.signal(number, signal.SIG_IGN)\n"
                f"sys.path[:] = {sys.path!r}\n"
                "from efx.data import growing\ngrowing.main()"
            )
            # In a session of its own: Ctrl-C is for the training, with which it ends.
            self._writer = subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            weakref.finalize(self, _end, self._writer)
            self._send(self._job)
        # Not at every step, but when half of what was asked for may have been used.
        if count - _TOKENS_AHEAD // 2 > self._asked or not self._asked:
            self._asked = count
            self._send(f"{count}\n".encode())

    def _send(self, line):
        with contextlib.suppress(BrokenPipeError):  # `wait` sees that it has ended
            self._writer.stdin.write(line)
            self._writer.stdin.flush()

    def _failure(self, status):
        message = self._writer.stdout.read().decode().strip() or (
            f"{self._name}: the tokenising process ended with status {status}; rerun the "
            "command to resume"
        )
        # A negative status is the signal that ended the process.
        is_passing = status < 0 or status == PassingError.status
        return (PassingError if is_passing else UsageError)(message)

    def windows(self, starts, length):
        """int32[len(starts), length]: the tokens from each start on, all of them there."""
        rows = np.empty((len(starts), length), self._dtype)
        for row, start in zip(rows, starts, strict=True):
            copied = 0
            while copied < length:
                number, offset = divmod(int(start) + copied, self._shard_tokens)
                piece = row[copied : copied + self._shard_tokens - offset]
                file = self._opened(number)
                file.seek(offset * row.itemsize)
                if file.readinto(piece) < piece.nbytes:
                    raise UsageError(
                        f"{_path(self._folder, number)} was truncated while it was read; rerun "
                        "the command"
                    )
                copied += len(piece)
        return rows.astype(np.int32)

    def arrays(self):
        """All tokens, in order, when there are all."""
        self.wait(sys.maxsize)
        count = len(self._progress.shards)
        return [np.memmap(_path(self._folder, i), self._dtype, "r") for i in range(count)]


def _opened(folder, number):
    return open(_path(folder, number), "rb", buffering=0)


def _end(process):
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
    process.stdout.close()


def _cannot_write(root, error):
    return (
        f"config.data.cache_dir={str(root)!r} cannot be written ({error.strerror or error}); "
        "choose a writable folder with free space"
    )


# ---- the process that writes -------------------------------------------------------------------


class Writer:
    """Writes the token files of a folder.

    Args:
      open_pieces: function without arguments: (name, bytes) of each piece of the text, in order.
    """

    def __init__(self, folder, name, open_pieces, tokenizer, shard_tokens):
        self._folder, self._name, self._open_pieces = folder, name, open_pieces
        self._tokenizer, self._shard_tokens = tokenizer, shard_tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._written, self._coming = None, None

    def grow(self, wanted):
        """Writes until there are `wanted()` tokens, or all; returns whether there are all."""
        with locked(self._folder / "lock"):
            progress = Progress.read(self._folder)
            if progress != self._written:  # another process has gone on, or this one begins
                self._coming = self._shards(progress)
            while not progress.finished and progress.tokens < wanted():
                progress = next(self._coming)
                progress.write(self._folder)
            self._written = progress
        return progress.finished

    def _shards(self, progress):
        """Writes one file after another; yields the progress after each."""
        parts, room = [], self._shard_tokens
        for pieces, offset, ids in self._ids(progress):
            while len(ids):
                parts.append(ids[:room])
                offset, ids, room = offset + len(ids[:room]), ids[room:], room - len(ids[:room])
                if not room:
                    position = (pieces, offset) if len(ids) else (pieces + 1, 0)
                    progress = self._with_shard(progress, parts, position)
                    yield progress
                    parts, room = [], self._shard_tokens
        if parts:
            progress = self._with_shard(progress, parts, (pieces + 1, 0))
        if not progress.tokens:
            raise UsageError(f"{self._name}: the training split has no tokens")
        yield dataclasses.replace(progress, finished=True)

    def _ids(self, progress):
        """Yields (pieces before, tokens of this one before, its further tokens) of each piece from
        where the files end. Between pieces is the end of a document."""
        first, offset = progress.position
        begun, eot = progress.tokens > offset, self._tokenizer.eot
        documents = itertools.islice(self._open_pieces(), first, None)
        for number, ids in enumerate(self._tokenizer.encode_documents(documents), first):
            if len(ids):
                if begun and eot is not None:
                    ids = np.concatenate([np.array([eot], np.int32), ids])
                begun = True
            yield number, offset, ids[offset:]
            offset = 0

    def _with_shard(self, progress, parts, position):
        path = _path(self._folder, len(progress.shards))
        ids = np.concatenate(parts).astype(self._dtype)
        with atomic.replacing(path) as part:
            part.write_bytes(ids.data)
        shard = [len(ids), *position, checksums(path)]
        return dataclasses.replace(progress, shards=(*progress.shards, shard))


class _Wanted:
    """How many tokens are asked for, line by line, in standard input; its end ends this process."""

    def __init__(self, lines):
        self._lines, self._changed, self._count = lines, threading.Condition(), 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._lines:
            with self._changed:
                self._count = int(line)
                self._changed.notify()
        os._exit(0)

    def __call__(self):
        return self._count

    def wait(self, more_than):
        """Waits until more tokens are asked for than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > more_than)


def main():
    """Does a job that comes in standard input, see `GrowingTokens`; ends with who asks for
    tokens."""
    from pathlib import Path

    job = json.loads(sys.stdin.buffer.readline())
    wanted, status = _Wanted(sys.stdin.buffer), 0
    try:
        _tokenise(Path(job["folder"]), job, wanted)
    except UsageError as error:
        print(error, flush=True)
        status = error.status
    except OSError as error:
        print(_cannot_write(job["root"], error), flush=True)
        status = 2
    # The thread that reads standard input is not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tokenise(folder, job, wanted):
    from efx.data.opened import OpenedTexts
    from efx.run_blocks import DataConfig

    opened = OpenedTexts(DataConfig(**job["config_data"]), ("train",), job["origin"])
    writer = Writer(
        folder,
        opened.source.name,
        opened.training_pieces,
        load_tokenizer(folder / "tokenizer.json"),
        job["shard_tokens"],
    )
    reached = 0
    while not writer.grow(wanted):
        reached = max(reached, Progress.read(folder).tokens)
        wanted.wait(more_than=reached)
