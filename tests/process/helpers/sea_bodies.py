"""One step of a sea's tensors on any mesh: what is sent, and what is adopted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from mesh_bodies import BUILDS
from rank_bodies import run_of
from ranks import enter
from torch import nn

from holdfast.elastic.config import Batch, Mesh, Settings
from holdfast.elastic.groups import reform
from holdfast.elastic.islands.mailbox import digest_of
from holdfast.elastic.islands.pairs.tensors import PairTensors
from holdfast.elastic.islands.tensors import Merge, SeaTensors
from holdfast.elastic.membership.records import MeshSize
from holdfast.elastic.sea.settings import Islands

ISLANDS = Islands(name="oslo", meet="nowhere", every=4, portions=2, overlap=1)

Way = tuple[MeshSize, Mesh, str]
"""A mesh, how it was asked for, and the model that is built on it."""


def merge_in_turn(
    rank: int, stores: list[str], folder: Path, *, ways: list[Way]
) -> list[dict[str, Any]]:
    """Send and adopt on one mesh after the other in the same process."""
    found = []
    for number, (size, mesh, kind) in enumerate(ways, start=1):
        world = enter(rank, stores, folder, number=number, mesh=size, axes=mesh.axes)
        run, _ = run_of(world, Settings(mesh=mesh, batch=Batch(microbatches=4)))
        torch.manual_seed(1)
        found.append(_merged(BUILDS[kind](run), world))
        torch.manual_seed(1)
        found[-1]["pairs"] = _met(BUILDS[kind](run), world)
        run._close()
        world.barrier()
        reform.leave()
    return found


def _merged(model: nn.Module, world: reform.GenerationWorld) -> dict[str, Any]:
    tensors = SeaTensors({"model": model}, world, ISLANDS)
    tensors.begin()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start=1):
            parameter.mul_(1 + 0.01 * number)  # alike on every mesh, element by element
    payloads = [tensors.encode(portion) for portion in range(2)]
    for portion, data in enumerate(payloads):
        merge = Merge(portion=portion, weights=(3, 2), whole=7, own=0)
        tensors.adopt(merge, [data, data] if world.rank == 0 else [])
    kept = [tensors.encode(portion) for portion in range(2)]
    return {
        "sent": [digest_of(data) for data in payloads],
        "kept": [digest_of(data) for data in kept],
        "states": tensors.digests(range(2)),
        "weights": tensors.digest_of_weights(),
        "nbytes": [len(data) for data in payloads],
    }


def _met(model: nn.Module, world: reform.GenerationWorld) -> list[str]:
    """Meet an island of other weights, then take the last merge; return the digests."""
    tensors = PairTensors({"model": model}, world, dataclasses.replace(ISLANDS, topology="pairs"))
    tensors.begin()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start=1):
            parameter.mul_(1 + 0.01 * number)  # alike on every mesh, element by element
    first = [tensors.encode(portion) for portion in range(2)]
    for portion, data in enumerate(first):
        alone = Merge(portion=portion, weights=(3,), whole=3, own=0)
        tensors.adopt(alone, [data] if world.rank == 0 else [])
    found = tensors.digests(range(2))
    second = [tensors.encode(portion) for portion in range(2)]
    for portion in range(2):
        both = [first[portion], second[portion]] if world.rank == 0 else []
        tensors.adopt(Merge(portion=portion, weights=(3, 2), whole=5, own=1), both)
        found += tensors.digests([portion])
        tensors.merge_last(portion, (3, 2), both)
    return [*found, *tensors.digests(range(2)), *map(digest_of, [*first, *second])]
