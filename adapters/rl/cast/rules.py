"""Decisions about runs that train one policy each: versions, steps and groups they need. Pure.

Step t of every run trains on the same groups, and version max(0, t - eta) of every policy sampled
them. The log has the groups of the steps from ``first`` up to, not including, ``end``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def admissible(step: int, reached: Collection[int], *, end: int, eta: int) -> int:
    """Return the completed steps by which the lead may admit prompts, before its ``step``.

    ``reached`` are the newest versions of the other policies, -1 for none. Prompts of steps that
    the log has need no version any more. Negative: no prompt may be admitted yet.
    """
    sampled = min([step, *reached])
    logged = min(step, end - 1 - eta)
    return max(sampled, logged)


def behind(step: int, reached: Mapping[str, int], *, end: int, eta: int) -> dict[str, int]:
    """Return the newest version of each policy without which ``step`` cannot be sampled."""
    if step < end:
        return {}
    needed = version_for(step, eta=eta)
    return {policy: newest for policy, newest in reached.items() if newest < needed}


def version_for(step: int, *, eta: int) -> int:
    """Return the version of every policy that samples the groups of ``step``."""
    return max(0, step - eta)


def kept_from(*, protected: int, durable: int | None, every: int) -> int:
    """Return the lowest step that a run may ever train again.

    ``protected`` is its newest protected step. A run with checkpoints, one ``every`` so many steps,
    has the newest of them at step ``durable``, -1 for none; it can go back to the one before.
    """
    return max(0, protected if durable is None else durable - every)


def forgettable(keeps: Collection[int | None], *, end: int) -> int:
    """Return the step below which the log may forget, by the `kept_from` of all runs.

    None: a run that was not seen yet, which may need all. The newest step always stays.
    """
    known = [each for each in keeps if each is not None]
    if len(known) < len(keeps):
        return 0
    return max(0, min([*known, end - 1]))


def misfit(completed: int, *, first: int, end: int) -> str:
    """Return the reason why a run with so many ``completed`` steps cannot go on; empty if it can.

    An empty log has ``first`` and ``end`` 0.
    """
    if completed < first:
        return (
            f"this run begins at step {completed}, and the groups of the steps below {first} are "
            "gone: start it from its own newest checkpoint (checkpoint), or start all policies "
            "anew with an empty directory"
        )
    if completed > end:
        return (
            f"this run begins at step {completed}, and groups are there only up to step {end}: "
            "give it the directory that its earlier steps had, or start all policies anew, "
            "without checkpoints and with an empty directory"
        )
    return ""
