"""vLLM servers of this process: started, awaited, killed with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.elastic.errors import JobFailedError
from holdfast.tools.vllm.llama import LIMITS
from holdfast.tools.vllm.program import READY, vllm_command, vllm_variables

SLOTS: Final = 4
START_S: Final = 1200.0

_POLL_S: Final = 0.2
_TOLD: Final = 3000


@dataclass(frozen=True, kw_only=True)
class VLLMServers:
    """Starts servers of ``model`` with ``program``; their logs lie in ``folder``.

    They have the variables ``env``; None: those of this process. By default they read weights below
    `root`.
    """

    program: str
    folder: Path
    model: Path
    env: Mapping[str, str] | None = None

    @property
    def root(self) -> Path:
        """The root of checkpoints from which the servers read weights."""
        return self.folder / "weights"

    def start(self, port: int, **place: str) -> subprocess.Popen[bytes]:
        """Start a server, which reads weights at a place; it is not ready yet."""
        place = place or {"checkpoints": str(self.root)}
        with self.log(port).open("ab") as log:
            return subprocess.Popen(
                vllm_command(
                    self.program, self.model, context=LIMITS.context, place=place, port=str(port)
                ),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._env(),
                start_new_session=True,
            )

    def log(self, port: int) -> Path:
        """Return the file with a server's output."""
        return self.folder / f"{port}.log"

    def wait(self, port: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a server answers. Raises ``JobFailedError`` with its output if it ends."""
        import httpx2

        with httpx2.Client(timeout=START_S, trust_env=False) as client:
            while True:
                with suppress(httpx2.HTTPError):
                    if client.get(f"{url_of(port)}{READY}").status_code == 200:
                        return
                if process.poll() is not None:
                    said = self.log(port).read_text(errors="replace")[-_TOLD:]
                    raise JobFailedError(f"vLLM ended at its start: {said}")
                threading.Event().wait(_POLL_S)

    @contextmanager
    def serving(self, *ports: int, **place: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Run servers while the body lasts."""
        started: list[subprocess.Popen[bytes]] = []
        try:
            started += [self.start(port, **place) for port in ports]
            for port, process in zip(ports, started, strict=True):
                self.wait(port, process)
            yield started
        finally:
            for process in started:
                kill(process)

    def _env(self) -> dict[str, str]:
        if self.env is not None:
            return dict(self.env)
        return {**os.environ, **vllm_variables(cuda=torch.cuda.is_available())}


def url_of(port: int) -> str:
    """Return the address of a server."""
    return f"http://127.0.0.1:{port}"


def engine_of(
    port: int,
    folder: WeightFolder,
    *,
    pinned: bool = True,
    silence_s: float = 60.0,
    event_tokens: int = 1,
) -> VLLMServer:
    """Return the engine of a server."""
    return VLLMServer(
        url=url_of(port),
        limits=LIMITS,
        capacity=SLOTS,
        weights=folder,
        pinned=pinned,
        silence_s=silence_s,
        event_tokens=event_tokens,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all of a server's processes."""
    tell(process, signal.SIGKILL)
    process.wait()


def tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all of a server's processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
