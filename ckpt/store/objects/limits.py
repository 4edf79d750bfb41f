"""The limits of requests to an object store, and the time by which they are kept."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.ckpt.errors import StoreError

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectLimits:
    """The limits of uploads, requests and their retries.

    At most ``part_bytes * threads`` of the written bytes are in flight at once. One request, its
    retries included, takes about ``deadline_s`` at most; a large file is many requests. A
    connection that moves nothing for ``stall_s`` is given up.
    """

    part_bytes: int = 32 * MIB
    threads: int = 8
    connect_s: float = 10.0
    stall_s: float = 20.0
    deadline_s: float = 180.0
    pause_s: float = 0.1
    longest_pause_s: float = 10.0

    def __post_init__(self) -> None:
        if not 5 * MIB <= self.part_bytes <= 512 * MIB:
            raise StoreError(f"parts of {self.part_bytes} bytes: use 5 MiB to 512 MiB")
        if not 1 <= self.threads <= 256:
            raise StoreError(f"{self.threads} threads for a store: use 1 to 256")
        if not 0 < 2 * self.stall_s <= self.deadline_s:
            raise StoreError(
                f"a store's deadline of {self.deadline_s} s with stalls of {self.stall_s} s: there "
                "must be time for two attempts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Time and randomness, in seconds; tests replace them."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    between: Callable[[float, float], float] = random.uniform
