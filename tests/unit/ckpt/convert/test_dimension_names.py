"""Every dimension has a name, and a name stands for one length."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from holdfast.ckpt.convert.dimension_names import dimension_names
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import TensorSpec


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {fqn: TensorSpec(fqn=fqn, dtype="float32", shape=shape) for fqn, shape in shapes.items()}


def test_names_of_ones_own_differ_in_a_group() -> None:
    found = dimension_names(specs(w=(5, 4), b=(5,), scale=()), {})
    assert found == {"w": ("w.0", "w.1"), "b": ("b.0",), "scale": ()}


def test_the_first_glob_that_matches_gives_the_names() -> None:
    given = {"w": ("out", "in"), "?": ("out",)}
    found = dimension_names(specs(w=(5, 4), b=(5,), scale=()), given)
    assert found == {"w": ("out", "in"), "b": ("out",), "scale": ()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w": ("out",)}, r"tensor w has 2 dimensions, shape \[5, 4\], and 'w' gives 1 names: out"),
        ({"w": ("x", "x")}, "tensor w: 'w' gives the same name to two dimensions: x, x"),
        ({"w": ("a", "b"), "b": ("b",)}, "'b' stands for 4 in tensor w and for 5 in tensor b"),
        ({"v.*": ("a",)}, r"'v\.\*' names the dimensions of no tensor; there are w, b"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    given: Mapping[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(MismatchError, match=message):
        dimension_names(specs(w=(5, 4), b=(5,)), given)
