"""Payloads from island to island over real sockets, with peers that lie, hang, die and intrude."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from doubles import seas
from tree import HELPERS

from holdfast.ckpt.errors import PeerError, StoreError
from holdfast.ckpt.transport import Client, Request, RunKey, Server
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.islands.haul import direct
from holdfast.elastic.islands.haul.direct import Direct, sea_key
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.islands.haul.offers import PULL
from holdfast.elastic.sea.records import Part
from holdfast.elastic.sea.settings import Islands

VIEW = seas.entered(seas.founded(Islands(every=4, portions=2, overlap=1)), "oslo")
PAYLOAD = os.urandom(3_000_001)
HOST = "127.0.0.1"
DEADLINE_S = 120.0


def digest_of(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def part_of(payload: bytes) -> Part:
    return seas.work(VIEW, "oslo", digest=digest_of(payload)).part


@contextmanager
def island(key: RunKey, *, lines: PacedLines | None = None) -> Iterator[Direct]:
    """Yield an island's exchange with the others."""
    found = Direct(
        key,
        host=HOST,
        place=("", 0),
        lines=lines or PacedLines(),
        digest_of=digest_of,
        patience_s=600,
    )
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def key() -> RunKey:
    return RunKey.new()


@pytest.fixture
def lyon(key: RunKey) -> Iterator[Direct]:
    with island(key) as found:
        yield found


@pytest.fixture
def oslo(key: RunKey, lyon: Direct) -> Iterator[Direct]:
    with island(key) as found:
        lyon.address_of = lambda name: found.address if name == "oslo" else ""
        yield found


def test_a_payload_comes_piece_by_piece_from_its_island(oslo: Direct, lyon: Direct) -> None:
    oslo.offer(digest_of(PAYLOAD), PAYLOAD)
    assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) == PAYLOAD
    assert lyon._lines.down.nbytes == oslo._lines.up.nbytes == len(PAYLOAD)


def test_a_payload_that_is_not_offered_any_more_is_no_fault(oslo: Direct, lyon: Direct) -> None:
    for data in (b"old", b"new", b"newest"):
        oslo.offer(digest_of(data), data)
    assert lyon.ask(part_of(b"old"), 3) is None
    assert lyon.ask(part_of(b"newest"), 6) == b"newest"


def test_an_island_without_an_address_is_not_asked(lyon: Direct) -> None:
    assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
    assert lyon._away == {}


def test_an_island_that_cannot_be_reached_is_left_alone_for_a_while(
    key: RunKey, lyon: Direct
) -> None:
    with island(key) as gone:
        address = gone.address
    lyon.address_of = lambda _: address
    now_s = 0.0
    lyon._clock = lambda: now_s
    assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
    assert lyon._is_away(address)
    now_s = 61.0
    assert not lyon._is_away(address)


def test_bytes_that_are_not_those_of_the_digest_are_not_taken(oslo: Direct, lyon: Direct) -> None:
    oslo.offer(digest_of(PAYLOAD), PAYLOAD[:-1] + b"\0" + b"")
    assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
    assert lyon._is_away(oslo.address)


@contextmanager
def liar(key: RunKey, answer: object, *frames: bytes) -> Iterator[str]:
    """Yield the address of an island that answers everything alike; None: not at all."""
    held: list[Request] = []

    def handle(request: Request) -> None:
        held.append(request)
        if answer is not None:
            request.reply(answer, frames)  # type: ignore[arg-type]

    server = Server(handle, key=key)
    try:
        yield server.address
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "frames"),
    [
        ({"size": 1 << 40}, (b"x",)),
        ({"size": len(PAYLOAD)}, ()),
        ({"size": len(PAYLOAD)}, (b"",)),
        ({"size": len(PAYLOAD)}, (b"x", b"y")),
        ({"size": len(PAYLOAD)}, (b"x" * 2_000_000,)),
        ({"size": "many"}, (b"x",)),
        ("nonsense", ()),
    ],
)
def test_an_island_that_lies_is_left(
    key: RunKey, lyon: Direct, answer: object, frames: tuple[bytes, ...]
) -> None:
    with liar(key, answer, *frames) as address:
        lyon.address_of = lambda _: address
        assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
        assert lyon._is_away(address)


def test_an_island_that_hangs_is_left(
    key: RunKey, lyon: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "ANSWER_S", 0.5)
    with liar(key, None) as address:
        lyon.address_of = lambda _: address
        assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None


def test_an_island_that_gives_a_byte_at_a_time_is_left(key: RunKey, lyon: Direct) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    lyon._clock = clock
    with liar(key, {"size": len(PAYLOAD)}, b"x") as address:
        lyon.address_of = lambda _: address
        assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
    assert lyon._lines.down.nbytes < 200


def test_an_island_that_dies_in_the_middle_is_left_at_once(
    key: RunKey, lyon: Direct, tmp_path: Path
) -> None:
    key.save(tmp_path / "key")
    (tmp_path / "payload").write_bytes(PAYLOAD)
    argv = [sys.executable, HELPERS / "slow_island.py", tmp_path / "key", tmp_path / "payload"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        lyon.address_of = lambda _: f"tcp://{HOST}:{port}"

        def kill() -> None:
            pause = threading.Event()
            while lyon._lines.down.nbytes < 30_000 and other.poll() is None:
                pause.wait(0.01)
            other.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
        killer.join(DEADLINE_S)
    assert 0 < lyon._lines.down.nbytes < len(PAYLOAD)


def test_a_transfer_that_nobody_needs_ends(key: RunKey, oslo: Direct) -> None:
    oslo.offer(digest_of(PAYLOAD), PAYLOAD)
    lines = PacedLines.of(0, 40_000)
    with island(key, lines=lines) as slow:
        slow.address_of = lambda _: oslo.address
        ender = threading.Timer(0.2, lines.down.close)
        ender.start()
        with pytest.raises(StoreError, match="not needed any more"):
            slow.ask(part_of(PAYLOAD), len(PAYLOAD))
        ender.join()


# -- keys ------------------------------------------------------------------------------------------


def test_another_key_gets_nothing(oslo: Direct, key: RunKey) -> None:
    other = RunKey.new()
    half = msgspec.structs.replace(
        key, client_public=other.client_public, client_secret=other.client_secret
    )
    oslo.offer(digest_of(PAYLOAD), PAYLOAD)
    for wrong in (other, half):
        with island(wrong) as stranger:
            stranger.address_of = lambda _: oslo.address
            assert stranger.ask(part_of(PAYLOAD), len(PAYLOAD)) is None
    assert oslo.offers is not None
    assert oslo.offers.refused, "the one that knows the server's public key shows its own"
    assert oslo._lines.up.nbytes == 0


def test_an_island_with_another_key_is_not_believed(key: RunKey, lyon: Direct) -> None:
    """A stranger who writes its address into the store has no key that the others accept."""
    with liar(RunKey.new(), {"size": len(PAYLOAD)}, b"x") as address:
        lyon.address_of = lambda _: address
        assert lyon.ask(part_of(PAYLOAD), len(PAYLOAD)) is None


@pytest.mark.parametrize("op", ["fence", "adopt", "inventory", "slots", "stop", "status"])
def test_the_sea_s_key_commands_nothing_but_payloads(key: RunKey, oslo: Direct, op: str) -> None:
    client = Client(oslo.address, key, timeout_s=DEADLINE_S)
    with pytest.raises(PeerError, match="gives payloads, and nothing else"):
        client.call(op, {})
    with pytest.raises(PeerError, match="malformed request"):
        client.call(PULL, {"digest": "x", "at": -1})
    client.close()


def test_the_sea_s_key_is_a_stranger_at_a_run_s_servers(key: RunKey) -> None:
    asked: list[Request] = []
    server = Server(asked.append, key=RunKey.new())
    client = Client(server.address, key, timeout_s=1.0)
    for bulk in (False, True):
        with pytest.raises(PeerError):
            client.call("inventory", {}, bulk=bulk)
    client.close()
    server.close()
    assert asked == []


def test_what_was_recorded_cannot_be_played_again(key: RunKey, lyon: Direct, oslo: Direct) -> None:
    """All bytes that an island sent go to the other once more, on a connection of their own."""
    sent = bytearray()
    with _recorder(oslo.address, sent) as address:
        lyon.address_of = lambda _: address
        oslo.offer(digest_of(b"payload"), b"payload")
        assert lyon.ask(part_of(b"payload"), 7) == b"payload"
    before = oslo._lines.up.nbytes
    assert b"payload" not in sent
    host, port = oslo.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as again:
        again.sendall(sent)
        again.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: again.recv(65536), b""))
    assert b"payload" not in answer
    assert oslo._lines.up.nbytes == before


@contextmanager
def _recorder(address: str, sent: bytearray) -> Iterator[str]:
    """Yield an address whose connections lead to another; ``sent`` gets what clients send."""
    host, port = address.removeprefix("tcp://").split(":")
    listening = socket.create_server((HOST, 0))

    def forward(source: socket.socket, target: socket.socket, record: bool) -> None:
        while data := _received(source):
            if record:
                sent.extend(data)
            target.sendall(data)
        _ended(target)

    def serve() -> None:
        near, _ = listening.accept()
        far = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        back = threading.Thread(target=forward, args=(far, near, False))
        back.start()
        forward(near, far, True)
        back.join(DEADLINE_S)
        near.close()
        far.close()

    serving = threading.Thread(target=serve)
    serving.start()
    yield f"tcp://{HOST}:{listening.getsockname()[1]}"
    serving.join(DEADLINE_S)
    listening.close()


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


def _ended(target: socket.socket) -> None:
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def test_the_key_file_must_be_there_private_and_not_the_run_s(tmp_path: Path, key: RunKey) -> None:
    file = tmp_path / "sea.key"
    with pytest.raises(ConfigError, match="make it once with `holdfast islands key"):
        sea_key(str(file), run=RunKey.new())
    key.save(file)
    assert sea_key(str(file), run=RunKey.new()) == key
    with pytest.raises(ConfigError, match="this is the key of the run"):
        sea_key(str(file), run=key)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read this key"):
        sea_key(str(file), run=RunKey.new())
