"""An island that takes very little time: its name and its way of sharding are flags.

With ``--gate STEP FILE`` it waits once that step is complete, until the file exists. With
``--epochs N`` the logbook deals it the samples; with ``--history DIR`` it reports those that it
trains. With ``--guard N`` a `LossGuard` goes back N steps; ``--fault STEP KIND`` makes a fault in
that step, once: its loss is not finite (``loss``), or its weights are multiplied by a number.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tiny_training import wait_for
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.islands import tensors
from holdfast.tools import chaos
from holdfast.tools.chaos.hooks import HISTORY


def settings(args: argparse.Namespace) -> holdfast.Islands:
    """Return the island that the flags say."""
    return holdfast.Islands(
        name=args.name,
        meet=args.meet,
        every=args.every,
        portions=2,
        overlap=1 if args.least_every else 2,
        bits=args.bits,
        wait=holdfast.Quorum(args.quorum) if args.quorum else "all",
        patience_s=args.patience,
        founders=args.founders,
        least_every=args.least_every,
        data="dealt" if args.epochs or args.undealt else "own",
        uplink=args.line,
        downlink=args.line,
        key=args.key,
        topology=args.topology,
    )


def guard(steps_back: int) -> elastic.LossGuard:
    """Return a guard that goes back so many steps, from a leap too."""
    return elastic.LossGuard(
        nonfinite="rollback",
        spike="rollback",
        factor=1e4,
        window=8,
        warmup=2,
        steps_back=steps_back,
    )


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    if args.history:
        os.environ[HISTORY] = args.history
    tensors.LEAST_BYTES = tensors.LEAST_ROW_BYTES = 1  # of small tensors, too, few rows are read
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    faults = {int(step): kind for step, kind in args.fault}

    @elastic.resilient(
        batch=elastic.Batch(microbatches=4, size=2),
        exact="float32",
        checkpoint=args.checkpoint
        and elastic.Checkpoints(args.checkpoint, every=args.checkpoint_every),
        snapshots=elastic.Snapshots(parity=args.parity),
        islands=settings(args),
        loss_guard=guard(args.guard) if args.guard else None,
    )
    def train(run: elastic.Run) -> None:
        layers = nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 17), nn.Tanh(), nn.Linear(17, 1)
        model = nn.Sequential(*layers)
        if args.fsdp:
            fully_shard(model, mesh=run.data_mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        loop = run.steps(args.steps)
        if args.epochs:
            numbered = run.loader(list(enumerate(data)), batch=8, num_workers=args.workers)
            loop = run.epochs(args.epochs, numbered)
        for step in loop:
            if args.gate and step == int(args.gate[0]):
                wait_for(Path(args.gate[1]), run)
            if args.stop and step == args.stop:
                run.stop()
            trained: list[int] = []
            fault = faults.pop(step, "")
            for batch in run.microbatches(numbered if args.epochs else data):
                if args.epochs:
                    numbers, batch = batch  # noqa: PLW2901 - of one kind of data or the other
                    trained += numbers.tolist()
                loss = (model(batch).squeeze(-1) - batch.sum(-1).sin()).square().mean()
                if fault == "loss":
                    loss = loss * torch.nan
                run.backward(loss)
                run.log(loss=loss)
            line = {"rank": run.rank, "attempt": args.attempt + run.generation}
            if args.epochs:
                chaos.samples(step + 1, trained, epoch=numbered.epoch, **line)
            run.step(optimizer)
            if fault:
                run.fence()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(float(fault))
            chaos.step(step + 1, **line)
            time.sleep(args.pace)
        result = {
            "hash": state_hash({"model": model}),
            "loss": run.metrics["loss"],
            "generation": run.generation,
        }
        if run.is_leader:
            Path(args.result).write_text(json.dumps(result))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--undealt", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stop", type=int, default=0)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--history")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--least-every", type=int)
    parser.add_argument("--topology", default="all")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--founders", type=int, default=1)
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--quorum", type=float, default=0.0)
    parser.add_argument("--line")
    parser.add_argument("--key", default="")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--parity", type=int, default=0)
    parser.add_argument("--checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--gate", nargs=2)
    parser.add_argument("--guard", type=int, default=0)
    parser.add_argument("--fault", nargs=2, action="append", default=[])
    parser.add_argument("--pace", type=float, default=0.0)
    main(parser.parse_args())
