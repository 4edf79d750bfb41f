"""A pool adds tokens of the ledger's samples one by one, from engines that come and go."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest
from own_loops import LIMITS, Job
from torch import Tensor

from holdfast.adapters.rl.engines.protocol import runs_of
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.rl import EnginePool, SampledToken, TokenPlace, Trajectory


class Noise:
    """An engine whose tokens follow from their places; its N-th token of all is its last one.

    A restart gives it version 0 again.
    """

    capacity = 2

    def __init__(self, *, version: int = 0, lost_after: int = 1 << 30, ready: bool = True) -> None:
        self.version, self._left = version, lost_after
        self.loads: list[int] = []
        self.is_up = ready
        self._lock = threading.Lock()

    def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
        answer = len(ids) - place.prompt
        while True:
            with self._lock:
                self._left -= 1
                if self._left < 0:
                    self.version, self._left = 0, 1 << 30
                    raise PeerError("it broke off")
            token = (place.ordinal + place.sample + answer) % 8
            answer += 1
            yield SampledToken(token, -float(answer), self.version)
            if LIMITS.over(place.prompt, answer, token):
                return

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        if not self.is_up:
            raise PeerError("it is not there")
        self.version = version
        self.loads.append(version)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def trained(*engines: Noise, steps: int = 2, **given: Any) -> list[list[Trajectory]]:
    """Return the batches of a loop that samples with a pool."""
    job, pool = Job(), EnginePool(engines, retry_s=0.01, **given)
    rollouts = job.enter("p")
    found = []
    for step in range(steps):
        answers = list(rollouts.samples())
        pool.load({}, version=step)
        pool.finish(answers)
        found.append(rollouts.batch())
        job.completed = job.run.completed = step + 1
    assert rollouts.report()["violations"] == []
    return found


def test_a_step_has_whole_answers_of_its_version() -> None:
    engine = Noise()
    for step, batch in enumerate(trained(engine)):
        assert all(LIMITS.finished(each) for each in batch)
        assert {version for each in batch for version in each.token_versions} == {step}
    assert engine.loads == [0, 1]


@pytest.mark.parametrize("lost_after", [1, 3, 7, 17, 20])
def test_another_engine_goes_on_and_the_lost_one_gets_the_weights_again(lost_after: int) -> None:
    lost = Noise(lost_after=lost_after)
    assert trained(lost, Noise()) == trained(Noise())
    assert set(lost.loads) == {0, 1}


def test_an_engine_that_is_away_gets_the_weights_before_it_samples() -> None:
    away = Noise(ready=False)
    assert trained(away, Noise()) == trained(Noise())
    assert away.loads == []


def test_idle_is_called_while_no_token_comes() -> None:
    class Slow(Noise):
        def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
            assert called.wait(60)
            yield from super().generate(ids, place)

    called = threading.Event()
    rollouts = Job().enter("p")
    EnginePool([Slow()]).finish(list(rollouts.samples()), idle=called.set)
    assert len(rollouts.batch()) == 4


def test_no_engine_for_long_ends_the_job_with_the_last_failure() -> None:
    with pytest.raises(JobFailedError, match=r"from any of 1 engines .*it is not there.*start"):
        trained(Noise(ready=False), wait_s=0.2)


def test_what_no_other_try_would_mend_is_raised_at_once() -> None:
    class Wrong(Noise):
        def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
            raise ConfigError("never")
            yield

    with pytest.raises(ConfigError, match="never"):
        trained(Wrong())


class InRuns(Noise):
    """The same engine, whose tokens come two at a time."""

    capacity = 4

    def generate_runs(self, ids: Sequence[int], place: TokenPlace) -> Generator[list[SampledToken]]:
        tokens = self.generate(ids, place)
        while run := list(itertools.islice(tokens, 2)):
            yield run


def test_tokens_that_come_together_are_added_together() -> None:
    assert trained(InRuns()) == trained(Noise())
    assert trained(InRuns(lost_after=7), Noise()) == trained(Noise())


def test_versions_within_a_run_are_those_of_the_tokens() -> None:
    class Changing(InRuns):
        def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
            for number, token in enumerate(super().generate(ids, place)):
                yield token._replace(version=0 if number == 0 else 1)

    rollouts = Job().enter("p")
    answers = list(rollouts.samples())
    EnginePool([Changing()], pinned=False).finish(answers)
    assert all(len(each.tokens) > 2 for each in answers)
    for each in answers:
        assert each.trajectory().token_versions == [0] + [1] * (len(each.tokens) - 1)


def test_a_class_that_overrides_generate_alone_means_what_that_yields() -> None:
    class Own(InRuns):
        def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
            yield from super().generate(ids, place)

    assert not runs_are_asked(Own)
    assert not runs_are_asked(Noise)
    assert runs_are_asked(InRuns)


def runs_are_asked(engine: type[Noise]) -> bool:
    """Return whether tokens of an engine come in its runs."""
    place = TokenPlace(seed=1, ordinal=0, sample=0, prompt=1)
    return any(len(each) > 1 for each in runs_of(engine(), (5,), place))


# -- engines that come and go --------------------------------------------------------------------


class Coming:
    """A source of engines; ``there`` are those that are there now."""

    def __init__(self, *there: Noise) -> None:
        self.there = list(there)

    def engines(self) -> list[Noise]:
        return list(self.there)


def batch_of(pool: EnginePool, **given: Any) -> list[Trajectory]:
    """Return a batch that a pool samples, with version 0."""
    rollouts = Job().enter("p")
    pool.load({}, version=0)
    pool.finish(list(rollouts.samples()), **given)
    return rollouts.batch()


def test_an_engine_that_comes_gets_the_weights_and_the_answers() -> None:
    late, source = Noise(version=7), Coming()
    found = batch_of(EnginePool(source), idle=lambda: source.there or source.there.append(late))
    assert found == batch_of(EnginePool([Noise()]))
    assert late.loads == [0]


def test_an_engine_that_leaves_hands_its_answers_on_with_their_tokens() -> None:
    class Leaving(Noise):
        """It goes after its second token, and then samples slowly."""

        sampled = 0

        def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
            for token in super().generate(ids, place):
                self.sampled += 1
                if self.sampled >= 2:
                    source.there = [other]
                    threading.Event().wait(0.3)  # until the pool has looked around
                yield token

    other = Noise()
    source = Coming(Leaving())
    pool = EnginePool(source)
    found = batch_of(pool)
    assert found == batch_of(EnginePool([Noise()]))
    assert pool.moved > 0
    assert other.loads == [0]


def test_no_engine_at_all_is_told_after_a_while() -> None:
    def more(room: int) -> list[Any]:
        assert room == 0
        return []

    with pytest.raises(JobFailedError, match=r"there is no engine for 0.2 s: start servers"):
        EnginePool(Coming(), wait_s=0.2).work(more)
    with pytest.raises(JobFailedError, match=r"there is no engine for 0.2 s"):
        batch_of(EnginePool(Coming(), wait_s=0.2))
