"""The log of steps: the finished groups of each step, written once by the lead, read by all runs.

Every file begins with the digest of what follows (`samples.sealed`), and is created where there is
none. The log also has the results of evaluations, so that a lead that goes back plays none twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.adapters.rl.samples.sealed import opened, sealed
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.elastic.errors import JobFailedError

_STEPS: Final = "steps"
_EVALUATIONS: Final = "evaluations"


class StepLog:
    """One run's access to the log in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def span(self) -> tuple[int, int]:
        """Return (first, end): the log has the steps from ``first`` to below ``end``."""
        steps = self._numbers(_STEPS)
        return (steps[0], steps[-1] + 1) if steps else (0, 0)

    def publish(self, step: int, groups: Sequence[Trajectory]) -> None:
        """Write the groups of a step, unless they are there.

        Raises ``JobFailedError`` if other ones are there: two runs sample for one log.
        """
        data = sealed(msgspec.json.encode(list(groups)))
        if self.store.replace(_file(_STEPS, step), data, expected=None):
            return
        if resampled(self.read(step) or (), generation=0) != resampled(groups, generation=0):
            raise JobFailedError(
                f"{self.store.where(_file(_STEPS, step))}: it has other groups than this run "
                "sampled for the step; give each job a directory of its own, and start one lead"
            )

    def read(self, step: int) -> tuple[Trajectory, ...] | None:
        """Return the groups of a step; None if they are not there.

        Raises ``CorruptError`` for a damaged file.
        """
        found: tuple[Trajectory, ...] | None = self._read(
            _file(_STEPS, step), tuple[Trajectory, ...]
        )
        return found

    def note(self, step: int, found: Mapping[str, float]) -> None:
        """Write the result of the evaluation after ``step`` steps, unless it is there."""
        data = sealed(msgspec.json.encode(found))
        self.store.replace(_file(_EVALUATIONS, step), data, expected=None)

    def noted(self, step: int) -> dict[str, float] | None:
        """Return the result of the evaluation after ``step`` steps; None without one."""
        found: dict[str, float] | None = self._read(_file(_EVALUATIONS, step), dict[str, float])
        return found

    def forget(self, below: int) -> None:
        """Remove the steps and evaluations below a step."""
        for folder in (_STEPS, _EVALUATIONS):
            gone = (each for each in self._numbers(folder) if each < below)
            self.store.delete(_file(folder, each) for each in gone)

    def _read(self, name: str, kind: Any) -> Any:
        where = self.store.where(name)
        try:
            data = opened(self.store.read(name), where=where)
            return msgspec.json.decode(data, type=kind)
        except NotFoundError:
            return None
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptError(
                f"{where}: no file of this version: {error}; remove it if its steps can be "
                "sampled again, else start all policies anew with an empty directory"
            ) from error

    def _numbers(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self.store.names(folder) if name.isdecimal())


def resampled(groups: Sequence[Trajectory], *, generation: int) -> tuple[Trajectory, ...]:
    """Return groups as if ``generation`` of a run had sampled them: their versions are the same."""
    return tuple(
        msgspec.structs.replace(
            each,
            stamps=tuple(
                Stamp(generation=generation, version=stamp.version, count=stamp.count)
                for stamp in each.stamps
            ),
        )
        for each in groups
    )


def _file(folder: str, step: int) -> str:
    return f"{folder}/{step:012d}"
