"""Which checkpoints may go, and their removal; the newest verified one never goes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ckpt import catalog
from ckpt.errors import StoreError
from ckpt.manifest import MANIFEST


def expendable(committed: Sequence[int], *, keep_last: int, newest_verified: int) -> list[int]:
    """Return the steps that may be removed, oldest first.

    Kept are the newest ``keep_last`` of ``committed`` and, wherever it stands, the newest one
    whose bytes can be trusted.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}, at least one checkpoint must stay")
    kept = {*sorted(committed)[-keep_last:], newest_verified}
    return [step for step in sorted(committed) if step not in kept]


def prune(root: str | Path, *, keep_last: int, dry_run: bool = False) -> list[int]:
    """Remove old checkpoints below ``root`` and return their steps.

    A step's manifest goes first, so that a checkpoint is whole or not there at any moment.
    Raises ``NotFoundError`` where there is no checkpoint, ``CorruptError`` when none can be
    trusted: then nothing is removed.
    """
    newest_verified = catalog.choose(root, None)
    committed = catalog.committed_steps(root)
    going = expendable(committed, keep_last=keep_last, newest_verified=newest_verified)
    for step in going if not dry_run else ():
        remove(root, step)
    return going


def remove(root: str | Path, step: int) -> None:
    """Remove one step. Raises ``StoreError`` when the store refuses; the rest can go later."""
    store, folder = catalog.open_store(root), catalog.step_folder(step)
    with store.locked(folder):
        store.delete([f"{folder}/{MANIFEST}"])
        try:
            shutil.rmtree(store.where(folder))
        except OSError as error:
            raise StoreError(
                f"{store.where(folder)}: cannot remove it: {error.strerror}; it no longer counts "
                "as a checkpoint, remove the directory by hand"
            ) from error
