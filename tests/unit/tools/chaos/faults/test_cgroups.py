"""The control group that limits a process, its files, and the message if there is none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

import pytest
from chaos_victims import Site, struck

from holdfast.tools.chaos.faults.cgroups import Hierarchy, hierarchies
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.faults.throttle import ThrottleInjector
from holdfast.tools.chaos.scenarios.scenario import ScenarioError

SYSTEMD = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OLD = (
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 / /sys/fs/cgroup/cpuset rw shared:6 - cgroup cgroup rw,cpuset\n"
)
CONTAINER = "33 23 0:27 /docker/1f /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu"


def test_the_groups_of_both_versions_are_found() -> None:
    (new,) = hierarchies(SYSTEMD)
    assert (new.version, new.mount) == (2, Path("/sys/fs/cgroup"))
    (old,) = hierarchies(OLD)
    assert (old.version, old.mount) == (1, Path("/sys/fs/cgroup/cpu,cpuacct"))
    assert [each.version for each in hierarchies(SYSTEMD + "\n" + OLD)] == [1, 2]
    assert hierarchies("1 1 8:1 / / rw - ext4 /dev/sda rw") == []


def test_a_processs_group_and_those_above_it_come_in_turn() -> None:
    (new,) = hierarchies(SYSTEMD)
    root = Path("/sys/fs/cgroup")
    assert list(new.parents("1:name=systemd:/x\n0::/user.slice/a.scope\n")) == [
        root / "user.slice" / "a.scope",
        root / "user.slice",
        root,
    ]
    assert new.group_of("4:cpu,cpuacct:/x\n") is None
    (old,) = hierarchies(OLD)
    assert old.group_of("5:cpuset:/y\n4:cpu,cpuacct:/x\n0::/z\n") == old.mount / "x"


def test_a_container_sees_its_own_group_at_the_top() -> None:
    (inside,) = hierarchies(CONTAINER)
    assert inside.top == PurePosixPath("/docker/1f")
    assert inside.group_of("4:cpu:/docker/1f/job\n") == Path("/sys/fs/cgroup/cpu/job")
    assert list(inside.parents("4:cpu:/docker/other\n")) == []


def test_a_share_of_a_processor_is_a_quota_of_each_period() -> None:
    new, old = (Hierarchy(version=version, mount=Path("/c")) for version in (2, 1))
    assert new.limits(0.2) == {"cpu.max": "20000 100000"}
    assert new.limits(2.5) == {"cpu.max": "250000 100000"}
    limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "20000"}
    assert old.limits(0.2) == limits
    assert list(old.limits(0.2)) == list(limits), "the quota is checked against the period"


@pytest.mark.parametrize("version", [1, 2])
def test_a_victim_moves_into_a_limited_group_and_out_again(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a cgroup goes with its files, another one's does not."""
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    groups = tmp_path / "groups"
    groups.mkdir()
    (groups / "cgroup.subtree_control").write_text("cpu memory\n")
    tree = Hierarchy(version=2 if version == 2 else 1, mount=groups)
    monkeypatch.setattr(Hierarchy, "group_of", lambda self, membership: self.mount)
    injector, site = ThrottleInjector(lambda: [tree]), Site(tmp_path)
    strike = struck("cpu-throttle", amount=0.25)
    assert injector.prepare(site, (strike,)) == {}
    assert [path.name for path in groups.iterdir() if path.is_dir()] == [], "the one it tried"
    me = Victim(name="worker/0", part="worker", pids=(os.getpid(),))
    undo = injector.strike(strike, me, site)
    assert undo is not None
    (group,) = (path for path in groups.iterdir() if path.is_dir())
    assert {name: (group / name).read_text() for name in tree.limits(0.25)} == tree.limits(0.25)
    assert (group / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    undo()
    assert not group.exists()
    assert (groups / "cgroup.procs").read_text().split()[-1] == str(os.getpid())
    injector.close()
    undo()


def test_where_no_group_can_be_made_the_remedy_is_named(tmp_path: Path) -> None:
    none: list[Hierarchy] = []
    for found, says in (
        (none, "no cgroup with the cpu controller is mounted"),
        ([Hierarchy(version=2, mount=tmp_path)], "No such file or directory"),
    ):
        with pytest.raises(ScenarioError, match=f"{says}.*: run it as root, or where systemd"):
            ThrottleInjector(lambda found=found: found).prepare(Site(tmp_path), ())
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    with pytest.raises(ScenarioError, match=r"cpu is not in its cgroup\.subtree"):
        ThrottleInjector(lambda: [Hierarchy(version=2, mount=tmp_path)]).prepare(Site(tmp_path), ())


def test_a_share_that_the_kernel_would_refuse_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"amount is 0 processors; give 0\.01 or more"):
        ThrottleInjector(list).prepare(Site(tmp_path), (struck("cpu-throttle", amount=0),))


def test_memory_is_limited_where_its_controller_is() -> None:
    assert hierarchies(OLD, "memory") == []
    (new,) = hierarchies(SYSTEMD, "memory")
    (old,) = hierarchies("35 31 0:32 / /c/memory rw - cgroup cgroup rw,memory", "memory")
    assert new.limits(64) == {"memory.max": "67108864"}
    assert old.limits(64) == {"memory.limit_in_bytes": "67108864"}
    assert old.group_of("7:memory:/x\n4:cpu:/y\n") == Path("/c/memory/x")
