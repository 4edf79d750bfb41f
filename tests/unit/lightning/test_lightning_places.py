"""A path of Fabric means a root and a step."""

from __future__ import annotations

import pytest

from holdfast.adapters.lightning.places import place_to_load, place_to_save
from holdfast.ckpt import ArgumentError


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("runs/a/step-100", ("runs/a", 100)),
        ("runs/a/step-000000000100/", ("runs/a", 100)),
        ("s3://bucket/prefix/step-7", ("s3://bucket/prefix", 7)),
        ("runs/a", ("runs/a", None)),
        ("runs/a/", ("runs/a", None)),
        ("runs/my-step-7", ("runs/my-step-7", None)),
        ("/", ("/", None)),
    ],
)
def test_a_path_names_the_step_or_the_root(path: str, wanted: tuple[str, int | None]) -> None:
    assert place_to_load(path) == wanted


def test_a_save_takes_the_step_from_the_path_or_from_the_state() -> None:
    assert place_to_save("runs/a/step-100", {"step": 5}) == ("runs/a", 100)
    assert place_to_save("runs/a", {"step": 5}) == ("runs/a", 5)
    for state in ({}, {"step": True}, {"step": "5"}):
        with pytest.raises(ArgumentError, match="give runs/a/step-100, or a state with"):
            place_to_save("runs/a/", state)
