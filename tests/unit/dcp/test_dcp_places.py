"""DCP loads a step with a register, of which a rank reads the entries that it needs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import cause_of
from doubles.checkpoints import write_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from holdfast.adapters.dcp import HoldfastReader
from holdfast.adapters.dcp.places import StoredPlaces
from holdfast.ckpt.checkpoints.source import PackSource, StoreSource
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import PackIndex
from holdfast.ckpt.register.reading import Register

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

WRITERS = 4
ARRAYS: dict[str, tuple[Any, str]] = {
    **{f"model.{n:02}": (np.full((8, 3), n, dtype="<f4"), "float32") for n in range(40)},
    **{f"optimizer.{n:02}": (np.full((8,), n, dtype="<f4"), "float32") for n in range(40)},
    "model.none": (np.zeros((0, 4), dtype="<f4"), "float32"),
}


@pytest.fixture(params=[2, WRITERS + 1], ids=["with a register", "without"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path, register_from=request.param)


def saved(root: Path, *, register_from: int = 2, step: int = 1) -> Path:
    write_checkpoint(
        root,
        ARRAYS,
        world_size=WRITERS,
        step=step,
        values={"lr": 0.5},
        aliases={"model.tied": "model.07"},
        register_from=register_from,
    )
    return root


class Asked:
    """The names of which places were read, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[list[str]] = []
        tensors = StoreSource.tensors

        def noted(source: StoreSource, names: Iterable[str]) -> PackSource:
            self.names.append(list(names))
            return tensors(source, self.names[-1])

        monkeypatch.setattr(StoreSource, "tensors", noted)


def test_all_that_was_saved_is_loaded(root: Path) -> None:
    state: dict[str, Any] = {
        name: torch.full(array.shape, -1.0) for name, (array, _) in ARRAYS.items()
    }
    state |= {"model.tied": torch.zeros(8, 3), "lr": 0.0}
    dcp.load(state, storage_reader=HoldfastReader(root))
    for name, (array, _) in ARRAYS.items():
        np.testing.assert_array_equal(state[name].numpy(), array)
    assert (state["lr"], state["model.tied"][5, 2].item()) == (0.5, 7)


def test_places_of_unwanted_tensors_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    state = {f"model.{n:02}": torch.zeros(8, 3) for n in range(40)}
    dcp.load(state, storage_reader=HoldfastReader(saved(tmp_path)))
    assert all(torch.equal(state[f"model.{n:02}"], torch.full((8, 3), n)) for n in range(40))
    assert not [name for names in asked.names for name in names if name.startswith("optimizer")]
    assert len(asked.names) <= 8, "neighbours are read along"
    asked.names.clear()
    one = {"optimizer.39": torch.zeros(8)}
    dcp.load(one, storage_reader=HoldfastReader(tmp_path))
    assert asked.names == [["optimizer.39"]]
    assert torch.equal(one["optimizer.39"], torch.full((8,), 39.0))


def test_tensors_are_described_without_a_look_at_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    metadata = HoldfastReader(saved(tmp_path)).read_metadata()
    found = metadata.state_dict_metadata["model.03"]
    assert isinstance(found, TensorStorageMetadata)
    assert (found.size, found.properties.dtype) == (torch.Size([8, 3]), torch.float32)
    assert asked.names == []
    assert len(found.chunks) == WRITERS
    assert asked.names == [["model.03"]]
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other.chunks == list(found.chunks)


def test_entries_that_are_not_the_whole_tensor_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = Register.tensors

    def without_one(register: Register, names: Iterable[str]) -> dict[int, PackIndex]:
        found = tensors(register, names)
        return {writer: index for writer, index in found.items() if writer != WRITERS - 1}

    monkeypatch.setattr(Register, "tensors", without_one)
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"model.05": torch.zeros(8, 3)}, storage_reader=HoldfastReader(saved(tmp_path)))
    cause = cause_of(failed)
    assert isinstance(cause, CorruptError)
    assert "tensor model.05: 18 of 24 elements are written" in str(cause)


def test_a_place_that_does_not_exist_is_no_chunk(root: Path) -> None:
    with StoreSource(root, 1) as source:
        places = StoredPlaces(source, {"a": "model.01"})
        assert places.ref(MetadataIndex("a", torch.Size([2, 0]))).writer == 1
        with pytest.raises(KeyError):
            places.ref(MetadataIndex("a", torch.Size([3, 0])))
