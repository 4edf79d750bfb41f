"""Programs of Debian's packages, unpacked for the tests: nothing is installed, without root."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from keeper import CannotInstall


def unpack(package: str, *, program: str, target: Path) -> None:
    """Fetch a package and take the program ``/usr/bin/PROGRAM`` out of it; visible when whole.

    Raises ``CannotInstall``.
    """
    if not shutil.which("apt-get"):
        raise CannotInstall(
            f"{program} is not on the PATH, and without apt-get it cannot be fetched"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        fetched = _run(folder, "apt-get", "-q", "download", package)
        if fetched.returncode:
            updated = _run(folder, "apt-get", "-q", "update")
            fetched = _run(folder, "apt-get", "-q", "download", package)
            if fetched.returncode:
                said = (updated.stdout + fetched.stdout).strip().splitlines()
                raise CannotInstall(f"{package} cannot be fetched:\n" + "\n".join(said[-8:]))
        (found,) = folder.glob(f"{package}_*.deb")
        _run(folder, "dpkg-deb", "-x", str(found), "unpacked")
        (folder / "unpacked" / "usr" / "bin" / program).rename(target)


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
