"""The slots of a job on Ray, and the decisions about them: from happenings to actions. Pure.

A job has as many slots as it may have nodes. The first ones, the *base*, are bundles of one
placement group, which Ray places all at once and each on a node of its own; if the node of such a
bundle is lost, Ray places the bundle anew. Every other slot has a placement group of its own, which
waits until the cluster has room, and which is asked for again when its node is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

SETTLE_S: Final = 30.0
"""A node that ended by itself is begun again only if others still run after so many seconds: if the
job itself has failed, they end too."""

FAREWELL_S: Final = 60.0
"""Time for the other nodes to end after the first has said that the job is done."""

MOST_FAILURES: Final = 3
"""A slot whose nodes end by themselves so often in a row is given up."""

STEADY_S: Final = 600.0
"""A node that ran so long before it ended by itself counts as the first of a row."""


class SlotPhase(Enum):
    """The state of a slot."""

    ASKED = "asked"
    """Ray has been asked for a node."""
    WAITING = "waiting"
    """It has a node, which another slot still uses."""
    RUNNING = "running"
    """Its node takes part in the job."""
    FAILED = "failed"
    """Its node ended by itself; it is not known yet whether the job did."""
    CLOSED = "closed"
    """It is not used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlot:
    """A slot: its number, its phase, and the Ray node that it has."""

    number: int
    base: bool
    phase: SlotPhase = SlotPhase.ASKED
    node: str = ""
    failures: int = 0
    since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """The end of one node's part: its exit status, None if it was lost, and its last lines.

    ``left`` is true if it ended after a notice.
    """

    slot: int
    node: str
    address: str
    status: int | None
    message: str
    log: tuple[str, ...] = ()
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlaced:
    """Happened: a slot has got a node."""

    slot: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEnded:
    """Happened: ``holdfast run`` ended on the node of a slot."""

    end: NodeEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLost:
    """Happened: the actor of a slot ended without a word, as when its node is lost."""

    slot: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForNode:
    """To do: ask Ray for a node for the slot, other than those of ``avoid``."""

    slot: int
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginOnNode:
    """To do: start ``holdfast run`` on the node of the slot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNode:
    """To do: give the node of the slot a notice, so that it hands over and leaves."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """To do: end everything; the job has succeeded or failed."""

    ok: bool
    message: str


Happening = SlotPlaced | SlotEnded | SlotLost
SlotAction = AskForNode | BeginOnNode | LeaveNode | EndJob


@dataclass(slots=True, kw_only=True)
class SlotTable:
    """All slots of a job, and what has happened to them. Time comes in as an argument.

    ``wait_s`` is the time for which too few nodes may be there: before the job begins fewer than
    ``least``, later none.
    """

    least: int
    most: int
    wait_s: float
    slots: list[NodeSlot] = field(default_factory=list)
    _short_s: float | None = None
    _done_s: float | None = None
    _has_run: bool = False
    _failure: str = ""

    def begin(self, now_s: float) -> list[SlotAction]:
        """Return the actions with which the job begins."""
        self._short_s = now_s
        self.slots = [NodeSlot(number=n, base=n < self.least) for n in range(self.most)]
        return [AskForNode(slot=slot.number) for slot in self.slots]

    def after(self, happened: Happening, now_s: float) -> list[SlotAction]:
        """Return the actions after something happened."""
        if isinstance(happened, SlotPlaced):
            return self._placed(happened, now_s)
        if isinstance(happened, SlotLost):
            return self._lost(happened, now_s)
        return self._ended(happened.end, now_s)

    def tick(self, now_s: float) -> list[SlotAction]:
        """Return the actions that are due because of the time."""
        if self._done_s is not None:
            late = now_s - self._done_s > FAREWELL_S
            return [EndJob(ok=True, message="")] if late or not self._running else []
        if self._is_short(now_s):
            return [EndJob(ok=False, message=self._not_placed())]
        failed = [slot for slot in self.slots if slot.phase is SlotPhase.FAILED]
        if failed and not self._running:
            return [EndJob(ok=False, message=self._failure)]
        due = [slot for slot in failed if now_s - slot.since_s > SETTLE_S]
        return [action for slot in due for action in self._again(slot)]

    def nodes_in_use(self) -> frozenset[str]:
        """Return the Ray nodes that slots have."""
        return frozenset(slot.node for slot in self.slots if slot.node)

    @property
    def _running(self) -> list[NodeSlot]:
        return [slot for slot in self.slots if slot.phase is SlotPhase.RUNNING]

    def _set(self, slot: NodeSlot, phase: SlotPhase, **changes: object) -> NodeSlot:
        changed = replace(slot, phase=phase, **changes)  # type: ignore[arg-type]
        self.slots[slot.number] = changed
        return changed

    def _is_short(self, now_s: float) -> bool:
        """Return whether too few nodes have been there for too long."""
        if len(self._running) >= (1 if self._has_run else self.least):
            self._short_s = None
            return False
        if self._short_s is None:
            self._short_s = now_s
        return now_s - self._short_s > self.wait_s

    def _placed(self, happened: SlotPlaced, now_s: float) -> list[SlotAction]:
        slot, node = self.slots[happened.slot], happened.node
        if self._done_s is not None:
            return []
        other = next((each for each in self.slots if each.node == node and each != slot), None)
        if other is None:
            self._set(slot, SlotPhase.RUNNING, node=node, since_s=now_s)
            self._has_run = self._has_run or len(self._running) >= self.least
            return [BeginOnNode(slot=slot.number)]
        if not slot.base:
            return [AskForNode(slot=slot.number, avoid=self.nodes_in_use())]
        # Ray gave a lost bundle's successor a node where another group's bundle had room beside it
        self._set(slot, SlotPhase.WAITING, node=node)
        return [LeaveNode(slot=other.number)]

    def _lost(self, happened: SlotLost, now_s: float) -> list[SlotAction]:
        slot = self.slots[happened.slot]
        if slot.phase is not SlotPhase.ASKED or self._done_s is not None:
            return self._free(slot, SlotPhase.ASKED, now_s=now_s)
        failures = slot.failures + 1
        if failures < MOST_FAILURES:
            self._set(slot, SlotPhase.ASKED, failures=failures)
            return [AskForNode(slot=slot.number, avoid=self.nodes_in_use())]
        self._set(slot, SlotPhase.CLOSED)
        if self._has_run:
            return []
        message = (
            f"Ray could not start the job's process on a node {failures} times: {happened.why}; "
            "Holdfast must be installed on all nodes, for the same Python"
        )
        return [EndJob(ok=False, message=message)]

    def _ended(self, end: NodeEnd, now_s: float) -> list[SlotAction]:
        slot = self.slots[end.slot]
        if end.status == 0:
            self._done_s = now_s if self._done_s is None else self._done_s
            self._set(slot, SlotPhase.CLOSED, node="")
            return self.tick(now_s)
        if self._done_s is not None:
            self._set(slot, SlotPhase.CLOSED, node="")
            return self.tick(now_s)
        if end.left:
            return self._free(slot, SlotPhase.ASKED, now_s=now_s)
        self._failure = self._failure or end.message
        return self._free(slot, SlotPhase.FAILED, now_s=now_s)

    def _free(self, slot: NodeSlot, phase: SlotPhase, *, now_s: float) -> list[SlotAction]:
        """Take the slot's node from it, and give it to a slot that waits for it."""
        node, is_steady = slot.node, now_s - slot.since_s > STEADY_S
        failures = (0 if is_steady else slot.failures) + 1 if phase is SlotPhase.FAILED else 0
        freed = self._set(slot, phase, node="", failures=failures, since_s=now_s)
        actions: list[SlotAction] = []
        for each in self.slots:
            if each.phase is SlotPhase.WAITING and each.node == node:
                self._set(each, SlotPhase.RUNNING, since_s=now_s)
                actions.append(BeginOnNode(slot=each.number))
        if self._done_s is not None:
            self._set(freed, SlotPhase.CLOSED)
            return [*actions, *self.tick(now_s)]
        if phase is SlotPhase.ASKED:
            return [*actions, AskForNode(slot=slot.number, avoid=self.nodes_in_use())]
        return [*actions, *self.tick(now_s)]

    def _again(self, slot: NodeSlot) -> list[SlotAction]:
        """Ask for a node again after a failure that was not the job's, or give the slot up."""
        if slot.failures >= MOST_FAILURES:
            self._set(slot, SlotPhase.CLOSED)
            return []
        self._failure = ""
        self._set(slot, SlotPhase.ASKED)
        return [AskForNode(slot=slot.number, avoid=self.nodes_in_use())]

    def _not_placed(self) -> str:
        there, needed = len(self._running), 1 if self._has_run else self.least
        return (
            f"Ray placed {there} of at least {needed} nodes within {self.wait_s:g} s: look at "
            "`ray status`, ask for less in resources or for fewer nodes, or give wait_s more time"
        )
