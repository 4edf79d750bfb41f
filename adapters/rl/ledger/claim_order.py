"""In which order samples are given out: what is waited for first, then the longest. Pure.

Where some answers are many times as long as others, a step ends when its last sample does. Those
that are likely to be the longest are begun first, so that the short ones fill the slots beside them
(longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies"). How long one
will be is read off what is recorded: the other samples of its group, which share the prompt, and
past prompts of about the same length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.adapters.rl.samples.trajectory import SampleId

Claims = Literal["prompt", "longest"]
"""The order of samples that the same step waits for: as they are numbered, or longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCandidate:
    """A sample that nobody is at work on.

    ``urgency``: how many steps can do without it; ``remaining``: the tokens it is likely to need.
    """

    key: SampleId
    urgency: int
    remaining: float = 0.0


def queue(candidates: Iterable[ClaimCandidate]) -> list[ClaimCandidate]:
    """Return them in the order in which they are given out."""
    return sorted(candidates, key=lambda each: (each.urgency, -each.remaining, each.key))


class Lengths:
    """Mean answer lengths of trained samples, by the length of their prompts; of bounded size.

    Prompts whose lengths have the same number of binary digits share an entry.
    """

    def __init__(self, state: Mapping[str, Sequence[int]] | None = None) -> None:
        self._past = {int(key): (count, total) for key, (count, total) in (state or {}).items()}

    def note(self, prompt_tokens: int, tokens: int) -> None:
        """Take in that an answer to a prompt of so many tokens had ``tokens`` tokens."""
        count, total = self._past.get(prompt_tokens.bit_length(), (0, 0))
        self._past[prompt_tokens.bit_length()] = count + 1, total + tokens

    def expected(self, prompt_tokens: int, *, most: int) -> float:
        """Return the mean of such prompts, that of all where there is none; at first ``most``."""
        count, total = self._past.get(prompt_tokens.bit_length(), (0, 0))
        if not count:
            count = sum(each for each, _ in self._past.values())
            total = sum(each for _, each in self._past.values())
        return min(total / count, most) if count else float(most)

    def state_dict(self) -> dict[str, list[int]]:
        """Return the table as JSON values."""
        return {str(key): list(value) for key, value in sorted(self._past.items())}


def remaining(expected: float, *, done: Sequence[int], have: int, most: int) -> float:
    """Return how many tokens a sample is likely to need that has ``have``.

    ``done`` are the lengths of its group's finished samples, ``expected`` is that of the prompt
    alone and weighs as much as one of them; ``most`` is the longest that is allowed.
    """
    mean = (expected + sum(done)) / (1 + len(done))
    return max(1.0, min(mean, most) - have)
