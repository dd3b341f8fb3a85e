"""A stand-in for Google Cloud Storage and S3: file systems of fsspec, and the HTTP requests by
which tensorstore reads and writes arrays."""

import contextlib
import datetime
import http.server
import io
import itertools
import json
import sys
import threading
import types
import urllib.parse

import fsspec

OBJECTS = {}  # "bucket/name": (bytes, generation)
_lock = threading.RLock()
_generations = itertools.count(1)


def put(name, data):
    with _lock:
        OBJECTS[name] = (bytes(data), next(_generations))
        return OBJECTS[name][1]


class Store(fsspec.AbstractFileSystem):
    """A folder exists while an object is in it, as in a bucket."""

    protocol = ("gs", "gcs", "s3")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).partition("://")[2].strip("/") or str(path).strip("/")

    def info(self, path, **_):
        path = self._strip_protocol(path)
        with _lock:
            if path in OBJECTS:
                data, generation = OBJECTS[path]
                return {"name": path, "size": len(data), "type": "file", "etag": generation,
                        "mtime": datetime.datetime(2026, 1, 1)}  # fmt: skip
            if any(name.startswith(f"{path}/") for name in OBJECTS):
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        with _lock:
            inside = [name for name in OBJECTS if name.startswith(f"{path}/")]
            names = sorted({f"{path}/" + name[len(path) + 1 :].split("/")[0] for name in inside})
            names = names or [self.info(path)["name"]]
            return [self.info(name) for name in names] if detail else names

    def _open(self, path, mode="rb", **_):
        path = self._strip_protocol(path)
        if "r" in mode:
            self.info(path)
            return io.BytesIO(OBJECTS[path][0])
        return _Written(path)

    def mkdir(self, path, *_, **__):
        """A bucket has no folders."""

    makedirs = rmdir = mkdir

    def rm_file(self, path):
        OBJECTS.pop(self._strip_protocol(path), None)

    _rm = rm_file

    def cp_file(self, path1, path2, **_):
        put(self._strip_protocol(path2), OBJECTS[self._strip_protocol(path1)][0])


class _Written(io.BytesIO):
    def __init__(self, path):
        super().__init__()
        self._path = path

    def close(self):
        if not self.closed:
            put(self._path, self.getvalue())
        super().close()


class _Server(http.server.BaseHTTPRequestHandler):
    """The requests of tensorstore's driver `gcs`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _respond(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        """.../b/BUCKET/o/NAME, of which a range may be requested."""
        bucket, _, name = self.path.partition("?")[0].partition("/b/")[2].partition("/o/")
        key = f"{bucket}/{urllib.parse.unquote(name)}"
        if key not in OBJECTS:  # or a request for credentials
            return self._respond(404)
        data, generation = OBJECTS[key]
        headers = {"x_goog_generation": generation}
        if requested := self.headers.get("Range"):
            start, last = map(int, requested.removeprefix("bytes=").split("-"))
            headers["Content_Range"] = f"bytes {start}-{last}/{len(data)}"
            return self._respond(206, data[start : last + 1], **headers)
        return self._respond(200, data, **headers)

    def do_POST(self):
        """.../b/BUCKET/o?name=NAME."""
        url = urllib.parse.urlsplit(self.path)
        (name,) = urllib.parse.parse_qs(url.query)["name"]
        data = self.rfile.read(int(self.headers["Content-Length"]))
        generation = put(f"{url.path.partition('/b/')[2].split('/')[0]}/{name}", data)
        about = {"name": name, "generation": str(generation), "size": str(len(data))}
        self._respond(200, json.dumps(about).encode())


@contextlib.contextmanager
def standing_in(monkeypatch):
    """gs:// and s3:// are this store; no other machine is contacted."""
    for name in ("gs", "gcs", "s3"):
        # Not `register_implementation`, which later tests of the process would meet too.
        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, name, Store)
    server = http.server.ThreadingHTTPServer(("localhost", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://localhost:{server.server_port}")
    monkeypatch.setenv("GCE_METADATA_ROOT", f"localhost:{server.server_port}")
    # Before it deletes, orbax requests whether the bucket has real folders.
    bucket = types.SimpleNamespace(hierarchical_namespace_enabled=False)
    client = types.SimpleNamespace(get_bucket=lambda name: bucket)
    cloud = types.SimpleNamespace(Client=lambda: client)
    monkeypatch.setitem(sys.modules, "google.cloud", types.SimpleNamespace(storage=cloud))
    monkeypatch.setitem(sys.modules, "google.cloud.storage", cloud)
    try:
        yield OBJECTS
    finally:
        server.shutdown()
        OBJECTS.clear()
