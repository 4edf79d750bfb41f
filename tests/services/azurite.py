"""A real Azure Blob server for tests: Azurite from npm, one process on loopback.

By hand: ``python tests/services/azurite.py DIR`` installs Azurite if it is missing, starts the
server, prints the environment for clients and runs until Ctrl-C; ``--install`` only installs.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import IO, Final

from keeper import CannotInstall, DidNotStart, Facts, end, launch, tail, words_by_hand
from ports import free_ports

VERSION: Final = "3.37.0"
ACCOUNT: Final = "devstoreaccount1"
KEY: Final = base64.b64encode(b"a key of the tests of Holdfast alone").decode()
CONTAINER: Final = "holdfast"
_READY_S: Final = 60.0
_OLDEST_NODE: Final = 18


def program() -> list[str]:
    """Return the command that starts Azurite, installed before or now. Raises ``CannotInstall``."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        raise CannotInstall("Azurite needs node and npm, which are not on the PATH")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)", said)
    if not found or int(found[1]) < _OLDEST_NODE:
        raise CannotInstall(f"Azurite needs node {_OLDEST_NODE} or newer, here is {said.strip()}")
    kept = _cache() / VERSION
    script = kept / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (kept.parent / "installing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.exists():
            _install(npm, kept)
    return [node, str(script)]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "holdfast" / "azurite"


def _install(npm: str, target: Path) -> None:
    """Install Azurite by npm; visible when it is whole."""
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    folder = tempfile.mkdtemp(dir=target.parent)
    try:
        done = subprocess.run(
            [npm, "install", *options, "--prefix", folder, f"azurite@{VERSION}"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotInstall(f"Azurite {VERSION} cannot be installed:\n{done.stderr[-1000:]}")
        Path(folder).rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the server with its data in ``folder``."""
    options = ("--location", str(folder), "--blobPort", str(port), "--silent")
    return launch(
        [*program(), *options, "--disableTelemetry", "--skipApiVersionCheck"],
        log,
        environment={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}",
        },
    )


def facts_of(port: int) -> Facts:
    """Return what a client needs of a server at ``port``."""
    return {
        "endpoint": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "account": ACCOUNT,
        "key": KEY,
        "container": CONTAINER,
    }


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Facts]:
    """Run the server; yield what a client needs."""
    port = free_ports(1)[0]
    with (folder / "azurite.out").open("ab") as log:
        process = start(folder, port, log)
        try:
            facts = facts_of(port)
            await_container(facts, process, folder / "azurite.out")
            yield facts
        finally:
            end(process)


def await_container(facts: Facts, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers and has its container."""
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            _make_container(facts)
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise DidNotStart(f"{error}\n{tail(log)}") from error
            time.sleep(0.05)


def _make_container(facts: Facts) -> None:
    """Send "Create Container" with a shared key; a container that is there stays."""
    name, headers = facts["container"], {"x-ms-date": formatdate(usegmt=True)}
    headers["x-ms-version"] = "2021-08-06"
    named = "".join(f"{key}:{value}\n" for key, value in headers.items())
    place = f"/{facts['account']}/{facts['account']}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + named + place
    digest = hmac.new(base64.b64decode(facts["key"]), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {facts['account']}:{base64.b64encode(digest).decode()}"
    url = f"{facts['endpoint']}/{name}?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers | {"Content-Length": "0"})
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise


def main() -> None:
    """Keep the service for the tests, or run it by hand."""
    words = words_by_hand(str(__doc__), server, program)
    folder = Path(words[0] if words else tempfile.mkdtemp(prefix="holdfast-azurite-"))
    folder.mkdir(parents=True, exist_ok=True)
    with server(folder) as facts:
        print(f"export AZURE_STORAGE_ENDPOINT={facts['endpoint']}")
        print(f"export AZURE_STORAGE_ACCOUNT_NAME={facts['account']}")
        print(f"export AZURE_STORAGE_ACCOUNT_KEY={facts['key']}")
        print(f"# container {facts['container']}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
