"""Exchange of plans between ranks through a key-value store, separate from training collectives.

A collective of the training's process group is not safe here. A rank whose state changed at that
rank alone would call it while the others reduce gradients. The two collectives would pair, and both
results would be silently wrong. Keys of a store cannot pair so, and a rank that waits in vain for
others raises an error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.torch_private import Store

REPLAN_TIMEOUT_S = 120.0
FIRST_TIMEOUT_S = 1800.0
"""The timeout of the first plan: ranks may load data, or compile, before their first snapshot."""

PART_CHARACTERS = 1 << 20
"""The most characters under one key: store servers refuse large values (libuv's beyond 8 MiB)."""

_FIRST_POLL_S, _POLL_S = 0.002, 0.05  # of many ranks one serves the polls of all
_PARTS_AT_ONCE = 4
_GIVEN_UP = b"!"


class StoreGather:
    """A gather of JSON values over ``store``, for one caller at each of ``size`` ranks.

    The store must be this generation's and this purpose's alone (use a prefix). ``poll`` is called
    while waiting and may raise to stop. The first call waits up to `FIRST_TIMEOUT_S`, later ones
    for ``timeout_s``. Errors name ranks by ``ranks``, if these are not all.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        poll: Callable[[], None] | None = None,
        timeout_s: float = REPLAN_TIMEOUT_S,
        ranks: Sequence[int] = (),
    ) -> None:
        self._ranks = tuple(ranks) or tuple(range(size))
        self._store, self._rank, self._size, self._poll = store, rank, size, poll
        self.timeout_s = timeout_s
        self._turn = 0
        self._parts: list[str] = []
        self._over = ""

    def __call__(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order.

        Raises ``StateError`` if other ranks do not call it in time, and at every later call.
        """
        if self._over:
            raise StateError(
                f"the ranks cannot plan together after an earlier failure: {self._over}"
            )
        if self._size == 1:
            return [value]
        turn, self._turn = self._turn, self._turn + 1
        before, self._parts = self._parts, self._put(turn, msgspec.json.encode(value).decode())
        try:
            found = self._collect(turn)
        except StateError as error:
            self._over = str(error)
            self._give_up(turn)
            raise
        for key in before:  # all ranks have begun this turn, so they have read the turn before
            self._store.delete_key(key)
        return [msgspec.json.decode(each) for each in found]

    def give_up(self) -> None:
        """Let the ranks that begin the next turn, or wait in it, know that this one does not."""
        self._over = self._over or "this rank gave up"
        self._give_up(self._turn)

    def _give_up(self, turn: int) -> None:
        self._store.set(f"{turn}/{self._rank}", _GIVEN_UP.decode())

    def _put(self, turn: int, text: str) -> list[str]:
        """Set the parts, then the key with their number; return all keys."""
        head = f"{turn}/{self._rank}"
        parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
        keys = [*(f"{head}/{i}" for i in range(len(parts))), head]
        for key, value in zip(keys, [*parts, str(len(parts))], strict=True):
            self._store.set(key, value)
        return keys

    def _collect(self, turn: int) -> list[bytes]:
        heads = [f"{turn}/{rank}" for rank in range(self._size)]
        self._await(heads, limit_s=FIRST_TIMEOUT_S if turn == 0 else self.timeout_s)
        counts = self._store.multi_get(heads)
        if _GIVEN_UP in counts:
            raise StateError(
                f"rank {self._ranks[counts.index(_GIVEN_UP)]} gave up waiting for the other ranks "
                "to plan"
            )
        keys = [f"{head}/{i}" for head, n in zip(heads, counts, strict=True) for i in range(int(n))]
        several = (keys[at : at + _PARTS_AT_ONCE] for at in range(0, len(keys), _PARTS_AT_ONCE))
        values = (value for each in several for value in self._store.multi_get(each))
        return [b"".join(itertools.islice(values, int(count))) for count in counts]

    def _await(self, heads: list[str], *, limit_s: float) -> None:
        deadline_s, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
        while not self._store.check(heads):
            if self._poll is not None:
                self._poll()
            if time.monotonic() > deadline_s:
                late = [i for i, head in enumerate(heads) if not self._store.check([head])]
                if not late:
                    return  # the last one came just now
                raise StateError(
                    f"rank {self._ranks[late[0]]} did not begin to plan within {limit_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)


def at_step(gather: Callable[[Any], list[Any]], step: int) -> Callable[[Any], list[Any]]:
    """Return ``gather``; it raises ``StateError`` if a rank calls it for another step."""

    def gather_at(value: Any) -> list[Any]:
        everyone: Sequence[Any] = gather({"step": step, "value": value})
        for rank, theirs in enumerate(everyone):
            if theirs["step"] != step:
                raise StateError(
                    f"this rank plans the snapshot of step {step}, rank {rank} that of step "
                    f"{theirs['step']}"
                )
        return [theirs["value"] for theirs in everyone]

    return gather_at
