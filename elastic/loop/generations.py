"""The decorator: runs a training function generation after generation in one living process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch

from holdfast.ckpt.errors import (
    BudgetError,
    CkptError,
    FencedError,
    HoldfastError,
    InternalError,
    MismatchError,
    StateError,
    StoreError,
)
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.ckpt.recovery.prefetched import Ahead
from holdfast.ckpt.types import Json
from holdfast.elastic import randomness, tuning
from holdfast.elastic.channel.base import WORKER_ENV, Channel, WorkerPhase
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Batch, Exact, Mesh, Settings
from holdfast.elastic.errors import (
    ConfigError,
    GenerationOverError,
    JobFailedError,
    RollBackError,
    StateLostError,
    Stopped,
)
from holdfast.elastic.groups import devices, reform
from holdfast.elastic.groups.collectives import WaitGuard
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loop.rehearsal import WarmJoin
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.membership.records import REPLICATED_BYTES, RESTORE_AT_MOST, GenerationRecord
from holdfast.elastic.tracked.keeper import StateKeeper

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

USER_ERRORS = (BudgetError, ConfigError, JobFailedError, MismatchError, StateError, StoreError)
"""What no retry can help: the job ends at once with the message."""

_AS_OF_A_LOST_PEER = (RuntimeError, OSError, CkptError)


def resilient(  # noqa: PLR0913 - the one place where a run is configured, all by keyword
    *,
    mesh: Mesh | None = None,
    batch: Batch | None = None,
    snapshot_every: int = 1,
    parity: int | Literal["replicate"] = 1,
    parity_group: int = GROUP_SIZE,
    keep: int = 2,
    memory: str | int | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int = 100,
    checkpoint_compression: Mapping[str, str] | None = None,
    checkpoint_incremental: bool = False,
    checkpoint_bandwidth: str | int | None = None,
    on_checkpoint_error: Literal["retry", "skip", "stop"] = "retry",
    checkpoint_retries: int = 3,
    checkpoint_failures_allowed: int = 2,
    checkpoint_wait_s: float = 600.0,
    disk: str | None = None,
    disk_every: int = 10,
    stop_grace_s: float = 0.0,
    exact: Exact = False,
    seed: int = 0,
    collective_timeout_s: float = 1800.0,
    loss_guard: LossGuard | None = None,
    rehearse: bool = True,
    announce: Callable[[], dict[str, Json]] | None = None,
) -> Callable[[Callable[Concatenate[Run, _P], _R]], Callable[_P, _R]]:
    """Keep a training function alive through failures and changes of the world.

    The decorated function takes a `Run` first. It is called again, in the same process, whenever
    the set of ranks changes, and goes on from the newest complete step. Started by hand it runs
    alone; ``holdfast run`` makes it elastic.

    ``mesh``: how many ranks; ``batch``: the work of a step, whatever their number.
    ``snapshot_every`` steps the state is copied to host memory, where the ``keep`` newest stay
    and any ``parity`` nodes may be lost of each group of about ``parity_group`` (0: none;
    ``"replicate"``: one, by a whole copy on another node). ``memory`` (as in ``"12GiB"``) is the
    host memory a node may spend on it. ``checkpoint_every`` steps, and after the last, it is
    written to ``checkpoint`` (a directory or ``s3://bucket/prefix``), from which a later start
    goes on; ``checkpoint_compression`` and ``checkpoint_incremental`` as `ckpt.save`'s
    ``compression`` and ``base="latest"``. ``checkpoint_bandwidth`` (as in ``"500MB/s"``) is what
    a node may write. Training never waits for the store: while one is being written the newest of
    the others waits, and older ones are skipped. ``on_checkpoint_error``: ``"retry"`` tries
    ``checkpoint_retries`` times more, then warns, and ends the job when more than
    ``checkpoint_failures_allowed`` in a row have failed, or the last one; ``"skip"`` only warns,
    ``"stop"`` ends the job at the first. At its end the job waits for the last one, at most
    ``checkpoint_wait_s``.
    ``disk_every`` steps the snapshot is also spilled to ``disk``, a directory on every node's own
    disk; the two newest stay there when the job ends, and a later start that is given the same
    directory goes on from them where ``checkpoint`` has nothing newer. When the job is stopped
    (SIGTERM, as before a preemption), the newest protected step is saved to both if that takes no
    longer than ``stop_grace_s``.
    ``exact``: the weights do not depend on world size or failures, bit for bit. ``True`` rounds
    every microbatch's gradient to what float32 adds exactly; ``"int64"`` adds in fixed point,
    which loses next to nothing and costs more memory and traffic.
    ``seed``: of the model's initial weights, the order of samples and every random stream.
    ``loss_guard``: what to do when the loss is not finite or leaps (`LossGuard`; None: nothing).
    ``rehearse``: a worker that starts while others train calls the function once before it joins,
    up to the first step, so that what is done for the first time holds up nobody. Its world is made
    up: collectives do nothing there (False: it does not).
    ``announce``: called at the start of each generation; what it returns is in the roster.

    Raises ``ConfigError`` at once when a setting is wrong.
    """
    settings = Settings(
        mesh=mesh or Mesh(),
        batch=batch or Batch(microbatches=1),
        snapshot_every=snapshot_every,
        parity=parity,
        parity_group=parity_group,
        keep=keep,
        memory=memory,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        checkpoint_compression=checkpoint_compression or {},
        checkpoint_incremental=checkpoint_incremental,
        checkpoint_bandwidth=checkpoint_bandwidth,
        on_checkpoint_error=on_checkpoint_error,
        checkpoint_retries=checkpoint_retries,
        checkpoint_failures_allowed=checkpoint_failures_allowed,
        checkpoint_wait_s=checkpoint_wait_s,
        disk=disk,
        disk_every=disk_every,
        stop_grace_s=stop_grace_s,
        exact=exact,
        seed=seed,
        collective_timeout_s=collective_timeout_s,
        loss_guard=loss_guard,
        rehearse=rehearse,
    )

    def decorate(function: Callable[Concatenate[Run, _P], _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            show_plainly()
            loop = Loop(connect(), settings, announce=announce or dict)
            return loop.run(lambda run: function(run, *args, **kwargs))

        return wrapper

    return decorate


class Loop:
    """Fence, agree, re-form, restore, resume: the worker's side, until the function returns."""

    def __init__(
        self, channel: Channel, settings: Settings, *, announce: Callable[[], dict[str, Json]]
    ) -> None:
        known = {field.name for field in dataclasses.fields(Settings)}
        overrides = {key: value for key, value in channel.settings.items() if key in known}
        self._channel = channel
        self._settings = _on_this_machine(dataclasses.replace(settings, **overrides))
        self._announce, self._pulse, self._maps = (
            announce,
            Pulse(channel),
            SlotMaps(host=channel.memory_of),
        )
        guard = self._settings.loss_guard
        self._losses = LossWatch(guard) if guard else None
        self._ahead: Ahead | None = None
        self._replicated_bytes = 0
        self._device: int | None = None

    def run(self, body: Callable[[Run], _R]) -> _R:
        """Call ``body`` in every generation until it returns in one; return its result."""
        channel = self._channel
        try:
            return self._generations(body)
        except Stopped:
            raise
        except USER_ERRORS as error:
            channel.fail(str(error), user_error=True)
            if WORKER_ENV in os.environ:
                error._said = True  # type: ignore[union-attr]  # once, by the launcher
            raise
        except Exception as error:
            channel.fail(f"{type(error).__name__}: {error}", user_error=False)
            raise
        finally:
            reform.leave()
            channel.close()

    def _generations(self, body: Callable[[Run], _R]) -> _R:
        channel, after = self._channel, 0
        asked: dict[str, Json] = {}
        _import_all()
        tuning.keep()
        gc.freeze()  # what is there now stays: later collections need not walk through torch
        meeting = reform.MeetingPoint(reform.host_of(channel.sidecar))
        warm = WarmJoin(channel, self._settings, pulse=self._pulse, maps=self._maps)
        warm.prepare(body)
        while True:
            info = {"store": meeting.address, **self._announce(), **asked}
            if self._replicated_bytes:
                info[REPLICATED_BYTES] = self._replicated_bytes
            if self._device is not None:
                info[devices.INFO] = self._device
            self._pulse.set(WorkerPhase.IDLE)
            channel.ready(after=after, spec=self._settings.job(), info=info)
            if after:
                gc.collect()  # the old model must be gone before the next is built
            try:
                record = channel.await_generation(after=after)
            finally:
                self._ahead = warm.finish()
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
                asked = {RESTORE_AT_MOST: error.at_most} if isinstance(error, RollBackError) else {}
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
            host=host,
            timeout_s=settings.collective_timeout_s,
            axes=settings.mesh.axes,
            device=devices.kind(settings.mesh.device),
        )
        self._device = world.device.index
        channel.emit("reformed", generation=world.generation, rank=world.rank, world=world.size)
        try:
            return self._enter(body, world)
        except StateLostError as error:
            anew = str(error)
            _log.warning("the state is built anew: %s", anew)
            _forget(error)
        gc.collect()  # what is half restored must be gone before it is built again
        return self._enter(body, world, anew=anew)

    def _enter(
        self, body: Callable[[Run], _R], world: reform.GenerationWorld, *, anew: str = ""
    ) -> _R:
        """Call ``body`` once; ``anew`` says why it restores nothing, if that is so."""
        channel, settings = self._channel, self._settings
        torch.manual_seed(randomness.build_seed(settings.seed))
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
        run = Run(channel, settings, world, pulse=self._pulse, keeper=keeper)
        run.guard_losses(self._losses)
        try:
            result = body(run)
            run.finish()
            channel.done({"step": run.completed, **run.metrics})
        finally:
            self._replicated_bytes = keeper.replicated_bytes or self._replicated_bytes
            run.close()
        return result


def _on_this_machine(settings: Settings) -> Settings:
    """Say what ``device="auto"`` comes to; there is no made-up world for devices to rehearse in."""
    device = devices.kind(settings.mesh.device)
    mesh = dataclasses.replace(settings.mesh, device=device)
    return dataclasses.replace(settings, mesh=mesh, rehearse=settings.rehearse and device == "cpu")


def _import_all() -> None:
    """Import what torch would with the first optimizer: a second, for which others would wait."""
    torch.optim.SGD([torch.zeros(1)], lr=0.0)


def _explained(error: Exception, guard: WaitGuard) -> bool:
    """Say whether the end of the generation explains the error; its news may come a little later.

    A peer's death shows first as a broken connection, then as a fence.
    """
    if isinstance(error, GenerationOverError) or guard.fenced:
        return True
    if isinstance(error, USER_ERRORS):
        return False
    return isinstance(error, _AS_OF_A_LOST_PEER) and guard.explained()


def _forget(error: BaseException) -> None:
    """Clear the frames an error holds, and with them the model of the generation that is over."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def show_plainly() -> None:
    """Make an uncaught error of ours end the script with its message instead of a traceback."""
    before = sys.excepthook
    if getattr(before, "_holdfast", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_ours = isinstance(error, HoldfastError | Stopped)
        if is_ours and not isinstance(error, FencedError | InternalError):
            if not getattr(error, "_said", False):
                sys.stderr.write(f"holdfast: {error}\n")
        else:
            before(kind, error, trace)

    hook._holdfast = True  # type: ignore[attr-defined]
    sys.excepthook = hook
