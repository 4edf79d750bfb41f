"""A Snapshotter's interface to the owner of slots, its settings and its running totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.ckpt.memory.arena import FixedPart
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.sums import Lengths, Sums
from holdfast.ckpt.snapshot.fixed_choice import LEAST_BYTES
from holdfast.ckpt.snapshot.lanes import refuse_captured
from holdfast.ckpt.snapshot.tearing import SAMPLE

NICENESS = 0
"""The default niceness. A nice thread that waits for a core holds the GIL: training waits too."""


class WritableSlot(Protocol):
    """A slot to write, as ``SidecarClient.acquire`` returns it."""

    @property
    def slot_id(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def ahead(self) -> Sequence[str]: ...
    @property
    def has_fixed(self) -> bool: ...
    @property
    def before(self) -> tuple[int, int, int] | None: ...


class SlotOwner(Protocol):
    """The part of a ``SidecarClient`` that a Snapshotter uses."""

    def acquire(
        self,
        *,
        generation: int,
        step: int,
        rank: int,
        size_bytes: int,
        timeout_s: float,
        patience_s: float = 0.0,
        fixed: FixedPart | None = None,
    ) -> WritableSlot: ...

    def seal(
        self,
        *,
        slot_id: int,
        entry: BlockEntry,
        sums: Sums | None = None,
        since: Lengths | None = None,
        persist: CheckpointTarget | None = None,
    ) -> None: ...

    def abandon(self, slot_id: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """Settings of the copy.

    ``paced``: spread the copy over the learned time until the optimizer step; else copy at full
    speed. ``niceness`` of the copying thread: above 0 it waits for idle cores, even while it holds
    the GIL. That pays only where training holds the GIL little. ``recheck`` is the share of the
    bytes that is checked twice, to notice writes that leave no trace; 1.0 checks all of them (to
    find a bug). Pieces that do not change from step to step are copied once if they have
    ``fixed_bytes`` or more together.
    """

    paced: bool = True
    niceness: int = NICENESS
    recheck: float = SAMPLE
    fixed_bytes: int = LEAST_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.niceness <= 19:
            raise ValueError(f"niceness={self.niceness}: use 0 (as training) to 19")
        if not 0 <= self.recheck <= 1:
            raise ValueError(f"recheck={self.recheck}: use a share of the bytes, 0 to 1")
        if self.fixed_bytes < 1:
            raise ValueError(f"fixed_bytes={self.fixed_bytes}: use 1 or more")


@dataclass(slots=True, kw_only=True)
class SnapshotStats:
    """Running totals of one Snapshotter.

    ``stall_s`` is the waiting time of the training thread, ``copy_s`` the working time of the
    copying thread. ``torn`` names the tensor that was written to during the copy of the last
    discarded snapshot, and ``reason`` says in a sentence why that snapshot was discarded.
    ``left_out`` counts those among ``discarded`` for which there was no room. ``pace`` is the speed
    limit of the last copy, in bytes per second. ``bytes`` were copied; ``fixed_bytes`` of the last
    snapshot were not, because they had not changed. ``replica_bytes`` counts the bytes that this
    rank holds of the state and that another rank with the same bytes writes.
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
    fixed_bytes: int = 0


@dataclass(slots=True)
class OptimizerFence:
    """A hook before each step of an optimizer, by which the step waits for a snapshot.


    ``before_step`` is called before every step of an optimizer that was added, once however often
    it was added, until `remove`.
    """

    before_step: Callable[[], None]
    handles: WeakKeyDictionary[Optimizer, RemovableHandle] = field(
        default_factory=WeakKeyDictionary
    )

    def add(self, optimizer: Optimizer) -> None:
        """Have every step of ``optimizer`` wait."""
        if optimizer not in self.handles:
            self.handles[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        refuse_captured(
            f"a tracked {type(optimizer).__name__} is stepped",
            "a replay of its steps would not wait for the snapshot that is being copied; capture "
            "forward and backward alone (torch.cuda.make_graphed_callables), and step after the "
            "replay",
        )
        self.before_step()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles.values():
            handle.remove()
        self.handles.clear()
