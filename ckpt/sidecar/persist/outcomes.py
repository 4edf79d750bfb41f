"""Outcomes of checkpoints, as every node of the group knows them, and requests waiting for one."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.sidecar.core.core import Core, Op, Waiter
from holdfast.ckpt.sidecar.core.messages import Await, Durable
from holdfast.ckpt.transport import Request
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)

_STEPS_KEPT: Final = 1000


class Outcomes:
    """The durable steps, and the errors of the others; guarded by the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.durable = -1
        self.failed_in_a_row = 0
        self._persisted: list[int] = []
        self._skipped: list[int] = []
        self._errors: dict[int, str] = {}
        self._remains: set[int] = set()

    def begin_stage(self) -> None:
        """Forget the steps of the stage before, whose checkpoints lie elsewhere."""
        self._core.durable = self.durable = -1
        self.failed_in_a_row = 0
        self._errors = {}
        self._remains = set()

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {"durable_step": (Await, self._durable_step)}

    def status(self) -> dict[str, Json]:
        """Return the steps committed in this run, those skipped, and the last error."""
        newest = max(self._errors, default=None)
        return {
            "persisted": list(self._persisted),
            "persist_skipped": list(self._skipped),
            "persist_failed_in_a_row": self.failed_in_a_row,
            "persist_error": None if newest is None else self._errors[newest],
        }

    def note(self, message: Durable) -> None:
        """Record the outcome of a checkpoint."""
        if message.error is not None:
            self._errors.pop(message.step, None)  # the newest error comes last
            self._errors[message.step] = message.error
            self._remains.add(message.step)
            if len(self._errors) > _STEPS_KEPT:
                del self._errors[next(iter(self._errors))]
            self.failed_in_a_row += not message.given_up
            _log.warning("%s", message.error)
            return
        self._errors.pop(message.step, None)
        self._remains.clear()  # the committing node has removed them
        self.failed_in_a_row = 0
        self._core.durable = self.durable = max(self.durable, message.step)
        if message.step not in self._persisted:
            self._persisted.append(message.step)
            del self._persisted[:-_STEPS_KEPT]

    def skip(self, step: int) -> None:
        """Record that a step was not written because a newer one was due."""
        self._skipped.append(step)
        del self._skipped[:-_STEPS_KEPT]

    def try_again(self, step: int) -> None:
        """Forget that a step failed: it is wanted again."""
        self._errors.pop(step, None)

    def take_remains(self) -> list[int]:
        """Return the steps whose failed saves may have left files, and forget them."""
        steps = sorted(self._remains)
        self._remains.clear()
        return steps

    def has_failed(self, step: int) -> bool:
        """Return whether a step could not be saved."""
        return step in self._errors

    def is_fatal(self, message: Durable, target: CheckpointTarget) -> bool:
        """Say whether the job must end for a failure that was just recorded."""
        allowed = target.failures_allowed
        return not message.given_up and allowed is not None and self.failed_in_a_row > allowed

    def _durable_step(self, request: Request, body: Await) -> None:
        def attempt() -> bool:
            if body.at_least is not None and self.durable < body.at_least:
                if (error := self._errors.get(body.at_least)) is not None:
                    raise StoreError(error)
                if body.timeout_s > 0:
                    return False
            request.reply(self.durable)
            return True

        def expire() -> None:
            request.reply(self.durable)

        deadline_s = monotonic() + body.timeout_s
        waiter = Waiter(request=request, deadline_s=deadline_s, attempt=attempt, expire=expire)
        self._core.wait(waiter)
