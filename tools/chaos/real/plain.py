"""Any job as the victim: a command in its own session, and the workers in it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast.elastic.processes.children import Child, describe_exit, end_processes
from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.hooks import ATTEMPT, PATTERN
from holdfast.tools.chaos.judging.history import HookReader
from holdfast.tools.chaos.judging.record import Told
from holdfast.tools.chaos.real.jobs import Ending, JobFolders, argv, environment, new_mark
from holdfast.tools.chaos.real.surroundings import within
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import ScenarioError, Workload
from holdfast.tools.leftovers import processes_of

_END_S: Final = 5.0
_OUTPUT_BYTES: Final = 2000
_OF_HISTORY: Final = re.compile(r"history-.*-(\d+)-[0-9a-f]+\.jsonl")
ROLE: Final = "worker"


class PlainJob:
    """A `RealJob` of any command. Workers are named after their ranks: ``worker/0`` has rank 0.

    They are the processes with ``RANK`` in their environment whose parents have none, and those
    that wrote a history.
    """

    run = coordinator = ""
    nodes: tuple[str, ...] = ()

    def __init__(self, workload: Workload, place: JobFolders, *, source: Path) -> None:
        self.mark, self._place = new_mark(), place
        self._workload, self._source = workload, source
        self._reader = HookReader(place.history)
        self._env: dict[str, str] = {}
        self._attempt = self._restarts = 0
        self._output = place.work / "output.log"

    @property
    def folder(self) -> Path:
        """See `JobAccess`."""
        return self._place.folder

    def start(self, env: Mapping[str, str]) -> None:
        """See `RealJob`."""
        more = environment(
            self._workload, self._place, source=self._source, mark=self.mark, more=env
        )
        self._env = {**os.environ, **more}
        self._begin()

    def _begin(self) -> None:
        command = within(
            self._workload.surroundings,
            argv(self._workload, self._place, source=self._source),
            folder=self._place.folder.resolve(),
            work=self._place.work.resolve(),
        )
        env = {**self._env, ATTEMPT: str(self._attempt)}
        try:
            self._child = Child.start(command, env=env, tied=True, output=self._output)
        except OSError as error:
            raise ScenarioError(f"workload.command: {command[0]}: {error.strerror}") from error

    def events(self) -> list[Told]:
        """See `RealJob`."""
        return self._reader.new()

    def ending(self) -> Ending | None:
        """See `RealJob`."""
        code = self._child.wait(0)
        if code is None:
            return None
        if code and self._restarts:
            self._restarts -= 1
            self._attempt += 1
            self._kill_rest()
            self._begin()
            return None
        if not code:
            return Ending(ok=True, message="exit status 0")
        return Ending(ok=False, message=f"{describe_exit(code)}; {self._last_words()}")

    def struck(self, part: str) -> None:
        """Allow one restart, as a cluster does, if the whole job was hit and ends because of it."""
        self._restarts += part == "job"

    def workers(self) -> list[int]:
        """See `RealJob`."""
        return [pid for each in self.victims("worker") for pid in each.pids]

    def end(self) -> None:
        """See `RealJob`."""
        self._child.kill()
        self._child.wait(_END_S)
        self._kill_rest()

    def _kill_rest(self) -> None:
        end_processes(processes_of(self.mark), mark=self.mark)

    def output(self) -> str:
        """See `RealJob`."""
        return self._output.read_text(errors="replace")

    def _last_words(self) -> str:
        lines = [line for line in self.output()[-_OUTPUT_BYTES:].splitlines() if line.strip()]
        return f"its output ({self._output}) ends: {lines[-1] if lines else 'it is empty'}"

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        """Return False: there are no nodes."""
        return False

    def give_back(self, node: str) -> None:
        """Do nothing: there are no nodes."""

    def victims(self, part: Part) -> list[Victim]:
        """See `JobAccess`: there are workers, and the job, whose first process was started here."""
        if part == "store":
            return [Victim(name="the store", part=part, pids=())]
        if part == "job":
            pids = [self._child.pid, *processes_of(self.mark)] if self._child.alive else []
            return [Victim(name="the job", part=part, pids=tuple(dict.fromkeys(pids)))]
        if part != "worker":
            return []
        ranks = dict(self._ranks())
        return [
            Victim(name=f"{ROLE}/{rank}", part="worker", pids=(pid,), seat=f"{ROLE}/{rank}")
            for rank, pid in sorted(ranks.items())
        ]

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranks of the living workers with their processes."""
        variables = {
            int(found[1]): path
            for path in self._place.history.glob(PATTERN)
            if (found := _OF_HISTORY.fullmatch(path.name))
        }
        ranks = {pid: _rank_of(pid) for pid in processes_of(self.mark)}
        for pid, rank in ranks.items():
            if pid in variables and (first := _rank_told(variables[pid])) is not None:
                yield first, pid
            elif rank is not None and ranks.get(_parent(pid)) is None:
                yield rank, pid


def _rank_told(path: Path) -> int | None:
    """Return the rank in a history's first line, None if that is not written yet."""
    line, end, _ = path.read_bytes().partition(b"\n")
    return int(msgspec.json.decode(line)["rank"]) if end else None


def _rank_of(pid: int) -> int | None:
    """Return the rank in a process's environment, None if there is none."""
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, text = each.partition(b"=")
            if name == b"RANK" and text.isdigit():
                return int(text)
    return None


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    return 0
