"""Compile `ckpt/native/_stream.c` when the package is built; a failure is only a warning."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StreamBuildHook(BuildHookInterface[Any]):
    """Adds `_stream.so` to the wheel, which then is a wheel for this platform only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library.

        Without a compiler the wheel is pure Python, and snapshots copy slower.
        """
        source = Path(self.root) / "src/holdfast/ckpt/native/_stream.c"
        library = source.with_suffix(".so")
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            why = getattr(error, "stderr", "") or str(error)
            self.app.display_warning(f"{source.name} was not compiled: {why.strip()}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
