"""A plain loop under torchrun with torch.distributed.checkpoint, which reports its work.

    HOLDFAST_HISTORY=history torchrun --nproc-per-node 2 tools/chaos/workloads/torchrun_dcp.py

It saves every few steps and resumes from the newest checkpoint, as many loops do; it does not save
the position of its data. Kill a worker, then `holdfast chaos check history` shows the damage.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from holdfast.tools import chaos


class Numbers(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """A data set in which sample i is the number i."""

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((8,), index / 1_000)


def newest(root: Path) -> int:
    """Return the newest step with a checkpoint, -1 for none."""
    found = [int(path.parent.name) for path in root.glob("*/.metadata")]
    return max(found, default=-1)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0, help="least duration of a step")
    options = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    start = newest(options.root) + 1
    if start:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        load(state, checkpoint_id=options.root / str(start - 1))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), seed=0)
    batches = iter(DataLoader(Numbers(), batch_size=4, sampler=sampler))
    for step in range(start, options.steps):
        ids, batch = next(batches)
        chaos.samples(step, ids.tolist())
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        chaos.step(step)
        chaos.state_hash(step, model.state_dict())
        if step % options.save_every == options.save_every - 1:
            weights, moments = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": moments}, checkpoint_id=options.root / str(step))
        time.sleep(options.step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
