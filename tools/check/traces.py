"""The trace of a rank, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.elastic.loop.trace.records import LoopEntered, Traced, TraceRecord

_R = TypeVar("_R", bound=TraceRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The records of one rank in one generation, in order."""

    entered: LoopEntered
    records: tuple[Traced, ...] = field(default=())

    def of(self, kind: type[_R]) -> list[_R]:
        """Return the records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]
