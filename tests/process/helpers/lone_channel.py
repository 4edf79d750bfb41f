"""A channel for one worker; the test plays its agent and coordinator."""

from __future__ import annotations

from typing import Any

from ranks import record_of

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.events import Event


class LoneChannel:
    """Agent and coordinator of one worker; the test ends generations by ``over``."""

    def __init__(self) -> None:
        self.run, self.node, self.seat, self.incarnation = "r", "n0", "trainer/0", "0"
        self.sidecar, self.key = "tcp://127.0.0.1:1", RunKey.new()
        self.settings: dict[str, Any] = {}
        self.memory_of = ""
        self.lease_s = 0.0
        self.over = 0
        self.said: list[Any] = []

    def ready(self, *, after: int, spec: Any, info: dict[str, Any]) -> None:
        self.said.append(("ready", after))
        self._store = info["store"]

    def await_generation(self, *, after: int) -> Any:
        return record_of([self._store], number=after + 1)

    def fenced(self, generation: int) -> bool:
        return generation <= self.over

    def leaving(self) -> bool:
        return False

    def halts(self, generation: int) -> bool:
        return False

    def beat(self, *, step: int, phase: Any, limit_s: float = 0.0) -> None: ...

    def emit(self, event: Event) -> None:
        self.said.append((event.kind, event))

    def done(self, result: Any = None, *, lingers: bool = False) -> None:
        self.said.append(("done", result))

    def fail(self, message: str, *, user_error: bool, fault: str = "") -> None:
        self.said.append(("fail", message, user_error))

    def close(self) -> None: ...
