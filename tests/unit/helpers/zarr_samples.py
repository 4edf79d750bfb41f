"""Arrays of every storable dtype, with random bits, and checkpoints as Zarr directories."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.checkpoint import CheckpointSource
from holdfast.ckpt.convert.interchange import transfer
from holdfast.ckpt.convert.zarr_export import ZarrDirectorySink
from holdfast.ckpt.geometry.element_types import DTYPES

Arrays = dict[str, tuple[npt.NDArray[Any], str]]


def of_every_dtype(shape: tuple[int, ...] = (7, 5), seed: int = 0) -> Arrays:
    """Return one array per dtype, as numpy's view of it: any bits, those of NaNs included."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, dtype in DTYPES.items():
        top = 2 if name == "bool" else 256
        raw = rng.integers(0, top, prod(shape) * dtype.itemsize, dtype=np.uint8)
        arrays[f"t.{name}"] = (raw.view(dtype.numpy).reshape(shape), name)
    return arrays


def exported(source: StoreSource, target: Path, *, portable: bool = True) -> Path:
    """Write a checkpoint as a Zarr directory with the checkpoint's own chunks."""
    grids = {fqn: record.cell for fqn, record in source.manifest.tensors.items()}
    with ZarrDirectorySink(target, portable=portable, cells=grids) as sink:
        transfer(CheckpointSource(source), sink, step=source.manifest.step)
    return target
