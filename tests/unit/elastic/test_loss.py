"""The judgement of a step whose loss is not finite or leaps."""

from __future__ import annotations

import math
import random

import pytest

from holdfast.elastic.errors import ConfigError, JobFailedError, RollBackError
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loss import LossAction, LossGuard, Past, Response, decide, judge, longest

GUARD = LossGuard(warmup=4, window=8)


def after(*losses: float) -> Past:
    return Past(losses=dict(enumerate(losses)))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_wrong_from_the_first_step_on(loss: float) -> None:
    assert judge(loss, [], guard=GUARD) == f"loss is {loss}"


def test_a_leap_is_wrong_once_the_usual_spread_is_known() -> None:
    assert judge(50.0, [1.0, 1.1, 0.9], guard=GUARD) == ""
    assert "leapt to 50" in judge(50.0, [1.0, 1.1, 0.9, 1.0], guard=GUARD)
    assert judge(0.001, [1.0, 1.1, 0.9, 1.0], guard=GUARD) == "", "a fall is no fault"


def test_noise_and_a_slow_rise_are_no_leaps() -> None:
    draw, guard, past = random.Random(1), LossGuard(), Past()
    for step in range(3000):
        loss = (2.0 + step / 1000) * draw.lognormvariate(0.0, 0.1)
        action, why, past = decide(loss, past, step=step, guard=guard)
        assert action is LossAction.GO_ON, why
    assert len(past.losses) == guard.window


def test_a_new_level_is_learned_after_some_warnings() -> None:
    past, warned = after(*[1.0] * 8), 0
    for step in range(8, 40):
        action, _, past = decide(10.0, past, step=step, guard=GUARD)
        warned += action is LossAction.WARN
    assert 0 < warned < 8


def test_going_back_is_bounded_by_step_and_forgotten_behind_it() -> None:
    past, actions = after(1.0, 1.0), []
    for _ in range(3):
        action, _, past = decide(math.nan, past, step=9, guard=GUARD)
        actions.append(action)
        for step in (7, 8):
            _, _, past = decide(1.0, past, step=step, guard=GUARD)
    assert actions == [LossAction.ROLL_BACK, LossAction.ROLL_BACK, LossAction.STOP]
    _, _, past = decide(1.0, past, step=9, guard=GUARD)
    action, _, _ = decide(math.nan, past, step=10, guard=GUARD)
    assert action is LossAction.ROLL_BACK, "the next step has tries of its own"


def test_skipping_is_bounded_in_a_row() -> None:
    guard = LossGuard(nonfinite="skip", limit=2)
    past, actions = Past(), []
    for step in range(4):
        action, _, past = decide(math.nan if step != 1 else 1.0, past, step=step, guard=guard)
        actions.append(action)
    assert actions == [LossAction.SKIP, LossAction.GO_ON, LossAction.SKIP, LossAction.SKIP]
    assert decide(math.nan, past, step=4, guard=guard)[0] is LossAction.STOP


@pytest.mark.parametrize("response", ["warn", "skip", "rollback", "stop"])
def test_a_step_that_has_changed_the_weights_is_undone_or_the_last(response: Response) -> None:
    guard = LossGuard(nonfinite=response, limit=1, then="skip")
    wrong, past, actions = "w0: progress of inf", Past(), []
    for _ in range(2):
        action, why, past = decide(1.0, past, step=3, guard=guard, wrong=wrong, is_done=True)
        actions.append(action)
        assert why.startswith(wrong)
    first = LossAction.ROLL_BACK if response == "rollback" else LossAction.STOP
    assert actions == [first, LossAction.STOP]


def test_ranks_that_joined_late_learn_from_the_others() -> None:
    old = Past(losses={1: 1.0, 2: 1.0, 7: 9.0}, worst_step=5, rollbacks=1)
    assert longest([Past(), old, after(3.0)], before=3) == Past(
        losses={1: 1.0, 2: 1.0}, worst_step=5, rollbacks=1
    )


def test_the_watch_says_what_becomes_of_a_step() -> None:
    reports: list[tuple[str, LossAction]] = []
    watch = LossWatch(LossGuard(steps_back=2, limit=1))

    def skips(loss: float, step: int, wrong: str = "") -> bool:
        metrics = {"loss": loss}
        tell = lambda why, action: reports.append((why, action))  # noqa: E731
        return watch.skips(metrics, step=step, wrong=wrong, tell=tell)

    assert not skips(1.0, 4)
    with pytest.raises(RollBackError) as caught:
        skips(1.0, 5, wrong="the gradient of w is not finite")
    assert caught.value.at_most == 3
    with pytest.raises(JobFailedError, match="step 5: loss is nan, again after going back 1 times"):
        skips(math.nan, 5)
    assert [action for _, action in reports] == [LossAction.ROLL_BACK, LossAction.STOP]


def test_a_loop_that_does_not_log_the_loss_is_told_so() -> None:
    watch = LossWatch(LossGuard(metric="nll"))
    with pytest.raises(ConfigError, match=r"run.log\(nll=...\)"):
        watch.skips({"loss": 1.0}, step=0, wrong="", tell=lambda *_: None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"metric": ""},
        {"nonfinite": "ignore"},
        {"spike": "panic"},
        {"then": "rollback"},
        {"factor": 0.0},
        {"warmup": 1},
        {"window": 3, "warmup": 4},
        {"steps_back": -1},
        {"limit": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_guard_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossGuard(**wrong)  # type: ignore[arg-type]
