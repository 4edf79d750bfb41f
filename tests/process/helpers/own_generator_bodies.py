"""Loops that draw from generators of their own in a microbatch, and ones that do so rightly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from own_calls_bodies import DATA, a_run

from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.run import Run

OWN = torch.Generator().manual_seed(1)
SEEDED = torch.Generator()
NUMPY = np.random.default_rng(1)
OFTEN = random.Random(1)
SEEDED_OFTEN = random.Random()
Noise = Callable[[Run, torch.Tensor], torch.Tensor]


def of_the_run(run: Run, x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=run.generator("noise"))


def seeded(run: Run, x: torch.Tensor) -> torch.Tensor:
    SEEDED.manual_seed(run.completed * 100 + run.microbatch)
    SEEDED_OFTEN.seed(run.completed * 100 + run.microbatch)
    return torch.randn(x.shape, generator=SEEDED) * SEEDED_OFTEN.random()


def made_anew(_: Run, x: torch.Tensor) -> torch.Tensor:
    rng = np.random.default_rng(torch.initial_seed())
    return x * rng.normal()


def in_torch(_: Run, x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=OWN)  # torch


def in_numpy(_: Run, x: torch.Tensor) -> torch.Tensor:
    return x * NUMPY.normal()  # numpy


def in_python(_: Run, x: torch.Tensor) -> torch.Tensor:
    return x * OFTEN.random()  # python


RIGHT: dict[str, Noise] = {"run": of_the_run, "seeded": seeded, "anew": made_anew}
WRONG: dict[str, Noise] = {"torch": in_torch, "numpy": in_numpy, "python": in_python}


def noisy(world: reform.GenerationWorld, noise: Noise) -> str:
    """Return the digest of the state after three steps, or the refusal."""
    with a_run(world, exact="float32", seed=4) as (run, model, optimizer):
        try:
            for _ in run.steps(3):
                for x in run.microbatches(DATA):
                    run.backward(model(x + noise(run, x)).square().mean())
                run.step(optimizer)
        except ConfigError as refused:
            return str(refused)
        run._finish()
        return state_hash({"model": model, "optimizer": optimizer})


def everything(world: reform.GenerationWorld, _folder: Path) -> dict[str, str]:
    """Run all loops in the same processes."""
    found = {name: noisy(world, noise) for name, noise in RIGHT.items()}
    for name, noise in WRONG.items():
        found[name] = noisy(world, noise)
    return found
