"""Training with an Accelerator on real ranks, which are forked from a process with its imports.

A run keeps checkpoints below ``root`` and returns its weights and the samples it has seen.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
from collections.abc import Iterator
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    set_seed,
)
from accelerate_plans import Plan
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.adapters.accelerate import AcceleratorCheckpoints

importlib.import_module("torch._dynamo")  # the first optimizer would import it in every rank

EPOCHS, SAMPLES, EVERY = 2, 52, 2


class Numbers(Dataset[Any]):
    """Samples with their number; in a noisy set every read draws from all global generators."""

    def __init__(self, noisy: bool) -> None:
        self._noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        x = torch.linspace(0, i / SAMPLES, 8)
        if self._noisy:
            x = x + 0.1 * torch.randn(8) + random.random() + np.random.rand()
        return i, x.float()


class Stream(IterableDataset[Any]):
    """The same samples one after the other."""

    def __init__(self, noisy: bool) -> None:
        self._numbers = Numbers(noisy)

    def __iter__(self) -> Iterator[Any]:
        return (self._numbers[i] for i in range(SAMPLES))


class Tokens:
    """A registered object."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def accelerator_of(plan: Plan) -> Accelerator:
    """Return an Accelerator on the CPU.

    Accelerate chooses FSDP on accelerators only; its code for FSDP2 runs on a CPU as well.
    """
    loading = DataLoaderConfiguration(
        split_batches=plan.is_split, use_seedable_sampler=plan.seedable, dispatch_batches=False
    )
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=loading,
        gradient_accumulation_steps=2 if plan.noisy else 1,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=plan.fixed_buckets)],
    )
    if plan.sharded:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
    return accelerator


def model_of(noisy: bool) -> torch.nn.Module:
    """Return a model with dropout and running statistics, or without them."""
    middle = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)] if noisy else [torch.nn.Tanh()]
    return torch.nn.Sequential(torch.nn.Linear(8, 16), *middle, torch.nn.Linear(16, 1))


def trained(plan: Plan) -> dict[str, Any]:
    """Train until the end; go on from the newest checkpoint, if there is one."""
    set_seed(7)
    accelerator = accelerator_of(plan)
    set_seed(7, device_specific=plan.noisy)
    torch.manual_seed(7)
    model = model_of(plan.noisy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    loader = DataLoader(
        Stream(plan.noisy) if plan.iterable else Numbers(plan.noisy),
        batch_size=4,
        shuffle=not plan.iterable,
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(100 + accelerator.process_index)
    tokens = Tokens()
    accelerator.register_for_checkpointing(tokens)
    checkpoints = AcceleratorCheckpoints(accelerator, plan.root, keep=2)
    begun_at = step = checkpoints.load()
    seen: list[list[int]] = []
    for _ in range(loader.iteration, EPOCHS):
        for numbers, x in loader:
            seen.append([*map(int, numbers)])
            with accelerator.accumulate(model):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            tokens.seen += len(numbers)
            if accelerator.sync_gradients:
                step += 1
                if step % EVERY == 0:
                    checkpoints.save(step)
                if step == plan.die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
    weights = [p.full_tensor() if plan.sharded else p for p in model.parameters()]
    buffers = [*model.buffers()] if accelerator.process_index == 0 else []
    kept = [each.detach().double().flatten() for each in (*weights, *buffers)]
    numbers_kept = torch.cat(kept).tolist()
    return {
        "begun_at": begun_at,
        "step": step,
        "seen": seen,
        "tokens": tokens.seen,
        "lr": schedule.get_last_lr(),
        "weights": numbers_kept,
        "hash": sha256(repr(numbers_kept).encode()).hexdigest(),
        "steps": sorted(int(each.name[5:]) for each in plan.root.glob("step-*")),
    }


def rank_main(rank: int, world_size: int, port: int, plan: Plan, pipe: Connection) -> None:
    """Run one rank in this process and send what it returns, or its error."""
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
    try:
        pipe.send(trained(plan))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
