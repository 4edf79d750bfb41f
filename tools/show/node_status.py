"""The status of one node's sidecar, with names for the common questions. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

STAGES: Final = ("seal", "exchange", "protect", "serve", "rebuild", "persist", "spill")
"""The meters of a sidecar, in the order in which a snapshot passes the stages.

``serve`` counts bytes sent to readers, both those that restore and those that prefetch.
"""

MEMORY: Final = ("slots", "parity", "logs")
"""The purposes of a sidecar's shared memory."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node, its processes, and the answer of its sidecar: empty if there is an ``error``.

    ``stragglers`` maps seats to a sentence about the straggler there, on the one node that reports
    for all. ``data_troubles`` describes lost data-loading processes of its living workers.
    ``unreachable`` lists the nodes that this node cannot reach. ``held_off`` says why it is not let
    in yet, if it is not. ``approximate`` is the mark of a model of which stages were set from
    others, on the first node alone.
    """

    node: str
    sidecar: int
    workers: dict[str, int] = {}
    status: dict[str, Any] = {}
    error: str | None = None
    stragglers: dict[str, str] = {}
    data_troubles: dict[str, str] = {}
    unreachable: tuple[str, ...] = ()
    held_off: str = ""
    approximate: str = ""

    def step(self, what: str) -> int | None:
        """Return the newest ``committed``, ``protected`` or ``durable`` step, None for none.

        The first two belong to this generation. ``held`` is the newest step that was ever protected
        and is still in memory; after a loss it has fewer fragments than before.
        """
        if what == "durable":
            return max(self.status.get("persisted", ()), default=None)
        found = self.status.get(what)
        return None if found is None or found < 0 else int(found)

    @property
    def generation(self) -> int:
        """The generation that the sidecar guards, 0 before the first."""
        return int(self.status.get("generation") or 0)

    @property
    def age_s(self) -> float | None:
        """Time since the newest protected step was complete, None before the first."""
        found = self.status.get("restore_point_age_s")
        return None if found is None else float(found)

    def meter(self, stage: str) -> dict[str, float] | None:
        """Return ``{count, seconds, bytes, median_s, max_s, last_s}``, None if it never ran."""
        found: dict[str, float] | None = self.status.get("meters", {}).get(stage)
        return found

    def nbytes(self, purpose: str) -> int:
        """Return the bytes held for ``slots``, ``parity``, ``logs`` or ``disk``; the ``budget``."""
        return int(self.status.get("bytes", {}).get(purpose, 0))

    @property
    def memory(self) -> dict[str, Any]:
        """``mode``, ``need_bytes``, ``logs_most_bytes``; if snapshots are ``left_out``, why."""
        found: dict[str, Any] = self.status.get("memory", {})
        return found

    @property
    def peers(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The queues to other nodes by (node, purpose): ``queued``, ``oldest_s``, ``error``."""
        found: dict[str, Any] = self.status.get("peers", {})
        return {
            (name.rpartition("/")[0], name.rpartition("/")[2]): link for name, link in found.items()
        }

    @property
    def logs(self) -> dict[str, dict[str, Any]]:
        """The records that are not on every copy, by log: ``records``, ``bytes``, ``oldest_s``."""
        found: dict[str, Any] = self.status.get("log_lag", {})
        return found

    @property
    def refusals(self) -> dict[str, int]:
        """Number of refused messages by reason."""
        found: dict[str, int] = self.status.get("refusals", {})
        return found

    @property
    def unprotected(self) -> dict[str, str]:
        """Reasons why snapshots are not protected, by ``generation/step``."""
        found: dict[str, str] = self.status.get("unprotected", {})
        return found

    def troubles(self) -> list[str]:
        """Return the problems that a person should know about, one sentence each."""
        status = self.status
        found = [self.error] if self.error else []
        found += [f"the model is {self.approximate}"] if self.approximate else []
        found += [*self.stragglers.values(), *self.data_troubles.values()]
        found += [f"does not reach node {name}" for name in self.unreachable]
        found += [
            f"step {at.rpartition('/')[2]} is not protected: {why}"
            for at, why in self.unprotected.items()
        ]
        if self.memory.get("left_out"):
            found.append(f"snapshots are skipped: {self.memory['left_out']}")
        if self.memory.get("logs_refused"):
            found.append(f"logs are full: {self.memory['logs_refused']}")
        found += [
            f"{purpose} for {peer}: {link['queued']} queued, the oldest {link['oldest_s']:.1f} s"
            + (f"; last error: {link['error']}" if link.get("error") else "")
            for (peer, purpose), link in self.peers.items()
            if link.get("error") or link["oldest_s"] >= 1
        ]
        found += [
            f"log {name}: {lag['records']} records are not on every copy, "
            f"the oldest for {lag['oldest_s']:.1f} s"
            for name, lag in self.logs.items()
            if lag["oldest_s"] >= 1
        ]
        found += [
            f"log copies on {node}: {why}" for node, why in status.get("log_errors", {}).items()
        ]
        found += [str(status[key]) for key in ("persist_error", "spill_error") if status.get(key)]
        if self.refusals:
            counts = ", ".join(f"{count} {why}" for why, count in self.refusals.items())
            found.append(f"messages refused: {counts}")
        return found
