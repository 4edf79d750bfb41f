"""Observation of a soak: its events, forbidden outcomes, and the resources of all processes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.events import (
    CheckpointDone,
    Detected,
    Event,
    GenerationProposed,
    JobEnded,
    SidecarFailed,
    StateRestored,
    StepDone,
    StepProtected,
    StepUnprotected,
    WorkerExited,
)
from holdfast.elastic.launch.run_folder import KEY
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.soak.striking import BALLAST

_PAUSE_S, _PAUSES = 1.0, 5
_GROWTH = 1.15
_SLACK = {"own": 32 << 20, "handles": 64, "threads": 32}
_SHARED_SLACK_BYTES = 32 << 20
_KEPT_SLACK = {"keys at the coordinator": 8, "files in the run directory": 16}
_KEYS_S = 0.5
_LEAST_SAMPLES = 40
_STEPS_UNDER_WAY = 4
_GRUMBLES = (
    "thread is still busy",
    "still running",
    "snapshots are skipped",
    "no slot became free",
)
MIB = 1 << 20


@dataclass(slots=True)
class SoakEvents:
    """The state of a job of ``ranks``, from its events; ``wrong`` lists forbidden outcomes.

    ``pauses`` are (seconds, step) without a completed step, by this process's ``clock``, as clocks
    of the job jump. ``safe`` is the newest step that must not be lost: a protected one as long as
    no more nodes are harmed than parity covers, otherwise that of the newest checkpoint. While the
    job is ``ending``, late workers are sent away.
    """

    ranks: int
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    generation: int = 0
    steps: int = 0
    restored: Counter[str] = field(default_factory=Counter)
    pauses: list[tuple[float, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ending: bool = False
    outcome: str = ""
    safe: int = -1
    protected: int = -1
    durable: int = -1
    _harmed: set[str] = field(default_factory=set)
    _world: int = 0
    _whole_from: int = 0
    _stepped_s: float = 0.0

    def begin(self) -> None:
        """Note the start of the job, with nothing in memory."""
        self.safe, self.protected, self._world, self._stepped_s = self.durable, -1, 0, 0.0
        self.ending = False
        self._harmed.clear()

    def take(self, events: Iterable[Event]) -> set[type[Event]]:
        """Apply events; return their kinds."""
        kinds = set[type[Event]]()
        for event in events:
            self._take(event)
            kinds.add(type(event))
        return kinds

    def _take(self, event: Event) -> None:
        match event:
            case StepDone():
                self._take_step(event)
            case GenerationProposed(generation=generation, ranks=ranks):
                self.generation, self._world = generation, len(ranks)
            case StepProtected():
                self._take_protected(event)
            case StateRestored(rank=0):
                self._take_restored(event)
            case CheckpointDone(step=step):
                self.durable = max(self.durable, step)
            case WorkerExited():
                self._take_exit(event)
            case SidecarFailed():
                self.counts["sidecar could not be started"] += 1
            case Detected(what=what):
                self.counts[f"detected {what}"] += 1
            case StepUnprotected():
                self.counts["unprotected for a while"] += 1
            case JobEnded(message=message):
                self.outcome = message

    def expect(self, harmed: set[str], *, parity: int) -> None:
        """Note that nodes are about to be harmed.

        They count as whole again once all ranks have protected a step that began later.
        """
        self._harmed |= harmed
        if harmed:
            self._whole_from = self.step + _STEPS_UNDER_WAY
        if len(self._harmed) > parity:
            self.safe = self.durable

    def _take_step(self, event: StepDone) -> None:
        now_s = self.clock()
        paused_s = now_s - self._stepped_s
        if self._stepped_s and paused_s > _PAUSE_S:
            pauses = [*self.pauses, (round(paused_s, 1), event.step)]
            self.pauses = sorted(pauses)[-_PAUSES:]
        self.steps += event.rank == 0
        self.step = max(self.step, event.step)
        self._stepped_s = now_s

    def _take_protected(self, event: StepProtected) -> None:
        self.protected = event.step
        whole = self._world == self.ranks and self.protected >= self._whole_from
        if whole and event.generation == self.generation:
            self._harmed.clear()
        if not self._harmed:
            self.safe = max(self.protected, self.durable)

    def _take_restored(self, event: StateRestored) -> None:
        step, tier = event.step, event.tier
        self.restored[tier] += 1
        if step < self.safe:
            self.wrong.append(
                f"generation {event.generation} restored step {step} ({tier}: {event.how}) "
                f"although step {self.safe} was protected and at most {sorted(self._harmed)} harmed"
            )
        self.safe = min(self.safe, step)
        self.durable = min(self.durable, step)  # later ones are of a future that was given up

    def _take_exit(self, event: WorkerExited) -> None:
        self.counts[f"worker {event.status}"] += 1
        expected = "SIGKILL" in event.status or event.status == "exit status 0" or self.ending
        if not expected:
            self.wrong.append(f"{event.seat} ended: {event.status}")


class Use:
    """The memory, open files and threads of every process over time, by part of the job.

    Shared memory is the used space of its file system, which includes removed files that are still
    mapped. The coordinator's keys and the files in the run directory are counted beside them.
    """

    def __init__(self, *, others_bytes: int) -> None:
        self._others_bytes = others_bytes
        self._largest: list[dict[str, dict[str, int]]] = []
        self._shared: list[int] = []
        self._kept: dict[str, list[int]] = defaultdict(list)
        self._each: dict[tuple[str, int], list[tuple[float, dict[str, int]]]] = defaultdict(list)

    def sample(self, launcher: LauncherProcess, now_s: float) -> None:
        """Take one sample."""
        pids = {"launcher": [launcher.pid], "coordinator": [launcher.coordinator_pid]}
        pids |= {"sidecar": [], "agent": [], "worker": []}
        for node in launcher.processes().values():
            pids["sidecar"].append(node.sidecar)
            pids["agent"].append(node.agent)
            pids["worker"] += node.workers.values()
        largest: dict[str, dict[str, int]] = {}
        for part, found in pids.items():
            uses = {pid: use for pid in found if pid and (use := use_of(pid))}
            for pid, use in uses.items():
                self._each[part, pid].append((now_s, use))
            largest[part] = {
                what: max((use[what] for use in uses.values()), default=0) for what in _SLACK
            }
        self._largest.append(largest)
        self._shared.append(BALLAST.others_bytes() - self._others_bytes)
        for what, count in kept_by(launcher).items():
            self._kept[what].append(count)

    def wrong(self) -> list[str]:
        """Return the resources that are larger in the last third than in the first two quarters.

        It compares 90th percentiles, of the quarters the larger: processes that have just begun are
        small, and a quarter may have no others.
        """
        found = []
        if len(self._largest) < _LEAST_SAMPLES:
            return []
        for part in self._largest[0]:
            for what, slack in _SLACK.items():
                early, late = self._early_late([each[part][what] for each in self._largest])
                if late > early * _GROWTH + slack:
                    found.append(f"{what} of the {part} grew from {early:,.0f} to {late:,.0f}")
        early, late = self._early_late(self._shared)
        if late > early * _GROWTH + _SHARED_SLACK_BYTES:
            found.append(f"shared memory grew from {early:,.0f} to {late:,.0f} bytes")
        for what, counts in self._kept.items():
            early, late = self._early_late(counts)
            if len(counts) >= _LEAST_SAMPLES and late > early + _KEPT_SLACK[what]:
                found.append(f"{what} grew from {early:.0f} to {late:.0f}")
        return found

    def table(self) -> list[str]:
        """Return the table for people, one string per line."""
        rows: list[tuple[str, ...]] = [
            ("process", "early MiB", "late", "most", "files", "threads", "oldest s", "grew MiB")
        ]
        for part in self._largest[0] if self._largest else ():
            lived_s, grew = self._oldest(part)
            rows.append(
                (
                    *self._sizes(part, [each[part]["own"] for each in self._largest]),
                    self._spread(part, "handles"),
                    self._spread(part, "threads"),
                    f"{lived_s:.0f}",
                    f"{grew / MIB:+.1f}",
                )
            )
        rows.append((*self._sizes("shared memory", self._shared), "", "", "", ""))
        return [*aligned(rows), *map(self._line, self._kept)]

    def _line(self, what: str) -> str:
        early, late = self._early_late(self._kept[what])
        return f"{what}: {early:.0f} → {late:.0f}"

    def _sizes(self, name: str, sizes: Sequence[int]) -> tuple[str, ...]:
        found = (*self._early_late(sizes), max(sizes, default=0))
        return name, *(f"{nbytes / MIB:.1f}" for nbytes in found)

    def _spread(self, part: str, what: str) -> str:
        early, late = self._early_late([each[part][what] for each in self._largest])
        return f"{early:.0f} → {late:.0f}"

    def _oldest(self, part: str) -> tuple[float, int]:
        """Return how long the oldest process was observed, and its growth in the second half."""
        seen = [each for (name, _), each in self._each.items() if name == part]
        lived = max(seen, key=lambda each: each[-1][0] - each[0][0], default=None)
        if lived is None:
            return 0.0, 0
        (began_s, _), (_, half), (end_s, end) = lived[0], lived[len(lived) // 2], lived[-1]
        return end_s - began_s, end["own"] - half["own"]

    @staticmethod
    def _early_late(values: Sequence[int]) -> tuple[float, float]:
        count = len(values)
        first, second = values[: count // 4], values[count // 4 : count // 2]
        return max(_most(first), _most(second)), _most(values[2 * count // 3 :])


def use_of(pid: int) -> dict[str, int]:
    """Return a process's private bytes (without shared memory), open files and threads."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        return {
            "own": int(fields["RssAnon"][0]) << 10,
            "threads": int(fields["Threads"][0]),
            "handles": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        }
    return {}


def kept_by(launcher: LauncherProcess) -> dict[str, int]:
    """Return the counts of what a job keeps; without keys while its coordinator does not answer."""
    keys, files = _KEPT_SLACK
    found = {}
    with contextlib.suppress(OSError):  # a folder has just been removed
        found[files] = sum(1 for _ in launcher.run_dir.rglob("*"))
    with contextlib.suppress(HoldfastError):
        key = RunKey.load(launcher.run_dir / KEY)
        address = launcher.coordinator_address
        with contextlib.closing(connect(address, key, timeout_s=_KEYS_S)) as coordinator:
            found[keys] = len(coordinator.range("")[0])
    return found


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return a table's lines; the first column is left-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def grumbles(logs: Path) -> Counter[str]:
    """Count the warnings in the processes' logs that are no failures but deserve a look."""
    return Counter(
        sentence
        for path in logs.glob("*")
        for line in path.read_text(errors="replace").splitlines()
        for sentence in _GRUMBLES
        if sentence in line
    )


def outcries(logs: Path) -> list[str]:
    """Return the uncaught errors in the processes' logs.

    Errors about a missing arena are left out: a lost machine's memory vanishes just before its
    processes.
    """
    found = []
    for path in sorted(logs.glob("*")):
        lines = path.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if line.startswith(("Traceback", "Fatal Python error")):
                rest = lines[at + 1 :]
                message = next((each for each in rest if each and not each.startswith(" ")), "")
                lost = message.startswith("FileNotFoundError") and str(ARENA_ROOT) in message
                if not lost:
                    found.append(f"{path.name}:{at + 1}: {message}")
    return found


def _most(found: Iterable[int]) -> float:
    values = list(found)
    return statistics.quantiles(values, n=10)[-1] if len(values) > 1 else float(sum(values))
