"""Parity groups in one process: blocks and parity rows by the plain rules, for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.ckpt.memory.records import BlockEntry, Inventory, ParityEntry, SnapshotWorld
from holdfast.ckpt.parity.codec import ErasureCodec
from holdfast.ckpt.parity.erasure import codec_named
from holdfast.ckpt.parity.stripes import BlockRecovery, Geometry, plan_recovery


class ParityModel:
    """The blocks and rows of all sidecars for one protected step; rows are encoded at once."""

    def __init__(self, world: SnapshotWorld, made: Mapping[int, tuple[BlockEntry, bytes]]) -> None:
        self.world = world
        self.entries = {rank: entry for rank, (entry, _) in made.items()}
        self.blocks = {rank: block for rank, (_, block) in made.items()}
        self.geometry = Geometry(world, self.entries)
        self.rows: dict[tuple[int, int], bytearray] = {}
        for stripe in range(self.geometry.n if self.geometry.m else 0):
            self._encode(stripe)

    def codec(self, stripe: int) -> ErasureCodec:
        """Return the codec of a stripe's shape."""
        return codec_named()(self.geometry.columns(stripe), self.geometry.m)

    def _encode(self, stripe: int) -> None:
        geometry = self.geometry
        columns = [
            self.column(stripe, column, 0, geometry.filled_bytes(stripe, column))
            for column in range(geometry.columns(stripe))
        ]
        rows = {row: bytearray(geometry.row_bytes(stripe)) for row in range(geometry.m)}
        self.codec(stripe).encode(columns, rows)
        self.rows.update({(stripe, row): data for row, data in rows.items()})

    def column(self, stripe: int, column: int, lo: int, hi: int) -> bytes:
        """Return bytes ``lo … hi`` of a data column."""
        data = bytearray(hi - lo)
        for span in self.geometry.spans(stripe, column, lo, hi):
            part = self.blocks[span.rank][span.at : span.at + span.nbytes]
            data[span.into : span.into + span.nbytes] = part
        return bytes(data)

    def plan(
        self, rank: int, lost: Collection[str]
    ) -> tuple[tuple[BlockRecovery, ...] | None, str]:
        """Plan the rebuild of a rank's block from the nodes outside ``lost``."""
        homes = self.world.rank_nodes
        holders = {r: node for r, node in enumerate(homes) if node not in lost}
        live = [node for node in self.geometry.nodes if node not in lost]
        rows = {place: node for node in live for place in self.geometry.rows_of(node)}
        return plan_recovery(self.geometry, rank, holders=holders, rows=rows)

    def rebuild(self, rank: int, plan: tuple[BlockRecovery, ...]) -> bytes:
        """Carry out a plan; bytes that no part of it wrote are 0xff."""
        block = bytearray(b"\xff" * len(self.blocks[rank]))
        for each in plan:
            k = self.geometry.columns(each.stripe)
            fragments = {
                read.column: self.column(each.stripe, read.column, each.lo, each.hi)
                for read in each.columns
            }
            for row in each.rows:
                fragments[k + row.row] = bytes(self.rows[each.stripe, row.row][each.lo : each.hi])
            into = memoryview(block)[each.at : each.at + each.hi - each.lo]
            self.codec(each.stripe).decode(each.column, fragments, into)
        return bytes(block)

    def inventory(self, node: str) -> Inventory:
        """Return the inventory of the sidecar of ``node``."""
        homes, entries = self.world.rank_nodes, self.entries
        places = self.geometry.rows_of(node)
        step = min((entry.step for entry in entries.values()), default=0)
        return Inventory(
            node=node,
            worlds=(self.world,),
            blocks=tuple(entries[rank] for rank, home in enumerate(homes) if home == node),
            parities=tuple(
                ParityEntry(
                    generation=self.world.generation,
                    step=step,
                    stripe=stripe,
                    row=row,
                    nbytes=self.geometry.row_bytes(stripe),
                    crc32c=0,
                )
                for stripe, row in places
            ),
            sealed=tuple(entries.values()),
        )
