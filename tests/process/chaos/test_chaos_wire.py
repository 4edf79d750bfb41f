"""Bit flips between two nodes: every changed message is refused and counted, and never believed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_victims import Remote, Site, struck

from holdfast.ckpt.transport import RunKey
from holdfast.tools.chaos.faults.injector import Undo
from holdfast.tools.chaos.faults.network.wire import TOLD, WireInjector
from holdfast.tools.chaos.faults.preloaded.preload import Preload

DEADLINE_S = 60.0
SERVES = """
from pathlib import Path
from holdfast.ckpt.transport import RunKey, Server
server = Server(
    lambda request: request.reply(request.body, request.frames), key=RunKey.load(Path({key!r}))
)
"""
ASKS = """
from pathlib import Path
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client, RunKey
client = Client({address!r}, RunKey.load(Path({key!r})))
content = bytes(range(256)) * 4096

def ask(bulk, timeout_s):
    "Return what became of a message that is to come back as it was."
    sent = content if bulk else content[:2000]
    try:
        body, frames = client.call("echo", [1, 2], [sent], bulk=bulk, timeout_s=timeout_s)
    except PeerError:
        return "refused"
    return "right" if (body, [bytes(each) for each in frames]) == ([1, 2], [sent]) else "WRONG"
"""


class Wire:
    """Node a asks the sidecar of node b."""

    def __init__(self, folder: Path) -> None:
        key = folder / "key.json"
        RunKey.new().save(key)
        self.site, self.injector = Site(folder / "run"), WireInjector()
        env = self.injector.prepare(self.site, ())
        self.preload = Preload(self.site)
        self.a, self.b = Remote(env), Remote(env)
        self.victims = [
            self.site.add(f"node {name}", remote.pid, part="node", node=name)
            for name, remote in (("a", self.a), ("b", self.b))
        ]
        for victim in self.victims:
            self.site.add(
                f"sidecar of {victim.node}", *victim.pids, part="sidecar", node=victim.node
            )
        self.b.does(f"!exec({SERVES.format(key=str(key))!r})")
        address = self.b.does("server.address")
        self.a.does(f"!exec({ASKS.format(key=str(key), address=address)!r})")

    def strikes(self, node: int, *, every_bytes: float) -> Undo:
        order = struck("flip-wire", amount=every_bytes, lasts_s=60)
        undo = self.injector.strike(order, self.victims[node], self.site)
        assert undo is not None
        return undo

    def asks(self, *, bulk: bool, timeout_s: float = DEADLINE_S) -> Any:
        found = self.a.does(f"ask({bulk}, {timeout_s})")
        assert found != "WRONG"
        return found

    def refusals(self) -> dict[str, int]:
        found: dict[str, int] = self.b.does("dict(server.refusals)")
        return found

    def close(self) -> None:
        self.injector.close()
        for remote in (self.a, self.b):
            remote.close()


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with contextlib.closing(Wire(tmp_path_factory.mktemp("wire"))) as found:
        yield found


def test_what_was_changed_is_refused_and_counted(wire: Wire) -> None:
    before = wire.preload.flipped_bits
    assert wire.asks(bulk=True) == "right" and wire.preload.flipped_bits == before
    undo = wire.strikes(0, every_bytes=1 << 19)
    deadline_s = time.monotonic() + DEADLINE_S
    while wire.refusals().get("tampered", 0) < 3:
        wire.asks(bulk=True, timeout_s=0.3)
        assert time.monotonic() < deadline_s, (wire.refusals(), wire.preload.flipped_bits)
    undo()
    flipped = wire.preload.flipped_bits
    assert flipped >= before + 3
    wire.injector.close()
    report = json.loads((wire.site.folder / TOLD).read_text())
    assert report == {"flipped_bits": flipped}
    assert wire.asks(bulk=True) == "right" and wire.preload.flipped_bits == flipped


def test_control_messages_are_not_believed_either_once_a_bit_has_changed(wire: Wire) -> None:
    before, said = wire.preload.flipped_bits, []
    undo = wire.strikes(1, every_bytes=4000)
    deadline_s = time.monotonic() + DEADLINE_S
    while wire.preload.flipped_bits < before + 4 or "refused" not in said:
        said.append(wire.asks(bulk=False, timeout_s=0.2))
        assert time.monotonic() < deadline_s, (said, wire.preload.flipped_bits)
    undo()
    assert wire.asks(bulk=False) == "right"


def test_what_others_say_is_left_alone(wire: Wire) -> None:
    assert wire.asks(bulk=False) == "right"
    before = wire.preload.flipped_bits
    undo = wire.strikes(0, every_bytes=1)
    word = "x" * 10_000
    wire.b.does("!import socket; listener = socket.create_server(('127.0.0.1', 0))")
    port = wire.b.does("listener.getsockname()[1]")
    third = Remote({"PATH": os.environ["PATH"]})  # who is no node's, and has no library
    try:
        wire.a.does("!import socket; ours, theirs = socket.socketpair()")
        wire.a.does(f"ours.send(b'{word}')")
        assert wire.a.does("theirs.recv(10000).decode()") == word
        third.does(f"!import socket; c = socket.create_connection(('127.0.0.1', {port}))")
        wire.b.does("!other, _ = listener.accept()")
        third.does(f"c.send(b'{word}')")
        assert wire.b.does("other.recv(10000).decode()") == word
    finally:
        third.close()
    undo()
    assert wire.preload.flipped_bits == before
