"""A server for tests of the part of Google Cloud Storage's XML API that obstore calls.

It is ours, written after the published description: generations and their conditions, ranges,
listings, uploads in parts. It shows that requests fit together, not that Google agrees. Emulators
that can be had lack parts: those of PyPI the whole XML API, fake-gcs-server uploads in parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from keeper import Facts, keep

BUCKET: Final = "holdfast"


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    generation: int
    tag: str


class _RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class _Bucket:
    """The objects and the uploads of one bucket."""

    def __init__(self) -> None:
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self._numbers = itertools.count(1_000_000)

    def put(self, key: str, data: bytes, condition: str | None) -> _Object:
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        with self.lock:
            there = self.objects.get(key)
            if condition is not None and int(condition) != (there.generation if there else 0):
                raise _RefusedError(412, "PreconditionFailed")
            found = self.objects[key] = _Object(data, next(self._numbers), tag)
        return found

    def get(self, key: str, generation: str | None) -> _Object:
        found = self.objects.get(key)
        if found is None or (generation and int(generation) != found.generation):
            raise _RefusedError(404, "NoSuchKey")
        return found

    def begin(self) -> str:
        with self.lock:
            number = f"upload{next(self._numbers)}"
            self.uploads[number] = {}
        return number

    def complete(self, key: str, upload: str, wanted: list[int]) -> _Object:
        with self.lock:
            parts = self.uploads.pop(upload, None)
        if parts is None:
            raise _RefusedError(404, "NoSuchUpload")
        return self.put(key, b"".join(parts[number] for number in wanted), None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: _Bucket

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        name, _, key = unquote(parts.path).lstrip("/").partition("/")
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if name != BUCKET:
                raise _RefusedError(404, "NoSuchBucket")
            self._answer(key, query, data)
        except _RefusedError as refused:
            text = f"<Error><Code>{refused.code}</Code><Message>refused</Message></Error>"
            self._reply(refused.status, text.encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _answer(self, key: str, query: dict[str, str], data: bytes) -> None:
        upload = query.get("uploadId", "")
        match self.command:
            case "GET" if not key:
                self._reply(200, self._listing(query.get("prefix", ""), query.get("delimiter", "")))
            case "GET" | "HEAD":
                self._send(self.bucket.get(key, query.get("generation")))
            case "PUT" if upload:
                if upload not in self.bucket.uploads:
                    raise _RefusedError(404, "NoSuchUpload")
                self.bucket.uploads[upload][int(query["partNumber"])] = data
                self._reply(200, b"", ETag=f'"{query["partNumber"]}"')
            case "PUT":
                done = self.bucket.put(key, data, self.headers.get("x-goog-if-generation-match"))
                self._reply(200, b"", **_marks(done))
            case "POST" if upload:
                wanted = [int(n) for n in re.findall(rb"<PartNumber>(\d+)<", data)]
                done = self.bucket.complete(key, upload, wanted)
                text = f"<CompleteMultipartUploadResult><ETag>{escape(done.tag)}</ETag>"
                self._reply(200, f"{text}</CompleteMultipartUploadResult>".encode(), **_marks(done))
            case "POST":
                text = "<InitiateMultipartUploadResult><UploadId>"
                text += f"{self.bucket.begin()}</UploadId></InitiateMultipartUploadResult>"
                self._reply(200, text.encode())
            case "DELETE" if upload:
                if self.bucket.uploads.pop(upload, None) is None:
                    raise _RefusedError(404, "NoSuchUpload")
                self._reply(204, b"")
            case "DELETE":
                if self.bucket.objects.pop(key, None) is None:
                    raise _RefusedError(404, "NoSuchKey")
                self._reply(204, b"")

    def _send(self, found: _Object) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if span is None:
            return self._reply(200, found.data, **_marks(found))
        first, last = int(span[1]), min(int(span[2]), len(found.data) - 1)
        if first > last:
            raise _RefusedError(416, "InvalidRange")
        ranged = {"Content-Range": f"bytes {first}-{last}/{len(found.data)}"}
        return self._reply(206, found.data[first : last + 1], **_marks(found), **ranged)

    def _listing(self, prefix: str, delimiter: str) -> bytes:
        files, folders = "", set[str]()
        for key, found in sorted(self.bucket.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            files += f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size>"
            files += (
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{found.tag}</ETag>"
            )
            files += "</Contents>"
        below = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders
        )
        return f"<ListBucketResult>{files}{below}</ListBucketResult>".encode()

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _marks(found: _Object) -> dict[str, str]:
    return {"ETag": found.tag, "x-goog-generation": str(found.generation)}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Facts]:
    """Run the server; yield what a client needs."""
    del folder
    handler = type("_BucketHandler", (_Handler,), {"bucket": _Bucket()})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield {"endpoint": f"http://127.0.0.1:{running.server_port}", "bucket": BUCKET}
    finally:
        running.shutdown()


if __name__ == "__main__":
    keep(Path(sys.argv[2]), server)
