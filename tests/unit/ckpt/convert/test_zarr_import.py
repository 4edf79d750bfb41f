"""Zarr directories from other writers, as sources of tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr

from holdfast.ckpt.convert.zarr_import import ZarrDirectorySource
from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box


def write(path: Path, name: str, data: Any, **options: Any) -> Any:
    group = zarr.open_group(path, mode="a", zarr_format=options.pop("zarr_format", 3))
    array = group.create_array(name, shape=data.shape, dtype=data.dtype, **options)
    array[...] = data
    return array


WEIGHT = np.arange(1, 36, dtype="<f4").reshape(7, 5)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_at_any_depth_have_dotted_names(tmp_path: Path, zarr_format: int) -> None:
    write(tmp_path, "layers/0/weight", WEIGHT, chunks=(2, 3), zarr_format=zarr_format)
    write(tmp_path, "bias", WEIGHT[0].astype("<i8"), zarr_format=zarr_format)
    with ZarrDirectorySource(tmp_path) as found:
        assert {fqn: (s.dtype, s.shape) for fqn, s in found.specs.items()} == {
            "layers.0.weight": ("float32", (7, 5)),
            "bias": ("int64", (5,)),
        }
        assert (found.aliases, found.values, found.step) == ({}, {}, None)
        box = Box(offset=(1, 2), shape=(4, 3))
        assert bytes(found.read("layers.0.weight", box)) == WEIGHT[1:5, 2:5].tobytes()
        assert bytes(found.read("bias", Box(offset=(2,), shape=(0,)))) == b""
        with pytest.raises(NotFoundError, match="no tensor 'weight'"):
            found.read("weight", box)


def test_a_lone_array_is_called_like_its_directory(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "weight.zarr", shape=(), dtype="f8")
    array[...] = 1.5
    found = ZarrDirectorySource(tmp_path / "weight.zarr")
    assert bytes(found.read("weight", whole(()))) == np.float64(1.5).tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c16", ml_dtypes.bfloat16])
def test_other_byte_orders_come_out_little_endian(tmp_path: Path, dtype: Any) -> None:
    native = np.dtype(dtype).newbyteorder("<")
    data = np.arange(1, 7).astype(native)
    array = zarr.create_array(
        tmp_path / "t",
        shape=(6,),
        dtype=native,
        serializer=zarr.codecs.BytesCodec(endian="big"),
    )
    array[...] = data
    assert bytes(ZarrDirectorySource(tmp_path / "t").read("t", whole((6,)))) == data.tobytes()


def test_unsigned_integers_are_what_their_attribute_says(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0x7FC1, 0xFFFF], "<u2")
    write(tmp_path, "a", bits, attributes={"torch_dtype": "bfloat16"})
    write(tmp_path, "b", bits)
    found = ZarrDirectorySource(tmp_path)
    assert (found.specs["a"].dtype, found.specs["b"].dtype) == ("bfloat16", "uint16")
    assert bytes(found.read("a", whole((3,)))) == bits.tobytes()


@pytest.mark.parametrize("said", ["float32", "int8", 3, "nonsense"])
def test_an_attribute_that_does_not_fit_is_refused(tmp_path: Path, said: Any) -> None:
    write(tmp_path, "a", np.zeros(3, "<u2"), attributes={"torch_dtype": said})
    with pytest.raises(MismatchError, match=r"array a: data type 'uint16' with torch_dtype"):
        ZarrDirectorySource(tmp_path)


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("dtype", ["M8[s]", "S4", [("x", "<f4")]])
def test_types_that_torch_does_not_have_are_refused(tmp_path: Path, dtype: Any) -> None:
    write(tmp_path, "when", np.zeros(3, dtype))
    with pytest.raises(MismatchError, match="array when: data type"):
        ZarrDirectorySource(tmp_path)


def test_names_that_meet_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a/b", WEIGHT)
    write(tmp_path, "a.b", WEIGHT)
    with pytest.raises(MismatchError, match=r"both called a\.b"):
        ZarrDirectorySource(tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFoundError, match="no Zarr array or group"):
            ZarrDirectorySource(path)


def test_a_missing_chunk_is_an_error_unless_it_is_said_to_be_the_fill_value(tmp_path: Path) -> None:
    data = WEIGHT.copy()
    data[2:4] = 0
    write(tmp_path, "w", data, chunks=(2, 5), fill_value=0)  # leaves out the chunk of zeros
    strict, filled = ZarrDirectorySource(tmp_path), ZarrDirectorySource(tmp_path, missing="fill")
    assert bytes(filled.read("w", whole((7, 5)))) == data.tobytes()
    assert bytes(strict.read("w", Box(offset=(0, 0), shape=(2, 5)))) == data[:2].tobytes()
    with pytest.raises(CorruptError, match=r"w/c/1/0: missing.*missing='fill'"):
        strict.read("w", whole((7, 5)))


def test_a_chunk_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write(tmp_path, "w", WEIGHT, compressors=[zarr.codecs.Crc32cCodec()])
    (chunk,) = (p for p in (tmp_path / "w/c").rglob("*") if p.is_file())
    good = chunk.read_bytes()
    for bad in (bytes([good[0] ^ 1]) + good[1:], good[:-1], b""):
        chunk.write_bytes(bad)
        with pytest.raises(CorruptError, match=rf"{tmp_path}/w: a chunk of .* cannot be read"):
            ZarrDirectorySource(tmp_path).read("w", whole((7, 5)))


@pytest.mark.parametrize(
    "attributes",
    [
        {"holdfast": {"aliases": {"b": "nothing"}}},
        {"holdfast": {"aliases": {"w": "w"}}},
        {"holdfast": {"aliases": ["w"]}},
        {"holdfast": {"step": "one"}},
        {"holdfast": 3},
        {"holdfast": {}, "values": []},
    ],
)
def test_attributes_that_make_no_sense_are_refused(
    tmp_path: Path, attributes: dict[str, Any]
) -> None:
    write(tmp_path, "w", WEIGHT)
    document = json.loads((tmp_path / "zarr.json").read_text())
    (tmp_path / "zarr.json").write_text(json.dumps(document | {"attributes": attributes}))
    with pytest.raises(CorruptError, match="export it again"):
        ZarrDirectorySource(tmp_path)


def test_metadata_that_is_no_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text("{")
    with pytest.raises(CorruptError, match="not a Zarr group"):
        ZarrDirectorySource(tmp_path)


def test_every_cut_of_the_metadata_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "w", WEIGHT, chunks=(2, 3))
    for document in (tmp_path / "w/zarr.json", tmp_path / "zarr.json"):
        data = document.read_bytes()
        for end in range(0, len(data), 31):
            document.write_bytes(data[:end])
            with pytest.raises((CorruptError, MismatchError, NotFoundError)):
                assert ZarrDirectorySource(tmp_path).specs
        document.write_bytes(data)


def test_a_chunk_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    zarr.open_group(tmp_path).create_array("w", shape=(1 << 50,), dtype="u1", chunks=(1 << 50,))
    with pytest.raises(MismatchError, match="write it with smaller chunks"):
        ZarrDirectorySource(tmp_path, missing="fill")


def test_pipes_and_sparse_files_do_not_stop_the_reader(tmp_path: Path) -> None:
    write(tmp_path, "w", WEIGHT, chunks=(7, 5))
    chunk = tmp_path / "w/c/0/0"
    with chunk.open("wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(CorruptError, match="6442450944 bytes, such a file has at most"):
        ZarrDirectorySource(tmp_path).read("w", whole((7, 5)))
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CorruptError, match="not a regular file"):
        ZarrDirectorySource(tmp_path).read("w", whole((7, 5)))
    (tmp_path / "zarr.json").unlink()
    os.mkfifo(tmp_path / "zarr.json")
    with pytest.raises(CorruptError, match="not a regular file"):
        ZarrDirectorySource(tmp_path)
