"""A checkpoint opened as a read-only group of zarr-python."""

from __future__ import annotations

from math import prod

import zarr

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.format.zarr_metadata import chunk_places, group_metadata, hierarchy
from holdfast.ckpt.zarr.store import CheckpointStore, SourceRanges
from holdfast.ckpt.zarr.types import register


def _without_cells(source: StoreSource) -> str | None:
    """Return a tensor of which not every Zarr chunk is stored in one piece."""
    stored = dict.fromkeys(source.manifest.tensors, 0)
    for fqn, _, _ in chunk_places(source.manifest.tensors, source.packs):
        stored[fqn] += 1
    for fqn, record in source.manifest.tensors.items():
        cells = (-(-n // c) for n, c in zip(record.shape, record.cell, strict=True))
        if stored[fqn] != prod(cells):
            return f"tensor {fqn}"
    return None


def group(source: StoreSource, *, portable: bool = False) -> zarr.Group:
    """Return the checkpoint as a read-only `zarr.Group`; missing chunks are errors.

    bfloat16 and float8 have the data types of `holdfast.ckpt.zarr.types`, unsigned integers if
    ``portable``. Raises ``MismatchError`` for a step with a register that has boxes which are no
    Zarr chunks.
    """
    register()
    manifest = source.manifest
    if manifest.register is not None and (lacking := _without_cells(source)):
        raise MismatchError(
            f"{source.origin}: {lacking} was saved in boxes that are no Zarr chunks, and a step of "
            "so many writers does not repeat them: convert it (holdfast convert STEP OUT.zarr)"
        )
    documents, places = hierarchy(
        manifest.tensors,
        manifest.aliases,
        source.all_packs(),
        group=group_metadata(run=manifest.run, step=manifest.step, values=manifest.values),
        portable=portable,
    )
    return zarr.open_group(CheckpointStore(SourceRanges(source), documents, places), mode="r")
