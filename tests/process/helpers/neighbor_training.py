"""A pipeline of stages of equal blocks, which waits for the test to take stages away.

The first generation does not go beyond ``--first`` steps, and reports when these are protected.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B

from holdfast import elastic
from holdfast.elastic.events import TrainingHeld

WIDTH, PER_STAGE = 32, 2


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x))


class Stage(nn.Module):
    """The blocks of one stage, under the names that they have in the whole model.

    The first stage also has what other stages have not.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.enter = nn.LayerNorm(WIDTH) if index == 0 else None
        numbers = range(PER_STAGE * index, PER_STAGE * (index + 1))
        self.blocks = nn.ModuleDict({str(number): Block() for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enter is not None:
            x = self.enter(x)
        for block in self.blocks.values():
            x = block(x)
        return x


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)

    def hold(run: elastic.Run) -> None:
        said = False
        while run.generation == 1 and run.completed >= args.first:
            run.check()
            if not said and run.protection.step == run.completed:
                elastic.session_of(run).emit(TrainingHeld(step=run.completed))
                said = True
            time.sleep(0.005)

    @elastic.resilient(
        mesh=elastic.Mesh(dp=args.dp, pp=args.pp),
        batch=elastic.Batch(microbatches=4 * args.dp, size=4),
        snapshots=elastic.Snapshots(parity=args.parity),
        checkpoint=elastic.Checkpoints(args.root, every=args.every) if args.root else None,
        on_lost_state=None if args.beyond < 0 else elastic.Neighbors(beyond=args.beyond),
        seed=7,
    )
    def body(run: elastic.Run) -> None:
        part = Stage(run.mesh["pp"].get_local_rank())
        if args.shard:
            for block in part.blocks.values():
                fully_shard(block, mesh=run.mesh["dp"])
            fully_shard(part, mesh=run.mesh["dp"])
        schedule = Schedule1F1B(
            run.stage(part),
            n_microbatches=run.share,
            loss_fn=nn.functional.mse_loss,
            scale_grads=False,
        )
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
        run.track(model=part, optimizer=optimizer)
        for _ in run.steps(args.steps):
            if run.generation > 1 and not Path(args.results, f"{run.rank}.json").exists():
                note(run, part, optimizer)
            hold(run)
            run.pipeline(schedule, torch.utils.data.TensorDataset(x, x.flip(1)))
            run.step(optimizer)

    def note(run: elastic.Run, part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write down the state with which a later generation begins."""
        states = [len(optimizer.state[p]) for p in part.parameters()]
        found = {
            "step": run.completed,
            "place": run.mesh["pp"].get_local_rank(),
            "states": states,
            "weights": {
                name: (each.full_tensor() if args.shard else each).flatten().tolist()
                for name, each in part.named_parameters()
            },
        }
        Path(args.results, f"{run.rank}.json").write_text(json.dumps(found))

    body()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress")  # of other workers
    parser.add_argument("--results", required=True)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=3)
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--root")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--beyond", type=int, default=-1)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--first", type=int, default=6)
    main(parser.parse_args())
