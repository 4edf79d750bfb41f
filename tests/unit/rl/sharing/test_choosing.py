"""Groups that a run cannot train on are left out, each for a reason that names the cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from shared_runs import group_of

from holdfast.adapters.rl.samples.borrowed import SharedGroup, borrowed_from
from holdfast.adapters.rl.sharing.choosing import TakingRules, fitted

RULES: dict[str, Any] = {"group": 2, "context": 8, "family": "f"}


class Digits:
    size, end = 12, 9

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(str, tokens))


def test_a_group_of_the_same_family_is_taken_as_it_is() -> None:
    group = group_of()
    assert fitted(group, TakingRules(**RULES)) == borrowed_from(group)


@pytest.mark.parametrize(
    ("group", "changes", "why"),
    [
        pytest.param(group_of(), {"group": 3}, "2 samples, groups of this run have 3", id="size"),
        pytest.param(group_of(), {"context": 3}, "4 tokens, the context of this", id="context"),
        pytest.param(group_of(), {"family": "g"}, "Share\\(tokenizer=, score=\\)", id="family"),
        pytest.param(
            group_of(),
            {"family": "g", "tokenizer": Digits(), "recodes": True},
            "comes without text",
            id="no text",
        ),
        pytest.param(
            group_of(),
            {"refuses": lambda ordinal, prompt: f"{ordinal} asks {prompt}"},
            "0 asks \\(1, 2\\)",
            id="refused",
        ),
        pytest.param(
            msgspec.structs.replace(group_of(), prompt=(77,)),
            {"tokenizer": Digits()},
            "outside this run's vocabulary of 12",
            id="vocabulary",
        ),
        pytest.param(
            msgspec.structs.replace(group_of(), prompt=()), {}, "has no tokens", id="no prompt"
        ),
        pytest.param(
            msgspec.structs.replace(group_of(text="x"), text="12"),
            {"family": "g", "tokenizer": Digits(), "recodes": True},
            "cannot encode its text",
            id="text",
        ),
    ],
)
def test_a_group_that_does_not_fit_is_left_out(
    group: SharedGroup, changes: dict[str, Any], why: str
) -> None:
    found = fitted(group, TakingRules(**RULES | changes))
    assert isinstance(found, str)
    assert re.search(why, found)
