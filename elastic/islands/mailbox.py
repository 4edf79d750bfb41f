"""The files by which islands meet, beside the logbook: works, payloads, signs of life, requests."""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

import msgspec

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.elastic.islands import messages
from holdfast.elastic.islands.haul.line import PacedLine, PacedLines
from holdfast.elastic.islands.messages import Asked, Given, Sign
from holdfast.elastic.sea import records
from holdfast.elastic.sea.records import Work

_ANSWER: Final = "answer.json"
_SMALL_BYTES: Final = 1 << 20
_DIGEST_BYTES: Final = 16
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


def digest_of(payload: bytes) -> str:
    """Return the digest that names a payload."""
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).hexdigest()


class Mailbox:
    """One island's access to the files of all. Payloads go by its ``lines``."""

    def __init__(self, store: Store, *, lines: PacedLines | None = None) -> None:
        self.store = store
        self.lines = PacedLines() if lines is None else lines
        self._before: set[tuple[int, int, int]] | None = None
        """The works that were there before this object published its first."""

    @property
    def sent(self) -> int:
        """The bytes of payloads that were sent."""
        return self.lines.up.nbytes

    @property
    def fetched(self) -> int:
        """The bytes of payloads that were fetched."""
        return self.lines.down.nbytes

    # -- works and payloads ----------------------------------------------------------------------

    def publish(self, work: Work, payload: bytes) -> Work:
        """Publish a work with its payload; return the one that counts: the first of its tide.

        An island that went back may have published the same tide before, with other bits.
        """
        key = work.island, work.lineage, work.tide, work.portion
        if self._before is None:
            self._before = set(self.works_of(work.island))
        if key[1:] in self._before and (known := self.work(*key)) is not None:
            return known
        with self.lines.up.transfer() as up:
            self.store.write(_payload(work.island, work.digest), up.paced(payload))
        if self.store.replace(_work(*key), records.encode(work), expected=None):
            return work
        return self.work(*key) or work

    def work(self, island: str, lineage: int, tide: int, portion: int) -> Work | None:
        """Return an island's work of a portion, taken at a tide; None while there is none."""
        name = _work(island, lineage, tide, portion)
        if (data := self._read(name)) is None:
            return None
        return records.decode_work(data, origin=self.store.where(name))

    def works_of(self, island: str) -> list[tuple[int, int, int]]:
        """Return lineage, tide and portion of each work that an island has published."""
        return [_numbers(name) for name in self.store.names(f"works/{island}")]

    def payload(self, island: str, digest: str) -> bytes:
        """Return the payload of this digest.

        Raises ``NotFoundError`` if it was removed, ``CorruptError`` if its bytes are others.
        """
        name = _payload(island, digest)
        with self.lines.down.transfer() as down:
            data = self._paced_read(name, down)
        if digest_of(data) != digest:
            raise CorruptError(
                f"{self.store.where(name)}: its {len(data)} bytes are not those of its name; "
                "restore the file"
            )
        return data

    def _paced_read(self, name: str, down: PacedLine) -> bytes:
        """Return a file's bytes, in pieces where the line has a pace."""
        if not down.bytes_per_s:
            data = self.store.read(name)
            down.pay(len(data))
            return data
        file = self.store.open(name)
        try:
            room = memoryview(bytearray(file.nbytes))
            for at in range(0, file.nbytes, down.piece_bytes):
                piece = room[at : at + down.piece_bytes]
                if file.read_into([piece], at) < piece.nbytes:
                    raise CorruptError(f"{self.store.where(name)}: it ends early; restore the file")
                down.pay(piece.nbytes)
            return bytes(room)
        finally:
            file.close()

    def forget_before(self, island: str, tide: int) -> None:
        """Remove an island's works of earlier tides, and every payload that no work names.

        Only the island itself may call it, while it publishes nothing.
        """
        kept = set[str]()
        old: list[str] = []
        for name in self.store.names(f"works/{island}"):
            if _numbers(name)[1] < tide:
                old.append(f"works/{island}/{name}")
            elif (data := self._read(f"works/{island}/{name}")) is not None:
                kept.add(records.decode_work(data, origin=name).digest)
        self.store.delete(old)
        names = self.store.names(f"payloads/{island}")
        self.store.delete(f"payloads/{island}/{name}" for name in names if name not in kept)

    # -- signs of life ---------------------------------------------------------------------------

    def show(self, island: str, sign: Sign) -> None:
        """Publish a sign of life."""
        self.store.write(_sign(island), [messages.encode(sign)])

    def sign(self, island: str) -> Sign | None:
        """Return the last sign of life of an island, None if there was none."""
        return self._message(_sign(island), Sign)

    # -- requests for weights --------------------------------------------------------------------

    def ask(self, request: Asked) -> None:
        """Ask for the sea's weights; a new request replaces the island's last one."""
        self.store.write(_asked(request.island), [messages.encode(request)])

    def asked(self) -> list[Asked]:
        """Return the requests that are open."""
        names = [f"asked/{name}" for name in self.store.names("asked")]
        found = [self._message(name, Asked) for name in names]
        return [each for each in found if each is not None]

    def given_root(self, request: Asked, *, by: str) -> str:
        """Return the root of the checkpoint with which an island answers a request."""
        return self.store.where(f"given/{request.id}/{by}")

    def give(self, request: Asked, answer: Given) -> None:
        """Publish the answer to a request, unless another island was faster."""
        name = _answer(request.id)
        self.store.replace(name, messages.encode(answer), expected=None)

    def given(self, request: Asked) -> Given | None:
        """Return the answer to a request, None while there is none."""
        return self._message(_answer(request.id), Given)

    def close_request(self, request: Asked) -> None:
        """Remove a request and the answer to it; the weights stay."""
        current = self._message(_asked(request.island), Asked)
        if current is not None and current.id == request.id:
            self.store.delete([_asked(request.island)])
        self.forget_answer(request.id)

    def forget_answer(self, request: str) -> None:
        """Remove the answer to a request, by its id; the weights stay."""
        self.store.delete([_answer(request)])
        for by in self.store.names(f"given/{request}"):
            self.store.remove(f"given/{request}/{by}")
        self.store.remove(f"given/{request}")

    def answered(self) -> list[str]:
        """Return the ids of the requests of which an answer, or weights, are there."""
        return self.store.names("given")

    def given_roots(self, request: str) -> list[str]:
        """Return the roots of the weights that were given for a request, by its id."""
        names = self.store.names(f"given/{request}")
        return [self.store.where(f"given/{request}/{by}") for by in names if by != _ANSWER]

    def is_open(self, request: Asked) -> bool:
        """Return whether an island still waits for the answer to its request."""
        current = self._message(_asked(request.island), Asked)
        return current is not None and current.id == request.id

    # -- files -----------------------------------------------------------------------------------

    def _message(self, name: str, kind: type[_Kind]) -> _Kind | None:
        if (data := self._read(name)) is None:
            return None
        return messages.decode(data, kind, origin=self.store.where(name))

    def _read(self, name: str) -> bytes | None:
        try:
            return self.store.read(name, most_bytes=_SMALL_BYTES)
        except NotFoundError:
            return None


def _work(island: str, lineage: int, tide: int, portion: int) -> str:
    return f"works/{island}/{lineage:08d}-{tide:08d}-{portion:04d}.json"


def _numbers(name: str) -> tuple[int, int, int]:
    """Return lineage, tide and portion in the name of a work's file."""
    lineage, tide, portion = map(int, name.removesuffix(".json").split("-"))
    return lineage, tide, portion


def _payload(island: str, digest: str) -> str:
    return f"payloads/{island}/{digest}"


def _sign(island: str) -> str:
    return f"alive/{island}.json"


def _asked(island: str) -> str:
    return f"asked/{island}.json"


def _answer(request: str) -> str:
    return f"given/{request}/{_ANSWER}"
