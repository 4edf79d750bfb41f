"""Plain values survive JSON exactly; unsupported ones are refused with their path."""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from io import BytesIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt import python_types
from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.format import wellformed
from holdfast.ckpt.format.wellformed import fault_of_values
from holdfast.ckpt.state import plain


def stored(value: object) -> Any:
    """Return the encoded value as a manifest has it: with the keys of objects in order."""
    return msgspec.json.decode(msgspec.json.encode(plain.encode(value, "x"), order="deterministic"))


def round_trip(value: object) -> object:
    return plain.decode(stored(value))


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
        {"z": 1, "a": {"9": 0, "10": 0}},
        {b"k": 1, 2.5: 2, (1, "a"): 3, frozenset({1}): 4, date(2024, 2, 29): 5},
        OrderedDict([("z", 1), ("a", (2,))]),
        Counter("abca"),
        Counter({2: 1, 4: 0}),
        defaultdict(None, {"b": 1, "a": 2}),
        defaultdict(list, {"b": [1]}),
        deque([1, (2,)], maxlen=3),
        deque(["a"]),
        {1, "a", (2, 3)},
        set(),
        frozenset({"b", "a"}),
        range(1, 10, 3),
        slice(None, 5),
        bytearray(b"\x00a"),
        complex(1.5, float("inf")),
        Decimal("1.10"),
        Decimal("NaN"),
        Fraction(-3, 4),
        datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime(2024, 10, 27, 2, 30, fold=1),
        datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        datetime(2024, 2, 29, tzinfo=UTC),
        date(1, 1, 1),
        time(23, 59, fold=1),
        timedelta(days=-1, microseconds=1),
        UUID(int=7),
        Path("a/b"),
        PurePosixPath("/x"),
        PureWindowsPath("c:/x"),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.device("cpu"),
    ],
)
def test_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    result = round_trip(value)
    assert result == value or value != value
    assert type(result) is type(value)
    if not isinstance(value, set | frozenset):
        assert repr(result) == repr(value)
    assert fault_of_values({"x": stored(value)}) is None


def test_a_stream_of_bytes_comes_back_at_its_position() -> None:
    stream = BytesIO(b"abc")
    stream.seek(1)
    result = round_trip(stream)
    assert isinstance(result, BytesIO)
    assert (result.read(), result.getvalue()) == (b"bc", b"abc")


def test_the_version_of_torch_is_text() -> None:
    assert type(round_trip(torch.__version__)) is str


def test_the_attributes_of_an_ordered_dict_come_back() -> None:
    value = nn.Sequential(nn.BatchNorm1d(2)).state_dict().copy()
    value = OrderedDict((key, None) for key in value)
    value.versions = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    assert vars(round_trip(value)) == vars(value)


def test_a_set_is_encoded_alike_in_every_process() -> None:
    names = [f"n{i}" for i in range(20)]
    assert plain.encode(set(names), "x")["$python"][1] == sorted(names)


def test_dicts_in_another_order_are_equal_where_order_does_not_count() -> None:
    one, other = {"z": {1: 2, 0: 3}, "a": [{"y": 1, "b": 2}]}, {"a": [{"b": 2, "y": 1}]}
    other["z"] = {0: 3, 1: 2}  # type: ignore[assignment]
    assert plain.encode(one, "x") != plain.encode(other, "x")
    assert plain.unordered(plain.encode(one, "x")) == plain.unordered(plain.encode(other, "x"))
    assert plain.unordered({"$map": [["$a", 1]]}) == {"$map": [["$a", 1]]}


class Colour(IntEnum):
    RED = 1


class Mode(str, Enum):  # noqa: UP042 - as code for older versions has it
    FAST = "fast"


class Label(str):
    __slots__ = ()


class Pair(NamedTuple):
    a: int


class Config(UserDict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Colour.RED, r"Colour would come back as a plain int; give its \.value"),
        (Mode.FAST, r"Mode would come back as a plain str; give its \.value"),
        (Label("a"), r"Label would come back as a plain str; give str\(\.\.\.\) of it"),
        (Pair(1), r"Pair would come back as a plain tuple; give tuple\(\.\.\.\) of it"),
        (Config(a=1), r"Config would come back as a plain dict; give dict\(\.\.\.\) of it"),
        (MappingProxyType({}), r"mappingproxy would come back as a plain dict"),
        (defaultdict(lambda: 1), r"a defaultdict cannot be captured as it is: .* is code"),
        (datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Paris")), r"datetime .* time zone"),
        ({Colour.RED: 1}, r"Colour would come back as a plain int"),
        ({object: 1}, r"a dict key of type type cannot be captured"),
        (array("i", [1]), r"cannot capture a value of type array\.array"),
    ],
)
def test_a_value_that_would_come_back_as_another_is_refused(value: object, words: str) -> None:
    with pytest.raises(StateError, match=rf"x\.v\b.*{words}"):
        plain.encode({"v": value}, "x")


def test_containers_that_are_refilled_may_be_of_any_type() -> None:
    assert plain.encode(Config(b=1), "x", refilled=True) == {"b": 1}
    with pytest.raises(StateError, match=r"x\.b: a value of type .*Colour"):
        plain.encode(UserDict(b=Colour.RED), "x", refilled=True)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$python": ["os.system", "ls"]},
        {"$python": ["date", "no date"]},
        {"$python": ["Fraction", [1, 0]]},
        {"$python": ["set", [[1]]]},
        {"$python": ["defaultdict", ["eval", {}]]},
        {"$python": "set"},
        {"$map": [[[1], 2]]},
        {"$torch": ["dtype", "load"]},
        {"$torch": ["device", "moon"]},
        {"$torch": ["Tensor", []]},
        {"$torch": 3},
    ],
)
def test_parts_of_no_value_are_corrupt(encoded: Any) -> None:
    with pytest.raises(CorruptError, match="plain value with tag"):
        plain.decode(encoded)


def test_the_checker_of_manifests_knows_the_standard_types() -> None:
    assert python_types.KINDS.keys() == wellformed._PYTHON_TYPES
    assert "unknown tag" in str(fault_of_values({"x": {"$object": 1}}))
    assert "$python of" in str(fault_of_values({"x": {"$python": ["object", 1]}}))
    assert "$torch of" in str(fault_of_values({"x": {"$torch": ["Tensor", 1]}}))


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
