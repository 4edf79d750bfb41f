"""Traces of a run as they lie in its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.elastic.loop.trace.records import TRACES, LoopEntered, Traced, TraceRecord

_decoder = msgspec.json.Decoder(Traced)
_R = TypeVar("_R", bound=TraceRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The records of one rank in one generation, in order."""

    entered: LoopEntered
    records: tuple[Traced, ...] = field(default=())

    def of(self, kind: type[_R]) -> list[_R]:
        """Return the records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces of a run, in the order in which their ranks came to their first step.

    The last line of a process that was killed may be incomplete; it is left out.
    """
    found = []
    for path in sorted(folder.glob(TRACES)):
        data = path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        records = [_decoder.decode(line) for line in lines]
        if records and isinstance(records[0], LoopEntered):
            found.append(RankTrace(entered=records[0], records=tuple(records[1:])))
    return found
