"""The call that runs a script on the nodes of a Ray cluster, from its start to its result."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.adapters.ray.child import JobPlace, key_text
from holdfast.adapters.ray.coordinator import RayCoordinator
from holdfast.adapters.ray.draining import check_drains
from holdfast.adapters.ray.job import RayJob, RayOptions
from holdfast.adapters.ray.node import NodeOrder
from holdfast.adapters.ray.placing import PlacedSlots
from holdfast.adapters.ray.slots import (
    AskForNode,
    BeginOnNode,
    EndJob,
    LeaveNode,
    NodeEnd,
    SlotAction,
    SlotTable,
)
from holdfast.elastic.errors import ConfigError, JobFailedError

_POLL_S: Final = 0.5
_ANSWER_S: Final = 10.0
_MARGIN_S: Final = 15.0
_SHOWN_LINES: Final = 20
_DEFAULTS: Final = RayOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResult:
    """The result of a job on Ray.

    ``status`` is 0 if the job is done, 1 if it failed; ``message`` says why. ``nodes`` are the
    parts that ended, in order, each with its exit status and the last 200 lines of its output.
    """

    status: int
    message: str
    nodes: tuple[NodeEnd, ...]


class RayJobFailedError(JobFailedError):
    """A job on Ray failed; ``result`` has the exit status and the log of each node."""

    def __init__(self, message: str, *, result: RayResult) -> None:
        super().__init__(message)
        self.result = result


def launch(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    nodes: int | tuple[int, int],
    nproc: int = 1,
    resources: Mapping[str, float] | None = None,
    options: RayOptions = _DEFAULTS,
) -> RayResult:
    """Run a script on the nodes of a Ray cluster, and return when the job is done.

    ``nodes`` is the number of nodes, or (least, most): the job begins with the least, and every
    further node that the cluster has or gets joins later. Each node has ``nproc`` trainers and
    ``resources``, in Ray's names and units, as in ``{"CPU": 16, "GPU": 8}``; by default one CPU for
    each trainer. A node that Ray drains hands its state over and leaves; one that is lost is
    replaced as soon as Ray has another. Ray shows the output where this is called.

    Connects to the cluster if this process is not connected yet. Raises ``ConfigError`` for a wrong
    argument and without Ray, and `RayJobFailedError` if the job fails.
    """
    job = RayJob.of(
        os.fspath(script), args, nodes=nodes, nproc=nproc, resources=resources, options=options
    )
    ray = _imported()
    with _connected(ray, options):
        check_drains(ray)
        job, folder = _located(ray, job)
        with RayCoordinator.opened(job, host=ray.util.get_node_ip_address()) as served:
            order = NodeOrder(
                job=job,
                place=JobPlace(coordinator=served.address, job=served.job),
                key=key_text(served.key),
                folder=folder,
                env=dict(options.env),
            )
            placed = PlacedSlots(ray, job, order=order)
            ending = _conducted(placed, job, served)
    return _result(ending, placed.ends)


def _conducted(placed: PlacedSlots, job: RayJob, served: RayCoordinator) -> EndJob:
    """Do as the table of slots decides until the job is over; nothing of it is left then."""
    table = SlotTable(least=job.least, most=job.most, wait_s=job.options.wait_s)
    actions = table.begin(time.monotonic())
    try:
        while True:
            for action in actions:
                if isinstance(action, EndJob):
                    return action
                _do(placed, action)
            served.check()
            actions = []
            for each in placed.happened(_POLL_S):
                actions += table.after(each, time.monotonic())
            actions += table.tick(time.monotonic())
    finally:
        placed.stop(job.options.grace_s + _MARGIN_S)
        placed.close()


def _do(placed: PlacedSlots, action: SlotAction) -> None:
    if isinstance(action, AskForNode):
        placed.ask(action.slot, action.avoid)
    elif isinstance(action, BeginOnNode):
        placed.begin(action.slot)
    elif isinstance(action, LeaveNode):
        placed.leave(action.slot)


def _result(ending: EndJob, ends: Sequence[NodeEnd]) -> RayResult:
    result = RayResult(status=0 if ending.ok else 1, message=ending.message, nodes=tuple(ends))
    if ending.ok:
        return result
    lines = next((end.log for end in reversed(ends) if end.log), ())
    shown = "".join(f"\n  {line}" for line in lines[-_SHOWN_LINES:])
    raise RayJobFailedError(f"the job on Ray failed: {ending.message}{shown}", result=result)


def _imported() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"launch needs Ray ({error}): pip install 'holdfast[ray]'") from error
    return ray


@contextmanager
def _connected(ray: Any, options: RayOptions) -> Iterator[None]:
    """Connect to the cluster for the time of the block, unless the process is connected already."""
    if ray.is_initialized():
        if options.working_dir or options.address:
            name = "working_dir" if options.working_dir else "address"
            raise ConfigError(
                f"{name}={getattr(options, name)!r}: this process is connected to Ray already; "
                "give it to ray.init (runtime_env={'working_dir': ...}), or let launch connect"
            )
        if ray.util.client.ray.is_connected():
            raise ConfigError(
                "this process is a Ray client (ray://), at which no node can find the job's "
                "coordinator: run it on a machine of the cluster, or with `ray job submit`"
            )
        yield
        return
    check_answers(options.address or os.environ.get("RAY_ADDRESS", ""))
    copied = {"working_dir": options.working_dir} if options.working_dir else {}
    with _handlers_kept():
        try:
            ray.init(address=options.address or "auto", runtime_env=copied, logging_level="WARNING")
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster is at {options.address or 'this machine'} ({error}): start one "
                "with `ray start --head`, or give the address of one"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def check_answers(address: str) -> None:
    """Raise ``ConfigError`` if nobody answers at HOST:PORT, to which Ray would connect for ever.

    Other addresses, such as ``auto``, are Ray's to find.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}): give the address that `ray start "
            "--head` printed, as HOST:6379"
        ) from error


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Leave the caller's handler of SIGTERM in place, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _located(ray: Any, job: RayJob) -> tuple[RayJob, str]:
    """Return the job, and the folder to run it in: empty where Ray copied one to the nodes."""
    if ray.get_runtime_context().runtime_env.get("working_dir"):
        return job, ""
    return job, str(Path.cwd())
