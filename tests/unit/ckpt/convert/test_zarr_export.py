"""Checkpoints, and any source of tensors, as plain Zarr directories and back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from doubles.checkpoints import part_of, sample_arrays, write_checkpoint
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr_samples import exported, of_every_dtype

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.convert.zarr_export import ZarrDirectorySink
from holdfast.ckpt.convert.zarr_import import ZarrDirectorySource
from holdfast.ckpt.errors import CorruptError, StateError, StoreError
from holdfast.ckpt.format.zarr_metadata import array_name
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec

TIED = {"model.tied": "model.weight"}
VALUES = {"optimizer.groups.0.lr": 0.1, "cursor": {"$tuple": [1, 2]}}


def saved(root: Path, **about: Any) -> StoreSource:
    about = {"world_size": 3, "aliases": TIED, "values": VALUES, **about}
    write_checkpoint(root, sample_arrays(), **about)
    return StoreSource(root, 1)


def check_content(path: Path, arrays: Mapping[str, tuple[Any, str]]) -> None:
    with ZarrDirectorySource(path) as found:
        assert set(found.specs) == set(arrays)
        for fqn, (array, dtype) in arrays.items():
            assert found.specs[fqn] == TensorSpec(fqn=fqn, dtype=dtype, shape=array.shape)
            data = found.read(fqn, whole(array.shape))
            assert bytes(data) == np.ascontiguousarray(array).tobytes(), fqn


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("with_grids", [False, True])
def test_a_directory_gives_back_what_was_saved(
    tmp_path: Path, portable: bool, with_grids: bool
) -> None:
    source = saved(tmp_path / "a", with_grids=with_grids)
    target = exported(source, tmp_path / "out.zarr", portable=portable)
    check_content(target, sample_arrays())
    found = ZarrDirectorySource(target)
    assert (found.step, found.aliases, found.values) == (1, TIED, VALUES)
    group = zarr.open_group(target, mode="r")
    bias = group["model.bias"]
    assert isinstance(bias, zarr.Array)
    assert bias.attrs["torch_dtype"] == "bfloat16"
    assert bias.dtype == ("uint16" if portable else "bfloat16")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_directory_has_the_chunks_that_are_asked_for(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    target = exported(source, tmp_path / "out.zarr")
    for fqn, record in source.manifest.tensors.items():
        array = zarr.open_array(target / array_name(fqn), mode="r")
        assert array.chunks == record.cell
        assert array.nchunks_initialized == array.nchunks


def test_a_directory_is_never_written_over_something(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    exported(source, tmp_path / "out.zarr")
    with pytest.raises(StoreError, match="exists"):
        exported(source, tmp_path / "out.zarr")


def test_damage_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    pack = next((tmp_path / "a/step-000000000001/data").iterdir())
    data = bytearray(pack.read_bytes())
    data[3] ^= 4
    pack.write_bytes(data)
    with pytest.raises(CorruptError, match=pack.name):
        exported(source, tmp_path / "out.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_lies_in_an_earlier_step_is_written_too(tmp_path: Path) -> None:
    arrays = sample_arrays()
    write_checkpoint(tmp_path / "a", arrays, world_size=3, step=1)
    arrays["model.bias"] = (arrays["model.bias"][0] ^ 1, "bfloat16")
    write_checkpoint(tmp_path / "a", arrays, world_size=3, step=2, base=1)
    source = StoreSource(tmp_path / "a", 2)
    assert source.manifest.bases()
    check_content(exported(source, tmp_path / "out.zarr"), arrays)


def specs_of(arrays: Mapping[str, tuple[Any, str]]) -> dict[str, TensorSpec]:
    return {
        fqn: TensorSpec(fqn=fqn, dtype=dtype, shape=array.shape)
        for fqn, (array, dtype) in arrays.items()
    }


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("memory_bytes", [8 << 20, 1 << 30])
def test_a_directory_goes_through_the_interchange(
    tmp_path: Path, portable: bool, memory_bytes: int
) -> None:
    arrays = of_every_dtype() | sample_arrays()
    write_checkpoint(tmp_path / "a", arrays, world_size=2, aliases=TIED, values=VALUES)
    first = ZarrDirectorySource(exported(StoreSource(tmp_path / "a", 1), tmp_path / "one"))
    with ZarrDirectorySink(tmp_path / "two", portable=portable) as sink:
        transfer(first, sink, memory_bytes=memory_bytes, step=7)
    check_content(tmp_path / "two", arrays)
    second = ZarrDirectorySource(tmp_path / "two")
    assert (second.step, second.aliases, second.values) == (7, TIED, VALUES)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_boxes_may_cut_chunks_as_they_like(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cell = tuple(data.draw(st.integers(1, n + 1)) for n in shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [whole(())]
    for cut in cuts:
        spans = list(pairwise(cut))
        boxes = [
            Box(offset=(*box.offset, lo), shape=(*box.shape, hi - lo))
            for box in boxes
            for lo, hi in spans
        ]
    boxes = data.draw(st.permutations(boxes))
    array = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    target = tmp_path_factory.mktemp("sink") / "out"
    spec = TensorSpec(fqn="t", dtype="int32", shape=shape)
    with ZarrDirectorySink(target, cells={"t": cell}) as sink:
        sink.begin({"t": spec}, aliases={}, values={}, step=None)
        for box in boxes:
            sink.write(
                "t", box, np.ascontiguousarray(part_of(array, box)).reshape(-1).data.cast("B")
            )
        sink.finish()
    assert np.array_equal(zarr.open_array(target / "t", mode="r")[...], array)
    check_content(target, {"t": (array, "int32")})


def test_large_tensors_are_cut_into_chunks(tmp_path: Path) -> None:
    arrays = {"big": (np.arange(10 << 20, dtype="<u4").reshape(10, 1 << 20), "uint32")}
    spec = specs_of(arrays)["big"]
    with ZarrDirectorySink(tmp_path / "out") as sink:
        sink.begin({"big": spec}, aliases={}, values={}, step=None)
        pieces = list(sink.pieces(5 << 20))
        assert len(pieces) == 10
        for fqn, box in pieces:
            sink.write(fqn, box, part_of(arrays["big"][0], box).reshape(-1).data.cast("B"))
        sink.finish()
    assert zarr.open_array(tmp_path / "out/big", mode="r").chunks == (4, 1 << 20)
    check_content(tmp_path / "out", arrays)


def test_what_is_not_whole_is_not_published(tmp_path: Path) -> None:
    spec = TensorSpec(fqn="t", dtype="uint8", shape=(4,))
    half = Box(offset=(0,), shape=(2,))
    with ZarrDirectorySink(tmp_path / "out") as sink:
        sink.begin({"t": spec}, aliases={}, values={}, step=None)
        sink.write("t", half, memoryview(b"ab"))
        for box, data, said in (
            (half, b"ab", "written twice"),
            (Box(offset=(1,), shape=(2,)), b"ab", "written twice"),
            (Box(offset=(3,), shape=(2,)), b"ab", "not a part"),
            (Box(offset=(0, 0), shape=(2, 1)), b"ab", "not a part"),
            (Box(offset=(2,), shape=(2,)), b"abc", "2 are needed"),
        ):
            with pytest.raises(StateError, match=said):
                sink.write("t", box, memoryview(data))
        with pytest.raises(StateError, match="not announced"):
            sink.write("u", half, memoryview(b"ab"))
        with pytest.raises(StateError, match="0 of 1 chunks"):
            sink.finish()
    assert list(tmp_path.iterdir()) == []


HALF_A_CHUNK_AND_DIE = """
import os, signal, sys
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.convert.zarr_export import ZarrDirectorySink
sink = ZarrDirectorySink(sys.argv[1])
sink.begin({"t": TensorSpec(fqn="t", dtype="uint8", shape=(4,))}, aliases={}, values={}, step=None)
sink.write("t", Box(offset=(0,), shape=(2,)), memoryview(b"xx"))
sink.write("t", Box(offset=(2,), shape=(2,)), memoryview(b"xx"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_sink_left_is_not_taken_for_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HALF_A_CHUNK_AND_DIE, str(tmp_path / "out")], timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    array = np.arange(4, dtype="|u1")
    with ZarrDirectorySink(tmp_path / "out") as sink:
        sink.begin(specs_of({"t": (array, "uint8")}), aliases={}, values={}, step=None)
        for at in (0, 2):
            box = Box(offset=(at,), shape=(2,))
            sink.write("t", box, array[at : at + 2].data)
        sink.finish()
    check_content(tmp_path / "out", {"t": (array, "uint8")})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
