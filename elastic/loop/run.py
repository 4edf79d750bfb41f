"""`Run`, the decorated function's handle on its world, its steps and its share of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.ckpt.snapshot.touched import Rows
from holdfast.ckpt.state.kinds.rebuilt import module_of
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.data.foreign import ForeignLoaders
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.data.order import SampleOrder
from holdfast.elastic.data.weights import Weigh
from holdfast.elastic.data.work import MapDataset, StepWork
from holdfast.elastic.data.workers.feed import FIRST_BATCH_S
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import UserEvent
from holdfast.elastic.gradients.clipping import clip_grad_norm_
from holdfast.elastic.gradients.metrics import Metrics
from holdfast.elastic.gradients.wrapped import exact_method
from holdfast.elastic.groups.by_microbatch import ByMicrobatch, How
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.islands.pairs.island import island_of
from holdfast.elastic.loop.inside import users_line
from holdfast.elastic.loop.logbook import Position, Write
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loop.parts import RunParts
from holdfast.elastic.loop.passes import Passes
from holdfast.elastic.loop.session import Session
from holdfast.elastic.loop.steps import Steps
from holdfast.elastic.loop.trackers import OpenTracker, Tracker
from holdfast.elastic.loop.updates.place import LoopPlace
from holdfast.elastic.loop.updates.updater import Updater
from holdfast.elastic.loop.updates.watch import UpdateWatch
from holdfast.elastic.seeding import drop_named, named
from holdfast.elastic.tracked.keeper import StateKeeper
from holdfast.elastic.tracked.protection import Protection

if TYPE_CHECKING:
    from holdfast.elastic.loop.pipeline import Feed, Schedule, Stage

_Value = TypeVar("_Value", torch.Tensor, float, int)


class Run:
    """One generation's view of the run; every change of the world makes a new one.

    Its members by purpose; the first row and ``log`` are enough for most loops:

    | purpose | members |
    |---|---|
    | a training loop | ``track``, ``steps``, ``microbatches``, ``backward``, ``step`` |
    | data | ``loader``, ``epochs``, ``microbatch``, ``share`` |
    | the gradient, other updates | ``clip_grad_norm_``, ``minimize`` |
    | random numbers | ``generator`` |
    | values of all microbatches | ``gather``, ``reduce`` |
    | stages of a pipeline | ``stage``, ``stages``, ``pipeline`` |
    | metrics and events | ``log``, ``log_to``, ``metrics``, ``on_protected``, ``emit`` |
    | the position in the run | ``completed``, ``repeats``, ``stop`` |
    | long work of your own | ``pause``, ``check`` |
    | snapshots | ``protection``, ``fence``, ``touched`` |
    | the ranks | ``rank``, ``world_size``, ``is_leader``, ``generation`` |
    | the device and the mesh | ``device``, ``mesh``, ``data_mesh`` |

    ``mesh`` has the axes that `Mesh` names: ``"dp"`` at least. Libraries get the rest of the job
    from `session_of`.
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
        self._settings, self._world = settings, world
        self._pulse, self._keeper = pulse, keeper
        self._session = Session(channel, world, keeper, seed=settings.own_seed)
        self._logs = Metrics(settings.batch.microbatches)
        self._place = LoopPlace(keeper.cursor, seed=settings.own_seed)
        self._island = island_of(channel, settings, world, pulse=pulse, keeper=keeper)
        self._work = StepWork(
            channel,
            settings,
            world,
            states=keeper.cursor.places,
            beat=pulse.beat,
            hand=None if self._island is None else self._island.hand,
        )
        self._watch = UpdateWatch(stages=world.record.mesh.pp, exact=settings.exact)
        self._parts = parts = RunParts(
            channel=channel,
            session=self._session,
            settings=settings,
            world=world,
            pulse=pulse,
            keeper=keeper,
            place=self._place,
            logs=self._logs,
            work=self._work,
            watch=self._watch,
            losses=losses,
            island=self._island,
        )
        self._passes = Passes(parts)
        self._steps = Steps(parts, self._passes, position=position or Position())
        self._trackers: list[OpenTracker] = []
        self._updater = Updater(
            watch=self._watch,
            place=self._place,
            settings=settings,
            check=parts.check,
            clear=self._passes.clear,
            fence=keeper.fence_steps_of,
            agree=world.max_,
        )
        self._by_microbatch = ByMicrobatch(
            settings.batch.microbatches, gather=world.gather_groups, peers=world.dp
        )

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
        """True if this is rank 0."""
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
        return self._place.completed

    @property
    def metrics(self) -> dict[str, float]:
        """The values last logged; part of the state, so a restore brings them back.

        They include those of this step's microbatches as soon as the pass over them is complete.
        """
        return {**self._keeper.cursor.metrics, **self._logs.latest}

    @property
    def repeats(self) -> bool:
        """True if the present step began before the restore, so that its body may have run.

        It is the same on all ranks, and False outside the loop. It is also True for the step after
        one at whose end ranks waited for a rank that is lost: that rank might have begun it. If all
        workers are lost at once, nobody knows, and it is False.
        """
        return self._steps.repeats

    def check(self) -> None:
        """Raise ``GenerationOverError`` if this generation is over.

        Call it in long work of your own.
        """
        self._parts.check()

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

        ``state``: modules, `Rebuilt`, `ckpt.ModelParts` (of a rank's stages), optimizers, objects
        with ``state_dict``/``load_state_dict``, tensors, NumPy arrays, random generators, and dicts
        and lists of these and of plain values: equal on all ranks, or wrapped in `PerRank`. Raises
        ``ConfigError`` for a number or a string, which no restore can change in the caller's
        variable, and if a setting contradicts the saved run's; ``ckpt``'s ``MismatchError`` if the
        saved state belongs to another model.
        """
        if self._passes.is_tracked:
            raise ConfigError("run.track was called twice; name all state in one call")
        modules = {name: module_of(value) for name, value in state.items()}
        with self._pulse.phase(WorkerPhase.IDLE):
            own = {} if self._island is None else self._island.track(state)
            exact = exact_method(self._settings.exact, modules.values(), unite=self._world.unite)
            self._keeper.cursor.adds_by(exact)
            self._keeper.track(state, own=own)
        self._passes.track(modules, exact=exact)

    def steps(self, count: int) -> Iterator[int]:
        """Yield the number of each step still to do until ``count`` are complete.

        The whole loop body belongs to the step. It must depend only on the tracked state and the
        step's number: after a failure it runs again from the last complete step. To leave earlier,
        call `stop`. All ranks may also leave by `break` or `return` in the same step; the run is
        complete then. Raises ``ConfigError`` on all ranks if some leave and others go on.
        """
        yield from self._steps.until(count)

    def epochs(self, count: int, loader: Loader) -> Iterator[int]:
        """Yield the number of each step until ``loader`` has gone ``count`` times through its data.

        Otherwise like `steps`. Use it if the number of steps is unknown or depends on the data.
        """
        yield from self._steps.through(count, loader)

    def loader(
        self,
        dataset: Any,
        *,
        batch: int | None = None,
        shuffle: bool | None = None,
        order: SampleOrder | Iterable[int] | None = None,
        name: str = "data",
        factory: Callable[..., DataLoader[Any]] = DataLoader,
        first_batch_s: float = FIRST_BATCH_S,
        **options: Any,
    ) -> Loader:
        """Return a loader of ``dataset`` for `microbatches`; every epoch has each sample once.

        ``dataset`` can be indexed or iterated, or is a DataLoader whose data set, order and options
        are taken over. ``batch`` is a step's number of samples over all ranks (default: that of
        `Batch`); the last step of an epoch may be smaller. Samples are shuffled unless ``shuffle``
        is False or ``order`` is given: `Weighted`, a torch Sampler, or one of your own. ``options``
        go to ``factory``: a DataLoader, or torchdata's StatefulDataLoader. The position is saved
        under ``name`` with the run; it does not belong in `track`. A worker process without a batch
        ``first_batch_s`` after its start is replaced.

        Raises ``ConfigError`` if these arguments do not fit together.
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
        if not self._place.in_step:
            raise ConfigError("run.stop belongs inside `for step in run.steps(...)`")
        self._steps.leaving.stop()

    def on_protected(self, write: Write, *, after: int = -1) -> None:
        """Call ``write(step, metrics)`` on rank 0, once for each step, when it is protected.

        A protected step is not repeated after a failure, so a logger gets it once. ``step`` is the
        number that `steps` yields, ``metrics`` the values logged in it; steps without any are left
        out. ``after`` is the last step that the logger has already. The calls come between steps;
        the last ones when the loop ends, or the function if the loop is left by `break`. Call it
        before the loop. ``write`` must not buffer: a kill would lose what is not written. If rank 0
        is killed between a call and the end of that step, another rank repeats the call, unless
        ``after`` names it. Several functions are called in the order in which they were given.
        """
        if self._place.in_step:
            raise ConfigError("run.on_protected: call it before the loop over run.steps(...)")
        self._steps.logbook.hand_to(write, after=after)

    def log_to(self, *trackers: Tracker) -> None:
        """Send the metrics of each step to experiment trackers, once, when it is protected.

        Nothing is sent that a failure takes back, and nothing twice: a tracker tells the last step
        that it has. ``trackers``: those of `holdfast.adapters.trackers`, or a `Tracker` of your
        own. Rank 0 opens them at the first step, and closes them when the function is over. Call it
        before the loop.
        """
        if self._place.in_step:
            raise ConfigError("run.log_to: call it before the loop over run.steps(...)")
        for tracker in trackers:
            opened = OpenTracker(tracker, pause=self.pause)
            self._trackers.append(opened)
            self._steps.logbook.hand_to(opened.write, after=-1)

    @overload
    def microbatches(self, *, weigh: Weigh | None = None) -> Iterator[int]: ...
    @overload
    def microbatches(
        self,
        dataset: MapDataset[Any] | Loader,
        *,
        fresh: bool = False,
        weigh: Weigh | None = None,
    ) -> Iterator[Any]: ...
    def microbatches(
        self,
        dataset: MapDataset[Any] | Loader | None = None,
        *,
        fresh: bool = False,
        weigh: Weigh | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's microbatches of the step: collated samples, or their indices.

        For a data set, the samples of all steps are one endless shuffled sequence, epoch after
        epoch. For a `loader`, a step never spans two epochs, and a microbatch is weighted by its
        number of samples. Each microbatch has its own seed. When the loop ends, every ``.grad`` is
        the mean over all microbatches of all ranks.

        A step may have several *phases*: passes, at most one of them with `backward`, and the
        `step` that applies its gradient. All passes of a step have the same samples; with ``fresh``
        a pass takes the next ones of a loader. All passes of a phase have the same random draws.

        ``weigh(microbatch)`` returns what a microbatch counts in the means, instead of its number
        of samples: its label tokens, for a loss that is the mean over tokens.
        """
        yield from self._passes.microbatches(dataset, fresh=fresh, weigh=weigh)

    @property
    def microbatch(self) -> int:
        """The number of the present microbatch in the step, from 0, the same on any rank."""
        if self._passes.piece is None:
            raise ConfigError("run.microbatch belongs inside `for ... in run.microbatches(...)`")
        return self._passes.piece.microbatch

    def gather(self, values: Sequence[torch.Tensor], *, fill: float | None = None) -> torch.Tensor:
        """Return ``[microbatches, ...]``: a tensor of every microbatch, in their order.

        ``values`` has one tensor for each microbatch that this rank ran in the last pass, of one
        shape and dtype. The result has their bits, the same on all ranks and for any number of
        ranks; it is a new leaf without a gradient. If a microbatch has no samples, as at the end of
        an epoch, its row is ``fill``. Collective, between the passes. Raises ``ConfigError`` inside
        a microbatch, for other numbers or kinds of values, and without ``fill`` for a microbatch
        without samples.
        """
        return self._by_microbatch.tensors(values, self._passes.ran("run.gather"), fill=fill)

    def reduce(self, values: Sequence[_Value], how: How) -> _Value:
        """Return the sum, mean, largest or smallest of a value of every microbatch.

        ``values`` is as for `gather`, or of numbers. ``how`` is ``"sum"``, ``"mean"``, ``"max"`` or
        ``"min"``, of each element; it is taken in the order of the microbatches, so the bits are
        the same for any number of ranks. Microbatches without samples are left out, and all others
        count equally in the mean. Collective, between the passes. Raises ``ConfigError`` like
        `gather`.
        """
        ran = self._passes.ran("run.reduce")
        found: _Value = self._by_microbatch.reduced(values, ran, how=how)
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

        found = stages_of(
            list(modules),
            self._world,
            check=self.check,
            enter=self._passes.enter,
            exact=bool(self._settings.exact),
            shares_are_even=self._work.sharing.is_even,
        )
        self._keeper.stages = {stage.stage_index: stage.submod for stage in found}
        return found

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
        self._passes.pipeline(schedule, dataset, feed=feed)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this microbatch's loss (the mean over the microbatch's samples)."""
        self._passes.backward(loss)

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
        self._passes.whole.check()
        self._updater.step(optimizers, scaler=scaler)

    def minimize(self, optimizer: Optimizer, closure: Callable[[], object]) -> float:
        """Make one update with an optimizer that evaluates the loss several times, such as LBFGS.

        It replaces `step`. ``closure`` makes one pass over `microbatches` with `backward`; every
        call sees the same samples and the same random draws. The optimizer gets the mean gradient
        and the mean loss of all ranks' microbatches, whatever ``closure`` returns. Returns the loss
        before the update, and keeps the metrics logged with it. Raises ``ConfigError`` for an
        optimizer that is not tracked, or that has sharded parameters.
        """
        evaluations = self._updater.minimize(optimizer, closure)
        self._logs.latest.update(evaluations.logged)
        return evaluations.first_loss

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float
    ) -> float:
        """Scale the gradients to a 2-norm of at most ``max_norm``; return the norm before.

        The norm is the same for any number of data-parallel ranks, bit for bit. Collective, between
        a pass and its update. Raises ``ConfigError`` inside a microbatch.
        """
        self._passes.refuse_inside("run.clip_grad_norm_")
        return clip_grad_norm_(parameters, max_norm, world=self._world)

    def fence(self) -> None:
        """Wait for the snapshot being copied. Call it before you change tracked tensors by hand.

        ``run.step`` and every tracked optimizer do so by themselves. A change without it, for
        example of parameters under ``torch.no_grad()``, is detected, and the snapshot being copied
        is discarded; `protection` names the tensor.
        """
        self._keeper.fence()

    def touched(self, tensor: torch.Tensor, rows: Rows) -> None:
        """Name the rows of a tracked tensor that changed since the last step: no other is read.

        Without it a large tensor of your own, such as a replay buffer, is read at every step to
        find out which parts of it changed; only those are copied. ``rows`` are a number, a slice,
        a list or a tensor of numbers, or one flag for each row. Name all rows that were written in
        the step; calls add up. A tensor that is not named in a step is read. Parameters and the
        state of optimizers need no call: they are read in the background. A row that changed
        without being named is found within 64 steps, with a warning, and then the tensor is read
        at every step; snapshots before that may lack the change.

        Raises ``ConfigError`` before `track`, ``StateError`` for rows that are not there and, at
        the end of the step, for a tensor that is not tracked.
        """
        self._keeper.touched(tensor, rows)

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
        self._passes.log(values)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch the user's DataLoaders while the function runs; called by the loop."""
        loaders = ForeignLoaders(moment=self._passes.moment, line=users_line)
        with loaders.watched():
            yield

    def _finish(self) -> None:
        """Make the last step durable if requested, and wait for all ranks; called by the loop."""
        self._steps.finish()

    def _close(self) -> None:
        """Release everything that holds the model or the data."""
        while self._trackers:
            self._trackers.pop().close()
        self._watch.close()
        self._passes.close()
        drop_named()
        self._work.close()
        if self._island is not None:
            self._island.close()
        self._keeper.close()


def session_of(run: Run) -> Session:
    """Return the job around a run: its members, its sidecar, its events."""
    return run._session
