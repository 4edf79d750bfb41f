"""The bulk path: sealed, refused if not genuine, bounded, and renewed after a loss."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from raw_session import DEADLINE_S, RawSession, ask_session, flipped, wait_until

from holdfast.ckpt.errors import BusyError, FencedError, PeerError
from holdfast.ckpt.transport import (
    Client,
    Request,
    RunKey,
    Server,
    TransportLimits,
    answers_refused,
)
from holdfast.ckpt.transport.envelope import (
    CONTROL_BYTES,
    MAX_FRAMES,
    PIECE_BYTES,
    TAG_BYTES,
    Envelope,
    MessageHeader,
    MessageKind,
)
from holdfast.ckpt.transport.sealing import Sealer

_MIB = 1 << 20
_BIG = bytes(range(256)) * (2 * _MIB // 256) + b"odd end"


class Store:
    """Echoes, gives as many bytes as asked for, keeps requests; notes what reached it."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.kept: list[Request] = []
        self.go_on = threading.Event()

    def __call__(self, request: Request) -> None:
        self.taken.append(request.op)
        match request.op:
            case "echo":
                request.reply(request.body, request.frames)
            case "get":
                request.reply(None, [bytes(request.body)])
            case "keep":
                self.kept.append(request)
            case "later":
                threading.Thread(target=request.reply, args=(7, [_BIG])).start()
            case "many":
                request.reply(None, [b"x"] * request.body)
            case "stale":
                raise FencedError("generation 1 is over, 2 acts")
            case "unsayable":
                request.reply(object())
            case "reuse":
                room = bytearray(request.body)
                request.reply(request.seals_at_once, [room])
                room[:] = b"\xff" * len(room)
            case "slow":
                self.go_on.wait(DEADLINE_S)
                request.reply()


@pytest.fixture
def key() -> RunKey:
    return RunKey.new()


@pytest.fixture
def store() -> Store:
    return Store()


Serve = Callable[..., Server]


@pytest.fixture
def serve(key: RunKey, store: Store) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        servers.append(Server(store, key=key, **options))
        return servers[-1]

    yield start
    store.go_on.set()
    for server in servers:
        server.close()


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def client(server: Server, key: RunKey) -> Iterator[Client]:
    client = Client(server.address, key)
    yield client
    client.close()


@pytest.fixture
def raw(server: Server, key: RunKey) -> Iterator[RawSession]:
    raw = RawSession(server, key)
    yield raw
    raw.close()


def await_refusals(server: Server, **expected: int) -> None:
    wait_until(lambda: dict(server.refusals) == expected, lambda: (server.refusals, expected))


# -- what gets through ---------------------------------------------------------------------------


def test_an_answer_is_sealed_before_its_memory_may_change(key: RunKey, serve: Serve) -> None:
    client = Client(serve().address, key)
    for nbytes in (100, 3 * _MIB):
        assert client.call("reuse", nbytes, bulk=True) == (True, [bytes(nbytes)])
    client.close()


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"a"],
        [b"", b"b", b""],
        [bytes(PIECE_BYTES)],
        [_BIG, b"", _BIG[:100], memoryview(_BIG)[5:-5]],
    ],
    ids=["none", "empty", "small", "empties", "one piece", "large"],
)
def test_body_and_frames_come_back_as_they_were_sent(client: Client, frames: list[Any]) -> None:
    for _ in range(3):
        body, answer = client.call("echo", {"n": 1}, frames, bulk=True)
        assert body == {"n": 1}
        assert [bytes(frame) for frame in answer] == [bytes(frame) for frame in frames]


def test_the_size_of_the_frames_decides_the_way(server: Server, client: Client) -> None:
    client.call("echo", None, [b"small"])
    assert server._bulk is None
    client.call("echo", None, [_BIG])
    assert server._bulk is not None


def test_very_many_frames_are_sealed_too_and_more_are_refused_by_name(
    server: Server, client: Client
) -> None:
    frames = [bytes(1000)] * 2000
    assert len(client.call("echo", None, frames)[1]) == 2000
    with pytest.raises(PeerError, match=r"8193 frames .*send less at once"):
        client.call("echo", None, [b""] * (MAX_FRAMES + 1), bulk=True)
    with pytest.raises(PeerError, match=r"answer to many is refused: 8193 frames"):
        client.call("many", MAX_FRAMES + 1, bulk=True)
    assert client.call("echo", 1, bulk=True)[0] == 1


@pytest.mark.parametrize("size", [CONTROL_BYTES, PIECE_BYTES - 100, PIECE_BYTES, 3 * PIECE_BYTES])
def test_a_large_body_takes_the_sealed_path_by_itself(client: Client, size: int) -> None:
    body = {"text": "x" * size, "n": [1, None]}
    assert client.call("echo", body, [b"frame"]) == (body, [b"frame"])
    with pytest.raises(PeerError, match="more than the 262,144 of a control message"):
        client.call("echo", body, bulk=False)


def test_an_answer_from_another_thread_comes_sealed(client: Client) -> None:
    body, frames = client.call("later", bulk=True)
    assert (body, bytes(frames[0])) == (7, _BIG)


def test_errors_travel_as_their_kind(client: Client) -> None:
    with pytest.raises(FencedError, match="generation 1 is over"):
        client.call("stale", None, [_BIG])
    with pytest.raises(PeerError, match="failed inside the server"):
        client.call("unsayable", bulk=True)
    assert client.call("echo", 2, bulk=True)[0] == 2


def test_control_traffic_goes_on_while_bulk_bytes_flow(
    server: Server, client: Client, key: RunKey
) -> None:
    over = threading.Event()
    other = Client(server.address, key)

    def flood() -> None:
        while not over.is_set():
            other.call("echo", None, [_BIG])

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for n in range(50):
            assert client.call("echo", n, timeout_s=2)[0] == n
    finally:
        over.set()
        flooding.join()
        other.close()


def test_a_deadline_passes_and_the_late_answer_is_not_taken_for_the_next(
    store: Store, client: Client
) -> None:
    with pytest.raises(PeerError, match=r"no answer to keep within 0\.1 s"):
        client.call("keep", bulk=True, timeout_s=0.1)
    store.kept[0].reply("late")
    assert client.call("echo", "fresh", bulk=True)[0] == "fresh"


def test_a_request_is_answered_once_only(server: Server, raw: RawSession, store: Store) -> None:
    raw.send(raw.message("keep"))
    wait_until(lambda: bool(store.kept), lambda: store.taken)
    store.kept[0].reply("first")
    store.kept[0].reply("second")  # would be sealed with the nonce of the first
    store.kept[0].refuse(PeerError("third"))
    assert raw.receive().body == "first"
    raw.send(raw.message("echo", body="next"))
    assert raw.receive().body == "next"


# -- what does not -------------------------------------------------------------------------------


def test_another_runs_key_gets_no_session(server: Server, key: RunKey) -> None:
    other = RunKey.new()
    forged = RunKey(
        server_public=key.server_public,
        server_secret=other.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    intruder = Client(server.address, forged)
    with pytest.raises(PeerError):
        intruder.call("echo", bulk=True, timeout_s=0.3)
    intruder.close()
    assert server.refusals["unauthenticated"] >= 1
    assert server._bulk is None


@pytest.mark.parametrize("user", [b"", b"not hex", b"00" * 16, b"\xff" * 8])
def test_without_a_sessions_token_nobody_may_even_send(
    server: Server, raw: RawSession, store: Store, user: bytes
) -> None:
    known = user or raw.grant.session.hex().encode()
    message = raw.message("echo")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.plain_username, socket.plain_password = known, b"a guess"
        socket.connect(f"tcp://127.0.0.1:{raw.grant.port}")
        with contextlib.suppress(zmq.Again):  # turned away already
            socket.send_multipart(message, zmq.NOBLOCK)
        wait_until(lambda: server.refusals["unauthenticated"] >= 1, lambda: server.refusals)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{raw.grant.port}")
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(message, zmq.NOBLOCK)
        assert not socket.poll(50)
    assert store.taken == []


# Bits of the envelope: 3 bytes magic, kind, 2 bytes count, 16 bytes session, 8 bytes counter.
@pytest.mark.parametrize(
    ("part", "bit", "reason"),
    [
        (0, 0, "malformed"),
        (0, 24, "malformed"),
        (0, 25, "malformed"),
        (0, 40, "malformed"),
        (0, 8 * 6, "unknown_session"),
        (0, 8 * 21, "unknown_session"),
        (0, 8 * 22, "tampered"),
        (0, 8 * 29 + 1, "tampered"),
        (1, 0, "tampered"),
        (1, -1, "tampered"),
        (2, 0, "tampered"),
        (2, 8 * PIECE_BYTES, "tampered"),
        (3, 5, "tampered"),
        (3, -8 * TAG_BYTES, "tampered"),
        (3, -1, "tampered"),
    ],
    ids=str,
)
def test_a_flipped_bit_anywhere_is_refused(
    server: Server, raw: RawSession, store: Store, part: int, bit: int, reason: str
) -> None:
    message = raw.message("echo", [bytes(PIECE_BYTES + 100)])
    damaged = list(message)
    damaged[part] = flipped(message[part], bit % (8 * len(message[part])))
    raw.send(damaged)
    await_refusals(server, **{reason: 1})
    assert store.taken == []
    if reason == "unknown_session":
        assert raw.receive_hint() is MessageKind.UNKNOWN
    raw.send(message)  # what was damaged on the way did not use its counter up
    raw.receive()
    assert store.taken == ["echo"]


def test_parts_that_are_swapped_dropped_or_doubled_are_refused(
    server: Server, raw: RawSession, store: Store
) -> None:
    first, second = raw.message("echo", [b"a" * 50, b"b" * 50]), raw.message("echo", [b"c" * 50])
    envelope, header, a, b = first
    raw.send([envelope, header, b, a])
    raw.send([envelope, a, header, b])
    raw.send([envelope, header, a, second[2]])
    raw.send([envelope, second[1], a, b])
    await_refusals(server, tampered=4)
    raw.send([envelope, header, a])
    raw.send([envelope, header, a, b, b])
    raw.send([envelope, header, a + b, b""])
    raw.send([envelope])
    raw.send([second[0], header, a, b])
    await_refusals(server, tampered=4, malformed=5)
    assert store.taken == []


def test_a_captured_message_is_refused_a_second_time(
    server: Server, raw: RawSession, store: Store
) -> None:
    message = raw.message("echo")
    raw.send(message)
    raw.receive()
    raw.send(message)
    await_refusals(server, replayed=1)
    assert raw.is_silent()
    assert store.taken == ["echo"]


def test_a_captured_message_is_refused_in_another_session(
    server: Server, raw: RawSession, store: Store, key: RunKey
) -> None:
    other = RawSession(server, key)
    message = raw.message("echo")
    raw.send(message)
    raw.receive()
    other.send(message)  # over another connection
    await_refusals(server, replayed=1)
    renamed = message[0].replace(raw.grant.session, other.grant.session)
    other.send([renamed, *message[1:]])  # under another name
    await_refusals(server, replayed=1, tampered=1)
    other.close()
    assert store.taken == ["echo"]


def test_messages_out_of_order_are_refused(server: Server, raw: RawSession, store: Store) -> None:
    first, second = raw.message("echo"), raw.message("echo")
    raw.send(second)
    raw.receive()
    raw.send(first)
    await_refusals(server, replayed=1)


def test_a_message_over_the_limit_is_refused(serve: Serve, key: RunKey, store: Store) -> None:
    server = serve(limits=TransportLimits(message_bytes=_MIB, unanswered_bytes=8 * _MIB))
    raw = RawSession(server, key)
    raw.send(raw.message("echo", [bytes(_MIB // 2), bytes(_MIB // 2 + 1)]))
    await_refusals(server, oversized=1)
    raw.send(raw.message("echo", [bytes(_MIB // 2)]))
    raw.receive()
    raw.close()


def test_a_control_message_over_the_limit_is_refused_with_a_word(client: Client) -> None:
    most = bytes(32 << 20)
    with pytest.raises(PeerError, match=r"more than the .* of a control message"):
        client.call("echo", None, [most], bulk=False)
    with pytest.raises(PeerError, match="bulk=True"):
        client.call("get", len(most))
    assert len(client.call("get", len(most), bulk=True)[1][0]) == len(most)


# -- bounds --------------------------------------------------------------------------------------


def test_more_unanswered_bytes_than_allowed_are_refused_until_some_are_answered(
    serve: Serve, key: RunKey, store: Store
) -> None:
    server = serve(limits=TransportLimits(message_bytes=2 * _MIB, unanswered_bytes=16 * _MIB))
    peers = [RawSession(server, key) for _ in range(4)]
    for peer in peers:  # 3 of 4 MiB that are its share, 12 of 16 MiB in all
        for _ in range(3):
            peer.send(peer.message("keep", [bytes(_MIB)]))
    wait_until(lambda: len(store.kept) == 12, lambda: store.taken)
    for peer in peers:
        refused = peer.message("echo", [bytes(2 * _MIB)[:-100]])
        peer.send(refused)
        answer = peer.receive()
        assert "retry later" in (answer.error or "")
        assert answer.code == BusyError.code
        peer.send(refused)  # it was answered, so it is used up
    await_refusals(server, busy=4, replayed=4)
    store.kept.clear()  # given up by the handler, never answered
    for peer in peers:
        peer.send(peer.message("echo", [bytes(_MIB)]))
        assert peer.receive().lengths == (_MIB,)
        peer.close()


def test_a_client_repeats_what_was_refused_as_busy_until_its_deadline(
    serve: Serve, key: RunKey, store: Store
) -> None:
    server = serve(limits=TransportLimits(message_bytes=_MIB, unanswered_bytes=8 * _MIB))
    crowd = [RawSession(server, key) for _ in range(8)]
    for peer in crowd:
        peer.send(peer.message("keep", [bytes(_MIB - 1000)]))
    wait_until(lambda: len(store.kept) == 8, lambda: store.taken)
    with contextlib.closing(Client(server.address, key)) as client:
        with pytest.raises(PeerError, match="retry later") as refused:
            client.call("echo", None, [bytes(_MIB // 2)], timeout_s=0.1)
        assert refused.value.peer_code == ""  # as no answer: worth repeating
        threading.Timer(0.05, store.kept.clear).start()
        assert len(client.call("echo", None, [bytes(_MIB // 2)])[1][0]) == _MIB // 2
    assert store.taken.count("echo") == 1
    for peer in crowd:
        peer.close()


def test_a_peer_that_reads_no_answers_holds_up_nobody(
    serve: Serve, key: RunKey, store: Store
) -> None:
    server = serve(limits=TransportLimits(message_bytes=2 * _MIB, unanswered_bytes=64 * _MIB))
    deaf, client = RawSession(server, key), Client(server.address, key)
    with contextlib.closing(deaf), contextlib.closing(client):
        deaf.socket.setsockopt(zmq.RCVHWM, 1)
        for _ in range(100):
            deaf.send(deaf.message("get", body=_MIB))
            assert len(client.call("get", _MIB, bulk=True)[1][0]) == _MIB
        assert server._bulk is not None
        assert server._bulk._buffers.lent_bytes <= 64 * _MIB


def test_a_dead_peers_memory_comes_back(serve: Serve, key: RunKey) -> None:
    server = serve()
    deaf, client = RawSession(server, key), Client(server.address, key)
    with contextlib.closing(client):
        for _ in range(10):
            deaf.send(deaf.message("get", body=2 * _MIB))
        client.call("get", _MIB, bulk=True)
        deaf.close()
        assert server._bulk is not None
        buffers = server._bulk._buffers
        wait_until(lambda: buffers.lent_bytes == 0, lambda: buffers.lent_bytes)


# -- sessions ------------------------------------------------------------------------------------


def test_a_client_whose_session_gave_way_gets_another(serve: Serve, key: RunKey) -> None:
    server = serve(limits=TransportLimits(sessions=1))
    clients = [Client(server.address, key) for _ in range(2)]
    for n in range(3):
        for client in clients:
            assert client.call("echo", n, [_BIG])[0] == n
    for client in clients:
        client.close()
    assert server.refusals["unknown_session"] + server.refusals["unauthenticated"] >= 4
    assert len(server._sessions) == 1


def test_an_expired_session_is_replaced(serve: Serve, key: RunKey) -> None:
    server = serve(limits=TransportLimits(session_s=0.2))
    raw, client = RawSession(server, key), Client(server.address, key)
    assert client.call("echo", 1, bulk=True)[0] == 1
    before = client._bulk._grant
    time.sleep(0.2)  # the session's whole life
    assert client.call("echo", 2, bulk=True)[0] == 2
    assert client._bulk._grant != before
    raw.send(raw.message("echo"))
    wait_until(
        lambda: server.refusals["unknown_session"] + server.refusals["unauthenticated"] > 0,
        lambda: server.refusals,
    )
    raw.close()
    client.close()


def test_a_restarted_server_is_found_again(serve: Serve, key: RunKey, store: Store) -> None:
    server = serve()
    client = Client(server.address, key)
    assert client.call("echo", 1, bulk=True)[0] == 1
    server.close()
    serve(bind=server.address)
    assert client.call("echo", 2, bulk=True)[0] == 2
    assert store.taken == ["echo", "echo"]
    client.close()


def test_a_watching_client_hears_at_once_that_its_server_is_gone(serve: Serve, key: RunKey) -> None:
    server = serve()
    client = Client(server.address, key, watch=True)
    client.call("echo", bulk=True)
    threading.Timer(0.1, server.close).start()
    began_s = time.monotonic()
    for _ in range(2):  # in the middle of a call, then before one
        with pytest.raises(PeerError, match="the server has ended"):
            client.call("keep", bulk=True, timeout_s=30)
    assert time.monotonic() - began_s < 10
    client.close()


def test_a_request_that_was_taken_is_not_sent_again(
    server: Server, client: Client, store: Store
) -> None:
    """An attacker on the wire can forge the message that a session is unknown: it is not sealed."""
    refused: list[PeerError] = []

    def ask() -> None:
        with pytest.raises(PeerError) as error:
            client.call("keep", bulk=True)
        refused.append(error.value)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: bool(store.kept), lambda: store.taken)
    peer, session, counter = store.kept[0]._answer.args  # type: ignore[attr-defined]
    forged = Envelope(kind=MessageKind.UNKNOWN, session=session.sealer.session, counter=counter)
    assert server._bulk is not None
    server._bulk._outbox.put([peer, forged.encode()])
    asking.join(DEADLINE_S)
    assert "was accepted, but its answer was lost" in str(refused[0])
    assert client.call("echo", 1, bulk=True)[0] == 1
    assert store.taken == ["keep", "echo"]


def test_a_forged_answer_is_passed_over(server: Server, client: Client, store: Store) -> None:
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(client.call("keep", bulk=True)[0]))
    asking.start()
    wait_until(lambda: bool(store.kept), lambda: store.taken)
    peer, session, counter = store.kept[0]._answer.args  # type: ignore[attr-defined]
    name, header = session.sealer.session, MessageHeader(id=counter, body="forged")
    strange = Sealer(name, bytes(16)).seal(MessageKind.REPLY, counter, header, (), take=_no_memory)
    late = session.sealer.seal(MessageKind.REPLY, counter + 1, header, (), take=_no_memory)
    assert server._bulk is not None
    before = answers_refused()
    for parts in (strange, late, [b"", b"x"], [b"noise" * 6]):
        server._bulk._outbox.put([peer, *parts])
    store.kept[0].reply("genuine")
    asking.join(DEADLINE_S)
    assert answers == ["genuine"]
    assert answers_refused() - before == {"tampered": 1, "malformed": 2}


def _no_memory(nbytes: int) -> memoryview:
    raise AssertionError(nbytes)


def test_a_session_in_place_of_another_ends_that_and_tells_how_far_it_came(
    server: Server, raw: RawSession, key: RunKey
) -> None:
    for _ in range(3):
        raw.send(raw.message("echo"))
        raw.receive()
    assert ask_session(server, key, instead=raw.grant.session).seen == 3
    raw.send(raw.message("echo"))
    await_refusals(server, unknown_session=1)
    assert raw.receive_hint() is MessageKind.UNKNOWN
    assert ask_session(server, key, instead=raw.grant.session).seen == -1
