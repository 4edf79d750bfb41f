"""A server for tests of the part of Google Cloud Storage's XML API that obstore calls.

It is ours, written after the published description: generations and their conditions, ranges,
listings in pages, uploads in parts. Objects and parts lie in a folder, so that a server that was
killed knows them again. It shows that requests fit together, not that Google agrees. Emulators
that can be had lack parts: those of PyPI the whole XML API, fake-gcs-server uploads in parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from keeper import Facts, keep, launch

BUCKET: Final = "holdfast"
TOKEN: Final = "a-token-of-the-tests"
PAGE: Final = 1000
"""Most keys of one reply."""


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
    """The objects and the uploads of one bucket, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._objects_dir, self._uploads_dir = folder / "objects", folder / "uploads"
        self._begun_dir = folder / "begun"
        for each in (self._objects_dir, self._uploads_dir, self._begun_dir):
            each.mkdir(parents=True, exist_ok=True)
        self.objects = {unquote(path.name): _read(path) for path in self._objects_dir.iterdir()}
        self.uploads: dict[str, dict[int, Path]] = {
            upload.name: {int(part.name): part for part in upload.iterdir()}
            for upload in self._uploads_dir.iterdir()
        }
        self.lock = threading.Lock()
        self._numbers = itertools.count(time.time_ns())

    def put(self, key: str, data: bytes, condition: str | None) -> _Object:
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        with self.lock:
            there = self.objects.get(key)
            if condition is not None and int(condition) != (there.generation if there else 0):
                raise _RefusedError(412, "PreconditionFailed")
            found = _Object(data, next(self._numbers), tag)
            self._publish(self._file(key), f"{found.generation} {tag}\n".encode() + data)
            self.objects[key] = found
        return found

    def get(self, key: str, generation: str | None) -> _Object:
        found = self.objects.get(key)
        if found is None or (generation and int(generation) != found.generation):
            raise _RefusedError(404, "NoSuchKey")
        return found

    def delete(self, key: str) -> None:
        with self.lock:
            if self.objects.pop(key, None) is None:
                raise _RefusedError(404, "NoSuchKey")
            self._file(key).unlink()

    def begin(self) -> str:
        with self.lock:
            number = f"upload{next(self._numbers)}"
            (self._uploads_dir / number).mkdir()
            self.uploads[number] = {}
        return number

    def put_part(self, upload: str, number: int, data: bytes) -> None:
        parts = self.uploads.get(upload)
        if parts is None:
            raise _RefusedError(404, "NoSuchUpload")
        path = self._uploads_dir / upload / str(number)
        self._publish(path, data)
        parts[number] = path

    def complete(self, key: str, upload: str, wanted: list[int]) -> _Object:
        parts = self._pop(upload)
        found = self.put(key, b"".join(parts[number].read_bytes() for number in wanted), None)
        shutil.rmtree(self._uploads_dir / upload)
        return found

    def drop(self, upload: str) -> None:
        self._pop(upload)
        shutil.rmtree(self._uploads_dir / upload)

    def _pop(self, upload: str) -> dict[int, Path]:
        with self.lock:
            parts = self.uploads.pop(upload, None)
        if parts is None:
            raise _RefusedError(404, "NoSuchUpload")
        return parts

    def _publish(self, path: Path, data: bytes) -> None:
        """Write a file that is whole at its name, and not yet there before."""
        begun = self._begun_dir / str(threading.get_ident())
        begun.write_bytes(data)
        begun.replace(path)

    def _file(self, key: str) -> Path:
        return self._objects_dir / quote(key, safe="")


def _read(path: Path) -> _Object:
    head, _, data = path.read_bytes().partition(b"\n")
    generation, tag = head.decode().split()
    return _Object(data, int(generation), tag)


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
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise _RefusedError(401, "AuthenticationRequired")
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
                self._reply(200, self._listing(query))
            case "GET" | "HEAD":
                self._send(self.bucket.get(key, query.get("generation")))
            case "PUT" if upload:
                self.bucket.put_part(upload, int(query["partNumber"]), data)
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
                self.bucket.drop(upload)
                self._reply(204, b"")
            case "DELETE":
                self.bucket.delete(key)
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

    def _listing(self, query: dict[str, str]) -> bytes:
        """Return a page of the keys, each below the last one of the page before."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after, text, seen = query.get("continuation-token", ""), "", set[str]()
        for key, found in sorted(self.bucket.objects.items()):
            folder, is_below, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            shown = f"{prefix}{folder}{delimiter}" if is_below else key
            if not key.startswith(prefix) or shown <= after or shown in seen:
                continue
            if len(seen) == PAGE:
                token = escape(max(seen))
                text += f"<NextContinuationToken>{token}</NextContinuationToken>"
                text += "<IsTruncated>true</IsTruncated>"
                break
            seen.add(shown)
            if is_below:
                text += f"<CommonPrefixes><Prefix>{escape(shown)}</Prefix></CommonPrefixes>"
                continue
            text += f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size>"
            text += f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{found.tag}</ETag>"
            text += "</Contents>"
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()

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


def facts_of(port: int) -> Facts:
    """Return what a client needs of a server at ``port``."""
    return {"endpoint": f"http://127.0.0.1:{port}", "bucket": BUCKET, "token": TOKEN}


@contextlib.contextmanager
def server(folder: Path, port: int = 0) -> Iterator[Facts]:
    """Run the server with its data in ``folder``; yield what a client needs."""
    handler = type("_BucketHandler", (_Handler,), {"bucket": _Bucket(folder)})
    running = ThreadingHTTPServer(("127.0.0.1", port), handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield facts_of(running.server_port)
    finally:
        running.shutdown()


def start(folder: Path, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the server as a process of its own."""
    return launch([sys.executable, __file__, "--serve", str(folder), str(port)], log)


def main() -> None:
    """Keep the service for the tests, or run it until it is killed."""
    if sys.argv[1] == "--keep":
        keep(Path(sys.argv[2]), server)
        return
    with server(Path(sys.argv[2]), int(sys.argv[3])):
        signal.pause()


if __name__ == "__main__":
    main()
