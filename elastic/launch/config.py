"""The configuration of a launcher: the worker's command, the nodes and the options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.agent.notice import NoticeConfig
from holdfast.elastic.decisions.deciding import MOST_WATCHERS
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events.log import HISTORY_BYTES
from holdfast.elastic.preload.program import check_names, program_of

LOCAL_TIMING = AgentTiming(lease_ttl_s=3.0, self_fence_s=2.1)
"""On one machine the launcher detects the end of an agent at once. Leases are only a backup, and
should not end because the machine is busy."""

APART_TIMING = AgentTiming(lease_ttl_s=12.0, self_fence_s=9.0)
"""With the coordinator as a process of its own, workers should outlive its next start."""

ETCD_TIMING = AgentTiming(lease_ttl_s=6.0, self_fence_s=4.5)
"""With etcd a lease must outlast the election of a new leader: 1 to 2 s with etcd's defaults."""

LEAST_HISTORY_BYTES = 1 << 16
"""The least that a job may be told to keep of its events and output."""

EMBEDDED = "embedded"
"""The name of the coordinator that the launcher itself brings."""


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A node to run on this machine; ``slots`` is the number of its workers by role.

    ``domain`` names its failure domain; empty: the node itself, or all nodes of its machine if the
    job has several machines.
    """

    name: str
    domain: str = ""
    slots: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The configuration of a launcher: the command, the nodes and the options.

    ``command`` is a worker's argv; ``wanted`` the number of workers per role. ``run_dir`` holds
    key, events and logs; None: a temporary one, removed at the end (or by the next job if the
    launcher is killed). ``coordinator`` is `EMBEDDED` or the address of an etcd; ``port`` is the
    embedded one's port on the loopback address, 0 for any free one. A node whose agent died is
    restarted, with its snapshots in memory, up to ``node_restarts`` times in a row without a newly
    protected step; a node whose memory is gone as well is lost, and restarted empty only if the job
    cannot continue without it.
    ``elsewhere`` is the number of further nodes that other launchers are expected to bring
    (`holdfast.elastic.launch.joint`); ``host`` is this machine's address for them. With ``apart``
    the nodes share no memory, as if each were a host of its own: for tests and benchmarks of
    transfers between hosts. Nodes in ``absent`` do not start with the others but by
    `Launcher.return_machine`. ``env`` is for the workers, ``agent_env`` for all processes of every
    node. With ``return_s`` and a ``run_dir`` the embedded coordinator is a process of its own. If
    the launcher is killed, that process keeps the nodes' memory for so many seconds; a launcher of
    the same job and ``run_dir`` that starts within them continues the job. ``preload`` names
    modules that every node imports once; its workers are forked after that, and ``command`` must
    run Python (`holdfast.elastic.preload.program.program_of`). With ``stamp_output`` each line of
    captured output begins with its time. ``history_bytes`` is the most that the events of a node
    take on disk, and the output of a process; the oldest half is dropped when it is reached.
    ``most_watchers`` is as in `AgentConfig`; tests of small jobs make it smaller.
    """

    command: tuple[str, ...]
    nodes: tuple[NodeSpec, ...]
    wanted: Mapping[str, int]
    run_dir: Path | None = None
    coordinator: str = EMBEDDED
    port: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    capture_output: bool = False
    max_attempts: int = 5
    node_restarts: int = 3
    settings: Mapping[str, Json] = field(default_factory=dict)
    timing: AgentTiming = LOCAL_TIMING
    notice: NoticeConfig = field(default_factory=NoticeConfig)
    elsewhere: int = 0
    host: str = "127.0.0.1"
    apart: bool = False
    absent: frozenset[str] = frozenset()
    agent_env: Mapping[str, str] = field(default_factory=dict)
    return_s: float = 0.0
    preload: tuple[str, ...] = ()
    stamp_output: bool = False
    history_bytes: int = HISTORY_BYTES
    most_watchers: int = MOST_WATCHERS

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("no command: give the worker's argv")
        names = [node.name for node in self.nodes]
        if not names:
            raise ConfigError("no nodes: give at least one")
        if len(set(names)) != len(names):
            raise ConfigError(f"node names {names} repeat: give each node its own")
        if not self.absent < set(names):
            raise ConfigError(
                f"absent are {sorted(self.absent)} of the nodes {names}: name some of them, not all"
            )
        for role, count in self.wanted.items():
            room = sum(node.slots.get(role, 0) for node in self.nodes)
            if not 0 < count <= room and not self.elsewhere:
                raise ConfigError(
                    f"{count} workers of role {role} wanted, the nodes have room for {room}: "
                    "ask for fewer (at least one), or add slots"
                )
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}: give 1 or more")
        if self.preload:
            check_names(self.preload)
            program_of(self.command, interpreter=sys.executable)
        if self.history_bytes < LEAST_HISTORY_BYTES:
            raise ConfigError(
                f"history_bytes is {self.history_bytes}: give {LEAST_HISTORY_BYTES} or more"
            )
        if self.return_s < 0:
            raise ConfigError(f"return_s is {self.return_s}: give 0 or more")

    @property
    def job(self) -> str:
        """The identity of the job: a digest of its command, nodes, workers and settings."""
        parts = (self.command, self.nodes, dict(self.wanted), dict(self.settings), dict(self.env))
        return sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def python_command(script: str | Path, args: Sequence[str]) -> tuple[str, ...]:
    """Return the argv of a worker that runs a Python script, its output unbuffered."""
    return (sys.executable, "-u", str(script), *args)
