"""The agent's sidecar keeper: keeps it running, sends it generations, requests its inventory."""

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

_GIVE_UP_S = 10.0
"""Time limit to undo a start: a fork, a kill and a removal, even on a loaded machine."""


class SidecarEvents(Protocol):
    """Callbacks from the keeper to the agent, on the loop's thread."""

    def sidecar_started(self) -> None:
        """A sidecar serves at ``keeper.address``."""

    def sidecar_ended(self, *, pid: int) -> None:
        """The sidecar is gone; the keeper starts another."""

    def sidecar_failed(self, error: Exception) -> None:
        """A sidecar could not be started; the keeper retries."""

    def generation_adopted(self, record: GenerationRecord) -> None:
        """The sidecar guards ``record``: its workers may begin."""

    def inventory_taken(self, inventory: Inventory, *, generation: int) -> None:
        """The inventory requested after ``generation`` ended has arrived."""

    def step_protected(self, step: int) -> None:
        """The sidecar reported its newest protected step."""


class SidecarKeeper:
    """Starts the sidecar, and restarts it when it ends; all its calls run in the background.

    A sidecar that fails a call is killed. Its exit is handled like any other death, and the next
    sidecar takes over the memory. ``due_s`` is the time of `time.monotonic` before which none is
    started: a callback on an end or a failed start may postpone the next.
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
        self.due_s = 0.0
        self._status_asked = False
        self.starts = 0

    @property
    def address(self) -> str:
        """The address of the sidecar; empty while it is down."""
        return self._sidecar.address if self._sidecar else ""

    @property
    def pid(self) -> int:
        """Its process id, 0 while it is down."""
        return self._sidecar.pid if self._sidecar else 0

    def check(self) -> None:
        """Detect an exit, and start a sidecar if there is none."""
        if self._sidecar and self._sidecar.stopped_for_s() > self._stop_grace_s:
            self._sidecar.kill()
        if self._sidecar and not self._sidecar.alive():
            self._ended, self._sidecar = self._sidecar, None
            self._events.sidecar_ended(pid=self._ended.pid)
        if self._sidecar is None and not self._starting and time.monotonic() >= self.due_s:
            self._starting = True
            self._background.submit(self._launch, then=self._started, failed=self._not_started)

    @property
    def suspicious(self) -> bool:
        """True if the sidecar is stopped, and will be ended unless it continues soon."""
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
        self._starting = False
        self._events.sidecar_failed(error)

    def adopt(self, record: GenerationRecord) -> None:
        """Send a generation to the sidecar, then call `generation_adopted`."""
        if sidecar := self._sidecar:
            self._background.submit(
                lambda: sidecar.client.adopt(record.snapshots, restore=record.restore),
                then=lambda _: self._adopted(sidecar, record),
                failed=lambda error: self._refused(sidecar, error),
            )

    def _adopted(self, sidecar: NodeSidecar, record: GenerationRecord) -> None:
        if sidecar is self._sidecar:  # a newer one does not know this generation
            self._events.generation_adopted(record)

    def fence(self, generation: int) -> None:
        """Notify the sidecar that a generation is over, before its workers have left it.

        A worker that waits for a slot is refused at once, and parks without that wait.
        """
        if sidecar := self._sidecar:
            self._background.submit(
                lambda: sidecar.client.fence(generation),
                then=lambda _: None,
                failed=lambda _: None,  # the next request, for the inventory, will report the error
            )

    def take_inventory(self, generation: int) -> None:
        """Request the sidecar's inventory, then call `inventory_taken`."""
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
        """Request the newest protected step, then call `step_protected`; one request at a time."""
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
            _log.warning(
                ("ending the sidecar at %s, because a call to it failed: %s"),
                sidecar.address,
                error,
            )
            sidecar.kill()

    def stop(self) -> None:
        """End the sidecar for good; its memory is freed unless the launcher holds it.

        A sidecar that is just starting is aborted and cleaned up, because no other process would do
        it.
        """
        os.eventfd_write(self._give_up_fd, 1)
        self._background.close(timeout_s=_GIVE_UP_S if self._starting else 0.0)
        fresh = self._fresh if self._fresh is not self._sidecar else None
        for sidecar in (self._ended, self._sidecar, fresh):
            if sidecar and (sidecar is not fresh or self._starting):
                sidecar.stop()
        self._ended = self._sidecar = None
