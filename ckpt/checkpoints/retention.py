"""Removal of steps, and of the files that no remaining step needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast.ckpt.checkpoints.attempts import remove_all_remains
from holdfast.ckpt.checkpoints.bases import needed_packs
from holdfast.ckpt.checkpoints.catalog import folders, load_manifest, noted, step_folder
from holdfast.ckpt.checkpoints.refmap import heal
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.format.manifest import MANIFEST, REFS, RETAINED, seal_note
from holdfast.ckpt.store.base import Store


def remove_steps(store: Store, going: Sequence[int]) -> None:
    """Remove steps, the files that only they, or steps removed before, needed, and remains.

    A note of a step's files is written before its manifest is removed. If the process is killed in
    between, the next one finds the remaining files, and touches no file of an active saver.
    """
    for step in going:
        folder = step_folder(step)
        note(store, folder, _files(store, folder))
        store.delete([f"{folder}/{MANIFEST}"])
    remove_all_remains(store)
    sweep(store)


def note(store: Store, folder: str, files: Iterable[str]) -> None:
    """Record files, by path, that may be removed once the manifest there does not list them."""
    there = noted(store, folder)
    together = sorted({*(there or ()), *files})
    if there != together:
        store.write(f"{folder}/{RETAINED}", [seal_note(together)])


def sweep(store: Store, *, only: int | None = None) -> None:
    """Remove the noted files that no step needs any more, of one step's folder or of all."""
    noticed = []
    for folder in map(step_folder, _with_notes(store) if only is None else [only]):
        try:
            kept = {file.path for file in load_manifest(store, folder).files()}
        except NotFoundError:
            kept = set()
        except CorruptError:
            continue
        if (paths := noted(store, folder)) is not None:
            noticed.append((folder, {f"{folder}/{path}" for path in {*paths} - kept}))
    if (
        not noticed or (needed := needed_packs(store)) is None
    ):  # after the manifests: see holdfast.ckpt.checkpoints.bases
        return
    for folder, files in noticed:
        store.delete(sorted(files - needed))
        if f"{folder}/{REFS}" in files:
            heal(store, folder)  # the step may have been saved again meanwhile
        if not files & needed:
            store.delete([f"{folder}/{RETAINED}"])
            if not any(store.names(f"{folder}/{part}") for part in ("data", "index")):
                store.remove(folder)


def _with_notes(store: Store) -> list[int]:
    return [info.step for info in folders(store) if info.retained]


def _files(store: Store, folder: str) -> Iterator[str]:
    """Yield the files of a step; where its manifest is damaged, all files in its folder."""
    try:
        yield from (file.path for file in load_manifest(store, folder).files())
    except CorruptError:
        yield REFS
        for part in ("data", "index"):
            yield from (f"{part}/{name}" for name in store.names(f"{folder}/{part}"))
    except NotFoundError:
        return
