"""Bring a lost rank's block back: ask who has what, fetch k fragments a part, decode, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import msgspec
from typing_extensions import Buffer

from ckpt.block import block_bytes, verify_block
from ckpt.erasure import Codec
from ckpt.errors import CkptError, CorruptError, FencedError, NotFoundError, PeerError
from ckpt.sidecar.core import Core, Work
from ckpt.sidecar.exchange import Exchange
from ckpt.sidecar.messages import Holdings, Key, OpenBlock, Read, ReadRow, unparse
from ckpt.sidecar.parity import Parities
from ckpt.sidecar.reading import holdings_of
from ckpt.sidecar.slots import BlockKey, Slot
from ckpt.sidecar.wire import PART_BYTES, split_checked
from ckpt.stripes import Geometry, Recovery, Span, plan_recovery
from ckpt.transport import Client, Request
from ckpt.world import BlockEntry, SidecarPeer, SnapshotWorld

ASK_TIMEOUT_S = 3.0
FETCH_TIMEOUT_S = 15.0
FETCH_THREADS = 8


class Sources:
    """What a rebuild reads from: this node itself, and every peer that may have fragments."""

    def __init__(self, core: Core, parities: Parities, peers: Sequence[SidecarPeer]) -> None:
        self._core, self._parities = core, parities
        self._peers = {peer.node: peer for peer in peers}
        self._clients: dict[str, Client] = {}
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")

    def close(self) -> None:
        """Close the connections; who has not answered yet is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def holdings(self, key: Key) -> Iterator[dict[str, Holdings]]:
        """Yield what is known to be held of a snapshot, again after each peer's answer."""
        with self._core.lock:
            found = {self._core.node: holdings_of(self._core, self._parities, key)}
        yield found
        asked = {
            self._pool.submit(self._ask, peer, key): peer.node for peer in self._peers.values()
        }
        for future in as_completed(asked):
            if (answer := future.result()) is not None:
                found[asked[future]] = answer
                yield found

    def _ask(self, peer: SidecarPeer, key: Key) -> Holdings | None:
        client = Client(peer.address, self._core.key, timeout_s=ASK_TIMEOUT_S, watch=True)
        try:
            answer, _ = client.call("holdings", unparse(key))
            return msgspec.convert(answer, Holdings)
        except (PeerError, msgspec.ValidationError):
            return None
        finally:
            client.close()

    def connect(self, nodes: Iterable[str]) -> None:
        """Open the connections that a plan needs."""
        for node in set(nodes) - {self._core.node} - set(self._clients):
            address = self._peers[node].address
            self._clients[node] = Client(
                address, self._core.key, timeout_s=FETCH_TIMEOUT_S, watch=True
            )

    def read(self, node: str, key: Key, span: Span) -> Buffer:
        """Return a part of a block held by ``node``."""
        if node == self._core.node:
            return self._own_block(key, span)
        ranges = ((span.at, span.nbytes),)
        body = Read(generation=key.generation, step=key.step, rank=span.rank, ranges=ranges)
        answer, frames = self._clients[node].call("read", unparse(body))
        return split_checked(answer, frames, [span.nbytes], origin=f"{node}: read")[0]

    def _own_block(self, key: Key, span: Span) -> bytes:
        core = self._core
        with core.lock:
            slot = core.slots.holding((key.generation, key.step, span.rank))
            if slot is None:
                raise NotFoundError(f"the block of rank {span.rank} was released meanwhile")
            core.slots.pin(slot)
        try:
            return bytes(slot.view()[span.at : span.at + span.nbytes])
        finally:
            core.unpin(slot)

    def read_row(self, node: str, body: ReadRow) -> Buffer:
        """Return a part of a parity row held by ``node``."""
        if node == self._core.node:
            row = self._parities.get((body.generation, body.step), (body.stripe, body.row))
            if row is None:
                raise NotFoundError(f"parity row {body.row} was released meanwhile")
            with row.lock:
                return row.part(body.at, body.nbytes)
        answer, frames = self._clients[node].call("row", unparse(body))
        return split_checked(answer, frames, [body.nbytes], origin=f"{node}: row")[0]

    def gather(self, fetches: Sequence[Callable[[], Buffer]]) -> list[Buffer]:
        """Run fetches side by side."""
        return list(self._pool.map(lambda fetch: fetch(), fetches))


class Rebuild:
    """Answers for blocks that are to be rebuilt; one rebuild per block, however many ask."""

    def __init__(self, core: Core, exchange: Exchange, parities: Parities) -> None:
        self._core, self._exchange, self._parities = core, exchange, parities
        self._waiting: dict[BlockKey, list[tuple[Callable[[Slot], None], Request]]] = {}

    def request(self, body: OpenBlock, answer: Callable[[Slot], None], request: Request) -> None:
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
        with _sources(self._core, self._parities, self._peers(body.world)) as sources:
            geometry, entries, plan = self._plan(body, sources, step)
            sources.connect(_nodes(plan))
            slot = self._room(entries[body.rank], key)
            try:
                block = slot.file.block(block_bytes(entries[body.rank]))
                codec = Codec(geometry.k, geometry.m)
                for recovery in plan:
                    _decode(recovery, step, codec, sources, block)
                self._verify(block, entries[body.rank])
            except Exception:  # whatever it was, the half-built slot must not stay; raised again
                with self._core.lock:
                    self._core.slots.discard(slot)
                raise
        return self._keep(slot, body.world, entries, key)

    def _verify(self, block: memoryview, entry: BlockEntry) -> None:
        """Check what was decoded; what is wrong is remembered, so that nobody is promised it."""
        try:
            verify_block(block, entry, origin=f"rebuilt block of rank {entry.rank}")
        except CorruptError:
            with self._core.lock:
                self._core.spoiled.add(entry)
            raise

    @staticmethod
    def _plan(
        body: OpenBlock, sources: Sources, step: Key
    ) -> tuple[Geometry, dict[int, BlockEntry], tuple[Recovery, ...]]:
        """Plan as soon as enough peers have answered; the dead are not waited for."""
        why, asked = "", []
        for found in sources.holdings(step):
            asked = sorted(found)
            entries = _entries(found)
            if missing := set(range(len(body.world.rank_nodes))) - set(entries):
                why = f"nobody knows the blocks of ranks {sorted(missing)}"
                continue
            geometry = Geometry(body.world, entries)
            plan, why = plan_recovery(
                geometry, body.rank, holders=_holders(found), rows=_rows(found, geometry)
            )
            if plan is not None:
                return geometry, entries, plan
        raise NotFoundError(
            f"step {step.step} of generation {step.generation}: the block of rank {body.rank} "
            f"cannot be rebuilt from nodes {asked}: {why}; restore an older step"
        )

    def _room(self, entry: BlockEntry, key: BlockKey) -> Slot:
        file = self._core.arena.create(block_bytes(entry))
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


@contextmanager
def _sources(core: Core, parities: Parities, peers: Sequence[SidecarPeer]) -> Iterator[Sources]:
    sources = Sources(core, parities, peers)
    try:
        yield sources
    finally:
        sources.close()


def _nodes(plan: Sequence[Recovery]) -> set[str]:
    rows = {row.node for recovery in plan for row in recovery.rows}
    return rows | {node for recovery in plan for read in recovery.columns for _, node in read.spans}


def _entries(found: Mapping[str, Holdings]) -> dict[int, BlockEntry]:
    entries: dict[int, BlockEntry] = {}
    for holdings in found.values():
        for entry in (*holdings.sealed, *holdings.blocks):
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
        if parity.stripe < geometry.n and parity.nbytes == geometry.row_bytes(parity.stripe)
    }


def _decode(
    recovery: Recovery, key: Key, codec: Codec, sources: Sources, block: memoryview
) -> None:
    """Decode one part of the lost block, a few megabytes at a time."""
    for lo in range(recovery.lo, recovery.hi, PART_BYTES):
        hi = min(lo + PART_BYTES, recovery.hi)
        fetches: dict[int, Callable[[], Buffer]] = {}
        for read in recovery.columns:
            fetches[read.column] = _column_fetch(read.spans, recovery.lo, (lo, hi), key, sources)
        for row in recovery.rows:
            body = ReadRow(
                generation=key.generation,
                step=key.step,
                stripe=recovery.stripe,
                row=row.row,
                at=lo,
                nbytes=hi - lo,
            )
            fetches[codec.k + row.row] = lambda node=row.node, body=body: sources.read_row(  # type: ignore[misc]
                node, body
            )
        fragments = dict(zip(fetches, sources.gather(list(fetches.values())), strict=True))
        at = recovery.at + lo - recovery.lo
        codec.decode(recovery.column, fragments, block[at : at + hi - lo])


def _column_fetch(
    spans: Sequence[tuple[Span, str]],
    base: int,
    window: tuple[int, int],
    key: Key,
    sources: Sources,
) -> Callable[[], Buffer]:
    """Return what fetches bytes ``window`` of a column; its spans count from ``base``."""
    lo, hi = window[0] - base, window[1] - base

    def fetch() -> Buffer:
        data = bytearray(hi - lo)
        for span, node in spans:
            a, b = max(span.into, lo), min(span.into + span.nbytes, hi)
            if a < b:
                part = Span(rank=span.rank, at=span.at + a - span.into, nbytes=b - a, into=a - lo)
                data[part.into : part.into + part.nbytes] = memoryview(
                    sources.read(node, key, part)
                )
        return data

    return fetch
