"""The passes over a step's microbatches: their samples, draws, gradients, buffers and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.elastic.config import Exact
from holdfast.elastic.data.foreign import Moment
from holdfast.elastic.data.loaders import LoadedMicrobatch, Loader
from holdfast.elastic.data.weights import Weigh, weighed
from holdfast.elastic.data.whole import difference_of, identity_of
from holdfast.elastic.data.work import MapDataset
from holdfast.elastic.errors import (
    ConfigError,
    JobFailedError,
    NotFiniteError,
    RollBackError,
)
from holdfast.elastic.events import LossJudged
from holdfast.elastic.gradients.buffers import PassBuffers
from holdfast.elastic.gradients.mean import Gradients
from holdfast.elastic.gradients.summing import Replicas
from holdfast.elastic.groups.by_microbatch import STAND_IN
from holdfast.elastic.loop.inside import Inside
from holdfast.elastic.loop.parts import RunParts
from holdfast.elastic.loop.user_code import user_line
from holdfast.elastic.loop.whole_pass import WholePass
from holdfast.elastic.loss import LossAction
from holdfast.elastic.seeding import seed_all
from holdfast.elastic.tracked.handover import wish_of
from holdfast.elastic.tracked.modes import ModesOfModules
from holdfast.elastic.tracked.steady import keeps_own

if TYPE_CHECKING:
    from holdfast.elastic.loop.pipeline import Feed, Schedule

_COMPARED: Final = 2
"""Passes of each phase whose data sets are compared."""

_UNTRACKED: Final = "call run.track(model=..., optimizer=...) before the first step"


class Passes:
    """One generation's passes, over the gradients and buffers of the tracked modules.

    ``piece`` is the microbatch under way, None outside. ``whole`` is the rule that passes come to
    their end. ``trained`` is the number of microbatches in the last pass with `backward`;
    ``samples`` are those of all ranks in the step's passes with `backward`.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._place = parts, parts.place
        self._begun: Counter[int] = Counter()
        self._keeps_own = False
        self._inside, self.whole = Inside(parts.world), WholePass()
        self._gradients: Gradients | None = None
        self._buffers: PassBuffers | None = None
        self._modes: ModesOfModules | None = None
        self.piece: LoadedMicrobatch | None = None
        self.trained = self.samples = self._backwards = self._drawn = 0
        self._ran: list[int] = []

    def track(self, state: Mapping[str, Any], *, exact: Exact) -> None:
        """Watch the gradients and buffers of the modules in ``state``."""
        world, settings = self._parts.world, self._parts.settings
        modules = {
            name: value
            for name, value in state.items()
            if isinstance(value, nn.Module | ModelParts)
        }
        self._buffers = PassBuffers(
            modules,
            world.dp,
            microbatches=settings.batch.microbatches,
            exact=settings.exact,
        )
        self._gradients = Gradients(
            modules,
            world,
            replicas=Replicas(dense=world.dp, experts=world.edp),
            unite=world.unite,
            microbatches=settings.batch.microbatches,
            exact=exact,
            bounds=self._parts.keeper.cursor.bounds,
            check=world.guard.check,
        )
        self._keeps_own = keeps_own(state)
        self._modes = ModesOfModules(
            modules,
            self._parts.keeper.cursor,
            gather=world.gather,
            staged=world.record.mesh.pp > 1,
        )
        self._parts.watch.track(
            state,
            self._gradients.parameters,
            moves=self._gradients.moves_parameters,
            of_leader=self._parts.keeper.of_leader,
        )

    @property
    def is_tracked(self) -> bool:
        """True if `track` was called."""
        return self._gradients is not None

    @property
    def gradients(self) -> Gradients:
        """The mean gradients. Raises ``ConfigError`` before `track`."""
        if self._gradients is None:
            raise ConfigError(_UNTRACKED)
        return self._gradients

    @property
    def buffers(self) -> PassBuffers:
        """The buffers. Raises ``ConfigError`` before `track`."""
        if self._buffers is None:
            raise ConfigError(_UNTRACKED)
        return self._buffers

    @property
    def modes(self) -> ModesOfModules:
        """The modes of the modules. Raises ``ConfigError`` before `track`."""
        if self._modes is None:
            raise ConfigError(_UNTRACKED)
        return self._modes

    def clear(self) -> None:
        """Drop all gradients."""
        self.gradients.clear()

    def begin_step(self) -> None:
        """Forget the passes of the step before."""
        self._ran, self.samples = [], 0

    def microbatches(
        self, dataset: MapDataset[Any] | Loader | None, *, fresh: bool, weigh: Weigh | None
    ) -> Iterator[Any]:
        """Make a pass; see `Run.microbatches`."""
        with self.whole.one():
            pieces = self._begin(dataset, fresh=fresh)
            if weigh is not None:
                count, peers = self._parts.settings.batch.microbatches, self._parts.world.dp
                pieces = weighed(pieces, weigh, microbatches=count, add=peers.sum_)
            for piece in pieces:
                self.gradients.begin_microbatch(last=piece is pieces[-1])
                batch = self._begin_microbatch(piece)
                with self._inside.microbatch(piece.microbatch):
                    self._parts.watch.begin_body()
                    yield batch
                self._parts.watch.after_microbatch()
                self._parts.watch.end_body(piece.microbatch)
            self.piece = None
            self._ran = [p.microbatch if p.samples else STAND_IN for p in pieces]
            self._end(len(pieces))

    def pipeline(
        self, schedule: Schedule, dataset: MapDataset[Any] | Loader, *, feed: Feed | None
    ) -> None:
        """Make a pass through the stages of a pipeline; see `Run.pipeline`."""
        from holdfast.elastic.loop.pipeline import pair, run_schedule

        self.whole.check()
        pieces = self._begin(dataset)
        self.gradients.begin_schedule()
        self.enter(STAND_IN)  # torch tries the shapes out
        with self._inside.microbatch(pieces[0].microbatch):
            self._parts.watch.begin_body()
            losses = run_schedule(schedule, pieces, feed=feed or pair, draws=self._place.draws)
        self._parts.watch.end_body(pieces[0].microbatch)
        self._backwards = len(pieces)
        for piece, loss in zip(pieces, losses, strict=True):
            self._parts.logs.add(piece.microbatch, {"loss": loss}, counts=piece.counted)
        self._end(len(pieces))

    def _begin(
        self, dataset: MapDataset[Any] | Loader | None, *, fresh: bool = False
    ) -> list[LoadedMicrobatch]:
        """Begin a pass; return this rank's microbatches."""
        parts, place, gradients = self._parts, self._place, self.gradients
        if not place.in_step:
            raise ConfigError("run.microbatches belongs inside `for step in run.steps(...)`")
        self._refuse_divided(dataset)
        if fresh and not place.is_repeated:
            parts.work.renew(dataset)
        parts.work.sharing.begin()
        gradients.begin_pass(place.phase)
        parts.watch.begin_pass(phase=place.phase, fresh=not place.has_gradients)
        self.buffers.begin_pass()
        parts.logs.begin_pass()
        self._backwards = 0
        pieces = parts.work.pieces(dataset, step=place.completed)
        self._drawn = parts.work.samples_of(dataset)
        return pieces

    def _refuse_divided(self, dataset: MapDataset[Any] | Loader | None) -> None:
        """Refuse a data set that is not the same on all ranks; collective.

        It looks in the first passes of each phase. With ``exact`` contents count too. Without it,
        where ranks have state of their own, data may be part of it.
        """
        self._begun[self._place.phase] += 1
        exact = bool(self._parts.settings.exact)
        if self._begun[self._place.phase] > _COMPARED or (self._keeps_own and not exact):
            return
        found = self._parts.world.gather(identity_of(dataset, contents=exact))
        if how := difference_of(found):
            raise ConfigError(
                f"the data set given at {user_line()} is not the same on all ranks: {how}. Give "
                "every rank the whole data set, without run.rank, run.world_size, a "
                "DistributedSampler or .shard(...), and made alike on all ranks: each step is "
                "divided among the ranks by run.microbatches"
            )

    def _begin_microbatch(self, piece: LoadedMicrobatch) -> Any:
        self._parts.check()
        batch = piece.fetch()
        self.piece, number = piece, piece.microbatch
        # A stand-in for samples that an epoch's last step lacks counts for nothing.
        self.enter(number if piece.samples else STAND_IN)
        seed_all(self._place.draws.microbatch(number))
        return batch

    def enter(self, microbatch: int) -> None:
        """Note the microbatch to which the next forwards belong."""
        self.buffers.begin_microbatch(microbatch)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the present microbatch; see `Run.backward`."""
        self.whole.check_left()
        piece, watch, evaluations = self.piece, self._parts.watch, self._place.evaluations
        if piece is None:
            raise ConfigError("run.backward belongs inside `for ... in run.microbatches(...)`")
        watch.before_backward()
        self._backwards += 1
        if evaluations is not None:
            evaluations.add(piece.microbatch, loss, counts=piece.counted)
        if piece.weight != 1.0:
            loss = loss * piece.weight
        number = piece.microbatch if piece.samples else STAND_IN
        self.gradients.backward(loss, microbatch=number)
        watch.after_backward()

    def _end(self, count: int) -> None:
        """End a pass over ``count`` microbatches; collective."""
        parts, place = self._parts, self._place
        parts.work.sharing.end(self._backwards)
        if self._backwards not in (0, count):
            raise ConfigError(
                f"run.backward was called {self._backwards} times in {count} microbatches: call "
                "it once in each (add up the losses of one microbatch first)"
            )
        if self._backwards and place.has_gradients:
            raise ConfigError(
                "two passes over run.microbatches called run.backward: call run.step(optimizer) "
                "after the first, which applies and drops its gradients"
            )
        wrong = self._make_mean()
        parts.watch.end_pass()
        if not self.gradients.alike:
            parts.logs.unite(parts.world.gather)
        parts.logs.end_pass(parts.world, speaks=parts.world.speaks)
        if self._backwards > 0:
            place.has_gradients, self.trained = True, count
            if not place.is_repeated:
                self.samples += self._drawn
                place.skips = self._is_left_out(wrong)
            if place.evaluations is not None:
                place.evaluations.end_pass(
                    parts.world, speaks=parts.world.speaks, logged=parts.logs.latest
                )
        self.buffers.end_pass(apply=not (self._backwards and place.skips))
        seed_all(place.draws.after_microbatches())

    def refuse_inside(self, call: str) -> None:
        """Raise ``ConfigError`` if a pass is under way: ``call`` needs its mean gradients."""
        self._inside.refuse_update(call)
        self.whole.check()

    def _make_mean(self) -> str:
        """Make the mean gradients; return why they cannot be used, if the loss guard decides."""
        parts, gradients = self._parts, self.gradients
        names = parts.logs.signature()
        wish = wish_of(parts.channel, parts.world)
        try:
            gradients.end_pass(backwards=self._backwards, names=names, wish=wish)
        except NotFiniteError as error:
            deferred = parts.watch.defers(error)
            if not deferred and (parts.losses is None or self._place.is_repeated):
                raise
            gradients.spoil()  # no mean was made of them, and each rank has its own
            return "" if deferred else str(error)
        return ""

    def _is_left_out(self, wrong: str, *, is_done: bool = False) -> bool:
        """Let the loss guard decide about the step; it may end the generation, or the job."""
        parts, world = self._parts, self._parts.world
        if parts.losses is None:
            return False
        world.settle()  # a value from an aborted collective is not judged
        step = self._place.completed

        def tell(why: str, action: LossAction) -> None:
            if world.rank == 0:
                parts.session.emit(
                    LossJudged(step=step, generation=world.generation, why=why, action=action.value)
                )
            if action in (LossAction.ROLL_BACK, LossAction.STOP):
                world.barrier()  # the first rank to leave ends it for all: report first

        try:
            skips = parts.losses.skips(
                parts.logs.latest, step=step, wrong=wrong, is_done=is_done, tell=tell
            )
        except (RollBackError, JobFailedError) as error:
            world.guard.end(error)
            raise
        if skips:
            self.clear()
        return skips

    def judge_end(self, wrong: str) -> None:
        """Let the loss guard go back, or end the job, for a state after the step that is wrong."""
        self._is_left_out(wrong, is_done=True)

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Record metrics of the present microbatch, or of the step; see `Run.log`."""
        if self.piece is None:
            self._parts.logs.add(None, values)
        else:
            self._parts.logs.add(self.piece.microbatch, values, counts=self.piece.counted)

    def ran(self, call: str) -> Sequence[int]:
        """Return the microbatches of the last pass for ``call``, which belongs between passes."""
        self._inside.refuse(call)
        self.whole.check()
        return self._ran

    def moment(self) -> Moment:
        """Return the present place, as far as DataLoaders must not cross it."""
        inside, place = self._inside, self._place
        if inside.number is None:
            return Moment(step=place.completed if place.in_step else None)
        return Moment(step=place.completed, microbatch=inside.number, visit=inside.visits)

    def close(self) -> None:
        """Remove every hook, and release the modules."""
        self._inside.close()
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = self._modes = None
