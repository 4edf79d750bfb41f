"""Compression and references to an earlier step, in `ckpt.save` and in the sidecars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.pruning import prune

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.store.places import open_store


def make(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "frozen": torch.randn(700, 300, generator=torch.Generator().manual_seed(0)),
        "adapter": torch.randn(30, 3, generator=generator),
        "table": torch.zeros(500, 100).to(torch.bfloat16),
    }


def loaded(root: Path, step: int) -> dict[str, torch.Tensor]:
    state = {name: torch.full_like(tensor, 7) for name, tensor in make(0).items()}
    ckpt.load(root, {"model": state}, step=step)
    return state


def stored_bytes(root: Path, step: int) -> int:
    folder = root / f"step-{step:012d}" / "data"
    return sum(path.stat().st_size for path in folder.iterdir())


def same(found: dict[str, torch.Tensor], seed: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in make(seed).items())


@pytest.mark.parametrize("codec", ["zstd", "zstd:1", "blosc-lz4", "blosc-zstd:5"])
def test_what_a_pattern_names_is_compressed(tmp_path: Path, codec: str) -> None:
    ckpt.save(tmp_path, {"model": make(1)}, step=1)
    ckpt.save(tmp_path, {"model": make(1)}, step=2, compression={"*.frozen": "none", "*": codec})
    assert same(loaded(tmp_path, 2), 1)
    assert stored_bytes(tmp_path, 2) < stored_bytes(tmp_path, 1)
    with StoreSource(tmp_path, 2) as source:
        tensors = source.manifest.tensors
        assert tensors["model.frozen"].codec is None
        assert str(tensors["model.table"].codec).startswith(codec)
    view = ckpt.open(tmp_path, step=2)
    assert torch.equal(view["model.table"][3:9, 1], make(1)["table"][3:9, 1])
    array = view.zarr(portable=True)["model.frozen"]
    assert (array[...] == make(1)["frozen"].numpy()).all()  # type: ignore[index]
    assert not view.zarr(portable=True)["model.table"][...].any()  # type: ignore[index,union-attr]


@pytest.mark.parametrize("wrong", ["zip", "zstd:99", "blosc-nothing", "zstd:", ""])
def test_a_codec_that_is_not_known_is_refused_before_anything_is_written(
    tmp_path: Path, wrong: str
) -> None:
    with pytest.raises(ArgumentError, match="compression"):
        ckpt.save(tmp_path, {"model": make(1)}, step=1, compression={"*": wrong})
    assert list(tmp_path.iterdir()) == []


def test_what_did_not_change_is_referred_to(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"model": make(1)}, step=1)
    for step in (2, 3):
        ckpt.save(tmp_path, {"model": make(step)}, step=step, base="latest")
    adapter = make(0)["adapter"].nbytes
    for step in (1, 2, 3):
        assert same(loaded(tmp_path, step), step)
        assert list(faults(open_store(tmp_path), step, deep=True)) == []
    assert adapter <= stored_bytes(tmp_path, 3) < adapter + 200
    with StoreSource(tmp_path, 3) as source:
        (base,) = source.manifest.bases().values()
        assert base.path.startswith("../step-000000000001/")
    for group in (ckpt.open(tmp_path).zarr(), ckpt.open(tmp_path).zarr(portable=True)):
        assert (group["model.frozen"][...] == make(0)["frozen"].numpy()).all()  # type: ignore[index]


def test_a_base_goes_when_the_last_step_that_needs_it_has_gone(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"model": make(1)}, step=1)
    ckpt.save(tmp_path, {"model": make(2)}, step=2, base=1)
    ckpt.save(tmp_path, {"model": make(3)}, step=3, base="latest")
    assert prune(tmp_path, keep_last=1) == [1, 2]
    assert committed_steps(tmp_path) == [3]
    assert same(loaded(tmp_path, 3), 3)
    assert list(faults(open_store(tmp_path), 3, deep=True)) == []
    assert (tmp_path / "step-000000000001" / "data").is_dir()
    assert not (tmp_path / "step-000000000002").exists()
    ckpt.save(tmp_path, {"model": make(4)}, step=4)
    assert prune(tmp_path, keep_last=1) == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000004"]
    assert same(loaded(tmp_path, 4), 4)


def test_a_base_that_is_not_there_costs_room_not_the_save(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"model": make(1)}, step=1, base=77)
    ckpt.save(tmp_path, {"model": make(2)}, step=2, base=2)
    ckpt.save(tmp_path / "empty", {"model": make(3)}, step=3, base="latest")
    assert same(loaded(tmp_path, 1), 1)
    assert same(loaded(tmp_path, 2), 2)
    assert same(loaded(tmp_path / "empty", 3), 3)


def test_a_base_saved_again_keeps_what_later_steps_need(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"model": make(1)}, step=1)
    ckpt.save(tmp_path, {"model": make(2)}, step=2, base=1)
    changed = {name: tensor + 1 for name, tensor in make(1).items()}
    ckpt.save(tmp_path, {"model": changed}, step=1)
    assert same(loaded(tmp_path, 2), 2)
    assert torch.equal(loaded(tmp_path, 1)["frozen"], changed["frozen"])


def test_another_codec_or_dtype_is_written_anew(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"model": make(1)}, step=1)
    ckpt.save(tmp_path, {"model": make(1)}, step=2, base=1, compression={"*": "zstd"})
    with StoreSource(tmp_path, 2) as source:
        assert not source.manifest.bases()
    halves = {name: tensor.view(torch.uint8) for name, tensor in make(1).items()}
    ckpt.save(tmp_path, {"model": halves}, step=3, base=1)
    with StoreSource(tmp_path, 3) as source:
        assert not source.manifest.bases()
