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
from zarr_samples import of_every_dtype

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.convert.zarr_export import ZarrDirectorySink, export_zarr
from holdfast.ckpt.convert.zarr_import import ZarrDirectorySource
from holdfast.ckpt.errors import CorruptError, MismatchError, StateError, StoreError
from holdfast.ckpt.format.zarr_metadata import array_name
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.native.isal import crc32c

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
def test_an_export_gives_back_what_was_saved(
    tmp_path: Path, portable: bool, with_grids: bool
) -> None:
    source, done = saved(tmp_path / "a", with_grids=with_grids), [0]

    def progress(nbytes: int) -> None:
        done[0] += nbytes

    target = tmp_path / "out.zarr"
    assert export_zarr(source, target, portable=portable, progress=progress) == target
    check_content(target, sample_arrays())
    found = ZarrDirectorySource(target)
    assert (found.step, found.aliases, found.values) == (1, TIED, VALUES)
    group = zarr.open_group(target, mode="r")
    bias = group["model.bias"]
    assert isinstance(bias, zarr.Array)
    assert bias.attrs["torch_dtype"] == "bfloat16"
    assert bias.dtype == ("uint16" if portable else "bfloat16")
    files = [p for p in target.rglob("*") if p.is_file() and p.name != "zarr.json"]
    assert done[0] == sum(p.stat().st_size for p in files)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_export_has_the_chunks_of_the_checkpoint(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    target = export_zarr(source, tmp_path / "out.zarr")
    for fqn, record in source.manifest.tensors.items():
        array = zarr.open_array(target / array_name(fqn), mode="r")
        assert array.chunks == record.cell
        assert array.nchunks_initialized == array.nchunks


@pytest.mark.parametrize(
    ("select", "names", "tied"),
    [
        (["model.b*"], {"model.bias"}, {}),
        (["model.tied"], {"model.weight"}, TIED),
        (["model.w*", "cursor*"], {"model.weight", "cursor/odd name%"}, TIED),
    ],
)
def test_a_part_can_be_exported(
    tmp_path: Path, select: list[str], names: set[str], tied: dict[str, str]
) -> None:
    target = export_zarr(saved(tmp_path / "a"), tmp_path / "out.zarr", select=select)
    found = ZarrDirectorySource(target)
    assert set(found.specs) == names
    assert found.aliases == tied


def test_selecting_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"nope\* selects none of its 8"):
        export_zarr(saved(tmp_path / "a"), tmp_path / "out.zarr", select=["nope*"])
    assert not (tmp_path / "out.zarr").exists()


def test_an_export_is_never_written_over_something(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    export_zarr(source, tmp_path / "out.zarr")
    with pytest.raises(StoreError, match="exists"):
        export_zarr(source, tmp_path / "out.zarr")


def test_damage_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    pack = next((tmp_path / "a/step-000000000001/data").iterdir())
    data = bytearray(pack.read_bytes())
    data[3] ^= 4
    pack.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"{pack.name}.*offset 0 \(.*was damaged"):
        export_zarr(source, tmp_path / "out.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


EXPORT_AND_DIE = """
import os, signal, sys
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.zarr_export import export_zarr
done = 0
def progress(nbytes):
    global done
    done += 1
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)
export_zarr(StoreSource(sys.argv[1], 1), sys.argv[2], progress=progress)
"""


def test_what_lies_in_an_earlier_step_is_exported_too(tmp_path: Path) -> None:
    arrays = sample_arrays()
    write_checkpoint(tmp_path / "a", arrays, world_size=3, step=1)
    arrays["model.bias"] = (arrays["model.bias"][0] ^ 1, "bfloat16")
    write_checkpoint(tmp_path / "a", arrays, world_size=3, step=2, base=1)
    source = StoreSource(tmp_path / "a", 2)
    assert source.manifest.bases()
    check_content(export_zarr(source, tmp_path / "out.zarr"), arrays)


def is_complete(path: Path) -> bool:
    data = path.read_bytes()
    return len(data) > 4 and crc32c(data[:-4]).to_bytes(4, "little") == data[-4:]


def test_a_killed_export_is_gone_on_with_and_its_files_are_checked(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "a"), tmp_path / "out.zarr"
    done = subprocess.run(
        [sys.executable, "-c", EXPORT_AND_DIE, str(tmp_path / "a"), str(target)],
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    (left,) = tmp_path.glob(".out.zarr.*")
    chunks = [p for p in left.rglob("*") if p.is_file() and p.name != "zarr.json"]
    complete = [path for path in chunks if is_complete(path)]  # others were being written
    assert len(complete) >= 4
    good, torn, short, *_ = complete
    before = good.stat()
    torn.write_bytes(bytes(torn.stat().st_size))
    short.write_bytes(b"")
    export_zarr(source, target)
    after = next(p for p in target.rglob("*") if p.is_file() and p.stat().st_ino == before.st_ino)
    assert after.stat().st_mtime_ns == before.st_mtime_ns
    check_content(target, sample_arrays())


def test_the_rest_of_another_steps_export_is_not_mixed_in(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    subprocess.run(
        [sys.executable, "-c", EXPORT_AND_DIE, str(tmp_path / "a"), str(tmp_path / "out.zarr")],
        timeout=60,
        check=False,
    )
    write_checkpoint(tmp_path / "b", sample_arrays(seed=3), world_size=3)
    export_zarr(StoreSource(tmp_path / "b", 1), tmp_path / "out.zarr")
    check_content(tmp_path / "out.zarr", sample_arrays(seed=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "out.zarr"]


# -- the sink ---------------------------------------------------------------------------------


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
    first = ZarrDirectorySource(export_zarr(StoreSource(tmp_path / "a", 1), tmp_path / "one"))
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
