"""Training for minutes or hours under random faults.

Every few seconds a part is killed, stopped, slowed, filled or damaged, often two parts at once or
another one during the recovery; machines leave and return; the launcher is killed and started
again, and so is the coordinator; wall clocks jump and drift, disks fail, are full or slow. At the
end the weights must equal, bit
for bit, those of the same undisturbed steps. No protected step may be lost to fewer faults than
parity covers. No process may fail by itself. Neither memory nor open files nor threads of any part
may grow. The seed determines the faults, their order and the pauses. Half-way the whole job is
ended and started again.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.elastic.events import Event, JobEnded, StepProtected
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.config import APART_TIMING, LaunchConfig, NodeSpec
from holdfast.tools.chaos.real.launching.process import LauncherProcess
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.soak.striking import SoakStriker
from holdfast.tools.chaos.soak.strokes import (
    NODES,
    OF_CLOCKS,
    OF_DISKS,
    SoakFault,
    SoakFaultKind,
    SoakSetup,
    Stroke,
    strokes,
)
from holdfast.tools.chaos.soak.watching import SoakEvents, Use, grumbles, outcries
from holdfast.tools.leftovers import leftovers

TRAINING: Final = (sys.executable, "-u", "-m", "holdfast.tools.chaos.workloads.soaked")
PARTS: Final = 2
LONGEST: Final = 72
_ENDING_STEPS: Final = 200
_WAIT_S: Final = 180.0
_RETURN_S: Final = 120.0
_MOMENT_S: Final = 10.0
_TICK_S: Final = 0.02
_SAMPLE_S: Final = 1.0


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a soak; ``pause_s`` are the least and the most seconds between two strokes."""

    minutes: float
    seed: int
    pause_s: tuple[float, float]
    kinds: tuple[SoakFaultKind, ...] = tuple(SoakFaultKind)


def soak(options: SoakOptions, folder: Path, *, fills: bool) -> list[str]:
    """Soak, and return everything that is wrong; events and logs are in ``folder``.

    ``fills``: shared memory is private and may be filled.
    """
    wrong = Soak(options, folder, fills=fills).run()
    if (folder / "result.json").exists():
        wrong += compare(folder, options.seed)
    return wrong


class Soak:
    """The state of a soak: strokes and observations over all ``PARTS`` runs of the job.

    Between two runs all memory is lost at once; the next run resumes from the store or from the
    nodes' disks.
    """

    def __init__(self, options: SoakOptions, folder: Path, *, fills: bool) -> None:
        self._options, self._folder, self._fills = options, folder, fills
        self._setup = SoakSetup.drawn(options.seed)
        self._strokes = strokes(options.seed, pause_s=options.pause_s, kinds=options.kinds)
        self._use = Use(others_bytes=shutil.disk_usage(ARENA_ROOT).used)
        self._seen = SoakEvents(ranks=sum(NODES.values()))
        self._struck: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        """Train under faults; return everything that is wrong."""
        say(f"seed {self._options.seed}: {self._setup}")
        for number in range(PARTS):
            part = SoakedJob(
                self._launcher(number),
                self._seen,
                self._use,
                folder=self._folder,
                fills=self._fills,
            )
            self._one(part, last=number == PARTS - 1)
            if self._wrong:
                break
        self._tell()
        if self._wrong:  # cut short: too little was seen to judge resources
            return self._wrong + self._seen.wrong
        return self._seen.wrong + self._use.wrong()

    def _launcher(self, number: int) -> LauncherProcess:
        setup, folder = self._setup, self._folder
        words: list[object] = ["--end", self._end, "--result", folder / "result.json"]
        words += ["--checkpoint", folder / "checkpoints", "--parity", setup.parity]
        words += ["--width", setup.width]
        words += ["--disk", folder / "disk"] if setup.disk else []
        words += ["--incremental"] if setup.incremental else []
        nodes = (
            NodeSpec(name=name, domain=name, slots={"trainer": slots})
            for name, slots in NODES.items()
        )
        config = LaunchConfig(
            command=(*TRAINING, *map(str, words)),
            nodes=tuple(nodes),
            wanted={"trainer": sum(NODES.values())},
            run_dir=folder / f"run-{number}",
            capture_output=True,
            max_attempts=10_000,
            node_restarts=10_000,
            return_s=_RETURN_S,
            timing=msgspec.structs.replace(APART_TIMING, stop_grace_s=setup.patience_s),
        )
        return LauncherProcess(config)

    @property
    def _end(self) -> Path:
        return self._folder / "end"

    def _one(self, part: SoakedJob, *, last: bool) -> None:
        """Run the job once, to its end or until the soak ends it."""
        launcher, seen = part.launcher, self._seen
        seen.begin()
        part.start(self._options.kinds)
        try:
            part.watch(_WAIT_S, until=StepProtected)
            self._strike_on(part, seconds=self._options.minutes * 60 / PARTS)
            part.striker.settle()
            part.watch(0)
            seen.ending = True
            if last:
                self._end.write_text(str(seen.step + _ENDING_STEPS))
                part.watch(_WAIT_S, until=JobEnded)
            outcome = launcher.wait(_WAIT_S if last else 0)
        finally:
            launcher.kill()
            launcher.wait(_WAIT_S)
        part.watch(0)
        if (last or outcome) and not (outcome and outcome.ok):
            self._wrong.append(f"the job failed: {seen.outcome or outcome}")
        self._faults += part.striker.count
        self._logged += grumbles(launcher.run_dir / "logs")
        self._wrong += outcries(launcher.run_dir / "logs")
        if launcher.begun > 1:
            self._wrong.append("a launcher that was started again did not continue the job")
        self._wrong += [f"left behind: {each}" for each in leftovers(launcher.run)]

    def _strike_on(self, part: SoakedJob, *, seconds: float) -> None:
        over_s = time.monotonic() + seconds
        for stroke in self._strokes:
            if time.monotonic() + stroke.after_s > over_s or part.launcher.wait(0):
                return
            part.watch(stroke.after_s)
            back = [f"a machine returns: {node}" for node in part.striker.return_machines()]
            self._seen.expect(stroke.harmed, parity=self._setup.parity)
            done = [*back, *map(str, self._strike(part, stroke))]
            say(f"step {self._seen.step}; {', '.join(done) or f'{stroke.first}, nothing hit'}")

    def _strike(self, part: SoakedJob, stroke: Stroke) -> Iterator[SoakFault | str]:
        if not part.striker.strike(stroke.first):
            return
        yield stroke.first
        self._struck[stroke.name] += 1
        if stroke.then is None:
            return
        if stroke.moment:
            part.watch(_MOMENT_S, until=stroke.moment)
            yield f"at {stroke.moment.tag()!r}"
        if part.striker.strike(stroke.then):
            yield stroke.then

    def _tell(self) -> None:
        seen = self._seen
        pauses = ", ".join(
            f"{seconds:g} s before step {step}" for seconds, step in seen.pauses[::-1]
        )
        spared = [f"'{kind}'" for kind in self._options.kinds if not self._faults[kind]]
        say(f"steps: {seen.step} complete, {seen.steps - seen.step} of them made again")
        say(f"strokes: {listed(self._struck)}")
        say(f"faults: {listed(self._faults)}")
        if spared:
            say(f"faults that hit nothing: {', '.join(spared)}")
        say(f"the state came from: {listed(sources(seen.restored))}")
        say(f"events: {listed(seen.counts)}")
        say(f"warnings in logs: {listed(self._logged)}")
        say(f"longest pauses between two steps: {pauses or 'none above 1 s'}")
        say("the largest process of each kind, early (first half) and late (last third):")
        for line in self._use.table():
            say(line)


class SoakedJob:
    """A launched job under observation."""

    def __init__(
        self,
        launcher: LauncherProcess,
        seen: SoakEvents,
        use: Use,
        *,
        folder: Path,
        fills: bool,
    ) -> None:
        self.launcher, self._seen, self._use = launcher, seen, use
        self.striker = SoakStriker(launcher, folder, fills=fills)
        self._reader = EventReader(launcher.run_dir)
        self._sampled_s = 0.0

    def start(self, kinds: Collection[SoakFaultKind]) -> None:
        """Start the job, with the environment that faults of these kinds need."""
        try:
            env = self.striker.prepare(kinds)
        except ScenarioError as error:
            spared = [repr(str(kind)) for kind in kinds if kind in {*OF_CLOCKS, *OF_DISKS}]
            say(f"the soak leaves out {', '.join(spared)}: {error}")
        else:
            self.launcher.config = dataclasses.replace(self.launcher.config, agent_env=env)
        self.launcher.start()

    def watch(self, seconds: float, *, until: type[Event] | None = None) -> None:
        """Read events for ``seconds``, or until an event of a kind is seen."""
        end_s = time.monotonic() + seconds
        while True:
            kinds = self._seen.take(self._reader.new())
            now_s = time.monotonic()
            if now_s - self._sampled_s > _SAMPLE_S:
                self._sampled_s = now_s
                self._use.sample(self.launcher, now_s)
            if now_s >= end_s or until in kinds or self.launcher.wait(0):
                return
            time.sleep(min(_TICK_S, end_s - now_s))


def compare(folder: Path, seed: int) -> list[str]:
    """Train the same steps undisturbed on one rank; return a message if the weights differ."""
    disturbed = json.loads((folder / "result.json").read_text())
    (folder / "end").write_text(str(disturbed["steps"]))
    words: list[object] = ["--end", folder / "end", "--result", folder / "calm.json"]
    words += ["--width", SoakSetup.drawn(seed).width]
    say(f"training {disturbed['steps']} steps undisturbed")
    argv = [*TRAINING, *map(str, words)]
    if status := subprocess.run(argv, check=False).returncode:
        return [f"undisturbed training ended with status {status}"]
    calm = json.loads((folder / "calm.json").read_text())
    if calm == disturbed:
        say(f"the weights equal the undisturbed ones: {calm['hash']}")
        return []
    return [f"the weights differ: {disturbed} under faults, {calm} undisturbed"]


def sources(restored: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of recoveries by the words for their tiers."""
    return {"nothing: begun anew" if k == "none" else k: n for k, n in restored.items()}


def listed(counts: Mapping[str, int]) -> str:
    """Return counts for people, the largest first; long names are cut."""
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} × {cut(name)}" for name, count in by_count) or "none"


def cut(text: str) -> str:
    """Return a text of at most ``LONGEST`` characters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()
