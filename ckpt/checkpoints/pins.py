"""The pruning record of a root: pinned steps, and the time each host first saw each step.

It is one small file that is replaced as a whole, if it has not changed since it was read. So
processes on several hosts that prune or pin do not lose each other's changes. Times are kept per
host, so an age is a difference of two readings of one clock: other hosts' clocks do not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.shared_record import SharedRecord
from holdfast.ckpt.types import learn

FILE: Final = "retention.json"


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """The file: ``seen`` is host -> step -> seconds since 1970 by that host's clock."""

    format: int = 1
    pins: tuple[int, ...] = ()
    seen: dict[str, dict[int, float]] = {}

    def ages(self, *, host: str, now_s: float) -> dict[int, float]:
        """Return the seconds since ``host`` first saw each step; a clock set back gives zero."""
        return {step: max(now_s - then, 0.0) for step, then in self.seen.get(host, {}).items()}

    def after(
        self,
        *,
        there: Collection[int],
        pin: Iterable[int],
        unpin: Iterable[int],
        host: str,
        now_s: float,
    ) -> Retention:
        """Return the record with new pins and ``host``'s sightings; absent steps are dropped."""
        pins = ({*self.pins, *pin} - set(unpin)) & set(there)
        seen = {
            name: {step: then for step, then in steps.items() if step in there}
            for name, steps in self.seen.items()
        }
        own = seen.get(host, {})
        seen[host] = {step: min(own.get(step, now_s), now_s) for step in sorted(there)}
        return Retention(pins=tuple(sorted(pins)), seen={k: v for k, v in seen.items() if v})


_RECORD: Final = SharedRecord(
    path=FILE,
    kind=Retention,
    absent=Retention(),
    damaged="not a record of pinned steps ({}); correct it, or remove it to forget all pins",
)


def load(store: Store) -> Retention:
    """Return the record; an empty one if there is no file."""
    return _RECORD.load(store)


def update(
    store: Store,
    *,
    there: Collection[int],
    pin: Iterable[int] = (),
    unpin: Iterable[int] = (),
    host: str,
    now_s: float,
) -> Retention:
    """Record pins and sightings; return the new record.

    Raises ``NotFoundError`` if a step to be pinned does not exist.
    """
    pins = list(pin)
    if absent := sorted(set(pins) - set(there)):
        raise NotFoundError(
            f"{store.where('')}: no checkpoint of step {', '.join(map(str, absent))} to pin; "
            f"steps there: {', '.join(map(str, sorted(there)))}"
        )
    return _RECORD.change(
        store,
        lambda known: known.after(there=there, pin=pins, unpin=unpin, host=host, now_s=now_s),
    )


learn(globals())
