"""Write protected snapshots to the store: every sidecar its ranks' packs, rank 0's the commit.

What goes wrong here (disk full, say) is reported and hurts nothing else: the snapshot stays in
memory as long as any other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from ckpt.errors import CkptError, NotFoundError, StoreError
from ckpt.index import decode_index
from ckpt.sidecar.core import Core, Op, Waiter, Work
from ckpt.sidecar.exchange import Exchange, send
from ckpt.sidecar.messages import Await, Durable, Persisted, unparse
from ckpt.sidecar.slots import Slot
from ckpt.sidecar.state import Snapshot, SnapshotKey
from ckpt.target import CheckpointTarget
from ckpt.transport import Request
from ckpt.types import Json
from ckpt.world import BlockEntry, SnapshotWorld

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Collected:
    """Receipts of a step that this node is to commit."""

    root: str
    receipts: dict[int, Json] = field(default_factory=dict)


class Persistence:
    """Checkpoints of the present generation that are wanted, being written, or done."""

    def __init__(self, core: Core, exchange: Exchange) -> None:
        self._core, self._exchange = core, exchange
        self._wanted: dict[SnapshotKey, dict[int, CheckpointTarget]] = {}
        self._collected: dict[SnapshotKey, _Collected] = {}
        self._durable = -1
        self._persisted: list[int] = []
        self._errors: dict[int, str] = {}
        core.on.adopt.append(self._adopt)
        core.on.protect.append(self._protected)
        core.on.release.append(self._released)

    def ops(self) -> dict[str, Op]:
        """Return what this part answers."""
        return {
            "persisted": (Persisted, self._hear_persisted),
            "durable": (Durable, self._hear_durable),
            "durable_step": (Await, self._durable_step),
        }

    def status(self) -> dict[str, Json]:
        """Return the steps committed in this run, and the last error."""
        newest = max(self._errors, default=None)
        return {
            "persisted": list(self._persisted),
            "persist_error": None if newest is None else self._errors[newest],
        }

    def want(self, entry: BlockEntry, target: CheckpointTarget) -> None:
        """Note that a block sealed here is to be written once it is protected."""
        self._wanted.setdefault((entry.generation, entry.step), {})[entry.rank] = target
        self._errors.pop(entry.step, None)  # of an earlier attempt

    def _adopt(self, _world: SnapshotWorld) -> None:
        self._wanted.clear()
        self._collected.clear()

    def _released(self, key: SnapshotKey) -> None:
        self._wanted.pop(key, None)

    # -- writing ---------------------------------------------------------------------------------

    def _protected(self, snapshot: Snapshot) -> None:
        key = snapshot.key
        for rank, target in self._wanted.pop(key, {}).items():
            slot = self._core.slots.holding((*key, rank))
            if slot is not None:
                self._core.slots.pin(slot)
                slot.persisting = True
                self._start(slot, rank, target, snapshot.world)

    def _start(self, slot: Slot, rank: int, target: CheckpointTarget, world: SnapshotWorld) -> None:
        self._core.submit(None, lambda: self._write(slot, rank, target, world), kind=Work.STORE)

    def _write(self, slot: Slot, rank: int, target: CheckpointTarget, world: SnapshotWorld) -> None:
        from ckpt import persist

        core, entry, root = self._core, slot.entry, target.root
        try:
            if entry is None:
                raise NotFoundError(f"the block of rank {rank} is gone")
            index = decode_index(slot.file.index_view(entry), origin=slot.file.path.name)
            payload = slot.file.block(entry.payload_bytes)
            base = self._durable if target.incremental and self._durable >= 0 else None
            options = persist.PackOptions(compression=target.compression, base=base)
            receipt = persist.write_pack(
                root, step=entry.step, index=index, payload=payload, options=options
            )
        except (CkptError, OSError) as error:
            if entry is not None:
                self._report(entry.generation, entry.step, error=_words(error, entry.step, root))
            return
        finally:
            slot.persisting = False
            core.unpin(slot)
        self._send_receipt(
            Persisted(
                generation=entry.generation,
                step=entry.step,
                rank=rank,
                root=root,
                receipt=msgspec.to_builtins(receipt),
            ),
            committer=world.rank_nodes[0],
        )

    def _send_receipt(self, message: Persisted, *, committer: str) -> None:
        with self._core.lock:
            if self._core.book.generation != message.generation:
                return
            if committer == self._core.node:
                self._collect(message)
                return
            body = unparse(message)
            for peer in self._exchange.peers():
                if peer.node == committer:
                    self._exchange.link(peer, purpose="gossip").put(
                        lambda client: send(client, "persisted", body)
                    )

    # -- committing ------------------------------------------------------------------------------

    def _hear_persisted(self, request: Request, body: Persisted) -> None:
        self._core.book.require(body.generation)
        self._collect(body)
        request.reply()

    def _collect(self, message: Persisted) -> None:
        key = (message.generation, message.step)
        world = self._core.book.require(message.generation)
        collected = self._collected.setdefault(key, _Collected(root=message.root))
        collected.receipts[message.rank] = message.receipt
        if len(collected.receipts) == len(world.rank_nodes):
            del self._collected[key]
            self._core.submit(None, lambda: self._commit(key, collected, world), kind=Work.STORE)

    def _commit(self, key: SnapshotKey, collected: _Collected, world: SnapshotWorld) -> None:
        from ckpt import persist

        error: str | None = None
        try:
            receipts = [
                msgspec.convert(receipt, persist.WriterReceipt)
                for _, receipt in sorted(collected.receipts.items())
            ]
            persist.commit(
                collected.root,
                run=world.run,
                step=key[1],
                generation=key[0],
                receipts=receipts,
                mesh={"dp": len(world.rank_nodes)},
            )
        except (CkptError, OSError, msgspec.ValidationError) as failure:
            error = _words(failure, key[1], collected.root)
        self._report(*key, error=error)

    def _report(self, generation: int, step: int, *, error: str | None) -> None:
        """Note the outcome here and tell the group."""
        message = Durable(generation=generation, step=step, error=error)
        with self._core.lock:
            self._note(message)
            if self._core.book.generation == generation:
                self._exchange.tell_all("durable", message)
            self._core.changed()

    def _hear_durable(self, request: Request, body: Durable) -> None:
        self._note(body)
        self._core.changed()
        request.reply()

    def _note(self, message: Durable) -> None:
        if message.error is not None:
            self._errors[message.step] = message.error
            self._collected.pop((message.generation, message.step), None)
            _log.warning("%s", message.error)
            return
        self._errors.pop(message.step, None)
        self._durable = max(self._durable, message.step)
        if message.step not in self._persisted:
            self._persisted.append(message.step)

    # -- waiting ---------------------------------------------------------------------------------

    def _durable_step(self, request: Request, body: Await) -> None:
        def attempt() -> bool:
            if body.at_least is not None and self._durable < body.at_least:
                if (error := self._errors.get(body.at_least)) is not None:
                    raise StoreError(error)
                if body.timeout_s > 0:
                    return False
            request.reply(self._durable)
            return True

        def expire() -> None:
            request.reply(self._durable)

        deadline_s = monotonic() + body.timeout_s
        waiter = Waiter(request=request, deadline_s=deadline_s, attempt=attempt, expire=expire)
        self._core.wait(waiter)


def _words(error: Exception, step: int, root: str) -> str:
    return f"checkpoint of step {step} to {root} failed: {error}"
