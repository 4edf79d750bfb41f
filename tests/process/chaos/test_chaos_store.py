"""Faults of a store behind a run's proxy, as its clients see them."""

from __future__ import annotations

import http.client
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chaos_victims import Site, struck

from holdfast.tools.chaos.faults.injector import Undo
from holdfast.tools.chaos.faults.store import ENDPOINT, StoreInjector

BODY = b"x" * 10_000


class Upstream(http.server.BaseHTTPRequestHandler):
    """Counts its requests, and lists the count."""

    requests: list[str]

    def do_GET(self) -> None:
        self._answer(str(len(self.requests)).encode() if "list-type=2" in self.path else BODY)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.requests.append(f"{self.command} {self.path}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Store:
    """A client that sends a job's requests through the proxy."""

    def __init__(self, folder: Path, requests: list[str]) -> None:
        self.requests, self.site, self.injector = requests, Site(folder), StoreInjector()
        self.victim = self.site.add("the store", part="store")
        self._place = urlsplit(self.injector.prepare(self.site, ())[ENDPOINT]).netloc

    def strike(self, kind: str, amount: float | None = None) -> Undo:
        order = struck(kind, amount=amount, lasts_s=60)
        undo = self.injector.strike(order, self.victim, self.site)
        assert undo is not None
        return undo

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body; (0, what came) where the connection ended before its time."""
        connection = http.client.HTTPConnection(self._place, timeout=60)
        try:
            connection.request(method, path, body if method == "PUT" else None)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.IncompleteRead as error:
            return 0, error.partial
        except (ConnectionError, http.client.BadStatusLine):
            return 0, b""
        finally:
            connection.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    requests: list[str] = []
    handler = type("Handler", (Upstream,), {"requests": requests})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.server_port}")
        found = Store(tmp_path, requests)
        yield found
        found.injector.close()
        server.shutdown()


def test_errors_and_throttling_pass(store: Store) -> None:
    undo = store.strike("store-error", 502)
    assert [store.ask("GET", "/b/k")[0] for _ in range(2)] == [502, 502]
    undo()
    assert store.ask("GET", "/b/k") == (200, BODY)
    store.strike("store-throttle", 3)
    assert [store.ask("GET", "/b/k")[0] for _ in range(4)] == [503, 200, 200, 503]


def test_replies_are_cut_off_or_lost(store: Store) -> None:
    undo = store.strike("store-truncate")
    assert [store.ask("GET", "/b/k") for _ in range(2)] == [(0, BODY[:5000]), (200, BODY)]
    undo()
    store.strike("store-lost-reply", 1)
    before = len(store.requests)
    assert store.ask("PUT", "/b/k", b"done") == (0, b"")
    assert store.requests[before:] == ["PUT /b/k"]


def test_bytes_come_and_go_slowly(store: Store) -> None:
    store.strike("store-slow", 50_000)
    start_s = time.monotonic()
    assert store.ask("GET", "/b/k") == (200, BODY)
    assert time.monotonic() - start_s >= 0.15
    start_s = time.monotonic()
    assert store.ask("PUT", "/b/k", BODY)[0] == 200
    assert time.monotonic() - start_s >= 0.15


def test_a_listing_is_that_of_before(store: Store) -> None:
    listing, other = "/b?list-type=2&prefix=p", "/b?list-type=2&prefix=q"
    assert store.ask("GET", listing) == (200, b"0")
    assert store.ask("GET", listing) == (200, b"1")
    undo = store.strike("store-stale-list")
    assert [store.ask("GET", listing)[1] for _ in range(2)] == [b"1", b"1"]
    assert [store.ask("GET", other)[1] for _ in range(2)] == [b"2", b"2"]
    undo()
    assert store.ask("GET", listing) == (200, b"3")
