"""A run as plain lines: messages as they come, and the state every few seconds. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.tools.live.telling import partly
from holdfast.tools.live.view import RunMessage, RunView
from holdfast.tools.printing import printable
from holdfast.tools.top.wording import change, clock, headline, message, protection, span

_CHANGES: Final = 3
OVER: Final = ("done", "failed", "silent")


class RunLines:
    """Returns the lines that a newer view of a run adds."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s, self._said_s = every_s, 0.0
        self._said: set[RunMessage] = set()
        self._state = ""

    def lines(self, view: RunView) -> Iterator[str]:
        """Yield the new messages, oldest first, and the state where it is time or it changed."""
        new = [each for each in reversed(view.messages) if each not in self._said]
        self._said = set(view.messages)
        yield from map(message, new)
        if view.state != self._state or view.now_s - self._said_s >= self._every_s:
            self._state, self._said_s = view.state, view.now_s
            yield from summary(view)


def summary(view: RunView) -> Iterator[str]:
    """Yield the state of a run in a few lines."""
    at = clock(view.now_s)
    yield f"{at} {headline(view)}"
    yield f"{at} {protection(view)}"
    found = view.checkpoints
    if found.durable_step is not None:
        age = "" if found.durable_s is None else f", {span(view.now_s - found.durable_s)} old"
        yield f"{at} the checkpoint of step {found.durable_step:,} is durable{age}"
    troubled = [node for node in view.nodes if node.state in ("lost", "held off") or node.troubles]
    for node in troubled[:8]:
        why = next((text for text in (node.why, *node.troubles) if text), node.state)
        yield printable(f"{at} {node.node} ({node.state}): {why}")
    if len(troubled) > 8:
        yield f"{at} and {len(troubled) - 8} more nodes"


def whole(view: RunView) -> Iterator[str]:
    """Yield the state of a run, its newest changes of the ranks, and what is not known."""
    yield from summary(view)
    for found in reversed(view.recoveries[:_CHANGES]):
        yield f"{clock(found.at_s) if found.dated else clock(view.now_s)} {change(found)}"
    if text := partly(view):
        yield printable(f"{clock(view.now_s)} {text}")
