"""Plain values survive JSON exactly; unsupported ones are refused with their path."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.format.wellformed import fault_of_values
from holdfast.ckpt.state import plain


def round_trip(value: object) -> object:
    return plain.decode(msgspec.json.decode(msgspec.json.encode(plain.encode(value, "x"))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**127,
        0.1,
        -0.0,
        1e300,
        float("inf"),
        float("-inf"),
        "ünïcode\n",
        b"\x00\xff",
        [],
        {},
        (),
        [1, (2.0, [None, ("a",)])],
        {"a": {"b": [1, 2]}},
        {1: "x", "1": "y", (2, 3): [4], None: 5},
        {"$tuple": [1, 2]},
        {"$anything": {}},
    ],
)
def test_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    result = round_trip(value)
    assert result == value
    assert repr(result) == repr(value)


def test_nan_comes_back() -> None:
    result = round_trip({"best": float("nan")})
    assert isinstance(result, dict)
    assert math.isnan(result["best"])


def test_the_encoding_is_a_copy() -> None:
    value = {"a": [1, 2]}
    encoded = plain.encode(value, "x")
    value["a"].append(3)
    assert encoded == {"a": [1, 2]}


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32(0.1),
        np.float16("nan"),
        np.float32("-inf"),
        np.longdouble(1) / 3,
        np.int64(-(2**63)),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.datetime64("2024-02-29", "D"),
        np.timedelta64(3, "ms"),
    ],
)
def test_numpy_numbers_come_back_as_what_they_were(value: np.generic) -> None:
    text = msgspec.json.encode(plain.encode({"a": [value]}, "x"))
    found = plain.decode(msgspec.json.decode(text))["a"][0]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.tobytes() == value.tobytes()
    assert fault_of_values({"x": msgspec.json.decode(text)}) is None


def test_numpy_text_is_text() -> None:
    assert round_trip([np.str_("größe"), np.str_(""), np.bytes_(b"ab")]) == ["größe", "", b"ab"]


@pytest.mark.parametrize(
    "payload", [None, ["<f4"], ["O", 1], ["<f4", {"$bytes": "AA=="}], ["<i1", 999], ["<x", 1]]
)
def test_a_number_that_numpy_did_not_have_is_corrupt(payload: object) -> None:
    with pytest.raises(CorruptError, match="numpy"):
        plain.decode({"$numpy": payload})


def test_an_object_is_refused_with_its_path() -> None:
    with pytest.raises(StateError, match=r"state\.fn: cannot capture a value of type function"):
        plain.encode({"fn": lambda: None}, "state")


def test_endless_nesting_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(StateError, match="nested deeper"):
        plain.encode(value, "x")


def test_an_unknown_tag_is_corrupt() -> None:
    with pytest.raises(CorruptError, match=r"\$tensor"):
        plain.decode({"$tensor": "a.b"})


HALF = "a\ud800"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([10**5000], "an integer of 16610 bits, at most 14000"),
        ([-(10**5000)], r"x\.0: an integer"),
        ({10**5000: 1}, "an integer of 16610 bits"),
        (HALF, "lone surrogate at position 1"),
        ((1, [HALF]), r"x\.1\.0': the text"),
        ({HALF: 1}, "lone surrogate"),
        ({(HALF,): 1}, "lone surrogate"),
        (np.str_(HALF), "lone surrogate"),
    ],
)
def test_what_no_json_holds_is_refused_by_path(value: object, said: str) -> None:
    with pytest.raises(StateError, match=said):
        plain.encode(value, "x")


def test_the_largest_integers_survive() -> None:
    most = 2**14_000 - 1
    assert round_trip([most, -most]) == [most, -most]
    assert round_trip("a ß 語 \0 \U0001f600") == "a ß 語 \0 \U0001f600"
