"""bfloat16 and float8 as data types of zarr-python."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from zarr.dtype import DataTypeValidationError, data_type_registry, parse_dtype
from zarr.storage import MemoryStore

from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.zarr.types import (
    TYPES,
    BFloat16,
    Float8E4M3FN,
    Float8E8M0FNU,
    SmallFloat,
    register,
)

every_type = pytest.mark.parametrize("kind", TYPES, ids=[kind._zarr_v3_name for kind in TYPES])


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def test_the_package_declares_every_type_as_an_entry_point() -> None:
    found = {point.name: point.load() for point in entry_points(group="zarr.data_type")}
    assert found == {kind._zarr_v3_name: kind for kind in TYPES}


def test_the_entry_points_open_arrays_and_do_not_import_torch() -> None:
    script = """
import sys, zarr
from zarr.dtype import data_type_registry
data_type_registry._lazy_load()
print(zarr.create_array({}, shape=(2,), dtype="bfloat16")[...].dtype, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "bfloat16 False\n", done.stderr


def test_registering_again_changes_nothing() -> None:
    before = dict(data_type_registry.contents)
    register()
    assert data_type_registry.contents == before


def test_another_packages_type_of_the_same_name_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Theirs", (BFloat16,), {})
    monkeypatch.setitem(data_type_registry.contents, "bfloat16", theirs)
    register()
    assert data_type_registry.contents["bfloat16"] is theirs


@every_type
def test_every_type_goes_through_json_and_numpy_and_back(kind: type[SmallFloat]) -> None:
    ours = kind()
    name = ours.to_json(zarr_format=3)
    assert json.loads(json.dumps(name)) == name == kind._zarr_v3_name
    for spelling in (name, {"name": name}, {"name": name, "configuration": {}}):
        assert kind.from_json(spelling, zarr_format=3) == ours  # type: ignore[arg-type]
    assert parse_dtype(name, zarr_format=3) == ours
    native = ours.to_native_dtype()
    assert native == np.dtype(getattr(ml_dtypes, name))
    assert data_type_registry.match_dtype(native) == ours
    assert ours.item_size == native.itemsize == getattr(torch, name).itemsize
    assert DTYPES[name].registered == name


@every_type
def test_other_dtypes_are_not_taken_for_ours(kind: type[SmallFloat]) -> None:
    others = {t for t in TYPES if t is not kind}
    for dtype in (np.dtype("f4"), np.dtype("V2"), *(t().to_native_dtype() for t in others)):
        with pytest.raises(DataTypeValidationError):
            kind.from_native_dtype(dtype)
    for spec in ("float32", {"name": "float32"}, {"name": kind._zarr_v3_name, "configuration": 1}):
        with pytest.raises(DataTypeValidationError):
            kind.from_json(spec, zarr_format=3)  # type: ignore[arg-type]


@every_type
def test_zarr_v2_has_no_name_for_them(kind: type[SmallFloat]) -> None:
    with pytest.raises(DataTypeValidationError, match="Zarr v2"):
        kind.from_json({"name": "<V2", "object_codec_id": None}, zarr_format=2)
    with pytest.raises(ValueError, match="Zarr v3"):
        kind().to_json(zarr_format=2)


@every_type
def test_every_bit_pattern_survives_as_a_fill_value(kind: type[SmallFloat]) -> None:
    ours = kind()
    patterns = np.arange(1 << 8 * ours.item_size, dtype=f"u{ours.item_size}")
    for scalar in patterns.view(ours.to_native_dtype()):
        said = json.loads(json.dumps(ours.to_json_scalar(scalar, zarr_format=3), allow_nan=False))
        back = ours.from_json_scalar(said, zarr_format=3)
        assert back.tobytes() == scalar.tobytes(), said


@pytest.mark.parametrize(
    ("kind", "said", "bits"),
    [
        (BFloat16, "NaN", 0x7FC0),
        (BFloat16, "0x7fc1", 0x7FC1),
        (BFloat16, "Infinity", 0x7F80),
        (BFloat16, "-Infinity", 0xFF80),
        (BFloat16, -0.0, 0x8000),
        (BFloat16, 1, 0x3F80),
        (Float8E4M3FN, "NaN", 0x7F),
        (Float8E4M3FN, 448.0, 0x7E),
        (Float8E8M0FNU, "NaN", 0xFF),
        (Float8E8M0FNU, 1.0, 0x7F),
        (Float8E8M0FNU, 0.0, 0xFF),
    ],
)
def test_fill_values_have_the_bits_the_registry_says(
    kind: type[SmallFloat], said: Any, bits: int
) -> None:
    scalar = kind().from_json_scalar(said, zarr_format=3)
    assert int.from_bytes(scalar.tobytes(), "little") == bits


@pytest.mark.parametrize("bad", ["0x7f", "0x7fc00", "0xzzzz", "inf", "1.0", "", None, True, [1]])
def test_a_fill_value_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        BFloat16().from_json_scalar(bad, zarr_format=3)


def test_what_a_type_does_not_have_is_refused_not_rounded_to_nan() -> None:
    for bad in (float("inf"), 1e30, "Infinity", None, "text", object()):
        with pytest.raises(TypeError, match="float8_e4m3fn"):
            Float8E4M3FN().cast_scalar(bad)
    with pytest.raises(TypeError, match="e8m0"):
        Float8E8M0FNU().cast_scalar(0.0)
    with pytest.raises(TypeError):
        Float8E4M3FN().from_json_scalar("Infinity", zarr_format=3)
    assert np.isnan(float(Float8E8M0FNU().default_scalar()))  # type: ignore[arg-type]
    assert float(Float8E4M3FN().default_scalar()) == 0.0  # type: ignore[arg-type]
    assert float(BFloat16().cast_scalar(np.float32(1.5))) == 1.5  # type: ignore[arg-type]


@every_type
@pytest.mark.parametrize("endian", ["little", "big"])
def test_arrays_are_written_and_read_with_every_bit(kind: type[SmallFloat], endian: str) -> None:
    native = kind().to_native_dtype()
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 60 * native.itemsize, dtype=np.uint8).view(native).reshape(6, 10)
    store = MemoryStore()
    array = zarr.create_array(
        store,
        shape=data.shape,
        chunks=(4, 3),
        dtype=kind(),
        serializer=zarr.codecs.BytesCodec(endian=endian),
        fill_value="NaN",
    )
    array[...] = data
    again = zarr.open_array(store, mode="r")
    assert again.metadata.to_dict()["data_type"] == kind._zarr_v3_name
    found = again[...]
    assert found.astype(native).tobytes() == data.tobytes()
    chunk = store._store_dict["c/0/0"].to_bytes()  # zstd, whatever is inside
    assert chunk
