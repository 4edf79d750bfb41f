"""The server of an island's newest payloads, for the other islands of its sea."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.ckpt.errors import BusyError, PeerError, StoreError
from holdfast.ckpt.transport import Request, RunKey, Server
from holdfast.ckpt.types import learn
from holdfast.elastic.islands.haul.line import PacedLine

PULL: Final = "payload"
"""The only operation: a piece of a payload."""

MOST_PIECE_BYTES: Final = 1 << 20
_OFFERED: Final = 2
"""The newest payloads that are kept; others lie in the store."""

_WAITING: Final = 64
"""Requests that wait for the line; a peer has one for each payload that it fetches."""

_CLOSE_S: Final = 5.0


class Pull(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for bytes of a payload, from the offset ``at`` on."""

    digest: Annotated[str, Meta(max_length=64)]
    at: Annotated[int, Meta(ge=0)]


class PulledPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer, whose frame has the bytes; ``size`` is the payload's, -1: it is not here."""

    size: int


class Offers:
    """Serves payloads by digest to whoever has the sea's key. Nothing else can be asked of it.

    They go at the pace of ``up``, on a thread of their own. ``port`` 0: any. Raises ``PeerError``
    if the address cannot be bound.
    """

    def __init__(self, key: RunKey, *, host: str, port: int, up: PacedLine) -> None:
        self._up, self._lock = up, threading.Lock()
        self._payloads: OrderedDict[str, bytes] = OrderedDict()
        self._waiting: queue.Queue[tuple[Request, Pull] | None] = queue.Queue(_WAITING)
        self._closed = threading.Event()
        self._server = Server(self._handle, key=key, bind=f"tcp://{host}:{port or '*'}")
        self.port = int(self._server.address.rpartition(":")[2])
        self._thread = threading.Thread(target=self._serve, name="islands-offers", daemon=True)
        self._thread.start()

    def offer(self, digest: str, payload: bytes) -> None:
        """Serve a payload; the oldest one gives way."""
        with self._lock:
            self._payloads[digest] = payload
            self._payloads.move_to_end(digest)
            while len(self._payloads) > _OFFERED:
                self._payloads.popitem(last=False)

    @property
    def refused(self) -> int:
        """The number of connections and messages that were not let in."""
        return sum(self._server.refusals.values())

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        self._closed.set()
        with contextlib.suppress(queue.Full):  # else the thread finds others, and then the end
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _handle(self, request: Request) -> None:
        if request.op != PULL:
            raise PeerError(f"{request.op}: an island gives payloads, and nothing else")
        try:
            asked = msgspec.convert(request.body, Pull)
        except msgspec.ValidationError as error:
            raise PeerError(f"{request.op}: malformed request: {error}") from error
        try:
            self._waiting.put_nowait((request, asked))
        except queue.Full:
            raise BusyError("too many requests wait for this island's line") from None

    def _serve(self) -> None:
        while (found := self._waiting.get()) is not None and not self._closed.is_set():
            request, asked = found
            try:
                self._answer(request, asked)
            except StoreError as error:  # the generation ends
                request.refuse(PeerError(str(error)))

    def _answer(self, request: Request, asked: Pull) -> None:
        with self._lock:
            payload = self._payloads.get(asked.digest)
        if payload is None:
            request.reply(msgspec.to_builtins(PulledPiece(size=-1)))
            return
        room = min(MOST_PIECE_BYTES, self._up.piece_bytes)
        piece = memoryview(payload)[asked.at : asked.at + room]
        with self._up.transfer() as up:
            request.reply(msgspec.to_builtins(PulledPiece(size=len(payload))), [piece])
            up.pay(piece.nbytes)


learn(globals())
