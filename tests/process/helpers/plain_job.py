"""A job without torch and Holdfast: two ranks, which all restart if one of them dies.

Every rank saves its progress with every step, and the job resumes from the smallest one. With
``--forgets`` it begins its data again instead of resuming it; with ``--hangs`` it hangs after a
restart; with ``--leaves`` one of its processes stays behind. With ``--gate STEP:NUMBER`` that step
waits for the strike of that number if it was drawn, so that the strike comes even on a slow
machine. No rank begins a step before all ranks have completed the previous one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.tools import chaos

RANKS = 2
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def train(args: argparse.Namespace, rank: int) -> None:
    """Be a rank: take the steps that are left, and tell them."""
    gates = dict(gate.split(":") for gate in args.gate)
    for step in range(args.start, args.steps):
        await_strike(gates.get(str(step)))
        while saved(args.folder) < step:
            time.sleep(0.002)
        if args.hangs and int(os.environ[RESTARTS]):
            time.sleep(3600)
        number = step - args.start if args.forgets else step
        chaos.samples(step, [RANKS * number + rank])
        chaos.state_hash(step, f"{number}")
        time.sleep(args.pace)
        chaos.step(step)
        save(args.folder / f"rank-{rank}", step + 1)


def await_strike(number: str | None) -> None:
    """Wait until a strike was done, if it is one of this run's and not of the calm one."""
    folder = Path(os.environ["HOLDFAST_HISTORY"])
    if number is None or folder.name == "calm":
        return
    drawn = json.loads((folder.parent / "strikes.json").read_text())
    event_log = folder / "events-chaos.jsonl"
    while int(number) in {strike["number"] for strike in drawn}:
        if event_log.exists() and f'"number":{number},' in event_log.read_text():
            return
        time.sleep(0.01)


def save(path: Path, step: int) -> None:
    """Write the number of complete steps, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(step))
    fresh.replace(path)


def saved(folder: Path) -> int:
    """Return how many steps all ranks have complete."""
    paths = [folder / f"rank-{rank}" for rank in range(RANKS)]
    return min(int(path.read_text()) if path.exists() else 0 for path in paths)


def ranks(args: argparse.Namespace, restarts: int) -> bool:
    """Run all ranks once; return whether they came to the end."""
    processes, start = [], saved(args.folder)
    for rank in range(RANKS):
        save(args.folder / f"rank-{rank}", start)  # what lies beyond is undone
        env = {**os.environ, "RANK": str(rank), RESTARTS: str(restarts)}
        argv = [sys.executable, *sys.argv, f"--start={start}"]
        processes.append(subprocess.Popen(argv, env=env))
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.01)
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    return not any(codes)


def main() -> None:
    """Be a rank, or start them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pace", type=float, default=0.03)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--gate", action="append", default=[])
    for name in ("--forgets", "--hangs", "--leaves"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args, int(os.environ["RANK"]))
        return
    if args.leaves:
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    restarts = 0
    while not ranks(args, restarts):
        restarts += 1


if __name__ == "__main__":
    main()
