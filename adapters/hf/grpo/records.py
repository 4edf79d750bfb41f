"""Records of a log of finished work: each has a part of one entry's bytes, under a key. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from holdfast.ckpt.errors import CorruptError

PART_BYTES: Final = 1 << 20
_LENGTH_BYTES: Final = 4


class RecordHead(msgspec.Struct, frozen=True, kw_only=True):
    """The begin of a record: part ``part`` of ``parts`` of the entry ``key``."""

    key: str
    part: int
    parts: int


def split(key: str, data: bytes, *, part_bytes: int = PART_BYTES) -> list[bytes]:
    """Return the records of an entry."""
    pieces = [data[at : at + part_bytes] for at in range(0, len(data), part_bytes)] or [b""]
    return [
        _framed(RecordHead(key=key, part=number, parts=len(pieces)), piece)
        for number, piece in enumerate(pieces)
    ]


def join(records: Iterable[bytes]) -> dict[str, bytes]:
    """Return the whole entries by key; the last of a key counts.

    Raises ``CorruptError`` for a record that is none.
    """
    found = dict[str, bytes]()
    open_ = dict[str, dict[int, bytes]]()
    for record in records:
        head, piece = _parsed(record)
        if head.part == 0:
            open_[head.key] = {}
        pieces = open_.get(head.key, {})
        pieces[head.part] = piece
        if len(pieces) == head.parts:
            found[head.key] = b"".join(pieces[number] for number in sorted(pieces))
    return found


def chosen(entries: Mapping[str, bytes], *, begin: str) -> dict[str, bytes]:
    """Return the entries whose keys begin so, by the rest of the key."""
    return {key.removeprefix(begin): data for key, data in entries.items() if key.startswith(begin)}


def _framed(head: RecordHead, piece: bytes) -> bytes:
    text = msgspec.json.encode(head)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + piece


def _parsed(record: bytes) -> tuple[RecordHead, bytes]:
    end = _LENGTH_BYTES + int.from_bytes(record[:_LENGTH_BYTES], "little")
    try:
        return msgspec.json.decode(record[_LENGTH_BYTES:end], type=RecordHead), record[end:]
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"a record of {len(record)} bytes that is no part of an entry"
        ) from error
