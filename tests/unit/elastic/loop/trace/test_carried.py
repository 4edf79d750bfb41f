"""The variables of a script that a step reads before it writes them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.elastic.loop.trace.carried import carried
from holdfast.elastic.loop.user_code import user_frame

SETTING = 7


class Progress:
    def __init__(self) -> None:
        self.best, self.net = 0.5, nn.Linear(1, 1)


def steps(count: int, found: list[dict[str, str]], *known: Any) -> Iterator[int]:
    for step in range(count):
        frame = user_frame(sys._getframe(1))
        assert frame is not None
        found.append(carried(frame, known={id(value) for value in known}))
        yield step


def test_a_variable_that_is_read_first_is_carried_and_one_that_is_written_first_is_not() -> None:
    found: list[dict[str, str]] = []
    best, last, text = 9.0, 9.0, "unused"
    for step in steps(2, found):
        last = step + 1.0
        best = min(best, last)
    assert [(each["best"], "last" in each, "text" in each) for each in found] == [
        ("9", False, False),
        ("1", False, False),
    ]
    assert (best, last, text) == (1.0, 2.0, "unused")


def test_what_comes_after_the_loop_does_not_count() -> None:
    found: list[dict[str, str]] = []
    after = 1
    for _ in steps(1, found):
        pass
    assert after == 1
    assert "after" not in found[0]


def test_what_is_tracked_is_left_out() -> None:
    found: list[dict[str, str]] = []
    net, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for _ in steps(1, found, net):
        net(torch.ones(1)) + other(torch.ones(1))
    assert "net" not in found[0]
    assert found[0]["other"].startswith("#")


def test_states_of_generators_and_contents_of_containers_are_seen() -> None:
    found: list[dict[str, str]] = []
    own, numbers, past, seen = random.Random(0), np.random.default_rng(0), [1.5], torch.zeros(2)
    for _ in steps(2, found):
        own.random()
        numbers.random()
        past.append(2.5)
        seen += 1
    assert found[1]["past"] == "[1.5, 2.5]"
    assert all(found[0][name] != found[1][name] for name in ("own", "numbers", "seen"))


def test_plain_attributes_of_the_scripts_objects_and_its_globals_are_seen() -> None:
    found: list[dict[str, str]] = []
    progress = Progress()
    for _ in steps(2, found):
        progress.best += 1
    assert [each["progress.best"] for each in found] == ["0.5", "1.5"]
    assert found[0]["SETTING"] == "7"


def test_a_name_that_an_inner_function_changes_is_carried() -> None:
    found: list[dict[str, str]] = []
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    for _ in steps(2, found):
        add()
    assert [each["count"] for each in found] == ["0", "1"]
