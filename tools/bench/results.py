"""The results of a run so far, on disk after each section."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from pathlib import Path
from typing import Any, Final

from holdfast.ckpt.native.streaming import kernel
from holdfast.tools import environment
from holdfast.tools.bench.sections import Result
from holdfast.tools.printing import json_text

STDOUT: Final = "-"
_PACKAGES: Final = (
    "holdfast",
    "torch",
    "numpy",
    "zarr",
    "numcodecs",
    "pyeclib",
    "safetensors",
    "boto3",
    "obstore",
    "torchft",
)


class BenchResults:
    """The figures of the sections that have ended, and the file that has them.

    ``target`` is a path, ``-`` for standard output, or None for neither. The file is replaced after
    each section, so a run that is stopped keeps the sections before; ``left`` names the others.
    """

    def __init__(self, target: str | None, *, sections: list[str], size_mib: int, repeat: int):
        self._target = target
        self._found: dict[str, Any] = {
            "figures": [],
            "sections": {},
            "left": list(sections),
            "machine": machine(),
            "versions": environment.software(_PACKAGES),
            "megabytes": size_mib,
            "repeat": repeat,
        }

    def add(self, section: str, results: list[Result], *, seconds: float) -> None:
        """Add a section that has ended, with the time it took."""
        self._found["figures"] += [each for result in results for each in result.figures()]
        self._found["sections"][section] = {
            "seconds": round(seconds, 3),
            "load_average": round(os.getloadavg()[0], 2),
        }
        self._found["left"].remove(section)
        if self._target not in (None, STDOUT):
            self._replace(Path(str(self._target)))

    def finish(self) -> None:
        """Write to standard output, where that is wanted, once the run is over or stopped."""
        if self._target == STDOUT and self._found["sections"]:
            sys.stdout.write(json_text(self._found) + "\n")

    def _replace(self, path: Path) -> None:
        """Replace the file atomically; what is no file, such as a pipe, is written to."""
        text = json_text(self._found) + "\n"
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            draft.write_text(text)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    """Return the machine as JSON-typed values."""
    return {
        "processor": environment.processor(),
        "features": environment.processor_features(),
        "cores": environment.cores(),
        "memory_bytes": environment.memory_bytes(),
        "kernel": platform.release(),
        "system": platform.platform(),
        "compiled_copy": kernel() is not None,
        "load_average": round(os.getloadavg()[0], 2),
    }
