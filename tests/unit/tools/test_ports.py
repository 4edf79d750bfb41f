"""Ports that servers of the tools may take."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from holdfast.tools import ports


def test_ports_are_free_and_below_those_of_outgoing_connections() -> None:
    with ExitStack() as stack:
        for port in ports.free_ports(3):
            assert port < 32_768
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_taken_ports_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda *_: [port])
        with pytest.raises(OSError, match="fewer than 1 free ports"):
            ports.free_ports(1)
