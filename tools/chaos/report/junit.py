"""JUnit's XML of runs, which CI systems show: one suite per run, one case per check. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.etree import ElementTree

from holdfast.tools.chaos.report.run import ReportedRun

ENDED: Final = "the job ended as it should, and left nothing behind"


def to_junit(runs: Iterable[ReportedRun]) -> str:
    """Return the document: a broken check has failed, a check without reports is skipped."""
    root = ElementTree.Element("testsuites", name="holdfast chaos")
    for run in runs:
        _suite(root, run)
    _count(root)
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written.decode() + "\n"


def _suite(root: ElementTree.Element, run: ReportedRun) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=run.label, time=f"{run.seconds:.3f}")
    for name in run.verdict.names:
        case = _case(suite, run, name)
        broken = [_plain(v.message) for v in run.verdict.violations if v.check == name]
        if broken:
            _fail(case, broken, run)
        elif name not in run.verdict.checked:
            ElementTree.SubElement(case, "skipped", message="not told")
    if run.world is not None:
        case = _case(suite, run, ENDED, seconds=run.seconds)
        if run.problems:
            _fail(case, [_plain(problem) for problem in run.problems], run)
    _count(suite)


def _case(
    suite: ElementTree.Element, run: ReportedRun, name: str, *, seconds: float = 0.0
) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"chaos.{run.folder.replace('/', '.')}",
        name=name,
        time=f"{seconds:.3f}",
    )


def _fail(case: ElementTree.Element, messages: list[str], run: ReportedRun) -> None:
    failure = ElementTree.SubElement(case, "failure", message=messages[0])
    failure.text = "\n".join([*messages, *([f"again: {run.replay}"] if run.replay else [])])


def _plain(text: str) -> str:
    """Return a text without the control characters that XML cannot represent."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _count(element: ElementTree.Element) -> None:
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        element.set(name, str(len(list(element.iter(tag)))))
