"""Readers without any knowledge of Holdfast open its checkpoints."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zarr
from doubles.checkpoints import Array, sample_arrays, write_checkpoint
from zarr_samples import exported

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.format.zarr_metadata import array_name
from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.tools.cli import main

READER = Path(__file__).with_name("stock_zarr.py")


OURS = ("holdfast", "_editable_impl_holdfast", "torch", "ml_dtypes")


@functools.cache
def bare_packages() -> TemporaryDirectory[str]:
    """A folder of every installed package but Holdfast and those that stock readers lack."""
    folder = TemporaryDirectory()
    for package in Path(zarr.__file__).parents[1].iterdir():
        if not package.name.startswith(OURS):
            Path(folder.name, package.name).symlink_to(package)
    return folder


def read(step: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", str(READER), str(step), *options],
        env={"PYTHONPATH": bare_packages().name},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )


def expected(arrays: Mapping[str, tuple[Array, str]] | None = None) -> dict[str, Any]:
    return {
        array_name(fqn): {
            "dtype": DTYPES[dtype].zarr,
            "torch_dtype": dtype,
            "shape": list(array.shape),
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        }
        for fqn, (array, dtype) in (arrays or sample_arrays()).items()
    }


@pytest.mark.parametrize(("world_size", "with_grids"), [(1, True), (3, True), (3, False)])
def test_stock_zarr_reads_the_reference_map(
    tmp_path: Path, world_size: int, with_grids: bool
) -> None:
    write_checkpoint(
        tmp_path,
        sample_arrays(),
        world_size=world_size,
        with_grids=with_grids,
        values={"lr": 0.1},
        aliases={"model.tied": "model.weight"},
    )
    step = tmp_path / "step-000000000001"
    done = read(step)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = expected()
    assert found == {
        "arrays": wanted | {"model.tied": wanted["model.weight"]},
        "values": {"lr": 0.1},
    }


def test_stock_zarr_reads_what_is_exported_and_converted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", sample_arrays())
    folder = exported(StoreSource(tmp_path / "a", 1), tmp_path / "exported")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "converted.zarr")]) == 0
    for place in (folder, tmp_path / "converted.zarr"):
        done = read(place, "--plain")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["arrays"] == expected()


CODECS = (
    "zstd",
    "zstd:22",
    "blosc-lz4",
    "blosc-lz4hc:9",
    "blosc-blosclz",
    "blosc-zstd",
    "blosc-zlib",
)


def test_stock_zarr_reads_compressed_chunks(tmp_path: Path) -> None:
    arrays = {f"{codec}.{fqn}": each for codec in CODECS for fqn, each in sample_arrays().items()}
    rules = {f"{codec}.*": codec for codec in CODECS}
    write_checkpoint(tmp_path / "a", arrays, world_size=2, compression=rules)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "converted.zarr")]) == 0
    for done in (
        read(tmp_path / "a/step-000000000001"),
        read(tmp_path / "converted.zarr", "--plain"),
    ):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["arrays"] == expected(arrays)


def test_a_moved_checkpoint_is_read_with_its_new_root(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", sample_arrays(), world_size=2)
    shutil.move(tmp_path / "a", tmp_path / "b")
    done = read(tmp_path / "b/step-000000000001", "--moved")
    assert json.loads(done.stdout)["arrays"] == expected()


def test_stock_zarr_notices_damage_and_missing_packs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sample_arrays())
    step = tmp_path / "step-000000000001"
    (pack,) = (step / "data").iterdir()
    good = bytearray(pack.read_bytes())
    good[5] ^= 1
    pack.write_bytes(good)
    done = read(step)
    assert done.returncode != 0
    assert "checksum" in done.stderr
    pack.unlink()
    done = read(step)
    assert done.returncode != 0
    assert "failed to fetch" in done.stderr
