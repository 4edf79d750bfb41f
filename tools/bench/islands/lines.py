"""Lines of limited bandwidth: network namespaces around a hub, each with a token bucket both ways.

Nothing is changed outside these namespaces. They end with the processes that keep them.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from holdfast.ckpt.errors import PeerError

_PROGRAMS: Final = ("unshare", "nsenter", "ip", "tc")
_CLONE_NEWNET: Final = 0x40000000
_NETWORK: Final = "10.66.0"
_READY_S: Final = 20.0
_SHAPE: Final = "root tbf rate {mbit}mbit burst {burst}kb latency 300ms"
_LEAST_BURST_KB: Final = 16
_BURST_KB: Final = 1.28
"""Size of the bucket for each Mbit/s: what flows between two ticks of the kernel's clock."""

_T = TypeVar("_T")


class Namespace:
    """A network namespace. Its keeper ends with this process."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], _READY_S)
        said = self._keeper.stdout.readline().decode().strip() if ready else "it does not start"
        if said != "ready":
            self.close()
            raise PeerError(f"no network namespace can be made here: {said}")

    @property
    def pid(self) -> int:
        """The process that keeps it."""
        return self._keeper.pid

    def command(self, *words: str) -> list[str]:
        """Return the argv that runs a command inside."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *words]

    def do(self, *commands: str) -> str:
        """Run commands inside; return what the last one printed."""
        said = ""
        for command in commands:
            done = subprocess.run(
                self.command(*command.split()), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise PeerError(f"`{command}` in a network namespace: {done.stderr.strip()}")
            said = done.stdout
        return said

    def inside(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in a thread that is inside; sockets that it makes stay there."""
        found: list[_T] = []
        failed: list[OSError] = []

        def enter() -> None:
            try:
                with Path(f"/proc/{self.pid}/ns/net").open("rb") as file:
                    if _libc.setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                found.append(work())
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    def close(self) -> None:
        """Let it go; what runs inside must have ended."""
        self._keeper.communicate(timeout=_READY_S)


_libc = ctypes.CDLL(None, use_errno=True)


class Lines:
    """``count`` namespaces, each on a line of ``mbit`` Mbit/s each way to a hub; 0: no limit.

    To be entered as a context. Raises ``PeerError`` if this system does not permit it.
    """

    HUB: Final = f"{_NETWORK}.254"
    """The address of the hub, for all."""

    def __init__(self, count: int, *, mbit: float) -> None:
        self.hub: Namespace
        self.ends: list[Namespace] = []
        self._count, self._mbit = count, mbit
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.hub = self._made(stack)
            self.hub.do(
                "ip link add hub type bridge",
                f"ip addr add {self.HUB}/24 dev hub",
                "ip link set hub up",
            )
            for number in range(self._count):
                self.ends.append(self._made(stack))
                self._plug_in(number)
            self._stack = stack.pop_all()
        return self

    def _made(self, stack: ExitStack) -> Namespace:
        made = Namespace()
        stack.callback(made.close)
        return made

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def address(self, number: int) -> str:
        """Return the address of an end."""
        return f"{_NETWORK}.{number + 1}"

    def device(self, number: int) -> str:
        """Return the name of the network device inside an end."""
        return f"line{number}"

    def _plug_in(self, number: int) -> None:
        end, device, port = self.ends[number], self.device(number), f"port{number}"
        self.hub.do(
            f"ip link add {port} type veth peer name {device} netns {end.pid}",
            f"ip link set {port} master hub",
            f"ip link set {port} up",
        )
        end.do(f"ip addr add {self.address(number)}/24 dev {device}", f"ip link set {device} up")
        if self._mbit:
            burst = max(_LEAST_BURST_KB, round(_BURST_KB * self._mbit))
            shape = _SHAPE.format(mbit=self._mbit, burst=burst)
            self.hub.do(f"tc qdisc add dev {port} {shape}")
            end.do(f"tc qdisc add dev {device} {shape}")

    def listen(self) -> socket.socket:
        """Return a listening socket at the hub."""
        return self.hub.inside(lambda: socket.create_server((self.HUB, 0)))


def why_not(needed: Sequence[str] = _PROGRAMS) -> str:
    """Return why there can be no lines here, "" if there can."""
    if missing := [program for program in needed if shutil.which(program) is None]:
        return f"the program {missing[0]} is not installed (packages iproute2 and util-linux)"
    try:
        with Lines(1, mbit=1):
            return ""
    except (PeerError, OSError) as error:
        return f"network namespaces with shaped lines need root: {error}"
