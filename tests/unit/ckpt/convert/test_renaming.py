"""Sources with renamed tensors."""

from __future__ import annotations

import pytest
from doubles.checkpoints import sample_arrays
from doubles.interchange import ArraySource, read_all

from holdfast.ckpt.convert.renaming import (
    Renamed,
    module_names,
    selected,
    the_module,
    with_prefix,
    without_prefix,
)
from holdfast.ckpt.errors import MismatchError

ARRAYS = sample_arrays()


def source() -> ArraySource:
    return ArraySource(
        {
            "model.weight": ARRAYS["model.weight"],
            "model.bias": ARRAYS["model.bias"],
            "optimizer.x": ARRAYS["model.mask"],
        },
        aliases={"model.head": "model.weight", "ema.weight": "model.bias"},
        values={
            "optimizer.groups.0.lr": 0.1,
            "model.extra": [{"$tensor": "model.weight"}, {"a": {"$tensor": "optimizer.x"}}],
        },
    )


def test_a_prefix_is_put_before_every_name_and_reference() -> None:
    found = with_prefix(source(), "a.")
    assert list(found.specs) == ["a.model.weight", "a.model.bias", "a.optimizer.x"]
    assert found.specs["a.model.bias"].fqn == "a.model.bias"
    assert found.aliases["a.model.head"] == "a.model.weight"
    assert found.values["a.model.extra"] == [
        {"$tensor": "a.model.weight"},
        {"a": {"$tensor": "a.optimizer.x"}},
    ]
    assert read_all(found) == {f"a.{name}": data for name, data in read_all(source()).items()}


def test_a_prefix_is_taken_off_and_the_rest_stays_behind() -> None:
    found = without_prefix(source(), "model.")
    assert (list(found.specs), found.aliases) == (["weight", "bias"], {"head": "weight"})
    assert list(found.values) == ["extra"]
    with pytest.raises(MismatchError, match=r"starts with 'nope\.'; it has model\.weight"):
        without_prefix(source(), "nope.")


def test_a_tied_name_takes_the_place_of_the_one_that_is_left_out() -> None:
    found = without_prefix(source(), "ema.")
    assert (list(found.specs), found.aliases) == (["weight"], {})
    assert read_all(found)["weight"] == read_all(source())["model.bias"]
    assert list(selected(source(), ["ema.*", "optimizer.x"]).specs) == ["optimizer.x", "ema.weight"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"the name .same. is taken"):
        Renamed(source(), lambda _: "same")


def test_closing_closes_the_source() -> None:
    inner = source()
    with_prefix(inner, "a.").close()
    assert inner.closed


def test_modules_are_told_from_optimizers() -> None:
    assert module_names(source()) == ["model"]
    assert the_module(source()) == "model"
    with pytest.raises(
        MismatchError, match="holds the tensors of a, b; choose one of them with --name"
    ):
        the_module(ArraySource({"a.x": ARRAYS["model.mask"], "b.x": ARRAYS["model.mask"]}))
