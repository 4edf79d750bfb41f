"""Retries of requests to an object store: after transient errors, within a deadline."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from holdfast.ckpt.errors import CkptError, InternalError, StoreError
from holdfast.ckpt.store.objects.limits import ObjectLimits, RequestTiming

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ROOM: Final = "make room there or choose another place; nothing committed before is harmed"
"""The remedy where a store is full."""


class OverdueError(InternalError):
    """The deadline passed while bytes were still moving."""


class Deadline:
    """The time by which a request must have succeeded."""

    def __init__(self, timing: RequestTiming, within_s: float) -> None:
        self._now, self._start_s, self._within_s = timing.now, timing.now(), within_s

    def spent_s(self) -> float:
        """Return the seconds since the first attempt began."""
        return self._now() - self._start_s

    def left_s(self) -> float:
        """Return the seconds left."""
        return self._within_s - self.spent_s()

    def check(self) -> None:
        """Raise ``OverdueError`` once there is no time left."""
        if self.left_s() <= 0:
            raise OverdueError(
                f"not complete within {self._within_s:g} s, though bytes were moving"
            )


class Refusal(Protocol):
    """Makes the error for a caller, where a retry does not help."""

    def __call__(self, error: BaseException, *, where: str, doing: str) -> CkptError:
        """Return the error with the place, the cause and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWords:
    """The errors of one client library: which there are, which may pass, and their words."""

    failures: tuple[type[BaseException], ...]
    is_transient: Callable[[BaseException], bool]
    said: Callable[[BaseException], str]
    refusal: Refusal


class Retrier:
    """Sends requests again after transient errors."""

    def __init__(
        self, limits: ObjectLimits, faults: FaultWords, timing: RequestTiming | None = None
    ) -> None:
        self._limits, self._faults = limits, faults
        self._timing = timing or RequestTiming()

    def send(self, request: Callable[[Deadline], _T], *, where: str, doing: str) -> _T:
        """Return the result of ``request``, calling it again after transient errors.

        Pauses have full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015). No attempt
        begins that could stall beyond the deadline. Raises ``NotFoundError`` and ``StoreError``.
        """
        limits, timing, faults = self._limits, self._timing, self._faults
        deadline = Deadline(timing, limits.deadline_s)
        failures: list[str] = []  # one before may tell more than a last attempt that was cut off
        for failed in itertools.count(1):
            try:
                return request(deadline)
            except OverdueError as error:
                raise faults.refusal(error, where=where, doing=doing) from error
            except faults.failures as error:
                if not faults.is_transient(error):
                    raise faults.refusal(error, where=where, doing=doing) from error
                said = faults.said(error)
                longest_s = min(limits.longest_pause_s, limits.pause_s * 2 ** min(failed, 30))
                pause_s = timing.between(0, longest_s)
                others = [each for each in failures if each != said]
                if deadline.left_s() < pause_s + limits.stall_s:
                    before = f" (before that {others[-1]})" if others else ""
                    raise StoreError(
                        f"{where}: cannot {doing}: tried {failed} times in "
                        f"{deadline.spent_s():.1f} s, in the end {said}{before}; check the "
                        "server and the network, then try again"
                    ) from error
                failures = [*others[-1:], said]
                level = logging.WARNING if failed % 5 == 0 else logging.INFO
                _log.log(level, "%s: cannot %s yet: %s", where, doing, said)
            timing.sleep(pause_s)
        raise AssertionError("unreachable")
