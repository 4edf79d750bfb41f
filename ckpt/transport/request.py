"""A request as handlers receive it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from holdfast.ckpt.errors import PeerError, code_of
from holdfast.ckpt.transport.envelope import EnvelopeError, MessageHeader
from holdfast.ckpt.types import Json

Answer: TypeAlias = Callable[[MessageHeader, Sequence[Any]], None]
"""Sends an answer back on the path of its request; callable from any thread, but only once."""


class Request:
    """One request: ``op``, ``body`` (JSON) and binary ``frames``; answered at most once.

    With ``seals_at_once`` an answer's frames may change once `reply` has returned: their bytes were
    sealed by then.
    """

    def __init__(
        self,
        header: MessageHeader,
        frames: list[Any],
        *,
        peer: bytes,
        answer: Answer,
        seals_at_once: bool = False,
    ) -> None:
        self.op, self.body, self.frames = header.op, header.body, frames
        self._number, self._peer, self._answer = header.id, peer, answer
        self._once = threading.Lock()
        self.seals_at_once = seals_at_once

    @property
    def peer(self) -> bytes:
        """The identity of the client, stable over its requests."""
        return self._peer

    def reply(self, body: Json = None, frames: Sequence[Any] = ()) -> None:
        """Answer; callable from any thread. A second answer is ignored.

        The frames must not change afterwards, unless it ``seals_at_once``. An answer that is too
        large for its path is refused.
        """
        if not self._once.acquire(blocking=False):
            return
        try:
            self._answer(MessageHeader(id=self._number, body=body), frames)
        except EnvelopeError as error:
            too_large = PeerError(
                f"the answer to {self.op} is refused: {error}; ask for less at once"
            )
            self._answer(_refusal(self._number, too_large), ())
        except BaseException:  # nothing was sent: the caller may still refuse
            self._once.release()
            raise

    def refuse(self, error: Exception) -> None:
        """Answer with an error; the client raises what its code says (see `Client.call`)."""
        if self._once.acquire(blocking=False):
            self._answer(_refusal(self._number, error), ())


def _refusal(number: int, error: Exception) -> MessageHeader:
    return MessageHeader(id=number, error=str(error) or type(error).__name__, code=code_of(error))


Handler = Callable[[Request], None]
