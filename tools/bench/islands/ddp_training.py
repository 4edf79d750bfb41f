"""A rank of the benchmark's model under DDP: one all-reduce a step, over gloo."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.tools.bench.islands.learner import (
    RATE,
    WIDTH,
    Windows,
    held_out,
    learner,
    parameters_of,
)
from holdfast.tools.bench.islands.outcome import LineBytes, Outcome, WindowClock


def main(args: argparse.Namespace) -> None:
    """Train ``args.steps`` steps after a first one that is not measured; write the outcome."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://{args.address}", rank=args.rank, world_size=args.world
    )
    data, curve = Windows(), list[float]()
    model, optimizer = learner(args.seed, rate=args.rate, width=args.width)
    parallel = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(args.rank + 1 + args.world * args.seed)
    for step in range(args.steps + 1):
        chosen = torch.randint(len(data), (args.samples,), generator=generator).tolist()
        loss = parallel(torch.stack([data[number] for number in chosen]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            dist.barrier()
            clock = WindowClock(args.device)
        if args.look and (step + 1) % args.look == 0:
            curve.append(held_out(model))
    parameters = parameters_of(model)
    found = Outcome(
        window=clock.window(args.steps),
        parameters=parameters,
        held_out=held_out(model),
        curve=tuple(curve),
        content=_of_ring(parameters * args.steps, world=args.world),
    )
    Path(args.result).write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def _of_ring(elements: int, *, world: int) -> LineBytes:
    """Return the bytes of gloo's all-reduces of so many float32 elements in all."""
    nbytes = 4 * elements * 2 * (world - 1) // world
    return LineBytes(nbytes, nbytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--look", type=int, default=0, help="steps between looks at the loss")
    parser.add_argument("--result", required=True)
    main(parser.parse_args())
