"""The policies of a job as one module, which is tracked, published and pulled as a whole.

So a policy version is one number for all of them, and every version is a consistent cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from torch import nn

ONLY: Final = ""
"""The name of the only policy of a job without ``policies``."""

_Part = TypeVar("_Part")


def prefix_of(name: str) -> str:
    """Return the prefix of a policy's parameters in the module of all; none for the only one."""
    return f"{name}." if name else ""


def joined(policies: Mapping[str, nn.Module]) -> nn.Module:
    """Return all policies as one module: the only one itself, several below their names."""
    return policies[ONLY] if ONLY in policies else nn.ModuleDict(policies)


def state_of(parts: Mapping[str, _Part]) -> _Part | dict[str, _Part]:
    """Return a part of every policy's state as it is tracked: below its name, if it has one."""
    return parts[ONLY] if ONLY in parts else dict(parts)
