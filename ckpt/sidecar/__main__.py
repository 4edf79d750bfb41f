"""``python -m ckpt.sidecar --config JSON``: run one node's sidecar until its lifeline ends.

Prints one line of JSON, ``{"address": "tcp://…"}``, when it serves. SIGTERM, a ``stop`` request,
end-of-file on the lifeline and the parent's death all remove the shared memory and exit 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from ckpt.errors import CkptError
from ckpt.sidecar.server import Sidecar, SidecarConfig
from ckpt.transport import RunKey

PARENT_CHECK_S = 0.5


def main(argv: list[str] | None = None) -> int:
    """Serve, then clean up; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ckpt.sidecar")
    parser.add_argument("--config", required=True, help="JSON of a SidecarConfig")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = msgspec.json.decode(arguments.config, type=SidecarConfig)
        sidecar = Sidecar(config, RunKey.load(Path(config.key_file)))
    except (CkptError, msgspec.DecodeError, OSError) as error:
        sys.stderr.write(f"sidecar: {error}\n")
        return 2
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for our parent
        signal.signal(signal.SIGTERM, lambda *_: sidecar.stopped.set())
        threading.Thread(
            target=_watch_lifeline, args=(config.lifeline, sidecar.stopped), daemon=True
        ).start()
        sys.stdout.write(msgspec.json.encode({"address": sidecar.address}).decode() + "\n")
        sys.stdout.flush()
        while not sidecar.stopped.wait(PARENT_CHECK_S):
            if config.parent_pid is not None and os.getppid() != config.parent_pid:
                break
    finally:
        sidecar.close(remove=True)
    return 0


def _watch_lifeline(fd: int, stopped: threading.Event) -> None:
    while os.read(fd, 4096):
        pass
    stopped.set()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads that wait for peers are not waited for
