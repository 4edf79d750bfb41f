"""The fixed part of one rank's blocks: which pieces lie in it, and whether they still are the same.

A change that torch counts (a version counter, another address) is seen before the next snapshot
begins, which then copies the piece. A change that leaves no trace (through ``.data``, a custom
kernel, another process) is found by a checksum of all fixed pieces in the background, before each
snapshot is sealed. So every fixed piece of a sealed snapshot was verified after the moment of the
snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import torch

from holdfast.ckpt import torch_private
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.memory.arena import FIXED_GRAIN_BYTES, FixedPart
from holdfast.ckpt.memory.block import align
from holdfast.ckpt.memory.fixed_files import CAN_JOIN
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.snapshot.fixed_choice import FixedChoice
from holdfast.ckpt.state.capture import ALIGN_BYTES, CapturePlan, FlatState
from holdfast.ckpt.state.local_boxes import Leaf, counted_of, local_of, mark_of

PieceKey: TypeAlias = tuple[str, Box]

_DEAD: Final = 4
"""A part is made anew once one in so many of its bytes belongs to pieces that move now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPiece:
    """A piece as it was when it was copied into the fixed part.

    ``sums`` are the checksums of its parts between the ends of runs, ``mark`` tells whether torch
    knows of a later change.
    """

    crc: int
    sums: Sums
    mark: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """A fixed part: the places of its pieces, and their contents once it is filled.

    ``run_sums`` are the checksums of the part's runs.
    """

    part: FixedPart
    at: Mapping[PieceKey, int]
    pieces: Mapping[PieceKey, FixedPiece] = field(default_factory=dict)
    run_sums: Sums | None = None

    @property
    def is_filled(self) -> bool:
        """True once a block with the part was sealed."""
        return self.run_sums is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """The counts of in-place writes of most fixed tensors, to compare where no tensor has moved.

    In the place of a ``volatile`` one there may be another tensor.
    """

    layout: FixedLayout | None = None
    tensors: Sequence[torch.Tensor] = ()
    versions: Sequence[int] = ()
    volatile: Sequence[PieceKey] = ()

    @classmethod
    def of(cls, layout: FixedLayout, flat: FlatState) -> _Marked:
        counted = [
            tensor
            for fqn, _ in layout.pieces
            if fqn in flat.tensors and fqn not in flat.volatile
            for tensor in counted_of(flat.tensors[fqn])
        ]
        return cls(
            layout=layout,
            tensors=counted,
            versions=list(map(torch_private.version_of, counted)),
            volatile=[key for key in layout.pieces if key[0] in flat.volatile],
        )


class FixedPieces:
    """Chooses the fixed pieces of one rank in one generation, and lays them out.

    Not safe between threads: the snapshot thread notes what was taken while the training thread
    waits for it before the next snapshot.
    """

    def __init__(self, *, generation: int, rank: int, least_bytes: int) -> None:
        self._generation, self._rank = generation, rank
        self._choice: FixedChoice[PieceKey] = FixedChoice(least_bytes=least_bytes)
        self.layout: FixedLayout | None = None
        self._before: FixedLayout | None = None
        self._number = 0
        self._wanted: frozenset[PieceKey] | None = None
        self._moved: set[PieceKey] = set()
        self._sizes: dict[PieceKey, int] = {}
        self._sized: CapturePlan | None = None
        self._frozen: frozenset[PieceKey] = frozenset()
        self._marked = _Marked()
        self._grows = CAN_JOIN

    def look(self, plan: CapturePlan, flat: FlatState, *, same: bool) -> bool:
        """Look at the state before a snapshot; return whether the layout has changed.

        ``same``: all tensors that are not volatile have the addresses of the last time.
        """
        if not CAN_JOIN:
            return False
        if plan is not self._sized:
            self._sized, self._sizes = plan, _eligible(plan, flat)
            self._frozen = _frozen(plan, flat) & self._sizes.keys()
            self._wanted = None
        if self.layout is not None:
            self._moved |= self._changed(self.layout, flat, same=same)
        if self._moved:
            self._choice.moved(self._moved)
            self._wanted = None
        if self._wanted is None:
            self._wanted = self._chosen(
                set(self.layout.at) - self._moved if self.layout is not None else ()
            )
        self._moved.clear()
        if self._wanted == (self.layout.at.keys() if self.layout is not None else set()):
            return False
        self._lay_out(self._wanted)
        return True

    def _changed(self, layout: FixedLayout, flat: FlatState, *, same: bool) -> set[PieceKey]:
        keys: Iterable[PieceKey] = layout.pieces
        if same and self._marked.layout is layout:
            if list(map(torch_private.version_of, self._marked.tensors)) == self._marked.versions:
                keys = self._marked.volatile
        else:
            self._marked = _Marked.of(layout, flat)
        return {
            key
            for key in keys
            if key[0] not in flat.tensors
            or mark_of(flat.tensors[key[0]]) != layout.pieces[key].mark
        }

    def _chosen(self, now: Collection[PieceKey]) -> frozenset[PieceKey]:
        if self._grows:
            return self._choice.choose(self._sizes, now=now, frozen=self._frozen)
        return frozenset(now) & self._sizes.keys()

    def _lay_out(self, wanted: frozenset[PieceKey]) -> None:
        before = self.layout
        if before is not None and before.is_filled:
            self._before = before
        if not wanted:
            self.layout = None
            return
        if before is not None and before.is_filled and wanted <= before.at.keys():
            dead = sum(self._sizes.get(key, 0) for key in before.at.keys() - wanted)
            if dead * _DEAD <= before.part.nbytes or not self._grows:
                self.layout = replace(
                    before,
                    at={key: at for key, at in before.at.items() if key in wanted},
                    pieces={key: each for key, each in before.pieces.items() if key in wanted},
                )
                return
        at, end = dict[PieceKey, int](), 0
        for key, nbytes in self._sizes.items():
            if key in wanted:
                at[key] = end
                end = align(end + nbytes, ALIGN_BYTES)
        self._number += 1
        part = FixedPart(
            generation=self._generation,
            rank=self._rank,
            number=self._number,
            nbytes=align(end, FIXED_GRAIN_BYTES),
        )
        self.layout = FixedLayout(part=part, at=at)

    def placed(self, plan: CapturePlan) -> CapturePlan:
        """Return the plan with the fixed pieces in their places."""
        if self.layout is None:
            return plan
        return plan.placed(self.layout.at, fixed_bytes=self.layout.part.nbytes)

    def fill(self, pieces: Mapping[PieceKey, FixedPiece], *, run_sums: Sums) -> None:
        """Note that a block with the whole part was sealed."""
        assert self.layout is not None
        self.layout, self._before = replace(self.layout, pieces=pieces, run_sums=run_sums), None

    def taken(self, pieces: Mapping[PieceKey, Hashable]) -> None:
        """Note a sealed snapshot's pieces (`Program.contents`), and choose for the next one."""
        self._choice.observe(pieces)
        self._wanted = self._chosen(self.layout.at if self.layout is not None else ())

    def found_changed(self, keys: Sequence[PieceKey]) -> None:
        """Note pieces that have changed without a trace."""
        self._moved |= set(keys)

    def lose(self) -> None:
        """Fill another part with the next snapshot: this one is damaged, or was not sealed."""
        if self.layout is not None:
            wanted, self.layout = frozenset(self.layout.at), None
            self._lay_out(wanted)
            self._sized = None  # the next snapshot is planned with it

    def let_go(self) -> None:
        """Keep no tensor alive."""
        self._marked = _Marked()

    def give_up(self) -> None:
        """Make no other part from now on: there is no room for one beside what is there.

        The part before stays in use for what has not changed since.
        """
        self._grows, self._sized = False, None
        self.layout, self._before = self._before, None


def _eligible(plan: CapturePlan, flat: FlatState) -> dict[PieceKey, int]:
    """Return the sizes of the pieces that may be fixed: those in host memory."""
    return {
        piece.key: piece.nbytes
        for piece in plan.pieces
        if not plan.is_own(piece) and local_of(flat.tensors[piece.fqn]).device.type == "cpu"
    }


def _frozen(plan: CapturePlan, flat: FlatState) -> frozenset[PieceKey]:
    """Return the pieces of parameters without a gradient."""
    states = {key for parts in flat.optimizers.values() for key in parts.keys}
    return frozenset(
        piece.key
        for piece in plan.pieces
        if piece.fqn not in flat.volatile and piece.fqn not in states
        if not _requires_grad(flat.tensors[piece.fqn])
    )


def _requires_grad(leaf: Leaf) -> bool:
    return (leaf if isinstance(leaf, torch.Tensor) else leaf.tensor).requires_grad
