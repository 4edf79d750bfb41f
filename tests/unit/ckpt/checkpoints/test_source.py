"""Reading of a checkpoint by several threads, of which the caller's is one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import Array, write_checkpoint

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import Delivery

COUNT, EXTENT = 4, (4 << 20) + 5


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    made = {f"t{i}": rng.integers(0, 256, EXTENT).astype("|u1") for i in range(COUNT)}
    write_checkpoint(tmp_path, {name: (array, "uint8") for name, array in made.items()})
    return made


def deliveries(source: StoreSource) -> tuple[list[Delivery], dict[str, Array]]:
    (index,) = source.indexes()
    rooms = {fqn: np.zeros(EXTENT, dtype="u1") for fqn in index.tensors}
    whole = Box(offset=(0,), shape=(EXTENT,))
    return [(ref, [(whole, rooms[ref.fqn])]) for ref in index.chunks()], rooms


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_any_number_of_threads_reads_all_and_the_caller_hears_of_it(
    tmp_path: Path, arrays: dict[str, Array], threads: int
) -> None:
    heard: list[tuple[int, int]] = []
    callers = set[threading.Thread]()

    def progress(done: int, total: int) -> None:
        heard.append((done, total))
        callers.add(threading.current_thread())

    with StoreSource(tmp_path, 1, threads=threads, progress=progress) as source:
        wanted, rooms = deliveries(source)
        assert source.scatter(wanted) >= COUNT * EXTENT
    for name, array in arrays.items():
        np.testing.assert_array_equal(rooms[name], array)
    assert heard == sorted(heard)
    assert heard[-1] == (COUNT * EXTENT, COUNT * EXTENT)
    assert callers == {threading.current_thread()}


@pytest.mark.parametrize("threads", [1, 4])
def test_damage_that_any_thread_finds_is_raised(
    tmp_path: Path, arrays: dict[str, Array], threads: int
) -> None:
    (pack,) = (tmp_path / "step-000000000001/data").iterdir()
    for place in (0, COUNT - 1):
        data = bytearray(pack.read_bytes())
        data[place * len(data) // COUNT + 4_000] ^= 1
        pack.write_bytes(data)
        with StoreSource(tmp_path, 1, threads=threads) as source:
            wanted, _ = deliveries(source)
            with pytest.raises(CorruptError, match=r"tensor t\d: the chunk"):
                source.scatter(wanted)
        data[place * len(data) // COUNT + 4_000] ^= 1
        pack.write_bytes(data)
    assert len(arrays) == COUNT
