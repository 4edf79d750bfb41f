"""Real torchrun agents on this machine, as nodes of one job, with the output of their workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from ports import free_ports

DEADLINE_S = 180.0
_ENTRY_POINT = (
    "[torchrun.handlers]\nholdfast = holdfast.elastic.rendezvous.handler:torchrun_handler\n"
)


class Torchruns:
    """Agents that meet through the holdfast rendezvous; workers write JSON lines to one file."""

    def __init__(self, directory: Path, script: Path) -> None:
        self.directory, self._script = directory, script
        self.log, self.end = directory / "log.jsonl", directory / "end"
        self._endpoint = f"localhost:{free_ports(1)[0]}"
        self._agents: list[subprocess.Popen[bytes]] = []
        site = directory / "site" / "rendezvous-0.dist-info"
        site.mkdir(parents=True)
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: rendezvous\nVersion: 0\n")
        (site / "entry_points.txt").write_text(_ENTRY_POINT)

    def start(self, *options: str, conf: str = "", sidecar: Path | None = None) -> Any:
        """Start one more agent with options of torchrun, beside the sidecar of that file."""
        settings = f"lease_ttl=4,key_file={self.directory / 'key.json'}{conf and ','}{conf}"
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--rdzv-backend=holdfast", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=job"),
            *(f"--rdzv-conf={settings}", *options, str(self._script)),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": str(self.directory / "site"),
            "HOLDFAST_TEST_LOG": str(self.log),
            "HOLDFAST_TEST_END": str(self.end),
            "OMP_NUM_THREADS": "1",
            **({"HOLDFAST_SIDECAR": str(sidecar)} if sidecar else {}),
        }
        with (self.directory / f"agent{len(self._agents)}.log").open("wb") as output:
            agent = subprocess.Popen(
                argv, env=env, stdout=output, stderr=output, start_new_session=True
            )
        self._agents.append(agent)
        return agent

    def lines(self) -> list[dict[str, Any]]:
        """Return what the workers wrote so far."""
        if not self.log.exists():
            return []
        return [msgspec.json.decode(line) for line in self.log.read_bytes().splitlines()]

    def await_lines(
        self, wanted: Callable[[dict[str, Any]], bool], *, count: int, after: int = 0
    ) -> list[dict[str, Any]]:
        """Return the first ``count`` lines from number ``after`` on that are wanted."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            found = [line for line in self.lines()[after:] if wanted(line)]
            if len(found) >= count:
                return found[:count]
            time.sleep(0.02)
        raise AssertionError(f"wanted lines did not come\n{self.lines()}\n{self.output()}")

    def output(self) -> str:
        """Return the ends of what the agents and workers said."""
        logs = sorted(self.directory.glob("agent*.log"))
        return "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def finish(self, *agents: Any) -> None:
        """Have the workers end, and wait until the agents ended well."""
        self.end.touch()
        for agent in agents:
            assert agent.wait(DEADLINE_S) == 0, self.output()

    def close(self) -> None:
        """End whatever is left; a worker without its agent ends by itself."""
        self.end.touch()
        for agent in self._agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(DEADLINE_S)


@contextmanager
def torchruns(directory: Path, script: Path) -> Iterator[Torchruns]:
    """Give a job's agents; all of them have ended at the end of the block."""
    found = Torchruns(directory, script)
    try:
        yield found
    finally:
        found.close()
