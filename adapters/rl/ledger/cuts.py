"""Which policy versions belong to the run's history, past every restore. Pure.

A generation that is restored to a step cuts off what earlier ones did after it: the versions beyond
are void, and so is every token that they sampled.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.adapters.rl.samples.trajectory import Trajectory


class GenerationCuts:
    """The step that each generation was restored to."""

    def __init__(self, steps: Mapping[int, int] | None = None) -> None:
        self.steps: dict[int, int] = dict(steps or {})

    def begin(self, generation: int, *, restored: int) -> None:
        """Note that ``generation`` began at step ``restored``: older versions beyond are void.

        A number that was there before tells that the job was started again, from a checkpoint:
        generations are counted anew, and whoever sampled in those before is gone. What they left is
        in the checkpoint, all of it from before ``restored``.
        """
        if generation <= max(self.steps, default=0):
            self.steps.clear()
        self.steps[generation] = restored

    def current(self, *, generation: int, version: int) -> bool:
        """Whether ``version``, of a snapshot of ``generation``, belongs to the run's history."""
        return all(
            version <= restored for later, restored in self.steps.items() if later > generation
        )

    def valid(self, trajectory: Trajectory) -> bool:
        """Whether no token was sampled by a version of a rolled-back future."""
        return all(
            self.current(generation=stamp.generation, version=stamp.version)
            for stamp in trajectory.stamps
        )

    def history(self, trajectory: Trajectory) -> Trajectory:
        """Return the beginning that belongs to the run's history."""
        count = 0
        for stamp in trajectory.stamps:
            if not self.current(generation=stamp.generation, version=stamp.version):
                break
            count += stamp.count
        return trajectory.first(count)
