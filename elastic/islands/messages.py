"""The small files beside the logbook, which islands read of each other. Pure values."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.types import learn

Address: TypeAlias = Annotated[str, Meta(pattern=r"\A(tcp://[A-Za-z0-9.-]{1,253}:\d{1,5})?\Z")]

_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class LineFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An island's line in bytes per second.

    ``uplink`` and ``downlink`` are declared, 0: they are not. ``up`` and ``down`` were measured
    while payloads went, 0 before any did.
    """

    uplink: int = 0
    downlink: int = 0
    up: float = 0.0
    down: float = 0.0


class Sign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sign of life of an island: the run ``run`` counts the ``number`` up.

    It may still need the works of ``needs`` and later tides: it may fall back to a state that has
    adopted only the ones before. After ``step`` steps it has adopted ``tide`` merges. ``waiting_s``
    are the seconds for which it waits by now, 0 while it trains; ``sent_bytes`` and
    ``fetched_bytes`` are those of payloads since its generation began. ``step_s`` are the seconds
    of a step of late. At ``address`` others get its payloads, "" where they go by the store alone.
    """

    island: str
    run: str
    number: int
    needs: int
    step: int = 0
    tide: int = 0
    waiting_s: float = 0.0
    sent_bytes: int = 0
    fetched_bytes: int = 0
    step_s: float = 0.0
    line: LineFigures = LineFigures()
    address: Address = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request for the sea's weights of an island that has no state; ``id`` is new each time.

    ``beat`` counts the signs of life that the island gives while it waits for the answer.
    """

    island: str
    id: str
    beat: int = 0


class Given(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a request: weights and momentum after ``tide`` merges, and where they lie.

    ``bases`` counts the merges of each portion.
    """

    by: str
    tide: int
    bases: tuple[int, ...]


def encode(message: Sign | Asked | Given) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[_Kind], *, origin: str) -> _Kind:
    """Parse a message. Raises ``CorruptError`` naming ``origin``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{origin}: not the file of an island: {error}; remove it, its writer writes it anew"
        ) from error


learn(globals())
