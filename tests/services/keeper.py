"""A service that several test processes share: the first starts it, the last ends it.

Every user holds a shared lock for as long as it uses the service. A keeper process starts the
service and then waits for an exclusive lock, so the service ends when the last user has ended, by
itself or by a kill. The service's own processes die with their keeper.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Final

START_S: Final = 300.0
_LOOK_S: Final = 0.002
_CANNOT: Final = 3
_PR_SET_PDEATHSIG: Final = 1

Facts = dict[str, Any]
"""The facts that users need about a running service, as JSON."""


class CannotInstall(Exception):
    """This machine does not let us install what the service needs."""


class DidNotStart(Exception):
    """The service was installed and did not come up."""


def required(name: str = "") -> bool:
    """Say whether tests that need a service must run: on CI, or where it was asked for.

    ``HOLDFAST_OPTIONAL_SERVICES`` names those without which a machine is complete.
    """
    if name in os.environ.get("HOLDFAST_OPTIONAL_SERVICES", "").split():
        return False
    return bool(os.environ.get("CI") or os.environ.get("HOLDFAST_REQUIRE_SERVICES"))


@contextlib.contextmanager
def shared(folder: Path, script: Path) -> Iterator[Facts]:
    """Yield the facts of the service that ``script`` keeps in ``folder``; start it if need be.

    Raises ``CannotInstall`` and ``DidNotStart``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "users.lock").open("w") as users:
        with (folder / "starting.lock").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)
            keeper = None
            if (facts := _running(folder)) is None:
                keeper = _launch(folder, script)
                facts = _await(folder, keeper)
        yield facts
    if keeper is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(2)


def keep(folder: Path, service: Callable[[Path], AbstractContextManager[Facts]]) -> None:
    """Run ``service`` on ``folder``'s data until no test uses it any more."""
    facts, data = folder / "facts.json", folder / "data"
    with (folder / "alive.lock").open("w") as alive, (folder / "users.lock").open("w") as users:
        fcntl.flock(alive, fcntl.LOCK_EX)
        facts.unlink(missing_ok=True)
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(mode=0o700)
        try:
            with service(data) as found:
                _publish(facts, found)
                fcntl.flock(users, fcntl.LOCK_EX)
                facts.unlink()
        except CannotInstall as error:
            (folder / "refusal.txt").write_text(str(error))
            sys.exit(_CANNOT)
        finally:
            shutil.rmtree(data, ignore_errors=True)


def words_by_hand(
    about: str,
    service: Callable[[Path], AbstractContextManager[Facts]],
    install: Callable[[], object],
) -> list[str]:
    """Return the words of a user's command; carry out any other order, and exit.

    ``--keep FOLDER`` comes from the tests, ``--install`` from anybody. Another option gets
    ``about``.
    """
    match words := sys.argv[1:]:
        case ["--keep", folder]:
            keep(Path(folder), service)
            sys.exit()
        case ["--install"]:
            install()
            sys.exit()
        case [word, *_] if word.startswith("-"):
            print(about)
            sys.exit(word not in ("-h", "--help"))
    return words


def _publish(path: Path, facts: Facts) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


def _running(folder: Path) -> Facts | None:
    """Return the facts of a service whose keeper lives, once it has published them."""
    path, deadline_s = folder / "facts.json", time.monotonic() + START_S
    with (folder / "alive.lock").open("w") as alive:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(FileNotFoundError):
                    facts: Facts = json.loads(path.read_text())
                    return facts
                time.sleep(0.02)  # another user started it and was killed, or it is ending
            else:
                path.unlink(missing_ok=True)
                return None
    raise DidNotStart(f"not up after {START_S:.0f} s:\n{tail(folder / 'keeper.log')}")


def _launch(folder: Path, script: Path) -> subprocess.Popen[bytes]:
    with (folder / "keeper.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(script), "--keep", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests; the keeper sees them end
        )


def _await(folder: Path, keeper: subprocess.Popen[bytes]) -> Facts:
    """Wait until the keeper publishes the facts or gives up."""
    deadline_s = time.monotonic() + START_S
    facts = folder / "facts.json"
    while not facts.exists():
        if (code := keeper.poll()) is not None:
            if code == _CANNOT:
                raise CannotInstall((folder / "refusal.txt").read_text())
            raise DidNotStart(f"keeper ended with {code}:\n{tail(folder / 'keeper.log')}")
        if time.monotonic() > deadline_s:
            keeper.kill()
            raise DidNotStart(f"not up after {START_S:.0f} s:\n{tail(folder / 'keeper.log')}")
        time.sleep(0.05)
    found: Facts = json.loads(facts.read_text())
    return found


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log."""
    if not path.exists():
        return f"({path.name}: none)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def launch(
    command: Sequence[str], log: IO[bytes], *, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that dies with its parent."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - it calls prctl and nothing else
        start_new_session=True,
    )


def hang(process: subprocess.Popen[bytes]) -> None:
    """Stop a process with its connections open; return once none of its threads runs.

    A thread on another core may go on a moment after the signal, and answer a request.
    """
    process.send_signal(signal.SIGSTOP)
    tasks = Path("/proc", str(process.pid), "task")
    while any(") T " not in (task / "stat").read_text() for task in tasks.iterdir()):
        time.sleep(_LOOK_S)


def end(*processes: subprocess.Popen[bytes]) -> None:
    """Kill processes, stopped ones too, and wait for them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
