"""CPU throttling of a victim by the kernel's control groups, where one can be written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_victims import Remote, Site, struck

from holdfast.tools.chaos.faults.injector import MissedError
from holdfast.tools.chaos.faults.throttle import ThrottleInjector
from holdfast.tools.chaos.scenarios.scenario import ScenarioError


@pytest.fixture
def injector(tmp_path: Path) -> Iterator[ThrottleInjector]:
    made = ThrottleInjector()
    try:
        made.prepare(Site(tmp_path), ())
    except ScenarioError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    made = Remote({})
    yield made
    made.close()


def groups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_a_throttled_process_is_held_back_until_it_is_let_go(
    injector: ThrottleInjector, remote: Remote, tmp_path: Path
) -> None:
    site, home = Site(tmp_path), groups_of(remote.pid)
    victim = site.add("worker/0", remote.pid)
    undo = injector.strike(struck("cpu-throttle", amount=0.1), victim, site)
    assert undo is not None
    (group,) = injector.groups
    remote.does("!until_s = time.process_time() + 0.1")
    began_s = time.monotonic()
    remote.does("!while time.process_time() < until_s: pass")
    assert time.monotonic() - began_s > 0.5, "ten milliseconds of each tenth of a second"
    undo()
    assert not group.exists()
    assert groups_of(remote.pid) == home
    assert remote.does("1 + 1") == 2


def test_what_was_started_meanwhile_is_let_go_as_well(
    injector: ThrottleInjector, remote: Remote, tmp_path: Path
) -> None:
    site, home = Site(tmp_path), groups_of(remote.pid)
    victim = site.add("worker/0", remote.pid)
    injector.strike(struck("cpu-throttle", amount=1), victim, site)
    child = remote.does("(p := __import__('subprocess').Popen(['sleep', '60'])).pid")
    assert groups_of(child) == groups_of(remote.pid) != home
    (group,) = injector.groups
    injector.close()
    assert groups_of(child) == groups_of(remote.pid) == home
    assert not group.exists()


def test_nobody_is_throttled_who_is_gone(
    injector: ThrottleInjector, remote: Remote, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    victim = site.add("worker/0", remote.pid)
    remote.close()
    with pytest.raises(MissedError, match="worker/0 has no process"):
        injector.strike(struck("cpu-throttle"), victim, site)
    assert injector.groups == ()
