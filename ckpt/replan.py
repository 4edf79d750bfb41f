"""Bound the wait for ranks that may never come to plan anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ckpt.errors import StateError

_POLL_S = 0.01


def gather_within(
    gather: Callable[[Any], list[Any]],
    *,
    timeout_s: float,
    poll: Callable[[], None] | None,
    change: str,
) -> Callable[[Any], list[Any]]:
    """Return ``gather`` with a limit: ranks whose state did not change will not take part.

    The returned function raises ``StateError``, which tells the ``change`` at this rank, once the
    others have not come for ``timeout_s``, and whatever ``poll`` raises. The call is left behind
    in its thread then: the process group is of no more use.
    """

    def bounded(value: Any) -> list[Any]:
        found: list[list[Any]] = []
        errors: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def call() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a setting of the thread
                found.append(gather(value))
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                errors.append(error)

        thread = threading.Thread(target=call, name="ckpt-replan", daemon=True)
        thread.start()
        deadline_s = time.monotonic() + timeout_s
        while thread.is_alive():
            thread.join(_POLL_S)
            if poll is not None:
                poll()
            if thread.is_alive() and time.monotonic() > deadline_s:
                raise StateError(
                    f"the tracked state changed at this rank ({change}), but the other ranks did "
                    f"not come to plan anew within {timeout_s:g} s: it must change at all ranks "
                    "before the same snapshot. Where an optimizer makes state at each rank's first "
                    "gradient, step it once with zero gradients everywhere before training"
                )
        if errors:
            raise errors[0]
        return found[0]

    return bounded
