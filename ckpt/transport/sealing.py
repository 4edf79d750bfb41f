"""Sealing and opening of messages: AES-128-GCM, one nonce per part (see `envelope`).

The `cryptography` package works without the GIL, into memory from a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast.ckpt.transport.envelope import (
    BULK_BYTES,
    MAX_FRAMES,
    PIECE_BYTES,
    TAG_BYTES,
    Envelope,
    EnvelopeError,
    MessageHeader,
    MessageKind,
    Reason,
    check_lengths,
    decode_body,
    decode_header,
    encode_header,
)

KEY_BYTES = 16
_POOLED_BYTES = 64 << 10
"""Shorter parts are not worth a buffer of the pool; ZeroMQ copies them anyway."""

Take = Callable[[int], memoryview]
"""Returns writable memory of the given length."""


class Sealer:
    """Seals and opens with the key of one session, in both directions.

    It has no state: the caller counts, and must never seal the same pair of kind and counter twice.
    """

    def __init__(self, session: bytes, key: bytes) -> None:
        self.session = session
        self._cipher = AESGCM(key)

    def seal(
        self,
        kind: MessageKind,
        counter: int,
        header: MessageHeader,
        frames: Sequence[Any],
        *,
        take: Take,
    ) -> list[Any]:
        """Return the parts of a sealed message. Raises ``EnvelopeError`` for one too large."""
        views = [memoryview(frame).cast("B") for frame in frames]
        header.lengths = tuple(view.nbytes for view in views)
        text = memoryview(encode_header(header))
        if text.nbytes > PIECE_BYTES:
            body = memoryview(encode_header(header.body))
            views.append(body)
            lengths = (*header.lengths, body.nbytes)
            header = msgspec.structs.replace(header, body=None, lengths=lengths, apart=True)
            text = memoryview(encode_header(header))
        plain = [text, *(piece for view in views for piece in _pieces(view, 0))]
        size = sum(part.nbytes + TAG_BYTES for part in plain)
        if len(views) > MAX_FRAMES or size > BULK_BYTES or text.nbytes > PIECE_BYTES:
            raise EnvelopeError(Reason.OVERSIZED, f"{len(views)} frames and {size:,} bytes")
        rooms = [_memory(_sealed_bytes(view), take) for view in views]  # first, as it may raise
        sealed = [memoryview(bytearray(text.nbytes + TAG_BYTES))]
        sealed += [piece for room in rooms for piece in _pieces(room, TAG_BYTES)]
        envelope = Envelope(kind=kind, session=self.session, counter=counter, pieces=len(plain) - 1)
        clear = envelope.encode()
        for number, (part, into) in enumerate(zip(plain, sealed, strict=True)):
            self._cipher.encrypt_into(envelope.nonce(number), part, clear, into)
        return [clear, *sealed]

    def open_header(self, envelope: Envelope, parts: Sequence[Any]) -> MessageHeader:
        """Return the header of a parsed message. Raises ``EnvelopeError``."""
        text = bytearray(len(parts[1]) - TAG_BYTES)
        self._open(envelope, 0, parts, text)
        return decode_header(text)

    def open_frames(
        self, envelope: Envelope, parts: Sequence[Any], header: MessageHeader, *, take: Take
    ) -> list[memoryview]:
        """Return the frames of a parsed message, given its header; complete the header's body.

        Raises ``EnvelopeError``.
        """
        check_lengths(header.lengths, [len(part) for part in parts[2:]])
        frames = [_memory(length, take) for length in header.lengths]
        pieces = (piece for frame in frames for piece in _pieces(frame, 0))
        for number, piece in enumerate(pieces, start=1):
            self._open(envelope, number, parts, piece)
        if header.apart and frames:
            header.body = decode_body(frames.pop())
        return frames

    def _open(self, envelope: Envelope, number: int, parts: Sequence[Any], into: Any) -> None:
        nonce = envelope.nonce(number)
        try:
            self._cipher.decrypt_into(nonce, parts[number + 1], envelope.encode(), into)
        except InvalidTag:
            raise EnvelopeError(
                Reason.TAMPERED, f"part {number} fails its seal: changed, moved or of another key"
            ) from None


def _pieces(view: memoryview, extra: int) -> list[memoryview]:
    """Cut a frame into its pieces; with ``extra`` bytes a piece, cut the buffer for sealed ones."""
    step = PIECE_BYTES + extra
    return [view[at : at + step] for at in range(0, view.nbytes, step)]


def _sealed_bytes(view: memoryview) -> int:
    return view.nbytes + TAG_BYTES * -(-view.nbytes // PIECE_BYTES)


def _memory(nbytes: int, take: Take) -> memoryview:
    return take(nbytes) if nbytes >= _POOLED_BYTES else memoryview(bytearray(nbytes))
