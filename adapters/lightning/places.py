"""The root and the step that the path of a Fabric checkpoint means. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from holdfast.ckpt import ArgumentError

_STEP: Final = re.compile(r"(?P<root>.+?)/+step-(?P<step>\d+)/*")
_ENTRY: Final = "step"


def place_to_save(path: str, state: Mapping[str, Any]) -> tuple[str, int]:
    """Return the root and the step: from ``root/step-100``, or from the state's entry ``step``.

    Raises ``ArgumentError`` if neither says the step.
    """
    root, step = place_to_load(path)
    if step is None:
        step = state.get(_ENTRY)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ArgumentError(
                f"fabric.save({path!r}): the step is not known; give {path.rstrip('/')}/step-100, "
                f"or a state with an entry {_ENTRY!r} that is a whole number"
            )
    return root, step


def place_to_load(path: str) -> tuple[str, int | None]:
    """Return the root and the step of ``root/step-100``; no step means the newest one."""
    if (found := _STEP.fullmatch(path)) is not None:
        return found["root"], int(found["step"])
    return path.rstrip("/") or path, None
