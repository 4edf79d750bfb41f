"""Bring a lost rank's block back: ask who has what, get k fragments a part, decode, verify.

A block that comes out wrong is decoded again from other fragments, where there are any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from itertools import chain, combinations, islice

from typing_extensions import Buffer

from ckpt.block import block_bytes, check_block
from ckpt.erasure import codec_named
from ckpt.errors import CkptError, CorruptError, FencedError, NotFoundError, PeerError
from ckpt.sidecar.core import Core, Refusable, Work
from ckpt.sidecar.exchange import Exchange
from ckpt.sidecar.messages import Holdings, Key, OpenBlock, ReadRow
from ckpt.sidecar.parity import Parities
from ckpt.sidecar.room import Room
from ckpt.sidecar.slots import BlockKey, Slot
from ckpt.sidecar.sources import Sources, sources_of
from ckpt.stripes import Geometry, Recovery, plan_recovery
from ckpt.sums import Sums
from ckpt.world import BlockEntry, SidecarPeer, SnapshotWorld

_log = logging.getLogger(__name__)

MAX_TRIES = 16
"""Of other sets of fragments, when a rebuilt block fails its check."""


class Rebuild:
    """Answers for blocks that are to be rebuilt; one rebuild per block, however many ask."""

    def __init__(self, core: Core, exchange: Exchange, parities: Parities, *, room: Room) -> None:
        self._core, self._exchange, self._parities = core, exchange, parities
        self._room = room
        self._waiting: dict[BlockKey, list[tuple[Callable[[Slot], None], Refusable]]] = {}

    def request(self, body: OpenBlock, answer: Callable[[Slot], None], request: Refusable) -> None:
        """Rebuild a block and ``answer`` with its slot, or refuse ``request``."""
        key = (body.world.generation, body.step, body.rank)
        if not 0 <= body.rank < len(body.world.rank_nodes):
            raise NotFoundError(f"generation {key[0]} has no rank {body.rank}")
        first = key not in self._waiting
        self._waiting.setdefault(key, []).append((answer, request))
        if first:
            self._core.submit(None, lambda: self._run(body, key), kind=Work.PEERS)

    def _run(self, body: OpenBlock, key: BlockKey) -> None:
        failed: CkptError | None = None
        slot: Slot | None = None
        try:
            slot = self._rebuild(body, key)
        except CkptError as error:
            failed = error
        except Exception as error:
            failed = PeerError(f"rebuilding the block of rank {body.rank} failed: {error!r}")
            raise
        finally:
            self._answer(key, slot, failed)

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
        """Return whom to ask: the present group, or the saving one where there is none."""
        with self._core.lock:
            if self._core.book.world is not None:
                return self._exchange.peers()
            return tuple(peer for peer in world.peers if peer.node != self._core.node)

    def _rebuild(self, body: OpenBlock, key: BlockKey) -> Slot:
        step = Key(generation=key[0], step=key[1])
        with sources_of(self._core, self._parities, self._peers(body.world)) as sources:
            asked = sources.holdings(step)
            geometry, entries, found, plan = self._plan(body, asked, step)
            entry = entries[body.rank]
            slot = self._slot_for(entry, key)
            try:
                with self._core.meters.timed("rebuild", block_bytes(entry)):
                    block = slot.file.block(block_bytes(entry))
                    work = _Decoding(sources, geometry, step, (found, asked), entry, block)
                    slot.sums = self._recover(work, plan)
            except Exception:  # whatever it was, the half-built slot must not stay; raised again
                with self._core.lock:
                    self._core.slots.discard(slot)
                raise
        return self._keep(slot, body.world, entries, key)

    def _recover(self, work: _Decoding, plan: Sequence[Recovery]) -> Sums:
        """Decode, and decode again without one node or another while the result is wrong.

        What cannot be had right from any fragments is remembered, so that nobody is promised it.
        """
        wrong: CorruptError | None = None
        missed: CkptError | None = None
        for left_out in _exclusions(_nodes(plan), work.geometry.m):
            retry = work.plan(left_out) if left_out else plan
            if retry is None:
                continue
            try:
                sums = work.decode(retry)
            except CorruptError as error:
                wrong = wrong or error
                continue
            except (PeerError, NotFoundError) as error:  # a node went away: others may do
                missed = missed or error
                continue
            if wrong is not None:
                self._core.counters["corrupt_fragments"] += 1
                _log.warning(
                    "%s: rank %d of step %d came out right only without the fragments of %s: "
                    "what is there has changed since it was sealed",
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
        body: OpenBlock, answers: Iterator[dict[str, Holdings]], step: Key
    ) -> tuple[Geometry, dict[int, BlockEntry], dict[str, Holdings], tuple[Recovery, ...]]:
        """Plan as soon as enough peers have answered; the dead are not waited for."""
        why, asked = "", []
        for found in answers:
            asked = sorted(found)
            ranks = range(len(body.world.rank_nodes))
            entries = _entries(found, step, ranks)
            if missing := set(ranks) - set(entries):
                why = f"nobody knows the blocks of ranks {sorted(missing)}"
                continue
            geometry = Geometry(body.world, entries)
            plan, why = plan_recovery(
                geometry, body.rank, holders=_holders(found), rows=_rows(found, geometry)
            )
            if plan is not None:
                return geometry, entries, found, plan
        raise NotFoundError(
            f"step {step.step} of generation {step.generation}: the block of rank {body.rank} "
            f"cannot be rebuilt from nodes {asked}: {why}; restore an older step"
        )

    def _slot_for(self, entry: BlockEntry, key: BlockKey) -> Slot:
        """Return a slot to decode into: a free one, whose pages are there, or a new one."""
        size_bytes = block_bytes(entry)
        with self._core.lock:
            if (free := self._core.slots.take_free(size_bytes)) is not None:
                self._core.slots.begin(free, key)
                return free
            self._room.make_room_for_rebuilt(size_bytes)
            self._room.begin(size_bytes)
        try:
            file = self._core.arena.create(size_bytes)
        finally:
            with self._core.lock:
                self._room.end(size_bytes)
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
        return slot


class _Decoding:
    """Decodes one lost block into its slot, part by part, from any set of fragments."""

    def __init__(
        self,
        sources: Sources,
        geometry: Geometry,
        key: Key,
        answers: tuple[dict[str, Holdings], Iterator[dict[str, Holdings]]],
        entry: BlockEntry,
        block: memoryview,
    ) -> None:
        self.geometry, self.entry = geometry, entry
        self._sources, self._key, self._block = sources, key, block
        self._found, self._outstanding = answers

    def plan(self, left_out: Iterable[str]) -> tuple[Recovery, ...] | None:
        """Plan without some nodes, once all have said what they hold; None if that is too few."""
        for found in self._outstanding:
            self._found = found
        rest = {node: each for node, each in self._found.items() if node not in left_out}
        plan, _ = plan_recovery(
            self.geometry,
            self.entry.rank,
            holders=_holders(rest),
            rows=_rows(rest, self.geometry),
        )
        return plan

    def decode(self, plan: Sequence[Recovery]) -> Sums:
        """Decode the whole block and verify it; return its sums.

        Raises ``CorruptError`` when it is not what was sealed, ``PeerError`` or ``NotFoundError``
        when a fragment cannot be had.
        """
        self._sources.connect(_nodes(plan), self._found)
        size, lanes = self._sources.pace(_nodes(plan))
        parts = [
            (recovery, lo, min(lo + size, recovery.hi))
            for recovery in plan
            for lo in range(recovery.lo, recovery.hi, size)
        ]
        failed = threading.Event()

        def work(lane: int) -> None:
            try:
                for part in parts[lane::lanes]:
                    if not failed.is_set():
                        self._part(*part)
            except Exception:  # whatever it was, the others need not go on; raised again
                failed.set()
                raise

        pending = [self._sources.pool.submit(work, lane) for lane in range(lanes)]
        wait(pending)  # nothing of this attempt may still write when the next one begins
        for each in pending:
            each.result()
        self._sources.check_current()
        origin = f"rebuilt block of rank {self.entry.rank}"
        return check_block(self._block, self.entry, origin=origin).sums

    def _part(self, recovery: Recovery, lo: int, hi: int) -> None:
        codec = codec_named()(self.geometry.columns(recovery.stripe), self.geometry.m)
        window = (lo - recovery.lo, hi - recovery.lo)
        fragments: dict[int, Buffer] = {
            read.column: self._sources.column(read, window, self._key) for read in recovery.columns
        }
        for row in recovery.rows:
            body = ReadRow(
                generation=self._key.generation,
                step=self._key.step,
                stripe=recovery.stripe,
                row=row.row,
                at=lo,
                nbytes=hi - lo,
            )
            fragments[codec.k + row.row] = self._sources.row(
                row.node, body, number=codec.k + row.row
            )
        at = recovery.at + lo - recovery.lo
        codec.decode(recovery.column, fragments, self._block[at : at + hi - lo])


def _exclusions(nodes: Iterable[str], most: int) -> Iterator[frozenset[str]]:
    """Yield which nodes to do without: none, then one, then two …, a bounded number of times."""
    names = sorted(nodes)
    sets = chain.from_iterable(combinations(names, size) for size in range(most + 1))
    return (frozenset(each) for each in islice(sets, MAX_TRIES))


def _nodes(plan: Sequence[Recovery]) -> set[str]:
    rows = {row.node for recovery in plan for row in recovery.rows}
    return rows | {node for recovery in plan for read in recovery.columns for _, node in read.spans}


def _entries(found: Mapping[str, Holdings], key: Key, ranks: range) -> dict[int, BlockEntry]:
    entries: dict[int, BlockEntry] = {}
    for holdings in found.values():
        for entry in (*holdings.sealed, *holdings.blocks):
            if (entry.generation, entry.step) != (key.generation, key.step):
                continue
            if entry.rank not in ranks:
                continue
            if entries.setdefault(entry.rank, entry) != entry:
                raise CorruptError(f"rank {entry.rank} is known with two different blocks")
    return entries


def _holders(found: Mapping[str, Holdings]) -> dict[int, str]:
    return {entry.rank: node for node, each in found.items() for entry in each.blocks}


def _rows(found: Mapping[str, Holdings], geometry: Geometry) -> dict[tuple[int, int], str]:
    return {
        (parity.stripe, parity.row): node
        for node, each in found.items()
        for parity in each.parities
        if 0 <= parity.stripe < geometry.n and 0 <= parity.row < geometry.m
        if parity.nbytes == geometry.row_bytes(parity.stripe)
    }
