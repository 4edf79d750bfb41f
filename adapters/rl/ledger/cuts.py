"""The policy versions that belong to the run's history, across all restores. Pure.

A generation that is restored to a step cuts off what earlier ones did after it: the later versions
are void, and so is every token that they sampled. Only cuts that concern tokens which may still be
trained are kept: their number does not grow with the generations.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.adapters.rl.samples.trajectory import Trajectory


class GenerationCuts:
    """The step that each generation was restored to, as far as it still matters."""

    def __init__(self, steps: Mapping[int, int] | None = None) -> None:
        self.steps: dict[int, int] = dict(steps or {})

    def begin(self, generation: int, *, restored: int, oldest: int = 0) -> None:
        """Record that ``generation`` began at step ``restored``.

        ``oldest`` is the oldest version whose tokens may be trained from now on.

        Versions above ``restored`` of earlier generations are void from now on. A number that was
        used before means that the job was started again from a checkpoint: generations are counted
        from the beginning, and the consumers of the earlier ones are gone. Their samples are in the
        checkpoint, all of them from before ``restored``.
        """
        if generation <= max(self.steps, default=0):
            self.steps.clear()
        # a cut at the same or a later step says nothing that this one does not say
        before = sorted(each for each in self.steps.items() if each[1] < restored)
        # the newest cut below ``oldest`` voids all that older cuts void and that may be trained
        passed = sum(step < oldest for _, step in before)
        self.steps = dict(before[max(passed - 1, 0) :])
        self.steps[generation] = restored

    def current(self, *, generation: int, version: int) -> bool:
        """Say whether ``version``, of a snapshot of ``generation``, is in the run's history."""
        return all(
            version <= restored for later, restored in self.steps.items() if later > generation
        )

    def valid(self, trajectory: Trajectory) -> bool:
        """Say whether every token was sampled by a version in the run's history."""
        return all(
            self.current(generation=stamp.generation, version=stamp.version)
            for stamp in trajectory.stamps
        )

    def history(self, trajectory: Trajectory) -> Trajectory:
        """Return the beginning of the trajectory that belongs to the run's history."""
        count = 0
        for stamp in trajectory.stamps:
            if not self.current(generation=stamp.generation, version=stamp.version):
                break
            count += stamp.count
        return trajectory.first(count)
