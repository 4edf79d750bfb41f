"""The environment of the benchmark: each reply waits, then computes."""

from __future__ import annotations

import time

from holdfast.adapters.rl.environments.base import Action, Observation


class BusyTool:
    """Replies after ``wait_s`` of sleep and ``compute_s`` of processor time."""

    def __init__(self, *, seed: int, wait_s: float, compute_s: float) -> None:
        self._wait_s, self._compute_s = wait_s, compute_s

    def prompt(self, ordinal: int) -> str:
        """Return the ordinal."""
        return f"{ordinal}>"

    def respond(self, action: Action) -> Observation:
        """Wait, compute, and reply."""
        time.sleep(self._wait_s)
        until_s = time.thread_time() + self._compute_s
        while time.thread_time() < until_s:
            pass
        return Observation(text="more>")
