"""Messages of the transport as bytes: their headers, and the envelopes of sealed ones. Pure.

A control message is a header and frames. A sealed one is an envelope in clear, then the header,
then the frames cut into pieces of a megabyte, each part sealed separately. The envelope is
authenticated with every part, and the number of a part is in its nonce, so parts cannot be changed,
swapped, dropped or moved to another message. The lengths of the frames are in the header.

Decoding trusts no length or count: its allocations are bounded by the bytes passed to it, and its
only error is `EnvelopeError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec

from holdfast.ckpt.errors import InternalError
from holdfast.ckpt.types import Json, learn

HEADER_BYTES: Final = 32 << 20
"""The most bytes of one message's JSON header, or of its body where that travels as a frame."""

CONTROL_BYTES: Final = 256 << 10
"""The most bytes of one control request, header and frames together; larger ones are sealed.

It bounds the memory that a connection without the run's key can take of a server.
"""

ANSWER_BYTES: Final = 32 << 20
"""The most bytes of one control answer, header and frames together."""

BULK_BYTES: Final = 128 << 20
"""The most bytes of one sealed message, seals included."""

MAX_FRAMES: Final = 8192
"""The most frames of one sealed message."""

PIECE_BYTES: Final = 1 << 20
"""Frames are sealed and sent in pieces of at most this size.

A piece stays in the processor's cache, and the receiver need not map fresh memory for each.
"""

MAX_PARTS: Final = MAX_FRAMES + BULK_BYTES // PIECE_BYTES

TAG_BYTES: Final = 16
PART_BYTES: Final = PIECE_BYTES + TAG_BYTES
"""The most bytes of one part of a sealed message."""

SESSION_BYTES: Final = 16
_MAGIC: Final = b"HF1"
_LAYOUT: Final = struct.Struct(">3sBH16sQ")
ENVELOPE_BYTES: Final = _LAYOUT.size


class Reason(Enum):
    """The reason of a refusal; its value is the name under which refusals are counted."""

    UNAUTHENTICATED = "unauthenticated"
    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    UNKNOWN_SESSION = "unknown_session"
    REPLAYED = "replayed"
    TAMPERED = "tampered"
    BUSY = "busy"


class EnvelopeError(InternalError):
    """A message is refused; ``reason`` is counted. Not for users of the package."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class MessageHeader(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The header of a message, sent before its frames. Only an answer has ``error`` and ``code``.

    ``lengths`` are those of the frames of a sealed message. With ``apart`` the last of them is the
    body: no part is larger than a piece, so that receivers need not take larger ones.
    """

    id: int
    op: str = ""
    body: Json = None
    error: str | None = None
    code: str = ""
    lengths: tuple[int, ...] = ()
    apart: bool = False


encode_header = msgspec.json.encode
_decode_header = msgspec.json.Decoder(MessageHeader).decode


def decode_header(data: Any) -> MessageHeader:
    """Return the header in ``data``. Raises ``EnvelopeError``."""
    if len(data) > HEADER_BYTES:
        raise EnvelopeError(Reason.OVERSIZED, f"a header of {len(data):,} bytes")
    try:
        return _decode_header(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvelopeError(Reason.MALFORMED, f"no header: {error}") from None


def decode_body(data: Any) -> Json:
    """Return the body that travelled as a frame. Raises ``EnvelopeError``."""
    if len(data) > HEADER_BYTES:
        raise EnvelopeError(Reason.OVERSIZED, f"a body of {len(data):,} bytes")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvelopeError(Reason.MALFORMED, f"no body: {error}") from None


class MessageKind(Enum):
    """The kind of a sealed message; ``UNKNOWN``: the server does not know its session."""

    REQUEST = 0
    REPLY = 1
    UNKNOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The part of a sealed message that travels in clear: 30 bytes.

    ``session`` names the key, ``counter`` grows with every request of the session, and ``pieces``
    is the number of parts besides the header.
    """

    kind: MessageKind
    session: bytes
    counter: int
    pieces: int = 0

    def encode(self) -> bytes:
        """Return the bytes, which are also the associated data of every sealed part."""
        return _LAYOUT.pack(_MAGIC, self.kind.value, self.pieces, self.session, self.counter)

    def nonce(self, part: int) -> bytes:
        """Return 12 bytes that are unique among all parts sealed under the session's key.

        ``part`` is 0 for the header, then counts the pieces.
        """
        return struct.pack(">BQ", self.kind.value, self.counter) + part.to_bytes(3, "big")


def decode_envelope(data: Any) -> Envelope:
    """Return the envelope in ``data``. Raises ``EnvelopeError``."""
    if len(data) != ENVELOPE_BYTES:
        raise EnvelopeError(Reason.MALFORMED, f"an envelope of {len(data)} bytes")
    magic, kind, pieces, session, counter = _LAYOUT.unpack(data)
    if magic != _MAGIC or kind not in _KINDS:
        raise EnvelopeError(Reason.MALFORMED, "no envelope of this version")
    if pieces > MAX_PARTS:
        raise EnvelopeError(Reason.OVERSIZED, f"{pieces} pieces, more than {MAX_PARTS}")
    return Envelope(kind=_KINDS[kind], session=session, counter=counter, pieces=pieces)


_KINDS: Final = {kind.value: kind for kind in MessageKind}


def parse_sealed(parts: Sequence[Any], *, limit_bytes: int = BULK_BYTES) -> Envelope:
    """Return the envelope of a message, after checking the number and sizes of its parts."""
    if not parts:
        raise EnvelopeError(Reason.MALFORMED, "a message without parts")
    envelope = decode_envelope(parts[0])
    sealed = 0 if envelope.kind is MessageKind.UNKNOWN else envelope.pieces + 1
    if len(parts) != sealed + 1:
        raise EnvelopeError(Reason.MALFORMED, f"{len(parts)} parts, not {sealed + 1}")
    sizes = [len(part) for part in parts[1:]]
    if sum(sizes) > limit_bytes:
        raise EnvelopeError(Reason.OVERSIZED, f"{sum(sizes):,} bytes, more than {limit_bytes:,}")
    if sizes and min(sizes) < TAG_BYTES:
        raise EnvelopeError(Reason.MALFORMED, "a part too short for its seal")
    return envelope


def cut(lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the pieces into which frames are cut; an empty frame has none."""
    return [
        min(PIECE_BYTES, length - at) for length in lengths for at in range(0, length, PIECE_BYTES)
    ]


def check_lengths(lengths: Sequence[int], sealed: Sequence[int]) -> None:
    """Raise ``EnvelopeError`` unless these frames' pieces have just the ``sealed`` sizes."""
    if len(lengths) > MAX_FRAMES:
        raise EnvelopeError(Reason.OVERSIZED, f"{len(lengths)} frames, more than {MAX_FRAMES}")
    plain = [size - TAG_BYTES for size in sealed]
    if min(lengths, default=0) < 0 or sum(lengths) != sum(plain) or cut(lengths) != plain:
        raise EnvelopeError(Reason.MALFORMED, "pieces that do not make the frames announced")


learn(globals())
