"""What a Snapshotter is given and what it tells: the owner of slots, settings, running totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.snapshot.tearing import SAMPLE

NICENESS = 0
"""A thread that is made to wait for a core while it holds the GIL makes training wait with it."""


class WritableSlot(Protocol):
    """A slot to write: what ``SidecarClient.acquire`` returns."""

    @property
    def slot_id(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def ahead(self) -> Sequence[str]: ...


class SlotOwner(Protocol):
    """What a Snapshotter needs of a ``SidecarClient``."""

    def acquire(
        self, *, generation: int, step: int, rank: int, size_bytes: int, timeout_s: float
    ) -> WritableSlot: ...

    def seal(
        self,
        *,
        slot_id: int,
        entry: BlockEntry,
        sums: Sums | None = None,
        persist: CheckpointTarget | None = None,
    ) -> None: ...

    def abandon(self, slot_id: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """How the copy is made.

    ``paced``: spread over the time until the optimizer step, as learned; else at full speed.
    ``niceness`` of the copying thread: above 0 it waits for idle cores, also where it holds the
    GIL, so that this pays only where training holds it little. ``recheck`` is the share of the
    bytes that is looked at twice to notice writes that leave no trace, 1.0 for all of them (to
    find a bug).
    """

    paced: bool = True
    niceness: int = NICENESS
    recheck: float = SAMPLE

    def __post_init__(self) -> None:
        if not 0 <= self.niceness <= 19:
            raise ValueError(f"niceness={self.niceness}: use 0 (as training) to 19")
        if not 0 <= self.recheck <= 1:
            raise ValueError(f"recheck={self.recheck}: use a share of the bytes, 0 to 1")


@dataclass(slots=True, kw_only=True)
class SnapshotStats:
    """Running totals. ``stall_s`` is what the training thread waited, ``copy_s`` the thread's work.

    ``torn`` names the tensor that was written to under the copy of the last discarded snapshot;
    ``reason`` says in a sentence why the last one was discarded. ``left_out`` counts those among
    ``discarded`` for which there was no room. ``pace`` is the speed that the last copy was held
    to, in bytes per second. ``replica_bytes`` is what this rank holds of the state and other ranks
    write, who hold the same.
    """

    taken: int = 0
    discarded: int = 0
    left_out: int = 0
    replans: int = 0
    torn: str | None = None
    reason: str = ""
    stall_s: float = 0.0
    copy_s: float = 0.0
    wait_s: float = 0.0
    bytes: int = 0
    last_step: int = -1
    last_copy_s: float = 0.0
    pace: float = 0.0
    replica_bytes: int = 0


@dataclass(slots=True)
class Hooks:
    """Calls on each of several optimizers before it steps, once however often it is named."""

    handles: WeakKeyDictionary[Optimizer, RemovableHandle] = field(
        default_factory=WeakKeyDictionary
    )

    def watch(self, optimizer: Optimizer, before_step: Callable[[], None]) -> None:
        """Call ``before_step`` before every step of ``optimizer``."""
        if optimizer not in self.handles:
            self.handles[optimizer] = optimizer.register_step_pre_hook(lambda *_: before_step())

    def remove(self) -> None:
        """Call nothing any more."""
        for handle in self.handles.values():
            handle.remove()
        self.handles.clear()
