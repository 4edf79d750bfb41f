"""An environment that does to its process what the policy's text says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from holdfast.adapters.rl.environments.base import Action, Observation, ToolError

_LONG_S = 1000.0
_MANY_FDS = 64


class Wayward:
    """Misbehaves in the first ``times`` calls of an episode, which it counts in ``folder``."""

    def __init__(
        self, seed: int, folder: str, *, times: int = 99, slow_s: float = 0.0, start: str = ""
    ) -> None:
        self._folder, self._times = Path(folder), times
        time.sleep(slow_s)
        if start:
            self._misbehave(start)

    def prompt(self, ordinal: int) -> str:
        if ordinal == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{ordinal}>"

    def respond(self, action: Action) -> Observation:
        calls = self._folder / f"calls-{action.ordinal}"
        with calls.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(calls.read_text().splitlines()) <= self._times:
            text = self._misbehave(action.text)
        else:
            text = "well"
        return Observation(text=text, state={"turn": action.turn})

    def _misbehave(self, how: str) -> str:
        match how:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(_LONG_S)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(_LONG_S)
            case "spin":
                while True:
                    pass
            case "memory":
                return str(len(bytearray(1 << 30)))
            case "memory later":
                while not (self._folder / "go on").exists():
                    time.sleep(0.01)
                return str(len(bytearray(1 << 28)))
            case "shared memory":
                import mmap

                return str(len(mmap.mmap(-1, 1 << 30)))
            case "garbage":
                for fd in range(3, _MANY_FDS):
                    with contextlib.suppress(OSError):
                        os.write(fd, b"neither head nor tail")
                time.sleep(_LONG_S)
            case "close":
                os.closerange(3, _MANY_FDS)
                time.sleep(_LONG_S)
            case "tool":
                raise ToolError("the tool is out of order")
            case "raise":
                return str(1 / 0)
            case "nothing":
                return None  # type: ignore[return-value]
            case "hide":
                marked = {**os.environ, "MARK": str(self._folder)}
                subprocess.Popen(["sleep", f"{_LONG_S}"], start_new_session=True, env=marked)
                (self._folder / "hidden").touch()
                time.sleep(_LONG_S)
            case "network":
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", 9), timeout=5)
                return " ".join(sorted(name for _, name in socket.if_nameindex()))
            case "write":
                try:
                    (Path(__file__).parent / "written").touch()
                except OSError as error:
                    return str(error.strerror)
                return "written"
            case "temporary":
                with tempfile.NamedTemporaryFile() as file:
                    return str(Path(file.name).parent)
            case "remount":
                done = subprocess.run(
                    ["mount", "-o", "remount,rw", "/"], capture_output=True, check=False
                )
                return str(done.returncode)
            case "keys":
                return " ".join(name for name in os.environ if name.startswith("HOLDFAST_"))
        return how
