"""The state of a checkpoint root for tests: whole steps, and leftover files."""

from __future__ import annotations

import copy
from typing import Unpack

import numpy as np
from doubles.checkpoints import About, Array, write_checkpoint
from doubles.memory_store import MemoryStore

from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import committed, open_step, step_folder
from holdfast.ckpt.checkpoints.source import PackSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.format.manifest import MANIFEST, REFS
from holdfast.ckpt.store.base import Store

Arrays = dict[str, tuple[Array, str]]

FROZEN = np.arange(300, dtype="<f4").reshape(30, 10)


def state(seed: int) -> Arrays:
    """Return a state of which most never changes."""
    return {
        "model.frozen": (FROZEN, "float32"),
        "model.hot": (np.full(7, seed, dtype="<i8"), "int64"),
        "optimizer.step": (np.array(seed, dtype="<i4"), "int32"),
    }


def save(number: int, seed: int, *, world_size: int = 1, **about: Unpack[About]) -> None:
    """Save ``state(seed)`` to the store that is in use; two writers leave cells to be merged."""
    about |= {"with_grids": False, "step": number}
    write_checkpoint("memory://", state(seed), world_size=world_size, **about)


def held(store: Store, *, settled: bool = True) -> dict[int, int]:
    """Return the seed of each committed step; fail where one is damaged, or a mixture.

    If a saver died (not ``settled``) the reference map may be that of the newer save already.
    """
    return {step: seed_of(store, step, settled=settled) for step in committed(store)}


def seed_of(store: Store, step: int, *, settled: bool = True) -> int:
    """Return the seed of a step's state, once every byte of it is checked."""
    found = [fault.file for fault in faults(store, step, deep=True)]
    assert [file for file in found if settled or not file.endswith(REFS)] == []
    _, packs = open_step(store, step)
    with PackSource(store, step_folder(step), packs) as source:
        assembler = Assembler(source)
        np.testing.assert_array_equal(assembler.box("model.frozen"), FROZEN)
        hot = assembler.box("model.hot")
        seed = int(hot[0])
        assert (hot == seed).all()
        assert int(assembler.box("optimizer.step")) == seed
        return seed


def files_of(store: MemoryStore) -> set[str]:
    """Return the names of all files."""
    return set(store._files)


def needed_files(store: Store) -> set[str]:
    """Return the names of the files that some committed step needs."""
    found = set()
    for step in committed(store):
        folder = step_folder(step)
        manifest, _ = open_step(store, step)
        found |= {f"{folder}/{MANIFEST}", *(f"{folder}/{f.path}" for f in manifest.files())}
        found |= {path.removeprefix("../") for path in manifest.bases()}
    return found


def copied(store: MemoryStore) -> MemoryStore:
    """Return a store of its own with the same files."""
    other = MemoryStore(store.root)
    other._files = copy.copy(store._files)
    return other
