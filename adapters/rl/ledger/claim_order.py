"""The lengths by which samples are given out: most urgent step first, then the longest. Pure.

If some answers are many times as long as others, a step ends when its last sample does. The
samples that are likely to be longest begin first, so that the short ones fill the slots beside them
(longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies"). A sample's
length is estimated from records: the other samples of its group, which share the prompt, and past
prompts of about the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Claims = Literal["prompt", "longest"]
"""The order among samples that the same step waits for: by number, or longest first."""


class Lengths:
    """Mean answer lengths of trained samples, by the length of their prompts; of bounded size.

    Prompts whose lengths have the same number of binary digits share an entry.
    """

    def __init__(self, state: Mapping[str, Sequence[int]] | None = None) -> None:
        self._past = {int(key): (count, total) for key, (count, total) in (state or {}).items()}

    def note(self, prompt_tokens: int, tokens: int) -> None:
        """Record that an answer to a prompt of ``prompt_tokens`` tokens had ``tokens`` tokens."""
        count, total = self._past.get(prompt_tokens.bit_length(), (0, 0))
        self._past[prompt_tokens.bit_length()] = count + 1, total + tokens

    def expected(self, prompt_tokens: int, *, most: int) -> float:
        """Return the mean of such prompts, else the mean of all prompts, else ``most``."""
        count, total = self._past.get(prompt_tokens.bit_length(), (0, 0))
        if not count:
            count = sum(each for each, _ in self._past.values())
            total = sum(each for _, each in self._past.values())
        return min(total / count, most) if count else float(most)

    def state_dict(self) -> dict[str, list[int]]:
        """Return the table as JSON values."""
        return {str(key): list(value) for key, value in sorted(self._past.items())}


def remaining(expected: float, *, done: Sequence[int], have: int, most: int) -> float:
    """Return how many more tokens a sample of ``have`` tokens is likely to need.

    ``done`` are the lengths of the finished samples of its group. ``expected`` is the length
    expected from the prompt alone; it weighs as much as one finished sample. ``most`` is the
    longest allowed.
    """
    mean = (expected + sum(done)) / (1 + len(done))
    return max(1.0, min(mean, most) - have)
