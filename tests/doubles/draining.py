"""Episodes that are played to their end."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.adapters.rl.rollout.episodes import Episodes
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory


def drain(episodes: Episodes, work: Iterable[Trajectory]) -> dict[SampleId, Trajectory]:
    """Play ``work``, and what is under way, to the end; return what is finished, by sample."""
    waiting, done = list(work), dict[SampleId, Trajectory]()
    while waiting or not episodes.idle:
        while waiting and episodes.free:
            episodes.put(waiting.pop(0))
        done |= {trajectory.key: trajectory for trajectory in episodes.tick()}
    return done
