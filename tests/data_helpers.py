"""What the tests of efx.data share."""

import contextlib
import functools
import http.server
import itertools
import threading

import numpy as np
import pytest
from hypothesis import settings
from ml_collections import ConfigDict

import efx.data
from efx.data import held_out
from efx.errors import UsageError

# An example that is slow on a busy machine is not wrong.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def make_config(source, tmp_path, **changes):
    values = dict(
        source=source,
        tokenizer="bytes",
        seq_len=8,
        batch_size=4,
        eval_source="",
        eval_fraction=0.25,
        split="tail",
        withhold=False,
        on_change="error",
        packing=False,
        shuffle="windows",
        buffer_tokens=64,
        cache_dir=str(tmp_path / "cache"),
        text_key="",
        max_bytes=0,
        document_bytes=0,
        subset="",
    )
    assert set(changes) <= set(values)
    return ConfigDict(values | changes)


def write_letters(tmp_path):
    """A text of 400 characters, of which no 4 in a row occur twice."""
    pairs = itertools.product("abcdefghijklmnopqrst", repeat=2)
    path = tmp_path / "letters.txt"
    path.write_text("".join(a + b for a, b in pairs if a != b)[:400])
    return path


def write_folder(tmp_path):
    """12 documents of different lengths, each of its own letter; one is there twice."""
    path = tmp_path / "texts"
    (path / "sub").mkdir(parents=True)
    for i in range(12):
        where = path / ("sub" if i % 3 else ".") / f"{i:02d}.txt"
        where.write_text(chr(ord("a") + i) * (7 + 5 * i))
    (path / "copy.txt").write_text((path / "sub" / "08.txt").read_text())
    (path / "empty.txt").write_text("")
    return path


def open_data(config, **changes):
    return efx.data.load(config, **(dict(seed=3) | changes))


def split_documents(source, method, eval_fraction):
    """The pieces of a text that has no earlier decision."""
    return held_out.pieces(source, held_out.decide(source, method, eval_fraction))


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def usage_error(*words, **load):
    """The message of the error that `load` ends in; it is one line and holds `words`."""
    with pytest.raises(UsageError) as error:
        efx.data.load(**(dict(seed=0) | load))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


@contextlib.contextmanager
def served_data_set(tmp_path):
    """A Hugging Face data set of a.jsonl and b.jsonl, in `tmp_path`, behind an HTTP server.

    Yields (source, server); the next `server.failures` reads of b.jsonl break off.
    """

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            # The library looks at a file, by requests without a range, before it reads it.
            reads = self.path == "/b.jsonl" and "Range" in self.headers
            if reads and self.server.failures > 0:
                self.server.failures -= 1
                self.close_connection = True
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.failures = 0
        threading.Thread(target=server.serve_forever).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            (tmp_path / "set").mkdir()
            files = "".join(f"    - {address}/{name}.jsonl\n" for name in "ab")
            (tmp_path / "set/README.md").write_text(
                "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
                f"    path:\n{files}---\n"
            )
            yield f"hf:{tmp_path}/set", server
        finally:
            server.shutdown()
