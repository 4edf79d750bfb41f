"""The worker's side of checkpoints: reports their progress, and waits for the last one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from holdfast.ckpt.errors import CkptError, StoreError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.core.messages import NewsItem
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.base import WORKER_ENV, Channel
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import CheckpointFailed, CheckpointWaiting, Event

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_SAY_EVERY_S: Final = 2.0
_NEWS_S: Final = 2.0


class CheckpointWatch:
    """Reads the sidecar's news of checkpoints on a thread, and emits them as events."""

    def __init__(self, address: str, key: RunKey, emit: Callable[[Event], None]) -> None:
        self._client, self._emit = SidecarClient(address, key), emit
        self._lock = threading.Lock()
        self._known = 0
        self._closed = False
        self._fatal = ""
        threading.Thread(target=self._follow, name="checkpoint-news", daemon=True).start()

    def check(self) -> None:
        """Raise ``JobFailedError`` once more checkpoints have failed than the job allows."""
        if self._fatal:
            raise JobFailedError(self._fatal)

    def settle(self) -> None:
        """Emit the remaining news; no more follow."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(CkptError):
            self._tell(self._client.news(after=self._known))

    def close(self) -> None:
        """Stop following, at once; raises nothing."""
        with self._lock:
            self._closed = True
        self._client.close()

    def _follow(self) -> None:
        pause_s = 0.0
        while not self._closed:
            time.sleep(pause_s)
            try:
                items = self._client.news(after=self._known, timeout_s=_NEWS_S)
            except CkptError:  # the sidecar is gone; the generation ends soon
                pause_s = _POLL_S
                continue
            pause_s = 0.0
            with self._lock:
                if not self._closed:  # else the next reader emits them
                    self._tell(items)

    def _tell(self, items: Iterable[NewsItem]) -> None:
        for item in items:
            self._known = item.number
            self._emit(item.event)
            match item.event:
                case CheckpointFailed(fatal=True, in_a_row=count) as failed:
                    said = f" ({count} in a row have failed)" if count > 1 else ""
                    self._fatal = f"{failed.error}{said}; {newest(failed.newest)}"


class LastSave:
    """Waits until the last checkpoint of a job is durable, and reports its progress."""

    def __init__(self, channel: Channel, client: SidecarClient, *, root: str) -> None:
        self._channel, self._client, self._root = channel, client, root
        self._visible = _log.info if WORKER_ENV in os.environ else _log.warning

    def wait(self, step: int, *, limit_s: float, check: Callable[[], None]) -> None:
        """Return when ``step`` is durable; ``check`` is called often and may raise.

        Raises ``JobFailedError`` that names the step that was not saved, and the newest saved one.
        """
        began_s = said_s = time.monotonic()
        while not self._is_durable(step):
            check()
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                raise JobFailedError(
                    f"step {step} was not saved: writing it to {self._root} is at "
                    f"{self._progress(step):.0%} after {limit_s:g} s; {newest(self._newest())}; "
                    "raise Checkpoints(wait_s=...), or bandwidth if it is limited"
                )
            if now_s - said_s >= _SAY_EVERY_S:
                said_s = now_s
                self._say(step)

    def _is_durable(self, step: int) -> bool:
        try:
            return self._client.durable_step(at_least=step, timeout_s=_POLL_S) >= step
        except StoreError as error:
            raise JobFailedError(
                f"step {step} was not saved: {error}; {newest(self._newest())}"
            ) from error

    def _newest(self) -> int:
        return self._client.durable_step()

    def _say(self, step: int) -> None:
        done = self._progress(step)
        self._visible("waiting for the checkpoint of step %d: %.0f %%", step, 100 * done)
        self._channel.emit(CheckpointWaiting(step=step, done=round(done, 4)))

    def _progress(self, step: int) -> float:
        """Return the written fraction of the checkpoint, as far as this node knows."""
        pending: Any = self._client.status().get("persist_pending")
        for each in pending or ():
            if each["step"] == step and each["total_bytes"]:
                return min(1.0, float(each["written_bytes"]) / float(each["total_bytes"]))
        return 0.0


def newest(step: int) -> str:
    """Return a phrase that names the newest checkpoint of this run."""
    if step < 0:
        return "this run saved none"
    return f"the newest checkpoint is step {step}"
