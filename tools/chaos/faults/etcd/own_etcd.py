"""An etcd of the run itself, on loopback, for jobs whose coordinator is to be hit."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.scenarios.scenario import COORDINATOR_ENV, ScenarioError
from holdfast.tools.ports import free_ports

_READY_S: Final = 30.0
_POLL_S: Final = 0.02


class OwnEtcd:
    """Members started here, which `close` ends; members restarted later are not its own."""

    def __init__(self, folder: Path, *, size: int) -> None:
        """Start the members and wait until all answer. Raises ``ScenarioError``."""
        program = shutil.which("etcd")
        if program is None:
            raise ScenarioError(
                "faults of the coordinator need an etcd: install one (Debian: etcd-server) so that "
                "it is on the PATH, or name one that runs on this machine in "
                f"{COORDINATOR_ENV}=etcd://127.0.0.1:2379"
            )
        folder.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * size)
        self._clients, self._peers = ports[:size], ports[size:]
        self._log = folder / "etcd.log"
        env = {name: text for name, text in os.environ.items() if not name.startswith("ETCD_")}
        self.processes: list[subprocess.Popen[bytes]] = []
        with self._log.open("ab") as log:
            for number in range(size):
                argv = [program, *self._options(number, folder)]
                self.processes.append(
                    subprocess.Popen(
                        argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        try:
            self._await_health()
        except ScenarioError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address in Holdfast's form."""
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self._clients)

    def close(self) -> None:
        """End the living members."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _options(self, number: int, folder: Path) -> list[str]:
        peers = [f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers)]
        client = f"http://127.0.0.1:{self._clients[number]}"
        peer = peers[number].partition("=")[2]
        return [
            f"--name=m{number}",
            f"--data-dir={folder / f'm{number}'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(peers)}",
            "--logger=zap",
            "--log-outputs=stderr",
            "--log-level=warn",
        ]

    def _await_health(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline_s = time.monotonic() + _READY_S
        for port, process in zip(self._clients, self.processes, strict=True):
            while True:
                url = f"http://127.0.0.1:{port}/health"
                with contextlib.suppress(OSError), opener.open(url, timeout=2.0) as answer:
                    if b'"true"' in answer.read():
                        break
                if process.poll() is not None or time.monotonic() > deadline_s:
                    output = self._log.read_text(errors="replace")[-1000:]
                    raise ScenarioError(f"etcd does not start; see {self._log}:\n{output}")
                time.sleep(_POLL_S)
