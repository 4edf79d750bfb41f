"""The report in words: what a bug report begins with."""

from __future__ import annotations

import msgspec

from holdfast.tools.check.verdict import CheckedProperty, CheckFinding, CheckReport, lines

RUN = CheckedProperty(property="ranks", where="with two ranks", holds=True, seconds=3.0)
FINDING = CheckFinding(
    property="ranks",
    kind="difference",
    where="with two ranks",
    text="step 0, microbatch 0: other noise with two ranks",
    remedy="draw from torch's default generator",
    also=("`x` is 1 where it was 2",),
)


def report(
    *findings: CheckFinding, exact: str | None = "float32", notes: tuple[str, ...] = ()
) -> CheckReport:
    return CheckReport(
        script="train.py --lr 1",
        versions={"torch": "2.13.0", "holdfast": "0.1.0"},
        exact=exact,
        steps=6,
        microbatches=4,
        checked=[RUN],
        findings=findings,
        notes=notes,
    )


def test_a_right_loop_is_told_so_with_what_that_means() -> None:
    assert lines(report()) == ["All 1 runs gave the same, bit for bit."]
    assert "tolerance" in lines(report(exact=None))[0]


def test_notes_are_shown_either_way() -> None:
    note = "not with 3 ranks: a step has 2 microbatches"
    assert note in lines(report(notes=(note,)))
    assert note in lines(report(FINDING, notes=(note,)))


def test_a_finding_shows_its_property_its_remedy_and_the_versions() -> None:
    assert lines(report(FINDING)) == [
        "ranks: step 0, microbatch 0: other noise with two ranks",
        "  remedy: draw from torch's default generator",
        "  also: `x` is 1 where it was 2",
        "torch 2.13.0, holdfast 0.1.0",
    ]


def test_a_refusal_is_called_one() -> None:
    refused = msgspec.structs.replace(FINDING, kind="refused", text="run.track: best is a number")
    assert lines(report(refused))[0] == "refused: run.track: best is a number"


def test_a_report_is_json() -> None:
    made = msgspec.json.decode(msgspec.json.encode(report(FINDING)))
    assert made["findings"][0]["kind"] == "difference"
    assert made["versions"]["torch"] == "2.13.0"
