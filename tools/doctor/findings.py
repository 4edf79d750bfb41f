"""The result of one examination. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """The judgment of a fact; only a ``FAILURE`` makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    ``check`` names it, ``found`` says what there is, ``why`` why that matters, and ``remedy`` what
    helps; both are empty for a verdict of ``OK``.
    """

    check: str
    verdict: Verdict
    found: str
    why: str = ""
    remedy: str = ""


def fine(check: str, found: str) -> Finding:
    """Return a finding about which nothing is to be done."""
    return Finding(check=check, verdict=Verdict.OK, found=found)


def warning(check: str, found: str, *, why: str, remedy: str) -> Finding:
    """Return a finding that costs something but lets a job run."""
    return Finding(check=check, verdict=Verdict.WARNING, found=found, why=why, remedy=remedy)


def failure(check: str, found: str, *, why: str, remedy: str) -> Finding:
    """Return a finding with which a job does not run, or does not keep its promise."""
    return Finding(check=check, verdict=Verdict.FAILURE, found=found, why=why, remedy=remedy)
