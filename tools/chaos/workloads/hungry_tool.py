"""The environment of the workload `episodes`: a slow tool that takes memory for each reply."""

from __future__ import annotations

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.environments.slow_tool import SlowTool

_TAKEN_BYTES = 8 << 20


class HungryTool:
    """`SlowTool`, which takes memory for each reply."""

    def __init__(self, *, seed: int, latency_s: float) -> None:
        self._tool = SlowTool(seed=seed, latency_s=latency_s, turns=2.0)

    def prompt(self, ordinal: int) -> str:
        """See `SlowTool`."""
        return self._tool.prompt(ordinal)

    def respond(self, action: Action) -> Observation:
        """See `SlowTool`."""
        reply = self._tool.respond(action)
        taken = bytearray(_TAKEN_BYTES)
        assert len(taken) == _TAKEN_BYTES
        return reply
