"""A sidecar started by this process, with a client; used by agents and scripts started by hand."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.launch import start_sidecar
from holdfast.ckpt.transport import RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarPlan:
    """The configuration of a sidecar to start; its messages go to ``run_dir/logs`` if given.

    ``memory_of``, ``host`` and ``lease_fd`` are as in `SidecarConfig`.
    """

    run: str
    node: str
    key: RunKey
    key_file: Path
    run_dir: Path | None = None
    memory_of: str = ""
    host: str = "127.0.0.1"
    lease_fd: int = -1


class NodeSidecar:
    """A running sidecar."""

    def __init__(self, plan: SidecarPlan, *, give_up_fd: int = -1) -> None:
        """Start it and wait until it serves.

        Raises ``PeerError`` if it does not, or if ``give_up_fd`` becomes readable before.
        """
        self._process = start_sidecar(
            run=plan.run,
            node=plan.node,
            key_file=plan.key_file,
            run_dir=plan.run_dir,
            memory_of=plan.memory_of,
            host=plan.host,
            lease_fd=plan.lease_fd,
            give_up_fd=give_up_fd,
        )
        self.address, self.pid = self._process.address, self._process.pid
        self.client = SidecarClient(self.address, plan.key)
        self._stopped_s: float | None = None

    def alive(self) -> bool:
        """Return whether it has not exited. Never blocks."""
        return self._process.process.poll() is None

    def stopped_for_s(self) -> float:
        """Return the time for which a signal has stopped it; 0 while it runs."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        if self.alive() and (status := os.waitid(os.P_PID, self.pid, flags)):
            stopped = status.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)
            self._stopped_s = time.monotonic() if stopped else None
        return 0.0 if self._stopped_s is None else time.monotonic() - self._stopped_s

    def kill(self) -> None:
        """SIGKILL it; its memory stays for the next one."""
        if self.alive():
            self._process.process.kill()

    def release(self) -> None:
        """Release a dead sidecar's resources, after its successor has taken over the memory."""
        self._process.release()
        for stream in (self._process.process.stdin, self._process.process.stdout):
            if stream is not None:
                stream.close()
        self.client.close()

    def stop(self) -> None:
        """End it; its memory is freed as well, unless another process (a launcher) holds it."""
        if self.stopped_for_s() > 0:
            self.kill()  # it would not react to a request
        self.client.close()
        self._process.stop()
