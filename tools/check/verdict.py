"""The judgement of a check: what each run showed, as a value and in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from holdfast.elastic.loop.trace.records import LoopEntered, MicrobatchSeen, StateSeen
from holdfast.tools.check.causes import explain, misuse
from holdfast.tools.check.compare import Difference, Reference
from holdfast.tools.check.leaving import left_alone
from holdfast.tools.check.own_state import own_lost
from holdfast.tools.check.traces import RankTrace
from holdfast.tools.check.trials import StageShape
from holdfast.tools.check.variables import CarriedVariables

Kind = Literal["difference", "misuse", "refused", "failed"]


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A property that does not hold: what is wrong ``where``, and what to do about it.

    ``misuse``: wrong whatever the runs show. ``refused``: Holdfast itself refused it. ``failed``:
    the script failed in this run only.
    """

    property: str
    kind: Kind
    where: str
    text: str
    remedy: str = ""
    also: tuple[str, ...] = ()
    step: int | None = None
    microbatch: int | None = None
    what: str = ""
    names: tuple[str, ...] = ()


class CheckedProperty(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was compared, and how long it took."""

    property: str
    where: str
    holds: bool
    seconds: float


class UnfinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that could not be checked, because its time was up: no finding."""

    property: str
    where: str
    text: str
    remedy: str
    seconds: float


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check, with what a bug report begins with."""

    script: str
    versions: Mapping[str, str]
    exact: str | bool | None
    steps: int
    microbatches: int
    checked: Sequence[CheckedProperty]
    findings: Sequence[CheckFinding]
    notes: Sequence[str] = ()
    unfinished: Sequence[UnfinishedRun] = ()

    @property
    def ok(self) -> bool:
        """True when all runs came to their end and found nothing."""
        return not self.findings and not self.unfinished


class Judge:
    """Compares run after run with those before. ``settings`` are those of the first trace."""

    def __init__(self, first: Sequence[RankTrace]) -> None:
        self.entered: LoopEntered = first[0].entered
        self._first = list(first)
        self._reference = Reference(exact=bool(self.entered.exact), by_world=self.by_world)
        self._carried = CarriedVariables()
        self._reference.add(first)
        self._carried.add(first)

    @property
    def stages(self) -> list[StageShape]:
        """The script's loops, as the reference showed them."""
        return [
            StageShape(name=name, phases=phases_of(traces), steps=steps_of(traces))
            for name in dict.fromkeys(trace.entered.stage for trace in self._first)
            if (traces := [trace for trace in self._first if trace.entered.stage == name])
        ]

    @property
    def by_world(self) -> bool:
        """True if the result may depend on the number of ranks: they have state of their own."""
        return self.entered.per_rank and not self.entered.exact

    def misuse(self) -> CheckFinding | None:
        """Return what the script does wrong in the reference itself."""
        if (found := misuse(self._first)) is None:
            return None
        use, said = found
        return CheckFinding(
            property="reference",
            kind="misuse",
            where="",
            text=said.text,
            remedy=said.remedy,
            step=max(use.step, 0),
            microbatch=use.microbatch if use.microbatch >= 0 else None,
            what=use.use,
        )

    def judge(self, traces: Sequence[RankTrace], *, name: str, where: str) -> CheckFinding | None:
        """Return what is wrong with a run, None if it equals those before."""
        self._carried.add(traces)
        found = left_alone(traces) or self._reference.difference(traces)
        found = found or own_lost(traces) or self._carried.lost(traces)
        if found is None:
            self._reference.add(traces)
            return None
        return self._finding(found, traces, name=name, where=where)

    def _finding(
        self, found: Difference, traces: Sequence[RankTrace], *, name: str, where: str
    ) -> CheckFinding:
        said = explain(found, where=where, traces=traces, before=self._first, carried=self._carried)
        moment = found.moment
        return CheckFinding(
            property=name,
            kind="difference",
            where=where,
            text=said.text,
            remedy=said.remedy,
            also=said.also,
            step=moment.step,
            microbatch=None if moment.microbatch < 0 else moment.microbatch,
            what=found.what,
            names=found.names[:20],
        )


def phases_of(traces: Sequence[RankTrace]) -> int:
    """Return the number of updates in a step."""
    seen = [r.phase for trace in traces for r in trace.of(MicrobatchSeen)]
    return 1 + max(seen, default=0)


def steps_of(traces: Sequence[RankTrace]) -> int:
    """Return the number of complete steps, at least one."""
    seen = [r.step + 1 for trace in traces for r in trace.of(StateSeen) if r.after]
    return max(seen, default=1)


def lines(report: CheckReport) -> list[str]:
    """Return the report's last lines for people."""
    kind = "bit for bit" if report.exact else "within the tolerance of a run without exact"
    count = len(report.checked)
    if report.ok:
        return [f"All {count} runs gave the same, {kind}.", *report.notes]
    said = []
    for finding in report.findings:
        opening = finding.kind if finding.kind in ("misuse", "refused") else finding.property
        said.append(f"{opening}: {finding.text}")
        said += [f"  remedy: {finding.remedy}"] if finding.remedy else []
        said += [f"  also: {text}" for text in finding.also[:5]]
    for run in report.unfinished:
        said += [f"not checked: {run.text}", f"  remedy: {run.remedy}"]
    if not report.findings and count:
        said.append(f"The {count} runs that came to their end gave the same, {kind}.")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [*said, *report.notes, versions]
