"""A process-group backend whose every wait can be interrupted: ``"holdfast"``, over gloo.

gloo cannot be aborted: a rank whose peer stopped waits until the timeout, whatever is done to the
group. So each collective is started asynchronously, and a wait checks the fence every few
milliseconds. A fenced rank leaves with `GenerationOverError`. The abandoned operation may still
write to its buffers when the stopped peer wakes. So the group and its buffers are kept, never used
again, and never destructed while an operation is running.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceScatterOptions, Work

from holdfast.ckpt import torch_private
from holdfast.ckpt.torch_private import (
    ALL_GATHER_SINGLE,
    REDUCE_SCATTER_SINGLE,
    PrefixStore,
    Store,
)
from holdfast.elastic.groups.forming import Forming, LargeWorld, WantedGroup
from holdfast.elastic.groups.lazy import LazyGloo
from holdfast.elastic.groups.waits import Joined, WaitGuard

BACKEND = "holdfast"

_BETWEEN_TWO = frozenset({"send", "recv", "recv_anysource"})

_P = ParamSpec("_P")


class InterruptibleWork(Work):
    """A gloo operation whose wait ends when the generation is over.

    ``joined`` is set for a collective of all ranks.
    """

    joined: Joined | None = None

    def __init__(
        self,
        inner: Work,
        group: InterruptibleGroup,
        after: Callable[[], None] | None = None,
        *,
        lazy: bool = False,
    ) -> None:
        super().__init__()
        self._inner, self._group, self._after = inner, group, after
        self._lazy = lazy

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for completion, the fence, or the timeout (0: none)."""
        guard = self._group.guard
        if self._inner.is_completed():
            guard.await_work(self._inner)
        elif self._lazy:
            guard.call(self._inner.wait, name="await-peer", joined=self.joined)
        else:
            with guard.wait():
                guard.await_work(
                    self._inner,
                    timeout_s=timeout.total_seconds(),
                    joined=self.joined,
                )
        if self._after is not None:
            after, self._after = self._after, None
            after()
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether nothing is left to do.

        An action after the operation still needs `wait`.
        """
        return self._after is None and self._inner.is_completed()

    def is_success(self) -> bool:
        """Return whether it completed without an error."""
        return self.is_completed() and self._inner.is_success()

    def get_future(self) -> Any:
        """Return a future of the operation."""
        self.wait()
        return self._inner.get_future()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        self.wait()
        return self._inner.result()


class Several(Work):
    """Several operations as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        return all(work.wait(timeout) for work in self._works)

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all are, without an error."""
        return all(work.is_success() for work in self._works)


class DeviceGroup(Protocol):
    """A second group of the same ranks, for tensors on a device."""

    @property
    def busy(self) -> bool:
        """True if it must not be destructed yet."""

    def start(self, name: str, *args: Any, **kwargs: Any) -> Work:
        """Start the operation that `torch.distributed.ProcessGroup` calls ``name``."""

    def close(self) -> None:
        """Abandon it, without waiting."""


Connect: TypeAlias = Callable[[Store, int, int, timedelta, WaitGuard], DeviceGroup]
"""Makes a `DeviceGroup` from a store, a rank, a size, the time limit of a collective, and a guard.
"""


def on_device(value: Any) -> bool:
    """Return whether the first tensor among the arguments of a collective is on a device."""
    return (found := _first_tensor(value)) is not None and found.device.type != "cpu"


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((t for each in value if (t := _first_tensor(each)) is not None), None)
    return None


def _by_device(
    name: str,
) -> Callable[
    [Callable[Concatenate[InterruptibleGroup, Any, _P], Work]],
    Callable[Concatenate[InterruptibleGroup, _P], Work],
]:
    """Make a method start ``name`` of the device's group for tensors on the device.

    For all others the method gets the gloo group that serves the caller.
    """

    def dispatch(
        on_cpu: Callable[Concatenate[InterruptibleGroup, Any, _P], Work],
    ) -> Callable[Concatenate[InterruptibleGroup, _P], Work]:
        @functools.wraps(on_cpu)
        def start(self: InterruptibleGroup, /, *args: _P.args, **kwargs: _P.kwargs) -> Work:
            look = self.guard.look
            users = look is not None and look(str(self.group_name), self.ranks, name)
            joined = None if name in _BETWEEN_TWO else self._join(users=users)
            if self._device is not None and on_device((*args, *kwargs.values())):
                return self._device.start(name, *args, **kwargs)
            gloo = self._users_gloo(joined) if users else self._gloo
            work = on_cpu(self, gloo, *args, **kwargs)
            if isinstance(work, InterruptibleWork):
                work.joined = joined
            return work

        return start

    return dispatch


def _forward(name: str, *, lazy: bool = False) -> Callable[..., Work]:
    """Return a method that starts gloo's operation ``name``, or the device's.

    A ``lazy`` operation makes progress only inside its own wait, as gloo's send and receive do.
    """

    @_by_device(name)
    def start(self: InterruptibleGroup, gloo: Any, *args: Any) -> Work:
        return self._start(gloo, name, *args, lazy=lazy)

    return start


class InterruptibleGroup(torch_private.PythonGroup):
    """gloo, with waits that poll a `WaitGuard`. Made by `create` through ``init_process_group``.

    It serves all devices itself, as torch requires of a group written in Python: tensors that are
    not on the CPU go to ``device``, if there is one. ``ranks`` are its members by their numbers in
    the world; none for the default group.

    ``users`` makes a second gloo group, for the user's own collectives: if only some ranks call
    one, it waits for the others and does not pair with another collective of theirs.
    """

    def __init__(
        self,
        gloo: Any,
        rank: int,
        size: int,
        *,
        guard: WaitGuard,
        device: DeviceGroup | None = None,
        ranks: Sequence[int] = (),
        users: Callable[[Joined | None], Any] | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._gloo, self.guard, self._device = gloo, guard, device
        self.ranks = tuple(ranks)
        self._make_users = users
        self._users: Any = None
        self._flight: deque[tuple[Work, Any]] = deque()

    def _users_gloo(self, joined: Joined | None) -> Any:
        if self._users is None:
            self._users = self._make_users(joined) if self._make_users is not None else self._gloo
        return self._users

    def _join(self, *, users: bool) -> Joined | None:
        """Count a collective if all ranks take part in it."""
        if not dist.is_initialized() or self.size() != dist.get_world_size():
            return None
        return self.guard.join(f"{self.group_name}/{'users' if users else 'own'}")

    def start_own(
        self, name: str, *args: Any, joined: Joined | None = None, lazy: bool = False
    ) -> Work:
        """Start ``name`` of the gloo group that no user's call takes.

        ``joined`` is set for a message of all ranks, ``lazy`` for one between two.
        """
        work = self._start(self._gloo, name, *args, lazy=lazy)
        work.joined = joined
        return work

    def _start(self, gloo: Any, name: str, *args: Any, lazy: bool) -> InterruptibleWork:
        return self._work(getattr(gloo, name)(*args), *args, lazy=lazy)

    def _work(
        self,
        inner: Work,
        *buffers: Any,
        after: Callable[[], None] | None = None,
        lazy: bool = False,
    ) -> InterruptibleWork:
        while self._flight and self._flight[0][0].is_completed():
            self._flight.popleft()
        if not inner.is_completed():
            self._flight.append((inner, buffers))
        return InterruptibleWork(inner, self, after, lazy=lazy)

    @property
    def busy(self) -> bool:
        """True if an operation is still running."""
        if self._device is not None and self._device.busy:
            return True
        return not all(work.is_completed() for work, _ in self._flight)

    def close(self) -> None:
        """Abandon it: no operation is started any more."""
        for gloo in (self._gloo, self._users):
            if isinstance(gloo, LazyGloo):
                gloo.leave()
        if self._device is not None:
            self._device.close()

    def getBackendName(self) -> str:
        """Name the backend."""
        return BACKEND

    def rank(self) -> int:
        """Return this process's rank."""
        return int(self._gloo.rank())

    def size(self) -> int:
        """Return the world size."""
        return int(self._gloo.size())

    def shutdown(self) -> None:
        """Nothing to do: see `bury`."""

    def abort(self) -> None:
        """Nothing to do: see `bury`."""

    allreduce = _forward("allreduce")
    allreduce_coalesced = _forward("allreduce_coalesced")
    broadcast = _forward("broadcast")
    reduce = _forward("reduce")
    gather = _forward("gather")
    scatter = _forward("scatter")
    allgather = _forward("allgather")
    allgather_coalesced = _forward("allgather_coalesced")
    all_gather_single = _forward(ALL_GATHER_SINGLE)
    all_to_all_single = alltoall_base = _forward("alltoall_base")
    alltoall = _forward("alltoall")
    send = _forward("send", lazy=True)
    recv = _forward("recv", lazy=True)
    recv_anysource = _forward("recv_anysource", lazy=True)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *opts: Any) -> Work:
        """Collect every rank's tensors into one tensor each."""
        pairs = zip(outputs, inputs, strict=True)
        return Several([self.all_gather_single(output, input) for output, input in pairs])

    def all_gather_single_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Same as ``allgather_into_tensor_coalesced``."""
        return self.allgather_into_tensor_coalesced(*args, **kwargs)

    @_by_device(REDUCE_SCATTER_SINGLE)
    def reduce_scatter_single(self, gloo: Any, output: Any, input: Any, opts: Any = None) -> Work:
        """All-reduce a copy and take a part; gloo's own is not complete until it is waited for."""
        reduce = AllreduceOptions()
        reduce.reduceOp = (opts or ReduceScatterOptions()).reduceOp
        buffer = input.clone(memory_format=torch.contiguous_format)
        start = self.rank() * output.numel()

        def take() -> None:
            part = buffer.view(-1)[start : start + output.numel()]
            output.copy_(part.view_as(output))

        return self._work(gloo.allreduce([buffer], reduce), buffer, after=take)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduce several tensors, one part of each per rank."""
        pairs = zip(outputs, inputs, strict=True)
        return Several([self.reduce_scatter_single(output, input, opts) for output, input in pairs])

    def reduce_scatter_single_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Same as ``reduce_scatter_tensor_coalesced``."""
        return self.reduce_scatter_tensor_coalesced(*args, **kwargs)

    @_by_device("reduce_scatter")
    def reduce_scatter(self, gloo: Any, *args: Any, **kwargs: Any) -> Work:
        """Reduce lists of tensors, one part per rank."""
        outputs, inputs, *opts = args
        flat = torch.stack([part.reshape(-1) for part in inputs[0]])
        return self.reduce_scatter_single(outputs[0], flat, *opts)

    @_by_device("barrier")
    def barrier(self, gloo: Any, *_: Any, **__: Any) -> Work:
        """Wait for all ranks, but not for their devices."""
        token = torch.zeros(1)
        return self._work(gloo.allreduce([token], AllreduceOptions()), token)


_forming: Forming | None = None
_connect: Connect | None = None
_groups: list[InterruptibleGroup] = []
_graves: list[InterruptibleGroup] = []


class GroupRequest(Protocol):
    """The part of torch's description of a wanted group that is used here."""

    store: Store
    group_id: str
    group_rank: int
    group_size: int
    timeout: timedelta
    global_ranks_in_group: Sequence[int]


def _create(wanted: GroupRequest, _options: object) -> InterruptibleGroup:
    forming = _forming
    if forming is None:
        raise RuntimeError(
            "the holdfast backend works only inside a function decorated with @holdfast.resilient"
        )
    guard = forming.guard
    store, rank, size, timeout = wanted.store, wanted.group_rank, wanted.group_size, wanted.timeout
    ranks = tuple(wanted.global_ranks_in_group) or tuple(range(size))
    own = WantedGroup(name=f"{wanted.group_id}/own", ranks=ranks, index=rank, timeout=timeout)
    theirs = replace(own, name=f"{wanted.group_id}/users")

    def users(joined: Joined | None) -> Any:
        return forming.gloo(theirs, PrefixStore("users", store), joined=joined)

    gloo = forming.gloo(own, store)
    device = _connect(store, rank, size, timeout, guard) if _connect is not None else None
    group = InterruptibleGroup(
        gloo,
        rank,
        size,
        guard=guard,
        device=device,
        ranks=wanted.global_ranks_in_group,
        users=users,
    )
    _groups.append(group)
    return group


def form_circle(wanted: WantedGroup) -> InterruptibleGroup:
    """Form a group of a large world beside torch's own; it ends with the generation, as they do.

    Blocks until all its ranks came. Raises ``GenerationOverError`` if the generation is over.
    """
    forming = _forming
    if forming is None:
        raise RuntimeError("a circle is formed in a generation")
    gloo = forming.gloo(wanted, None)
    group = InterruptibleGroup(gloo, wanted.index, len(wanted.ranks), guard=forming.guard)
    _groups.append(group)
    return group


def use(
    guard: WaitGuard,
    *,
    host: str,
    connect: Connect | None = None,
    large: LargeWorld | None = None,
) -> None:
    """Make groups that are formed from now on wait under ``guard`` and listen at ``host``.

    ``connect`` makes their device groups; without it they serve only the CPU. In a ``large`` world
    not all ranks connect with all.
    """
    global _forming, _connect
    _forming, _connect = Forming(guard=guard, host=host, large=large), connect
    if not torch_private.is_registered(BACKEND):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def bury() -> int:
    """Abandon every group made so far; return how many have a running operation.

    A group is destructed only when it has none. A group whose operation never ends is kept for the
    life of the process, even beyond the interpreter's own clean-up.
    """
    for group in _groups:
        group.close()
    _graves.extend(_groups)
    _groups.clear()
    busy = [group for group in _graves if group.busy]
    for group in busy:
        if not getattr(group, "_immortal", False):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            group._immortal = True  # type: ignore[attr-defined]
    for group in _graves:
        if not group.busy and getattr(group, "_immortal", False):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
            group._immortal = False  # type: ignore[attr-defined]
    count = len(busy)
    _graves[:] = busy
    return count
