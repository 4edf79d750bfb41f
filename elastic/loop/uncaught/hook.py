"""The hook for errors that end the script of a worker, wherever it raises them.

It tells the agent the error's kind and line, so that a script which fails alike at all ranks is not
started again and again. Of the workers that print to the same place, one prints the traceback. The
hook stays out of the way of one of the user's. This module imports nothing before an error comes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final

_WORKER: Final = "HOLDFAST_WORKER"  # `WORKER_ENV`, whose module is not imported yet


def watch_worker() -> None:
    """Install the hook if an agent started this process."""
    if _WORKER in os.environ and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _uncaught


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_reported = False
    try:
        is_reported = isinstance(error, Exception) and _report(error)
    except Exception as failure:  # noqa: BLE001 - the user's error matters more than ours
        error.add_note(f"Holdfast could not report this error: {failure}")
    if not is_reported:
        sys.__excepthook__(kind, error, trace)


def _report(error: Exception) -> bool:
    """Tell the agent of ``error``; return whether another worker shows its traceback."""
    import socket

    import msgspec

    from holdfast.elastic.channel.base import WorkerConfig
    from holdfast.elastic.loop.uncaught.faults import lasting_fault
    from holdfast.elastic.membership import messages

    config = msgspec.json.decode(os.environ[_WORKER], type=WorkerConfig)
    if config.agent != os.getppid():
        return False  # the process is a worker's child, and only inherited the variable
    message = messages.Fail(
        message=f"{type(error).__name__}: {error}", user_error=False, fault=lasting_fault(error)
    )
    with socket.socket(fileno=os.dup(config.channel_fd)) as channel:
        channel.sendall(messages.encode(message))  # the process may not have connected yet
    return bool(config.traceback_claims) and claimed_before(error, Path(config.traceback_claims))


def claimed_before(error: BaseException, folder: Path) -> bool:
    """Return whether another process claimed to show errors of this kind at these lines.

    Claim it otherwise. The launcher shows the message of each.
    """
    from hashlib import blake2b

    where = [type(error).__name__]
    trace = error.__traceback__
    while trace is not None:
        where.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    name = blake2b("\n".join(where).encode(errors="replace"), digest_size=8).hexdigest()
    try:
        folder.mkdir(0o700, exist_ok=True)
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return folder.is_dir()
    except OSError:
        return False  # better twice than never
    return False
