"""What the launcher tells an agent, and what it decides by itself when told nothing."""

from __future__ import annotations

import msgspec

from ckpt.types import Json


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long an agent waits for what, in seconds."""

    lease_ttl_s: float = 1.0
    keep_alive_s: float = 0.25
    self_fence_s: float = 0.7
    stop_grace_s: float = 0.15
    yield_s: float = 2.0
    park_timeout_s: float = 5.0
    min_hang_s: float = 30.0
    done_grace_s: float = 60.0
    stop_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")
        if not self.keep_alive_s < self.self_fence_s < self.lease_ttl_s:
            raise ValueError(
                f"keep_alive_s {self.keep_alive_s} < self_fence_s {self.self_fence_s} < "
                f"lease_ttl_s {self.lease_ttl_s} does not hold: a node must end its workers "
                "before others may replace them"
            )


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an agent needs to know; comes as JSON on its command line."""

    run: str
    node: str
    domain: str
    run_dir: str
    key_file: str
    coordinator: str
    slots: dict[str, int]
    wanted: dict[str, int]
    nodes: int
    command: tuple[str, ...]
    env: dict[str, str] = {}
    capture_output: bool = False
    max_attempts: int = 5
    settings: dict[str, Json] = {}
    timing: Timing = Timing()
