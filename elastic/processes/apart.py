"""The start of a module as a process that outlives the one that starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.elastic.processes.children import Child


def start_apart(module: str, *, name: str, config: bytes, log: Path) -> Child:
    """Start ``python -m MODULE --name NAME --config-fd FD``; its output is appended to ``log``.

    The name is for readers of the process list; the configuration goes by a descriptor, because
    others can see arguments. Raises ``OSError``.
    """
    with os.fdopen(os.memfd_create("holdfast-config"), "w+b") as file:
        file.write(config)
        file.seek(0)
        argv = (sys.executable, "-P", "-m", module, "--name", name)
        return Child.start(
            (*argv, "--config-fd", str(file.fileno())),
            env=os.environ,
            tied=False,
            output=log,
            pass_fds=(file.fileno(),),
        )
