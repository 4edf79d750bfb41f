"""Environment variables that are lists, of which several families need a part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

LISTS: Final[Mapping[str, str]] = {"PYTHONPATH": os.pathsep, "LD_PRELOAD": " "}
"""Variable → what stands between its parts."""


def before(name: str, part: str) -> str:
    """Return the variable as this process has it, with ``part`` before it."""
    found = os.environ.get(name, "")
    return part + LISTS[name] + found if found else part


def together(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return them as one, the parts of lists in order and each once.

    Of another variable that several have, the last holds.
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
