"""Events survive the round trip as JSON lines; foreign lines are skipped."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.ckpt.events import VERSION
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import (
    KINDS,
    DataWorkerDeath,
    EventFormatError,
    FencingDone,
    MetricsLogged,
    StepDone,
    UserEvent,
    WeightsPulled,
    decode,
    encode,
    of_fields,
    of_kind,
)

STEP = StepDone(time_s=5.0, node="a", source="worker", seat="trainer/1", step=7, seconds=0.5)


def test_an_event_is_one_object_with_its_kind_and_the_envelope_beside_its_fields() -> None:
    document = json.loads(encode(STEP))
    at = {"kind": "step", "v": VERSION, "time_s": 5.0, "node": "a", "source": "worker"}
    assert document | at | {"seat": "trainer/1", "step": 7, "seconds": 0.5} == document
    assert decode(encode(STEP)) == STEP


def test_every_kind_has_a_name_of_its_own_and_a_struct_of_its_own() -> None:
    assert len(KINDS) == len(set(KINDS.values())) > 60
    assert all(kind.tag() == name for name, kind in KINDS.items())
    assert STEP.kind == "step"


def test_every_field_of_a_quantity_names_its_unit() -> None:
    """Numbers that are no counts, shares or numbers of something end in their unit."""
    units = ("_s", "seconds", "bytes", "tokens")
    bare = {
        f"{name}.{field.name}"
        for name, kind in KINDS.items()
        for field in msgspec.structs.fields(kind)
        if field.type in (float, float | None) and not field.name.endswith(units)
    }
    ratios = {
        "straggler": ("times", "waits", "data", "busy"),
        "roles_asked": ("waits", "works"),
        "role_moved": ("waits", "works"),
        "rollout_tail": ("busy", "working"),
        "checkpoint_waiting": ("done",),
        "episodes": ("turns_mean",),
        "rechecked": ("difference",),
    }
    assert bare == {f"{kind}.{name}" for kind, names in ratios.items() for name in names}


def test_fields_that_are_not_known_are_passed_over() -> None:
    line = json.dumps({**json.loads(encode(STEP)), "colour": "red"}).encode()
    assert decode(line) == STEP


def test_a_kind_that_is_not_known_is_an_event_of_the_users() -> None:
    own = UserEvent(time_s=1.0, node="a", name="evaluated", fields={"score": 0.5, "on": ["x"]})
    assert json.loads(encode(own))["kind"] == "evaluated"
    assert json.loads(encode(own))["score"] == 0.5
    assert decode(encode(own)) == own
    assert own.kind == "evaluated"


@pytest.mark.parametrize(
    ("name", "fields", "wrong"),
    [
        ("step", {}, "one of Holdfast's kinds"),
        ("", {}, "empty"),
        ("mine", {"node": "x"}, r"fields \['node'\]"),
        ("mine", {"kind": "x"}, r"fields \['kind'\]"),
    ],
)
def test_an_event_of_the_users_that_reads_as_another_is_refused(
    name: str, fields: dict[str, object], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=wrong):
        UserEvent(name=name, fields=fields)


def test_values_that_are_not_finite_are_told_as_nothing() -> None:
    event = decode(encode(MetricsLogged(step=1, values={"loss": float("nan"), "reward": 1.0})))
    assert event == MetricsLogged(step=1, values={"loss": None, "reward": 1.0})


def test_a_line_of_a_newer_version_is_refused_with_the_remedy() -> None:
    line = json.dumps({"kind": "step", "v": VERSION + 1}).encode()
    with pytest.raises(EventFormatError, match=rf"reads up to {VERSION}: read it with the one"):
        decode(line)


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[1]", b'{"v": 2}', b'{"kind": ""}', b'{"kind": "step", "v": 2}']
)
def test_a_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(EventFormatError, match="not an event"):
        decode(line)


def test_a_line_without_a_version_is_of_the_first() -> None:
    at = {"t": 5.0, "node": "a", "source": "worker", "seat": "trainer/0"}
    step = of_fields({**at, "kind": "step", "step": 2, "generation": 1, "rank": 0, "start": 4.0})
    assert isinstance(step, StepDone)
    assert (step.time_s, step.start_s, step.began_s, step.v) == (5.0, 4.0, 4.0, VERSION)
    metric = of_fields({**at, "kind": "metric", "step": 2, "loss": 0.5, "reward": None})
    assert isinstance(metric, MetricsLogged)
    assert (metric.step, metric.values) == (2, {"loss": 0.5, "reward": None})
    old = {"generation": 1, "version": 2, "before": None, "seconds": 0.1, "bytes": 9, "digest": "x"}
    pulled = of_fields({**at, "kind": "weights_pulled", **old, "saved": 4})
    assert isinstance(pulled, WeightsPulled)
    assert pulled.saved_bytes == 4


def test_events_of_a_kind_are_picked_out_in_order() -> None:
    died = DataWorkerDeath(loader="data", how="x", times=1)
    assert of_kind([STEP, died, FencingDone(generation=1), STEP], StepDone) == [STEP, STEP]
