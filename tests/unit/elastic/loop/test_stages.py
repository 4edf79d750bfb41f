"""The stages of a script of several decorated functions: what may follow what, and the refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lone_channel import LoneChannel
from torch import nn

from holdfast.ckpt.state.trees.packing import unpack
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.config import Checkpoints, Settings, Snapshots
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop import stages
from holdfast.elastic.loop.stages import Stages
from holdfast.elastic.meeting.point import MeetingPoint

KEY = RunKey.new()


def _saving(root: str) -> Settings:
    return Settings(checkpoint=Checkpoints(root))


def _channel() -> Any:
    return LoneChannel()


def test_stages_with_one_directory_are_refused() -> None:
    found = Stages()
    found.finished("pretrain", None, _saving("runs/x"))
    found.begin("finetune", _saving("runs/y"), _channel())
    with pytest.raises(ConfigError, match="finetune and pretrain, which is complete"):
        found.begin("finetune", _saving("runs/x"), _channel())


def test_a_later_stage_with_a_disk_is_refused() -> None:
    found = Stages()
    found.finished("pretrain", None, Settings())
    with pytest.raises(ConfigError, match="only the first stage can have a disk"):
        found.begin("finetune", Settings(snapshots=Snapshots(disk="/tmp/x")), _channel())


def test_a_later_stage_does_not_get_the_disk_of_the_launcher() -> None:
    found, channel = Stages(), _channel()
    channel.settings = {"snapshots": {"disk": "/d", "disk_every": 2, "keep": 3}, "rehearse": False}
    assert found.overrides(channel) == channel.settings
    found.finished("pretrain", None, Settings())
    assert found.overrides(channel) == {"snapshots": {"keep": 3}, "rehearse": False}


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (nn.Linear(2, 2), "the result is a Linear"),
        ({"model": [1, nn.Linear(2, 2)]}, r"the result\['model'\]\[1\] is a Linear"),
        ([torch.ones(2).to_sparse()], r"the result\[0\]: layout torch.sparse_coo"),
    ],
)
def test_a_result_that_no_other_process_can_get_is_named(result: Any, part: str) -> None:
    found = Stages()
    found.finished("pretrain", result, Settings())
    with pytest.raises(ConfigError, match=f"follows pretrain, but {part}.*state_dict"):
        found._check_results()


def test_a_result_is_read_from_another_workers_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "PART_BYTES", 1000)
    result = {"w": torch.arange(600.0), "n": [1, 2.5, "x", None], "t": (True,)}
    found = Stages()
    found.finished("pretrain", result, Settings())
    found._check_results()
    point = MeetingPoint(KEY)
    found.publish(point)
    got = unpack(stages._read(point.address, KEY, 0))
    assert torch.equal(got["w"], result["w"])
    assert {**got, "w": 0} == {**result, "w": 0}


def test_a_result_is_that_of_its_stage_whatever_the_script_does_to_it_later() -> None:
    found, result = Stages(), {"w": torch.ones(3)}
    found.finished("pretrain", result, Settings())
    result["w"] *= 2  # a worker that starts later does so too
    found._check_results()
    point = MeetingPoint(KEY)
    found.publish(point)
    assert unpack(stages._read(point.address, KEY, 0))["w"].tolist() == [1, 1, 1]


def test_a_script_by_hand_and_the_last_function_may_return_anything() -> None:
    found = Stages()
    found.finished("pretrain", nn.Linear(2, 2), Settings())
    found.begin("finetune", Settings(), _channel())
    found.finished("finetune", nn.Linear(2, 2), Settings())
    assert found.number == 2
