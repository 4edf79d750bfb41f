"""An environment's replies in a trajectory, and the policies that they name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.adapters.rl.environments.base import Observation
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.elastic.errors import JobFailedError


def replied(
    before: Trajectory, reply: Observation, observed: Tokens, *, names: Sequence[str], context: int
) -> Trajectory:
    """Return a trajectory with the reply to the turn that is over; ``observed`` is its text.

    If that leaves no room in a ``context`` of so many tokens, the episode ends with reward 0.
    Raises ``JobFailedError`` as `next_speaker` and `rewards_of`.
    """
    reward, rewards = rewards_of(reply, names)
    if reward is not None:
        return before.replied((), state=reply.state_text, reward=reward, rewards=rewards)
    then = next_speaker(reply, names, before=before.speaker)
    length = len(before.prompt) + len(before.tokens) + len(observed)
    if length >= context:
        reason = f"{length} tokens with the observation leave no room in a context of {context}"
        return before.replied((), state=before.state, reward=0.0, reason=reason)
    return before.replied(observed, state=reply.state_text, then=then)


def next_speaker(reply: Observation, names: Sequence[str], *, before: int) -> int:
    """Return the number of the policy that has the next turn; ``before`` had the last one.

    ``names`` are those of the policies. Raises ``JobFailedError`` for another one.
    """
    return _number(reply.speaker, names, "speaker") if reply.speaker else before


def rewards_of(reply: Observation, names: Sequence[str]) -> tuple[float | None, tuple[float, ...]]:
    """Return an episode's reward (None: it goes on), and those of each policy where they differ.

    Raises ``JobFailedError`` for a name that no policy has, and if a policy gets none.
    """
    if not reply.rewards:
        return None if reply.reward is None else float(reply.reward), ()
    found = dict.fromkeys(range(len(names)), reply.reward)
    found |= {_number(name, names, "rewards"): each for name, each in reply.rewards.items()}
    rewards = [float(each) for each in found.values() if each is not None]
    if len(rewards) < len(names):
        missing = [names[number] for number, each in found.items() if each is None]
        raise JobFailedError(
            f"the environment gave rewards to {[*reply.rewards]} and none to {missing}: name all "
            "policies in Observation.rewards, or give the others Observation.reward"
        )
    mean = sum(rewards) / len(rewards)
    return mean if reply.reward is None else float(reply.reward), tuple(rewards)


def _number(name: str, names: Sequence[str], where: str) -> int:
    if name in names:
        return names.index(name)
    known = f"those of the job are {[*names]}" if any(names) else "the job has a single one"
    raise JobFailedError(f"Observation.{where} names policy {name!r}: {known}")
