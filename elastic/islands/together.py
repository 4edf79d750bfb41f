"""Decisions of rank 0 that all ranks of an island carry out together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from holdfast.ckpt.errors import HoldfastError, PeerError, StoreError
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.errors import GenerationOverError, SeaError
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.islands.commands import AwaitNews, Command, GoOn, LeaderFailed
from holdfast.elastic.tracked.handover import Wish

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.1

Said: TypeAlias = tuple[Command, list[bytes]]
"""A command, and the payloads of an `AdoptMerge`."""

Decide: TypeAlias = Callable[[], Said]
"""Returns the next command; called at rank 0."""


class Together:
    """The ranks of one generation, which hear from rank 0 what they do next.

    ``data`` are the payloads of the last command, at rank 0. A store that fails is asked again for
    ``patience_s`` seconds. ``wish`` returns this rank's wish for the end of the step; ``wished`` is
    the largest of all ranks at the last command.
    """

    def __init__(
        self,
        world: GenerationWorld,
        pulse: Pulse,
        *,
        patience_s: float,
        wish: Callable[[], Wish] = lambda: Wish.NONE,
    ) -> None:
        self._world, self._pulse, self._patience_s = world, pulse, patience_s
        self._wish, self.wished = wish, Wish.NONE
        self._failing_s: float | None = None
        self.data: list[bytes] = []

    def told(self, decide: Decide) -> Command:
        """Return the command that rank 0 decides on; collective.

        Raises the error of rank 0 there, and a ``SeaError`` with its message at the others. While
        the store fails, the command is to ask again.
        """
        self._pulse.beat()
        self._world.guard.check()
        failed: HoldfastError | OSError | None = None
        command: Command = GoOn()
        if self._world.rank == 0:
            try:
                command, self.data = decide()
                self._failing_s = None
            except GenerationOverError:
                raise
            except (StoreError, PeerError, OSError) as error:
                command, failed = self._again_or_failed(error)
            except HoldfastError as error:
                command, failed = LeaderFailed(message=str(error)), error
        heard = self._world.gather([msgspec.to_builtins(command), int(self._wish())])
        (said, _), *_ = heard
        self.wished = Wish(max(wish for _, wish in heard))
        if failed is not None:
            raise failed
        told = msgspec.convert(said, Command)
        if isinstance(told, LeaderFailed):
            raise SeaError(told.message)
        found: Command = told
        return found

    def settled(self, decide: Decide) -> Command:
        """Return the first command that is not to ask again; collective."""
        while isinstance(said := self.told(decide), AwaitNews):
            self.pause()
        return said

    def pause(self) -> None:
        """Let some time pass at rank 0 before the store is asked again."""
        if self._world.rank == 0:
            threading.Event().wait(_POLL_S)

    def _again_or_failed(
        self, error: HoldfastError | OSError
    ) -> tuple[Command, HoldfastError | OSError | None]:
        """Return the answer to a failure of the store, which may pass."""
        now_s = time.monotonic()
        self._failing_s = now_s if self._failing_s is None else self._failing_s
        if now_s - self._failing_s > self._patience_s:
            return LeaderFailed(message=str(error)), error
        _log.warning("the sea cannot be reached; trying again: %s", error)
        self.pause()
        return AwaitNews(), None


def unasked() -> Said:
    """Stand for the decisions of rank 0 at other ranks, where nobody asks for them."""
    return GoOn(), []
