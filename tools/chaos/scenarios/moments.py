"""Names of events in scenarios and tests: a kind of Holdfast's, or one of the job's own. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from holdfast.elastic.events import KINDS, Event, UserEvent

RESTARTED: Final = "restarted"
"""The moment at which a step of a newer attempt (generation) than ever before is reported."""

OWN: Final = "own:"
"""Prefix of the names of the job's own events."""


def moment_of(event: Event) -> str:
    """Return the name of an event in scenarios."""
    return f"{OWN}{event.name}" if isinstance(event, UserEvent) else event.kind


def wrong_moment(name: str, fields: Iterable[str] = ()) -> str:
    """Return what is wrong with the name of an event or of its fields; "" if nothing is."""
    if (kind := KINDS.get(name)) is not None:
        known = kind.__struct_fields__
        if unknown := sorted(set(fields) - set(known)):
            return f"an event {name!r} has no {', '.join(unknown)}; it has {', '.join(known)}"
    elif name != RESTARTED and name.removeprefix(OWN) in ("", name):
        kinds = ", ".join(sorted(KINDS))
        return f"there is no event {name!r}; give {OWN}NAME, {RESTARTED} or one of {kinds}"
    return ""
