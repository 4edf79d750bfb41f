"""The versions of torch that Holdfast is tested with. Any other is refused by name.

Holdfast reaches into torch where no public name does (`holdfast.ckpt.torch_private`), and what
torch does there changes between minor versions, at times without an error: gradients come out
wrong. docs/reference/versions.md has what was run with each.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Final

TESTED: Final = ((2, 13), (2, 14), (2, 15))
"""The minor versions, without a gap; ``pyproject.toml`` allows the same."""

ALLOW_ENV: Final = "HOLDFAST_UNTESTED_TORCH"
"""Set to 1 it lets a version that was never tested through, with a warning."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)(\.\d+)*(\.post\d+)?(\+.*)?")
"""A version that is no development, alpha, beta or candidate one."""

_log = logging.getLogger(__name__)


def requirement() -> str:
    """Return the range of versions, as pip takes it."""
    (first, last) = TESTED[0], TESTED[-1]
    return f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"


def objection(found: str, environment: Mapping[str, str]) -> str:
    """Return why torch of the version ``found`` is not to be used, or nothing.

    Where ``environment`` allows it all the same, that is warned of once.
    """
    release = _RELEASE.fullmatch(found)
    if release and (int(release[1]), int(release[2])) in TESTED:
        return ""
    minors = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    never = f"torch {found} was never tested with Holdfast (torch {minors} were)"
    if environment.get(ALLOW_ENV) == "1":
        _warn_once(f"{never}: its results and the checkpoints saved with it may be wrong")
        return ""
    return (
        f"{never}: install one of those (pip install '{requirement()}'), or set {ALLOW_ENV}=1 to "
        "go on at your own risk"
    )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
