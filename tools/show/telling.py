"""The lines that `holdfast run` prints: for people, or as JSON for machines. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.elastic.events import Event
from holdfast.tools.printing import json_text
from holdfast.tools.show.levels import Importance, importance
from holdfast.tools.show.narrate import Narrator
from holdfast.tools.show.sentences import sentence

FORMATS: Final = ("text", "json")


class StoryTeller:
    """Follows a run's events and returns the lines of a level or above, without line ends.

    The narration of the run comes at ``INFO`` and above; at ``DEBUG`` each other event has a line
    too. ``form`` is one of `FORMATS`.
    """

    def __init__(self, *, form: str, least: Importance) -> None:
        self._form, self._least = form, least
        self._narrator = Narrator()

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines for an event."""
        told = list(self._narrator.lines(event))
        level = importance(event)
        if told:
            level = max(level, Importance.INFO)
        elif self._least is Importance.DEBUG:
            told = [sentence(event)]
        if level >= self._least:
            for text in told:
                yield self._line(event, level, text)

    def outcome(self, text: str, *, time_s: float) -> str:
        """Return the line that says why the job ended, or did not begin."""
        if self._form == "text":
            return f"holdfast: {text}"
        return json_text(_content(Importance.ERROR, text, time_s=time_s))

    def remark(self, text: str, *, time_s: float) -> Iterator[str]:
        """Yield the line of a remark of the command itself."""
        if self._least <= Importance.INFO:
            if self._form == "text":
                yield f"holdfast: {text}"
            else:
                yield json_text(_content(Importance.INFO, text, time_s=time_s))

    def _line(self, event: Event, level: Importance, text: str) -> str:
        if self._form == "text":
            return f"holdfast: {text}"
        about = {"kind": event.kind, "node": event.node, "seat": event.seat}
        return json_text({**_content(level, text, time_s=event.time_s), **about})


def _content(level: Importance, text: str, *, time_s: float) -> dict[str, object]:
    return {"time_s": time_s, "level": level.word, "message": text}
