"""TensorStore opens what Holdfast exports, and a checkpoint itself through its view."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from doubles.checkpoints import write_checkpoint
from zarr_samples import Arrays, exported, of_every_dtype

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.convert.zarr_export import ZarrDirectorySink
from holdfast.ckpt.convert.zarr_import import ZarrDirectorySource
from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.inspect.view import Checkpoint
from holdfast.ckpt.state import torch_dtypes
from holdfast.tools.cli import main


def opened(path: Path, name: str, **options: Any) -> Any:
    return ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path / name}/"},
            "fill_missing_data_reads": False,
            **options,
        },
        read=True,
    ).result()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> StoreSource:
    root = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(root, of_every_dtype(), world_size=3)
    return StoreSource(root, 1)


@pytest.mark.parametrize("portable", [False, True])
def test_every_dtype_has_the_same_bits_there(
    source: StoreSource, tmp_path: Path, portable: bool
) -> None:
    target = exported(source, tmp_path / "out.zarr", portable=portable)
    for fqn, (array, dtype) in of_every_dtype().items():
        found = opened(target, fqn)
        assert found.dtype.name == DTYPES[dtype].zarr_name(portable=portable)
        assert found.shape == array.shape
        assert found.chunk_layout.read_chunk.shape == source.manifest.tensors[fqn].cell
        assert found.read().result().tobytes() == array.tobytes(), fqn
        part = found[1:6:2, 2:].read().result()
        assert np.ascontiguousarray(part).tobytes() == array[1:6:2, 2:].tobytes()


COMPRESSIONS = [
    *("none", "zstd:1", "zstd", "zstd:22", "blosc-lz4", "blosc-lz4:0", "blosc-lz4hc:9"),
    *("blosc-blosclz", "blosc-zstd:1", "blosc-zlib"),
]
"""Every codec, the two ends of the levels included."""


def compressible() -> Arrays:
    """Return one array per dtype: random bits, each row eight times."""
    return {
        fqn: (np.repeat(array, 8, axis=0), dtype)
        for fqn, (array, dtype) in of_every_dtype((5, 33)).items()
    }


def chunks_as_files(step: Path, folder: Path) -> Path:
    """Copy what a checkpoint's reference map refers to into files named by its keys.

    TensorStore opens no reference maps. The documents and the chunks stay as they were written.
    """
    found = json.loads((step / "refs.json").read_bytes())
    for key, value in found["refs"].items():
        target = folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            target.write_text(value)
            continue
        path, at, nbytes = value
        pack = Path(path.replace("{{root}}", found["templates"]["root"])).read_bytes()
        target.write_bytes(pack[at : at + nbytes])
    return folder


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_checkpoints_own_compressed_chunks_open_there(tmp_path: Path, compression: str) -> None:
    arrays = compressible()
    root = tmp_path / "a"
    write_checkpoint(root, arrays, world_size=2, compression={"*": compression})
    own = Checkpoint(StoreSource(root, 1)).zarr()
    folder = chunks_as_files(root / "step-000000000001", tmp_path / "chunks")
    codec = compression.partition(":")[0].partition("-")[0]
    for fqn, (array, _) in arrays.items():
        codecs = json.loads((folder / fqn / "zarr.json").read_bytes())["codecs"]
        names = ["bytes", *([codec] if codec != "none" else []), "crc32c"]
        assert [each["name"] for each in codecs] == names
        chunks = [path for path in (folder / fqn / "c").rglob("*") if path.is_file()]
        stored = sum(path.stat().st_size for path in chunks)
        assert (stored < array.nbytes) == (compression not in {"none", "blosc-lz4:0"}), fqn
        found = opened(folder, fqn)
        assert found.read().result().tobytes() == array.tobytes(), fqn
        part = found[3:30:4, 2:].read().result()
        assert np.ascontiguousarray(part).tobytes() == array[3:30:4, 2:].tobytes()
        ours = own[fqn]
        assert isinstance(ours, zarr.Array)
        assert np.asarray(ours[...]).tobytes() == array.tobytes(), fqn


def test_a_damaged_compressed_chunk_is_an_error_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", compressible(), compression={"*": "zstd"})
    folder = chunks_as_files(tmp_path / "a/step-000000000001", tmp_path / "chunks")
    chunk = folder / "t.float32/c/0/0"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ValueError, match="Digest mismatch"):
        opened(folder, "t.float32").read().result()


@pytest.mark.parametrize("options", [(), ("--named-types",)])
def test_a_converted_compressed_checkpoint_opens_there(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The command writes plain chunks: every codec is read, none is written."""
    arrays = compressible()
    rules = dict(zip(arrays, itertools.cycle(COMPRESSIONS), strict=False))
    write_checkpoint(tmp_path / "a", arrays, world_size=2, compression=rules)
    target = tmp_path / "out.zarr"
    assert main(["convert", str(tmp_path / "a"), str(target), *options]) == 0
    for fqn, (array, _) in arrays.items():
        assert opened(target, fqn).read().result().tobytes() == array.tobytes(), fqn
        box = whole(array.shape)
        assert bytes(ZarrDirectorySource(target).read(fqn, box)) == array.tobytes(), fqn


@pytest.mark.parametrize("portable", [False, True])
def test_a_missing_chunk_is_an_error_or_nan_never_zero(
    source: StoreSource, tmp_path: Path, portable: bool
) -> None:
    target = exported(source, tmp_path / "out.zarr", portable=portable)
    for name in ("t.float32", "t.bfloat16", "t.float8_e4m3fn", "t.float8_e8m0fnu"):
        (target / name / "c/1/0").unlink()
        with pytest.raises(ValueError, match="missing"):
            opened(target, name).read().result()
        filled = opened(target, name, fill_missing_data_reads=True).read().result()
        dtype = torch_dtypes.BY_NAME[name.removeprefix("t.")]
        kind = np.dtype(DTYPES[name.removeprefix("t.")].numpy)
        lost = torch.from_numpy(np.ascontiguousarray(filled[3:6]).view(kind)).view(dtype)
        assert lost.float().isnan().all()


def test_damage_is_noticed_there(source: StoreSource, tmp_path: Path) -> None:
    target = exported(source, tmp_path / "out.zarr")
    chunk = target / "t.bfloat16/c/1/0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ValueError, match="Digest mismatch"):
        opened(target, "t.bfloat16").read().result()


def test_what_came_through_the_interchange_opens_there_too(
    source: StoreSource, tmp_path: Path
) -> None:
    first = ZarrDirectorySource(exported(source, tmp_path / "one"))
    with ZarrDirectorySink(tmp_path / "two") as sink:
        transfer(first, sink)
    for fqn, (array, _) in of_every_dtype().items():
        assert opened(tmp_path / "two", fqn).read().result().tobytes() == array.tobytes(), fqn


def test_what_tensorstore_writes_loads_here(tmp_path: Path) -> None:
    for fqn, (array, dtype) in of_every_dtype().items():
        if DTYPES[dtype].registered is None and not DTYPES[dtype].native:
            continue
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path / 'group' / fqn}/"},
            "metadata": {
                "shape": array.shape,
                "data_type": dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 3]}},
            },
        }
        made = ts.open(spec, create=True).result()
        made.write(array.view(made.dtype.numpy_dtype)).result()
        found = ZarrDirectorySource(tmp_path / "group" / fqn, missing="fill")
        (name,) = found.specs
        assert found.specs[name].dtype == dtype
        assert bytes(found.read(name, whole(array.shape))) == array.tobytes(), dtype


def test_a_checkpoint_is_read_directly_as_a_virtual_array(source: StoreSource) -> None:
    view = Checkpoint(source)["t.bfloat16"]

    def read(domain: Any, out: Any, _: Any) -> None:
        box = tuple(slice(d.inclusive_min, d.exclusive_max) for d in domain)
        out[...] = view[box].view(torch.int16).numpy().view(out.dtype)

    array = ts.virtual_chunked(
        read,
        dtype=ts.bfloat16,
        domain=ts.IndexDomain(shape=view.shape),
        chunk_layout=ts.ChunkLayout(chunk_shape=source.manifest.tensors["t.bfloat16"].cell),
    )
    wanted = of_every_dtype()["t.bfloat16"][0]
    assert array.read().result().tobytes() == wanted.tobytes()
    assert array[2:5, 1].read().result().tobytes() == wanted[2:5, 1].tobytes()
