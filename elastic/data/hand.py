"""The samples that an island has in hand: blocks that the logbook of its sea has dealt to it.

A hand is part of the island's state. All ranks have the same, and change it at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from holdfast.elastic.data.plan import Step
from holdfast.elastic.errors import ConfigError, SeaError
from holdfast.elastic.sea import dealing
from holdfast.elastic.sea.dealing import Blocks
from holdfast.elastic.sea.records import DealtData


class HandNumbers(Protocol):
    """The numbers of a hand: ``dealt`` samples, ``taken`` of them trained, ``blocks`` the others.

    They are those of the island's present lineage. ``over``: it trains no more.
    """

    dealt: int
    taken: int
    blocks: Blocks
    over: bool


class Hand:
    """The hand of one generation; ``numbers`` returns the state that it is.

    ``refill`` asks the logbook for more; collective. ``ahead`` is the number of steps for which
    samples are read before they are trained. ``number`` changes with the lineage. A thread that
    reads ahead may look at a hand.
    """

    def __init__(self, numbers: Callable[[], HandNumbers]) -> None:
        self._numbers = numbers
        self.refill: Callable[[], None] = lambda: None
        self.has_begun = False
        self.batch = self.ahead = self.number = 0
        self._shown: tuple[int, Blocks] = (0, ())
        self._data: DealtData | None = None
        self._epochs: int | None = None

    # -- the data set ----------------------------------------------------------------------------

    def deal_from(self, data: DealtData, *, batch: int, ahead: int) -> None:
        """Declare the data set. Raises ``ConfigError`` for a second one."""
        if self._data is not None:
            raise ConfigError(
                "Islands(data='dealt') with two loaders: the logbook deals the samples of one data "
                "set; make one loader of all, or give Islands(data='own')"
            )
        self._data, self.batch, self.ahead = data, batch, ahead

    def limit(self, epochs: int) -> None:
        """Note that the islands train so many epochs together.

        Raises ``ConfigError`` for another number than before: the logbook has that of its begin.
        """
        if self._epochs not in (None, epochs) or (self._epochs is None and self.has_begun):
            raise ConfigError(
                f"run.epochs({epochs}, ...): the islands of this sea train "
                f"{self._epochs or 'so many steps'}{' epochs' if self._epochs else ''}, as its "
                "first loop says; give one loop with all epochs, or Islands(data='own')"
            )
        self._epochs = epochs

    @property
    def data(self) -> DealtData:
        """The data set that the logbook deals. Raises ``ConfigError`` if there is none."""
        if self._data is None:
            raise ConfigError(
                "Islands(data='dealt'): the logbook deals the samples of a loader; make loader = "
                "run.loader(dataset) before the steps, and iterate run.microbatches(loader)"
            )
        made = self._data
        return DealtData(
            samples=made.samples, order=made.order, seed=made.seed, epochs=self._epochs
        )

    # -- samples ---------------------------------------------------------------------------------

    def begin(self, blocks: Blocks | None = None) -> None:
        """Begin with the state that was restored, or with the first blocks of a new lineage."""
        self.has_begun = True
        self.number += 1
        now = self._numbers()
        if blocks is not None:
            now.taken, now.dealt, now.blocks = 0, dealing.count(blocks), blocks
        self._shown = now.taken, now.blocks

    @property
    def left(self) -> int:
        """The number of samples that are not trained yet."""
        return dealing.count(self._shown[1])

    @property
    def is_over(self) -> bool:
        """True if the island trains no more."""
        return self._numbers().over

    @property
    def is_empty(self) -> bool:
        """True if no sample is left, and the epochs have an end; or the island trains no more."""
        return self.is_over or (self._epochs is not None and not self._shown[1])

    @property
    def taken(self) -> int:
        """The number of samples that this lineage has trained."""
        return self._shown[0]

    @property
    def epoch(self) -> int:
        """The epoch of the next sample; the number of all epochs if there is none."""
        _, blocks = self._shown
        return blocks[0][0] // self.data.samples if blocks else self._epochs or 0

    def receive(self, blocks: Blocks) -> None:
        """Take more blocks into the hand."""
        now = self._numbers()
        now.dealt += dealing.count(blocks)
        now.blocks = dealing.joined((*now.blocks, *blocks))
        self._shown = now.taken, now.blocks

    def advance(self, count: int) -> None:
        """Note that so many samples are trained."""
        now = self._numbers()
        now.taken += count
        _, now.blocks = dealing.cut(now.blocks, count)
        self._shown = now.taken, now.blocks

    def next_step(self) -> Step:
        """Return the next step: at most a batch, of one epoch.

        Its positions count the samples of the lineage. Raises ``SeaError`` for an empty hand.
        """
        if (step := self._step_at(self.taken, self._shown)) is not None:
            return step
        raise SeaError(
            "the island has no sample in hand: iterate run.microbatches(loader) once in each step, "
            "or give Islands(data='own')"
        )

    def steps_after(self, step: Step) -> Iterator[Step]:
        """Yield the steps that follow as far as they are certain: more samples may be dealt."""
        at = step.start + step.count
        while (later := self._step_at(at, shown := self._shown)) is not None:
            at += later.count
            if later.count < self.batch and at == shown[0] + dealing.count(shown[1]):
                return
            yield later

    def positions(self, of: range) -> list[range]:
        """Return the positions in their epoch of samples of this lineage, in order."""
        taken, blocks = self._shown
        _, blocks = dealing.cut(blocks, max(0, of.start - taken))
        found, _ = dealing.cut(blocks, len(of))
        samples = self.data.samples
        return [range(first % samples, first % samples + last - first) for first, last in found]

    def _step_at(self, number: int, shown: tuple[int, Blocks]) -> Step | None:
        """Return the step that begins after so many samples of the lineage."""
        (taken, blocks), samples = shown, self.data.samples
        _, blocks = dealing.cut(blocks, max(0, number - taken))
        if not blocks:
            return None
        epoch, count = blocks[0][0] // samples, 0
        for first, stop in blocks:
            if first // samples != epoch:
                break
            count += min(stop, (epoch + 1) * samples) - first
            if stop > (epoch + 1) * samples:
                break
        return Step(epoch=epoch, start=number, count=min(count, self.batch))
