"""The configuration of an agent: the launcher's values, and the defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.agent.notice import NoticeConfig
from holdfast.elastic.decisions.deciding import MOST_WATCHERS
from holdfast.elastic.decisions.detect import SilenceLimits
from holdfast.elastic.events.log import HISTORY_BYTES


class AgentTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits of an agent, in seconds.

    A worker counts as hung if it is silent for longer than a limit derived from its own steps,
    between ``min_hang_s`` and ``max_hang_s``; ``first_hang_s`` and ``pause_s`` are as in
    `detect.SilenceLimits`. ``park_timeout_s`` is the shortest time that a fenced worker has to
    leave; a worker in a long microbatch has more.
    """

    lease_ttl_s: float = 1.0
    keep_alive_s: float = 0.25
    self_fence_s: float = 0.7
    stop_grace_s: float = 0.15
    yield_s: float = 2.0
    park_timeout_s: float = 5.0
    min_hang_s: float = 30.0
    max_hang_s: float = 1800.0
    first_hang_s: float = 600.0
    pause_s: float = 1800.0
    done_grace_s: float = 60.0
    stop_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")
        if self.min_hang_s > self.max_hang_s:
            raise ValueError(
                f"min_hang_s {self.min_hang_s} exceeds max_hang_s {self.max_hang_s}: give a range"
            )
        if not self.keep_alive_s < self.self_fence_s < self.lease_ttl_s:
            raise ValueError(
                f"keep_alive_s {self.keep_alive_s} < self_fence_s {self.self_fence_s} < "
                f"lease_ttl_s {self.lease_ttl_s} does not hold: a node must end its workers "
                "before others may replace them"
            )

    @property
    def limits(self) -> SilenceLimits:
        """The limits of a worker's silence."""
        return SilenceLimits(
            min_s=self.min_hang_s,
            max_s=self.max_hang_s,
            first_s=self.first_hang_s,
            pause_s=self.pause_s,
        )


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's configuration, which it gets as JSON in memory: others can read command lines.

    ``coordinator_bind`` is the address to which it binds the run's embedded coordinator, as in
    ``tcp://0.0.0.0:29500``; empty: another process serves it. ``coordinator`` is the address by
    which all nodes reach it. ``host`` is the address at which other nodes reach this one.
    ``memory_of`` is as in `SidecarConfig`, for sidecar and workers. ``preload`` names modules that
    the node's fork server imports before it forks the workers; none: workers start by ``command``.
    ``fork_server`` is the descriptor of a server that the agent inherits; -1: it starts one.
    ``stamp_output`` and ``history_bytes`` are as in `holdfast.elastic.launch.config.LaunchConfig`.
    In a job of more than ``most_watchers`` nodes few agents decide, and the others follow.
    """

    run: str
    node: str
    domain: str
    run_dir: str
    key_file: str
    coordinator: str
    coordinator_bind: str = ""
    slots: dict[str, int]
    wanted: dict[str, int]
    nodes: int
    command: tuple[str, ...]
    env: dict[str, str] = {}
    capture_output: bool = False
    stamp_output: bool = False
    history_bytes: int = HISTORY_BYTES
    max_attempts: int = 5
    settings: dict[str, Json] = {}
    timing: AgentTiming = AgentTiming()
    notice: NoticeConfig = NoticeConfig()
    host: str = "127.0.0.1"
    memory_of: str = ""
    preload: tuple[str, ...] = ()
    fork_server: int = -1
    most_watchers: int = MOST_WATCHERS

    def log_of(self, name: str) -> Path | None:
        """Return the file for the output of a process of this node; None: it is inherited."""
        return Path(self.run_dir, "logs", f"{name}.log") if self.capture_output else None
