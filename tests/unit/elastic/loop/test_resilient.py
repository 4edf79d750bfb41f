"""The decorator refuses invalid settings at once and by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.config import Snapshots
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.generations import resilient
from holdfast.elastic.loop.run import Run


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"snapshots": "12GiB"}, r"snapshots='12GiB'\): give snapshots=holdfast\.Snapshots"),
        ({"snapshots": 0}, r"snapshots=0\): give"),
        ({"snapshots": {"every": 2}}, r"snapshots={'every': 2}\): give"),
        ({"mesh": ""}, r"resilient\(mesh=''\): give"),
        ({"checkpoint": ""}, r"Checkpoints\(root=''\)"),
        ({"checkpoint": Path("runs/x")}, r"checkpoint=.*give checkpoint=holdfast\.Checkpoints"),
        ({"exact": True}, r"exact=True\): give 'float32'"),
        ({"exact": "float16"}, r"exact='float16'\): give 'float32'"),
        ({"timeouts": 3.0}, r"timeouts=3.0\): give"),
        ({"loss_guard": True}, r"loss_guard=True\): give"),
        ({"worker_info": {"a": 1}}, r"resilient\(worker_info={'a': 1}\): give a function"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(argument: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resilient(**argument)


@pytest.mark.parametrize("old", ["announce", "parity", "keep", "snapshot_every", "disk"])
def test_old_spellings_are_gone(old: str) -> None:
    with pytest.raises(TypeError, match=old):
        resilient(**{old: 1})


def test_a_string_names_the_root_of_checkpoints() -> None:
    assert callable(resilient(checkpoint="s3://bucket/run", snapshots=Snapshots(keep=1)))


def test_without_settings_it_needs_no_parentheses() -> None:
    @resilient
    def train(run: Run, words: str) -> str:
        """Train."""
        return words

    assert (train.__name__, train.__doc__) == ("train", "Train.")


@pytest.mark.parametrize("given", ["runs/x", Snapshots(), 3])
def test_a_setting_without_a_name_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"write @resilient above .* by name, as @resilient\(ch"):
        resilient(given)
