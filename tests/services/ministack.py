"""An S3 emulator for tests: ministack from PyPI, one process. It behaves as AWS does today.

It pins botocore, so it is installed into its own folder and never into the environment of the
tests. It checks no signatures.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ceph import client
from keeper import CannotInstall, DidNotStart, Facts, end, keep, launch, tail
from ports import free_ports

VERSION: Final = "1.5.33"
_READY_S: Final = 30.0


def install(site: Path) -> None:
    """Install ministack below ``site``. Raises ``CannotInstall``."""
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f"ministack=={VERSION}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotInstall(f"ministack {VERSION} cannot be installed:\n{done.stderr[-1000:]}")


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Facts]:
    """Run the emulator; yield what a client needs."""
    site, port = folder / "site", free_ports(1)[0]
    install(site)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(site),
        "BIND_HOST": "127.0.0.1",
        "MINISTACK_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "S3_PERSIST": "0",
    }
    with (folder / "ministack.out").open("ab") as log:
        program = [sys.executable, str(site / "bin" / "ministack")]
        process = launch(program, log, environment=environment)
        try:
            facts: Facts = {
                "endpoint": f"http://127.0.0.1:{port}",
                "region": "us-east-1",
                "bucket": "holdfast",
                "access_key": "test",
                "secret_key": "test",
                "config": "",
            }
            _await(facts, process, folder)
            yield facts
        finally:
            end(process)


def _await(facts: Facts, process: subprocess.Popen[bytes], folder: Path) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    s3, deadline_s = client(facts), time.monotonic() + _READY_S
    while True:
        try:
            s3.create_bucket(Bucket=facts["bucket"])
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise DidNotStart(f"{error}\n{tail(folder / 'ministack.out')}") from error
            time.sleep(0.05)


if __name__ == "__main__":
    keep(Path(sys.argv[2]), server)
