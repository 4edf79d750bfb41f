"""A proxy between an HTTP client and a server that injects faults, on real sockets.

It stands where the network, a load balancer or the server itself may fail. Each request uses its
own connection. A pattern and a count select the requests that are hit.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

_BLOCK_BYTES: Final = 64 << 10
_RST: Final = struct.pack("ii", 1, 0)
_DONE: Final = re.compile(rb"HTTP/1\.\d 200 ")
_CONDITION: Final = re.compile(
    rb"\r\n(if-match|if-none-match|x-goog-if-generation-match):[^\r]*", re.IGNORECASE
)
_KEPT_MOST: Final = 1000


class HttpFault(Enum):
    """The fault of a request."""

    REFUSE = "answer with an error status"
    RESET_BEFORE = "reset the connection before the server gets the request"
    RESET_DURING = "reset both connections in the middle of the request's body"
    LOSE_REPLY = "let the server do it, then reset the connection instead of replying"
    TRUNCATE = "end the connection in the middle of the reply's body"
    STALL = "keep the connection open and never answer"
    DRIP = "pass the reply's body on slowly"
    SIP = "take the request's body slowly"
    FLIP_REQUEST = "flip a bit of the request's body"
    FLIP_REPLY = "flip a bit of the reply's body"
    FORGET_CONDITIONS = "drop the conditions of a request, as a server without them does"
    STALE_REPLY = "answer with the last reply to the same request line from before the fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFaultRule:
    """The requests that are hit, and their fault.

    ``pattern`` is searched in the request line, such as ``PUT /bucket/key?partNumber=2``. The
    matching requests ``first``, ``first + every``, … are hit, ``times`` of them.
    """

    pattern: str
    fault: HttpFault
    first: int = 1
    times: int = 1
    every: int = 1
    status: int = 503
    code: str = "SlowDown"
    bytes_s: int = 1000


@dataclass(slots=True)
class _Request:
    line: str
    head: bytes
    nbytes: int
    expects: bool


class FaultProxy:
    """Listens on loopback and passes requests on to ``upstream``, except those that a rule hits.

    Replies to request lines that match ``keeps`` are kept, for `HttpFault.STALE_REPLY`.
    """

    def __init__(self, upstream: str, *, keeps: str | None = None) -> None:
        parts = urlsplit(upstream)
        if not parts.hostname or not parts.port:
            raise ValueError(f"upstream {upstream!r}: needs a host and a port")
        self._upstream = (parts.hostname, parts.port)
        self._keeps = None if keeps is None else re.compile(keeps)
        self._kept: dict[str, bytes] = {}
        self._rules: list[HttpFaultRule] = []
        self._matched: dict[int, int] = {}
        self._seen: list[str] = []
        self._hits: list[str] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    @property
    def seen(self) -> list[str]:
        """Return the request lines so far, without the HTTP version."""
        with self._lock:
            return list(self._seen)

    @property
    def hits(self) -> list[str]:
        """Return the request lines that were hit."""
        with self._lock:
            return list(self._hits)

    def set(self, *rules: HttpFaultRule) -> None:
        """Replace the rules, and forget the requests seen so far."""
        with self._lock:
            self._rules, self._matched = list(rules), {}
            self._seen, self._hits = [], []

    def close(self) -> None:
        """End every connection."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for end in left:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @contextmanager
    def _tracked(self, end: socket.socket) -> Iterator[socket.socket]:
        with closing(end):
            with self._lock:
                self._open.add(end)
            try:
                yield end
            finally:
                with self._lock:
                    self._open.discard(end)

    def _serve(self, client: socket.socket) -> None:
        with self._tracked(client), suppress(OSError, EOFError):
            if request := _head_of(client):
                self._handle(client, request, self._hit_by(request.line))

    def _hit_by(self, line: str) -> HttpFaultRule | None:
        """Count this request for all rules; return the first rule that hits it."""
        with self._lock:
            self._seen.append(line)
            found = None
            for number, rule in enumerate(self._rules):
                if not re.search(rule.pattern, line):
                    continue
                count = self._matched[number] = self._matched.get(number, 0) + 1
                behind = count - rule.first
                if found is None and 0 <= behind < rule.times * rule.every:
                    found = None if behind % rule.every else rule
            if found is not None:
                self._hits.append(line)
            return found

    def _handle(self, client: socket.socket, request: _Request, rule: HttpFaultRule | None) -> None:
        fault = rule.fault if rule else None
        if fault is HttpFault.RESET_BEFORE:
            return _reset(client)
        if request.expects:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is HttpFault.STALL:
            self._closed.wait()
            return None
        if rule and fault is HttpFault.REFUSE:
            _drain(client, request.nbytes)
            return client.sendall(_refusal(rule, has_body=not request.line.startswith("HEAD")))
        if fault is HttpFault.STALE_REPLY and request.line in self._kept:
            return client.sendall(self._kept[request.line])
        with self._tracked(socket.create_connection(self._upstream)) as server:
            if fault is HttpFault.FORGET_CONDITIONS:
                request.head = _CONDITION.sub(b"", request.head)
            server.sendall(request.head)
            if not self._pass_body(client, server, request.nbytes, rule):
                return None
            if fault is HttpFault.LOSE_REPLY:
                while server.recv(_BLOCK_BYTES):
                    pass
                return _reset(client)
            kept = self._keeps and self._keeps.search(request.line)
            if kept and fault in (None, HttpFault.STALE_REPLY):
                return self._pass_and_keep(server, client, request.line)
            return self._pass_reply(server, client, rule)

    def _pass_and_keep(self, server: socket.socket, client: socket.socket, line: str) -> None:
        """Pass on a reply that ends with its connection, and keep it."""
        reply = b""
        while block := server.recv(_BLOCK_BYTES):
            reply += block
        if _DONE.match(reply):
            with self._lock:
                self._kept[line] = reply
                if len(self._kept) > _KEPT_MOST:
                    del self._kept[next(iter(self._kept))]
        client.sendall(reply)

    def _pass_body(
        self, client: socket.socket, server: socket.socket, nbytes: int, rule: HttpFaultRule | None
    ) -> bool:
        """Pass the request's body on; say whether it was passed on whole."""
        fault, done = rule.fault if rule else None, 0
        while done < nbytes:
            most = min(nbytes - done, _BLOCK_BYTES)
            if rule and fault is HttpFault.SIP:
                most = min(most, max(1, rule.bytes_s // 10))
                time.sleep(0.1)
            block = client.recv(most)
            if not block:
                return False
            if fault is HttpFault.FLIP_REQUEST and not done:
                block = bytes([block[0] ^ 1]) + block[1:]
            if fault is HttpFault.RESET_DURING and done + len(block) > nbytes // 2:
                server.sendall(block[: max(0, nbytes // 2 - done)])
                _reset(server)
                _reset(client)
                return False
            server.sendall(block)
            done += len(block)
        return True

    def _pass_reply(
        self, server: socket.socket, client: socket.socket, rule: HttpFaultRule | None
    ) -> None:
        fault = rule.fault if rule else None
        head, body = _until_blank_line(server)
        client.sendall(head)
        left = _length_of(head) // 2 if fault is HttpFault.TRUNCATE else None
        while body or (body := server.recv(_BLOCK_BYTES)):
            if fault is HttpFault.FLIP_REPLY:
                body, fault = bytes([body[0] ^ 1]) + body[1:], None
            if left is not None:
                client.sendall(body[:left])
                left -= min(left, len(body))
                if not left:
                    return
            elif rule and fault is HttpFault.DRIP:
                self._drip(client, body, rule.bytes_s)
            else:
                client.sendall(body)
            body = b""

    def _drip(self, client: socket.socket, body: bytes, bytes_s: int) -> None:
        step = max(1, bytes_s // 20)
        for at in range(0, len(body), step):
            if self._closed.wait(step / bytes_s):
                return
            client.sendall(body[at : at + step])


@contextmanager
def faulty(upstream: str, *rules: HttpFaultRule) -> Iterator[FaultProxy]:
    """Run a `FaultProxy` with ``rules`` for the length of a block."""
    proxy = FaultProxy(upstream)
    proxy.set(*rules)
    try:
        yield proxy
    finally:
        proxy.close()


def _until_blank_line(end: socket.socket) -> tuple[bytes, bytes]:
    """Return a message's head and the received part of its body. Raises ``EOFError`` if cut off."""
    found = b""
    while b"\r\n\r\n" not in found:
        block = end.recv(_BLOCK_BYTES)
        if not block:
            raise EOFError
        found += block
    head, _, body = found.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def _head_of(client: socket.socket) -> _Request | None:
    """Read a request's head, unchanged as signed, except for the connection's own headers."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        block = client.recv(_BLOCK_BYTES, socket.MSG_PEEK)
        if not block:
            return None
        end = (found + block).find(b"\r\n\r\n")
        found += client.recv(len(block) if end < 0 else end + 4 - len(found))
    lines = found[:-4].split(b"\r\n")
    names = [line.partition(b":")[0].strip().lower() for line in lines]
    kept = [
        line
        for line, name in zip(lines, names, strict=True)
        if name not in (b"expect", b"connection")
    ]
    return _Request(
        line=lines[0].decode("latin-1").rpartition(" ")[0],
        head=b"\r\n".join([*kept, b"Connection: close", b"", b""]),
        nbytes=_length_of(found),
        expects=b"expect" in names,
    )


def _length_of(head: bytes) -> int:
    found = re.search(rb"\r\ncontent-length:\s*(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0


def _drain(client: socket.socket, nbytes: int) -> None:
    while nbytes > 0 and (block := client.recv(min(nbytes, _BLOCK_BYTES))):
        nbytes -= len(block)


def _reset(end: socket.socket) -> None:
    """Close a connection so that the other side sees it reset, not ended."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    end.close()


def _refusal(rule: HttpFaultRule, *, has_body: bool) -> bytes:
    body = f"<Error><Code>{rule.code}</Code><Message>injected</Message></Error>".encode()
    head: Sequence[str] = (
        f"HTTP/1.1 {rule.status} Injected",
        "Content-Type: application/xml",
        f"Content-Length: {len(body) if has_body else 0}",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(head).encode() + (body if has_body else b"")
