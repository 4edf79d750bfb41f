"""A rank of the benchmark's model under DDP: one all-reduce a step, over gloo."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.tools.bench.islands.learner import Windows, held_out, learner
from holdfast.tools.bench.islands.outcome import Outcome


def main(args: argparse.Namespace) -> None:
    """Train ``args.steps`` steps after a first one that is not timed; write the outcome."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.address}",
        rank=args.rank,
        world_size=args.world,
    )
    data = Windows()
    model, optimizer = learner(seed=0)
    parallel = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(args.rank + 1)
    began_s = time.monotonic()
    for step in range(args.steps + 1):
        chosen = torch.randint(len(data), (args.samples,), generator=generator).tolist()
        loss = parallel(torch.stack([data[number] for number in chosen]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            dist.barrier()
            began_s = time.monotonic()
    found = Outcome(
        steps=args.steps,
        seconds=time.monotonic() - began_s,
        parameters=sum(each.numel() for each in model.parameters()),
        held_out=held_out(model, data),
    )
    Path(args.result).write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--result", required=True)
    main(parser.parse_args())
