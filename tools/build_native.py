"""Compile the C sources when the package is built; a failure is only a warning."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES: Final = ("ckpt/native/_stream.c", "elastic/gradients/native/_grid.c")
"""The C sources; each is compiled into a library beside it."""


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the compiled libraries to the wheel, which then is a wheel for this platform only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries.

        Without a compiler the wheel is pure Python: snapshots and exact sums are slower.
        """
        package = Path(self.root) / "src/holdfast"
        compiled = [self._compiled(package / each) for each in SOURCES]
        if not all(compiled):
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def _compiled(self, source: Path) -> bool:
        library = source.with_suffix(".so")
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            why = getattr(error, "stderr", "") or str(error)
            self.app.display_warning(f"{source.name} was not compiled: {why.strip()}")
            return False
        return True
