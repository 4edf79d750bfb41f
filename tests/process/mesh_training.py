"""A training script on a mesh of several axes, which stands still where the test changes the world.

The first generation does not go beyond ``--first`` steps, and says when these are protected; no
generation of fewer than ``--ranks`` ranks goes beyond ``--then`` (0: no such limit).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import mesh_bodies
import pipeline_bodies
import torch
from mesh_bodies import BATCH

import elastic


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    tp = tuple(map(int, args.tp.split(",")))
    mesh = elastic.Mesh(tp=tp if len(tp) > 1 else tp[0], pp=args.pp)
    train = pipeline_bodies.train if args.pp > 1 else mesh_bodies.train

    def hold(run: elastic.Run) -> None:
        said = False
        while (run.generation == 1 and run.completed >= args.first) or (
            args.then and run.world_size < args.ranks and run.completed >= args.then
        ):
            run.check()
            if not said and run.protection.step == run.completed:
                run.emit("held", step=run.completed)
                said = True
            time.sleep(0.005)

    @elastic.resilient(mesh=mesh, batch=BATCH, exact=args.exact, seed=7)
    def body(run: elastic.Run) -> None:
        found = train(run, args.kind, steps=args.steps, hold=hold)
        if run.is_leader:
            Path(args.result).write_text(json.dumps({**found, "mesh": run.mesh.shape}))

    body()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress")  # of other workers
    parser.add_argument("--result", required=True)
    parser.add_argument("--tp", default="2")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--kind", default="fsdp_tp")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--then", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    main(parser.parse_args())
