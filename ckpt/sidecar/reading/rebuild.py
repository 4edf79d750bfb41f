"""Rebuild of a lost rank's block: find its fragments, get k per part, decode, verify.

A block that fails its check is decoded again from other fragments, if there are any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice

from holdfast.ckpt.errors import CkptError, CorruptError, FencedError, NotFoundError, PeerError
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.records import BlockEntry, SidecarPeer, SnapshotWorld
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.parity.stripes import BlockRecovery, Geometry, plan_recovery
from holdfast.ckpt.sidecar.core.book import SnapshotKey
from holdfast.ckpt.sidecar.core.core import Core, Refusable, WaitingWork
from holdfast.ckpt.sidecar.core.messages import (
    Key,
    OpenBlock,
    Opened,
    Read,
    SnapshotHoldings,
    unparse,
)
from holdfast.ckpt.sidecar.core.slots import BlockKey, BlockSize, Slot
from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
from holdfast.ckpt.sidecar.parity.rows import Parities
from holdfast.ckpt.sidecar.reading.decoding import (
    Decoding,
    entries_of,
    holders_of,
    nodes_of,
    rows_of,
)
from holdfast.ckpt.sidecar.reading.lost import LostBlock
from holdfast.ckpt.sidecar.reading.sources import Sources
from holdfast.ckpt.sidecar.writing.room import SlotRoom
from holdfast.ckpt.transport import Request

_log = logging.getLogger(__name__)

MAX_TRIES = 16
"""The most other sets of fragments that are tried when a rebuilt block fails its check."""

MAX_IN_PARTS = 64
"""The most lost blocks whose fragments stay available for reads in parts."""


class Rebuild:
    """Serves blocks that must be rebuilt; one rebuild per block, however many callers wait.

    A block of which little is wanted stays lost: it is read *in parts*, each decoded on request.
    """

    def __init__(
        self, core: Core, exchange: ParityExchange, parities: Parities, *, room: SlotRoom
    ) -> None:
        self._core, self._exchange, self._parities = core, exchange, parities
        self._room = room
        self._waiting: dict[BlockKey, list[tuple[Callable[[Slot], None], Refusable]]] = {}
        self._in_parts: dict[BlockKey, LostBlock] = {}

    def request(self, body: OpenBlock, answer: Callable[[Slot], None], request: Refusable) -> None:
        """Rebuild a block and call ``answer`` with its slot, or refuse ``request``."""
        key = (body.world.generation, body.step, body.rank)
        if not 0 <= body.rank < len(body.world.rank_nodes):
            raise NotFoundError(f"generation {key[0]} has no rank {body.rank}")
        first = key not in self._waiting
        self._waiting.setdefault(key, []).append((answer, request))
        if first:
            self._core.submit(None, lambda: self._run(body, key), kind=WaitingWork.PEERS)

    # -- in parts --------------------------------------------------------------------------------

    def request_index(
        self, body: OpenBlock, answer: Callable[[Slot], None], request: Request
    ) -> None:
        """Decode the index of a block and reply with it; parts of the block are read afterwards.

        If that fails, or the block is being rebuilt already, it acts as `request` does.
        """
        key = (body.world.generation, body.step, body.rank)
        if key in self._waiting or not 0 <= body.rank < len(body.world.rank_nodes):
            self.request(body, answer, request)
            return

        if (known := self._in_parts.get(key)) is not None:
            self._reply_index(known, request)
            return

        def find() -> None:
            try:
                lost = self._find(body)
                try:
                    lost.index = lost.work.read_index(lost.plan)
                except CkptError:
                    lost.close()
                    raise
            except CkptError:  # the rebuild of the whole block reports it
                self._request_again(body, answer, request)
                return
            with self._core.lock:
                self._keep_in_parts(key, lost)
            self._reply_index(lost, request)

        self._core.submit(request, find, kind=WaitingWork.PEERS)

    @staticmethod
    def _reply_index(lost: LostBlock, request: Request) -> None:
        opened = Opened(path="", payload_bytes=lost.entry.payload_bytes, in_parts=True)
        request.reply(unparse(opened), [lost.index])

    def _keep_in_parts(self, key: BlockKey, lost: LostBlock) -> None:
        if key in self._in_parts:  # opened by a concurrent request
            lost.close()
            return
        while len(self._in_parts) >= MAX_IN_PARTS:
            self._in_parts.pop(next(iter(self._in_parts))).close()
        self._in_parts[key] = lost

    def read(self, body: Read, answer: Callable[[Slot], None], request: Request) -> bool:
        """Reply with ranges of a block that was opened in parts; return False if it was not.

        Once more than half of it was requested, or a fragment is no longer available, the whole
        block is rebuilt and ``answer`` called with its slot. Called under the lock.
        """
        key = (body.generation, body.step, body.rank)
        if (lost := self._in_parts.get(key)) is None:
            return False
        lost.asked_bytes += sum(max(nbytes, 0) for _, nbytes in body.ranges)
        if 2 * lost.asked_bytes > lost.entry.payload_bytes:
            self.request(lost.body, answer, request)
            return True

        def decode() -> None:
            try:
                with self._core.meters.timed("rebuild", sum(each for _, each in body.ranges)):
                    parts = lost.read(body.ranges)
            except CkptError:
                self._request_again(lost.body, answer, request)
                return
            self._core.counters["read_in_parts"] += 1
            request.reply([crc32c(part) for part in parts], [b"".join(parts)])

        self._core.submit(request, decode, kind=WaitingWork.PEERS)
        return True

    def _request_again(
        self, body: OpenBlock, answer: Callable[[Slot], None], request: Request
    ) -> None:
        """Act as `request`, unless the block was rebuilt meanwhile."""
        with self._core.lock:
            key = (body.world.generation, body.step, body.rank)
            if (slot := self._core.slots.holding(key)) is None:
                self.request(body, answer, request)
                return
            try:
                answer(slot)
            except CkptError as error:
                request.refuse(error)

    def let_go(self, key: SnapshotKey | None = None) -> None:
        """Give up the blocks that are read in parts: those of a snapshot, or all."""
        for each in [each for each in self._in_parts if key in (None, each[:2])]:
            self._in_parts.pop(each).close()

    # -- whole -----------------------------------------------------------------------------------

    def _run(self, body: OpenBlock, key: BlockKey) -> None:
        failed: CkptError | None = None
        slot: Slot | None = None
        lost: LostBlock | None = None
        try:
            lost = self._find(body)
            slot = self._rebuild(lost, key)
        except CkptError as error:
            failed = error
        except Exception as error:
            failed = PeerError(f"rebuilding the block of rank {body.rank} failed: {error!r}")
            raise
        finally:
            self._answer(key, slot, failed)
            if lost is not None:  # to close takes long, so the callers have their answers before
                lost.close()

    def _answer(self, key: BlockKey, slot: Slot | None, failed: CkptError | None) -> None:
        with self._core.lock:
            waiting = self._waiting.pop(key)
            self._core.counters["rebuilds_failed" if failed else "rebuilt"] += 1
            for answer, request in waiting:
                try:
                    if slot is None:
                        raise failed or NotFoundError("not rebuilt")
                    answer(slot)
                except CkptError as error:
                    request.refuse(error)

    def _peers(self, world: SnapshotWorld) -> tuple[SidecarPeer, ...]:
        """Return the peers to ask: the present group, or the saving one if there is none."""
        with self._core.lock:
            if self._core.book.world is not None:
                return self._exchange.peers()
            return tuple(peer for peer in world.peers if peer.node != self._core.node)

    def _rebuild(self, lost: LostBlock, key: BlockKey) -> Slot:
        slot = self._slot_for(lost.entry, key)
        try:
            nbytes = block_bytes(lost.entry)
            with self._core.meters.timed("rebuild", nbytes):
                slot.sums = self._recover(lost.work, lost.plan, slot.file.block(nbytes))
        except Exception:  # on any error the half-built slot goes; raised again
            with self._core.lock:
                self._core.slots.discard(slot)
            raise
        return self._keep(slot, lost.body.world, lost.entries, key)

    def _find(self, body: OpenBlock) -> LostBlock:
        """Find the fragments of a block. Raises ``NotFoundError`` if there are too few."""
        step = Key(generation=body.world.generation, step=body.step)
        peers, maps = self._peers(body.world), self._exchange.builder.maps
        sources = Sources(self._core, self._parities, peers=peers, maps=maps, run=body.world.run)
        try:
            holdings = sources.holdings(step)
            geometry, entries, found, plan = self._plan(body, holdings, step)
        except Exception:  # on any error close all connections; raised again
            sources.close()
            raise
        work = Decoding(sources, geometry, step, (found, holdings), entries[body.rank])
        return LostBlock(body, sources, work, plan, entries)

    def _recover(self, work: Decoding, plan: Sequence[BlockRecovery], block: memoryview) -> Sums:
        """Decode, and decode again without one node or another while the result is wrong.

        A block that no fragments decode correctly is recorded, so that it is not offered.
        """
        wrong: CorruptError | None = None
        missed: CkptError | None = None
        for left_out in _exclusions(nodes_of(plan), work.geometry.m):
            retry = work.plan(left_out) if left_out else plan
            if retry is None:
                continue
            try:
                sums = work.decode(retry, block).sums
            except CorruptError as error:
                wrong = wrong or error
                continue
            except (PeerError, NotFoundError) as error:  # a node is gone: try others
                missed = missed or error
                continue
            if wrong is not None:
                self._core.count("corrupt_fragments")
                _log.warning(
                    "%s: rank %d of step %d came out right only without the fragments of %s: "
                    "those fragments have changed since they were sealed",
                    self._core.node,
                    work.entry.rank,
                    work.entry.step,
                    sorted(left_out),
                )
            return sums
        if wrong is None:
            raise missed or NotFoundError(f"the block of rank {work.entry.rank} is out of reach")
        with self._core.lock:
            self._core.spoiled.add(work.entry)
        raise wrong

    @staticmethod
    def _plan(
        body: OpenBlock, answers: Iterator[dict[str, SnapshotHoldings]], step: Key
    ) -> tuple[
        Geometry, dict[int, BlockEntry], dict[str, SnapshotHoldings], tuple[BlockRecovery, ...]
    ]:
        """Plan as soon as enough peers have answered, without waiting for dead ones."""
        why, queried = "", []
        for found in answers:
            queried = sorted(found)
            ranks = range(len(body.world.rank_nodes))
            entries = entries_of(found, step, ranks)
            if missing := set(ranks) - set(entries):
                why = f"no node knows the blocks of ranks {sorted(missing)}"
                continue
            geometry = Geometry(body.world, entries)
            plan, why = plan_recovery(
                geometry, body.rank, holders=holders_of(found), rows=rows_of(found, geometry)
            )
            if plan is not None:
                return geometry, entries, found, plan
        raise NotFoundError(
            f"step {step.step} of generation {step.generation}: the block of rank {body.rank} "
            f"cannot be rebuilt from nodes {queried}: {why}; restore an older step"
        )

    def _slot_for(self, entry: BlockEntry, key: BlockKey) -> Slot:
        """Return a slot to decode into: a free one with its pages present, or a new one."""
        size = BlockSize(nbytes=block_bytes(entry))
        with self._core.lock:
            if (free := self._core.slots.take_free(size, rank=key[2])) is not None:
                self._core.slots.begin(free, key)
                return free
            self._room.make_room_for_rebuilt(size)
            self._room.begin(size)
        try:
            file = self._core.arena.create(size.nbytes)
        finally:
            with self._core.lock:
                self._room.end(size)
        with self._core.lock:
            slot = self._core.slots.add(file)
            self._core.slots.begin(slot, key)
            return slot

    def _keep(
        self,
        slot: Slot,
        world: SnapshotWorld,
        entries: Mapping[int, BlockEntry],
        key: BlockKey,
    ) -> Slot:
        core = self._core
        with core.lock:
            if slot not in core.slots.all():
                raise FencedError("a newer generation began while the block was being rebuilt")
            core.slots.seal(slot, entries[key[2]])
            core.book.learn(world, key[1], entries)
            core.slots.commit(slot)
            if (lost := self._in_parts.pop(key, None)) is not None:
                lost.close()
        return slot


def _exclusions(nodes: Iterable[str], most: int) -> Iterator[frozenset[str]]:
    """Yield sets of nodes to leave out: none, then one, then two …, at most `MAX_TRIES` sets."""
    names = sorted(nodes)
    sets = chain.from_iterable(combinations(names, size) for size in range(most + 1))
    return (frozenset(each) for each in islice(sets, MAX_TRIES))
