"""Notices DataLoaders other than the run's that a training loop takes its samples from.

Their samples would be repeated, lost or doubled: a restore begins such a loader anew, and ranks
take different numbers of batches from it. The sign is an iterator that is made at one moment and
advanced at another: in another step, or in a microbatch other than its own. One that is read from
its beginning in one place, such as an evaluation's between two passes, is sound.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.ckpt import torch_private
from holdfast.elastic.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A place in the training: a step and a microbatch; None outside of the one or the other.

    ``visit`` tells apart the same microbatch in several passes.
    """

    step: int | None = None
    microbatch: int | None = None
    visit: int = 0

    def __str__(self) -> str:
        if self.microbatch is not None:
            return f"inside microbatch {self.microbatch} of step {self.step}"
        return "outside of the steps" if self.step is None else f"in step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeLoader:
    moment: Moment
    line: str


_EARLIER = _MadeLoader(moment=Moment(), line="an earlier line")


class ForeignLoaders:
    """Raises ``ConfigError`` when the user's code advances an iterator that it should not.

    ``moment`` returns the present place. ``line`` returns the user's line that is being executed,
    None in Holdfast's own code.
    """

    def __init__(self, *, moment: Callable[[], Moment], line: Callable[[], str | None]) -> None:
        self._moment, self._line = moment, line
        self._made: weakref.WeakKeyDictionary[Any, _MadeLoader] = weakref.WeakKeyDictionary()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all DataLoaders of the process in the body."""
        with torch_private.watched_loaders(begun=self._begun, advanced=self._advanced):
            yield

    def _begun(self, iterator: Any) -> None:
        if (line := self._line()) is not None:
            self._made[iterator] = _MadeLoader(moment=self._moment(), line=line)

    def _advanced(self, iterator: Any) -> None:
        made, moment = self._made.get(iterator, _EARLIER), self._moment()
        if made.moment == moment or (line := self._line()) is None:
            return
        raise ConfigError(
            f"the DataLoader iterator made at {made.line} ({made.moment}) is advanced at {line} "
            f"({moment}): a restore would begin it anew, and ranks would take different numbers of "
            "batches from it. Give the data set to the run, loader = run.loader(dataset), and "
            "iterate run.microbatches(loader); an evaluation iterates its loader from the "
            "beginning, in one place"
        )
