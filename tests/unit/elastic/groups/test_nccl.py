"""The logic around NCCL, with a stand-in for its group, as the real one needs devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Work
from torch.distributed import AllreduceOptions

from holdfast.elastic.config import Batch, Mesh, Settings
from holdfast.elastic.errors import ConfigError, GenerationOverError
from holdfast.elastic.groups import collectives, nccl
from holdfast.elastic.groups.collectives import InterruptibleGroup
from holdfast.elastic.groups.devices import INFO, index_of, kind
from holdfast.elastic.groups.waits import WaitGuard
from holdfast.elastic.membership.records import Member

SOON_S = 5.0


class FakeWork(Work):
    """An operation that fails, or not."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error, self.timeouts = error, list[timedelta | None]()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.timeouts.append(timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._error is None

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> Exception | None:
        return self._error


class FakeNccl:
    """Stands for ProcessGroupNCCL: counts the calls.

    Like the real one it returns nothing for a collective that is not started asynchronously.
    """

    def __init__(self, work: FakeWork | None = None) -> None:
        self.work = work or FakeWork()
        self.done: list[str] = []
        self.ended = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.refuses_to_end = False

    def __getattr__(self, name: str) -> Callable[..., Work]:
        def operation(*args: Any) -> Work | None:
            self.done.append(name)
            return self.work if all(getattr(arg, "asyncOp", True) for arg in args) else None

        return operation

    def abort(self) -> None:
        self.may_end.wait(SOON_S)
        self.done.append("abort")
        self.ended.set()
        if self.refuses_to_end:
            raise RuntimeError("ProcessGroup abort timed out")

    def shutdown(self) -> None:
        self.done.append("shutdown")
        self.ended.set()


class Fence:
    """A generation that ends when told."""

    def __init__(self, *, grace_s: float = 0.05) -> None:
        self._over = threading.Event()
        self.guard = WaitGuard(3, self._over.is_set, grace_s=grace_s)
        self.rise = self._over.set


@pytest.fixture
def fence() -> Fence:
    return Fence()


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[nccl.Watcher]:
    made = nccl.Watcher()
    monkeypatch.setattr(nccl, "_watcher", made)
    yield made
    until(lambda: not made.running)


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_fence_aborts_every_group_once(fence: Fence, watcher: nccl.Watcher) -> None:
    inner = [FakeNccl(), FakeNccl()]
    groups = [nccl.NcclGroup(each, guard=fence.guard) for each in inner]
    for group in groups:
        watcher.watch(group)
    fence.rise()
    assert all(each.ended.wait(SOON_S) for each in inner)
    for group in groups:
        group.close()
        group.abort()
    until(lambda: not any(group.busy for group in groups))
    assert [each.done for each in inner] == [["abort"], ["abort"]]


def test_an_abort_that_waits_for_another_does_not_hold_it_up(
    fence: Fence, watcher: nccl.Watcher
) -> None:
    stuck, other = FakeNccl(), FakeNccl()
    stuck.may_end.clear()
    group = nccl.NcclGroup(stuck, guard=fence.guard)
    watcher.watch(group)
    watcher.watch(nccl.NcclGroup(other, guard=fence.guard))
    fence.rise()
    assert other.ended.wait(SOON_S)
    assert group.busy
    stuck.may_end.set()
    until(lambda: not group.busy)


def test_a_group_of_a_generation_that_stands_is_shut_down_not_aborted(
    fence: Fence, watcher: nccl.Watcher
) -> None:
    inner = FakeNccl()
    group = nccl.NcclGroup(inner, guard=fence.guard)
    watcher.watch(group)
    assert watcher.running
    group.close()
    until(lambda: not (watcher.running or group.busy))
    assert inner.done == ["shutdown"]


def test_a_watcher_starts_again_for_the_next_generation(watcher: nccl.Watcher) -> None:
    for _ in range(2):
        fence, inner = Fence(), FakeNccl()
        watcher.watch(nccl.NcclGroup(inner, guard=fence.guard))
        fence.rise()
        assert inner.ended.wait(SOON_S)
        until(lambda: not watcher.running)


@pytest.mark.parametrize("stuck", [False, True])
def test_an_abort_waits_for_a_call_that_starts_an_operation_unless_it_is_stuck(
    fence: Fence, watcher: nccl.Watcher, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    monkeypatch.setattr(nccl, "_ENQUEUE_GRACE_S", 0.05 if stuck else SOON_S)
    inner, inside, goes_on = FakeNccl(), threading.Event(), threading.Event()

    def broadcast(*_args: Any) -> Work:
        inside.set()
        goes_on.wait(SOON_S)
        inner.done.append("broadcast")
        return inner.work

    inner.broadcast = broadcast  # type: ignore[attr-defined]
    group = nccl.NcclGroup(inner, guard=fence.guard)
    watcher.watch(group)
    starter = threading.Thread(target=group.start, args=("broadcast", [torch.zeros(1)]))
    starter.start()
    assert inside.wait(SOON_S)
    fence.rise()
    until(lambda: group.busy or inner.ended.is_set())
    if stuck:
        assert inner.ended.wait(SOON_S)
    goes_on.set()
    starter.join(SOON_S)
    assert inner.ended.wait(SOON_S)
    until(lambda: not group.busy)
    assert inner.done == (["abort", "broadcast"] if stuck else ["broadcast", "abort"])


def test_a_wait_orders_streams_and_sees_the_fence(fence: Fence) -> None:
    inner = FakeNccl()
    group = nccl.NcclGroup(inner, guard=fence.guard)
    work = group.start("allreduce", [torch.zeros(1)])
    assert work.wait()
    assert work.wait(timedelta(seconds=2))
    assert inner.work.timeouts == [None, timedelta(seconds=2)]
    assert work.is_success()
    fence.rise()
    with pytest.raises(GenerationOverError):
        work.wait()
    with pytest.raises(GenerationOverError):
        group.start("allreduce", [torch.zeros(1)])
    assert not work.is_success()
    assert inner.done == ["allreduce"]


def test_a_collective_in_the_callers_stream_is_a_work_too(fence: Fence) -> None:
    inner, tensor, options = FakeNccl(), torch.ones(2), AllreduceOptions()
    options.asyncOp = False
    group = nccl.NcclGroup(inner, guard=fence.guard)
    work = group.start("allreduce", [tensor], options)
    assert inner.work.timeouts == []
    assert work.wait()
    assert work.wait(timedelta(seconds=2))
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is tensor
    assert work.get_future().wait()[0] is tensor
    fence.rise()
    assert not work.is_success()
    with pytest.raises(GenerationOverError):
        work.wait()


def test_torch_itself_waits_for_such_a_collective(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = FakeNccl()
    device = nccl.NcclGroup(inner, guard=fence.guard)
    group = InterruptibleGroup(FakeNccl(), 0, 1, guard=fence.guard, device=device)
    tensor = torch.zeros(2, device="meta")
    assert torch.distributed.all_reduce(tensor, group=group) is None
    assert torch.distributed.all_reduce(tensor, group=group, async_op=True).wait()
    assert inner.done == ["allreduce", "allreduce"]
    assert inner.work.timeouts == [None]


def test_a_work_that_failed_is_no_success(fence: Fence) -> None:
    group = nccl.NcclGroup(FakeNccl(FakeWork(RuntimeError("lost"))), guard=fence.guard)
    assert not group.start("allreduce", [torch.zeros(1)]).is_success()


def test_a_collective_is_not_captured_into_a_graph(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = FakeNccl()
    group = nccl.NcclGroup(inner, guard=fence.guard)
    monkeypatch.setattr(nccl.lanes, "is_captured", lambda: True)
    with pytest.raises(ConfigError, match=r"allreduce .* is captured .* no longer exists"):
        group.start("allreduce", [torch.zeros(1)])
    assert inner.done == []


def test_an_abort_that_fails_ends_nothing_else(
    fence: Fence, watcher: nccl.Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    inner = FakeNccl()
    inner.refuses_to_end = True
    group = nccl.NcclGroup(inner, guard=fence.guard)
    watcher.watch(group)
    fence.rise()
    assert inner.ended.wait(SOON_S)
    until(lambda: not group.busy)
    assert "not freed as it should: ProcessGroup abort timed out" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\n"
        "ncclRemoteError: A call failed possibly due to a network error",
        "socketProgress: Connection closed by remote peer",
    ],
)
def test_an_error_of_a_lost_peer_waits_longer_for_the_fence(text: str) -> None:
    over = threading.Event()
    guard = WaitGuard(3, over.is_set, grace_s=0.0, lost_peer_grace_s=SOON_S)
    group = nccl.NcclGroup(FakeNccl(FakeWork(RuntimeError(text))), guard=guard)
    threading.Timer(0.05, over.set).start()
    with pytest.raises(GenerationOverError):
        group.start("allreduce", [torch.zeros(1)]).wait()


def test_an_error_is_the_fences_where_one_comes_and_else_its_own() -> None:
    for rises in (True, False):
        fence = Fence(grace_s=SOON_S if rises else 0.05)
        group = nccl.NcclGroup(FakeNccl(FakeWork(RuntimeError("lost"))), guard=fence.guard)
        work = group.start("broadcast", [torch.zeros(1)])
        if rises:
            threading.Timer(0.02, fence.rise).start()
        with pytest.raises(GenerationOverError if rises else RuntimeError, match="lost"):
            work.wait()


def test_a_fence_frees_who_waits_for_the_other_side_of_a_first_send() -> None:
    fence = Fence()
    inner, came = FakeNccl(), threading.Event()
    blocked = nccl.NcclGroup(inner, guard=fence.guard)
    inner.send = lambda *_: came.wait(SOON_S)  # type: ignore[attr-defined]
    threading.Timer(0.02, fence.rise).start()
    with pytest.raises(GenerationOverError):
        blocked.start("send", [torch.zeros(1)], 1, 0)
    came.set()


class Mark:
    """A mark that the device reaches at the given look."""

    def __init__(self, looks: int, then: Callable[[], None] = lambda: None) -> None:
        self._looks, self._then = looks, then

    def query(self) -> bool:
        self._looks -= 1
        if self._looks == 0:
            self._then()
        return self._looks <= 0


def test_what_the_device_did_counts_only_while_the_generation_stands() -> None:
    waits: list[bool] = []
    nccl.settle(
        [Mark(3), Mark(1)], WaitGuard(1, lambda: False, waiting=waits.append), timeout_s=SOON_S
    )
    assert waits == [True, False]
    fence = Fence()
    with pytest.raises(GenerationOverError):  # aborted: the device is done, its data are nobody's
        nccl.settle([Mark(2, fence.rise)], fence.guard, timeout_s=SOON_S)
    with pytest.raises(GenerationOverError):
        nccl.settle([Mark(1), Mark(1 << 60)], fence.guard, timeout_s=SOON_S)
    with pytest.raises(TimeoutError, match=r"after 0\.01 s"):
        nccl.settle([Mark(1), Mark(1 << 60)], WaitGuard(1, lambda: False), timeout_s=0.01)


class FakeDevice:
    """Stands for the backend of a device's tensors: records the calls."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.busy = self.closed = False

    def start(self, name: str, *_args: Any, **_kwargs: Any) -> Work:
        self.started.append(name)
        return FakeWork()

    def close(self) -> None:
        self.closed = True


def test_a_group_sends_a_devices_tensors_to_the_devices_group(fence: Fence) -> None:
    device = FakeDevice()
    inner = FakeNccl()  # in the place of gloo
    group = InterruptibleGroup(inner, 0, 1, guard=fence.guard, device=device)
    far, near = torch.zeros(2, device="meta"), torch.zeros(2)
    group.allreduce([far])
    group._allgather_base(far, far)
    group.all_gather_single(far, far)
    group.allgather([[far]], [far])
    group.alltoall_base(far, far, [], [])
    group._reduce_scatter_base(far, far)
    group.reduce_scatter_tensor_coalesced([far], [far])
    group.allgather_into_tensor_coalesced([far, far], [far, far])
    group.reduce_scatter([far], [[far]])
    group.send([far], 0, 0)
    assert device.started == [
        "allreduce",
        "_allgather_base",
        "_allgather_base",
        "allgather",
        "alltoall_base",
        "_reduce_scatter_base",
        "_reduce_scatter_base",
        "_allgather_base",
        "_allgather_base",
        "reduce_scatter",
        "send",
    ]
    assert inner.done == []
    group.allreduce([near])
    group.barrier()
    assert inner.done == ["allreduce", "allreduce"]


def test_a_group_is_kept_while_its_device_is_busy(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_groups", [])
    monkeypatch.setattr(collectives, "_graves", [])
    device = FakeDevice()
    device.busy = True
    group = InterruptibleGroup(FakeNccl(), 0, 1, guard=fence.guard, device=device)
    collectives._groups.append(group)
    assert collectives.bury() == 1
    assert device.closed
    device.busy = False
    assert collectives.bury() == 0


def members(nodes: str, had: dict[int, int] | None = None) -> list[Member]:
    """Return a rank for every letter, on the node of that name; some ``had`` devices."""
    return [
        Member(
            rank=rank,
            seat=f"trainer/{rank}",
            node=node,
            incarnation=str(rank),
            info={INFO: (had or {})[rank]} if rank in (had or {}) else {},
        )
        for rank, node in enumerate(nodes)
    ]


def test_every_rank_of_a_node_takes_a_device_of_its_own_and_keeps_it() -> None:
    def taken(nodes: str, had: dict[int, int]) -> list[int]:
        found = members(nodes, had)
        return [index_of(rank, found, count=3) for rank in range(len(nodes))]

    assert taken("ababb", {}) == [0, 0, 1, 1, 2]
    assert taken("aa", {0: 1, 1: 2}) == [1, 2], "the rank on device 0 was lost"
    assert taken("aaa", {0: 1, 1: 2}) == [1, 2, 0], "its successor takes what is free"
    assert taken("aa", {0: 1, 1: 1}) == [1, 0]
    assert taken("aa", {0: 7}) == [0, 1]
    with pytest.raises(ConfigError, match="node b has 3 ranks and rank 1 sees 2 CUDA devices"):
        index_of(1, members("bbb"), count=2)


def test_cuda_is_refused_where_it_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (kind("cpu"), kind("auto")) == ("cpu", "cpu")
    with pytest.raises(ConfigError, match="no CUDA device here"):
        kind("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert kind("auto") == "cpu"
    with pytest.raises(ConfigError, match="has no NCCL"):
        kind("cuda")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert (kind("cpu"), kind("auto"), kind("cuda")) == ("cpu", "cuda", "cuda")


def test_a_mesh_says_what_its_device_cannot_do() -> None:
    with pytest.raises(ConfigError, match="give 'auto', 'cpu' or 'cuda'"):
        Mesh(device="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="or no pp"):
        Mesh(device="cuda", pp=2)
    settings = Settings(mesh=Mesh(device="cuda"), batch=Batch(microbatches=2), exact="float32")
    assert settings.job().device == "cuda"
    assert not settings.shares_by_speed


def test_torchs_watchdog_is_tamed_unless_the_user_says_otherwise() -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    nccl.tame(environment)
    assert environment == {
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    }
    assert nccl.untamed({}) == nccl.untamed(nccl.WATCHDOG) == ""
    assert nccl.untamed(environment).startswith("TORCH_NCCL_ENABLE_MONITORING=1: with that, torch")
    debugged = nccl.untamed({"TORCH_DISTRIBUTED_DEBUG": "detail", "TORCH_NCCL_DESYNC_DEBUG": "1"})
    assert debugged.startswith("TORCH_NCCL_DESYNC_DEBUG=1 and TORCH_DISTRIBUTED_DEBUG=detail: ")
