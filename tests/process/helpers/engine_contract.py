"""The contract of sampling engines as tests, and answers that a pool of engines finishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine, TokenPlace
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory, TurnLimits
from holdfast.elastic.errors import ConfigError

SEED, JOIN_S = 7, 240
PROMPTS = [tuple(each) for each in (b"abc>", b"zebra>", b"q>", b"xy>", b"words>", b"hello>")]


@dataclass(frozen=True, kw_only=True)
class ContractedEngine:
    """An engine with version ``first``, and the tokens that another one samples ``alone``.

    ``weights_of`` gives the weights of a version; None: those of the engine never change.
    """

    engine: Any
    limits: TurnLimits
    first: int
    weights_of: Callable[[int], Mapping[str, Any]] | None
    alone: Callable[[tuple[int, ...], TokenPlace], list[SampledToken]]

    def load(self, version: int) -> None:
        """Have it sample with a version."""
        assert self.weights_of is not None
        self.engine.load(self.weights_of(version), version=version)


def of_ordinal(ordinal: int) -> tuple[tuple[int, ...], TokenPlace]:
    """Return the prompt and the place of an answer."""
    prompt = PROMPTS[ordinal % len(PROMPTS)]
    return prompt, TokenPlace(seed=SEED, ordinal=ordinal, sample=0, prompt=len(prompt))


def alike(one: Sequence[SampledToken], other: Sequence[SampledToken]) -> bool:
    """Compare tokens and versions, and log-probabilities up to rounding."""
    return [(a.token, a.version) for a in one] == [(b.token, b.version) for b in other] and [
        a.logprob for a in one
    ] == pytest.approx([b.logprob for b in other], abs=1e-5)


def in_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at the same time; return what they return."""
    found: list[Any] = [None] * len(work)

    def keep(number: int) -> None:
        found[number] = work[number]()

    threads = [threading.Thread(target=keep, args=(n,), daemon=True) for n in range(len(work))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(JOIN_S)
    return found


class EngineContract:
    """The tests; a subclass has the fixture ``contracted``."""

    @pytest.fixture(autouse=True)
    def fresh(self, contracted: ContractedEngine) -> None:
        """Give the engine the first version again."""
        if contracted.weights_of is not None:
            contracted.load(contracted.first)

    def test_an_answer_has_the_tokens_of_its_place_up_to_the_limits(
        self, contracted: ContractedEngine
    ) -> None:
        limits = contracted.limits
        for ordinal in range(4):
            ids, place = of_ordinal(ordinal)
            found = list(contracted.engine.generate(ids, place))
            tokens = [each.token for each in found]
            assert limits.over(len(ids), len(tokens), tokens[-1])
            assert not any(limits.over(len(ids), n, tokens[n - 1]) for n in range(1, len(tokens)))
            assert {each.version for each in found} == {contracted.first}
            assert alike(found, contracted.alone(ids, place))

    def test_an_answer_goes_on_from_any_begin_of_it(self, contracted: ContractedEngine) -> None:
        ids, place = of_ordinal(1)
        whole = list(contracted.engine.generate(ids, place))
        for count in range(len(whole) + 1):
            begun = (*ids, *(each.token for each in whole[:count]))
            assert alike(list(contracted.engine.generate(begun, place)), whole[count:])

    def test_a_stream_may_be_closed_and_its_place_is_free(
        self, contracted: ContractedEngine
    ) -> None:
        for _ in range(2 * contracted.engine.capacity):
            stream = contracted.engine.generate(*of_ordinal(1))
            next(stream)
            stream.close()
        assert list(contracted.engine.generate(*of_ordinal(1)))

    def test_many_streams_at_once_are_as_each_alone(self, contracted: ContractedEngine) -> None:
        engine: SamplingEngine = contracted.engine
        alone = [list(engine.generate(*of_ordinal(n))) for n in range(9)]
        streams = [lambda n=n: list(engine.generate(*of_ordinal(n))) for n in range(9)]
        for one, other in zip(in_threads(streams), alone, strict=True):
            assert alike(one, other)

    def test_no_token_is_sampled_between_pause_and_resume(
        self, contracted: ContractedEngine
    ) -> None:
        engine = contracted.engine
        if contracted.weights_of is None:
            with pytest.raises(ConfigError, match="its weights never change"):
                engine.load({}, version=2)
            return
        engine.pause()
        found: list[SampledToken] = []
        thread = threading.Thread(
            target=lambda: found.extend(engine.generate(*of_ordinal(0))), daemon=True
        )
        thread.start()
        contracted.load(2)
        engine.resume()
        thread.join(JOIN_S)
        assert {each.version for each in found} == {2}


class TokenSink:
    """Keeps every token that is added, and calls ``after`` with their number."""

    seed, generation = SEED, 1

    def __init__(self, limits: TurnLimits, after: Callable[[int], object] = lambda _: None) -> None:
        self.limits, self._after = limits, after
        self.places: list[tuple[int, int]] = []

    def added(self, sample: Sample, delta: Delta) -> None:
        """Take tokens."""
        places = range(delta.start, delta.start + len(delta.tokens))
        self.places += [(sample.ordinal, each) for each in places]
        self._after(len(self.places))

    def together(self) -> AbstractContextManager[None]:
        """Return a block at whose end nothing happens."""
        return nullcontext()


def answers(sink: TokenSink, count: int = 6, version: int = 1) -> list[Sample]:
    """Return answers that have not begun."""
    return [
        Sample(
            sink,
            Trajectory(ordinal=n, sample=0, prompt=PROMPTS[n % len(PROMPTS)]),
            version=version,
        )
        for n in range(count)
    ]


def tokens_of(found: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Return the tokens of each."""
    return [each.tokens for each in found]
