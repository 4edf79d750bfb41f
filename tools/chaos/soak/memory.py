"""A private mount of shared memory, which can be filled without harm to others."""

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
    """Re-execute as ``argv`` with a private shared memory; return whether there is one.

    Returns only in the re-executed process, or if no mount namespace is available.
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
