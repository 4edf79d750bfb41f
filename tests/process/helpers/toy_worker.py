"""A worker without torch: it takes part in generations and pretends to train.

It makes ``--steps N`` steps of ``--seconds S`` (rank ``--slow R`` takes five times as long). Rank 0
keeps the step number in the file ``--progress``: no snapshot is taken or restored. ``--crash``
fails at once. ``--user-error`` fails permanently. ``--hang`` stops beating at step 3 of the first
generation (``hard``: inside native code that holds the interpreter's lock; ``paused``: in an
announced pause; ``meet``: all ranks, waiting for each other; ``always``: the same in every
generation). ``--late`` fails after its part is complete. ``--until FILE`` ends once the file
exists. ``--asks FILE``: rank 0 asks for the numbers of workers in the file, as JSON, once it
exists; then trainers also halt at the end of a step when they are told to, and others hand over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.errors import Stopped
from holdfast.elastic.events import RankReformed, RolesAsked, StepDone, TrainingResumed
from holdfast.elastic.membership.records import GenerationRecord, JobSpec


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--slow", type=int)
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--user-error", action="store_true")
    parser.add_argument("--hang", choices=("soft", "hard", "paused", "meet", "always"))
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--progress", type=Path)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--asks", type=Path)
    args = parser.parse_args()
    channel = connect()
    if args.crash:
        channel.fail("ValueError: this script always crashes", user_error=False)
        raise SystemExit(3)
    if args.user_error:
        channel.fail("checkpoint x is of another model: choose another", user_error=True)
        raise SystemExit(1)
    try:
        if channel.role != "trainer":
            channel.ready(after=0, spec=None, info={"who": channel.seat})
            version = 0
            while True:
                version = channel.await_roster(after=version, timeout_s=0.1 if args.asks else 1.0)
                if channel.leaving():
                    channel.handed_over(generation=1, step=0)
        train(channel, args)
    except Stopped:
        return 0
    return 7 if args.late else 0


def train(channel: Channel, args: argparse.Namespace) -> None:
    after, spec = 0, JobSpec(parity=1)
    while True:
        channel.ready(after=after, spec=spec, info={"store": "nowhere"})
        record = channel.await_generation(after=after)
        after = record.number
        if run_generation(channel, record, args):
            channel.done({"steps": args.steps})
            return


def hang(channel: Channel, how: str) -> None:
    if how == "paused":
        channel.beat(step=3, phase=WorkerPhase.PAUSE, limit_s=1.5)
    if how == "hard":
        re.match("(a+)+b", "a" * 64)
    time.sleep(1000)


def run_generation(channel: Channel, record: GenerationRecord, args: argparse.Namespace) -> bool:
    rank = next(m.rank for m in record.members if m.incarnation == channel.incarnation)
    step = int(args.progress.read_text() or 0) if args.progress.exists() else 0
    world = len(record.members)
    asked = b""
    channel.emit(RankReformed(generation=record.number, rank=rank, world=world))
    channel.emit(TrainingResumed(generation=record.number, step=step))
    while step < args.steps and not (args.until and args.until.exists()):
        if channel.fenced(record.number):
            return False
        if args.asks and channel.halts(record.number):
            channel.halted(generation=record.number, step=step)
            while not channel.fenced(record.number):
                time.sleep(0.005)
            return False
        if args.asks and rank == 0 and args.asks.exists() and args.asks.read_bytes() != asked:
            asked = args.asks.read_bytes()
            channel.emit(RolesAsked(roles=json.loads(asked), reason="a file says so"))
        channel.beat(step=step, phase=WorkerPhase.COMPUTE)
        seconds = args.seconds * (5 if rank == args.slow else 1)
        time.sleep(seconds)
        alone = args.hang in ("soft", "hard", "paused")
        if alone and step == 3 and record.number == 1 and rank == 0:
            hang(channel, args.hang)
        if step == 3 and (args.hang == "always" or (args.hang == "meet" and record.number == 1)):
            channel.beat(step=step, phase=WorkerPhase.MEET)
            while not channel.fenced(record.number):
                time.sleep(0.005)
            return False
        step += 1
        if rank == 0:
            fresh = args.progress.with_suffix(f".{os.getpid()}")
            fresh.write_text(str(step))
            fresh.replace(args.progress)
        at = {"step": step, "generation": record.number, "rank": rank}
        channel.emit(StepDone(**at, seconds=seconds, microbatches=1))
    channel.beat(step=step, phase=WorkerPhase.IDLE)
    return not channel.fenced(record.number)


if __name__ == "__main__":
    sys.exit(main())
