"""Environment variables that hold lists, to which several families of faults add a part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

LISTS: Final[Mapping[str, str]] = {"PYTHONPATH": os.pathsep, "LD_PRELOAD": " "}
"""Variable → separator of its parts."""


def before(name: str, part: str) -> str:
    """Return the variable of this process with ``part`` put before its value."""
    found = os.environ.get(name, "")
    return part + LISTS[name] + found if found else part


def together(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return the environments merged; list variables keep each part once, in order.

    For any other variable the last value wins.
    """
    found: dict[str, str] = {}
    for environment in environments:
        for name, value in environment.items():
            if name in LISTS and name in found:
                parts = [*found[name].split(LISTS[name]), *value.split(LISTS[name])]
                found[name] = LISTS[name].join(dict.fromkeys(parts))
            else:
                found[name] = value
    return found
