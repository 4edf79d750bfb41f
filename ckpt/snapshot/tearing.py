"""Detection of writes that leave no trace, by a second look at a sample of the copied bytes.

Writes through ``.data``, and a fused optimizer stepped by hand, do not move the version counters.
So a sample of the state is checksummed before the copy begins and again when it is done, and both
checksums must agree with the stored bytes. This shows every write to a sampled place in between. A
sample has a part of every large tensor and rotates from snapshot to snapshot. Writes after the end
of the copy do no harm, and are not checked.

Of tensors on a device a sample is copied within the device, in the order of the training's own
work, at the moment of the snapshot. It must agree with the stored bytes. So writes by a replayed
CUDA graph are seen, which no version counter tells of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from holdfast.ckpt.native import isal
from holdfast.ckpt.snapshot.copy_program import Carried, PayloadBuffer, Probe, Program
from holdfast.ckpt.snapshot.lanes import Lane

SAMPLE = 0.02
SAMPLE_BYTES = 8 << 20
_LEAST_BYTES = 4 << 10
_FULL = 1.0
_MOST_UNITS = 128
_MOST_PROBES = 4
_MOST_LOOKS = 32
_LOOK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Look:
    probe: Probe
    pieces: Sequence[int]
    crc: int


class ChecksumSample:
    """Parts of one snapshot's state, with their checksums before the copy.

    It covers ``share`` of the bytes in host memory: at most `SAMPLE_BYTES`, but all of them for
    1.0.
    """

    def __init__(self, program: Program, *, turn: int, share: float) -> None:
        self._program = program
        self._looks = [
            _Look(probe, pieces, probe.live())
            for pieces, probe in _probes(program, turn=turn, share=share)
        ]

    def torn(self, room: PayloadBuffer) -> str:
        """Return the name of a tensor that changed during the copy, or ""."""
        for look in self._looks:
            at, nbytes = look.probe.at, look.probe.nbytes
            stored = isal.crc32c_at(room.address + at, nbytes)
            if not look.crc == stored == look.probe.live():
                pieces = [self._program.plan.pieces[i] for i in look.pieces]
                return next(p.fqn for p in pieces if p.at <= at < p.at + p.nbytes)
        return ""


@dataclass(frozen=True, slots=True)
class _DeviceLook:
    lane: Lane
    fqn: str
    at: int
    seen: torch.Tensor


class DeviceSample:
    """Parts of one snapshot's device tensors as they are now, in the order of the training's work.

    Make it on the training thread, before the side stream's start is marked. Each ``turn`` looks at
    `_MOST_LOOKS` other tensors, at a part of each; with a ``share`` of 1.0 at all of all, with 0.0
    at none.
    """

    def __init__(self, program: Program, *, turn: int, share: float) -> None:
        units = program.exposed if share else ()
        whole = share >= _FULL
        count = len(units) if whole else min(len(units), _MOST_LOOKS)
        chosen = [divmod(i + turn * count, len(units)) for i in range(count)]
        found: dict[Lane, list[tuple[Carried, torch.Tensor, int]]] = {}
        for visit, number in chosen:
            unit = units[number]
            most = unit.nbytes if whole else _LOOK_BYTES
            part, at = window_of(unit.source, turn=visit, nbytes=most)
            found.setdefault(unit.lane, []).append((unit, part, unit.at + at))
        self._looks = [
            _DeviceLook(lane, program.plan.pieces[unit.pieces[0]].fqn, at, seen)
            for lane, parts in found.items()
            for (unit, _, at), seen in zip(
                parts, lane.look([part for _, part, _ in parts]), strict=True
            )
        ]

    def torn(self, room: PayloadBuffer) -> str:
        """Return the name of a tensor that was stored as it was not at that moment, or "".

        Call it on the copying thread, when all copies have arrived.
        """
        found = [torch.empty(look.seen.shape, dtype=look.seen.dtype) for look in self._looks]
        for look, into in zip(self._looks, found, strict=True):
            look.lane.copy(look.seen, into)
        for mark in [lane.mark() for lane in {look.lane for look in self._looks}]:
            mark.synchronize()
        for look, then in zip(self._looks, found, strict=True):
            raw = then.reshape(-1).view(torch.uint8)
            stored = torch.frombuffer(
                room.view, dtype=torch.uint8, count=raw.numel(), offset=look.at
            )
            if not torch.equal(raw, stored):
                return look.fqn
        return ""


def window_of(tensor: torch.Tensor, *, turn: int, nbytes: int) -> tuple[torch.Tensor, int]:
    """Return a view of at most ``nbytes`` of a tensor, or of one element, and its first byte.

    The view's elements are adjacent where the tensor is stored in C order. Each ``turn`` gives
    another one, until every element had its turn.
    """
    at = 0
    while tensor.ndim:
        rows = tensor.shape[0]
        row = tensor.numel() // rows * tensor.itemsize
        count = min(max(nbytes // row, 1), rows)
        turn, place = divmod(turn, -(-rows // count))
        first = min(place * count, rows - count)
        at, tensor = at + first * row, tensor.narrow(0, first, count)
        if row <= nbytes:
            break
        tensor = tensor[0]
    return tensor, at


def _probes(program: Program, *, turn: int, share: float) -> Iterator[tuple[Sequence[int], Probe]]:
    """Yield the bytes to check: some of every unit, or of as many units as one turn covers."""
    units = program.units
    if not share or not units:
        return
    if share >= _FULL:
        for unit in units:
            yield from ((unit.pieces, probe) for probe in unit.probes(turn, unit.nbytes))
        return
    chosen = min(len(units), _MOST_UNITS)
    each = max(int(min(share * program.nbytes, SAMPLE_BYTES)) // chosen, _LEAST_BYTES)
    for i in range(chosen):
        unit = units[(i + turn * chosen) % len(units)]
        yield from ((unit.pieces, probe) for probe in islice(unit.probes(turn, each), _MOST_PROBES))
