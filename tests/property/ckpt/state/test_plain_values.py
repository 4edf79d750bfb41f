"""Any plain value survives the round trip through JSON."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.format.wellformed import fault_of_values
from holdfast.ckpt.inspect.compare import leaves
from holdfast.ckpt.state import plain

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.datetimes()
    | st.timedeltas()
    | st.fractions()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.sampled_from(["$tuple", "$map", "$float", "$tensor"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=4).map(deque)
        | st.lists(KEYS, max_size=4).map(Counter)
    ),
    max_leaves=15,
)


@settings(max_examples=examples(100), deadline=None)
@given(VALUES)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    encoded = plain.encode(value, "x")
    text = msgspec.json.encode(encoded, order="deterministic")  # as in a manifest
    assert fault_of_values({"x": msgspec.json.decode(text)}) is None
    assert [path for path, _ in leaves({"x": encoded})]
    assert repr(plain.decode(msgspec.json.decode(text))) == repr(value)
