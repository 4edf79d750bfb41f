"""A node's contents of one snapshot, and the files that readers on its host may map."""

from __future__ import annotations

from holdfast.ckpt.memory.hosts import FileRef
from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.messages import Key, SnapshotHoldings
from holdfast.ckpt.sidecar.core.slots import Slot
from holdfast.ckpt.sidecar.parity.rows import Parities, ParityRow


def holdings_of(core: Core, parities: Parities, body: Key) -> SnapshotHoldings:
    """Return this node's contents of a snapshot; called under the lock."""
    key = (body.generation, body.step)
    slots = [slot for slot in core.slots.of(key) if slot.entry and not slot.leaving]
    rows = parities.sealed(key)
    snapshot = core.book.snapshots.get(key)
    return SnapshotHoldings(
        blocks=tuple(slot.entry for slot in slots if slot.entry),
        parities=tuple(row.entry for row in rows),
        sealed=tuple(snapshot.entries.values()) if snapshot else (),
        host=core.host,
        block_files=tuple(_file(slot) for slot in slots),
        row_files=tuple(_file(row) for row in rows),
    )


def _file(holder: Slot | ParityRow) -> FileRef | None:
    try:
        return None if holder.file is None else FileRef.of(holder.file.path)
    except OSError:
        return None  # removed meanwhile
