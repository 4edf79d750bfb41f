"""A crowd of connections without the run's key, at a server with few descriptors."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.ckpt.descriptors import allow_many
from holdfast.ckpt.transport import Client, RunKey

KEY = RunKey.new()
CROWD = 2000
FEW = 512
WAIT_S = 60.0

SERVER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
import msgspec
from holdfast.ckpt.descriptors import patiently
from holdfast.ckpt.transport import RunKey, Server

def handle(request):
    if request.op == "files":  # of which a launcher or an agent needs some at any time
        descriptors = [patiently(lambda: os.open(os.devnull, 0)) for _ in range(request.body)]
        for fd in descriptors:
            os.close(fd)
    request.reply(len(os.listdir("/proc/self/fd")))

server = Server(handle, key=msgspec.json.decode(sys.argv[1], type=RunKey))
print(server.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def address() -> Iterator[str]:
    command = [sys.executable, "-c", SERVER, msgspec.json.encode(KEY).decode(), str(FEW)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.poll() is None, "it lives"
        process.kill()


def crowd_at(port: int, stack: contextlib.ExitStack) -> None:
    for _ in range(CROWD):
        peer = stack.enter_context(socket.socket())
        peer.setblocking(False)
        peer.connect_ex(("127.0.0.1", port))


@pytest.mark.parametrize("through", ["control", "bulk"])
def test_a_crowd_without_a_key_leaves_a_server_its_descriptors(address: str, through: str) -> None:
    """The attack: a thousand connections ended a launcher, which could open nothing any more."""
    allow_many()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > CROWD + 100
    bulk = through == "bulk"
    client = Client(address, KEY, timeout_s=WAIT_S)
    client.call("files", 10, bulk=bulk)
    assert client._bulk._grant is not None or not bulk
    port = client._bulk._grant.port if bulk and client._bulk._grant else address.rpartition(":")[2]
    with contextlib.ExitStack() as crowd:
        crowd_at(int(port), crowd)
        for _ in range(50):
            client.call("files", 50, bulk=bulk)
    later = Client(address, KEY, timeout_s=WAIT_S)
    assert int(later.call("files", 50, bulk=bulk)[0]) < FEW
    later.close()
    client.close()
