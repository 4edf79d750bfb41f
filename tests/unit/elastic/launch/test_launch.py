"""The launcher's supervision of its agents."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.elastic.decisions.restarting import Restarts
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.agent_start import agent_config
from holdfast.elastic.launch.config import LEAST_HISTORY_BYTES, LaunchConfig, NodeSpec
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.processes.children import ChildChange, ChildStatus


class Agent:
    """An agent that reports its changes one by one; ``between`` acts after the first look."""

    def __init__(self, *changes: ChildStatus | None, between: Callable[[], None]) -> None:
        self._changes, self._between = list(changes), between
        self.alive = True

    def poll(self) -> ChildStatus | None:
        found = self._changes.pop(0) if self._changes else None
        self.alive = self.alive and not (found and found.change is ChildChange.EXITED)
        between, self._between = self._between, lambda: None
        between()
        return found

    def kill(self) -> None:
        raise AssertionError("nobody ends it")


EXITED = ChildStatus(change=ChildChange.EXITED, code=-9)


@pytest.mark.parametrize(
    "changes", [(None, EXITED), (ChildStatus(change=ChildChange.CONTINUED, code=0), EXITED)]
)
def test_a_machine_that_is_lost_and_back_while_it_is_looked_at_is_started_again(
    changes: tuple[ChildStatus | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher: Any = object.__new__(Launcher)
    launcher.config = LaunchConfig(
        command=("true",),
        nodes=(NodeSpec(name="n0", domain="d0", slots={"trainer": 1}),),
        wanted={"trainer": 1},
    )
    launcher._returning, launcher._taken, launcher._stopped_s = set[str](), set[str](), {}
    launcher._due = set[str]()
    started: list[str] = []
    monkeypatch.setattr(launcher, "_lose_node", lambda node, agent: None, raising=False)
    monkeypatch.setattr(
        launcher, "_start_agent", lambda node: started.append(node.name), raising=False
    )
    agent = Agent(*changes, between=lambda: launcher.return_machine("n0"))
    launcher._agents = {"n0": agent}
    for _ in range(4):
        launcher._check_agents()
    assert started[:1] == ["n0"]
    assert not agent.alive


def test_a_machine_that_comes_back_while_its_agent_is_still_dying_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed process with several threads can be waited for only once the last of them ended."""
    launcher: Any = object.__new__(Launcher)
    node = NodeSpec(name="n0", domain="d0", slots={"trainer": 1})
    launcher.config = LaunchConfig(command=("true",), nodes=(node,), wanted={"trainer": 1})
    launcher._returning, launcher._taken, launcher._stopped_s = {"n0"}, {"n0"}, {}
    launcher._due = set[str]()
    started: list[str] = []
    monkeypatch.setattr(
        launcher, "_lose_node", lambda node, agent: launcher._taken.clear(), raising=False
    )
    monkeypatch.setattr(
        launcher, "_start_agent", lambda node: started.append(node.name), raising=False
    )
    launcher._agents = {"n0": Agent(None, None, EXITED, between=lambda: None)}
    for _ in range(5):
        launcher._check_agents()
    assert started == ["n0"]


def test_an_agent_that_the_machine_refuses_to_start_is_one_more_failure_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher: Any = object.__new__(Launcher)
    node = NodeSpec(name="n0", domain="d0", slots={"trainer": 1})
    launcher.config = LaunchConfig(
        command=("true",), nodes=(node,), wanted={"trainer": 1}, node_restarts=3
    )
    launcher._returning, launcher._taken, launcher._stopped_s = set[str](), set[str](), {}
    launcher._due, launcher._lost, launcher._stop_reason = {"n0"}, {}, None
    launcher._restarts = {"n0": Restarts(count=1, progress=4)}
    launcher._agents = {"n0": Agent(EXITED, between=lambda: None)}
    launcher._agents["n0"].poll()
    removed: list[str] = []

    def refuse(node: NodeSpec) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(launcher, "_start_agent", refuse, raising=False)
    monkeypatch.setattr(launcher, "_remove_memory", removed.append, raising=False)
    for _ in range(2):
        launcher._restarts["n0"] = msgspec.structs.replace(launcher._restarts["n0"], due_s=0.0)
        launcher._check_agents()
        assert launcher._due == {"n0"}
        assert launcher._restarts["n0"].due_s > time.monotonic() - 5.0
        assert not removed
    launcher._restarts["n0"] = msgspec.structs.replace(launcher._restarts["n0"], due_s=0.0)
    launcher._check_agents()
    assert removed == ["n0"]
    assert "cannot be started: [Errno 11]" in launcher._stop_reason


def test_the_bound_of_the_history_reaches_the_agents_and_has_a_least_value() -> None:
    node = NodeSpec(name="n0", domain="d0", slots={"trainer": 1})

    def config(history_bytes: int) -> LaunchConfig:
        return LaunchConfig(
            command=("true",), nodes=(node,), wanted={"trainer": 1}, history_bytes=history_bytes
        )

    kept = agent_config(config(1 << 20), node, run="r", run_dir=Path("d"), coordinator="c")
    assert kept.history_bytes == 1 << 20
    with pytest.raises(ConfigError, match="give 65536 or more"):
        config(LEAST_HISTORY_BYTES - 1)
