"""Events that a sidecar reports to people, kept until a worker fetches them."""

from __future__ import annotations

import time
from collections import deque
from time import monotonic
from typing import Final

import msgspec

from holdfast.ckpt.events import CheckpointNews
from holdfast.ckpt.sidecar.core.core import Core, Op, Waiter
from holdfast.ckpt.sidecar.core.messages import AskNews, NewsItem
from holdfast.ckpt.transport import Request

KEPT: Final = 256


class News:
    """A numbered list of events, the newest `KEPT` of them; used under the lock."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._items: deque[NewsItem] = deque(maxlen=KEPT)
        self._number = self._acknowledged = 0

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {"news": (AskNews, self._ask)}

    def add(self, event: CheckpointNews) -> None:
        """Add an event, which happens now."""
        self._number += 1
        timed = msgspec.structs.replace(event, time_s=time.time())
        self._items.append(NewsItem(number=self._number, event=timed))
        self._core.changed()

    def _ask(self, request: Request, body: AskNews) -> None:
        self._acknowledged = max(self._acknowledged, body.after)

        def fresh() -> list[NewsItem]:
            return [item for item in self._items if item.number > self._acknowledged]

        def attempt() -> bool:
            if not (items := fresh()):
                return False
            request.reply(msgspec.to_builtins(items))
            return True

        deadline_s = monotonic() + body.timeout_s
        self._core.wait(
            Waiter(
                request=request,
                deadline_s=deadline_s,
                attempt=attempt,
                expire=lambda: request.reply(msgspec.to_builtins(fresh())),
            )
        )
