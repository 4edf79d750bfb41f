"""Shared memory of our own, which may be filled without harm to others."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.tools.chaos.soak.strokes import FULL_BYTES

_OWN_MEMORY: Final = "HOLDFAST_SOAK_OWN_MEMORY"


def own_shared_memory(argv: Sequence[str]) -> bool:
    """Go on as ``argv`` with shared memory of our own; return whether that could be had.

    Returns only in the process that goes on, or where there is no mount namespace to be had.
    """
    if _OWN_MEMORY in os.environ:
        return os.environ[_OWN_MEMORY] == "yes"
    mount = f"mount -t tmpfs -o size={FULL_BYTES} tmpfs {ARENA_ROOT}"
    for rights in ([], ["--user", "--map-root-user"]):
        unshare = ["unshare", *rights, "--mount", "sh", "-c"]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode
        ):
            continue
        os.environ[_OWN_MEMORY] = "yes"
        os.execvp("unshare", [*unshare, f'{mount} && exec "$@"', "sh", *argv])
    return False
