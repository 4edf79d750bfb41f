"""The fence of a root: the run, and its generation, that may publish checkpoints there.

It is one small file, replaced by compare-and-set. A run that begins to write takes it over from the
run before, which may then publish nothing more; within a run only the newest generation may. It is
read before each publication. Checkpoints that belong to no run (`holdfast.save`) are not fenced.

Reading the fence and publishing a manifest are two operations. A writer that is cut off exactly
between them can still publish a step that nobody else has published since; the manifest's own
compare-and-set keeps it from replacing one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.ckpt.errors import FencedError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.shared_record import SharedRecord
from holdfast.ckpt.types import learn

FILE: Final = "fence.json"
_FORMER: Final = 256
"""Number of earlier runs that are remembered."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RightToPublish:
    """The right of a generation of a run, in which the publishing process acts.

    It may be newer than the generation of the state, which was carried over. ``check`` is called
    before a publication, and raises ``FencedError`` if this process may not act any more.
    """

    run: str
    generation: int
    check: Callable[[], None] = _nothing


class RootFence(msgspec.Struct, frozen=True, kw_only=True):
    """The file. ``epoch`` grows with each change of the run; ``former`` are the runs before."""

    format: int = 1
    run: str
    epoch: int
    generation: int
    former: tuple[str, ...] = ()


_RECORD: Final = SharedRecord[RootFence | None](
    path=FILE,
    kind=RootFence,
    absent=None,
    damaged="not the record of the run that writes here ({}); stop all jobs that do, then remove "
    "it",
)


def take(store: Store, *, run: str, generation: int) -> None:
    """Take the fence for a generation that begins.

    A lower generation than the fence's belongs to a run that began again under its old name.
    Raises ``FencedError`` if another run took the fence over from this one, ``StoreError`` if the
    store refuses.
    """
    _enter(store, run, generation, begins=True)


def require(store: Store, right: RightToPublish) -> None:
    """Raise ``FencedError`` without the ``right`` to publish now; take the fence if it is newer."""
    right.check()
    _enter(store, right.run, right.generation, begins=False)


def load(store: Store) -> RootFence | None:
    """Return the fence, None if there is none; raises ``CorruptError`` if it is damaged."""
    return _RECORD.load(store)


def _enter(store: Store, run: str, generation: int, *, begins: bool) -> None:
    where = store.where(FILE)

    def entered(fence: RootFence | None) -> RootFence | None:
        return _after(fence, run=run, generation=generation, begins=begins, where=where)

    _RECORD.change(store, entered)


def _after(
    fence: RootFence | None, *, run: str, generation: int, begins: bool, where: str
) -> RootFence:
    """Return the fence after ``run`` has entered ``generation``."""
    if fence is None:
        return RootFence(run=run, epoch=1, generation=generation)
    if run == fence.run:
        if generation >= fence.generation:
            return msgspec.structs.replace(fence, generation=generation)
        if begins:
            return msgspec.structs.replace(fence, epoch=fence.epoch + 1, generation=generation)
        raise FencedError(
            f"{where}: generation {fence.generation} of run {run} publishes here, so generation "
            f"{generation} may not any more"
        )
    if run in fence.former:
        raise FencedError(
            f"{where}: run {fence.run} has begun to write here after run {run}, which may publish "
            f"nothing more; stop one of the two jobs. If it is run {fence.run}, start the other "
            "anew: a new run takes over"
        )
    former = (*fence.former, fence.run)[-_FORMER:]
    return RootFence(run=run, epoch=fence.epoch + 1, generation=generation, former=former)


learn(globals())
