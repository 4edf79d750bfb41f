"""The agent's hold on its sidecar: kept running, told of generations, asked for its inventory."""

from __future__ import annotations

import logging
import os
import time
from typing import Protocol

from holdfast.ckpt.errors import FencedError
from holdfast.ckpt.memory.records import Inventory
from holdfast.elastic.agent.inbox import Background, Inbox
from holdfast.elastic.membership.records import GenerationRecord
from holdfast.elastic.processes.node_sidecar import NodeSidecar, SidecarPlan

_log = logging.getLogger(__name__)

_RETRY_S = 0.5
_GIVE_UP_S = 10.0
"""Bounds the undoing of a start: a fork, a kill and a removal, however loaded the machine is."""


class SidecarEvents(Protocol):
    """What the keeper tells the agent, on the loop's thread."""

    def sidecar_started(self) -> None:
        """A sidecar serves at ``keeper.address``."""

    def sidecar_ended(self, *, pid: int) -> None:
        """The sidecar is gone; another is being started."""

    def sidecar_failed(self, error: Exception) -> None:
        """A sidecar could not be started; it is tried again."""

    def generation_adopted(self, record: GenerationRecord) -> None:
        """The sidecar guards ``record``: its workers may begin."""

    def inventory_taken(self, inventory: Inventory, *, generation: int) -> None:
        """The inventory asked for after ``generation`` ended."""

    def step_protected(self, step: int) -> None:
        """The newest protected step the sidecar knows of."""


class SidecarKeeper:
    """Starts the sidecar and starts it again when it ends; all its calls run in the background.

    A sidecar that fails a call is killed: the exit takes the path of any other death, and the
    next one takes over the memory.
    """

    def __init__(
        self, plan: SidecarPlan, *, inbox: Inbox, events: SidecarEvents, stop_grace_s: float
    ) -> None:
        self._plan, self._events, self._stop_grace_s = plan, events, stop_grace_s
        self._background = Background(inbox, name="sidecar-calls")
        self._sidecar: NodeSidecar | None = None
        self._ended: NodeSidecar | None = None
        self._fresh: NodeSidecar | None = None
        self._starting = False
        self._give_up_fd = os.eventfd(0)
        self._retry_s = 0.0
        self._status_asked = False
        self.starts = 0

    @property
    def address(self) -> str:
        """Where the sidecar serves; empty while it is down."""
        return self._sidecar.address if self._sidecar else ""

    @property
    def pid(self) -> int:
        """Its process id, 0 while it is down."""
        return self._sidecar.pid if self._sidecar else 0

    def check(self) -> None:
        """Notice an exit, and start a sidecar where there is none."""
        if self._sidecar and self._sidecar.stopped_for_s() > self._stop_grace_s:
            self._sidecar.kill()
        if self._sidecar and not self._sidecar.alive():
            self._ended, self._sidecar = self._sidecar, None
            self._events.sidecar_ended(pid=self._ended.pid)
        if self._sidecar is None and not self._starting and time.monotonic() >= self._retry_s:
            self._starting = True
            self._background.submit(self._launch, then=self._started, failed=self._not_started)

    @property
    def suspicious(self) -> bool:
        """Whether the sidecar is stopped, and will be ended unless it continues soon."""
        return self._sidecar is not None and self._sidecar.stopped_for_s() > 0

    def _launch(self) -> NodeSidecar:
        self._fresh = NodeSidecar(self._plan, give_up_fd=self._give_up_fd)
        return self._fresh

    def _started(self, sidecar: NodeSidecar) -> None:
        self._starting, self._sidecar = False, sidecar
        if self._ended:
            self._ended.release()
            self._ended = None
        self.starts += 1
        self._events.sidecar_started()

    def _not_started(self, error: Exception) -> None:
        self._starting, self._retry_s = False, time.monotonic() + _RETRY_S
        self._events.sidecar_failed(error)

    def adopt(self, record: GenerationRecord) -> None:
        """Tell the sidecar of a generation, then `generation_adopted`."""
        if sidecar := self._sidecar:
            self._background.submit(
                lambda: sidecar.client.adopt(record.snapshots, restore=record.restore),
                then=lambda _: self._adopted(sidecar, record),
                failed=lambda error: self._refused(sidecar, error),
            )

    def _adopted(self, sidecar: NodeSidecar, record: GenerationRecord) -> None:
        if sidecar is self._sidecar:  # one started since knows nothing of it
            self._events.generation_adopted(record)

    def fence(self, generation: int) -> None:
        """Tell the sidecar that a generation is over, before its workers have left it.

        One that waits for a slot is refused at once, and parks without that wait.
        """
        if sidecar := self._sidecar:
            self._background.submit(
                lambda: sidecar.client.fence(generation),
                then=lambda _: None,
                failed=lambda _: None,  # the inventory, asked for next, will say what is wrong
            )

    def take_inventory(self, generation: int) -> None:
        """Ask what the sidecar holds, then `inventory_taken`."""
        if sidecar := self._sidecar:
            self._background.submit(
                sidecar.client.inventory,
                then=lambda taken: self._taken(sidecar, taken, generation),
                failed=lambda error: self._refused(sidecar, error),
            )

    def _taken(self, sidecar: NodeSidecar, inventory: Inventory, generation: int) -> None:
        if sidecar is self._sidecar:
            self._events.inventory_taken(inventory, generation=generation)

    def ask_progress(self, generation: int) -> None:
        """Ask for the newest protected step, then `step_protected`; one question at a time."""
        if (sidecar := self._sidecar) is None or self._status_asked:
            return
        self._status_asked = True
        self._background.submit(
            lambda: sidecar.client.protected_step(generation=generation),
            then=self._progressed,
            failed=self._no_progress,
        )

    def _progressed(self, step: int) -> None:
        self._status_asked = False
        self._events.step_protected(step)

    def _no_progress(self, error: Exception) -> None:
        self._status_asked = False  # nothing depends on this answer

    def _refused(self, sidecar: NodeSidecar, error: Exception) -> None:
        if not isinstance(error, FencedError):
            _log.warning("the sidecar at %s is ended, it failed a call: %s", sidecar.address, error)
            sidecar.kill()

    def stop(self) -> None:
        """End the sidecar for good; its memory goes unless the launcher holds it.

        One that is just being started is given up: nobody else would remove what it made.
        """
        os.eventfd_write(self._give_up_fd, 1)
        self._background.close(timeout_s=_GIVE_UP_S if self._starting else 0.0)
        fresh = self._fresh if self._fresh is not self._sidecar else None
        for sidecar in (self._ended, self._sidecar, fresh):
            if sidecar and (sidecar is not fresh or self._starting):
                sidecar.stop()
        self._ended = self._sidecar = None
