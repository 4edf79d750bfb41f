"""A plan refuses numbers that no job can have, and what its mode excludes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.ckpt.errors import ArgumentError, HoldfastError

LIMITS: dict[str, Any] = {"end": 9, "context": 12, "max_new_tokens": 4}
PLAN: dict[str, Any] = {
    "groups": 2,
    "group": 2,
    "eta": 1,
    "steps": 4,
    "limits": TurnLimits(**LIMITS),
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": 0}, r"BatchPlan\(groups=0\): give 1 or more prompts"),
        ({"group": "two"}, r"BatchPlan\(group='two'\): give 1 or more samples"),
        ({"eta": -1}, r"BatchPlan\(eta=-1\): give 0 or more steps"),
        ({"steps": 1.5}, r"BatchPlan\(steps=1\.5\): give 0 or more steps"),
        ({"limits": None}, r"BatchPlan\(limits=None\): give TurnLimits"),
        ({"mode": "bounded"}, r"BatchPlan\(mode='bounded'\): give Mode\.SYNC, Mode\.FIXED_LAG or"),
        ({"scheduling": {}}, r"BatchPlan\(scheduling=\{\}\): give a Scheduling"),
        ({"replay": "recent"}, r"BatchPlan\(replay='recent'\): give a ReplayConfig"),
        ({"mode": Mode.SYNC}, r"BatchPlan\(eta=1\): give 0 in mode 'sync'"),
        ({"scheduling": Scheduling(over_provision=2)}, "over_provision is 2 steps"),
        ({"scheduling": Scheduling(order=GroupOrder.ARRIVAL)}, "order 'arrival' in mode"),
        ({"scheduling": Scheduling(token_budget=9)}, "token_budget in mode 'fixed_lag'"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        BatchPlan(**{**PLAN, **wrong})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HoldfastError)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"end": "eos"}, r"TurnLimits\(end='eos'\): give the number of the token"),
        ({"context": 0}, r"TurnLimits\(context=0\): give 1 or more tokens"),
        ({"max_new_tokens": True}, r"TurnLimits\(max_new_tokens=True\): give 1 or more tokens"),
        ({"turns": 2}, r"TurnLimits\(turns=2\): give True or False"),
    ],
)
def test_wrong_limits_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TurnLimits(**{**LIMITS, **wrong})


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (Scheduling, {"claims": "shortest"}, "claims='shortest'.*give 'prompt' or 'longest'"),
        (Scheduling, {"over_provision": "all"}, "over_provision='all'.*give 0 or more"),
        (Scheduling, {"worker_tokens": 1.5}, "worker_tokens=1.5.*give 1 or more tokens"),
        (ReplayConfig, {"policy": "old"}, "policy='old'"),
        (ReplayConfig, {"share": 1}, "share=1.*give a share below 1"),
        (ReplayConfig, {"share": "half"}, "share='half'.*give a share above 0"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused(
    kind: type, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        kind(**wrong)


def test_a_stored_plan_with_wrong_numbers_is_malformed() -> None:
    stored = msgspec.to_builtins(BatchPlan(**PLAN))
    assert msgspec.convert(stored, BatchPlan) == BatchPlan(**PLAN)
    with pytest.raises(msgspec.ValidationError, match="groups=0"):
        msgspec.convert({**stored, "groups": 0}, BatchPlan)
