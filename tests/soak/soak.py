"""``make soak``: train for half an hour under random faults; memory stays flat, nothing is lost.

Every few seconds something is killed, stopped, or damaged. At the end the weights must equal, bit
for bit, those of the same steps undisturbed, and neither the memory of any process nor shared
memory may have grown. The faults follow from ``--seed``, when they hit does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.arena import arena_path
from elastic.agent.reporting import NodeProcesses
from elastic.events import EventReader
from elastic.launch import LaunchConfig, Launcher, NodeSpec, python_command
from tools.leftovers import leftovers

TRAINING = Path(__file__).with_name("soak_training.py")
NODES = ("a", "b", "c")
PER_NODE = 2
_ENDING_STEPS = 200
_WAIT_S = 120.0
_GROWTH = 1.15
_SLACK_BYTES = 32 << 20
_PAUSE_S, _PAUSES = 1.0, 5
_RETURN = 0.3
_LEAST_SAMPLES = 20


@dataclass(slots=True)
class Seen:
    """What the events said so far; ``pauses`` are (seconds, step) in which no step was made."""

    step: int = 0
    restored: dict[str, int] = field(default_factory=dict)
    pauses: list[tuple[float, int]] = field(default_factory=list)
    outcome: str = ""
    stepped_s: float = 0.0

    def take(self, reader: EventReader) -> None:
        """Read on."""
        for event in reader.new():
            if event["kind"] == "step":
                self._take_step(int(event["step"]), float(event["t"]))
            elif event["kind"] == "restored" and event["rank"] == 0:
                tier = str(event["tier"])
                self.restored[tier] = self.restored.get(tier, 0) + 1
            elif event["kind"] == "job_ended":
                self.outcome = str(event["message"])

    def _take_step(self, step: int, at_s: float) -> None:
        paused_s = at_s - self.stepped_s
        if self.stepped_s and paused_s > _PAUSE_S:
            self.pauses = sorted([*self.pauses, (round(paused_s, 1), step)])[-_PAUSES:]
        self.step, self.stepped_s = max(self.step, step), max(self.stepped_s, at_s)


class Faults:
    """Does harm to one launched job."""

    def __init__(self, launcher: Launcher, draw: random.Random) -> None:
        self._launcher, self._draw = launcher, draw
        self._away: set[str] = set()
        self.count: dict[str, int] = {}
        self._kinds: dict[str, Callable[[str, NodeProcesses], bool]] = {
            "kill a worker": self._kill_worker,
            "kill a sidecar": self._kill_sidecar,
            "kill an agent": self._kill_agent,
            "kill all of a node": self._kill_node,
            "lose a machine": self._lose_machine,
            "stop a sidecar": self._stop_sidecar,
            "stop a worker": self._stop_worker,
            "flip a bit": self._flip_bit,
        }

    def strike(self) -> str:
        """Do one thing to one node; return what, empty where there was nothing to hit."""
        nodes = self._launcher.processes()
        if not nodes:
            return ""
        if self._away and self._draw.random() < _RETURN:
            node = min(self._away)
            self._away.remove(node)
            self._launcher.return_machine(node)
            return f"a machine returns: {node}"
        kind = self._draw.choice(sorted(self._kinds))
        node = self._draw.choice(sorted(nodes))
        try:
            if not self._kinds[kind](node, nodes[node]):
                return ""
        except (ProcessLookupError, FileNotFoundError):
            return ""
        self.count[kind] = self.count.get(kind, 0) + 1
        return f"{kind}: {node}"

    def _kill_worker(self, node: str, found: NodeProcesses) -> bool:
        if not found.workers:
            return False
        os.kill(self._draw.choice(sorted(found.workers.values())), signal.SIGKILL)
        return True

    def _kill_sidecar(self, node: str, found: NodeProcesses) -> bool:
        if found.sidecar:
            os.kill(found.sidecar, signal.SIGKILL)
        return bool(found.sidecar)

    def _kill_agent(self, node: str, found: NodeProcesses) -> bool:
        os.kill(found.agent, signal.SIGKILL)
        return True

    def _kill_node(self, node: str, found: NodeProcesses) -> bool:
        for pid in (found.agent, found.sidecar, *found.workers.values()):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return True

    def _lose_machine(self, node: str, found: NodeProcesses) -> bool:
        lost = len(self._launcher.processes()) > 1 and bool(self._launcher.lose_machine(node))
        if lost:
            self._away.add(node)
        return lost

    def _stop_sidecar(self, node: str, found: NodeProcesses) -> bool:
        return bool(found.sidecar) and self._pause(found.sidecar)

    def _stop_worker(self, node: str, found: NodeProcesses) -> bool:
        return bool(found.workers) and self._pause(
            self._draw.choice(sorted(found.workers.values()))
        )

    def _pause(self, pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.05, 1.0))
        with contextlib.suppress(ProcessLookupError):  # its agent put it down
            os.kill(pid, signal.SIGCONT)
        return True

    def _flip_bit(self, node: str, found: NodeProcesses) -> bool:
        files = sorted(arena_path(self._launcher.run, node).glob("*.slot"))
        files += sorted(arena_path(self._launcher.run, node).glob("*.row"))
        if not files:
            return False
        path = self._draw.choice(files)
        with path.open("r+b") as file:
            at = self._draw.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << self._draw.randrange(8)]))
        return True


def await_step(step: int, seen: Seen, reader: EventReader) -> None:
    """Wait until the job has come so far."""
    deadline_s = time.monotonic() + _WAIT_S
    while seen.step < step and time.monotonic() < deadline_s:
        time.sleep(0.05)
        seen.take(reader)


def resident_bytes(pid: int) -> int:
    """Return a process's own memory: what it shares with nobody."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def memory(launcher: Launcher) -> dict[str, int]:
    """Return the largest process of each kind, and all shared memory, in bytes."""
    found = {"launcher": resident_bytes(os.getpid()), "sidecar": 0, "agent": 0, "worker": 0}
    for node in launcher.processes().values():
        found["sidecar"] = max(found["sidecar"], resident_bytes(node.sidecar))
        found["agent"] = max(found["agent"], resident_bytes(node.agent))
        for pid in node.workers.values():
            found["worker"] = max(found["worker"], resident_bytes(pid))
    found["shared"] = 0
    for node_name in NODES:
        for path in arena_path(launcher.run, node_name).glob("*"):
            with contextlib.suppress(OSError):
                found["shared"] += path.stat().st_blocks * 512
    return found


def grown(samples: list[dict[str, int]]) -> list[str]:
    """Say which kind of memory is larger in the last third than in the second quarter.

    Compared is what nine of ten samples stay below: processes that have just begun are small.
    """
    count = len(samples)
    complaints = []
    for kind in samples[0] if count >= _LEAST_SAMPLES else ():
        early = _most(each[kind] for each in samples[count // 4 : count // 2])
        late = _most(each[kind] for each in samples[2 * count // 3 :])
        if late > early * _GROWTH + _SLACK_BYTES:
            complaints.append(f"{kind} grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB")
    return complaints


def _most(found: Iterable[int]) -> float:
    return statistics.quantiles(found, n=10)[-1]


def train(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run the job under faults; return what is wrong."""
    end, result = folder / "end", folder / "result.json"
    words = ["--end", end, "--result", result, "--checkpoint", folder / "checkpoints"]
    launcher = Launcher(
        LaunchConfig(
            command=python_command(TRAINING, [str(word) for word in words]),
            nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": PER_NODE}) for n in NODES),
            wanted={"trainer": len(NODES) * PER_NODE},
            run_dir=folder / "run",
            capture_output=True,
            max_attempts=10_000,
            node_restarts=10_000,
        )
    )
    draw = random.Random(f"holdfast soak {args.seed}")
    faults, samples, seen = Faults(launcher, draw), list[dict[str, int]](), Seen()
    launcher.start()
    reader = EventReader(folder / "run")
    try:
        await_step(1, seen, reader)
        over_s = time.monotonic() + args.minutes * 60
        while time.monotonic() < over_s and launcher.wait(0) is None:
            time.sleep(draw.uniform(*args.pause))
            seen.take(reader)
            done = faults.strike()
            samples.append(memory(launcher))
            say(f"step {seen.step}; {done or 'nothing hit'}; {_megabytes(samples[-1])}")
        seen.take(reader)
        end.write_text(str(seen.step + _ENDING_STEPS))
        outcome = launcher.wait(_WAIT_S)
    finally:
        launcher.kill()
        launcher.wait(_WAIT_S)
    seen.take(reader)
    say(f"faults: {faults.count}; restored from: {seen.restored}")
    pauses = ", ".join(f"{seconds:g} s at step {step}" for seconds, step in seen.pauses[::-1])
    say(f"longest pauses: {pauses or 'none'}")
    wrong = [] if outcome and outcome.ok else [f"the job failed: {seen.outcome or outcome}"]
    wrong += [f"left behind: {each}" for each in leftovers(launcher.run)]
    return wrong + grown(samples)


def compare(folder: Path) -> list[str]:
    """Train the same steps undisturbed, on one rank; say whether the weights differ."""
    disturbed = json.loads((folder / "result.json").read_text())
    (folder / "end").write_text(str(disturbed["steps"]))
    words = [str(TRAINING), "--end", str(folder / "end"), "--result", str(folder / "calm.json")]
    say(f"training {disturbed['steps']} steps undisturbed")
    subprocess.run([sys.executable, *words], check=True)
    calm = json.loads((folder / "calm.json").read_text())
    if calm == disturbed:
        return []
    return [f"the weights differ: {disturbed} under faults, {calm} undisturbed"]


def _megabytes(found: dict[str, int]) -> str:
    return ", ".join(f"{kind} {nbytes / 2**20:.0f}" for kind, nbytes in found.items()) + " MiB"


def say(text: str) -> None:
    """Tell how it goes."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main() -> int:
    """Soak; the status is 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pause", type=float, nargs=2, default=(1.0, 6.0), help="seconds between two faults"
    )
    parser.add_argument("--keep", action="store_true", help="keep events and logs")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    wrong = train(args, folder)
    if (folder / "result.json").exists():
        wrong += compare(folder)
    for each in wrong:
        say(f"WRONG: {each}")
    if wrong or args.keep:
        say(f"events and logs are in {folder}")
    else:
        subprocess.run(["rm", "-r", str(folder)], check=True)
    say("failed" if wrong else "all well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
