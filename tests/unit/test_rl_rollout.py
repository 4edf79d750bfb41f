"""A rollout worker waits for weights that are still to come, and not for those that are gone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from adapters.rl import rollout
from adapters.rl.config import preset
from adapters.rl.rollout import RolloutWorker
from ckpt.errors import NotFoundError, PeerError
from ckpt.transport import RunKey
from elastic.errors import JobFailed

GONE = NotFoundError("no protected snapshot of step 3 in memory; have [5, 6]")


class Sidecar:
    """Says how far protection has come."""

    address = "tcp://here"

    def __init__(self, protected: int) -> None:
        self.protected, self.asked = protected, 0

    def protected_step(self, *, generation: int, at_least: int, timeout_s: float) -> int:
        self.asked += 1
        return self.protected


class Pulls:
    """Stands for `pull`: what it raises, and how it was asked."""

    def __init__(self, error: Exception) -> None:
        self.error, self.everywhere = error, list[bool]()

    def __call__(self, names: Any, *, everywhere: bool, **_: Any) -> Any:
        self.everywhere.append(everywhere)
        raise self.error


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rollout, "_PULL_LIMIT_S", 0.05)
    monkeypatch.setattr(rollout, "_MISSING_LIMIT_S", 0.2)
    events: list[tuple[str, dict[str, Any]]] = []
    record: Any = SimpleNamespace(number=2)
    roster: Any = SimpleNamespace(generation=record)
    host: Any = SimpleNamespace(
        node="a",
        seat="rollout/0",
        incarnation="x",
        sidecar=Sidecar.address,
        key=RunKey.new(),
        roster=lambda: roster,
        beat=lambda **_: None,
        emit=lambda kind, **fields: events.append((kind, fields)),
        events=events,
        now=record,
    )
    config = msgspec.structs.replace(preset("tiny"), steps=5)
    made: Any = RolloutWorker(host, config, stopped=lambda: False)
    made._link = SimpleNamespace(generation=2, client=None)
    return made


def ask(worker: Any, monkeypatch: pytest.MonkeyPatch, *, protected: int, error: Exception) -> Pulls:
    pulls = Pulls(error)
    monkeypatch.setattr(rollout, "pull", pulls)
    worker._sidecar = Sidecar(protected)
    return pulls


def test_a_version_that_is_gone_is_looked_for_everywhere_and_given_back(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = ask(worker, monkeypatch, protected=6, error=GONE)
    assert worker._ready_for(3) is False
    assert pulls.everywhere[0] is False
    assert all(pulls.everywhere[1:])
    assert len(pulls.everywhere) < 10, "it pauses between attempts"
    ((kind, fields),) = worker._host.events
    assert kind == "version_unavailable"
    assert fields["version"] == 3
    assert "have [5, 6]" in fields["why"]


def test_a_version_that_stays_gone_ends_the_worker_with_the_reason(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(worker, monkeypatch, protected=6, error=GONE)
    deadline_s = time.monotonic() + 10
    with pytest.raises(JobFailed, match=r"version 3 cannot be had any more.*keep more snapshots"):
        while time.monotonic() < deadline_s:
            worker._ready_for(3)


def test_a_peer_that_never_answers_is_given_up_as_well(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(worker, monkeypatch, protected=6, error=PeerError("tcp://gone: no answer"))
    assert worker._ready_for(3) is False


def test_a_version_still_to_be_protected_is_waited_for_until_the_leader_changes(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = ask(worker, monkeypatch, protected=2, error=GONE)
    began_s, sidecar = time.monotonic(), worker._sidecar

    def protected_step(**_: Any) -> int:
        sidecar.asked += 1
        time.sleep(0.01)
        if sidecar.asked == 20:
            worker._host.now.number = 3
        return 2

    sidecar.protected_step = protected_step
    assert worker._ready_for(3) is False
    assert time.monotonic() - began_s > 0.1, "longer than it looks for one that is gone"
    assert not any(pulls.everywhere)
    assert worker._host.events == []
