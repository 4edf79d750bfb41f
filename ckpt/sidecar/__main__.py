"""``python -m holdfast.ckpt.sidecar --config-fd FD``: run a node's sidecar until its lifeline ends.

It prints one line of JSON, ``{"address": "tcp://…"}``, when it serves. SIGTERM, a ``stop`` request,
end-of-file on the lifeline and the parent's death all end it with status 0. ``stop`` removes the
shared memory; the others remove it unless another process (parent, launcher) holds it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from holdfast.ckpt.descriptors import allow_many, read_configuration
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.native.heap import keep_freed
from holdfast.ckpt.sidecar.config import FAREWELL, SidecarConfig
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.ckpt.sidecar.server import Sidecar
from holdfast.ckpt.transport import RunKey

PARENT_CHECK_S = 0.5
KEPT_BYTES = 2 * PART_BYTES
"""The freed memory that is kept for messages: a part that arrives, and the one before it."""

ORPHAN_WAIT_S = 2.0
"""The time in which processes that die together with the parent release the memory."""


def main() -> int:
    """Serve, then clean up; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = read_configuration(
            SidecarConfig, prog="python -m holdfast.ckpt.sidecar", description=main.__doc__
        )
        sidecar = Sidecar(config, RunKey.load(Path(config.key_file)))
    except (CkptError, msgspec.DecodeError, OSError) as error:
        sys.stderr.write(f"sidecar: {error}\n")
        return 2
    allow_many()
    keep_freed(KEPT_BYTES)
    gc.collect()
    gc.freeze()  # objects that exist now stay: the collector need not visit them again
    orphaned = threading.Event()
    try:
        signal.signal(signal.SIGTERM, lambda *_: sidecar.stopped.set())
        threading.Thread(
            target=_watch_lifeline, args=(config.lifeline, sidecar.stopped, orphaned), daemon=True
        ).start()
        if not _announced(sidecar.address):
            orphaned.set()
            sidecar.stopped.set()
        while not sidecar.stopped.wait(PARENT_CHECK_S):
            if config.parent_pid is not None and os.getppid() != config.parent_pid:
                orphaned.set()
                break
        if not orphaned.is_set():
            sidecar.save_newest()
    finally:
        sidecar.leave(patience_s=ORPHAN_WAIT_S if orphaned.is_set() else 0.0)
    return 0


def _announced(address: str) -> bool:
    """Tell the parent the address; return False if it has ended meanwhile."""
    try:
        os.write(sys.stdout.fileno(), msgspec.json.encode({"address": address}) + b"\n")
    except BrokenPipeError:
        return False
    return True


def _watch_lifeline(fd: int, stopped: threading.Event, orphaned: threading.Event) -> None:
    """Set ``stopped`` at the lifeline's end, and before it ``orphaned`` unless a farewell came."""
    text = b""
    while part := os.read(fd, 4096):
        text += part
    if not text.endswith(FAREWELL):
        orphaned.set()
    stopped.set()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # do not wait for threads that wait for peers
