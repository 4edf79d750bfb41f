"""Imports of a fork server: without the garbage collector, which runs again afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import gc, sys
from holdfast.elastic.preload.loading import load
load(["probe"], lambda name: None)
assert not sys.modules["probe"].collects
assert gc.isenabled() and gc.get_freeze_count()
"""


def test_no_garbage_is_searched_for_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text("import gc; collects = gc.isenabled()")
    path = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", CODE], env=env, check=True, timeout=60)
