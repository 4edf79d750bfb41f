"""A training script on a multi-axis mesh, which pauses where the test changes the world.

The first generation does not go beyond ``--first`` steps, and reports when these are protected; no
generation of fewer than ``--ranks`` ranks goes beyond ``--then`` (0: no such limit).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Literal

import mesh_bodies
import pipeline_bodies
import torch
from mesh_bodies import BATCH

from holdfast import elastic
from holdfast.elastic.events import TrainingHeld
from holdfast.elastic.groups import reform
from holdfast.elastic.groups.circles import WorldScale


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    if args.large:
        reform.SCALE = WorldScale(many=1, fan_out=2)
    mesh = elastic.Mesh(tp=args.tp, ep=args.ep, pp=args.pp, shard=args.shard)
    batch = elastic.Batch(microbatches=args.microbatches, size=BATCH.size)
    train = mesh_bodies.train if args.pp == 1 else pipeline_bodies.train

    def hold(run: elastic.Run) -> None:
        said = False
        while (run.generation == 1 and run.completed >= args.first) or (
            args.then and run.world_size < args.ranks and run.completed >= args.then
        ):
            run.check()
            if not said and run.protection.step == run.completed:
                elastic.session_of(run).emit(TrainingHeld(step=run.completed))
                said = True
            time.sleep(0.005)

    exact: Literal["float32"] | None = "float32" if args.exact else None

    @elastic.resilient(mesh=mesh, batch=batch, exact=exact, seed=7)
    def body(run: elastic.Run) -> None:
        found = train(run, args.kind, steps=args.steps, hold=hold)
        Path(args.results, f"{run.rank}.json").write_text(
            json.dumps({**found, "mesh": run.mesh.shape})
        )

    body()


def sizes(text: str) -> int | tuple[int, ...]:
    """Return the size of an axis, or several in the order of preference."""
    found = tuple(map(int, text.split(",")))
    return found if len(found) > 1 else found[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress")  # of other workers
    parser.add_argument("--results", required=True)
    parser.add_argument("--tp", type=sizes, default=1)
    parser.add_argument("--ep", type=sizes, default=1)
    parser.add_argument("--pp", type=sizes, default=1)
    parser.add_argument("--shard", type=sizes)
    parser.add_argument("--microbatches", type=int, default=BATCH.microbatches)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--large", action="store_true", help="form as a large world does")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--then", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    main(parser.parse_args())
