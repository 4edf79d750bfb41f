"""A checkpoint opened as a read-only group of zarr-python."""

from __future__ import annotations

import zarr

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.format.zarr_metadata import group_metadata, hierarchy
from holdfast.ckpt.zarr.store import CheckpointStore, SourceRanges
from holdfast.ckpt.zarr.types import register


def group(source: StoreSource, *, portable: bool = False) -> zarr.Group:
    """Return the checkpoint as a read-only `zarr.Group`; missing chunks are errors.

    bfloat16 and float8 have the data types of `holdfast.ckpt.zarr.types`, unsigned integers if
    ``portable``.
    """
    register()
    manifest = source.manifest
    documents, places = hierarchy(
        manifest.tensors,
        manifest.aliases,
        source.all_packs(),
        group=group_metadata(run=manifest.run, step=manifest.step, values=manifest.values),
        portable=portable,
    )
    return zarr.open_group(CheckpointStore(SourceRanges(source), documents, places), mode="r")
