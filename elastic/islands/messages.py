"""The small files beside the logbook, which islands read of each other. Pure values."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.types import learn

_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class Sign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sign of life of the run ``run``: the ``beat`` grows.

    The island may still need the works of ``needs`` and later tides; it may fall back to a state
    that has adopted the ones before.
    """

    run: str
    beat: int
    needs: int


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request for the sea's weights of an island that has no state; ``id`` is new each time."""

    island: str
    id: str


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
