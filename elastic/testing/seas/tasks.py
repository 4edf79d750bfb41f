"""Tasks on virtual time: threads of which one runs at a time, so that a seed decides their order.

Code under test calls `Tasks.sleep` wherever it would wait, a call to a store included. Another task
runs in the meantime. A killed task ends at its next sleep, as if by SIGKILL.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Final

_HUNG_S: Final = 60.0


class Killed(BaseException):
    """The task was killed."""


class SeaTask:
    """A thread that runs only while it has the turn; ``group`` is the process it belongs to."""

    def __init__(self, body: Callable[[], None], *, group: str) -> None:
        self.group = group
        self.is_over = self.is_killed = False
        self._body = body
        self.turn = threading.Lock()
        self.turn.acquire()
        self.error: BaseException | None = None

    def main(self, give_back: Callable[[], None]) -> None:
        """Run the body once the task has its first turn."""
        self.turn.acquire()
        try:
            if not self.is_killed:
                self._body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 -- the run reports it with its seed
            self.error = error
        self.is_over = True
        give_back()


class Tasks:
    """The clock, and the tasks by the time of their next turn."""

    def __init__(self, *, limit_s: float) -> None:
        self.now_s, self.limit_s = 0.0, limit_s
        self._queue: list[tuple[float, int, SeaTask]] = []
        self._count = 0
        self._current: SeaTask | None = None
        self._back = threading.Lock()
        self._back.acquire()
        self._all: list[SeaTask] = []
        self._frozen: dict[str, float] = {}

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_s

    def start(self, body: Callable[[], None], *, group: str, after_s: float = 0.0) -> SeaTask:
        """Start a task after some seconds."""
        task = SeaTask(body, group=group)
        threading.Thread(target=task.main, args=(self._back.release,), daemon=True).start()
        self._all.append(task)
        self._push(task, after_s)
        return task

    def sleep(self, seconds: float) -> None:
        """Let other tasks run; return after so many virtual seconds. Called by a task only."""
        task = self._current
        assert task is not None
        if task.is_killed:
            raise Killed
        if self._is_first(seconds):  # nobody else is due before: no other thread is needed
            self.now_s += seconds
            return
        self._push(task, seconds)
        self._back.release()
        task.turn.acquire()
        if task.is_killed:
            raise Killed

    def kill(self, group: str) -> None:
        """Kill the tasks of a process: they do nothing more."""
        self._frozen.pop(group, None)
        for task in self._all:
            if task.group == group:
                task.is_killed = True
        due = [(0.0 if task.is_killed else at_s, n, task) for at_s, n, task in self._queue]
        heapq.heapify(due)
        self._queue = due

    def freeze(self, group: str, seconds: float) -> None:
        """Stop a process for so many seconds, wherever it is."""
        self._frozen[group] = self.now_s + seconds

    def step(self) -> bool:
        """Give the next task its turn; return False when there is none."""
        if not self._queue:
            return False
        at_s, _, task = heapq.heappop(self._queue)
        self.now_s = max(self.now_s, at_s)
        if self._frozen.get(task.group, 0.0) > self.now_s:
            self._push(task, self._frozen[task.group] - self.now_s)
            return True
        self._run(task)
        if task.is_over:
            self._all.remove(task)
            if task.error is not None:
                raise task.error
        return True

    def end(self) -> None:
        """Kill all tasks, and wait for their ends."""
        for task in self._all:
            task.is_killed = True
            self._frozen.pop(task.group, None)
        while self._queue:
            self._run(heapq.heappop(self._queue)[2])

    def _is_first(self, seconds: float) -> bool:
        until_s = self.now_s + seconds
        return until_s < self.limit_s and (not self._queue or until_s < self._queue[0][0])

    def _push(self, task: SeaTask, seconds: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._count, task))

    def _run(self, task: SeaTask) -> None:
        self._current = task
        task.turn.release()
        if not self._back.acquire(timeout=_HUNG_S):
            raise TimeoutError(f"a task of {task.group} waits for something real")
        self._current = None
