"""Training text that is tokenised during training, into a folder of token files.

    progress.json     for each file its tokens, position in the text, size, time and hash; whether
                      the text is complete
    00000.bin ...     token ids; all files but the last have equally many
    tokenizer.json    the tokenizer that makes them

A separate process (`main`) writes the files in the order of the text, a bounded number of tokens
ahead of training. It resumes where an earlier one stopped, and ends with the training process. Runs
that share the folder write in turns. The files depend on the text and the tokenizer alone.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np

from efx import io
from efx.data.disk_cache import cache_write_error, content_key, file_record, is_unchanged, locked
from efx.data.shards import token_dtype
from efx.data.tokenizers import load_tokenizer
from efx.errors import TransientError, UsageError
from efx.parallel.signals import STOPPING

_VERSION = 5  # raise it when the same input gives other files
_FILE_TOKENS = 1 << 22
_TOKENS_AHEAD = 1 << 28  # of training, so that a long text does not fill the disk
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Progress:
    """The token files of a folder.

    Attributes:
      files: of each file (tokens, whole documents in this and earlier files, tokens of the next
        document in these files, `file_record`).
      finished: whether the text ends here.
    """

    files: tuple = ()
    finished: bool = False

    @property
    def tokens(self):
        return sum(file[0] for file in self.files)

    @classmethod
    def read(cls, folder):
        """The progress of a folder; none if progress.json is absent or damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = io.read_json(folder / "progress.json")
            if stored["sum"] == content_key(stored["files"], stored["finished"]):
                return cls(tuple(stored["files"]), stored["finished"])
        return cls()

    def write(self, folder):
        """Replace progress.json."""
        value = {"files": self.files, "finished": self.finished}
        value["sum"] = content_key(self.files, self.finished)
        io.write_text(folder / "progress.json", json.dumps(value))

    def before_damage(self, folder):
        """The progress before the first damaged file."""
        for number, (*_, record) in enumerate(self.files):
            if not is_unchanged(_path(folder, number), record):
                return Progress(self.files[:number])
        return self


def _path(folder, number):
    return folder / f"{number:05d}.bin"


class GrowingTokens:
    """The tokens of a training split while a separate process writes them.

    Args:
      name: of the text, for messages.
      key: hash of everything that the text depends on.
      config_data, origin: arguments of `opened.OpenedTexts`.
    """

    def __init__(self, name, key, tokenizer, root, config_data, origin):
        self._name = name
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._file_tokens = _FILE_TOKENS
        key = content_key("growing", _VERSION, key, tokenizer.fingerprint, self._file_tokens)
        self._folder = root / "growing" / key
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # If another process holds the lock, it has checked the files.
            with locked(self._folder / "lock", wait=False) as is_locked:
                if is_locked:
                    Progress.read(self._folder).before_damage(self._folder).write(self._folder)
            tokenizer.save(self._folder / "tokenizer.json")
        except OSError as error:
            raise cache_write_error(root, error) from error
        self._progress = Progress.read(self._folder)
        self._writer, self._requested = None, 0
        self._job = {
            "config_data": {**dataclasses.asdict(config_data), "on_change": "error"},
            "origin": origin,
            "folder": str(self._folder),
            "root": str(root),
            "file_tokens": self._file_tokens,
        }

    def __len__(self):
        """Tokens so far."""
        return self._progress.tokens

    @property
    def finished(self):
        """Whether the text is complete."""
        return self._progress.finished

    def wait(self, count):
        """Wait for `count` tokens or the end of the text. The writer goes on to write ahead.

        Returns:
          The number of tokens.

        Raises:
          UsageError: the text cannot be read; TransientError if the writer was killed.
        """
        while not self.finished:
            self._request(count + _TOKENS_AHEAD)
            if len(self) >= count:
                break
            status = self._writer.poll()  # before the progress: its last tokens count
            self._progress = Progress.read(self._folder)
            if len(self) >= count or self.finished:
                continue
            if status is not None:
                raise self._failure(status)
            time.sleep(_POLL_SECONDS)
        return len(self)

    def _request(self, count):
        """Request `count` tokens from the writer; start it if there is none."""
        if self._writer is None:
            self._writer = _start_writer()
            weakref.finalize(self, _stop_writer, self._writer)
            self._send(json.dumps(self._job))
        # Only when half of the tokens ahead may be used up.
        if not self._requested or count > self._requested + _TOKENS_AHEAD // 2:
            self._requested = count
            self._send(str(count))

    def _send(self, line):
        with contextlib.suppress(BrokenPipeError):  # `wait` reports that the writer ended
            self._writer.stdin.write(f"{line}\n".encode())
            self._writer.stdin.flush()

    def _failure(self, status):
        message = self._writer.stdout.read().decode().strip() or (
            f"{self._name}: the tokenising process ended with status {status}; rerun the "
            "command to resume"
        )
        was_killed = status < 0  # by a signal
        kind = TransientError if was_killed or status == TransientError.status else UsageError
        return kind(message)

    def windows(self, starts, length):
        """int32[len(starts), length]: the tokens from each start on."""
        # Files are read, not mapped: mapped pages count as memory of the process.
        rows, itemsize = np.empty((len(starts), length), np.int32), self._dtype.itemsize
        for row, start in zip(rows, starts, strict=True):
            copied = 0
            while copied < length:
                number, offset = divmod(int(start) + copied, self._file_tokens)
                count = min(length - copied, self._file_tokens - offset)
                path = _path(self._folder, number)
                part = np.fromfile(path, self._dtype, count, offset=offset * itemsize)
                row[copied : copied + count] = part
                copied += count
        return rows

    def arrays(self):
        """All tokens, in order; waits for the end of the text."""
        self.wait(sys.maxsize)
        count = len(self._progress.files)
        return [np.memmap(_path(self._folder, i), self._dtype, "r") for i in range(count)]


def _start_writer():
    # Slurm and a shutdown signal all processes of a job, but training may need tokens for its last
    # steps. The signals are ignored before the imports, which take half a second. Ctrl-C does not
    # reach a new session.
    script = (
        "import signal, sys\n"
        f"for number in {[int(number) for number in STOPPING]}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from efx.data import growing\ngrowing.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _stop_writer(process):
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
    process.stdout.close()


# ---- the process that writes -------------------------------------------------------------------


class Writer:
    """Writes the token files of a folder.

    Args:
      open_documents: function without arguments that returns an iterator over (name, bytes).
    """

    def __init__(self, folder, name, open_documents, tokenizer, file_tokens):
        self._folder, self._name, self._open_documents = folder, name, open_documents
        self._tokenizer, self._file_tokens = tokenizer, file_tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._written, self._writing = None, None

    def grow(self, count):
        """Write until there are `count` tokens or the text ends; return whether it ended.

        Raises:
          UsageError: the text cannot be read, or has changed; the folder then counts as empty.
        """
        with locked(self._folder / "lock"):
            progress = Progress.read(self._folder)
            if progress != self._written:  # the first call, or another process has written
                self._writing = self._write_files(progress)
            while not progress.finished and progress.tokens < count:
                try:
                    progress = next(self._writing)
                except UsageError as error:
                    # An edited held-out document may be in the files.
                    if not isinstance(error, TransientError):
                        Progress().write(self._folder)
                    raise
                progress.write(self._folder)
            self._written = progress
        return progress.finished

    def _write_files(self, progress):
        """Write one file after another, from the end of `progress` on; yield the progress after
        each. The end-of-document id precedes every document but the first."""
        first, offset = progress.files[-1][1:3] if progress.files else (0, 0)
        is_first = progress.tokens == offset
        end = np.array([] if self._tokenizer.eot is None else [self._tokenizer.eot], np.int32)
        parts, missing = [], self._file_tokens
        documents = itertools.islice(self._open_documents(), first, None)
        for number, ids in enumerate(self._tokenizer.encode_documents(documents), first):
            if len(ids) and not is_first:
                ids = np.concatenate([end, ids])
            is_first = is_first and not len(ids)
            while offset < len(ids):
                parts.append(ids[offset : offset + missing])
                offset, missing = offset + len(parts[-1]), missing - len(parts[-1])
                if not missing:
                    position = (number, offset) if offset < len(ids) else (number + 1, 0)
                    progress = self._add_file(progress, parts, position)
                    yield progress
                    parts, missing = [], self._file_tokens
            offset = 0
        if parts:
            progress = self._add_file(progress, parts, (number + 1, 0))
        if not progress.tokens:
            raise UsageError(f"{self._name}: the training split has no tokens")
        yield dataclasses.replace(progress, finished=True)

    def _add_file(self, progress, parts, position):
        path = _path(self._folder, len(progress.files))
        with io.replacing(path) as temporary:
            temporary.write_bytes(np.concatenate(parts).astype(self._dtype).data)
        file = [sum(map(len, parts)), *position, file_record(path)]
        return dataclasses.replace(progress, files=(*progress.files, file))


def main():
    """Tokenise the text of a `GrowingTokens`.

    The first line of standard input is its job, and each other line a requested number of tokens.
    The end of standard input ends the process.
    """
    job = json.loads(sys.stdin.buffer.readline())
    requests, status = queue.SimpleQueue(), 0
    threading.Thread(target=_read_requests, args=[requests], daemon=True).start()
    try:
        writer = _open_writer(job)
        while not writer.grow(requests.get()):
            pass
    except UsageError as error:
        print(error, flush=True)
        status = error.status
    except OSError as error:
        print(cache_write_error(job["root"], error), flush=True)
        status = UsageError.status
    os._exit(status)  # without waiting for the thread that reads standard input


def _read_requests(requests):
    for line in sys.stdin.buffer:
        requests.put(int(line))
    os._exit(0)


def _open_writer(job):
    from efx.config.run import DataConfig
    from efx.data.opened import OpenedTexts

    opened = OpenedTexts(DataConfig(**job["config_data"]), ("train",), job["origin"])
    folder = Path(job["folder"])
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    name, documents = opened.source.name, opened.training_pieces
    return Writer(folder, name, documents, tokenizer, job["file_tokens"])
