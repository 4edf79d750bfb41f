"""Settings of sharing: each wrong value is refused by name, and jobs say what they cannot share."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.sharing.settings import Share, ShareConfig
from holdfast.ckpt.errors import ArgumentError
from holdfast.elastic.errors import ConfigError

RIGHT: dict[str, Any] = {"meet": "pool", "name": "oslo", "own": 6, "others": 2, "family": "f"}
CHOSEN: dict[str, Any] = {name: value for name, value in RIGHT.items() if name != "family"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("meet", ""),
        ("name", "a/b"),
        ("name", ""),
        ("own", 0),
        ("others", -1),
        ("keep", 0),
        ("keep", 1025),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"Share\({field}="):
        Share(**RIGHT | {field: value})
    with pytest.raises(ArgumentError, match=rf"ShareConfig\({field}="):
        ShareConfig(**CHOSEN | {field: value})


def test_what_only_a_loop_of_ones_own_has_is_checked_too() -> None:
    for changes in ({"family": ""}, {"tokenizer": 3}, {"score": 3}, {"score": len}):
        with pytest.raises(ConfigError):
            Share(**RIGHT | changes)


def test_runs_agree_if_they_name_the_same_family() -> None:
    assert Share(**RIGHT).digest == Share(**RIGHT | {"name": "lyon"}).digest
    assert Share(**RIGHT).digest != Share(**RIGHT | {"family": "g"}).digest


def test_a_job_has_the_own_groups_in_its_plan_and_all_in_its_batch() -> None:
    config = RLConfig(share=ShareConfig(**CHOSEN))
    assert (config.plan.groups, config.rows) == (6, 64)
    other = RLConfig(share=ShareConfig(**CHOSEN | {"name": "lyon"}))
    assert config.sharing is not None
    assert other.sharing is not None
    assert config.sharing.digest == other.sharing.digest
    assert RLConfig().sharing is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"share": SHARE, "groups": 4}', "add up to 4"),
        ('{"share": SHARE, "environment": {"factory": "two_turns"}}', "reward of an episode"),
        ('{"share": SHARE, "loss": {"proximal": "recomputed"}}', "set loss.proximal"),
        ('{"share": SHARE, "pretrained": "/models/x"}', "share.family"),
    ],
)
def test_what_cannot_be_shared_is_refused(text: str, said: str) -> None:
    share = msgspec.json.encode(CHOSEN).decode()
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.json.decode(text.replace("SHARE", share), type=RLConfig)
