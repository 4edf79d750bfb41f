"""Damage to every byte of a small checkpoint's files, and to samples of a large one, is found.

The small one has every feature: packs of two writers, padded and compressed chunks, merged cells,
packs of an earlier step, a note of what was removed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_states import copied
from doubles.checkpoints import Array, split_dim, write_checkpoint
from doubles.memory_store import MemoryStore
from doubles.pruning import remove
from fault_stores import using

from holdfast.ckpt.checkpoints.catalog import (
    committed_steps,
    latest,
    load_index,
    load_manifest,
    noted,
    read_record,
    step_folder,
)
from holdfast.ckpt.checkpoints.verify import Damage, faults
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import RETAINED, Manifest
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.local import LocalStore

OLD, NEW = step_folder(2), step_folder(3)


def arrays(seed: int) -> dict[str, tuple[Array, str]]:
    rng = np.random.default_rng(seed)
    return {
        "frozen": (np.arange(24, dtype="<f4").reshape(6, 4), "float32"),
        "padded": (rng.integers(0, 99, (5, 3)).astype("<u2"), "bfloat16"),
        "packed": (np.full((40,), seed, dtype="<i8"), "int64"),
        "uneven": (rng.integers(0, 99, (5,)).astype("|u1"), "uint8"),
        "step": (np.array(seed, dtype="<i4"), "int32"),
    }


def save(step: int, seed: int, *, base: int | None) -> None:
    uneven = [Box(offset=(0,), shape=(1,)), Box(offset=(1,), shape=(4,))]
    boxes = {fqn: split_dim(a.shape, parts=2) for fqn, (a, _) in arrays(seed).items()}
    write_checkpoint(
        "memory://",
        arrays(seed),
        boxes=boxes | {"padded": split_dim((5, 3), parts=2, dim=1), "uneven": uneven},
        world_size=2,
        step=step,
        base=base,
        compression={"packed": "zstd"},
        values={"lr": 0.5},
        aliases={"tied": "frozen"},
    )


@pytest.fixture(scope="module")
def small() -> MemoryStore:
    with using(store := MemoryStore()):
        save(1, 1, base=None)
        save(2, 2, base=1)
        save(3, 3, base=2)
        remove("", 1)
    manifest = load_manifest(store, NEW)
    assert manifest.merged
    assert len(manifest.bases()) == 2
    assert {path.split("/")[1] for path in manifest.bases()} == {step_folder(1)}
    return store


def deep(store: MemoryStore | LocalStore, step: int = 3) -> list[Damage]:
    return list(faults(store, step, deep=True))


def flipped(store: MemoryStore, name: str) -> Iterator[tuple[int, MemoryStore]]:
    """Yield a store with each bit pattern of one byte changed, for each byte of a file."""
    good = store.read(name)
    bad_store = copied(store)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        bad_store.write(name, [bad])
        yield at, bad_store


def packs_of(manifest: Manifest, folder: str) -> list[str]:
    own = [f"{folder}/{record.pack.path}" for record in manifest.records()]
    return own + [path.removeprefix("../") for path in manifest.bases()]


def test_every_byte_of_every_pack(small: MemoryStore) -> None:
    manifest = load_manifest(small, NEW)
    names = packs_of(manifest, NEW)
    assert len(names) == 5
    for name in names:
        seen = set()
        for at, store in flipped(small, name):
            found = deep(store)
            if name.startswith(NEW) or found:
                assert {fault.file for fault in found} == {store.where(name)}, (name, at)
                (fault,) = found
                assert fault.tensor in manifest.tensors
                assert fault.chunk is not None
                assert fault.offset is not None
                assert fault.offset <= at
                seen.add(fault.tensor)
            else:  # of another tensor of that older step: not a part of this one
                assert name.startswith(step_folder(1))
        assert "frozen" in seen or name.startswith(NEW)


def test_every_byte_of_the_manifest(small: MemoryStore) -> None:
    name = f"{NEW}/manifest.json"
    for at, store in flipped(small, name):
        (fault,) = deep(store)
        assert fault.file == store.where(name), at
        assert fault.message.startswith(fault.file)


def test_every_byte_of_every_index_and_of_the_reference_map(small: MemoryStore) -> None:
    manifest = load_manifest(small, NEW)
    for record in manifest.records():
        name = f"{NEW}/{record.index.path}"
        for at, store in flipped(small, name):
            with pytest.raises(CorruptError, match=name):
                load_index(store, NEW, record)
            if at % 50 == 0:
                assert [fault.file for fault in deep(store)] == [store.where(name)]
    for at, store in flipped(small, f"{NEW}/refs.json"):
        with pytest.raises(CorruptError, match=r"refs\.json"):
            read_record(store, NEW, manifest.refs)
        if at % 50 == 0:
            assert [fault.file for fault in deep(store)] == [store.where(f"{NEW}/refs.json")]


def test_every_byte_of_a_note(small: MemoryStore) -> None:
    name = f"{step_folder(1)}/{RETAINED}"
    assert noted(small, step_folder(1))
    for _, store in flipped(small, name):
        assert noted(store, step_folder(1)) is None
    with using(store):
        save(4, 4, base=None)
        for step in (2, 3):
            remove("", step)
        assert store.size(name), "what cannot be read removes nothing"
        assert store.names(f"{step_folder(1)}/data")


def test_the_newest_that_is_whole_is_the_latest(small: MemoryStore) -> None:
    manifest = load_manifest(small, NEW)
    for file in (*manifest.files(),):
        name = f"{NEW}/{file.path}"
        if file == manifest.refs or (manifest.merged and file == manifest.merged.pack):
            continue  # nothing that is loaded lies there
        store = copied(small)
        store.write(name, [store.read(name)[:-1]])
        with using(store):
            wanted = 3 if manifest.merged and file == manifest.merged.index else 2
            assert latest("") == wanted
    store = copied(small)
    store.write(f"{NEW}/manifest.json", [b"{}"])
    with using(store):
        assert latest("") == 2


def test_every_file_deleted_or_cut_off_or_longer(small: MemoryStore) -> None:
    manifest = load_manifest(small, NEW)
    names = {*packs_of(manifest, NEW), *(f"{NEW}/{file.path}" for file in manifest.files())}
    for name in sorted(names):
        good = small.read(name)
        store = copied(small)
        store.delete([name])
        assert store.where(name) in {fault.file for fault in deep(store)}
        for size in sorted({0, 1, len(good) // 2, len(good) - 1, len(good) + 1}):
            store.write(name, [(good + b"\0")[:size]])
            found = deep(store)
            assert {fault.file for fault in found} == {store.where(name)}, (name, size)
    store = copied(small)
    store.delete([f"{NEW}/manifest.json"])
    with using(store):
        assert committed_steps("") == [2]
        assert latest("") == 2


def test_files_swapped_between_steps_and_writers(small: MemoryStore) -> None:
    first, second = load_manifest(small, OLD), load_manifest(small, NEW)
    names = [f"{OLD}/{f.path}" for f in first.files()] + [f"{NEW}/{f.path}" for f in second.files()]
    names += [f"{OLD}/manifest.json", f"{NEW}/manifest.json"]
    for one, other in itertools.combinations(names, 2):
        a, b = small.read(one), small.read(other)
        store = copied(small)
        store.write(one, [b])
        store.write(other, [a])
        found = {fault.file for step in (2, 3) for fault in deep(store, step)}
        same_bytes = {store.where(name) for name in (one, other)} if a != b else set()
        assert same_bytes <= found or {f"{OLD}/manifest.json", f"{NEW}/manifest.json"} & {
            one,
            other,
        }
        assert bool(found) == (a != b)


LARGE = 50 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    data = {f"w{i}": (rng.integers(0, 256, LARGE // 4).astype("|u1"), "uint8") for i in range(4)}
    write_checkpoint(root, data)
    return root


@pytest.mark.parametrize("kind", ["bit", "zeros", "twice"])
def test_samples_of_a_large_checkpoint(large: Path, kind: str) -> None:
    (path,) = (large / step_folder(1) / "data").iterdir()
    rng = random.Random(kind)
    for _ in range(8):
        at = rng.randrange(path.stat().st_size - 8192)
        with path.open("r+b") as file:
            good = file.seek(at) and file.read(4096)
            assert isinstance(good, bytes)
            bad = bytes([good[0] ^ 1 << rng.randrange(8)]) if kind == "bit" else bytes(4096)
            bad = file.read(4096) if kind == "twice" else bad
            file.seek(at)
            file.write(bad)
            file.flush()
            found = deep(LocalStore(large), 1)
            file.seek(at)
            file.write(good)
        assert {fault.file for fault in found} == {str(path)}
        assert all(fault.tensor and fault.offset is not None for fault in found)
        assert min(fault.offset or 0 for fault in found) <= at + 4096
    assert deep(LocalStore(large), 1) == []
