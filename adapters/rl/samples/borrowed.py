"""Samples that another run made: the group as it travels, and as this run trains on it. Pure."""

from __future__ import annotations

import msgspec

from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.ckpt.types import learn


class GroupOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of a group: prompt ``ordinal`` of a run that shares under the name ``island``.

    ``lineage`` tells a run from an earlier one of the same name that began without its state.
    """

    island: str
    lineage: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.island}/{self.ordinal}"


class SharedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished sample: its tokens with behavior log-probabilities and policy versions.

    ``text`` is the answer without its end token, None if its run has no tokenizer; ``ended`` says
    that the end token is there.
    """

    tokens: Tokens
    logprobs: tuple[float, ...]
    stamps: tuple[Stamp, ...]
    text: str | None = None
    ended: bool = False


class SharedGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All samples of a prompt. ``family`` is the digest of the tokenizer and the model family."""

    origin: GroupOrigin
    family: str
    prompt: Tokens
    answers: tuple[SharedAnswer, ...]
    text: str | None = None


class Borrowed(Trajectory, frozen=True, kw_only=True):
    """A sample of another run. Ordinal, generations and versions are those of its own run.

    ``island`` and ``lineage`` are those of its `GroupOrigin`. A ``recoded`` one was encoded again
    from its text; its log-probabilities are those that this run's policy gives it.
    """

    island: str
    lineage: str
    recoded: bool = False

    @property
    def origin(self) -> GroupOrigin:
        """The origin of its group."""
        return GroupOrigin(island=self.island, lineage=self.lineage, ordinal=self.ordinal)


def borrowed_from(group: SharedGroup) -> tuple[Borrowed, ...]:
    """Return the samples of a group, with its own tokens and log-probabilities."""
    origin = group.origin
    return tuple(
        Borrowed(
            ordinal=origin.ordinal,
            sample=number,
            prompt=group.prompt,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            stamps=answer.stamps,
            island=origin.island,
            lineage=origin.lineage,
        )
        for number, answer in enumerate(group.answers)
    )


learn(globals())
