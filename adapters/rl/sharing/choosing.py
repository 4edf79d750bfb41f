"""Decisions about the pool: samples that this run can train on, and the groups of a step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from holdfast.adapters.rl.samples.borrowed import (
    Borrowed,
    GroupOrigin,
    SharedAnswer,
    SharedGroup,
    borrowed_from,
)
from holdfast.adapters.rl.samples.tokens import Tokenizer, Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory

_EMPTY: Final = "a prompt or an answer has no tokens"

Refuses: TypeAlias = Callable[[int, Tokens], str]
"""Returns the reason to leave out a group of this ordinal and prompt, empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakingRules:
    """The samples that this run can train on.

    Groups have ``group`` samples; prompt and answer have at most ``context`` tokens. ``family`` is
    the digest of this run's tokenizer and model family. ``recodes``: samples of another family may
    be encoded again by ``tokenizer``. ``refuses`` takes the ordinal and the prompt of a group, and
    returns the reason to leave it out, empty if there is none.
    """

    group: int
    context: int
    family: str
    tokenizer: Tokenizer | None = None
    recodes: bool = False
    refuses: Refuses = lambda _ordinal, _prompt: ""


def fitted(group: SharedGroup, rules: TakingRules) -> tuple[Borrowed, ...] | str:
    """Return the samples of a group as this run trains on them, or the reason to leave it out."""
    if len(group.answers) != rules.group:
        return f"it has {len(group.answers)} samples, groups of this run have {rules.group}"
    if not all(answer.tokens for answer in group.answers):
        return _EMPTY
    samples = borrowed_from(group) if group.family == rules.family else _recoded(group, rules)
    if isinstance(samples, str):
        return samples
    if reason := rules.refuses(group.origin.ordinal, samples[0].prompt):
        return reason
    if not all(sample.prompt and sample.tokens for sample in samples):
        return _EMPTY
    longest = max(len(sample.prompt) + len(sample.tokens) for sample in samples)
    if longest > rules.context:
        return f"it has {longest} tokens, the context of this run has room for {rules.context}"
    size = rules.tokenizer.size if rules.tokenizer else None
    if size and not all(
        0 <= token < size for each in samples for token in (*each.prompt, *each.tokens)
    ):
        return f"it has tokens outside this run's vocabulary of {size}"
    return samples


def _recoded(group: SharedGroup, rules: TakingRules) -> tuple[Borrowed, ...] | str:
    """Return the samples encoded again from their texts, or the reason why they cannot be."""
    tokenizer = rules.tokenizer
    if tokenizer is None or not rules.recodes:
        return "its tokenizer or model family is another: Share(tokenizer=, score=) would encode it"
    prompt = group.text
    if prompt is None or any(answer.text is None for answer in group.answers):
        return "its tokenizer or model family is another, and it comes without text"
    try:
        encoded = tokenizer.encode(prompt)
        texts = [tokenizer.encode(answer.text or "") for answer in group.answers]
    except (ValueError, KeyError) as error:
        return f"this run's tokenizer cannot encode its text: {error!r}"
    found = []
    for sample, answer, text in zip(borrowed_from(group), group.answers, texts, strict=True):
        tokens = (*text, *((tokenizer.end,) if answer.ended else ()))
        stamp = msgspec.structs.replace(answer.stamps[-1], count=len(tokens))
        found.append(
            msgspec.structs.replace(
                sample,
                prompt=encoded,
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                stamps=(stamp,),
                recoded=True,
            )
        )
    return tuple(found)


def chosen(
    stock: Iterable[GroupOrigin],
    *,
    count: int,
    turn: int,
    may_take: Callable[[GroupOrigin], bool],
) -> list[GroupOrigin]:
    """Return up to ``count`` origins of the ``stock`` that may be taken.

    Each run in its turn gives its newest group; ``turn`` says who begins.
    """
    by_island: dict[str, list[GroupOrigin]] = {}
    for origin in sorted(stock, key=lambda each: (each.island, each.ordinal, each.lineage)):
        if may_take(origin):
            by_island.setdefault(origin.island, []).append(origin)
    islands = sorted(by_island)
    found: list[GroupOrigin] = []
    while len(found) < count and any(by_island.values()):
        island = islands[turn % len(islands)]
        turn += 1
        if by_island[island]:
            found.append(by_island[island].pop())
    return found


def shared_group(
    samples: Sequence[Trajectory],
    *,
    island: str,
    lineage: str,
    family: str,
    tokenizer: Tokenizer | None,
) -> SharedGroup:
    """Return a group of this run as it travels; with a ``tokenizer`` it has its texts."""
    first = samples[0]
    return SharedGroup(
        origin=GroupOrigin(island=island, lineage=lineage, ordinal=first.ordinal),
        family=family,
        prompt=first.prompt,
        answers=tuple(_answer(sample, tokenizer) for sample in samples),
        text=tokenizer.decode(first.prompt) if tokenizer else None,
    )


def _answer(sample: Trajectory, tokenizer: Tokenizer | None) -> SharedAnswer:
    ended = tokenizer is not None and sample.tokens[-1] == tokenizer.end
    spoken = sample.tokens[:-1] if ended else sample.tokens
    return SharedAnswer(
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        stamps=sample.stamps,
        text=tokenizer.decode(spoken) if tokenizer else None,
        ended=ended,
    )
