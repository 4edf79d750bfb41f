"""The messages between a worker and its agent: one JSON object per line over a socket pair."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.types import Json
from holdfast.elastic.membership.records import GenerationRecord, JobSpec, Roster

MAX_LINE_BYTES = 64 << 20
"""A longer line means a broken peer: a generation of 10,000 nodes fits well within."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Worker: it is parked, and can take part in a generation newer than ``after``."""

    after: int
    spec: JobSpec | None
    info: dict[str, Json]


class Emit(msgspec.Struct, frozen=True, kw_only=True, tag="emit"):
    """Worker: an event for the node's event file (`holdfast.elastic.events`), with its time."""

    event: msgspec.Raw


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Worker: its part of the job is complete; ``lingers``: unless another stage follows."""

    result: Json
    lingers: bool = False


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """Worker: it cannot continue; ``user_error`` means that a retry would not help.

    ``fault`` is as in `WorkerRecord`.
    """

    message: str
    user_error: bool
    fault: str = ""


class Halted(msgspec.Struct, frozen=True, kw_only=True, tag="halted"):
    """Worker: it has halted at the end of ``step``, of which its node has a snapshot."""

    generation: int
    step: int


class HandedOver(msgspec.Struct, frozen=True, kw_only=True, tag="handed_over"):
    """Worker: it has halted at the end of ``step``, which is safe without its node."""

    generation: int
    step: int


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Agent: this generation contains you, and the local sidecar knows it."""

    record: GenerationRecord


class Fence(msgspec.Struct, frozen=True, kw_only=True, tag="fence"):
    """Agent: this generation is over; the control page says the same, for pollers."""

    generation: int


class RosterChanged(msgspec.Struct, frozen=True, kw_only=True, tag="roster"):
    """Agent: the present state of the whole job."""

    roster: Roster


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Agent: the job is over; end by yourself within the grace period."""

    reason: str


FromWorker: TypeAlias = Ready | Emit | Done | Fail | Halted | HandedOver
FromAgent: TypeAlias = Begin | Fence | RosterChanged | Stop

from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(
    Ready | Emit | Done | Fail | Halted | HandedOver
)
from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(
    Begin | Fence | RosterChanged | Stop
)


def encode(message: FromWorker | FromAgent) -> bytes:
    """Return the message as one line."""
    return msgspec.json.encode(message) + b"\n"


class LineReader:
    """Splits a byte stream into lines; refuses a line that grows beyond ``limit_bytes``."""

    def __init__(self, *, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit = limit_bytes
        self._parts: list[bytes] = []
        self._buffered_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes. Raises ``HoldfastError`` past the limit."""
        lines: list[bytes] = []
        *complete, rest = data.split(b"\n")
        for part in complete:
            lines.append(b"".join([*self._parts, part]))
            self._parts, self._buffered_bytes = [], 0
        if rest:
            self._parts.append(rest)
            self._buffered_bytes += len(rest)
        if self._buffered_bytes > self._limit:
            raise HoldfastError(
                f"a message of more than {self._limit} bytes without an end: the peer is broken"
            )
        return lines
