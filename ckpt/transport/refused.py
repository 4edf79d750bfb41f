"""How many answers the clients of this process refused, by reason; what servers refuse they count
themselves (`Server.refusals`)."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from holdfast.ckpt.transport.envelope import Reason

_lock: Final = threading.Lock()
_refused: Final = Counter[str]()


def count(reason: Reason) -> None:
    """Note that an answer was refused."""
    with _lock:
        _refused[reason.value] += 1


def answers_refused() -> Counter[str]:
    """Return how many sealed answers were refused so far, by reason, in all of this process."""
    with _lock:
        return Counter(_refused)
