"""Finding checkpoints: those in a run's folder, and the one that a path names."""

from __future__ import annotations

import re
from typing import Final

from holdfast import ckpt
from holdfast.adapters.torchtitan.origin import LoadOrigin, StepsThere, StoredState
from holdfast.ckpt.checkpoints.catalog import choose, committed, latest, step_folder
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import SCHEMES, locate, open_store, scheme_of

_METADATA: Final = ".metadata"
_THEIRS: Final = re.compile(r"step-(\d{1,11})")


def steps_there(folder: str) -> StepsThere:
    """Return the steps of both formats in a run's folder, oldest first.

    Raises ``CorruptError`` if all of Holdfast's are damaged.
    """
    store = open_store(folder)
    return StepsThere(ours=tuple(committed(store)), theirs=_theirs(store), trusted=latest(folder))


def _theirs(store: Store) -> tuple[int, ...]:
    """Return the steps that torchtitan's own manager wrote in full: DCP writes its file last."""
    found = (_THEIRS.fullmatch(name) for name in store.names(""))
    steps = [match for match in found if match and store.size(f"{match[0]}/{_METADATA}")]
    return tuple(sorted(int(match[1]) for match in steps))


def named_by(path: str, *, model_only: bool) -> LoadOrigin | None:
    """Return the checkpoint of Holdfast's or of DCP's that a path names; None if there is none.

    A root of Holdfast's names its newest step that can be trusted. A scheme that Holdfast has no
    store for is left to torchtitan: its files count as DCP's.
    """
    if scheme_of(path) not in {*SCHEMES, ""}:
        return LoadOrigin(path=path, kind="dcp", model_only=model_only)
    root, step = locate(path)
    try:
        found = f"{root.rstrip('/')}/{step_folder(choose(root, step))}"
    except NotFoundError:
        if open_store(path).size(_METADATA) is None:
            return None
        return LoadOrigin(path=path, kind="dcp", model_only=model_only)
    return LoadOrigin(path=found, kind="holdfast", model_only=model_only)


def stored_state(path: str) -> StoredState:
    """Return the names in a checkpoint of Holdfast's, given its directory."""
    root, step = locate(path)
    with ckpt.open(root, step=step) as opened:
        degree = opened.values.get("dataloader.world_size")
        return StoredState(
            dtypes={name: opened[name].dtype_name for name in opened},
            values=tuple(opened.values),
            dp_degree=degree if isinstance(degree, int) else None,
        )
