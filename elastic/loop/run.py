"""`Run`, the decorated function's handle on its world, its steps and its share of the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.ckpt.state.model_parts import ModelParts
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.data.foreign import ForeignLoaders, Moment
from holdfast.elastic.data.loaders import LoadedMicrobatch, Loader
from holdfast.elastic.data.order import SampleOrder
from holdfast.elastic.data.work import MapDataset, StepWork
from holdfast.elastic.data.workers.feed import FIRST_BATCH_S
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.events import (
    LossJudged,
    MetricsLogged,
    StepDone,
    TrainingResumed,
    UserEvent,
)
from holdfast.elastic.gradients.buffers import PassBuffers
from holdfast.elastic.gradients.clipping import clip_grad_norm_
from holdfast.elastic.gradients.mean import Gradients
from holdfast.elastic.gradients.metrics import Metrics
from holdfast.elastic.gradients.summing import Replicas
from holdfast.elastic.gradients.whole_tensors import whole_updates
from holdfast.elastic.groups.by_microbatch import STAND_IN, ByMicrobatch, How
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.loop.inside import Inside, users_line
from holdfast.elastic.loop.leaving import Leaving
from holdfast.elastic.loop.logbook import Logbook, Position, Write
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loop.session import Session
from holdfast.elastic.loop.updates.evaluations import Evaluations, UpdateSkippedError
from holdfast.elastic.loop.updates.watch import UpdateWatch
from holdfast.elastic.loop.user_code import user_line
from holdfast.elastic.loop.whole_pass import WholePass
from holdfast.elastic.loss import LossAction
from holdfast.elastic.randomness import Draws
from holdfast.elastic.seeding import drop_named, named, seed_all
from holdfast.elastic.tracked.handover import Wish, wish_of
from holdfast.elastic.tracked.keeper import StateKeeper
from holdfast.elastic.tracked.protection import Protection

if TYPE_CHECKING:
    from holdfast.elastic.loop.pipeline import Feed, Schedule, Stage

_Value = TypeVar("_Value", torch.Tensor, float, int)


class Run:
    """One generation's view of the run; every change of the world makes a new one.

    ``mesh`` is the mesh of ranks (with the axes that `Mesh` names: ``"dp"`` at least),
    ``completed`` the number of completed steps, ``metrics`` the values last logged. Libraries get
    the rest of the job from `session_of`.
    """

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        world: GenerationWorld,
        *,
        pulse: Pulse,
        keeper: StateKeeper,
        losses: LossWatch | None = None,
        position: Position | None = None,
    ) -> None:
        self._channel, self._settings, self._world = channel, settings, world
        self._session = Session(channel, world, keeper, seed=settings.seed)
        self._pulse, self._keeper = pulse, keeper
        self._gradients: Gradients | None = None
        self._buffers: PassBuffers | None = None
        self._logs = Metrics(settings.batch.microbatches)
        self._piece: LoadedMicrobatch | None = None
        self._work = StepWork(
            channel, settings, world, states=keeper.cursor.places, beat=pulse.beat
        )
        self._backwards = self._phase = 0
        self._has_gradients = self._in_step = self._skips = self._resumed = False
        self._losses = losses
        self._leaving = Leaving(world)
        self._logbook = Logbook(keeper.cursor, position or Position(), leads=world.rank == 0)
        self._left = False
        self._began = (0.0, 0.0, 0.0)
        self._share = 0
        self._inside, self._whole = Inside(world), WholePass()
        self._by_microbatch = ByMicrobatch(
            settings.batch.microbatches, gather=world.gather_groups, peers=world.dp
        )
        self._ran: list[int] = []
        self._updates = UpdateWatch(stages=world.record.mesh.pp)
        self._evaluations: Evaluations | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of this generation's ranks."""
        return self._world.mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """The data-parallel axes of the mesh; ``fully_shard`` shards over them, except experts."""
        return self._world.data_mesh

    @property
    def device(self) -> torch.device:
        """The device for this rank's model: the CPU, or its CUDA device (see `Mesh`)."""
        return self._world.device

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world.size

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The generation's number."""
        return self._world.generation

    @property
    def completed(self) -> int:
        """The number of complete steps.

        The present one counts once the loop goes on, or is left after `step`.
        """
        return self._keeper.cursor.step + (self._left and self._is_stepped)

    @property
    def metrics(self) -> dict[str, float]:
        """The values last logged; part of the state, so a restore brings them back.

        They include those of this step's microbatches as soon as the pass over them is complete.
        """
        return {**self._keeper.cursor.metrics, **self._logs.latest}

    @property
    def _is_stepped(self) -> bool:
        """True if only the rest of the loop's body is missing from the present step."""
        return self._in_step and self._phase > 0 and not self._has_gradients

    def check(self) -> None:
        """Raise ``GenerationOverError`` if this generation is over.

        Call it in long work of your own.
        """
        self._pulse.beat()
        self._world.guard.check()

    @contextmanager
    def pause(self, *, limit_s: float = 0.0) -> Iterator[None]:
        """Announce work besides training, such as an evaluation: silence during it is not a hang.

        After ``limit_s`` it counts as a hang; without ``limit_s``, after the launcher's limit (half
        an hour). A change of the world waits for the end of this work unless it calls `check`
        regularly.
        """
        if limit_s < 0:
            raise ConfigError(f"run.pause(limit_s={limit_s!r}): give seconds, or 0 for the default")
        with self._pulse.phase(WorkerPhase.PAUSE, limit_s=limit_s):
            yield

    def track(self, **state: Any) -> None:
        """Declare the state to keep, and restore it in place if there is a restore point.

        ``state``: modules, `ckpt.ModelParts` (of a rank's stages), optimizers, objects with
        ``state_dict``/``load_state_dict``, tensors, NumPy arrays, random generators, and dicts and
        lists of these and of plain values: equal on all ranks, or wrapped in `PerRank`. Raises
        ``ConfigError`` for a number or a string, which no restore can change in the caller's
        variable, and if a setting contradicts the saved run's; ``ckpt``'s ``MismatchError`` if the
        saved state belongs to another model.
        """
        if self._gradients is not None:
            raise ConfigError("run.track was called twice; name all state in one call")
        for name, value in state.items():
            if isinstance(value, torch.Generator):
                raise ConfigError(
                    f"run.track: {name} is a torch.Generator, whose state would depend on the "
                    f"microbatches of this rank: use run.generator({name!r}), which is seeded in "
                    "every microbatch and needs no tracking"
                )
        with self._pulse.phase(WorkerPhase.IDLE):
            self._keeper.track(state)
        modules = {
            name: value
            for name, value in state.items()
            if isinstance(value, nn.Module | ModelParts)
        }
        self._buffers = PassBuffers(
            modules,
            self._world.dp,
            microbatches=self._settings.batch.microbatches,
            exact=self._settings.exact,
        )
        self._gradients = Gradients(
            modules,
            self._world,
            replicas=Replicas(dense=self._world.dp, experts=self._world.edp),
            unite=self._world.unite,
            microbatches=self._settings.batch.microbatches,
            exact=self._settings.exact,
            bounds=self._keeper.cursor.bounds,
            check=self._world.guard.check,
        )
        self._updates.track(
            state, self._gradients.parameters, moves=self._gradients.moves_parameters
        )

    def steps(self, count: int) -> Iterator[int]:
        """Yield the number of each step still to do until ``count`` are complete.

        The whole loop body belongs to the step. It must depend only on the tracked state and the
        step's number: after a failure it runs again from the last complete step. To leave earlier,
        call `stop`. All ranks may also leave by `break` or `return` in the same step; the run is
        complete then. Raises ``ConfigError`` on all ranks if some leave and others go on.
        """
        self._tracked()
        self._begin(count)
        while self.completed < count and not self._keeper.cursor.stopped:
            self._begin_step()
            with self._in_body():
                yield self.completed
            self._end_step(last=self._agree() or self.completed + 1 >= count)
        self._hand_over_rest()

    def epochs(self, count: int, loader: Loader) -> Iterator[int]:
        """Yield the number of each step until ``loader`` has gone ``count`` times through its data.

        Otherwise like `steps`. Use it if the number of steps is unknown or depends on the data.
        """
        self._tracked()
        over = loader.reaches(count)
        self._begin(self.completed if over else self.completed + 1)
        while not over and not self._keeper.cursor.stopped:
            self._begin_step()
            with self._in_body():
                yield self.completed
            self._work.advance()
            over = loader.reaches(count)
            self._end_step(last=self._agree() or over)
        self._hand_over_rest()

    def loader(
        self,
        dataset: Any,
        *,
        batch: int | None = None,
        shuffle: bool | None = None,
        order: SampleOrder | None = None,
        name: str = "data",
        factory: Callable[..., DataLoader[Any]] = DataLoader,
        first_batch_s: float = FIRST_BATCH_S,
        **options: Any,
    ) -> Loader:
        """Return a loader of ``dataset`` for `microbatches`; every epoch has each sample once.

        ``dataset`` can be indexed or iterated, or is a DataLoader whose data set, order and options
        are taken over. ``batch`` is a step's number of samples over all ranks (default: that of
        `Batch`); the last step of an epoch may be smaller. Samples are shuffled unless ``shuffle``
        is False or ``order`` (such as `Weighted`) is given. ``options`` go to ``factory``: a
        DataLoader, or torchdata's StatefulDataLoader. The position is saved under ``name`` with the
        run; it does not belong in `track`. A worker process without a batch ``first_batch_s`` after
        its start is replaced. Raises ``ConfigError`` if these arguments do not fit together.
        """
        return self._work.loader(
            dataset,
            batch=batch,
            shuffle=shuffle,
            order=order,
            name=name,
            factory=factory,
            options={"first_batch_s": first_batch_s, **options},
        )

    def stop(self) -> None:
        """End the loop on all ranks at the end of this step, whichever rank calls it.

        The run is complete then: the step is saved like the last one, and neither a restore nor a
        later start with its checkpoint runs another.
        """
        if not self._in_step:
            raise ConfigError("run.stop belongs inside `for step in run.steps(...)`")
        self._leaving.stop()

    def on_protected(self, write: Write, *, after: int = -1) -> None:
        """Call ``write(step, metrics)`` on rank 0, once for each step, when it is protected.

        A protected step is not repeated after a failure, so a logger gets it once. ``step`` is the
        number that `steps` yields, ``metrics`` the values logged in it; steps without any are left
        out. ``after`` is the last step that the logger has already. The calls come between steps,
        and the last ones when the loop ends. Call it before the loop. If rank 0 is killed between a
        call and the end of that step, another rank may repeat the call.
        """
        if self._in_step:
            raise ConfigError("run.on_protected: call it before the loop over run.steps(...)")
        self._logbook.hand_to(write, after=after)

    @contextmanager
    def _in_body(self) -> Iterator[None]:
        """Notice that the loop's body is left for good."""
        try:
            yield
        except GeneratorExit:
            self._left = True
            self._leaving.left(user_line())
            raise

    def _agree(self) -> bool:
        """Agree with all ranks, at the end of a step, on whether it is the last."""
        if self._is_stepped:
            self._logbook.hand_over(self.protection.step)
        stopped, told = self._leaving.agree(*self._logbook.told())
        self._logbook.agreed(*told)
        cursor = self._keeper.cursor
        cursor.stopped = cursor.stopped or stopped
        return cursor.stopped

    def _hand_over_rest(self) -> None:
        with self._pulse.phase(WorkerPhase.WAIT):
            self._logbook.finish(lambda: self.protection.step, check=self.check)

    def _begin(self, count: int) -> None:
        if self._left:
            raise ConfigError(
                "a second loop over run.steps follows one that was left by `break`: after a "
                "failure the first would go on; give it the number of its steps"
            )
        self._updates.begin()
        stopped = self._agree()
        self._keeper.begin(self.completed if stopped else count)
        if self._losses is not None:
            self._losses.begin(self._world, completed=self.completed)

    def _tracked(self) -> Gradients:
        if self._gradients is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self._gradients

    def _kept_buffers(self) -> PassBuffers:
        self._tracked()
        assert self._buffers is not None, "made with the gradients"
        return self._buffers

    def _begin_step(self) -> None:
        self.check()
        self._in_step, self._has_gradients, self._phase = True, False, 0
        self._ran = []
        self._updates.begin_step(self.completed)
        self._began = (time.time(), time.perf_counter(), time.process_time())
        self._pulse.set(WorkerPhase.COMPUTE, step=self.completed)
        seed_all(self._draws().before_microbatches())

    def _end_step(self, *, last: bool) -> None:
        self._whole.check()
        if self._has_gradients or not self._phase:
            raise ConfigError(
                f"step {self.completed} ended without run.step(optimizer): call it after every "
                "pass over run.microbatches with run.backward"
            )
        self._world.settle()  # before anything of the step is kept
        self._in_step = False
        self._tracked().end_step()
        self._updates.end_step()
        cursor = self._keeper.cursor
        cursor.metrics.update(self._logs.latest)
        self._logbook.add(cursor.step, dict(self._logs.latest))
        cursor.step += 1
        self._work.advance()
        wished = Wish(self._tracked().wished)
        self._keeper.keep(last=last, wished=wished)
        protection = self.protection
        start, began, cpu_began = self._began
        seconds = time.perf_counter() - began
        # Read the end of the step before the fence. Then, however long a pause here is, only steps
        # that ended while the generation was valid are reported.
        self.check()
        self._session.emit(
            StepDone(
                step=cursor.step,
                generation=self.generation,
                rank=self.rank,
                start_s=start,
                seconds=seconds,
                stall_s=self._keeper.stall_s(),
                protected=protection.step,
                unprotected_s=round(protection.age_s, 6),
                copied_bytes=protection.copied_bytes,
                discarded=protection.discarded,
                waited_s=self._world.guard.take_waited_s(),
                quiet_s=self._pulse.take_quiet_s(),
                data_s=self._work.take_waited_s(),
                cpu_s=time.process_time() - cpu_began,
                microbatches=self._share,
            )
        )
        if self.is_leader:
            if self._logs.latest:
                self._session.emit(MetricsLogged(step=cursor.step, values={**self._logs.latest}))
            if not self._resumed:
                self._session.emit(TrainingResumed(generation=self.generation, step=cursor.step))
        self._resumed = True
        self._logs.clear()
        self._work.sharing.settle()
        self._pulse.set(WorkerPhase.IDLE, step=cursor.step)
        if wished and not last:
            self._keeper.hand_over()

    @overload
    def microbatches(self) -> Iterator[int]: ...
    @overload
    def microbatches(
        self, dataset: MapDataset[Any] | Loader, *, fresh: bool = False
    ) -> Iterator[Any]: ...
    def microbatches(
        self, dataset: MapDataset[Any] | Loader | None = None, *, fresh: bool = False
    ) -> Iterator[Any]:
        """Yield this rank's microbatches of the step: collated samples, or their indices.

        For a data set, the samples of all steps are one endless shuffled sequence, epoch after
        epoch. For a `loader`, a step never spans two epochs, and a microbatch is weighted by its
        number of samples. Each microbatch has its own seed. When the loop ends, every ``.grad`` is
        the mean over all microbatches of all ranks.

        A step may have several *phases*: passes, at most one of them with `backward`, and the
        `step` that applies its gradient. All passes of a step have the same samples; with ``fresh``
        a pass takes the next ones of a loader. All passes of a phase have the same random draws.
        """
        with self._whole.one():
            pieces = self._begin_pass(dataset, fresh=fresh)
            for piece in pieces:
                self._tracked().begin_microbatch(last=piece is pieces[-1])
                batch = self._begin_microbatch(piece)
                with self._inside.microbatch(piece.microbatch):
                    yield batch
                self._updates.after_microbatch()
            self._piece = None
            self._ran = [p.microbatch if p.samples else STAND_IN for p in pieces]
            self._end_pass(len(pieces))

    def _begin_pass(
        self, dataset: MapDataset[Any] | Loader | None, *, fresh: bool = False
    ) -> list[LoadedMicrobatch]:
        """Begin a pass over the microbatches of the step; return this rank's."""
        gradients = self._tracked()
        if not self._in_step:
            raise ConfigError("run.microbatches belongs inside `for step in run.steps(...)`")
        if fresh and not self._is_repeated:
            self._work.renew(dataset)
        self._work.sharing.begin()
        gradients.begin_pass(self._phase)
        self._updates.begin_pass(fresh=not self._has_gradients)
        self._kept_buffers().begin_pass()
        self._logs.begin_pass()
        self._backwards = 0
        return self._work.pieces(dataset, step=self.completed)

    @property
    def microbatch(self) -> int:
        """The number of the present microbatch in the step, from 0, the same on any rank."""
        if self._piece is None:
            raise ConfigError("run.microbatch belongs inside `for ... in run.microbatches(...)`")
        return self._piece.microbatch

    def _begin_microbatch(self, piece: LoadedMicrobatch) -> Any:
        self.check()
        batch = piece.fetch()
        self._piece, number = piece, piece.microbatch
        # A stand-in for samples that an epoch's last step lacks counts for nothing.
        self._kept_buffers().begin_microbatch(number if piece.samples else STAND_IN)
        seed_all(self._draws().microbatch(number))
        return batch

    def _draws(self) -> Draws:
        """Return the seeds of the present phase."""
        return Draws(seed=self._session.seed, step=self.completed, phase=self._phase)

    def gather(self, values: Sequence[torch.Tensor], *, fill: float | None = None) -> torch.Tensor:
        """Return ``[microbatches, ...]``: a tensor of every microbatch, in their order.

        ``values`` has one tensor for each microbatch that this rank ran in the last pass, of one
        shape and dtype. The result has their bits, the same on all ranks and for any number of
        ranks; it is a new leaf without a gradient. If a microbatch has no samples, as at the end of
        an epoch, its row is ``fill``. Collective, between the passes. Raises ``ConfigError`` inside
        a microbatch, for other numbers or kinds of values, and without ``fill`` for a microbatch
        without samples.
        """
        self._inside.refuse("run.gather")
        self._whole.check()
        return self._by_microbatch.tensors(values, self._ran, fill=fill)

    def reduce(self, values: Sequence[_Value], how: How) -> _Value:
        """Return the sum, mean, largest or smallest of a value of every microbatch.

        ``values`` is as for `gather`, or of numbers. ``how`` is ``"sum"``, ``"mean"``, ``"max"`` or
        ``"min"``, of each element; it is taken in the order of the microbatches, so the bits are
        the same for any number of ranks. Microbatches without samples are left out, and all others
        count equally in the mean. Collective, between the passes. Raises ``ConfigError`` like
        `gather`.
        """
        self._inside.refuse("run.reduce")
        self._whole.check()
        found: _Value = self._by_microbatch.reduced(values, self._ran, how=how)
        return found

    def generator(self, name: str = "", *, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a random generator of the run's, the same object for every ``name``.

        It is seeded from the run's seed, its name and the step at the start and the end of each
        step's microbatches, and in each microbatch from that as well. So it draws the same numbers
        for any number of ranks, and again after a restore. Use it in the loop, not in a data set:
        samples are read under seeds of their own.
        """
        return named(name, torch.device(device))

    @property
    def share(self) -> int:
        """The number of a step's microbatches that this rank runs."""
        return self._work.share

    def stage(self, module: nn.Module) -> Stage:
        """Return the one stage of this rank; see `stages`."""
        return self.stages([module])[0]

    def stages(self, modules: Iterable[nn.Module]) -> list[Stage]:
        """Return this rank's stages, for a schedule of torch.distributed.pipelining.

        ``modules`` (such as `ckpt.ModelParts`) are this rank's parts of the model, with their names
        in the whole model: rank ``r`` of the axis ``pp`` has the stages ``r``, ``r + pp``, … in
        this order. Every rank has the same number. Collective. Raises ``ConfigError`` for modules
        that cannot be stages.
        """
        from holdfast.elastic.loop.pipeline import (
            stages_of,  # takes a second to import, so only on use
        )

        return stages_of(
            list(modules),
            self._world,
            check=self.check,
            enter=lambda number: self._kept_buffers().begin_microbatch(number),
            exact=bool(self._settings.exact),
            shares_are_even=self._work.sharing.is_even,
        )

    def pipeline(
        self,
        schedule: Schedule,
        dataset: MapDataset[Any] | Loader,
        *,
        feed: Feed | None = None,
    ) -> None:
        """Run this group's microbatches through the stages; replaces `microbatches`.

        ``schedule`` is for a `stage`, or for `stages`, with ``n_microbatches=run.share`` and
        ``scale_grads=False``. ``feed`` splits a microbatch into the input of the first stage and
        the target of the loss (default: a microbatch is such a pair). The mean loss is logged as
        ``loss``. Afterwards every ``.grad`` is the mean over all microbatches.
        """
        from holdfast.elastic.loop.pipeline import pair, run_schedule

        self._whole.check()
        pieces = self._begin_pass(dataset)
        self._tracked().begin_schedule()
        self._kept_buffers().begin_microbatch(STAND_IN)  # torch tries the shapes out
        with self._inside.microbatch(pieces[0].microbatch):
            losses = run_schedule(schedule, pieces, feed=feed or pair, draws=self._draws())
        self._backwards = len(pieces)
        for piece, loss in zip(pieces, losses, strict=True):
            self._logs.add(piece.microbatch, {"loss": loss}, samples=piece.samples)
        self._end_pass(len(pieces))

    def _end_pass(self, count: int) -> None:
        self._work.sharing.end(self._backwards)
        if self._backwards not in (0, count):
            raise ConfigError(
                f"run.backward was called {self._backwards} times in {count} microbatches: call "
                "it once in each (add up the losses of one microbatch first)"
            )
        if self._backwards and self._has_gradients:
            raise ConfigError(
                "two passes over run.microbatches called run.backward: call run.step(optimizer) "
                "after the first, which applies and drops its gradients"
            )
        agree, wrong = self._logs.signature(self._backwards > 0), ""
        wish = wish_of(self._channel, self._world)
        try:
            self._tracked().end_pass(backwards=self._backwards, agree=agree, wish=wish)
        except NotFiniteError as error:
            if self._updates.defers(error):
                self._tracked().spoil()
            elif self._losses is None or self._is_repeated:
                raise
            else:
                wrong = str(error)
        self._updates.end_pass()
        self._logs.end_pass(self._world, speaks=self._world.speaks)
        if self._backwards > 0:
            self._has_gradients, self._share = True, count
            if not self._is_repeated:
                self._judge_loss(wrong)
            if self._evaluations is not None:
                self._evaluations.end_pass(
                    self._world, speaks=self._world.speaks, logged=self._logs.latest
                )
        self._kept_buffers().end_pass(apply=not (self._backwards and self._skips))
        seed_all(self._draws().after_microbatches())

    @property
    def _is_repeated(self) -> bool:
        """True if the optimizer of `minimize` evaluates the loss again in this pass."""
        return self._evaluations is not None and self._evaluations.first is not None

    def _judge_loss(self, wrong: str) -> None:
        """Let the loss guard decide about the step; it may end the generation, or the job."""
        self._skips = False
        if self._losses is None:
            return
        self._world.settle()  # a value from an aborted collective is not judged

        def tell(why: str, action: LossAction) -> None:
            if self.is_leader:
                self._session.emit(
                    LossJudged(
                        step=self.completed,
                        generation=self.generation,
                        why=why,
                        action=action.value,
                    )
                )
            if action in (LossAction.ROLL_BACK, LossAction.STOP):
                self._world.barrier()  # the first rank to leave ends it for all: report first

        self._skips = self._losses.skips(
            self._logs.latest, step=self.completed, wrong=wrong, tell=tell
        )
        if self._skips:
            self._tracked().clear()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this microbatch's loss (the mean over the microbatch's samples)."""
        self._whole.check_left()
        if self._piece is None:
            raise ConfigError("run.backward belongs inside `for ... in run.microbatches(...)`")
        self._updates.before_backward()
        self._backwards += 1
        if self._evaluations is not None:
            self._evaluations.add(self._piece.microbatch, loss, samples=self._piece.samples)
        if self._piece.weight != 1.0:
            loss = loss * self._piece.weight
        number = self._piece.microbatch if self._piece.samples else STAND_IN
        self._tracked().backward(loss, microbatch=number)
        self._updates.after_backward()

    def step(self, *optimizers: Optimizer, scaler: GradScaler | None = None) -> None:
        """Apply the mean gradient and drop it. Call it after each pass with `backward`.

        Give it all optimizers of the pass in one call. It applies nothing if the `LossGuard` skips
        the step's gradient. ``scaler`` is the ``torch.amp.GradScaler`` that scaled the loss: the
        gradients are unscaled, unless ``scaler.unscale_`` did so before; if one is not finite at
        any rank, all ranks skip the update; then the scale is updated. Raises ``ConfigError`` for
        an optimizer or a scaler that is not tracked.
        """
        if not optimizers:
            raise ConfigError(
                "run.step needs the optimizer: run.step(optimizer), or with a GradScaler "
                "run.step(optimizer, scaler=scaler)"
            )
        self._whole.check()
        if self._evaluations is not None:
            raise ConfigError("run.step inside run.minimize: the optimizer steps by itself there")
        if not self._has_gradients:
            self._updates.refuse_second()
        self.check()
        with whole_updates(optimizers, exact=self._settings.exact):
            self._updates.apply(
                optimizers,
                scaler=scaler,
                skips=self._skips,
                fence=self._keeper.fence_steps_of,  # tracked ones are fenced already
                agree=self._world.max_,
            )
        self._end_update()

    def minimize(self, optimizer: Optimizer, closure: Callable[[], object]) -> float:
        """Make one update with an optimizer that evaluates the loss several times, such as LBFGS.

        It replaces `step`. ``closure`` makes one pass over `microbatches` with `backward`; every
        call sees the same samples and the same random draws. The optimizer gets the mean gradient
        and the mean loss of all ranks' microbatches, whatever ``closure`` returns. Returns the loss
        before the update, and keeps the metrics logged with it. Raises ``ConfigError`` for an
        optimizer that is not tracked, or that has sharded parameters.
        """
        if not self._in_step or self._has_gradients or self._evaluations is not None:
            raise ConfigError(
                "run.minimize makes its own pass and update: call it inside `for step in "
                "run.steps(...)`, alone, not after a pass with run.backward or in a closure"
            )
        self.check()
        self._evaluations = evaluations = Evaluations(self._settings.batch.microbatches)

        def evaluate() -> torch.Tensor:
            self._tracked().clear()
            self._has_gradients = False
            with torch.enable_grad():
                closure()
            if not self._has_gradients:
                raise ConfigError(
                    "the closure of run.minimize made no pass over run.microbatches with "
                    "run.backward: both belong inside it"
                )
            if self._skips:
                raise UpdateSkippedError
            self._updates.evaluated(optimizer)
            return evaluations.loss

        try:
            self._updates.minimize(optimizer, evaluate, fence=self._keeper.fence_steps_of)
        finally:
            self._evaluations = None
        self._logs.latest.update(evaluations.logged)
        self._end_update()
        return evaluations.first_loss

    def _end_update(self) -> None:
        self._tracked().clear()
        self._has_gradients = False
        self._phase += 1

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale the gradients to a 2-norm of at most ``max_norm``; return the norm before.

        The norm is the same for any number of data-parallel ranks, bit for bit.
        """
        return clip_grad_norm_(parameters, max_norm, world=self._world)

    def fence(self) -> None:
        """Wait for the snapshot being copied. Call it before you change tracked tensors by hand.

        ``run.step`` and every tracked optimizer do so by themselves. A change without it, for
        example of parameters under ``torch.no_grad()``, is detected, and the snapshot being copied
        is discarded; `protection` names the tensor.
        """
        self._keeper.fence()

    @property
    def protection(self) -> Protection:
        """The protection of this run: the newest restore point, its age and its cost.

        Reading it is cheap. Raises ``ConfigError`` before `track`.
        """
        return self._keeper.protection()

    def emit(self, event: UserEvent) -> None:
        """Record an event of your own in the job's event files."""
        self._session.emit(event)

    def log(self, **values: float | torch.Tensor) -> None:
        """Record metrics of this step; inside a microbatch, its part of their mean."""
        if self._piece is None:
            self._logs.add(None, values)
        else:
            self._logs.add(self._piece.microbatch, values, samples=self._piece.samples)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch the user's DataLoaders while the function runs; called by the loop."""
        loaders = ForeignLoaders(moment=self._moment, line=users_line)
        with loaders.watched():
            yield

    def _moment(self) -> Moment:
        inside = self._inside
        if inside.number is None:
            return Moment(step=self.completed if self._in_step else None)
        return Moment(step=self.completed, microbatch=inside.number, visit=inside.visits)

    def _finish(self) -> None:
        """Make the last step durable if requested, and wait for all ranks; called by the loop."""
        self._pulse.set(WorkerPhase.WAIT, step=self.completed)
        self._leaving.meet(self.completed)
        if self._in_step:  # the loop was left by `break` or `return`
            self._keeper.cursor.stopped = True
            self._end_left()
        self._keeper.finish()
        self._world.barrier()

    def _end_left(self) -> None:
        if self._is_stepped:
            self._end_step(last=True)
            self._hand_over_rest()
        else:
            self._world.settle()
            self._in_step = False
            self._keeper.keep_unfinished()

    def _close(self) -> None:
        """Release everything that holds the model or the data."""
        self._updates.close()
        self._inside.close()
        drop_named()
        self._work.close()
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
        self._keeper.close()


def session_of(run: Run) -> Session:
    """Return the job around a run: its members, its sidecar, its events."""
    return run._session
