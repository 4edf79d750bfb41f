"""The lines of `holdfast bench lines`: namespaces that reach each other at a limited rate."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.tools.bench.islands.lines import Lines, why_not
from holdfast.tools.bench.islands.outcome import LineBytes
from holdfast.tools.bench.islands.relay import Relay

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
SENT = 200_000
CLIENT = f"""
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as there:
    there.sendall(bytes({SENT}))
    there.shutdown(socket.SHUT_WR)
    assert there.recv(1) == b"."
    from holdfast.tools.bench.islands.outcome import LineBytes
    print(LineBytes.by(sys.argv[3]).sent)
"""


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a server outside of the lines, which answers once it has all bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            got = 0
            while got < SENT:
                got += len(connection.recv(1 << 16))
            connection.sendall(b".")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    thread.join(60)
    listening.close()


def test_bytes_pass_a_line_to_a_server_outside_no_faster_than_its_limit(server: int) -> None:
    with Lines(2, mbit=2) as lines:
        listening = lines.listen()
        with Relay(listening, host="127.0.0.1", port=server):
            words = [lines.HUB, str(listening.getsockname()[1]), lines.device(1)]
            argv = lines.ends[1].command(sys.executable, "-c", CLIENT, *words)
            began_s = time.monotonic()
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            seconds = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    assert SENT <= int(done.stdout) < 1.2 * SENT
    assert seconds > 8 * SENT / 2e6 * 0.8  # a bucket is full at first


def test_namespaces_end_with_the_lines() -> None:
    with Lines(1, mbit=0) as lines:
        keepers = [lines.hub.pid, *(end.pid for end in lines.ends)]
        devices = {name for _, name in socket.if_nameindex()}
        assert not devices & {"hub", "port0", "line0"}
    for pid in keepers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no network device 'none'"):
        LineBytes.by("none")
