"""Packages of other projects, without which tests of adapters are skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

ALWAYS = "HOLDFAST_ADAPTERS"


def needs(*packages: str, optional: bool = False) -> pytest.MarkDecorator:
    """Return a mark that skips without ``packages``; ``optional`` ones are never in CI.

    With ``HOLDFAST_ADAPTERS=1`` nothing is skipped, so what is missing is an error.
    """
    missing = [name for name in packages if find_spec(name) is None]
    asked = os.environ.get(ALWAYS) == "1"
    reason = f"set {ALWAYS}=1 to run it: it needs {', '.join(packages)}"
    if missing:
        reason += f", of which {', '.join(missing)} is not installed"
    return pytest.mark.skipif(not asked and (optional or bool(missing)), reason=reason)
