"""Detection of writes that leave no trace, by a second look at a sample of the copied bytes.

Writes through ``.data``, and a fused optimizer stepped by hand, do not move the version counters.
So a sample of the state is checksummed before the copy begins and again when it is done, and both
checksums must agree with the stored bytes. This shows every write to a sampled place in between. A
sample has a part of every large tensor and rotates from snapshot to snapshot. Writes after the end
of the copy do no harm, and are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.ckpt.native import isal
from holdfast.ckpt.snapshot.copy_program import PayloadBuffer, Probe, Program

SAMPLE = 0.02
SAMPLE_BYTES = 8 << 20
_LEAST_BYTES = 4 << 10
_FULL = 1.0
_MOST_UNITS = 128
_MOST_PROBES = 4


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
