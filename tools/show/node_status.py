"""What one node's sidecar said of itself, with names for what people ask about. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

STAGES: Final = ("seal", "exchange", "protect", "serve", "rebuild", "persist", "spill")
"""The meters of a sidecar, in the order a snapshot passes them; ``serve`` is what readers are sent,
those who restore and those who prefetch."""

MEMORY: Final = ("slots", "parity", "logs")
"""What a sidecar's shared memory is spent on."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node, its processes, and the answer of its sidecar: empty with an ``error``.

    ``stragglers`` says by seat who holds the others up, at the one node that speaks for all;
    ``data_troubles`` which processes that load data its living workers lost; ``unreachable`` the
    nodes that it does not reach.
    """

    node: str
    sidecar: int
    workers: dict[str, int] = {}
    status: dict[str, Any] = {}
    error: str | None = None
    stragglers: dict[str, str] = {}
    data_troubles: dict[str, str] = {}
    unreachable: tuple[str, ...] = ()

    def step(self, what: str) -> int | None:
        """Return the newest ``committed``, ``protected`` or ``durable`` step, None for none.

        The first two are of this generation; ``held`` is the newest that was ever protected and is
        in memory yet: after a loss, with fewer fragments than it had.
        """
        if what == "durable":
            return max(self.status.get("persisted", ()), default=None)
        found = self.status.get(what)
        return None if found is None or found < 0 else int(found)

    @property
    def generation(self) -> int:
        """The generation it guards, 0 before the first."""
        return int(self.status.get("generation") or 0)

    @property
    def age_s(self) -> float | None:
        """How long ago the newest protected step was complete, None before the first."""
        found = self.status.get("restore_point_age_s")
        return None if found is None else float(found)

    def meter(self, stage: str) -> dict[str, float] | None:
        """Return ``{count, seconds, bytes, median_s, max_s, last_s}``, None where nothing ran."""
        found: dict[str, float] | None = self.status.get("meters", {}).get(stage)
        return found

    def nbytes(self, purpose: str) -> int:
        """Return the bytes held for ``slots``, ``parity``, ``logs`` or ``disk``; the ``budget``."""
        return int(self.status.get("bytes", {}).get(purpose, 0))

    @property
    def memory(self) -> dict[str, Any]:
        """``mode``, ``need_bytes``, ``logs_most_bytes``; why snapshots are ``left_out``."""
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
        """What is not on every copy, by log: ``records``, ``bytes``, ``oldest_s``."""
        found: dict[str, Any] = self.status.get("log_lag", {})
        return found

    @property
    def refusals(self) -> dict[str, int]:
        """Messages refused, by reason."""
        found: dict[str, int] = self.status.get("refusals", {})
        return found

    @property
    def unprotected(self) -> dict[str, str]:
        """Why snapshots are not protected, by ``generation/step``."""
        found: dict[str, str] = self.status.get("unprotected", {})
        return found

    def troubles(self) -> list[str]:
        """Return what a person should know of, a sentence each."""
        status = self.status
        told = [self.error] if self.error else []
        told += [*self.stragglers.values(), *self.data_troubles.values()]
        told += [f"does not reach node {name}" for name in self.unreachable]
        told += [
            f"step {at.rpartition('/')[2]} is not protected: {why}"
            for at, why in self.unprotected.items()
        ]
        if self.memory.get("left_out"):
            told.append(f"snapshots are left out: {self.memory['left_out']}")
        if self.memory.get("logs_refused"):
            told.append(f"logs grow no more: {self.memory['logs_refused']}")
        told += [
            f"{purpose} for {peer}: {link['queued']} queued, the oldest {link['oldest_s']:.1f} s"
            + (f"; last error: {link['error']}" if link.get("error") else "")
            for (peer, purpose), link in self.peers.items()
            if link.get("error") or link["oldest_s"] >= 1
        ]
        told += [
            f"log {name}: {lag['records']} records are not on every copy, "
            f"the oldest for {lag['oldest_s']:.1f} s"
            for name, lag in self.logs.items()
            if lag["oldest_s"] >= 1
        ]
        told += [
            f"log copies on {node}: {why}" for node, why in status.get("log_errors", {}).items()
        ]
        told += [str(status[key]) for key in ("persist_error", "spill_error") if status.get(key)]
        if self.refusals:
            counts = ", ".join(f"{count} {why}" for why, count in self.refusals.items())
            told.append(f"messages refused: {counts}")
        return told
