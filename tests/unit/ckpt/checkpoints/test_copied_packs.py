"""Packs checksummed during the copy equal those of a separate pass, and are as safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import Array, sample_arrays, shard, split_dim
from doubles.memory_store import MemoryStore
from fault_stores import using

from holdfast.ckpt.checkpoints.catalog import load_index, load_manifest, step_folder
from holdfast.ckpt.checkpoints.commit import PackOptions, commit, write_pack
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import pack
from holdfast.ckpt.format.manifest import PackIndex
from holdfast.ckpt.geometry.shard_index import ShardIndex
from holdfast.ckpt.native import isal, piece_copy
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.local import LocalStore

AROUND = PackOptions(threads=0, around_cache=True)


@pytest.fixture(params=["compiled", "by passes"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "by passes":
        monkeypatch.setattr(piece_copy, "kernel", lambda: None)
    elif piece_copy.kernel() is None:
        pytest.skip("the package was installed without a compiler, or for another processor")
    yield


def arrays(seed: int) -> dict[str, tuple[Array, str]]:
    """Return awkward little arrays, and one that does not fit into the buffer of the writing."""
    large = np.random.default_rng(seed).integers(0, 256, (5, 1_000_003)).astype("|u1")
    return {"first": (large[0], "uint8"), **sample_arrays(seed), "model.large": (large, "uint8")}


def captured(seed: int, *, step: int = 1, ranks: int = 2) -> list[tuple[ShardIndex, bytes]]:
    state = arrays(seed)
    boxes = {fqn: split_dim(a.shape, parts=ranks) for fqn, (a, _) in state.items()}
    return [shard(state, boxes, writer=w, world_size=ranks, step=step) for w in range(ranks)]


def save(root: str | Path, seed: int, options: PackOptions, *, step: int = 1) -> None:
    receipts = [
        write_pack(root, step=step, index=index, payload=memoryview(payload), options=options)
        for index, payload in captured(seed, step=step)
    ]
    commit(root, run="test", step=step, generation=1, receipts=receipts, mesh={"dp": 2})


def packs(store: Store, step: int = 1) -> dict[int, tuple[PackIndex, bytes, int]]:
    folder = step_folder(step)
    return {
        each.writer: (
            load_index(store, folder, each),
            store.read(f"{folder}/{each.pack.path}"),
            each.pack.crc32c,
        )
        for each in load_manifest(store, folder).writers
    }


@pytest.mark.parametrize("compression", [{}, {"model.*": "zstd"}])
def test_they_are_the_bytes_that_any_other_store_gets(
    tmp_path: Path, compression: Mapping[str, str]
) -> None:
    with using(plain := MemoryStore()):
        save("", 1, PackOptions(compression=compression))
    save(tmp_path, 1, PackOptions(compression=compression, threads=0, around_cache=True))
    found = packs(LocalStore(tmp_path))
    assert found == packs(plain)
    assert all(isal.crc32c(data) == checksum for _, data, checksum in found.values())
    assert not list(faults(LocalStore(tmp_path), 1, deep=True))


def test_what_an_earlier_step_has_is_not_written_again(tmp_path: Path) -> None:
    save(tmp_path, 1, AROUND)
    save(tmp_path, 1, PackOptions(threads=0, around_cache=True, base=1), step=2)
    assert all(data == b"" for _, data, _ in packs(LocalStore(tmp_path), 2).values())
    assert not list(faults(LocalStore(tmp_path), 2, deep=True))


@pytest.mark.parametrize("where", ["first", "large", "last"])
def test_memory_that_changed_since_it_was_captured_is_not_published(
    tmp_path: Path, where: str
) -> None:
    index, payload = captured(1)[0]
    chunks = [chunk for entry in index.tensors.values() for chunk in entry.chunks]
    chunk = {"first": chunks[0], "large": max(chunks, key=lambda c: c.nbytes), "last": chunks[-1]}
    spoiled = bytearray(payload)
    spoiled[chunk[where].at + chunk[where].nbytes - 1] ^= 1
    with pytest.raises(CorruptError, match="none of them is published"):
        write_pack(tmp_path, step=1, index=index, payload=memoryview(spoiled), options=AROUND)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_memory_that_changes_while_it_is_written_is_not_published(tmp_path: Path) -> None:
    """A writer that counted as dead may still write: then the stored bytes are not the capture."""
    index, payload = captured(1)[0]
    torn = bytearray(payload)
    largest = max((c for e in index.tensors.values() for c in e.chunks), key=lambda c: c.nbytes)

    def tear(given: int) -> None:
        torn[largest.at : largest.at + largest.nbytes] = bytes(largest.nbytes)

    options = PackOptions(threads=0, around_cache=True, watch=tear)
    with pytest.raises(CorruptError, match=r"tensor model\.large"):
        write_pack(tmp_path, step=1, index=index, payload=memoryview(torn), options=options)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_pace_is_told_of_every_byte(tmp_path: Path) -> None:
    index, payload = captured(1)[0]
    sizes: list[int] = []
    options = PackOptions(threads=0, around_cache=True, watch=sizes.append)
    receipt = write_pack(
        tmp_path, step=1, index=index, payload=memoryview(payload), options=options
    )
    assert sum(sizes) == receipt.files.pack.nbytes
    assert max(sizes) <= pack._WATCH_BYTES + max(
        c.nbytes for e in index.tensors.values() for c in e.chunks
    )
