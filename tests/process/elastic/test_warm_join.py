"""A late joiner prepares while others train, and has its state before they wait for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_scripts import ran
from jobs import DEADLINE_S, Event, Job, hurt, job
from tree import HELPERS

SCRIPT = HELPERS / "warm_training.py"
Line = dict[str, Any]


class Training:
    """A job of `warm_training`, its log, and the files it waits for."""

    def __init__(self, running: Job, folder: Path) -> None:
        self.job, self._folder = running, folder

    def lines(self) -> list[Line]:
        log = self._folder / "log.jsonl"
        return [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]

    def await_line(self, wanted: Callable[[Line], bool], *, but: int = 0) -> Line:
        """Return the first wanted line that another process than ``but`` wrote."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            for line in self.lines() if (self._folder / "log.jsonl").exists() else []:
                if wanted(line) and line["pid"] != but:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"never said; {self.job.history}")

    def go_on(self, name: str) -> None:
        (self._folder / name).touch()

    def rehearses(self, *, but: int = 0) -> Line:
        return self.await_line(lambda line: "rehearses" in line, but=but)

    def waits(self, *, world: int, beyond: int = 0) -> Line:
        return self.await_line(
            lambda line: line.get("world") == world and line.get("generation", 0) > beyond
        )

    def newest(self) -> int:
        """Return the newest generation in which somebody waits."""
        return max(line["generation"] for line in self.lines() if "waits" in line)

    def replace(self, node: str, *, left: int) -> int:
        """Have a node vanish with its memory and, once so many go on, come back with nothing.

        Returns the generation of those that went on.
        """
        before = self.newest()
        assert self.job.launcher.lose_machine(node)
        self.job.await_event(lambda e: e["kind"] == "node_exited" and e["victim"] == node)
        found = int(self.waits(world=left, beyond=before)["generation"])
        self.job.launcher.return_machine(node)
        return found

    def end(self) -> list[list[str]]:
        """Let the job come to its end; return the weights of each rank."""
        self.go_on("end")
        assert self.job.finish().ok
        return [line["weights"] for line in self.lines() if "done" in line]


@contextmanager
def training(folder: Path, *, nodes: int) -> Iterator[Training]:
    """Run it on nodes that share no memory."""
    env = {"HOLDFAST_TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    with job(folder, nodes=nodes, per_node=1, script=SCRIPT, env=env, apart=True) as running:
        yield Training(running, folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the weights of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "end").touch()
    env = {**os.environ, "HOLDFAST_TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    ran([sys.executable, SCRIPT], env=env, check=True)
    return list(msgspec.json.decode((folder / "log.jsonl").read_bytes())["weights"])


def prefetched(event: Event) -> bool:
    """Say if a rank restored from bytes that it had fetched before."""
    tiers = event["tiers"] if event["kind"] == "restored" else {}
    return bool(tiers.get("prefetched", {}).get("bytes"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_joiner_fetches_its_state_before_it_joins_and_may_die_over_it(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    with training(tmp_path, nodes=2) as run:
        run.waits(world=2)
        alone = run.replace("n1", left=1)
        first = run.rehearses()
        assert (first["rehearses"], first["world"]) == (6, 2), "as it will find it"
        hurt(first["pid"])
        second = run.rehearses(but=first["pid"])
        assert run.newest() == alone, "those who train were not disturbed"
        run.go_on("gate")
        run.waits(world=2, beyond=alone)
        restored = run.job.await_event(prefetched)
        assert restored["bytes"] > restored["sent_bytes"] == 0
        fetched = run.job.events("prefetched")[-1]
        assert fetched["held_bytes"] == fetched["wanted_bytes"] == restored["bytes"]
        rehearsed = run.job.events("rehearsed")[-1]
        assert (rehearsed["error"], rehearsed["world"]) == ("", 2)
        assert second["pid"] != first["pid"]
        assert run.end() == [undisturbed] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_the_loss_of_a_holder_ends_a_rehearsal_and_the_join_goes_on(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    with training(tmp_path, nodes=3) as run:
        run.waits(world=3)
        two = run.replace("n2", left=2)
        run.rehearses()
        assert run.job.launcher.lose_machine("n1")
        ended = run.job.await_event(lambda e: e["kind"] == "rehearsed")
        assert "GenerationOverError" in ended["error"]
        run.waits(world=2, beyond=two)
        assert run.end() == [undisturbed] * 2
