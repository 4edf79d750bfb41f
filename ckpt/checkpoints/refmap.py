"""The reference map of a step, and its repair after a slower process overwrote it.

``refs.json`` is the one file of a step whose name is not new with every save: readers know it by
that name. Savers write it before they publish. So the slower one of two savers may have overwritten
it, or a remover may have removed it. The manifest tells which content is right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast.ckpt.checkpoints.catalog import load_head, load_index, read_record
from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError
from holdfast.ckpt.format.manifest import REFS, Manifest, PackIndex, TensorRecord
from holdfast.ckpt.format.zarr_metadata import group_metadata, hierarchy, references
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)


def reference_map(
    store: Store,
    folder: str,
    indexes: Mapping[int, PackIndex],
    *,
    tensors: Mapping[str, TensorRecord],
    aliases: Mapping[str, str],
    group: Json,
) -> bytes:
    """Return the bytes of the step's ``refs.json``."""
    documents, places = hierarchy(tensors, aliases, indexes, group=group)
    return references(documents, places, root=store.where("").rstrip("/"), folder=folder)


def heal(store: Store, folder: str) -> None:
    """Write the reference map of the committed step again, unless it is right.

    If that fails, the step is still good: it can be read without the map.
    """
    try:
        manifest = load_head(store, folder)
        if not _is_right(store, folder, manifest):
            _write_again(store, folder, manifest)
    except NotFoundError:
        return
    except CkptError as error:
        _log.warning("the reference map of %s is invalid: %s", folder, error)


def _is_right(store: Store, folder: str, manifest: Manifest) -> bool:
    if manifest.refs is None:
        return True
    try:
        read_record(store, folder, manifest.refs)
    except CorruptError:
        return False
    return True


def _write_again(store: Store, folder: str, manifest: Manifest) -> None:
    indexes = {record.writer: load_index(store, folder, record) for record in manifest.records()}
    group = group_metadata(run=manifest.run, step=manifest.step, values=manifest.values)
    refs = reference_map(
        store, folder, indexes, tensors=manifest.tensors, aliases=manifest.aliases, group=group
    )
    wanted = manifest.refs
    if wanted is not None and (len(refs), crc32c(refs)) == (wanted.nbytes, wanted.crc32c):
        store.write(f"{folder}/{REFS}", [refs])
