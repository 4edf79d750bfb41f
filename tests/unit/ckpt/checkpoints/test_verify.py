"""Every damage is found in one pass, and reported with file, tensor, chunk and offset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from doubles.checkpoints import shard, split_dim, write_checkpoint

from holdfast.ckpt.checkpoints.catalog import load_index, load_manifest, open_step
from holdfast.ckpt.checkpoints.commit import PackOptions, commit, write_pack
from holdfast.ckpt.checkpoints.verify import Damage, deep_faults, examine, faults
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.local import LocalStore

RNG = np.random.default_rng(0)
ARRAYS: dict[str, tuple[np.ndarray[Any, Any], str]] = {
    "large": (RNG.standard_normal((700, 500)).astype("<f4"), "float32"),
    "padded": (RNG.standard_normal((3, 5)).astype("<f4"), "float32"),
    "zeros": (np.zeros((40, 40), "<f4"), "float32"),
    **{f"small{i}": (RNG.standard_normal(9), "float64") for i in range(20)},
}


def write(
    root: Path,
    arrays: Mapping[str, tuple[Any, str]] = ARRAYS,
    *,
    step: int = 1,
    options: PackOptions | None = None,
) -> LocalStore:
    """Write the arrays from two writers, cut along the last dim."""
    boxes = {n: split_dim(a.shape, parts=2, dim=a.ndim - 1) for n, (a, _) in arrays.items()}
    receipts = []
    for writer in range(2):
        index, payload = shard(arrays, boxes, writer=writer, world_size=2, step=step)
        receipts.append(
            write_pack(
                root,
                step=step,
                index=index,
                payload=memoryview(payload),
                options=options or PackOptions(),
            )
        )
    commit(root, run="test", step=step, generation=1, receipts=receipts, mesh={"dp": 2})
    return LocalStore(root)


def found(store: LocalStore, step: int = 1, *, threads: int = 3) -> list[Damage]:
    return list(faults(store, step, deep=True, threads=threads))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("compression", [{}, {"*": "zstd"}])
def test_a_sound_checkpoint_has_no_faults_and_every_byte_is_counted(
    tmp_path: Path, compression: dict[str, str]
) -> None:
    store, read = write(tmp_path, options=PackOptions(compression=compression)), [0]
    examined = examine(store, 1)

    def heard(nbytes: int) -> None:
        read[0] += nbytes

    assert not examined.faults
    assert not list(deep_faults(store, examined, threads=1, progress=heard))
    assert read[0] == examined.nbytes > 0


@pytest.mark.parametrize("compression", [{}, {"*": "zstd"}])
def test_any_flipped_byte_of_a_pack_is_found(tmp_path: Path, compression: dict[str, str]) -> None:
    store = write(tmp_path, options=PackOptions(compression=compression))
    pack = sorted((tmp_path / "step-000000000001/data").iterdir())[1]
    size = pack.stat().st_size
    places = {0, size - 1, *np.random.default_rng(1).integers(0, size, 60).tolist()}
    for at in sorted(places):
        flip(pack, at)
        (fault,) = found(store)
        assert fault.file == str(pack)
        assert fault.tensor is not None
        assert fault.chunk is not None
        assert fault.offset is not None and fault.offset <= at
        assert fault.tensor in fault.message
        flip(pack, at)
    assert not found(store)


def test_several_faults_are_all_told_in_the_order_they_lie(tmp_path: Path) -> None:
    store = write(tmp_path)
    folder = "step-000000000001"
    record = load_manifest(store, folder).writers[0]
    index = load_index(store, folder, record)
    chosen = ["large", "small3", "small4", "zeros"]
    starts = {name: index.tensors[name].chunks[0].at for name in chosen}
    for at in starts.values():
        flip(tmp_path / folder / record.pack.path, at)
    damages = found(store)
    assert [(f.tensor, f.offset) for f in damages] == sorted(starts.items(), key=lambda kv: kv[1])
    assert damages[0].chunk == Box(offset=(0, 0), shape=(700, 250))


def test_a_pack_that_was_cut_off_names_what_is_missing(tmp_path: Path) -> None:
    store = write(tmp_path)
    pack = sorted((tmp_path / "step-000000000001/data").iterdir())[0]
    pack.write_bytes(pack.read_bytes()[:-200])
    size, *chunks = found(store)
    assert (size.file, size.tensor) == (str(pack), None)
    assert chunks and all(fault.tensor is not None for fault in chunks)


@pytest.mark.parametrize("part", ["data", "index"])
def test_a_missing_file_is_one_fault(tmp_path: Path, part: str) -> None:
    store = write(tmp_path)
    gone = sorted((tmp_path / "step-000000000001" / part).iterdir())[1]
    gone.unlink()
    (fault,) = found(store)
    assert fault.file == str(gone)
    assert "missing" in fault.message


def test_a_damaged_manifest_is_the_only_fault(tmp_path: Path) -> None:
    store = write(tmp_path)
    flip(tmp_path / "step-000000000001/manifest.json", 40)
    (fault,) = found(store)
    assert fault.file.endswith("manifest.json")


def test_what_lies_in_packs_of_other_steps_is_checked_too(tmp_path: Path) -> None:
    arrays = dict(ARRAYS)
    store = write(tmp_path, arrays, step=1)
    arrays["small0"] = (np.arange(9.0), "float64")
    write(tmp_path, arrays, step=2, options=PackOptions(base=1))
    assert not found(store, 2)
    assert examine(store, 2).nbytes >= examine(store, 1).nbytes - 9 * 8
    base = sorted((tmp_path / "step-000000000001/data").iterdir())[0]
    flip(base, 1000)
    (fault,) = found(store, 2)
    assert fault.file == str(base)
    assert fault.tensor == "large"


def test_merged_cells_are_checked(tmp_path: Path) -> None:
    array = RNG.standard_normal(10)
    boxes = {"x": [Box(offset=(0,), shape=(3,)), Box(offset=(3,), shape=(7,))]}
    write_checkpoint(tmp_path, {"x": (array, "float64")}, boxes=boxes, world_size=2)
    (merged,) = (tmp_path / "step-000000000001/data").glob("merged-*")
    flip(merged, 2)
    (fault,) = found(LocalStore(tmp_path))
    assert fault.file == str(merged)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["values"].update(lr=0.25),
        lambda body: body["aliases"].update(tied="packed"),
        lambda body: body["tensors"]["uneven"].update(shape=[7], cell=[7]),
        lambda body: body["tensors"]["packed"].update(dtype="float64"),
        lambda body: body["tensors"].pop("uneven"),
        lambda body: body.update(run="another"),
        lambda body: body.update(generation=9),
    ],
)
def test_a_manifest_that_contradicts_its_indexes_is_not_sound(change: hostile.Change) -> None:
    store = hostile.with_manifest(hostile.sample(), change)
    with pytest.raises(CorruptError) as refused:
        open_step(store, hostile.STEP)
    for deep in (False, True):
        (damage,) = faults(store, hostile.STEP, deep=deep)
        assert damage.message == str(refused.value)
