"""The rates that tides need of the lines of islands, and those that the lines give. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.elastic.islands.messages import Sign

Way = Literal["up", "down"]


class LineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of an island's line, in bytes per second.

    A tide moves ``tide_bytes``, and comes every ``tide_s`` seconds by the island's own steps;
    ``needed`` is the rate at which it just passes in this time. ``declared`` is the rate of the
    settings, ``measured`` the one while payloads went. None where the island does not tell it.
    """

    way: Way
    tide_bytes: int
    tide_s: float | None
    needed: float | None
    declared: float | None
    measured: float | None

    @property
    def given(self) -> float | None:
        """The rate that can be counted on: the smaller one of declared and measured."""
        return min((each for each in (self.declared, self.measured) if each), default=None)

    @property
    def fits(self) -> bool:
        """False if a tide is known not to pass before the next one is due."""
        return self.needed is None or self.given is None or self.needed <= self.given

    @property
    def passes_s(self) -> float | None:
        """The seconds that a tide takes, None if the rate is not known."""
        return self.tide_bytes / self.given if self.given else None


def lines_of(
    sign: Sign | None, *, stride: int, sent_bytes: int, received_bytes: int
) -> tuple[LineStatus, LineStatus]:
    """Return both directions of an island's line.

    ``stride`` are its steps from one tide to the next; the bytes are those of a tide.
    """
    tide_s = stride * sign.step_s if sign is not None and sign.step_s > 0 else None
    line = None if sign is None else sign.line

    def one(way: Way, nbytes: int, declared: float, measured: float) -> LineStatus:
        return LineStatus(
            way=way,
            tide_bytes=nbytes,
            tide_s=tide_s,
            needed=None if tide_s is None else nbytes / tide_s,
            declared=declared or None,
            measured=measured or None,
        )

    return (
        one("up", sent_bytes, line.uplink if line else 0, line.up if line else 0),
        one("down", received_bytes, line.downlink if line else 0, line.down if line else 0),
    )
