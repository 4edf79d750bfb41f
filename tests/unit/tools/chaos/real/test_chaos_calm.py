"""The undisturbed run beside a struck one: its coordinator, and its leftovers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.real import undisturbed, world
from holdfast.tools.chaos.real.jobs import Ending, JobFolders
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import Workload, parse

RUNS: list[str] = []


class Imagined:
    """A job that ends at once, and leaves what its folder has a name of."""

    mark, run, coordinator = "no-process-has-this", "", ""
    nodes: tuple[str, ...] = ()

    def __init__(self, workload: Workload, place: JobFolders, *, source: Path) -> None:
        RUNS.append(workload.coordinator)
        self.folder, self._work = place.folder, place.work

    def start(self, env: Mapping[str, str]) -> None:
        data = self._work / "step-000000000005" / "data"
        data.mkdir(parents=True)
        (data / "half.pack").write_bytes(b"x")

    def events(self) -> list[dict[str, Any]]:
        return []

    def ending(self) -> Ending | None:
        return Ending(ok=True, message="")

    def struck(self, part: str) -> None:
        raise AssertionError("nobody is struck")

    def workers(self) -> list[int]:
        return []

    def victims(self, part: Part) -> list[Victim]:
        return []

    def lose(self, node: str) -> bool:
        return False

    def give_back(self, node: str) -> None:
        raise AssertionError("nothing was lost")

    def end(self) -> None:
        pass


def test_the_undisturbed_run_has_the_embedded_coordinator_and_tells_what_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "HoldfastJob", Imagined)
    load = {"command": ["x"], "nodes": {"a": {"trainer": 1}}, "coordinator": "etcd"}
    scenario = parse({"name": "calm", "about": "", "workload": load}, source="test")
    RUNS.clear()
    calm = undisturbed(scenario, folder=tmp_path)
    assert RUNS == ["embedded"] and calm.ending.ok
    (left,) = calm.problems
    assert left.startswith("left behind: ") and "half.pack: of a save that did not finish" in left
