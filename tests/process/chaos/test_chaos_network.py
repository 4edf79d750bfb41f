"""Network faults on one machine: cuts between processes, and half-open connections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_victims import Remote, Site, struck

from holdfast.tools.chaos.faults.injector import MissedError, Undo
from holdfast.tools.chaos.faults.network.cut import NetworkInjector

LISTEN = "!listener = socket.create_server(('127.0.0.1', 0)); found = {}"
HEARS = "(c.settimeout({s}), c.recv(100).decode())[1]"


class Peers:
    """Nodes a, b and c, a process each; a has a connection to each of the others."""

    def __init__(self, folder: Path) -> None:
        self.site, self.injector = Site(folder), NetworkInjector()
        env = self.injector.prepare(self.site, ())
        self.a, self.b, self.c = (Remote(env) for _ in range(3))
        self.victims = [
            self.site.add(f"node {name}", remote.pid, part="node", node=name)
            for name, remote in (("a", self.a), ("b", self.b), ("c", self.c))
        ]
        self.ports = {}
        for name, remote in (("b", self.b), ("c", self.c), ("a", self.a)):
            remote.does(LISTEN)
            self.ports[name] = remote.does("listener.getsockname()[1]")
        for name, remote in (("b", self.b), ("c", self.c)):
            self.a.does(f"!{name} = socket.create_connection(('127.0.0.1', {self.ports[name]}))")
            remote.does("!a, _ = listener.accept()")

    def strikes(self, kind: str, name: str = "a", **fields: float) -> Undo | None:
        victim = next(each for each in self.victims if each.node == name)
        return self.injector.strike(struck(kind, lasts_s=60, **fields), victim, self.site)

    def arrives(self, sender: Remote, to: str, receiver: Remote, at: str, *, s: float) -> bool:
        """Say if a message that is sent now arrives within the given number of seconds."""
        word = f"{time.monotonic_ns()};"
        sender.does(f"{to}.send(b'{word}')")
        message = receiver.does(f"({at}.settimeout({s}), {at}.recv(1000).decode())[1]")
        return bool(message.endswith(word))

    def close(self) -> None:
        self.injector.close()
        for remote in (self.a, self.b, self.c):
            remote.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with contextlib.closing(Peers(tmp_path)) as found:
        yield found


SHORT_S, LONG_S = 0.3, 60.0
CONNECT = "socket.create_connection(('127.0.0.1', {port}), timeout={s}).fileno()"


def connects(remote: Remote, port: int, *, s: float) -> bool:
    return isinstance(remote.does(CONNECT.format(port=port, s=s)), int)


@pytest.mark.parametrize(
    ("kind", "out", "back"),
    [("partition", False, False), ("partition-in", True, False), ("partition-out", False, True)],
)
def test_nothing_passes_a_cut_and_all_of_it_later(
    peers: Peers, kind: str, out: bool, back: bool
) -> None:
    undo = peers.strikes(kind)
    assert undo is not None
    for name, remote in (("b", peers.b), ("c", peers.c)):
        assert peers.arrives(peers.a, name, remote, "a", s=LONG_S if out else SHORT_S) is out
        assert peers.arrives(remote, "a", peers.a, name, s=LONG_S if back else SHORT_S) is back
    assert not connects(peers.a, peers.ports["b"], s=SHORT_S)
    assert not connects(peers.b, peers.ports["a"], s=SHORT_S)
    assert connects(peers.b, peers.ports["c"], s=LONG_S)
    assert connects(peers.a, peers.ports["a"], s=LONG_S)
    undo()
    assert peers.arrives(peers.a, "b", peers.b, "a", s=LONG_S)
    assert peers.arrives(peers.b, "a", peers.a, "b", s=LONG_S)
    assert connects(peers.a, peers.ports["b"], s=LONG_S)


def test_two_nodes_are_cut_off_from_each_other_alone(peers: Peers) -> None:
    undo = peers.strikes("partition-pair", pick=0.0)
    assert undo is not None
    assert not peers.arrives(peers.a, "b", peers.b, "a", s=SHORT_S)
    assert peers.arrives(peers.a, "c", peers.c, "a", s=LONG_S)
    assert not connects(peers.b, peers.ports["a"], s=SHORT_S)
    assert connects(peers.c, peers.ports["a"], s=LONG_S)
    undo()
    assert peers.arrives(peers.b, "a", peers.a, "b", s=LONG_S)


def test_lost_packets_are_sent_again(peers: Peers) -> None:
    peers.strikes("network-loss", amount=0.3)
    again = "int.from_bytes(b.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:], 'little')"
    deadline_s = time.monotonic() + LONG_S
    while not peers.a.does(again):
        assert peers.arrives(peers.a, "b", peers.b, "a", s=LONG_S)
        assert time.monotonic() < deadline_s


def test_every_send_takes_longer(peers: Peers) -> None:
    undo = peers.strikes("network-delay", amount=0.1)
    assert undo is not None
    start_s = time.monotonic()
    for _ in range(3):
        assert peers.arrives(peers.a, "b", peers.b, "a", s=LONG_S)
    assert time.monotonic() - start_s >= 0.3


def test_both_sides_are_told_of_a_reset(peers: Peers) -> None:
    peers.strikes("network-reset")
    assert peers.a.does("b.recv(1)") == "ECONNRESET"
    assert peers.b.does("a.recv(1)") == "ECONNRESET"
    with pytest.raises(MissedError, match="no connection to another"):
        peers.strikes("network-reset")


def test_the_other_side_of_a_half_open_connection_finds_out_when_it_speaks(peers: Peers) -> None:
    peers.strikes("half-open", "b")
    assert peers.b.does("a.recv(1)") == "ECONNRESET"
    assert peers.a.does("(b.settimeout(0.2), b.recv(1))") != "ECONNRESET"
    peers.a.does("b.send(b'there?')")
    assert peers.a.does("(b.settimeout(60), b.recv(1))[1]") == "ECONNRESET"
