"""The public names of `holdfast`, and the members of a `Run`, are exactly these; all documented."""

from __future__ import annotations

import inspect
import re

import holdfast

NAMES = [
    "Batch",
    "Checkpoints",
    "HoldfastError",
    "Islands",
    "Loader",
    "LossGuard",
    "Mesh",
    "Neighbors",
    "Nesterov",
    "PerRank",
    "Quorum",
    "Rebuilt",
    "Run",
    "Snapshots",
    "Timeouts",
    "Weighted",
    "all_to_all",
    "chaos",
    "ckpt",
    "declare_optimizer",
    "elastic",
    "load",
    "memory_need",
    "open",
    "resilient",
    "rl",
    "save",
    "state_hash",
]

RUN = [
    "backward",
    "check",
    "clip_grad_norm_",
    "completed",
    "data_mesh",
    "device",
    "emit",
    "epochs",
    "fence",
    "gather",
    "generation",
    "generator",
    "is_leader",
    "loader",
    "log",
    "log_to",
    "mesh",
    "metrics",
    "microbatch",
    "microbatches",
    "minimize",
    "on_protected",
    "pause",
    "pipeline",
    "protection",
    "rank",
    "reduce",
    "repeats",
    "share",
    "stage",
    "stages",
    "step",
    "steps",
    "stop",
    "touched",
    "track",
    "world_size",
]

MOST_ARGUMENTS = 12


def test_the_names_are_frozen_and_documented() -> None:
    assert holdfast.__all__ == NAMES
    assert [name for name in NAMES if not inspect.getdoc(getattr(holdfast, name))] == []
    assert set(NAMES) <= set(dir(holdfast))


def test_the_decorator_has_at_most_twelve_arguments_all_by_keyword_and_with_a_default() -> None:
    function, *parameters = inspect.signature(holdfast.resilient).parameters.values()
    assert function.kind is inspect.Parameter.POSITIONAL_ONLY
    assert len(parameters) == MOST_ARGUMENTS
    assert {each.kind for each in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(each.default is not inspect.Parameter.empty for each in parameters)


def test_a_run_shows_these_members_and_each_is_documented() -> None:
    assert sorted(name for name in vars(holdfast.Run) if not name.startswith("_")) == RUN
    assert [name for name in RUN if not inspect.getdoc(getattr(holdfast.Run, name))] == []


def test_the_description_of_a_run_names_each_member_once_by_its_purpose() -> None:
    rows = [line for line in str(inspect.getdoc(holdfast.Run)).splitlines() if line[:1] == "|"]
    named = [name for row in rows for name in re.findall(r"``(\w+)``", row)]
    assert sorted(named) == RUN
