"""Limits on the memory and sessions that peers can take of a server."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ckpt.transport.envelope import BULK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Bounds of a server's bulk path.

    ``message_bytes`` limits one message. ``unanswered_bytes`` limits all requests not yet answered
    and all answers not yet sent; beyond it no request is taken, nor one from a session that holds a
    quarter of it. ``sessions`` may be open at once; a new one then replaces the one unused for
    longest. ``session_s`` is the life of each.
    """

    message_bytes: int = BULK_BYTES
    unanswered_bytes: int = 8 * BULK_BYTES
    sessions: int = 1024
    session_s: float = 3600.0

    def __post_init__(self) -> None:
        """Refuse limits that contradict each other."""
        if not 0 < self.message_bytes <= BULK_BYTES:
            raise ValueError(f"message_bytes={self.message_bytes}: needs 1 … {BULK_BYTES}")
        if self.unanswered_bytes < 8 * self.message_bytes:
            raise ValueError(
                f"unanswered_bytes={self.unanswered_bytes}: needs eight messages of "
                f"{self.message_bytes} bytes"
            )
        if self.sessions < 1:
            raise ValueError(f"sessions={self.sessions}: needs at least 1")
