"""A real collector of OTLP over HTTP: it decodes what arrives, and keeps the spans."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """The spans that a collector has received."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.paths: set[str] = set()
        self.requests: list[ExportTraceServiceRequest] = []

    def resources(self) -> list[tuple[Resource, list[Span]]]:
        """Return the spans by resource, request after request."""
        return [
            (each.resource, [span for scope in each.scope_spans for span in scope.spans])
            for request in self.requests
            for each in request.resource_spans
        ]

    def spans(self) -> list[Span]:
        """Return all spans."""
        return [span for _, spans in self.resources() for span in spans]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on the loopback until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            collector.paths.add(self.path)
            collector.requests.append(request)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
