"""What a simulated job tells: the history that its ranks would write, and the events of its agents.

A snapshot carries a digest of all samples that led to it, as weights would. Which microbatches a
rank runs and where their samples lie is what production says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.data.sampler import positions
from holdfast.elastic.events import events_file
from holdfast.elastic.planning.shares import part
from holdfast.elastic.testing.simulation.simulator import Simulation
from holdfast.tools.chaos.judging.history import of_events
from holdfast.tools.chaos.judging.record import History
from holdfast.tools.chaos.scenarios.strikes import Strike

_FILE: Final = "history-simulated.jsonl"


class Telling:
    """Takes note of what happens; ``names`` are the nodes' names in the scenario."""

    def __init__(self, sim: Simulation, *, microbatches: int, names: tuple[str, ...]) -> None:
        self._sim, self._microbatches, self._names = sim, microbatches, names
        self._told: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._line, self._begun_s = [""], 0.0
        self._digests: dict[tuple[int, int], str] = {}
        self._event("job_started", "launcher", "launcher", {"nodes": list(names)})

    @property
    def history(self) -> History:
        """What the ranks told."""
        return of_events(self._told)

    def write(self, folder: Path) -> None:
        """Write what was told and what happened as real jobs do: JSON lines, two files."""
        folder.mkdir(parents=True, exist_ok=True)
        for path, told in (
            (folder / _FILE, self._told),
            (events_file(folder, "simulated"), self._events),
        ):
            path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in told))

    def saw(self, kind: str, node: str, fields: Mapping[str, Json]) -> None:
        """Take note of an event of the simulation."""
        if kind == "step":
            self._step(fields["generation"], fields["step"])
            return
        if kind == "resumed":
            self._resume(fields["generation"], fields["step"])
        if kind == "restored":
            fields = {**fields, "tier": "parity" if fields["rebuilt"] else "peer"}
        if kind == "proposed":
            record = self._sim.generations[fields["generation"]]
            ranks: Json = [member.seat for member in record.members]
            restored = record.restore.step if record.restore else None
            fields = {**fields, "ranks": ranks, "restore_step": restored}
        self._event(kind, self._names[int(node[1:])] if node else "", "agent", fields)

    def strike(self, strike: Strike, victim: str, node: str) -> None:
        """Take note of a strike that hit."""
        fields = {"what": strike.kind, "victim": victim, "on": node, "number": strike.number}
        self._event("fault", "chaos", "chaos", fields)

    def _event(self, kind: str, node: str, source: str, fields: Mapping[str, Json]) -> None:
        at = {"t": round(self._sim.now_s, 6), "node": node, "source": source, "kind": kind}
        self._events.append({**at, **fields, **at})

    def _resume(self, generation: int, step: int) -> None:
        """Go on from what was restored, or from the newest checkpoint."""
        point = self._sim.generations[generation].restore
        if point is not None:
            digest = self._digests[point.world.generation, point.step]
            self._line[point.step :] = [digest]
        else:
            del self._line[step + 1 :]
            tier = "checkpoint" if step else "none"
            told = {"generation": generation, "step": step, "tier": tier}
            self._event("restored", "", "agent", told)
        self._begun_s = self._sim.now_s
        self._digests[generation, step] = self._line[-1]

    def _step(self, generation: int, step: int) -> None:
        record = self._sim.generations[generation]
        ranks = len(record.members)
        ids = {
            rank: [
                position
                for microbatch in part(
                    self._microbatches, rank=rank, ranks=ranks, shares=record.shares
                )
                for position in positions(
                    step=step - 1, microbatch=microbatch, microbatches=self._microbatches, size=1
                )
            ]
            for rank in range(ranks)
        }
        used = sorted(each for mine in ids.values() for each in mine)
        text = f"{self._line[-1]} {step} {used}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._line.append(digest)
        self._digests[generation, step] = digest
        begun_s, self._begun_s = self._begun_s, self._sim.now_s
        for rank, mine in ids.items():
            at = {
                "t": round(self._sim.now_s, 6), "step": step, "rank": rank, "attempt": generation,
            }  # fmt: skip
            begun = {**at, "t": round(begun_s, 6)}
            self._told.append({**begun, "kind": "samples", "ids": mine, "epoch": 0})
            self._told.append({**at, "kind": "step"})
            self._told.append({**at, "kind": "state", "digest": digest})
