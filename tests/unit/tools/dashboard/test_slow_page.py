"""A page that takes nothing: the server keeps no backlog for it, and others go on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from large_run import training, write

from holdfast.tools.dashboard import server
from holdfast.tools.dashboard.hub import Hub
from holdfast.tools.dashboard.server import Dashboard
from holdfast.tools.live.follow import Follower

TOKEN = "a-token-of-enough-characters"
SECTION_BYTES = 1 << 18
CHANGES = 64
MOST_BYTES = 6 << 20
"""The kernel's buffers of a connection, about 4 MiB, and the message that is being sent."""

DEADLINE_S = 120.0


class Counted:
    """The application, with the bytes that it handed to each connection."""

    def __init__(self, app: Any) -> None:
        self.app, self.handed = app, Counter[int]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            self.handed[scope["client"][1]] += len(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, counted)


@contextlib.contextmanager
def served(app: Counted) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="critical", lifespan="off")  # type: ignore[arg-type]
        config.timeout_graceful_shutdown = 1
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def page(port: int, *, buffer_bytes: int = 0) -> socket.socket:
    """Ask for the stream; nothing is read of it yet."""
    found = socket.socket()
    if buffer_bytes:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    found.settimeout(DEADLINE_S)
    found.connect(("127.0.0.1", port))
    head = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    found.sendall(head.encode())
    return found


def begun(found: socket.socket) -> bytes:
    """Read until the first view comes, so that the sections of later ones are added to it."""
    seen = b""
    while b"data: {" not in seen:
        more = found.recv(1024)
        assert more, seen
        seen += more
    return seen


def test_a_page_that_reads_nothing_gets_no_backlog_and_stalls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_BEAT_S", 0.01)
    write(tmp_path, training(3, steps=20))
    hub = Hub(Follower(tmp_path))
    dashboard = Dashboard(hub, losses=None, report=lambda: "")  # type: ignore[arg-type]
    app = Counted(dashboard.app(token=TOKEN, hosts=()))
    with served(app) as port, page(port, buffer_bytes=4096) as slow, page(port) as fast:
        begun(slow)
        seen = begun(fast)
        for number in range(CHANGES):
            mark = f"change {number:04};".encode()
            section = b'"' + mark + b"x" * SECTION_BYTES + b'"'
            hub.board.update({"large": section}, whole=False)
            while mark not in seen:
                seen = seen[-64:] + fast.recv(1 << 20)
        handed = {port: app.handed[port] for port in (slow.getsockname()[1], fast.getsockname()[1])}
    to_slow, to_fast = handed.values()
    assert to_fast >= CHANGES * SECTION_BYTES, "the other page got every change"
    assert to_slow <= MOST_BYTES < CHANGES * SECTION_BYTES / 2
