"""A slot that was not mapped before gets pages where it is read, by the threads that read it."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from doubles.slots import FakeSidecar

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.state.saved import read_tensors

WORDS = 3 << 20


def state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(WORDS) for name in ("a", "b", "c")}


@pytest.fixture
def sidecar(tmp_path: Path) -> FakeSidecar:
    sidecar = FakeSidecar(directory=tmp_path)
    saved = state()
    for value, tensor in enumerate(saved.values(), start=1):
        tensor.fill_(value)
    with closing(sidecar.snapshotter()) as snapshotter:
        snapshotter.snapshot(saved, 1)
        snapshotter.fence()
    return sidecar


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_all_chunks_are_filled_once_and_those_of_a_warm_slot_are_not(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch, cores: int, warm: bool
) -> None:
    live, filled = state(), []
    with closing(SlotMaps()) as maps:
        if warm:
            maps.open(str(sidecar.slot(1).path))
        monkeypatch.setattr(SlotFile, "warm_part", lambda _, at, n: filled.append((at, at + n)))
        with sidecar.source(1, maps=maps, cores=cores) as source:
            restore(live, source, rank=0)
    assert [tensor.unique().tolist() for tensor in live.values()] == [[1], [2], [3]]
    edges = sorted(filled)
    assert sum(hi - lo for lo, hi in edges) == (0 if warm else 3 * 4 * WORDS)
    assert all(lo >= hi for (_, hi), (lo, _) in pairwise(edges))


def test_only_what_is_read_is_filled(sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    monkeypatch.setattr(SlotFile, "warm_part", lambda _, at, nbytes: filled.append(nbytes))
    with sidecar.source(1) as source:
        found = read_tensors(source, ["b"])
    assert found["b"].unique().tolist() == [2]
    assert sum(filled) == 4 * WORDS
