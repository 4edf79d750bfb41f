"""JSON records in an envelope with their checksum, as a checkpoint's files are. Pure.

The envelope is ``{"crc32c":"…","body":…}`` on one line; the checksum covers the body's bytes. A
record has one spelling, so that every reader of JSON reads it alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.types import Json, learn

_HEAD: Final = b'{"crc32c":"%08x","body":'
_HEAD_START: Final = _HEAD.partition(b"%")[0]
_HEAD_BYTES: Final = len(_HEAD % 0)
_TAIL: Final = b"}\n"


class _Versioned(Protocol):
    @property
    def format(self) -> int: ...


_Record = TypeVar("_Record", bound=_Versioned)


class _Version(msgspec.Struct):
    format: int


def seal(record: _Versioned) -> bytes:
    """Return the file's bytes for ``record``: its JSON in an envelope with its checksum."""
    return _enveloped(msgspec.json.encode(record, order="deterministic"))


def _enveloped(body: bytes) -> bytes:
    return b"".join((_HEAD % crc32c(body), body, _TAIL))


def unseal(data: bytes, kind: type[_Record], *, origin: str, formats: Sequence[int]) -> _Record:
    """Return the record of ``kind`` in a file's bytes, in one of the ``formats``.

    Raises ``CorruptError``, which names ``origin``, for other bytes than `seal` returns.
    """
    sealed = data.startswith(_HEAD_START) and data.endswith(_TAIL)  # cheap, however long it is
    body = data[_HEAD_BYTES : -len(_TAIL)] if sealed else b""
    if not sealed or data[:_HEAD_BYTES] != _HEAD % crc32c(body):
        raise CorruptError(
            f"{origin}: its checksum does not match its {len(data)} bytes: the file was changed or "
            "cut off; load another step, or restore the file from a copy"
        )
    try:
        record = msgspec.json.decode(body, type=kind)
        version = record.format
        if version in formats:
            _check_spelling(record, body, version)
            return record
    except RecursionError as error:
        raise CorruptError(
            f"{origin}: nested too deeply to be a {kind.__name__}; load another step"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        found = _version_of(body)
        if found is None or found in formats:
            raise CorruptError(
                f"{origin}: not a {kind.__name__}: {error}; load another step"
            ) from error
        version = found
    raise CorruptError(
        f"{origin}: format {version}, this version reads {', '.join(map(str, formats))}; "
        "install the Holdfast version that wrote it"
    )


def _version_of(body: bytes) -> int | None:
    """Return the format of a file that has other fields than this version knows."""
    try:
        return msgspec.json.decode(body, type=_Version).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _check_spelling(record: _Versioned, body: bytes, version: int) -> None:
    """Refuse bytes that other JSON readers could read differently, such as repeated keys."""
    if version > 1:
        if msgspec.json.encode(record, order="deterministic") != body:
            raise ValueError("not in the canonical form (a repeated or unknown field?)")
        return
    json.loads(body, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Json]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"a field occurs twice among {sorted(keys)[:20]}")


learn(globals())
