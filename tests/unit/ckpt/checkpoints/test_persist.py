"""Packs and commits: every tensor once, old or new, newer generations first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

import msgspec
import numpy as np
import pytest
from doubles.checkpoints import (
    About,
    Array,
    sample_arrays,
    shard,
    split_dim,
    write_checkpoint,
)

from holdfast.ckpt.checkpoints import commit
from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import choose, committed_steps, quick_verify, steps
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.errors import CorruptError, FencedError, NotFoundError, StoreError
from holdfast.ckpt.format.zarr_metadata import array_name
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.zarr.view import group

Arrays = Mapping[str, tuple[Array, str]]


def check(root: Path, arrays: Arrays, *, step: int = 1) -> StoreSource:
    """Assert that the natively read arrays, the Zarr view and a deep check all agree."""
    assert list(faults(open_store(root), step, deep=True)) == []
    source = StoreSource(root, step)
    assembler = Assembler(source)
    view = group(source, portable=True)
    assert assembler.tensors.keys() == arrays.keys()
    for fqn, (array, dtype) in arrays.items():
        assert assembler.tensors[fqn].dtype.name == dtype
        np.testing.assert_array_equal(assembler.box(fqn), array)
        np.testing.assert_array_equal(view[array_name(fqn)][...], array)
        assert view[array_name(fqn)].attrs["torch_dtype"] == dtype
    return source


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_what_ranks_write_is_one_checkpoint(tmp_path: Path, world_size: int) -> None:
    arrays = sample_arrays()
    write_checkpoint(
        tmp_path,
        arrays,
        world_size=world_size,
        values={"lr": 0.5},
        aliases={"model.tied": "model.weight"},
    )
    source = check(tmp_path, arrays)
    assert source.manifest.merged is None
    assert source.manifest.mesh == {"dp": world_size}
    assert source.manifest.values == {"lr": 0.5}
    assert [index.rank_values for index in source.indexes()] == [
        {"rank": rank} for rank in range(world_size)
    ]
    np.testing.assert_array_equal(group(source)["model.tied"][...], arrays["model.weight"][0])


def test_split_along_another_dim_pads_in_the_pack(tmp_path: Path) -> None:
    array = np.arange(40, dtype="<i4").reshape(4, 10)
    boxes = {"m.w": split_dim((4, 10), parts=3, dim=1)}
    write_checkpoint(tmp_path, {"m.w": (array, "int32")}, boxes=boxes, world_size=3)
    source = check(tmp_path, {"m.w": (array, "int32")})
    assert source.manifest.merged is None
    assert source.manifest.tensors["m.w"].cell == (4, 4)


def test_irregular_boxes_are_merged_for_zarr(tmp_path: Path) -> None:
    array = np.arange(11, dtype="<i8")
    cuts = [(0, 2), (2, 1), (3, 8)]
    boxes = {"m.w": [Box(offset=(at,), shape=(n,)) for at, n in cuts]}
    write_checkpoint(tmp_path, {"m.w": (array, "int64")}, boxes=boxes, world_size=3)
    source = check(tmp_path, {"m.w": (array, "int64")})
    assert source.manifest.merged is not None


def test_writers_that_know_no_grid_are_put_on_one(tmp_path: Path) -> None:
    arrays = sample_arrays()
    write_checkpoint(tmp_path, arrays, world_size=3, with_grids=False)
    check(tmp_path, arrays)


def test_large_tensors_are_stored_in_pieces(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 30, (9, 1 << 20)).astype("<i4")
    write_checkpoint(tmp_path, {"m.w": (array, "int32")})
    source = StoreSource(tmp_path, 1)
    assert source.manifest.tensors["m.w"].cell == (3, 1 << 20)
    box = Box(offset=(2, 5), shape=(3, 100))
    np.testing.assert_array_equal(Assembler(source).box("m.w", box), array[2:5, 5:105])


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    receipts = write_checkpoint(tmp_path, sample_arrays(), world_size=2)
    manifest = (tmp_path / "step-000000000001/manifest.json").read_bytes()
    assert write_checkpoint(tmp_path, sample_arrays(), world_size=2) == receipts
    assert (tmp_path / "step-000000000001/manifest.json").read_bytes() == manifest


def test_saved_again_is_the_new_one_and_the_old_files_are_gone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sample_arrays(0), world_size=3)
    write_checkpoint(tmp_path, sample_arrays(1), world_size=2, generation=2)
    check(tmp_path, sample_arrays(1))
    left = [name for _, _, files in os.walk(tmp_path) for name in files]
    assert len(left) == 6  # two packs, two indexes, manifest, refs


def test_an_older_generation_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sample_arrays(1), generation=3)
    with pytest.raises(FencedError, match="generation 3"):
        write_checkpoint(tmp_path, sample_arrays(0), generation=2)
    check(tmp_path, sample_arrays(1))


def test_another_run_replaces_whatever_its_generation(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sample_arrays(1), generation=3)
    write_checkpoint(tmp_path, sample_arrays(0), generation=1, run="another")
    check(tmp_path, sample_arrays(0))


def test_a_payload_that_is_not_what_was_captured_is_refused(tmp_path: Path) -> None:
    arrays = sample_arrays()
    boxes = {fqn: split_dim(a.shape, parts=1) for fqn, (a, _) in arrays.items()}
    index, payload = shard(arrays, boxes, writer=0, world_size=1)
    bad = bytearray(payload)
    bad[0] ^= 1
    with pytest.raises(CorruptError, match=r"model\.weight"):
        commit.write_pack(tmp_path, step=1, index=index, payload=memoryview(bad))
    assert committed_steps(tmp_path) == []
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (Box(offset=(4,), shape=(3,)), "7 of 8"),
        (Box(offset=(3,), shape=(4,)), "overlap"),
    ],
)
def test_a_commit_wants_every_element_once(tmp_path: Path, second: Box, said: str) -> None:
    array = np.arange(8, dtype="<f4")
    boxes = {"w": [Box(offset=(0,), shape=(4,)), second]}
    if said == "overlap":
        boxes["w"].append(Box(offset=(7,), shape=(0,)))
    with pytest.raises(CorruptError, match=f"tensor w .*{said}"):
        write_checkpoint(
            tmp_path, {"w": (array, "float32")}, boxes=boxes, world_size=2, with_grids=False
        )
    assert committed_steps(tmp_path) == []


def test_a_commit_wants_every_writer(tmp_path: Path) -> None:
    receipts = write_checkpoint(tmp_path / "a", sample_arrays(), world_size=3)
    with pytest.raises(CorruptError, match=r"writers \[0, 2\]"):
        commit.commit(
            tmp_path / "a", run="test", step=1, generation=1, receipts=receipts[::2], mesh={}
        )
    with pytest.raises(CorruptError, match="receipt of run"):
        commit.commit(tmp_path / "a", run="test", step=1, generation=2, receipts=receipts, mesh={})


def test_receipts_travel_as_json(tmp_path: Path) -> None:
    (receipt,) = write_checkpoint(tmp_path, sample_arrays())
    data = msgspec.json.encode(receipt)
    assert msgspec.json.decode(data, type=commit.WriterReceipt) == receipt


def test_the_newest_that_can_be_trusted_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10, 20):
        write_checkpoint(tmp_path, sample_arrays(step), step=step)
    (pack,) = (tmp_path / "step-000000000020/data").iterdir()
    os.truncate(pack, pack.stat().st_size - 1)
    (tmp_path / "step-000000000030").mkdir()
    assert choose(tmp_path, None) == 10
    assert str(pack) in caplog.text
    assert [(info.step, info.committed) for info in steps(tmp_path)] == [
        (5, True),
        (10, True),
        (20, True),
        (30, False),
    ]


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        choose(tmp_path / "nothing", None)
    with pytest.raises(NotFoundError, match="holds none"):
        choose(tmp_path, None)
    for step in (5, 10):
        write_checkpoint(tmp_path, sample_arrays(step), step=step)
    with pytest.raises(NotFoundError, match="no checkpoint of step 7; steps there: 5, 10"):
        choose(tmp_path, 7)


def test_a_renamed_step_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sample_arrays(), step=5)
    (tmp_path / "step-000000000005").rename(tmp_path / "step-000000000006")
    with pytest.raises(CorruptError, match="contains step 5"):
        quick_verify(open_store(tmp_path), 6)


def test_other_kinds_of_store_are_refused() -> None:
    with pytest.raises(StoreError, match="ftp://"):
        open_store("ftp://server/run")


def written_only(root: Path, seed: int, **about: Unpack[About]) -> list[commit.WriterReceipt]:
    """Write the pack of a step, and do not commit it."""
    arrays = sample_arrays(seed)
    boxes = {fqn: split_dim(a.shape, parts=1) for fqn, (a, _) in arrays.items()}
    index, payload = shard(arrays, boxes, writer=0, world_size=1, **about)
    return [commit.write_pack(root, step=1, index=index, payload=memoryview(payload))]


def test_what_a_run_removes_is_never_another_runs(tmp_path: Path) -> None:
    receipts = written_only(tmp_path, 1, run="one", generation=1)
    write_checkpoint(tmp_path, sample_arrays(2), run="other", generation=7)
    check(tmp_path, sample_arrays(2))
    commit.commit(tmp_path, run="one", step=1, generation=1, receipts=receipts, mesh={})
    check(tmp_path, sample_arrays(1))


def test_a_fenced_saver_leaves_nothing_behind(tmp_path: Path) -> None:
    """The newer generation was quicker, and did not see all that the older one had written."""
    write_checkpoint(tmp_path, sample_arrays(2), generation=7)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    receipts = written_only(tmp_path, 1, generation=3)
    with pytest.raises(FencedError, match="generation 7"):
        commit.commit(tmp_path, run="test", step=1, generation=3, receipts=receipts, mesh={})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_reference_map_that_was_written_over_is_healed(tmp_path: Path) -> None:
    receipts = write_checkpoint(tmp_path, sample_arrays(1))
    refs = tmp_path / "step-000000000001/refs.json"
    good = refs.read_bytes()
    for bad in (b"{}", b""):
        refs.write_bytes(bad)
        commit.commit(tmp_path, run="test", step=1, generation=1, receipts=receipts, mesh={})
        assert refs.read_bytes() == good


def test_what_could_not_be_read_again_is_not_committed(tmp_path: Path) -> None:
    """Check that content which the format refuses to read is not written either."""
    with pytest.raises(CorruptError, match=r"leads to 'nothing'"):
        write_checkpoint(tmp_path, sample_arrays(1), aliases={"tied": "nothing"})
    with pytest.raises(CorruptError, match="unknown tag"):
        write_checkpoint(tmp_path, sample_arrays(1), values={"x": {"$exec": 1}})
    assert committed_steps(tmp_path) == []


def test_writers_that_do_not_share_a_root_are_told_so(tmp_path: Path) -> None:
    arrays = sample_arrays()
    boxes = {fqn: split_dim(a.shape, parts=2) for fqn, (a, _) in arrays.items()}
    receipts = []
    for writer, place in enumerate(("here", "there")):
        index, payload = shard(arrays, boxes, writer=writer, world_size=2)
        view = memoryview(payload)
        receipts.append(commit.write_pack(tmp_path / place, step=1, index=index, payload=view))
    about = {"run": index.run, "step": 1, "generation": index.generation}
    with pytest.raises(StoreError, match=r"writer 1 wrote.*one root that all of them can read"):
        commit.commit(tmp_path / "here", receipts=receipts, mesh={"dp": 2}, **about)
    assert committed_steps(tmp_path / "here") == []
