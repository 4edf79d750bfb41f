"""``make soak``: train for half an hour under random faults; memory stays flat, nothing is lost.

Every few seconds something is killed, stopped, slowed, filled or damaged, often two things at
once or one more during the recovery; machines go and return. At the end the weights must equal,
bit for bit, those of the same steps undisturbed; nothing that was protected may have been lost to
fewer faults than the parity makes good; no process may have failed by itself, and neither memory,
open files nor threads of any part may have grown. Which faults, in which order and after which
pauses follows from ``--seed``. At half time the whole job is ended and started anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from faults import FULL_BYTES, NODES, Fault, Kind, Setup, Stroke, strokes
from striking import Striker
from watching import Seen, Use, grumbles, outcries

from ckpt.arena import ARENA_ROOT
from elastic.events import EventReader
from elastic.launch import LOCAL_TIMING, LaunchConfig, Launcher, NodeSpec, python_command
from tools.leftovers import leftovers

TRAINING = Path(__file__).with_name("soak_training.py")
PARTS = 2
_ENDING_STEPS = 200
_WAIT_S = 180.0
_MOMENT_S = 10.0
_TICK_S, _SAMPLE_S = 0.02, 1.0
_OWN_MEMORY = "HOLDFAST_SOAK_OWN_MEMORY"


def own_shared_memory() -> bool:
    """Go on with shared memory of our own, that may be filled; return whether that could be had."""
    if _OWN_MEMORY in os.environ:
        return os.environ[_OWN_MEMORY] == "yes"
    mount = f"mount -t tmpfs -o size={FULL_BYTES} tmpfs {ARENA_ROOT}"
    for rights in ([], ["--user", "--map-root-user"]):
        unshare = ["unshare", *rights, "--mount", "sh", "-c"]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode
        ):
            continue
        os.environ[_OWN_MEMORY] = "yes"
        argv = [*unshare, f'{mount} && exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvp("unshare", argv)
    os.environ[_OWN_MEMORY] = "no"
    return False


class Soak:
    """What is done to a job and seen of it, all of it together in ``PARTS`` runs.

    Between two of them everything in memory is lost at once; the next goes on from the store, or
    from the nodes' disks.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, *, fills: bool) -> None:
        self._args, self._folder, self._fills = args, folder, fills
        self._setup = Setup.drawn(args.seed)
        self._strokes = strokes(args.seed, pause_s=tuple(args.pause), kinds=args.kinds)
        self._use = Use(others_bytes=shutil.disk_usage(ARENA_ROOT).used)
        self._seen = Seen(ranks=sum(NODES.values()))
        self._struck: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        """Train under faults; return what is wrong."""
        say(f"seed {self._args.seed}: {self._setup}")
        for number in range(PARTS):
            part = Part(self._launcher(number), self._seen, self._use, fills=self._fills)
            self._one(part, last=number == PARTS - 1)
            if self._wrong:
                break
        self._tell()
        return self._wrong + self._seen.wrong + self._use.wrong()

    def _launcher(self, number: int) -> Launcher:
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
            command=python_command(TRAINING, [str(word) for word in words]),
            nodes=tuple(nodes),
            wanted={"trainer": sum(NODES.values())},
            run_dir=folder / f"run-{number}",
            capture_output=True,
            max_attempts=10_000,
            node_restarts=10_000,
            timing=msgspec.structs.replace(LOCAL_TIMING, stop_grace_s=setup.patience_s),
        )
        return Launcher(config)

    @property
    def _end(self) -> Path:
        return self._folder / "end"

    def _one(self, part: Part, *, last: bool) -> None:
        """Run the job once, to its end or until it is ended."""
        launcher, seen = part.launcher, self._seen
        seen.begin()
        launcher.start()
        try:
            part.watch(_WAIT_S, until="protected")
            self._strike_on(part, seconds=self._args.minutes * 60 / PARTS)
            part.striker.settle()
            part.watch(0)
            seen.ending = True
            if last:
                self._end.write_text(str(seen.step + _ENDING_STEPS))
                part.watch(_WAIT_S, until="job_ended")
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
        self._wrong += [f"left behind: {each}" for each in leftovers(launcher.run)]

    def _strike_on(self, part: Part, *, seconds: float) -> None:
        over_s = time.monotonic() + seconds
        for stroke in self._strokes:
            if time.monotonic() + stroke.after_s > over_s or part.launcher.wait(0):
                return
            part.watch(stroke.after_s)
            back = [f"a machine returns: {node}" for node in part.striker.return_machines()]
            self._seen.expect(stroke.harmed, parity=self._setup.parity)
            done = [*back, *map(str, self._strike(part, stroke))]
            say(f"step {self._seen.step}; {', '.join(done) or f'{stroke.first}, nothing hit'}")

    def _strike(self, part: Part, stroke: Stroke) -> Iterator[Fault | str]:
        if not part.striker.strike(stroke.first):
            return
        yield stroke.first
        self._struck[stroke.name] += 1
        if stroke.then is None:
            return
        if stroke.moment:
            part.watch(_MOMENT_S, until=stroke.moment)
            yield f"at {stroke.moment!r}"
        if part.striker.strike(stroke.then):
            yield stroke.then

    def _tell(self) -> None:
        seen = self._seen
        pauses = ", ".join(f"{seconds:g} s at step {step}" for seconds, step in seen.pauses[::-1])
        say(f"steps: {seen.step}, made {seen.steps}; recoveries: {sum(seen.restored.values())}")
        say(f"strokes: {listed(self._struck)}")
        say(f"faults: {listed(self._faults)}")
        say(f"restored from: {listed(seen.restored)}")
        say(f"told: {listed(seen.told)}")
        say(f"logged: {listed(self._logged)}")
        say(f"longest pauses: {pauses or 'none'}")
        for line in self._use.table():
            say(line)


class Part:
    """One launched job, watched."""

    def __init__(self, launcher: Launcher, seen: Seen, use: Use, *, fills: bool) -> None:
        self.launcher, self._seen, self._use = launcher, seen, use
        self.striker = Striker(launcher, fills=fills)
        self._reader = EventReader(launcher.run_dir)
        self._sampled_s = 0.0

    def watch(self, seconds: float, *, until: str = "") -> None:
        """Read on for so long, or until an event of a kind is seen."""
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
    """Train the same steps undisturbed, on one rank; say whether the weights differ."""
    disturbed = json.loads((folder / "result.json").read_text())
    (folder / "end").write_text(str(disturbed["steps"]))
    words = ["--end", folder / "end", "--result", folder / "calm.json"]
    words += ["--width", Setup.drawn(seed).width]
    say(f"training {disturbed['steps']} steps undisturbed")
    argv = [sys.executable, str(TRAINING), *map(str, words)]
    if status := subprocess.run(argv, check=False).returncode:
        return [f"undisturbed training ended with status {status}"]
    calm = json.loads((folder / "calm.json").read_text())
    if calm == disturbed:
        return []
    return [f"the weights differ: {disturbed} under faults, {calm} undisturbed"]


def listed(counts: Mapping[str, int]) -> str:
    """Return counts for people, the largest first."""
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in by_count) or "none"


def say(text: str) -> None:
    """Tell how it goes."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pause", type=float, nargs=2, default=(1.0, 6.0), help="seconds between two strokes"
    )
    parser.add_argument(
        "--kinds",
        type=Kind,
        nargs="+",
        default=tuple(Kind),
        metavar="KIND",
        help=f"only these faults: {', '.join(map(repr, map(str, Kind)))}",
    )
    parser.add_argument("--keep", action="store_true", help="keep events and logs")
    return parser.parse_args()


def main() -> int:
    """Soak; the status is 0 when nothing is wrong."""
    args = parse()
    fills = own_shared_memory()
    if not fills:
        say("shared memory is not filled: no mount namespace of our own can be had (unshare)")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    wrong = Soak(args, folder, fills=fills).run()
    if (folder / "result.json").exists():
        wrong += compare(folder, args.seed)
    for each in wrong:
        say(f"WRONG: {each}")
    if wrong or args.keep:
        say(f"events and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if wrong:
        say(f"the same again: make soak ARGS='{' '.join(map(quoted, sys.argv[1:]))}'")
    say("failed" if wrong else "all well")
    return 1 if wrong else 0


def quoted(word: str) -> str:
    """Return a word of a command line for use in quotation marks of the other kind."""
    return f'"{word}"' if " " in word else word


if __name__ == "__main__":
    sys.exit(main())
