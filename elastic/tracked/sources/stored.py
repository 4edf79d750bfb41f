"""Restore of a checkpoint by all ranks, from a store that may refuse for a while.

Rank 0 looks in the store and tells the others; each rank reads its part. A refusal at one rank is
made known to all, so that all make the same next attempt. The first generation of a job ends with
the refusal: nothing is lost, and the user sees at once that the place is wrong. A later one has
trained, so it waits until the store is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from holdfast.ckpt.checkpoints import catalog
from holdfast.ckpt.checkpoints.source import ReadSoFar, StoreSource
from holdfast.ckpt.errors import (
    CkptError,
    CorruptError,
    InternalError,
    NotFoundError,
    StoreError,
)
from holdfast.ckpt.state.restore import RestoreReport
from holdfast.ckpt.state.saved import ShardSource
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import RestoreProgressed
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.groups.waits import POLL_S
from holdfast.elastic.membership.records import Origin
from holdfast.elastic.planning.plan import on_timeline
from holdfast.elastic.tracked.sources.pacing import Pacing
from holdfast.elastic.tracked.sources.restored import Restored

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_PROBE: Final = ".writable"
_PATIENCE_S: Final = 600.0
_DISKS_AFTER_S: Final = 10.0
_NEWER_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.5
_SAY_EVERY_S: Final = 30.0


class _RefusedError(InternalError):
    """The store refused at some rank, and may not do so for ever; raised by all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """An error of reading at some rank.

    ``refused``: the store said no, and of its bytes nothing is known. ``passes``: a later try may
    succeed.
    """

    reason: str
    refused: bool
    passes: bool


class StoredCheckpoints:
    """The checkpoints below ``root``, restored in step with all other ranks.

    ``fill`` restores this rank's part from a source; ``tell`` is called every few seconds of a long
    read. ``spilled`` restores the newest snapshot of the nodes' disks that is of a step or later.
    ``touched`` says whether a failed attempt may have changed the state.
    """

    def __init__(
        self,
        root: str,
        *,
        run: str,
        world: GenerationWorld,
        fill: Callable[[ShardSource], RestoreReport],
        tell: Callable[[RestoreProgressed], None],
        spilled: Callable[[int], Restored | None],
    ) -> None:
        self._root, self._run, self._world = root, run, world
        self._fill, self._tell, self._spilled = fill, tell, spilled
        self._probed = False
        self.touched = False

    # -- newer than memory -----------------------------------------------------------------------

    def newer(self, than: int, *, timeline: Sequence[Origin]) -> Restored | None:
        """Restore the newest step after ``than`` of this run's ``timeline``, also from disks.

        The store has `_NEWER_LIMIT_S` to answer; training can go on from memory. Returns None if
        there is no such step, or none that can be read in time.
        """
        until_s = time.monotonic() + _NEWER_LIMIT_S
        failed: list[int] = []
        while True:
            step, refusal = self._find_newer(than, timeline, failed=failed, until_s=until_s)
            least = than + 1 if step is None else step
            if (spilled := self._spilled(least)) is not None:
                return spilled
            if step is None:
                if refusal:
                    _log.warning(
                        "going on from step %d, though checkpoints may be newer: %s", than, refusal
                    )
                return None
            restored, fault = self._read(step)
            if restored is not None:
                return restored
            assert fault is not None
            _log.warning("step %d cannot be read: %s", step, fault.reason)
            if not fault.refused:
                failed.append(step)
            else:
                self._pause()

    def _find_newer(
        self, than: int, timeline: Sequence[Origin], *, failed: Sequence[int], until_s: float
    ) -> tuple[int | None, str]:
        """Return the newest step after ``than`` that can be trusted, or why none is known."""
        found: tuple[int | None, str] = (None, "")
        if self._world.rank == 0:
            found = self._look_for_newer(than, timeline, failed=failed, until_s=until_s)
        step, refusal = self._world.gather(found)[0]
        return step, refusal

    def _look_for_newer(
        self, than: int, timeline: Sequence[Origin], *, failed: Sequence[int], until_s: float
    ) -> tuple[int | None, str]:
        def look() -> int | None:
            steps = newer_steps(self._root, than=than, run=self._run, timeline=timeline)
            return next((step for step in steps if step not in failed), None)

        late = f"{self._root}: the store does not answer within {_NEWER_LIMIT_S:g} s"
        refusal = late
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                step = self._world.guard.call(look, name="find-newer", limit_s=left_s)
            except TimeoutError:
                return None, late
            except StoreError as error:
                refusal = str(error)
                self._pause()
            except CkptError as error:  # memory is good, so no other fault there matters now
                return None, str(error)
            else:
                return step, ""
        return None, refusal

    # -- instead of memory -----------------------------------------------------------------------

    def newest(self, reasons: Sequence[str]) -> Restored | None:
        """Restore the newest checkpoint that all ranks can read, or a newer snapshot on disks.

        Returns None if there is neither. ``reasons`` say why memory has nothing. Raises
        ``JobFailedError`` if there are checkpoints and none can be read, ``StoreError`` if the
        store refuses the first generation.
        """
        began_s = time.monotonic()
        said_s = -_SAY_EVERY_S
        while True:
            try:
                return self._newest(reasons)
            except _RefusedError as error:
                refusal = str(error)
            if self._is_first:
                raise StoreError(refusal)
            waited_s = self._agreed(time.monotonic() - began_s)
            if waited_s > _DISKS_AFTER_S and (spilled := self._spilled(-1)) is not None:
                return spilled
            if waited_s > _PATIENCE_S:
                raise JobFailedError(
                    f"memory has nothing to restore, and the store refuses since {waited_s:.0f} s: "
                    f"{refusal}"
                )
            if waited_s - said_s >= _SAY_EVERY_S:
                said_s = waited_s
                _log.warning("waiting for the store: %s", refusal)
            self._pause()

    def _newest(self, reasons: Sequence[str]) -> Restored | None:
        """Restore from the store or from disks; a snapshot on disks comes first if it is newer."""
        if (spilled := self._spilled(self._newest_committed())) is not None:
            return spilled
        self._probe()
        candidates = catalog.verified(self._root) if self._world.rank == 0 else iter(())
        failed, passes = "", False
        while True:
            step, damage = self._agree_on(candidates)
            if (spilled := self._spilled(-1 if step is None else step)) is not None:
                return spilled
            if damage:
                raise JobFailedError(damage)
            if step is None:
                if not failed:
                    return None
                if passes:
                    raise _RefusedError(failed)
                before = "".join(f"; {reason}" for reason in reasons)
                raise JobFailedError(
                    f"{self._root}: no checkpoint can be read in full: {failed}{before}; bring "
                    "back a good one, or choose another directory"
                )
            restored, fault = self._read(step)
            if restored is not None:
                return restored
            assert fault is not None
            if fault.refused:
                raise _RefusedError(fault.reason)
            failed, passes = fault.reason, passes or (fault.passes and not self._is_first)
            _log.warning("step %d cannot be read, trying another one: %s", step, failed)

    @property
    def _is_first(self) -> bool:
        """True in the first generation of a job, which has not trained."""
        return self._world.record.number == 1

    def _probe(self) -> None:
        """Try once to write to the store, to refuse a wrong place now and not after hours.

        A later generation only warns: a checkpoint that fails is told, and followed by others.
        """
        if self._probed:
            return
        self._probed = True
        _, refusal = self._at_rank_0(lambda: probe(self._root), name="probe-store")
        if not refusal:
            return
        if self._is_first:
            raise _RefusedError(refusal)
        _log.warning("checkpoints fail for now: %s", refusal)

    def _newest_committed(self) -> int:
        found, refusal = self._at_rank_0(
            lambda: max(catalog.committed_steps(self._root), default=-1), name="list-checkpoints"
        )
        if found is None:
            raise _RefusedError(refusal)
        return found

    def _agree_on(self, candidates: Iterator[int]) -> tuple[int | None, str]:
        """Return rank 0's next candidate, or why none can be trusted."""

        def look() -> tuple[int | None, str]:
            try:
                return next(candidates, None), ""
            except CorruptError as error:
                if not self._is_first and may_pass(error):
                    raise StoreError(str(error)) from error
                return None, f"{self._root}: no checkpoint can be trusted: {error}"

        found, refusal = self._at_rank_0(look, name="find-checkpoint")
        if found is None:
            raise _RefusedError(refusal)
        step, damage = found
        return step, damage

    # -- all ranks alike -------------------------------------------------------------------------

    def _read(self, step: int) -> tuple[Restored | None, _Fault | None]:
        """Restore a step at all ranks, or return the worst fault of any."""
        began_s = time.perf_counter()
        error: CkptError | None = None
        report: RestoreReport | None = None
        try:
            with StoreSource(self._root, step, progress=self._progress(step)) as store:
                report = self._fill(store)
        except (CorruptError, NotFoundError, StoreError) as lost:
            error = lost
        mine = [str(error), isinstance(error, StoreError), may_pass(error)] if error else None
        faults = [
            _Fault(reason=reason, refused=refused, passes=passes)
            for reason, refused, passes in filter(None, self._world.gather(mine))
        ]
        if report is None or faults:
            self.touched = True
            return None, max(faults, key=lambda fault: (fault.refused, fault.passes))
        seconds = time.perf_counter() - began_s
        restored = Restored(
            tier="checkpoint",
            how=f"{self._root}, step {step}",
            step=report.step,
            bytes=report.bytes,
            tiers={"checkpoint": {"bytes": report.bytes, "seconds": seconds}},
            ranks=report.ranks,
        )
        return restored, None

    def _progress(self, step: int) -> ReadSoFar:
        def tell(done: int, total: int, seconds: float) -> None:
            event = RestoreProgressed(
                generation=self._world.generation,
                rank=self._world.rank,
                step=step,
                bytes=done,
                total_bytes=total,
                bytes_per_s=done / seconds,
                left_s=(total - done) * seconds / done,
            )
            self._tell(event)

        return Pacing(tell)

    def _at_rank_0(self, look: Callable[[], _T], *, name: str) -> tuple[_T | None, str]:
        """Return what ``look`` returns at rank 0, at all ranks, or None and the store's refusal."""

        def said() -> tuple[_T | None, str]:
            try:
                return look(), ""
            except StoreError as error:
                return None, str(error)

        mine: tuple[_T | None, str] = (None, "")
        if self._world.rank == 0:
            mine = self._world.guard.call(said, name=name)
        found, refusal = self._world.gather(mine)[0]
        return found, refusal

    def _agreed(self, value: float) -> float:
        """Return rank 0's value at all ranks."""
        return float(self._world.gather(value)[0])

    def _pause(self) -> None:
        """Wait before the next try, unless the generation ends."""
        until_s = time.monotonic() + _PAUSE_S
        while time.monotonic() < until_s:
            self._world.guard.check()
            time.sleep(POLL_S)


def probe(root: str) -> None:
    """Write to the checkpoint root and clean up, to fail now and not at the first checkpoint.

    Raises ``StoreError`` if the store refuses.
    """
    try:
        store = open_store(root)
        store.write(_PROBE, [b"writable\n"])
        store.delete([_PROBE])
    except NotFoundError as error:
        raise StoreError(f"checkpoints cannot be written: {error}") from error


def may_pass(error: BaseException | None) -> bool:
    """Return whether a store refused, or the system below it: a later try may succeed.

    Bytes that a disk does not return count as damaged; then the system's error is the cause.
    """
    while error is not None:
        if isinstance(error, StoreError | OSError):
            return True
        error = error.__cause__
    return False


def newer_steps(root: str, *, than: int, run: str, timeline: Sequence[Origin]) -> Iterator[int]:
    """Yield the checkpoints of ``run`` that are newer than a step, newest first.

    They pass the quick check, and no roll-back in the ``timeline`` abandoned them. Nothing of older
    steps is read. Raises ``StoreError`` if the store refuses.
    """
    store = open_store(root)
    for step in catalog.named_after(store, than):
        try:
            manifest = catalog.quick_verify(store, step)
        except NotFoundError:
            continue  # it was not committed
        except CorruptError as error:
            if may_pass(error):
                raise StoreError(str(error)) from error
            _log.warning("step %d cannot be trusted: %s", step, error)
            continue
        # another run's checkpoint is no progress of this one
        if manifest.run == run and on_timeline(manifest.generation, step=step, timeline=timeline):
            yield step
