"""Distributions built from a copy of this checkout, and environments to install them into.

An environment has no pip and no dependencies of its own: a ``.pth`` file names the folders of the
running interpreter's packages. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tree import ROOT

DEADLINE_S: Final = 240.0
BORROWED: Final = "borrowed.pth"
"""The file in an environment's site-packages that names the dependencies' folders."""

_PIP: Final = ("install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-compile")


def call(
    *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, away from this checkout; it ends with ``status``."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PIP_", "HOLDFAST_", "GIT_"))
    }
    clean |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    clean |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def clone(folder: Path) -> Path:
    """Copy the files that git tracks to ``folder``, and commit them in a repository there.

    Files that are compiled, cached or not yet added are left out, as in a fresh clone.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    listed = call("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists() or source.is_symlink():  # else it is deleted here and not yet committed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    who = (
        "-c",
        "user.name=tests",
        "-c",
        "user.email=tests@localhost",
        "-c",
        "commit.gpgsign=false",
    )
    call("git", "init", "--quiet", cwd=folder)
    call("git", "add", "--all", "--force", cwd=folder)
    call("git", *who, "commit", "--quiet", "--message", "all of it", cwd=folder)
    return folder


def build(source: Path, into: Path, *targets: str) -> list[Path]:
    """Build ``targets`` (sdist, wheel) of the project in ``source``, in that order."""
    for target in targets:
        call(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into, cwd=source)
    return [next(into.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[each])) for each in targets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment with Holdfast, and a folder of the user's own beside it."""

    folder: Path
    home: Path

    @property
    def site(self) -> Path:
        """Its site-packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        status: int = 0,
    ) -> str:
        """Run its interpreter with ``words``, in the user's folder; return the output."""
        return call(self.python, *words, cwd=cwd or self.home, env=env, status=status).stdout

    def holdfast(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Run its `holdfast` command; return the output."""
        return call(self.folder / "bin" / "holdfast", *words, cwd=cwd or self.home).stdout


def environment(folder: Path, *requirement: str | Path) -> Environment:
    """Make an environment and have pip install what ``requirement`` names, offline."""
    made = Environment(folder=folder / "env", home=folder / "home")
    made.home.mkdir(parents=True)
    venv.create(made.folder, with_pip=False, symlinks=True)
    made.site.joinpath(BORROWED).write_text("".join(f"{each}\n" for each in _dependencies()))
    call(sys.executable, "-m", "pip", "--python", made.python, *_PIP, *requirement, cwd=made.home)
    return made


def _dependencies() -> Sequence[str]:
    """Return the folders of installed packages; a ``.pth`` in them is not looked at again."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
