"""Boxes are read correctly by a bounded number of threads in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import part_of, sample_arrays, write_checkpoint

from holdfast.ckpt.checkpoints.boxes import BoxReader, budget, largest_chunk
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.geometry.layout import Box


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[BoxReader]:
    write_checkpoint(tmp_path, sample_arrays(), world_size=3)
    with StoreSource(tmp_path, 1) as source:
        yield BoxReader(source)


def test_every_box_is_that_part_of_the_tensor(reader: BoxReader) -> None:
    for fqn, (array, _) in sample_arrays().items():
        full = Box(offset=(0,) * array.ndim, shape=array.shape)
        np.testing.assert_array_equal(reader.box(fqn, full), array)
    array = sample_arrays()["model.weight"][0]
    for box in (
        Box(offset=(1, 2), shape=(8, 3)),
        Box(offset=(4, 0), shape=(1, 7)),
        Box(offset=(3, 3), shape=(0, 2)),
    ):
        np.testing.assert_array_equal(reader.box("model.weight", box), part_of(array, box))


def test_the_cell_is_the_largest_chunk_of_the_tensor(reader: BoxReader) -> None:
    assert reader.cell("model.weight") == (4, 7)
    assert reader.cell("model.none") == (1, 1)
    assert reader.cell("optimizer.step") == ()
    assert largest_chunk([reader.tensors["model.weight"]]) == 4 * 7 * 4


def test_an_unknown_tensor_is_named(reader: BoxReader) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        reader.box("nothing", Box(offset=(), shape=()))


@pytest.mark.parametrize("memory", [1 << 20, 32 << 20, 256 << 20, 4 << 30])
@pytest.mark.parametrize("chunk", [0, 1 << 10, 16 << 20, 900 << 20])
def test_a_budget_is_kept_unless_one_chunk_exceeds_it(memory: int, chunk: int) -> None:
    found = budget(memory, threads=8, largest_chunk=chunk, sources=2)
    used = found.threads * 2 * (chunk + found.tile_bytes)
    assert found.threads >= 1
    assert found.tile_bytes >= 1 << 20
    assert used <= memory or (found.threads, found.tile_bytes) == (1, 1 << 20)


def test_a_source_tells_how_far_the_reading_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.ckpt.checkpoints.source._CALL_BYTES", 1)
    write_checkpoint(tmp_path, sample_arrays(), world_size=3)
    told: list[tuple[int, int]] = []
    with StoreSource(tmp_path, 1, progress=lambda *far: told.append(far)) as source:
        array = sample_arrays()["model.weight"][0]
        BoxReader(source).box("model.weight", Box(offset=(0, 0), shape=array.shape))
    assert len(told) == 3 and told == sorted(told)
    assert {total for _, total in told} == {array.nbytes} and told[-1][0] == array.nbytes
