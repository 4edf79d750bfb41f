"""Execution of due strikes on a real job, and the end of lasting ones."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.elastic.events import FaultInjected, FaultOver
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools.chaos.faults.injector import Injector, MissedError, Undo, Victim
from holdfast.tools.chaos.judging.result import Struck
from holdfast.tools.chaos.real.jobs import JobFolders, RealJob
from holdfast.tools.chaos.real.seen import JobProgress
from holdfast.tools.chaos.real.targets import choose, part_of
from holdfast.tools.chaos.scenarios.strikes import Strike
from holdfast.tools.chaos.scenarios.words import target_text


class RealStriker:
    """Strikes one job, and records each strike in the job's history; ``done`` lists all tries."""

    def __init__(
        self,
        job: RealJob,
        place: JobFolders,
        injectors: Mapping[str, Injector],
        *,
        tell: Callable[[str], None],
    ) -> None:
        self._job, self._injectors, self._tell = job, injectors, tell
        self.done: list[Struck] = []
        self._lasting: list[tuple[float, int, Undo, str]] = []
        self._numbers = itertools.count()
        self._writer = EventWriter(events_file(place.history, "chaos"), node="chaos")

    def strike(self, strike: Strike, seen: JobProgress) -> bool:
        """Strike now; return whether there was something to hit."""
        part = part_of(strike, nodes=bool(self._job.nodes))
        victims = self._job.victims(part) if part else []
        workers = victims if part == "worker" else self._job.victims("worker")
        chosen = choose(strike, victims, workers=workers, seen=seen)
        t = time.time()
        if not chosen:
            self._note(strike, target_text(strike.target, part), t, missed=True)
            return False
        hits = self._at_once(strike, chosen)
        for victim, hit in zip(chosen, hits, strict=True):
            self._note(strike, victim.name, t, missed=not hit)
            if hit:
                self._job.struck(victim.part)
                self._write(strike, victim, t)
        self._tell(
            f"step {seen.step}: {strike.number} {strike.kind}: "
            + ", ".join(
                victim.name + ("" if hit else " (nothing to hit)")
                for victim, hit in zip(chosen, hits, strict=True)
            )
        )
        return any(hits)

    def _at_once(self, strike: Strike, chosen: Sequence[Victim]) -> list[bool]:
        if len(chosen) == 1:
            return [self._one(strike, chosen[0])]
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(lambda victim: self._one(strike, victim), chosen))

    def _one(self, strike: Strike, victim: Victim) -> bool:
        try:
            undo = self._injectors[strike.kind].strike(strike, victim, self._job)
        except (MissedError, ProcessLookupError):
            return False
        if undo is not None:
            until_s = time.monotonic() + strike.lasts_s if strike.lasts_s else math.inf
            name = f"{strike.kind} of {victim.name}"
            heapq.heappush(self._lasting, (until_s, next(self._numbers), undo, name))
        return True

    def undo(self, *, until_s: float) -> None:
        """End the faults that last until ``until_s`` (monotonic seconds) at most."""
        while self._lasting and self._lasting[0][0] <= until_s:
            _, _, end, name = heapq.heappop(self._lasting)
            end()
            self._writer.write(FaultOver(what=name), source="chaos")

    def close(self) -> None:
        """End all lasting faults; a second call does nothing."""
        self.undo(until_s=math.inf)
        self._writer.close()

    def _note(self, strike: Strike, victim: str, t: float, *, missed: bool) -> None:
        self.done.append(
            Struck(number=strike.number, kind=strike.kind, victim=victim, t=t, missed=missed)
        )

    def _write(self, strike: Strike, victim: Victim, t: float) -> None:
        fault = FaultInjected(
            time_s=t,
            what=strike.kind,
            victim=victim.seat or victim.node or victim.name,
            on=victim.node,
            seats=(victim.seat,) if victim.seat else (),
            pids=victim.pids,
            number=strike.number,
            lasts_s=strike.lasts_s,
        )
        self._writer.write(fault, source="chaos")
