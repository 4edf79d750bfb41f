"""The roots of checkpoints of a traced run, apart from those of the script."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.checkpoints.redirects import redirect
from holdfast.elastic.loop.trace.records import TraceSettings

_DIGITS: Final = 12
_SHOWN: Final = 40


def keep_apart(root: str, order: str) -> None:
    """Let another root stand for a loop's ``root`` if ``order``, the JSON of the settings, says so.

    It is the same in all processes of the run, and another for each root.
    """
    settings = msgspec.json.decode(order, type=TraceSettings)
    if settings.roots:
        shown = re.sub(r"\W+", "-", root)[-_SHOWN:].strip("-")
        name = f"{shown}-{sha256(root.encode()).hexdigest()[:_DIGITS]}"
        redirect(root, to=str(Path(settings.roots, name)))
