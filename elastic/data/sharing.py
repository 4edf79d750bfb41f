"""The shares of a step's microbatches: first the generation's, then by measured speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.planning.shares import alongside, by_speed, part

LOOK_EVERY = 16
"""Number of steps after which the ranks compare their speeds."""

_LEAST_STEPS = 5
_LEAST_GAIN = 0.1  # worker processes that read ahead restart when a share changes


class ShareGroups(Protocol):
    """The data-parallel groups that share the work; ``index`` is this rank's."""

    index: int
    size: int


class Sharing:
    """The shares of one generation: ``shares`` as in its record, none for even ones.

    ``abreast`` is the number of groups that run theirs at the same time, see `part`. With
    ``gather``, which returns every rank's value, group after group, the shares follow the speed of
    each group's slowest rank. All ranks compute the same shares from the same gathered values, so
    they need no further agreement. ``clock`` stops while this rank waits for others. ``tell(reason,
    shares)`` is called when the shares change.
    """

    def __init__(
        self,
        groups: ShareGroups,
        microbatches: int,
        *,
        shares: Sequence[int] = (),
        abreast: int = 1,
        gather: Callable[[Json], list[Json]] | None = None,
        clock: Callable[[], float],
        tell: Callable[[str, Sequence[int]], None] = lambda _reason, _shares: None,
    ) -> None:
        self._groups, self._microbatches, self._tell = groups, microbatches, tell
        self._shares, self._abreast = tuple(shares), abreast
        self._gather = gather if abreast < groups.size < microbatches else None
        self._seconds: deque[float] = deque(maxlen=LOOK_EVERY)
        self._steps, self._clock, self._began_s = 0, clock, clock()
        if groups.size > microbatches:
            raise ConfigError(
                f"{microbatches} microbatches cannot be shared by {groups.size} data-parallel "
                "groups: raise Batch(microbatches=...), or limit the world"
            )

    def mine(self) -> Sequence[int]:
        """Return this rank's microbatches, the same until `settle`."""
        return self._of(self._groups.index)

    @property
    def is_even(self) -> bool:
        """True if all groups have equally many microbatches."""
        return len({len(self._of(group)) for group in range(self._groups.size)}) == 1

    def begin(self) -> None:
        """Begin with this rank's microbatches."""
        self._began_s = self._clock()

    def end(self, microbatches: int) -> None:
        """End a pass in which ``microbatches`` were trained on; 0 is not measured."""
        if microbatches:
            self._seconds.append((self._clock() - self._began_s) / microbatches)

    def settle(self) -> None:
        """Complete a step; every `LOOK_EVERY` steps compute the shares again (collective)."""
        self._steps += 1
        if self._gather is None or self._steps % LOOK_EVERY:
            return
        known = len(self._seconds) >= _LEAST_STEPS and median(self._seconds) > 0
        mine = 1.0 / median(self._seconds) if known else 0.0
        speeds = [float(str(speed)) for speed in self._gather(mine)]
        count, abreast = self._groups.size, self._abreast
        cell = len(speeds) // count * abreast
        slowest = [min(speeds[at : at + cell]) for at in range(0, len(speeds), cell)]
        rounds, reason = by_speed(
            self._microbatches // abreast,
            slowest,
            previous=self._shares[::abreast],
            least_gain=_LEAST_GAIN,
        )
        shares = alongside(rounds, abreast)
        if list(shares) != [len(self._of(group)) for group in range(count)]:
            self._shares = shares
            self._tell(reason, shares)

    def _of(self, group: int) -> range:
        return part(
            self._microbatches,
            rank=group,
            ranks=self._groups.size,
            shares=self._shares,
            abreast=self._abreast,
        )
