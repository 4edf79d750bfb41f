"""File descriptors: waiting for any number of them, for a free one, and sending settings by one.

``select.select`` refuses descriptors above 1023, which a coordinator of some hundred nodes reaches.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import msgspec

_ENOUGH: Final = 1 << 16
_AGAIN_S: Final = 0.05

_T = TypeVar("_T")


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until a descriptor can be read, has ended or failed; return those, none in time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(max(0.0, timeout_s) * 1000))]


def allow_many() -> None:
    """Raise the soft limit of open descriptors as far as the hard one permits, up to 65,536.

    Children inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def patiently(action: Callable[[], _T], *, wait_s: float = 30.0) -> _T:
    """Return what ``action`` returns; repeat it while no descriptor is free, up to ``wait_s``.

    A crowd of connections takes them only for seconds. Raises the ``OSError`` of the last try.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() >= until_s:
                raise
        time.sleep(_AGAIN_S)


def are_free(count: int) -> bool:
    """Say whether this process can open ``count`` more descriptors at this moment."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def descriptor_of(config: bytes) -> Iterator[int]:
    """Yield a descriptor from which a child that inherits it reads ``config``.

    Others on the machine can see command lines; so a configuration does not go that way.
    """
    with os.fdopen(os.memfd_create("holdfast-config"), "w+b") as file:
        file.write(config)
        file.seek(0)
        yield file.fileno()


def read_configuration(kind: type[_T], *, prog: str, description: str | None) -> _T:
    """Return the configuration of this process, which its command line names.

    From now on a terminal's Ctrl-C is for the process that started this one. Raises
    ``msgspec.DecodeError``.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--name", help="a name, for a reader of the process list")
    parser.add_argument(
        "--config-fd",
        type=int,
        required=True,
        help=f"a descriptor of the configuration as JSON ({kind.__name__})",
    )
    with os.fdopen(parser.parse_args().config_fd, "rb") as file:
        config = msgspec.json.decode(file.read(), type=kind)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return config
