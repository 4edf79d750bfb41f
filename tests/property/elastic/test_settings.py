"""Every field of every group of settings refuses a wrong type at once, by name."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.elastic.config import Batch, Checkpoints, Mesh, Settings, Snapshots, Timeouts
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.neighbors.settings import Neighbors
from holdfast.elastic.sea.settings import Islands

NEEDED: Final[dict[type, dict[str, Any]]] = {
    Batch: {"microbatches": 1},
    Checkpoints: {"root": "runs/x"},
}
"""The fields of a group without a default."""

CALLS: Final[dict[type, str]] = {Settings: "resilient"}
"""The call that the message names, where it is not the class."""

_RESPONSES: Final = st.sampled_from(("warn", "skip", "rollback", "stop"))
_COUNTS: Final = st.integers(1, 2**63 - 1)
_BYTES: Final = st.integers(1, 10**18 - 1)
_SIZES: Final = _COUNTS | st.lists(_COUNTS, min_size=1, unique=True).map(tuple)
_TEXTS: Final = st.text(min_size=1)

RIGHT: Final[dict[type, dict[str, st.SearchStrategy[Any]]]] = {
    Mesh: {
        "dp": st.just("auto") | _COUNTS,
        "tp": _SIZES,
        "pp": _SIZES,
        "ep": _SIZES,
        "shard": st.none() | _SIZES,
        "min_dp": _COUNTS,
        "device": st.sampled_from(("auto", "cpu", "cuda")),
    },
    Batch: {"microbatches": _COUNTS, "size": _COUNTS, "by_speed": st.none() | st.booleans()},
    Snapshots: {
        "every": _COUNTS,
        "parity": st.just("replicate") | st.integers(0, 7),
        "group": st.integers(2, 100),
        "keep": _COUNTS,
        "memory": st.none() | st.sampled_from(("12GiB", "1.5 MB", "4096")) | _BYTES,
        "disk": st.none() | _TEXTS,
        "disk_every": _COUNTS,
    },
    Checkpoints: {
        "root": _TEXTS,
        "every": _COUNTS,
        "compression": st.dictionaries(st.text(), st.sampled_from(("zstd", "none", "blosc-lz4:5"))),
        "incremental": st.booleans(),
        "bandwidth": st.none() | st.sampled_from(("500MB/s", "1GiB/s")) | _BYTES,
        "on_error": st.sampled_from(("retry", "skip", "stop")),
        "retries": st.integers(0, 9),
        "failures_allowed": st.integers(0, 9),
        "wait_s": st.floats(0, math.inf) | st.integers(0, 9),
    },
    Timeouts: {
        "collective_s": st.floats(0, 1e9, exclude_min=True) | st.integers(1, 9),
        "stop_grace_s": st.floats(0, 4) | st.integers(0, 4),
    },
    LossGuard: {
        "metric": _TEXTS,
        "nonfinite": _RESPONSES,
        "spike": _RESPONSES,
        "then": st.sampled_from(("skip", "stop")),
        "factor": st.floats(0, exclude_min=True, allow_infinity=False) | _COUNTS,
        "window": st.integers(20, 2**63 - 1),
        "warmup": st.integers(2, 64),
        "steps_back": st.integers(0, 9),
        "limit": st.integers(0, 9),
    },
    Neighbors: {"beyond": st.integers(1, 2**63 - 1)},
    Settings: {
        "mesh": st.just(Mesh(dp=2)),
        "batch": st.just(Batch(microbatches=3)),
        "snapshots": st.just(Snapshots(keep=3)),
        "checkpoint": st.none() | st.just(Checkpoints("x")),
        "exact": st.sampled_from((None, True, "float32", "int64")),
        "seed": st.integers(0, 2**63 - 1),
        "loss_guard": st.none() | st.just(LossGuard()),
        "islands": st.none() | st.just(Islands()),
        "on_lost_state": st.none(),  # the others need a pipeline
        "rehearse": st.booleans(),
        "timeouts": st.just(Timeouts(stop_grace_s=1)),
    },
}

ANYTHING: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.just(math.nan),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
    st.tuples(st.booleans(), st.text()),
    st.dictionaries(st.integers(), st.text(), min_size=1),
    st.just(object()),
    st.just(Mesh),
)

FIELDS: Final = [(kind, each.name) for kind in RIGHT for each in dataclasses.fields(kind)]
_NAMES: Final = [f"{kind.__name__}.{name}" for kind, name in FIELDS]


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of an annotated type. A bool is no number, NaN no value."""
    home, parts = typing.get_origin(hint), typing.get_args(hint)
    if home in (UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if home is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if home is tuple:
        return isinstance(value, tuple) and all(fits(each, parts[0]) for each in value)
    if home is Mapping:
        return isinstance(value, dict) and all(
            fits(key, parts[0]) and fits(item, parts[1]) for key, item in value.items()
        )
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        fine = isinstance(value, kinds) and not isinstance(value, bool)
        return fine and not (isinstance(value, float) and math.isnan(value))
    return isinstance(value, NoneType if hint is None else hint)


def hint_of(kind: type, name: str) -> Any:
    return typing.get_type_hints(kind)[name]


def made(kind: type, name: str, value: object) -> Any:
    return kind(**{**NEEDED.get(kind, {}), name: value})


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=_NAMES)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_wrong_type_is_refused_and_the_message_names_group_field_and_value(
    kind: type, name: str, data: st.DataObject
) -> None:
    hint = hint_of(kind, name)
    value = data.draw(ANYTHING.filter(lambda value: not fits(value, hint)))
    start = re.escape(f"{CALLS.get(kind, kind.__name__)}({name}=")
    with pytest.raises(ConfigError, match=f"^{start}") as refused:
        made(kind, name, value)
    assert "give" in str(refused.value)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=_NAMES)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_a_right_value_is_taken(kind: type, name: str, data: st.DataObject) -> None:
    value = data.draw(RIGHT[kind][name])
    group = made(kind, name, value)
    assert getattr(group, name) == value
    assert fits(value, hint_of(kind, name))


@pytest.mark.parametrize(
    ("kind", "name"),
    [at for at in FIELDS if typing.get_origin(hint_of(*at)) is Literal],
    ids=str,
)
def test_the_remedy_of_a_choice_lists_every_name(kind: type, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(kind, name, "bogus")
    assert all(repr(each) in str(refused.value) for each in typing.get_args(hint_of(kind, name)))


@given(seed=ANYTHING.filter(lambda value: not fits(value, int)))
def test_the_decorator_refuses_before_the_function_is_called(seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"^resilient\(seed="):
        holdfast.resilient(seed=seed)


@given(worker_info=ANYTHING.filter(lambda value: value is not None and not callable(value)))
def test_the_decorator_refuses_information_that_is_no_function(worker_info: Any) -> None:
    with pytest.raises(ConfigError, match=r"^resilient\(worker_info="):
        holdfast.resilient(worker_info=worker_info)
