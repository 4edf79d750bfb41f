"""Copies of logs that this node keeps for others, after the group changed.

A copy is kept here as long as it is needed. If the writer's node lives, that is until all of its
new holders have its records. If that node or its memory is gone, it is until enough nodes (the
*keepers*) have the log, so that a second loss does not lose it; it then stays until it is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from holdfast.ckpt.errors import CkptError, FencedError, NotFoundError
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.messages import LogName, LogState, unparse
from holdfast.ckpt.sidecar.logs.copies import Transfer
from holdfast.ckpt.sidecar.logs.places import group_of, holders_of, keepers_of
from holdfast.ckpt.sidecar.logs.record_log import RecordLog
from holdfast.ckpt.transport import Client

ASK_TIMEOUT_S = 1.5
_PAUSE_S = (0.05, 1.0)


class LogKeeping:
    """Settles the copies held here after each change of the group, in its own thread.

    ``forget`` drops a log here; called under the core's lock.
    """

    def __init__(self, core: Core, forget: Callable[[RecordLog], None]) -> None:
        self._core, self._forget = core, forget
        self._open: set[RecordLog] = set()
        self._bell = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def adopt(self, foreign: set[RecordLog]) -> None:
        """Settle these copies in the new group; call it under the lock."""
        self._open = foreign
        if foreign and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="log-keeping", daemon=True)
            self._thread.start()
        self._bell.set()

    def unsettled(self) -> int:
        """Return the number of copies that are not yet known to be settled."""
        return len(self._open)

    def close(self) -> None:
        """End the thread; a call in progress ends by its own deadline."""
        self._closed = True
        self._bell.set()

    def _work(self) -> None:
        pause_s = _PAUSE_S[0]
        while not self._closed:
            with self._core.lock:
                world, logs = self._core.book.world, list(self._open)
            left = self._round(world, logs) if world is not None else []
            pause_s = min(pause_s * 2, _PAUSE_S[1]) if left else _PAUSE_S[0]
            if self._bell.wait(pause_s if left else None):
                pause_s = _PAUSE_S[0]
            self._bell.clear()

    def _round(self, world: SnapshotWorld, logs: list[RecordLog]) -> list[RecordLog]:
        """Try to settle each log once; return the unsettled ones. Silent peers are asked once."""
        left, silent = list[RecordLog](), set[str]()
        clients: dict[str, Client] = {}
        try:
            for log in logs:
                if self._closed or self._core.book.generation != world.generation:
                    return left
                if not _CopyPlace(self._core, world, log, clients, silent).settle(self._forget):
                    left.append(log)
                    continue
                with self._core.lock:
                    if self._core.book.generation == world.generation:
                        self._open.discard(log)
        finally:
            for client in clients.values():
                client.close()
        return left


class _CopyPlace:
    """One copy and the nodes that matter to it."""

    def __init__(
        self,
        core: Core,
        world: SnapshotWorld,
        log: RecordLog,
        clients: dict[str, Client],
        silent: set[str],
    ) -> None:
        self._core, self._world, self._log = core, world, log
        self._clients, self._silent = clients, silent

    def settle(self, forget: Callable[[RecordLog], None]) -> bool:
        """Return whether the copy is settled; drop it where it is no longer needed."""
        core, world, log = self._core, self._world, self._log
        try:
            kept = self._is_needed()
            if kept is None:
                return False
        except FencedError:
            return False
        except NotFoundError:
            return True  # dropped meanwhile
        if not kept:
            with core.lock:
                if core.book.generation != world.generation:
                    return False
                if not log.closed:
                    forget(log)
                    core.counters["log_copies_let_go"] += 1
        return True

    def _is_needed(self) -> bool | None:
        """Return whether this copy must stay, None if that is not known yet."""
        log, me = self._log, self._core.node
        writer = next((p for p in self._world.peers if p.node == log.node), None)
        if writer is not None:
            state = self._ask(writer)
            if state is None:
                return None
            if state.dropped >= log.birth:
                return False
            if state.birth:
                if me in [peer.node for peer in holders_of(self._world, log.node)]:
                    return True
                return False if state.settled else None
        return self._bring_to_keepers()

    def _bring_to_keepers(self) -> bool | None:
        log, me = self._log, self._core.node
        everyone = tuple(peer.node for peer in self._world.peers)
        among = group_of(self._world, me) or everyone
        keepers = keepers_of(self._world, log.node, log.name, among=among)
        if not keepers:
            return True
        complete = True
        for peer in keepers:
            if peer.node == me:
                continue
            state = self._bring(peer)
            if state is None:
                complete = False
            elif state.dropped >= log.birth:
                return False
        if not complete:
            return None
        return me in [peer.node for peer in keepers]

    def _ask(self, peer: SidecarPeer) -> LogState | None:
        """Return a sidecar's state of the log, None if it does not answer."""
        if (client := self._client(peer)) is None:
            return None
        try:
            answer, _ = client.call(
                "log_state", unparse(LogName(name=self._log.name, node=self._log.node))
            )
            return msgspec.convert(answer, LogState)
        except (CkptError, msgspec.ValidationError):
            self._silent.add(peer.node)
            return None

    def _bring(self, peer: SidecarPeer) -> LogState | None:
        """Bring all records to a keeper; return its state then, None if that failed."""
        if (client := self._client(peer)) is None:
            return None
        core, log = self._core, self._log
        transfer = Transfer(core, log, generation=self._world.generation, owner=False)
        reached: int | None = None
        while True:
            try:
                state = transfer.step(client)
            except (FencedError, NotFoundError):
                raise
            except (CkptError, msgspec.ValidationError):
                self._silent.add(peer.node)
                return None
            if state.dropped >= log.birth or state.birth > log.birth:
                return state
            with core.lock:
                if log.closed or not transfer.is_pending():
                    return state
            at = transfer.at or 0
            if reached is not None and at <= reached:
                return None
            reached = at

    def _client(self, peer: SidecarPeer) -> Client | None:
        if peer.node in self._silent:
            return None
        if peer.node not in self._clients:
            self._clients[peer.node] = Client(
                peer.address, self._core.key, timeout_s=ASK_TIMEOUT_S, watch=True
            )
        return self._clients[peer.node]
