"""A custom loop around the ledger: unfinished samples come back, trained ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from own_loops import LIMITS, Job, finish

from holdfast.adapters.rl import library
from holdfast.adapters.rl.library import BatchPlan, Mode, Sample
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import RolloutRecovered, RuleViolated, SampledUnprotected, of_kind


def test_steps_train_every_prompt_once_in_order() -> None:
    job = Job()
    rollouts = job.enter("p")
    ordinals = [[t.ordinal for t in job.step(rollouts)] for _ in range(4)]
    assert ordinals == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5], [6, 6, 7, 7]]
    report: Any = rollouts.report()
    assert report["ordinals"]["trained"] == 8
    assert report["violations"] == []
    assert list(rollouts.samples()) == []


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_another_process_goes_on_where_one_died_without_sampling_anything_again(node: str) -> None:
    undisturbed = Job()
    expected = [undisturbed.step(rollouts) for rollouts in [undisturbed.enter("p")] for _ in "ab"]
    job = Job()
    first = job.enter("p")
    job.step(first)
    samples = first.samples()
    tokens = finish(next(samples)) + finish(next(samples), most=1)  # and it is killed
    second = job.enter("q", node=node)
    work = list(second.samples())
    assert [s.tokens != () for s in work] == [True, False, False]
    assert sum(len(t.tokens) for t in second.ledger.samples()) == tokens
    event = of_kind(job.events, RolloutRecovered)[-1]
    assert (event.tokens, event.unfinished) == (tokens, 1)
    for sample in work:
        finish(sample)
    batch = second.batch()
    assert [(t.key, t.tokens, t.logprobs) for t in batch] == [
        (t.key, t.tokens, t.logprobs) for t in expected[1]
    ]
    assert second.report()["violations"] == []


def test_a_process_that_goes_on_in_the_next_generation_reads_its_own_log() -> None:
    job = Job()
    first = job.enter("p")
    tokens = sum(finish(sample) for sample in first.samples())
    second = job.enter("p")
    assert list(second.samples()) == []
    assert second.ledger.counters.workers_lost == 0
    assert sum(len(t.tokens) for t in second.batch()) == tokens


def test_two_losses_in_a_row_lose_nothing() -> None:
    job = Job()
    tokens = finish(next(job.enter("p").samples()))
    second = job.enter("q")
    tokens += finish(next(second.samples()), most=2)
    third = job.enter("r")
    open_ = list(third.samples())
    assert sum(len(t.tokens) for t in third.ledger.samples()) == tokens
    assert len(open_[0].tokens) in (1, 2)


def test_what_a_rolled_back_version_sampled_is_void() -> None:
    job = Job()
    first = job.enter("p")
    before = job.snapshot
    job.step(first)
    for sample in first.samples():
        finish(sample)
    job.snapshot, job.completed = before, 0  # step 1 was never protected
    second = job.enter("q")
    assert list(second.samples()) == [], "what version 0 sampled is there"
    second.batch()
    job.run.completed = 1
    assert len(list(second.samples())) == 4


def test_logs_are_dropped_once_all_they_have_is_trained_and_protected() -> None:
    job = Job()
    job.logs.protected = 0
    list(job.enter("p").samples())
    second = job.enter("q")
    job.step(second)
    assert job.logs.dropped == []
    job.logs.protected = 1
    job.step(second)
    assert job.logs.dropped == ["trainer-0-p"]
    assert [worker.incarnation for worker in second.workers()] == ["q"]


def test_a_version_that_is_not_protected_is_waited_for_once_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "_PUBLISH_LIMIT_S", 0.05)
    job = Job()
    job.logs.protected = -1
    rollouts = job.enter("p")
    job.step(rollouts)
    requests: list[int] = []
    job.logs.protected_step = lambda **_: requests.append(1) or -1  # type: ignore[func-returns-value]
    job.step(rollouts)
    assert len(requests) == 1, "it is not waited for again"
    assert len(of_kind(job.events, SampledUnprotected)) == 2


@pytest.mark.parametrize("fatal", [False, True])
def test_a_violation_is_told_and_ends_the_job_where_that_is_wanted(fatal: bool) -> None:
    job = Job()
    rollouts = job.enter("p", fatal=fatal)
    job.step(rollouts)
    for sample in rollouts.samples():
        sample.version = 0
        finish(sample)
    if fatal:
        with pytest.raises(JobFailedError, match="staler than 0"):
            rollouts.batch()
    else:
        assert len(rollouts.batch()) == 4
    assert of_kind(job.events, RuleViolated)
    report: Any = rollouts.report()
    assert len([what for what in report["violations"] if "staler than 0" in what]) == 4


def test_a_batch_that_is_not_finished_says_what_to_do() -> None:
    rollouts = Job().enter("p")
    finish(next(rollouts.samples()))
    with pytest.raises(ConfigError, match="finish all that samples"):
        rollouts.batch()


@pytest.mark.parametrize(
    ("add", "said"),
    [
        pytest.param(lambda s: s.extend([1, 2], [-1.0]), "2 tokens with 1 log", id="lengths"),
        pytest.param(lambda s: s.extend([1], [float("nan")]), "is NaN", id="NaN"),
        pytest.param(lambda s: s.extend([1.5], [-1.0]), "give the tokens as", id="a float"),
        pytest.param(lambda s: s.extend([2**64], [-1.0]), "give the tokens as", id="65 bits"),
        pytest.param(lambda s: s.extend([1], ["x"]), "as float32", id="a text"),
        pytest.param(lambda s: s.extend([1], [-1e300]), "as float32", id="beyond float32"),
        pytest.param(lambda s: (finish(s), s.extend([1], [-1.0])), "is finished", id="finished"),
    ],
)
def test_what_cannot_be_added_to_a_sample_is_refused(
    add: Callable[[Sample], Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        add(next(Job().enter("p").samples()))


def test_tokens_are_logged_in_records_of_as_many_as_asked() -> None:
    job = Job()
    rollouts = job.enter("p", log_every_tokens=3)
    sample = next(rollouts.samples())
    log = job.logs.records["n0", "trainer-0-p"]
    sample.extend([1], [-1.0])
    sample.extend([2], [-1.0])
    assert len(log) == 0
    sample.extend([3], [-1.0])
    assert len(log) == 1
    sample.extend([9], [-1.0])
    assert len(log) == 2, "a finished sample does not wait"


def test_in_mode_bounded_samples_may_be_left_and_gone_on_with_under_the_next_version() -> None:
    plan = BatchPlan(groups=2, group=2, eta=1, steps=4, limits=LIMITS, mode=Mode.BOUNDED)
    job = Job(plan)
    rollouts = job.enter("p")
    for sample in rollouts.samples():
        finish(sample, most=99 if sample.ordinal < 2 else 1)
    open_ = {key for key, sample in rollouts._open.items() if not sample.finished}
    rollouts.batch()
    job.run.completed = 1
    again = [sample for sample in rollouts.samples() if sample.ordinal < 4]
    assert {(s.ordinal, s.sample) for s in again} == open_
    for sample in again:
        assert sample.version == 1
        finish(sample)
    for trajectory in rollouts.batch():
        assert trajectory.versions <= {0, 1}
    assert rollouts.report()["violations"] == []


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="log_every_tokens is 0"):
        Job().enter("p", log_every_tokens=0)
