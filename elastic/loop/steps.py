"""The loop over the steps: its begin, the begin and end of every step, and the ways out of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.events import MetricsLogged, StepDone, TrainingResumed
from holdfast.elastic.loop.leaving import Leaving
from holdfast.elastic.loop.logbook import Logbook, Position
from holdfast.elastic.loop.parts import RunParts
from holdfast.elastic.loop.passes import Passes
from holdfast.elastic.loop.user_code import user_line
from holdfast.elastic.seeding import seed_all
from holdfast.elastic.tracked.handover import Wish


class Steps:
    """One generation's loop. ``position`` is that of the process in the ``logbook``."""

    def __init__(self, parts: RunParts, passes: Passes, *, position: Position) -> None:
        self._parts, self._passes, self._place = parts, passes, parts.place
        self.leaving = Leaving(parts.world)
        self.logbook = Logbook(parts.keeper.cursor, position, leads=parts.world.rank == 0)
        self._report = StepReport(parts)
        self._position, self._reached, self._repeats_until = position, 0, 0
        self._is_cut = False

    @property
    def repeats(self) -> bool:
        """True if the present step may have begun before, see `Run.repeats`."""
        return self._place.in_step and self._place.completed < self._repeats_until

    def until(self, count: int) -> Iterator[int]:
        """Yield the number of each step; see `Run.steps`."""
        _ = self._passes.gradients  # refuses a loop before `Run.track`
        place = self._place
        self._begin(count)
        while place.completed < count and not self._parts.keeper.cursor.stopped:
            self._begin_step()
            with self._in_body():
                yield place.completed
            self._require_update()
            self._end_step(last=self._agree() or place.completed + 1 >= count)
        self._is_cut = place.completed < count
        self._hand_over_rest()

    def through(self, count: int, loader: Loader) -> Iterator[int]:
        """Yield the number of each step; see `Run.epochs`."""
        _ = self._passes.gradients  # refuses a loop before `Run.track`
        place = self._place
        over = loader.reaches(count)
        self._begin(place.completed if over else place.completed + 1)
        over = loader.reaches(count)  # an island knows only then what it is dealt
        while not over and not self._parts.keeper.cursor.stopped:
            self._begin_step()
            with self._in_body():
                yield place.completed
            self._require_update()
            self._parts.work.advance()
            over = loader.reaches(count)
            self._end_step(last=self._agree() or over)
            over = over or self._is_idle
        self._is_cut = not over
        self._hand_over_rest()

    @contextmanager
    def _in_body(self) -> Iterator[None]:
        """Notice that the loop's body is left for good."""
        try:
            yield
        except GeneratorExit:
            self._place.has_left = True
            self.leaving.left(user_line())
            self._parts.pulse.set(WorkerPhase.IDLE)  # what follows is no step
            raise

    def _begin(self, count: int) -> None:
        self._refuse_second()
        self.leaving.over(None)
        parts, completed = self._parts, self._place.completed
        parts.watch.begin()
        self._passes.modes.begin()
        stopped = self._agree()
        self._repeats_until = self._reached
        prepare = None if parts.island is None else parts.island.begin
        wished = parts.keeper.begin(completed if stopped else count, prepare=prepare)
        if wished and parts.island is not None:
            parts.keeper.hand_over()
            parts.island.resume()
        if parts.losses is not None:
            parts.losses.begin(parts.world, completed=completed)

    def _refuse_second(self) -> None:
        """Refuse a loop after one that did not come to its end."""
        place, line = self._place, user_line()
        if place.has_left:
            raise ConfigError(
                f"a second loop over run.steps at {line} follows one that was left by `break`: "
                "after a failure the first would go on; give it the number of its steps"
            )
        if place.in_step:
            raise ConfigError(
                f"a second loop over run.steps at {line} begins before step {place.completed} of "
                "the first is over: end the first loop; if it was left by `break` and its iterator "
                "is kept, as by a progress bar, give it the number of its steps"
            )
        if self._is_cut:
            raise ConfigError(
                f"a second loop over run.steps at {line} follows one that run.stop ended after "
                f"{place.completed} steps: the run is complete then; make the second loop a "
                "decorated function of its own, or call run.stop in the last loop only"
            )

    def _agree(self) -> bool:
        """Agree with all ranks, at the begin and after each step, on whether the loop is over."""
        keeper = self._parts.keeper
        if self._place.is_stepped:
            self.logbook.hand_over(keeper.protection().step)
        modes = self._passes.modes
        stopped, (changed, reached, *report) = self.leaving.agree(
            float(modes.look()), float(self._position.reached), *self.logbook.report()
        )
        self._reached = int(reached)
        self.logbook.agreed(*report)
        if changed:
            modes.keep()
        keeper.cursor.stopped = keeper.cursor.stopped or stopped
        return keeper.cursor.stopped

    def _require_update(self) -> None:
        """Raise ``ConfigError`` if this rank made no update in the step, before others wait."""
        self._parts.check()
        place = self._place
        self._passes.whole.check()
        if place.has_gradients or not place.phase:
            raise ConfigError(
                f"step {place.completed} ended without run.step(optimizer): call it after every "
                "pass over run.microbatches with run.backward"
            )
        self._position.near_end(place.completed)

    def _begin_step(self) -> None:
        parts, place = self._parts, self._place
        parts.check()
        place.begin_step()
        self._position.enter(place.completed)
        self._passes.begin_step()
        parts.watch.begin_step(place.completed)
        self._report.begin()
        parts.pulse.set(WorkerPhase.COMPUTE, step=place.completed)
        seed_all(place.draws.before_microbatches())

    @property
    def _is_idle(self) -> bool:
        """True if this is an island for which the logbook has no samples any more."""
        island = self._parts.island
        return island is not None and island.is_idle

    def _end_step(self, *, last: bool) -> None:
        parts, place, gradients = self._parts, self._place, self._passes.gradients
        parts.world.settle()  # before anything of the step is kept
        place.end_step()
        gradients.end_step()
        parts.watch.end_step()
        cursor = parts.keeper.cursor
        cursor.metrics.update(parts.logs.latest)
        self.logbook.add(cursor.step, dict(parts.logs.latest))
        cursor.step += 1
        parts.work.advance()
        wished = Wish(gradients.wished)
        if last or wished:
            self._position.hold()
        island = parts.island
        due = self._end_on_island(last=last)
        if island is not None and island.wished > wished:
            wished = island.wished
            self._position.hold()
        last = last or self._is_idle
        parts.keeper.keep(last=last, wished=wished, due=due)
        if island is not None:
            island.kept()
        self._report.end(microbatches=self._passes.trained)
        parts.logs.clear()
        parts.work.sharing.settle()
        parts.pulse.set(WorkerPhase.IDLE, step=cursor.step)
        if wished and not last:
            parts.keeper.hand_over()
            if island is not None:
                island.resume()

    def _end_on_island(self, *, last: bool) -> bool:
        """Let an island send and adopt; return whether the step needs a snapshot."""
        if (island := self._parts.island) is None:
            return False
        try:
            return island.end_step(last=last, samples=self._passes.samples)
        except NotFiniteError as error:
            self._passes.judge_end(str(error))  # a guard may go back; none can leave the step out
            raise

    def _hand_over_rest(self) -> None:
        parts = self._parts
        self.leaving.over(self._place.completed)
        with parts.pulse.phase(WorkerPhase.WAIT):
            self.logbook.finish(lambda: parts.keeper.protection().step, check=parts.check)
            if parts.keeper.cursor.collects:  # then no other rank hands them over again
                _, report = self.leaving.agree(*self.logbook.report())
                self.logbook.agreed(*report)

    def finish(self) -> None:
        """Make the last step durable if requested, and wait for all ranks."""
        parts, place = self._parts, self._place
        parts.check()
        place.has_left |= place.in_step  # its iterator may be kept, as by a progress bar
        parts.pulse.set(WorkerPhase.IDLE, step=place.completed)
        self.leaving.meet(place.completed)
        parts.pulse.set(WorkerPhase.WAIT)
        if place.in_step:  # the loop was left by `break` or `return`
            parts.keeper.cursor.stopped = True
            self._end_left()
        parts.keeper.finish()
        if parts.island is not None:
            parts.island.finish()
        parts.world.barrier()

    def _end_left(self) -> None:
        if self._place.is_stepped:
            self._require_update()
            self._agree()
            self._end_step(last=True)
        else:
            self._parts.world.settle()
            self._place.end_step()
            self._parts.keeper.keep_unfinished()
        self._hand_over_rest()


class StepReport:
    """The events at the end of each of one generation's steps."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._began = (0.0, 0.0, 0.0)
        self._resumed = False

    def begin(self) -> None:
        """Read the clocks at the begin of a step."""
        self._began = (time.time(), time.perf_counter(), time.process_time())

    def end(self, *, microbatches: int) -> None:
        """Report the step that the cursor counts now; this rank ran ``microbatches`` of it."""
        parts, keeper, world = self._parts, self._parts.keeper, self._parts.world
        step, generation = keeper.cursor.step, world.generation
        protection = keeper.protection()
        start, began, cpu_began = self._began
        seconds = time.perf_counter() - began
        # Read the end of the step before the fence. Then, however long a pause here is, only steps
        # that ended while the generation was valid are reported.
        parts.check()
        parts.session.emit(
            StepDone(
                step=step,
                generation=generation,
                rank=world.rank,
                start_s=start,
                seconds=seconds,
                stall_s=keeper.stall_s(),
                protected=protection.step,
                unprotected_s=round(protection.age_s, 6),
                copied_bytes=protection.copied_bytes,
                discarded=protection.discarded,
                waited_s=world.guard.take_waited_s(),
                quiet_s=parts.pulse.take_quiet_s(),
                data_s=parts.work.take_waited_s(),
                cpu_s=time.process_time() - cpu_began,
                microbatches=microbatches,
            )
        )
        if world.rank == 0:
            if parts.logs.latest:
                parts.session.emit(MetricsLogged(step=step, values={**parts.logs.latest}))
            if not self._resumed:
                parts.session.emit(TrainingResumed(generation=generation, step=step))
        self._resumed = True
