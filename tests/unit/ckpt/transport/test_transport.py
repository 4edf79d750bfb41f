"""The transport: authenticated, deferred, bounded, and fenced if the server says so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from newer_peer import NewerError, newer_handler

from holdfast.ckpt.errors import FencedError, InternalError, NotFoundError, PeerError
from holdfast.ckpt.transport import Client, Request, RunKey, Server
from holdfast.ckpt.transport.sockets import NoAnswerError


class Echo:
    """Answers ``echo`` at once, ``late`` from another thread, ``never`` not at all."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, request: Request) -> None:
        match request.op:
            case "echo":
                request.reply(request.body, request.frames)
            case "late":
                threading.Thread(target=self._reply_late, args=(request,)).start()
            case "stale":
                raise FencedError("generation 1 is over, 2 acts")
            case "lost":
                raise NotFoundError("step 3 is not there")
            case "newer":
                newer_handler(request)
            case "unhandled":
                raise NoAnswerError("a signal of the server's own")
            case "broken":
                raise RuntimeError("a bug")
            case _:
                pass

    def _reply_late(self, request: Request) -> None:
        self.release.wait(10)
        request.reply("late")


@pytest.fixture
def key() -> RunKey:
    return RunKey.new()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(key: RunKey, echo: Echo) -> Iterator[Server]:
    server = Server(echo, key=key)
    yield server
    server.close()


@pytest.fixture
def client(server: Server, key: RunKey) -> Iterator[Client]:
    client = Client(server.address, key)
    yield client
    client.close()


def test_a_request_returns_body_and_frames(client: Client) -> None:
    body, frames = client.call("echo", {"n": 1}, [b"abc", memoryview(b"")])
    assert body == {"n": 1}
    assert [bytes(frame) for frame in frames] == [b"abc", b""]


def test_a_deferred_reply_does_not_hold_up_others(
    server: Server, client: Client, key: RunKey, echo: Echo
) -> None:
    replies: list[object] = []
    waiter = threading.Thread(target=lambda: replies.append(client.call("late")[0]))
    waiter.start()
    other = Client(server.address, key)
    assert other.call("echo", 2)[0] == 2
    assert not replies
    echo.release.set()
    waiter.join(10)
    other.close()
    assert replies == ["late"]


def test_a_fenced_caller_is_told_so(client: Client) -> None:
    with pytest.raises(FencedError, match="generation 1 is over"):
        client.call("stale")


def test_a_broken_handler_refuses_one_request_and_serves_the_next(client: Client) -> None:
    with pytest.raises(PeerError, match="a bug"):
        client.call("broken")
    assert client.call("echo", 3)[0] == 3


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ("lost", NotFoundError.code),
        ("newer", NewerError.code),
        ("unhandled", InternalError.code),
        ("broken", InternalError.code),
        ("never", ""),
    ],
)
@pytest.mark.parametrize("bulk", [False, True])
def test_a_refusal_has_the_code_of_the_error_that_the_peer_raised(
    client: Client, op: str, code: str, bulk: bool
) -> None:
    assert client.call("echo", bulk=bulk)[0] is None
    with pytest.raises(PeerError) as refused:
        client.call(op, bulk=bulk, timeout_s=0.5 if op == "never" else None)
    assert type(refused.value) is PeerError
    assert refused.value.peer_code == code


def test_a_deadline_passes_and_the_client_goes_on(client: Client) -> None:
    with pytest.raises(PeerError, match=r"no answer to never within 0\.05 s"):
        client.call("never", timeout_s=0.05)
    assert client.call("echo", 4)[0] == 4


def test_without_the_runs_key_nothing_gets_through(server: Server, key: RunKey) -> None:
    other = RunKey.new()
    forged = RunKey(
        server_public=key.server_public,
        server_secret=other.server_secret,
        client_public=other.client_public,
        client_secret=other.client_secret,
    )
    intruder = Client(server.address, forged)
    with pytest.raises(PeerError):
        intruder.call("echo", timeout_s=0.3)
    intruder.close()
    assert server.refusals["unauthenticated"] >= 1


def test_without_encryption_nothing_gets_through(server: Server) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.address)
        socket.send_multipart([b'{"id":1,"op":"echo"}'])
        assert not socket.poll(200)


def test_a_malformed_header_is_counted_and_dropped(server: Server, client: Client) -> None:
    client._control.socket.send_multipart([b"\xffnot json"])
    client._control.socket.send_multipart([b'{"op": 3}'])
    assert client.call("echo", 5)[0] == 5
    assert server.refusals == {"malformed": 2}


def test_a_port_in_use_names_the_address(server: Server, key: RunKey) -> None:
    with pytest.raises(PeerError, match="cannot listen at tcp://127"):
        Server(lambda request: None, key=key, bind=server.address)


def test_a_key_survives_its_file_and_a_bad_file_is_named(tmp_path, key: RunKey) -> None:
    path = tmp_path / "key.json"
    key.save(path)
    assert RunKey.load(path) == key
    assert path.stat().st_mode & 0o077 == 0
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(PeerError, match=r"bad\.json"):
        RunKey.load(tmp_path / "bad.json")


def test_a_watching_client_hears_at_once_that_its_server_is_gone(key: RunKey) -> None:
    server = Server(Echo(), key=key)
    client = Client(server.address, key, watch=True)
    client.call("echo")
    threading.Timer(0.1, server.close).start()
    began_s = time.monotonic()
    for _ in range(2):  # in the middle of a call, then before one
        with pytest.raises(PeerError, match="the server has ended"):
            client.call("never", timeout_s=30)
    assert time.monotonic() - began_s < 10
    client.close()


def test_a_client_that_is_dropped_unclosed_is_collected_and_hangs_nobody() -> None:
    code = (
        "import gc, sys\n"
        "from holdfast.ckpt.errors import PeerError\n"
        "from holdfast.ckpt.transport import Client, RunKey, Server\n"
        "key = RunKey.new()\n"
        "server = Server(lambda request: request.reply(None, [bytes(10)]), key=key)\n"
        "for bulk in (False, True, None):\n"
        "    client = Client(server.address, key, watch=True)\n"
        "    if bulk is not None:\n"
        "        client.call('read', bulk=bulk)\n"
        "    del client\n"
        "    gc.collect()\n"
        "server.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
