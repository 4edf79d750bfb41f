"""Any plain value survives the round trip through JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.state import plain

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
KEYS = st.text() | st.integers() | st.sampled_from(["$tuple", "$map", "$float", "$tensor"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=examples(100), deadline=None)
@given(VALUES)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    text = msgspec.json.encode(plain.encode(value, "x"))
    assert repr(plain.decode(msgspec.json.decode(text))) == repr(value)
