"""A model of an island's loss guard, and of the faults of its memory that the guard sees."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(slots=True, kw_only=True)
class ModelGuard:
    """A guard that goes back ``steps_back`` steps or more; 0: there is none.

    It sees a fault within so many steps, as only then it goes back before it.
    """

    steps_back: int
    random: Random
    _is_struck: bool = False

    def strike(self) -> None:
        """Have the next step make a fault."""
        self._is_struck = self.steps_back > 0

    def fault(self, step: int, *, of: int | None) -> int | None:
        """Return when it sees a fault of the step that was just completed, None if it has none.

        ``step`` and the answer are numbers of complete steps; a fault that no step of ``of`` would
        show is none. None: nobody knows how many steps there are.
        """
        if not self._is_struck:
            return None
        self._is_struck = False
        seen = step + self.random.randrange(self.steps_back)
        return seen if of is None or seen < of else None

    def at_most(self, step: int) -> int:
        """Return to which step it goes back at most: now and then far, as after two faults."""
        return step - self.steps_back - self.random.choice((0, 0, 2, 5))
