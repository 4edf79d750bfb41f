"""A vLLM server's settings, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.elastic.errors import ConfigError

LIMITS = TurnLimits(end=1, context=32, max_new_tokens=8)


def server(**given: Any) -> VLLMServer:
    """Return the engine of a server that is not there."""
    return VLLMServer(url="http://localhost:1", limits=LIMITS, **given)


def test_a_request_has_the_place_of_its_first_token() -> None:
    place = TokenPlace(seed=7, ordinal=2, sample=1, prompt=3)
    assert server()._body([5, 6, 7, 8], place, 4) == {
        "ids": [5, 6, 7, 8],
        "most": 4,
        "end": 1,
        "place": [7, 2, 1, 4],
        "pinned": True,
        "event_tokens": 1,
    }
    assert server(event_tokens=8)._body([5], place, 4)["event_tokens"] == 8


def test_a_server_reads_weights_by_itself_unless_a_folder_is_given(tmp_path: Path) -> None:
    assert not server().takes_weights
    assert server(weights=WeightFolder(tmp_path)).takes_weights


def test_an_event_has_a_token_or_more() -> None:
    with pytest.raises(ConfigError, match=r"event_tokens.*give 1 or more tokens"):
        server(event_tokens=0)


def test_weights_that_never_change_need_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give version= for weights that never change"):
        server(version=1, weights=WeightFolder(tmp_path))
    with pytest.raises(ConfigError, match="its weights never change"):
        server(version=1).load({}, version=2)
