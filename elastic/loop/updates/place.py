"""The place of a training function in its loop: the step, and the phase of the step."""

from __future__ import annotations

from holdfast.elastic.loop.updates.evaluations import Evaluations
from holdfast.elastic.randomness import Draws
from holdfast.elastic.tracked.cursor import Cursor


class LoopPlace:
    """One generation's place.

    ``phase`` is the number of the present phase in the step. ``has_gradients``: a pass made mean
    gradients, and no update has used them. ``skips``: the loss guard leaves the update out.
    ``evaluations`` are those of the `Run.minimize` under way. ``has_left``: the loop was left by
    `break` or `return`, so no step follows, and a complete one counts already.
    """

    def __init__(self, cursor: Cursor, *, seed: int) -> None:
        self._cursor, self._seed = cursor, seed
        self.in_step = self.has_left = False
        self.phase = 0
        self.has_gradients = self.skips = False
        self.evaluations: Evaluations | None = None

    @property
    def completed(self) -> int:
        """The number of complete steps, see `Run.completed`."""
        return self._cursor.step + (self.has_left and self.is_stepped)

    @property
    def is_stepped(self) -> bool:
        """True if only the rest of the loop's body is missing from the present step."""
        return self.in_step and self.phase > 0 and not self.has_gradients

    @property
    def is_repeated(self) -> bool:
        """True if the optimizer of `Run.minimize` evaluates the loss again in this pass."""
        return self.evaluations is not None and self.evaluations.first is not None

    @property
    def draws(self) -> Draws:
        """The seeds of the present phase."""
        return Draws(seed=self._seed, step=self.completed, phase=self.phase)

    def begin_step(self) -> None:
        """Enter the first phase of the next step."""
        self.in_step, self.has_gradients, self.phase = True, False, 0

    def begin_phase(self) -> None:
        """Enter the next phase: the update of the one before has used its gradients."""
        self.has_gradients = False
        self.phase += 1

    def end_step(self) -> None:
        """Leave the step; the cursor counts it if it is complete."""
        self.in_step = False
