"""Faults of a run's own etcd: members are killed and slowed, leases and history are lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import etcd
import keeper
import pytest
from chaos_victims import Site, struck
from etcd_fixtures import Connect

from holdfast.elastic.coordinator.base import Coordinator, EventKind
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError
from holdfast.elastic.membership.view import node_key
from holdfast.tools.chaos.faults.etcd.coordinator import CoordinatorInjector
from holdfast.tools.chaos.faults.injector import Undo
from holdfast.tools.chaos.real.keys import left_keys
from holdfast.tools.chaos.scenarios.scenario import COORDINATOR_ENV, ScenarioError

RUN = "run-1"


class Struck:
    """Three members, and a job with one node that holds a lease."""

    def __init__(self, folder: Path) -> None:
        self.site, self.injector = Site(folder, run=RUN), CoordinatorInjector()
        kinds = ("leader-kill", "coordinator-latency")
        strikes = tuple(struck(kind) for kind in kinds)
        self.address = self.injector.prepare(self.site, strikes)[COORDINATOR_ENV]
        self.node = self.site.add("node a", part="node", node="a")
        self.all = self.site.add("the coordinator", part="coordinator")

    def strike(self, kind: str, **fields: float) -> Undo | None:
        victim = self.node if kind == "lease-lost" else self.all
        return self.injector.strike(struck(kind, **fields), victim, self.site)


@pytest.fixture
def hurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Struck]:
    monkeypatch.delenv(COORDINATOR_ENV, raising=False)
    try:
        monkeypatch.setenv("PATH", str(etcd.program().parent), prepend=":")
    except keeper.CannotInstall as error:
        if keeper.required():
            pytest.fail(f"etcd is required here, but {error}", pytrace=False)
        pytest.skip(f"no etcd: {error}")
    found = Struck(tmp_path)
    with contextlib.closing(found.injector):
        yield found


def answered(coordinator: Coordinator, *, deadline_s: float = 60.0) -> bool:
    """Say if it answers before the time is up."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        with contextlib.suppress(CoordinatorError):
            coordinator.get("x")
            return True
    return False


def test_what_etcd_suffers_passes_or_stays(
    hurt: Struck, connect_etcd: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ScenarioError, match="does not use this etcd"):
        hurt.strike("coordinator-compaction")
    coordinator = connect_etcd(hurt.address, timeout_s=1.0)
    patient = connect_etcd(hurt.address)
    lease = patient.grant(60)
    patient.put(node_key(RUN, "a"), "1", lease=lease)

    mend = hurt.strike("leader-kill", lasts_s=60)
    assert mend is not None
    assert answered(coordinator)
    mend()

    hurt.strike("lease-lost")
    with pytest.raises(LeaseExpiredError):
        patient.keep_alive(lease)
    assert patient.get(node_key(RUN, "a")) is None

    patient.put(node_key(RUN, "a"), "2")
    mend = hurt.strike("coordinator-restart", lasts_s=60)
    assert mend is not None
    assert not answered(coordinator, deadline_s=0.5)
    mend()
    assert answered(coordinator)

    mend = hurt.strike("coordinator-latency", amount=0.2, lasts_s=60)
    assert mend is not None
    slowest_s, end_s = 0.0, time.monotonic() + 60
    while slowest_s < 0.1:
        assert time.monotonic() < end_s
        start_s = time.monotonic()
        assert answered(coordinator)
        slowest_s = max(slowest_s, time.monotonic() - start_s)
    mend()
    assert answered(coordinator)

    first = patient.put("x", "first")
    patient.put("x", "second")
    hurt.strike("coordinator-compaction")
    assert patient.get("x") is not None
    events, _ = patient.watch("x", after=first - 1, timeout_s=10.0)
    assert [event.kind for event in events] == [EventKind.RESET]

    patient.put("x", "third")
    monkeypatch.setenv(COORDINATOR_ENV, hurt.address)
    with contextlib.closing(CoordinatorInjector()) as other:  # finds what runs, and leaves it
        assert other.prepare(hurt.site, ()) == {}
        other.strike(struck("coordinator-compaction"), hurt.all, hurt.site)
    assert answered(coordinator)

    assert left_keys(hurt.address, "another-run") == []
    assert left_keys(hurt.address, RUN) == [
        f"left behind: key {node_key(RUN, 'a')} in the coordinator"
    ]
