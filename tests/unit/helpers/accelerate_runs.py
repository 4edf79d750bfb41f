"""Runs of one process with an Accelerator, which tests stop and begin again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from holdfast.adapters.accelerate import AcceleratorCheckpoints

SAMPLES, EPOCHS = 22, 3


class StoppedError(Exception):
    """A run was stopped where the test wants it."""


class Drawn(Dataset[Any]):
    """Samples with noise from all global generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        return i, torch.full((4,), float(i)) + torch.randn(4) + random.random() + np.random.rand()


class Plain(Drawn):
    """Samples without noise."""

    def __getitem__(self, i: int) -> Any:
        return i, torch.full((4,), float(i))


class Stream(IterableDataset[Any]):
    """The samples of `Drawn` in their order."""

    def __iter__(self) -> Iterator[Any]:
        return (Drawn()[i] for i in range(SAMPLES))


class FromGlobal(Sampler[int]):
    """An order that is drawn from NumPy's global generator as the epoch begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class InPassing(FromGlobal):
    """An order of which each number is drawn when it is needed, between other draws."""

    def __iter__(self) -> Iterator[int]:
        return (int(np.random.randint(SAMPLES)) for _ in range(SAMPLES))


class FromItself(FromGlobal):
    """An order that is drawn from a generator nobody can see."""

    def __init__(self) -> None:
        self._hidden = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._hidden.permutation(SAMPLES).tolist())


class Uneven(BatchSampler):
    """Batches of one, two, three, one, … samples."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[int]]:
        left, size = torch.randperm(SAMPLES, generator=self.generator).tolist(), 1
        while left:
            yield left[:size]
            left, size = left[size:], size % 3 + 1

    def __len__(self) -> int:
        return 11


def loader_of(kind: str, data: Dataset[Any] | None = None) -> DataLoader[Any]:
    """Return a loader whose order comes about in one of many ways."""
    data = data or Drawn()
    if kind in ("shuffled", "seedable"):
        return DataLoader(data, batch_size=4, shuffle=True)
    if kind == "generator":
        return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    if kind == "weighted":
        weights = [1.0 + i for i in range(SAMPLES)]
        return DataLoader(data, 4, sampler=WeightedRandomSampler(weights, SAMPLES))
    if kind == "global":
        return DataLoader(data, 4, sampler=FromGlobal())
    if kind == "workers":
        return DataLoader(Plain(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    if kind == "in passing":
        return DataLoader(data, 4, sampler=InPassing())
    if kind == "hidden":
        return DataLoader(data, 4, sampler=FromItself())
    if kind == "uneven":
        return DataLoader(data, batch_sampler=Uneven())
    if kind == "unbatched":
        return DataLoader(data, batch_size=None)
    if kind == "stream":
        return DataLoader(Stream(), 4)
    assert kind == "dropping"
    return DataLoader(data, 4, shuffle=True, drop_last=True)


def fresh(**how: Any) -> Accelerator:
    """Return an Accelerator as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(3)
    loading = DataLoaderConfiguration(
        use_seedable_sampler=how.pop("seedable", False), dispatch_batches=how.pop("dispatch", False)
    )
    return Accelerator(cpu=True, dataloader_config=loading, **how)


class Script:
    """A user's script: a loop with dropout, and with random numbers between the epochs.

    ``seen`` lists the samples of each batch, with their epoch.
    """

    def __init__(self, kind: str = "shuffled", *, data: Any = None, **how: Any) -> None:
        self.accelerator = fresh(seedable=kind == "seedable", **how)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader_of(kind, data), schedule
        )
        self.seen: list[tuple[int, list[int], float]] = []
        self.step = 0

    def run(
        self,
        root: Path,
        *,
        every: int,
        stop_at: int | None = None,
        **how: Any,
    ) -> Script:
        """Train from the newest checkpoint on; ``every`` steps there is another."""
        checkpoints = AcceleratorCheckpoints(self.accelerator, root)
        self.step = checkpoints.load(**how)
        if self.step:  # as trackers draw a name
            random.random(), np.random.rand(), torch.rand(1)
        for epoch in range(self.loader.iteration, EPOCHS):
            for numbers, x in self.loader:
                self.train(epoch, numbers, x)
                if self.step % every == 0:
                    checkpoints.save(self.step)
                if self.step == stop_at:
                    raise StoppedError
            torch.rand(1)
            random.random()
        return self

    def train(self, epoch: int, numbers: torch.Tensor, x: torch.Tensor) -> None:
        """Take one step."""
        read = torch.as_tensor(numbers).reshape(-1).tolist()
        self.seen.append((epoch, read, float(x.sum())))
        self.accelerator.backward(self.model(x / SAMPLES).square().mean())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1

    def end_workers(self) -> None:
        """End the loader's worker processes, while what asks them to end is still there.

        If the collector of garbage finds the loader, the queues to its workers are closed before
        they are told, and torch waits five seconds for each.
        """
        self.loader.base_dataloader._copy._iterator._shutdown_workers()

    @property
    def outcome(self) -> tuple[int, str, float]:
        """The step, the weights as a hash, and the next random number."""
        kept = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return self.step, sha256(kept).hexdigest()[:12], torch.rand(1).item()


def project(folder: Path, **how: Any) -> ProjectConfiguration:
    """Return a project's configuration with automatic naming."""
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **how)
