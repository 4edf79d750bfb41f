"""The small parts of agent and launcher, each by itself."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.agent.inbox import Background, Inbox
from holdfast.elastic.agent.lease import LeaseKeeper
from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.watch import KeyWatch, WatchedKeys
from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.membership.records import JobOutcome, NodeRecord
from holdfast.elastic.processes.children import Child, ChildChange, describe_exit, end_processes

DEADLINE_S = 10.0


def until(condition: object) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def python(code: str, *, tied: bool = False) -> Child:
    return Child.start([sys.executable, "-S", "-c", code], env=os.environ, tied=tied)


def await_change(child: Child) -> tuple[ChildChange, int]:
    found = []
    until(lambda: (status := child.poll()) and not found.append(status))
    return found[0].change, found[0].code


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or b") Z" in stat.read_bytes()


def test_a_child_is_seen_to_stop_continue_and_die() -> None:
    child = python("import time; time.sleep(100)", tied=True)
    assert child.poll() is None
    os.kill(child.pid, signal.SIGSTOP)
    assert await_change(child) == (ChildChange.STOPPED, 0)
    os.kill(child.pid, signal.SIGCONT)
    assert await_change(child) == (ChildChange.CONTINUED, 0)
    child.kill()
    assert await_change(child) == (ChildChange.EXITED, -signal.SIGKILL)
    assert child.poll() is None and not child.alive
    child.kill()


def test_a_childs_own_children_end_with_it() -> None:
    code = "import os,time\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(100)"
    read, write = os.pipe()
    child = Child.start(
        [sys.executable, "-S", "-c", f"import os; os.dup2({write}, 1)\n{code}"],
        env=os.environ,
        tied=True,
        pass_fds=[write],
    )
    os.close(write)
    grandchild = int(os.read(read, 100))
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    until(lambda: is_gone(grandchild))
    os.close(read)


def test_a_child_that_is_asked_to_end_ends_its_own_itself() -> None:
    code = "import os,time\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(100)"
    read, write = os.pipe()
    child = Child.start(
        [sys.executable, "-S", "-c", f"import os; os.dup2({write}, 1)\n{code}"],
        env=os.environ,
        tied=True,
        pass_fds=[write],
    )
    grandchild = int(os.read(read, 100))
    try:
        child.signal(signal.SIGTERM)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_gone(grandchild)
    finally:
        assert child.wait(DEADLINE_S) == -signal.SIGTERM
    until(lambda: is_gone(grandchild))
    os.close(read)
    os.close(write)


def test_waiting_for_a_child_has_an_end() -> None:
    child = python("import time; time.sleep(100)")
    assert child.wait(0.01) is None
    child.kill()
    assert child.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_missing_program_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        Child.start(["/nowhere/program"], env={}, tied=False)


def test_only_marked_processes_are_ended() -> None:
    child = python("import time; time.sleep(100)  # mark-4711")
    assert end_processes([child.pid, 0, 2**22 - 1], mark="another-mark") == []
    assert child.poll() is None
    assert end_processes([child.pid], mark="mark-4711") == []
    assert child.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-250, "signal 250")],
)
def test_exits_are_described(code: int, text: str) -> None:
    assert text in describe_exit(code)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_grace_s": 0.0},
        {"lease_ttl_s": 0.5},
        {"keep_alive_s": 0.8},
        {"min_hang_s": 9.0, "max_hang_s": 8.0},
    ],
)
def test_timing_checks_itself(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AgentTiming(**wrong)


def node(name: str = "n0", **slots: int) -> NodeSpec:
    return NodeSpec(name=name, domain=name, slots=slots or {"trainer": 1})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"command": ()}, "no command"),
        ({"nodes": ()}, "no nodes"),
        ({"nodes": (node(), node())}, "repeat"),
        ({"wanted": {"trainer": 2}}, "room for 1"),
        ({"wanted": {"rollout": 1}}, "room for 0"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"absent": frozenset({"n0"})}, "not all"),
        ({"absent": frozenset({"n1"})}, "name some of them"),
    ],
)
def test_a_wrong_launch_is_refused(changes: dict[str, object], match: str) -> None:
    right = {"command": ("x",), "nodes": (node(),), "wanted": {"trainer": 1}}
    LaunchConfig(**right)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        LaunchConfig(**{**right, **changes})  # type: ignore[arg-type]


def test_the_inbox_wakes_a_selector_and_keeps_order() -> None:
    inbox, seen = Inbox(), []
    assert select.select([inbox], [], [], 0)[0] == []
    thread = threading.Thread(
        target=lambda: [inbox.post(lambda i=i: seen.append(i)) for i in (1, 2)]
    )
    thread.start()
    thread.join()
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    for delivery in inbox.take():
        delivery()
    assert seen == [1, 2]
    assert list(inbox.take()) == []


def test_background_calls_come_back_in_order() -> None:
    inbox, seen = Inbox(), []

    def fail() -> int:
        raise PeerError("away")

    background = Background(inbox, name="test")
    background.submit(lambda: 1, then=seen.append, failed=seen.append)
    background.submit(fail, then=seen.append, failed=lambda error: seen.append(str(error)))
    while len(seen) < 2:
        assert select.select([inbox], [], [], DEADLINE_S)[0]
        for delivery in inbox.take():
            delivery()
    assert seen == [1, "away"]
    background.close(timeout_s=DEADLINE_S)


FAST = AgentTiming(lease_ttl_s=2.0, keep_alive_s=0.05, self_fence_s=1.2)


class Flaky(MemoryCoordinator):
    """A coordinator whose keep-alive can be cut off, as by a network."""

    away = False
    renewals = 0

    def keep_alive(self, lease: int) -> None:
        self.renewals += 1
        if self.away:
            raise CoordinatorError("away")
        super().keep_alive(lease)


class Deaf(Flaky):
    """A coordinator that hears every renewal, while its answers are lost."""

    def keep_alive(self, lease: int) -> None:
        MemoryCoordinator.keep_alive(self, lease)
        super().keep_alive(lease)


@pytest.mark.parametrize("kind", [Flaky, Deaf])
def test_a_node_that_cannot_renew_fences_itself_and_gives_its_lease_up(kind: type[Flaky]) -> None:
    coordinator, fenced, lost = kind(), [], threading.Event()
    keeper = LeaseKeeper(
        coordinator,
        timing=FAST,
        fence=lambda: fenced.append(coordinator.get("mine")),
        lost=lost.set,
    )
    coordinator.put("mine", "x", lease=keeper.lease)
    until(lambda: coordinator.renewals > 5)
    assert coordinator.get("mine") and not fenced
    coordinator.away = True
    assert lost.wait(DEADLINE_S)
    assert fenced[0] is not None, "the lease still stood when the workers were ended"
    coordinator.away = False
    until(lambda: coordinator.get("mine") is None)
    assert len(fenced) == 1
    keeper.close()


def test_a_renewal_that_is_answered_too_late_extends_nothing() -> None:
    coordinator, lost, extended = MemoryCoordinator(), threading.Event(), []
    request, answer = threading.Event(), threading.Event()
    renew = coordinator.keep_alive

    def slowly(lease: int) -> None:
        request.set()
        answer.wait(DEADLINE_S)
        renew(lease)

    coordinator.keep_alive = slowly  # type: ignore[method-assign]
    timing = AgentTiming(lease_ttl_s=100.0, keep_alive_s=0.05, self_fence_s=0.5)
    keeper = LeaseKeeper(
        coordinator, timing=timing, fence=lambda: None, lost=lost.set, extend=extended.append
    )
    assert request.wait(DEADLINE_S) and lost.wait(DEADLINE_S)
    answer.set()
    keeper.close()
    assert len(extended) == 1, "only what was granted with the lease"


def test_the_mirror_follows_the_watch() -> None:
    coordinator, mirror, seen = MemoryCoordinator(), WatchedKeys(), []
    coordinator.put("r/a", "1")
    watch = KeyWatch(
        coordinator,
        "r/",
        start=lambda entries: (mirror.reset(entries), seen.append("start")),
        change=lambda events: (mirror.apply(events), seen.append("change")),
    )
    until(lambda: seen)
    coordinator.put("r/b", "2")
    coordinator.put("q/c", "3")
    coordinator.delete("r/a")
    until(lambda: sorted(mirror.entries) == ["r/b"])
    watch.close()


@pytest.mark.parametrize(("keys", "gathers"), [(3, False), (100, True)])
def test_changes_among_many_keys_are_handed_over_together(keys: int, gathers: bool) -> None:
    class Held(threading.Event):
        """Waits for the test, not for the time that was asked for."""

        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return goes_on.wait(DEADLINE_S) and self.is_set()

    coordinator, goes_on = MemoryCoordinator(), threading.Event()
    waited: list[float | None] = []
    started, batches = threading.Event(), list[list[str]]()
    for number in range(keys):
        coordinator.put(f"r/{number}", "")
    watch = KeyWatch(
        coordinator,
        "r/",
        start=lambda entries: started.set(),
        change=lambda events: batches.append([event.value for event in events]),
    )
    watch._closed = Held()
    assert started.wait(DEADLINE_S)
    coordinator.put("r/0", "first")
    until(lambda: batches)
    for value in ("second", "third"):
        coordinator.put("r/0", value)
    goes_on.set()
    until(lambda: sum(map(len, batches)) == 3)
    watch.close()
    assert batches[0] == ["first"]
    assert bool(waited) is gathers
    if gathers:
        assert batches[1] == ["second", "third"]


def test_the_mirror_ignores_what_is_older_than_it_knows() -> None:
    mirror = WatchedKeys()
    mirror.reset([Entry(key="k", value="new", revision=5)])
    mirror.apply([KeyEvent(kind=EventKind.PUT, key="k", value="old", revision=4)])
    assert mirror.entries["k"].value == "new"
    mirror.apply([KeyEvent(kind=EventKind.DELETE, key="k", value="", revision=6)])
    assert not mirror.entries


def test_the_registry_publishes_changes_only_and_survives_an_absent_coordinator() -> None:
    coordinator = MemoryCoordinator()
    lease = coordinator.grant(10.0)
    registry = Registry(coordinator, run="r", lease=lambda: lease)
    record = NodeRecord(node="n0", incarnation="i", domain="d", sidecar="", slots={})
    assert registry.publish(record)
    first = coordinator.get("r/nodes/n0")
    assert registry.publish(record)
    assert coordinator.get("r/nodes/n0") == first
    assert registry.publish(msgspec.structs.replace(record, fenced=1))
    stands = coordinator.get("r/nodes/n0")
    assert stands
    registry.shown(stands.revision)
    assert registry.publish(msgspec.structs.replace(record, fenced=1))
    assert coordinator.get("r/nodes/n0") == stands
    assert first
    late = coordinator.put("r/nodes/n0", first.value, lease=lease)  # an older write of ours
    registry.shown(late)
    assert registry.publish(msgspec.structs.replace(record, fenced=1))
    now = coordinator.get("r/nodes/n0")
    assert now and now.value == stands.value
    registry.forget()
    coordinator.revoke(lease)
    assert not registry.publish(record)
    assert registry.finish(JobOutcome(ok=True, message="x"))
    assert not registry.finish(JobOutcome(ok=False, message="y"))
