"""A stand-in for Google Cloud Storage: the file systems `gcs` and `s3` of fsspec, and
the HTTP interface by which tensorstore reads and writes arrays."""

import contextlib
import datetime
import http.server
import io
import json
import sys
import threading
import types
import urllib.parse

import fsspec

OBJECTS = {}  # "bucket/name": (bytes, generation)
_lock = threading.RLock()
_generations = iter(range(1, 1 << 60))


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

    def exists(self, path, **_):
        """As in gcsfs: any error but FileNotFoundError is raised."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def info(self, path, **_):
        path = self._strip_protocol(path)
        if path in ("", "gs:"):
            raise OSError("Forbidden: no access to the list of all buckets")
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
        with _lock:
            if self._strip_protocol(path) in OBJECTS:
                del OBJECTS[self._strip_protocol(path)]

    _rm = rm_file

    def cp_file(self, path1, path2, **_):
        name = self._strip_protocol(path1)
        if name not in OBJECTS:  # a folder is no object
            raise FileNotFoundError(name)
        put(self._strip_protocol(path2), OBJECTS[name][0])


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
        if self.command != "HEAD":
            self.wfile.write(data)

    def _request(self):
        """(bucket, name of the object or None, query)."""
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        parts = url.path.split("/b/", 1)[1].split("/")
        name = urllib.parse.unquote("/".join(parts[2:])) if len(parts) > 2 else query.get("name")
        return parts[0], name, query

    def do_GET(self):
        if "/b/" not in self.path:  # a request for credentials
            return self._respond(404)
        bucket, name, query = self._request()
        with _lock:
            if name is None:
                return self._list(bucket, query)
            key = f"{bucket}/{name}"
            if key not in OBJECTS:
                return self._respond(404)
            data, generation = OBJECTS[key]
        if query.get("alt") != "media":
            about = {"name": name, "generation": str(generation), "size": str(len(data))}
            return self._respond(200, json.dumps(about).encode())
        headers = {"x_goog_generation": generation}
        if requested := self.headers.get("Range"):
            first, last = requested.removeprefix("bytes=").split("-")
            start = int(first) if first else len(data) - int(last)
            stop = min(int(last) + 1, len(data)) if first and last else len(data)
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            return self._respond(206, data[start:stop], **headers)
        return self._respond(200, data, **headers)

    def _list(self, bucket, query):
        begin = f"{bucket}/{query.get('prefix', '')}"
        names = sorted(name[len(bucket) + 1 :] for name in OBJECTS if name.startswith(begin))
        low, high = query.get("startOffset", ""), query.get("endOffset")
        names = [name for name in names if name >= low and (not high or name < high)]
        items = [{"name": name, "size": str(len(OBJECTS[f"{bucket}/{name}"][0])),
                  "generation": str(OBJECTS[f"{bucket}/{name}"][1])} for name in names]  # fmt: skip
        self._respond(200, json.dumps({"items": items}).encode())

    def do_POST(self):
        bucket, name, query = self._request()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with _lock:
            generation = put(f"{bucket}/{name}", data)
        about = {"name": name, "generation": str(generation), "size": str(len(data))}
        self._respond(200, json.dumps(about).encode())

    def do_DELETE(self):
        bucket, name, query = self._request()
        with _lock:
            if f"{bucket}/{name}" not in OBJECTS:
                return self._respond(404)
            del OBJECTS[f"{bucket}/{name}"]
        self._respond(204)


@contextlib.contextmanager
def standing_in(monkeypatch):
    """gs:// and s3:// are this store; no other machine is contacted."""
    for name in ("gs", "gcs", "s3"):
        fsspec.register_implementation(name, Store, clobber=True)
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
