"""The faults there are: what each does, whom it can hit, in which worlds. Pure data."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

Part: TypeAlias = Literal["worker", "sidecar", "agent", "node", "coordinator", "store", "job"]
"""What can be hit. "job" is all of it; a job without Holdfast has only that and its workers."""

World: TypeAlias = Literal["real", "simulated"]


class FaultInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault.

    ``parts`` can be hit, the first where nothing is said. ``lasts`` says whether it passes, and
    ``amount`` what its amount means, with unit and default; "" for none. ``memory`` says whether
    the node that is hit may lose what it holds in memory.
    """

    about: str
    parts: tuple[Part, ...]
    worlds: tuple[World, ...] = ("real",)
    lasts: bool = False
    amount: str = ""
    memory: bool = False


BOTH: Final[tuple[World, ...]] = ("real", "simulated")

CATALOGUE: Final[dict[str, FaultInfo]] = {
    "kill": FaultInfo(
        about="SIGKILL",
        parts=("worker", "sidecar", "agent", "node", "coordinator", "job"),
        worlds=BOTH,
        memory=True,
    ),
    "lose": FaultInfo(
        about="a machine vanishes with its memory; it returns after lasts_s",
        parts=("node",),
        worlds=BOTH,
        lasts=True,
        memory=True,
    ),
    "stop": FaultInfo(
        about="SIGSTOP, and SIGCONT after lasts_s",
        parts=("worker", "sidecar", "agent", "node", "coordinator"),
        worlds=BOTH,
        lasts=True,
        memory=True,
    ),
    "preempt": FaultInfo(
        about="SIGTERM, and SIGKILL when the grace is over",
        parts=("node", "worker"),
        amount="grace in seconds (10)",
    ),
    "slow": FaultInfo(
        about="stopped and let go on, again and again",
        parts=("worker", "sidecar", "agent", "node"),
        lasts=True,
        amount="share of the time it is stopped (0.8)",
    ),
    "join": FaultInfo(
        about="a node that is away comes: a spare one, or one that was lost or left",
        parts=("job",),
    ),
    "leave": FaultInfo(
        about="a node is given notice and leaves in order; it comes again after lasts_s",
        parts=("node",),
        lasts=True,
    ),
}
"""Kind → what it is. A kind's injector is found by `injectors.of_kind`."""
