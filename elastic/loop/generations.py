"""The decorator `resilient`, which runs a training function in every generation in one process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar, cast, overload

import msgspec
import torch

from holdfast.ckpt import torch_versions
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.errors import (
    BudgetError,
    CkptError,
    MismatchError,
    StateError,
    StoreError,
)
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.recovery.prefetched import Ahead
from holdfast.ckpt.store.places import scheme_of
from holdfast.ckpt.types import Json
from holdfast.elastic import randomness, tuning
from holdfast.elastic.channel.base import (
    WORKER_ENV,
    AgentChannel,
    Channel,
    OvertakenError,
    WorkerPhase,
)
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.channel.shared_key import expanded
from holdfast.elastic.config import (
    Batch,
    Checkpoints,
    Exact,
    Mesh,
    Settings,
    Snapshots,
    Timeouts,
)
from holdfast.elastic.errors import (
    ConfigError,
    GenerationOverError,
    JobFailedError,
    RollBackError,
    SeaError,
    StateLostError,
    Stopped,
)
from holdfast.elastic.events import RankReformed
from holdfast.elastic.groups import devices, reform
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.loop.logbook import Position
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loop.rehearsal import WarmJoin
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loop.stages import Stages
from holdfast.elastic.loop.trace.records import TRACE_ENV
from holdfast.elastic.loop.uncaught.faults import lasting_fault
from holdfast.elastic.loop.uncaught.printing import show_plainly
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.meeting.point import MeetingPoint
from holdfast.elastic.membership.records import (
    REPLACEABLE,
    REPLICATED_BYTES,
    RESTORE_AT_MOST,
    GenerationRecord,
)
from holdfast.elastic.neighbors.settings import Neighbors
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.seeding import seed_all
from holdfast.elastic.tracked.keeper import StateKeeper

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

USER_ERRORS = (
    BudgetError,
    ConfigError,
    JobFailedError,
    MismatchError,
    SeaError,
    StateError,
    StoreError,
)
"""Errors that a retry cannot fix: the job ends at once with their message."""

_stages = Stages()

_AS_OF_A_LOST_PEER = (RuntimeError, OSError, CkptError)


@overload
def resilient(function: Callable[Concatenate[Run, _P], _R], /) -> Callable[_P, _R]: ...


@overload
def resilient(
    *,
    mesh: Mesh | None = ...,
    batch: Batch | None = ...,
    snapshots: Snapshots | None = ...,
    checkpoint: Checkpoints | str | None = ...,
    exact: Exact = ...,
    seed: int = ...,
    loss_guard: LossGuard | None = ...,
    islands: Islands | None = ...,
    on_lost_state: Literal["neighbors"] | Neighbors | None = ...,
    rehearse: bool = ...,
    timeouts: Timeouts | None = ...,
    worker_info: Callable[[], dict[str, Json]] | None = ...,
) -> Callable[[Callable[Concatenate[Run, _P], _R]], Callable[_P, _R]]: ...


def resilient(  # noqa: PLR0913 - the one place that configures a run, all by keyword
    function: Callable[Concatenate[Run, _P], _R] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    batch: Batch | None = None,
    snapshots: Snapshots | None = None,
    checkpoint: Checkpoints | str | None = None,
    exact: Exact = None,
    seed: int = 0,
    loss_guard: LossGuard | None = None,
    islands: Islands | None = None,
    on_lost_state: Literal["neighbors"] | Neighbors | None = None,
    rehearse: bool = True,
    timeouts: Timeouts | None = None,
    worker_info: Callable[[], dict[str, Json]] | None = None,
) -> Callable[_P, _R] | Callable[[Callable[Concatenate[Run, _P], _R]], Callable[_P, _R]]:
    """Keep a training function alive through failures and changes of the world.

    The decorated function takes a `Run` as its first argument. It is called again, in the same
    process, whenever the set of ranks changes, and continues from the newest complete step. Started
    by hand it runs as one rank; ``holdfast run`` makes it elastic.

    ``mesh``: the grid of ranks.
    ``batch``: the work of a step, independent of the number of ranks.
    ``snapshots``: copies of the state in host memory, and the failures that they survive.
    ``checkpoint``: the store to which the state is written, and how often; a string is its root,
    with the defaults of `Checkpoints` for the rest. None: no checkpoints.
    ``exact``: the weights do not depend on world size or failures, bit for bit. ``"int64"`` adds
    gradients in fixed point, which loses almost no precision; ``"float32"`` rounds every
    microbatch's gradient so that float32 adds it exactly, with less memory and traffic. True:
    ``"int64"``, and ``"float32"`` for models that FSDP2 shards. None: the weights may depend on
    them.
    ``seed``: the seed of the model's initial weights, the order of samples and every random stream.
    The function begins with the global generators of torch, NumPy and Python seeded by it.
    ``loss_guard``: the response to a loss that is not finite or leaps (`LossGuard`; None: none).
    ``islands``: this run is one of several that train one model far apart (`Islands`; None: it is
    not).
    ``on_lost_state``: the response to a stage of a pipeline that is lost beyond the parity, when
    every restore point is far back. ``"neighbors"``, or `Neighbors` with a bound of its own, sets
    the stage from those beside it, and marks the state for good. None: the run goes back.
    ``rehearse``: a worker that starts while others train calls the function once, up to the first
    step, before it joins, so that its initialization delays no other rank. Collectives do nothing
    during this rehearsal. False: no rehearsal.
    ``timeouts``: time limits of collectives and of an orderly stop.
    ``worker_info``: called at the start of each generation; the job's roster shows its result.

    Without settings the decorator needs no parentheses.

    Relative directories are those below the present one, even if the script changes it later.
    Raises ``ConfigError`` immediately if a setting is wrong.
    """
    settings = Settings(
        mesh=Mesh() if mesh is None else mesh,
        batch=Batch(microbatches=1) if batch is None else batch,
        snapshots=Snapshots() if snapshots is None else snapshots,
        checkpoint=Checkpoints(checkpoint) if isinstance(checkpoint, str) else checkpoint,
        exact=exact,
        seed=seed,
        loss_guard=loss_guard,
        islands=islands,
        on_lost_state=on_lost_state,
        rehearse=rehearse,
        timeouts=Timeouts() if timeouts is None else timeouts,
    )
    if worker_info is not None and not callable(worker_info):
        raise ConfigError(
            f"resilient(worker_info={worker_info!r}): give a function without arguments that "
            "returns a dict"
        )

    if settings.islands is not None and TRACE_ENV in os.environ:
        raise ConfigError(
            "holdfast check runs a script several times, which an island cannot: check it without "
            "islands=..., as a run of its own"
        )
    home = _present_directory()
    if settings.checkpoint is not None and (order := os.environ.get(TRACE_ENV)):
        _keep_apart(_root(home, settings.checkpoint), order)

    def decorate(function: Callable[Concatenate[Run, _P], _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            is_printed = False  # whether a launcher prints users' errors
            try:
                loop = Loop(
                    connect(),
                    settings,
                    worker_info=worker_info or dict,
                    stages=_stages,
                    name=function.__qualname__,
                    home=home,
                )
                is_printed = WORKER_ENV in os.environ
                return loop.run(lambda run: function(run, *args, **kwargs))
            except Exception as error:
                show_plainly(error, printed=is_printed and isinstance(error, USER_ERRORS))
                raise

        return wrapper

    if function is None:
        return decorate
    if not callable(function):
        raise ConfigError(
            f"resilient({function!r}): write @resilient above the training function, or give "
            "settings by name, as @resilient(checkpoint=...)"
        )
    return decorate(function)


class Loop:
    """The worker's side of fence, agree, re-form, restore and resume."""

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        *,
        worker_info: Callable[[], dict[str, Json]],
        stages: Stages | None = None,
        name: str = "",
        home: Path = Path(),
    ) -> None:
        """``name`` is the stage's: that of the decorated function.

        ``home`` is the directory below which relative ones are.
        """
        self._channel, self._settings = channel, settings
        self._stages, self._name, self._home = stages or Stages(), name, home
        self._worker_info = worker_info
        self._pulse, self._maps = Pulse(channel), SlotMaps(host=channel.memory_of)
        guard = settings.loss_guard
        self._losses = LossWatch(guard) if guard else None
        self._position = Position()
        self._ahead: Ahead | None = None
        self._replicated_bytes = 0
        self._replaceable: dict[str, Json] = {}
        self._device: int | None = None

    def run(self, body: Callable[[Run], _R]) -> _R:
        """Call ``body`` in every generation until it returns in one; return its result."""
        channel = self._channel
        import_all()
        try:
            overrides = self._stages.overrides(channel)
            overridden = self._settings.overridden(overrides, stage=self._name)
            overridden.check_named()
            self._settings = _on_this_machine(overridden, home=self._home)
            self._stages.begin(self._name, self._settings, channel)
            with tuning.tuned():
                result = self._generations(body)
            self._stages.finished(self._name, result, self._settings)
            return result
        except Stopped:
            raise
        except USER_ERRORS as error:
            channel.fail(str(error), user_error=True)
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            channel.fail(message, user_error=False, fault=lasting_fault(error))
            raise
        finally:
            reform.leave()
            self._stages.leave(channel)
            channel.close()

    def _generations(self, body: Callable[[Run], _R]) -> _R:
        if reason := torch_versions.objection(torch.__version__, os.environ):
            raise ConfigError(reason)
        channel, stages = self._channel, self._stages
        after = stages.generation if isinstance(channel, AgentChannel) else 0
        spec = msgspec.structs.replace(self._settings.job(), stage=stages.number_at(channel))
        request: dict[str, Json] = {}
        meeting = MeetingPoint(channel.key, host=reform.host_of(channel.sidecar))
        stages.publish(meeting)
        warm = WarmJoin(channel, self._settings, pulse=self._pulse, maps=self._maps)
        if stages.is_over(channel):
            return cast("_R", stages.fetch(channel))
        if not after:
            warm.prepare(body)
        while True:
            info = {"store": meeting.address, **self._worker_info(), **request}
            if self._replicated_bytes:
                info[REPLICATED_BYTES] = self._replicated_bytes
            if self._replaceable:
                info[REPLACEABLE] = self._replaceable
            if self._device is not None:
                info[devices.INFO] = self._device
            self._pulse.set(WorkerPhase.IDLE)
            channel.ready(after=after, spec=spec, info=info)
            if after:
                meeting.forget_before(after)
                gc.collect()  # the old model must be freed before the next is built
            try:
                record = channel.await_generation(after=after)
            except OvertakenError:
                return cast("_R", stages.fetch(channel))
            finally:
                self._ahead = warm.finish()
            stages.generation = record.number
            guard = WaitGuard(
                record.number,
                functools.partial(channel.fenced, record.number),
                waiting=self._pulse.waiting,
            )
            try:
                return self._generation(body, record, guard=guard, host=meeting.host)
            except Exception as error:
                if not _explained(error, guard):
                    raise
                request = (
                    {RESTORE_AT_MOST: error.at_most} if isinstance(error, RollBackError) else {}
                )
                _forget(error)
            busy = reform.leave()
            _log.info("generation %d is over; %d groups still busy", record.number, busy)
            after = record.number

    def _generation(
        self, body: Callable[[Run], _R], record: GenerationRecord, *, guard: WaitGuard, host: str
    ) -> _R:
        channel, settings = self._channel, self._settings
        world = reform.form(
            record,
            incarnation=channel.incarnation,
            guard=guard,
            key=channel.key,
            host=host,
            timeout_s=settings.timeouts.collective_s,
            axes=settings.mesh.axes,
            device=devices.kind(settings.mesh.device),
        )
        self._device = world.device.index
        self._stages.agree(world)
        channel.emit(RankReformed(generation=world.generation, rank=world.rank, world=world.size))
        try:
            return self._enter(body, world)
        except StateLostError as error:
            anew = str(error)
            _log.warning("the state is built anew: %s", anew)
            _forget(error)
        gc.collect()  # the half-restored model must be freed before the next is built
        return self._enter(body, world, anew=anew)

    def _enter(
        self, body: Callable[[Run], _R], world: reform.GenerationWorld, *, anew: str = ""
    ) -> _R:
        """Call ``body`` once. A nonempty ``anew`` is the reason why it restores nothing."""
        channel, settings = self._channel, self._settings
        seed_all(randomness.build_seed(settings.seed))
        keeper = StateKeeper(
            channel,
            settings,
            world,
            pulse=self._pulse,
            maps=self._maps,
            anew=anew,
            ahead=self._ahead,
        )
        self._ahead = None
        keeper.open_ahead()
        run = _kind_of_run()(
            channel,
            settings,
            world,
            pulse=self._pulse,
            keeper=keeper,
            losses=self._losses,
            position=self._position,
        )
        try:
            with run._watching():
                result = body(run)
            run._finish()
            channel.done({"step": run.completed, **run.metrics}, lingers=True)
        finally:
            self._replicated_bytes = keeper.replicated_bytes or self._replicated_bytes
            self._replaceable = keeper.replaceable
            run._close()
        return result


def _kind_of_run() -> type[Run]:
    """Return `Run`, or the kind that records itself if `holdfast check` started this process."""
    if TRACE_ENV not in os.environ:
        return Run
    from holdfast.elastic.loop.trace.traced_run import TracedRun

    return TracedRun


def _keep_apart(root: str, order: str) -> None:
    from holdfast.elastic.loop.trace.roots import keep_apart

    keep_apart(root, order)


def _on_this_machine(settings: Settings, *, home: Path) -> Settings:
    """Resolve ``device="auto"`` and directories; allow rehearsals only on the CPU.

    The sidecar writes to these directories, and its working directory may be another.
    """
    device = devices.kind(settings.mesh.device)
    mesh = dataclasses.replace(settings.mesh, device=device)
    snapshots, checkpoint = settings.snapshots, settings.checkpoint
    if snapshots.disk is not None:
        snapshots = dataclasses.replace(snapshots, disk=_below(home, snapshots.disk))
    if checkpoint is not None:
        root = redirects.to_write(_root(home, checkpoint))
        checkpoint = dataclasses.replace(checkpoint, root=str(root))
    islands = settings.islands
    if islands is not None and not scheme_of(islands.meet):
        islands = dataclasses.replace(islands, meet=_below(home, islands.meet))
    if islands is not None and islands.key:
        islands = dataclasses.replace(islands, key=_below(home, str(expanded(islands.key))))
    return dataclasses.replace(
        settings,
        islands=islands,
        mesh=mesh,
        snapshots=snapshots,
        checkpoint=checkpoint,
        rehearse=settings.rehearse and device == "cpu",
    )


def _present_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed; directories that are not relative need none
        return Path()


def _root(home: Path, checkpoint: Checkpoints) -> str:
    return checkpoint.root if scheme_of(checkpoint.root) else _below(home, checkpoint.root)


def _below(home: Path, directory: str) -> str:
    return str(home.joinpath(directory).absolute())


def import_all() -> None:
    """Import what the first optimizer would import; it takes a second, and others would wait."""
    torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.0)


def _explained(error: Exception, guard: WaitGuard) -> bool:
    """Return whether the end of the generation explains the error; the fence may come a bit later.

    A peer's death appears first as a broken connection, then as a fence.
    """
    if isinstance(error, GenerationOverError) or guard.fenced:
        return True
    if isinstance(error, USER_ERRORS):
        return False
    return isinstance(error, _AS_OF_A_LOST_PEER) and guard.explained(error)


def _forget(error: BaseException) -> None:
    """Clear the frames that an error holds; they keep the model of the ended generation alive."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
