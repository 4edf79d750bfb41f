"""Debian's packages for the services: installed where they are missing and root may do it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping

from keeper import CannotInstall


def missing(programs: Mapping[str, str]) -> list[str]:
    """Return the packages that are not installed; ``programs`` maps each program to its package."""
    return sorted({package for program, package in programs.items() if not shutil.which(program)})


def install(
    programs: Mapping[str, str], *, during: contextlib.AbstractContextManager[None] | None = None
) -> None:
    """Install missing packages with apt-get, within a context. Raises `CannotInstall`."""
    if not (packages := missing(programs)):
        return
    wanted = f"the packages {', '.join(packages)} are not installed and cannot be"
    if not shutil.which("apt-get"):
        raise CannotInstall(f"{wanted}: no apt-get (a Debian or Ubuntu system is needed)")
    if os.geteuid() != 0:
        raise CannotInstall(f"{wanted}: not root; run apt-get install {' '.join(packages)}")
    with during or contextlib.nullcontext():
        if _apt("install", *packages).returncode:
            updated, installed = _apt("update"), _apt("install", *packages)
            if installed.returncode:
                said = (updated.stdout + installed.stdout).strip().splitlines()
                raise CannotInstall(f"{wanted}:\n" + "\n".join(said[-8:]))


def _apt(action: str, *packages: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-y", "-o", "DPkg::Lock::Timeout=300", "--no-install-recommends"]
    return subprocess.run(
        ["apt-get", *options, action, *packages],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
