"""A small server of OpenAI-style completions, whose tokens follow from its weights and the place.

    python answers_server.py --port 8000

``POST /load`` gives it weights, by their digest, and a version; before that it answers with 503.
Every token is drawn from the digest and the place, ``holdfast_place``, so that wrong weights show
in the training. It obeys the orders of `holdfast.tools.chaos.faults.engines`: it is killed, hangs,
sends garbage, becomes slow, goes back to the weights it had before, or gets no memory. It uses
the standard library only, so that it is ready at once.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

TOKENS, END = 16, 15

_ORDERS: Final = "HOLDFAST_CHAOS_ENGINES"
_LISTENS: Final = ".listens"
_CACHE_BYTES: Final = 64 << 20
"""Memory that a token reserves for a moment, as a cache would."""


class Orders:
    """The faults that the server commits now, from the file of its keeper ``keeper``."""

    def __init__(self, keeper: int) -> None:
        folder = os.environ.get(_ORDERS)
        self._path = Path(folder, f"{keeper}.json") if folder and keeper else None
        self._number, self._left = -1, 0.0
        self._lock = threading.Lock()
        self.kind, self.amount = "", 0.0
        if self._path is not None:
            Path(self._path.parent, f"{keeper}{_LISTENS}").touch()

    def look(self) -> str:
        """Return the kind of the present fault, "" for none."""
        with self._lock:
            found = self._read()
            if found and (found["number"], found["do"]) != (self._number, self.kind):
                self._number, self.kind = found["number"], found["do"]
                self.amount = self._left = float(found["amount"])
                self._begin()
            return self.kind

    def take(self, kind: str) -> bool:
        """Return True as often as the amount of the present fault says."""
        with self._lock:
            is_due = self.kind == kind and self._left >= 1
            self._left -= is_due
            return is_due

    def _read(self) -> dict[str, Any] | None:
        if self._path is None:
            return None
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return found

    def _begin(self) -> None:
        if self.kind == "engine-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        whole = resource.getrlimit(resource.RLIMIT_AS)[1]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        few = used + _CACHE_BYTES // 2 if self.kind == "engine-memory" else whole
        resource.setrlimit(resource.RLIMIT_AS, (few, whole))


class Answers:
    """The state of the server: its weights now, and those it had before."""

    def __init__(self, *, pace_s: float, orders: Orders) -> None:
        self.pace_s, self.orders = pace_s, orders
        self._weights: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def load(self, version: int, weights: str) -> None:
        """Sample with these weights from now on."""
        with self._lock:
            self._weights = [*self._weights[-1:], (version, weights)]

    @property
    def weights(self) -> tuple[int, str] | None:
        """Version and digest of the weights that sample now."""
        with self._lock:
            if not self._weights:
                return None
            is_stale = self.orders.kind == "engine-stale" and len(self._weights) > 1
            return self._weights[0 if is_stale else -1]

    def events(self, place: list[int], most: int) -> Iterator[str]:
        """Yield the events of an answer. Raises ``OSError`` while there is no memory."""
        seed, ordinal, sample, position = place
        for count in range(most):
            fault = self.orders.look()
            if fault == "engine-hang":
                threading.Event().wait()
            time.sleep(self.orders.amount if fault == "engine-slow" else self.pace_s)
            if self.orders.take("engine-garbage"):
                yield '{"choices": "none"'
                return
            mmap.mmap(-1, _CACHE_BYTES).close()
            weights = self.weights
            assert weights is not None
            token, logprob = drawn(weights[1], (seed, ordinal, sample, position + count))
            is_over = token == END or count == most - 1
            reason = ("stop" if token == END else "length") if is_over else None
            choice = {"index": 0, "token_ids": [token], "finish_reason": reason}
            choice["logprobs"] = {"token_logprobs": [logprob]}
            yield json.dumps({"choices": [choice], "weight_version": weights[0]})
            if is_over:
                break
        yield "[DONE]"


def drawn(weights: str, place: tuple[int, int, int, int]) -> tuple[int, float]:
    """Return the token at a place under the weights with a digest, and its log-probability."""
    found = blake2b(f"{weights} {place}".encode(), digest_size=2).digest()
    token = found[0] % TOKENS
    return token, -1.0 - found[1] / 64


class AnswersHandler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"
    answers: Answers

    def do_GET(self) -> None:
        """Tell that the server lives, after what its faults do to it."""
        if self.answers.orders.look() == "engine-hang":
            threading.Event().wait()
        mmap.mmap(-1, _CACHE_BYTES).close()
        self._reply(200, {})

    def do_POST(self) -> None:
        """Load weights, or stream an answer."""
        if self.answers.orders.look() == "engine-hang":
            threading.Event().wait()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/load":
            self.answers.load(int(body["version"]), str(body["weights"]))
            self._reply(200, {})
        elif self.answers.weights is None:
            self._reply(503, {"error": "no weights yet"})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for event in self.answers.events(body["holdfast_place"], body["max_tokens"]):
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()

    def _reply(self, status: int, found: dict[str, Any]) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *given: Any) -> None:
        """Say nothing."""


class AnswersServer(ThreadingHTTPServer):
    """A server that closes a connection whose work failed, without a traceback."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client sees that the stream breaks off."""


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.005, help="seconds for a token")
    parser.add_argument("--keeper", type=int, default=0, help="process id in the orders")
    given = parser.parse_args()
    AnswersHandler.answers = Answers(pace_s=given.pace, orders=Orders(given.keeper))
    AnswersServer(("127.0.0.1", given.port), AnswersHandler).serve_forever()


if __name__ == "__main__":
    main()
