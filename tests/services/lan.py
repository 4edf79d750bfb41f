"""Machines on one cable that can be cut in one or both directions, slowed down and made lossy.

Each machine is a network namespace with its own shared memory. Their cable is a thread of the test
that carries every frame from one TAP device to another. It acts like a switch or ``tc netem``, also
on kernels without netem; TCP above it is the kernel's.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFHWADDR = 0x8916, 0x891C, 0x8922, 0x8924
_ETHERNET = 1
_MTU = 9000
_FRAME_BYTES = 1 << 16
_READY_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return why there can be no such machines here; empty where there can."""
    try:
        with Lan(1):
            return ""
    except OSError as error:
        return f"network namespaces with TAP devices are not permitted here: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The faults of the cable: a share of frames is lost (``loss`` 1: all), and frames are late."""

    loss: float = 0.0
    delay_s: float = 0.0


class Machine:
    """A namespace, kept by a process that ends with the test, and its end of the cable."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _KEEP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.tap = -1
        try:
            self._await()
            self._enter(number)
        except OSError:
            self.close()
            raise

    def _await(self) -> None:
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], _READY_S)
        said = self._keeper.stdout.readline().decode().strip() if ready else "it does not start"
        if said != "ready":
            raise OSError(said)

    def _enter(self, number: int) -> None:
        """Make the machine's network, from a thread that goes there and ends."""
        failed: list[OSError] = []

        def enter() -> None:
            try:
                self._plug_in(number)
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def _plug_in(self, number: int) -> None:
        with Path(f"/proc/{self._keeper.pid}/ns/net").open("rb") as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))
        self.tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(self.tap, _TUNSETIFF, struct.pack("16sH22x", b"lan0", _IFF_TAP | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

            def configure(request: int, form: str, *values: object, of: bytes = b"lan0") -> None:
                fcntl.ioctl(control, request, struct.pack("16s" + form, of, *values))

            def inet(address: str) -> tuple[object, ...]:
                return socket.AF_INET, 0, socket.inet_aton(address), bytes(8)

            configure(_SIOCSIFHWADDR, "H14s", _ETHERNET, _mac(number) + bytes(8))
            configure(_SIOCSIFMTU, "i20x", _MTU)
            configure(_SIOCSIFADDR, "HH4s8s8x", *inet(self.address))
            configure(_SIOCSIFNETMASK, "HH4s8s8x", *inet("255.255.255.0"))
            configure(_SIOCSIFFLAGS, "H22x", _IFF_UP)
            configure(_SIOCSIFFLAGS, "H22x", _IFF_UP, of=b"lo")

    def command(self, *words: str) -> list[str]:
        """Return the argv that runs a command on this machine."""
        kept = f"/proc/{self._keeper.pid}/ns"
        return ["nsenter", f"--net={kept}/net", f"--mount={kept}/mnt", *words]

    def close(self) -> None:
        """Let the machine go; whatever runs on it must have ended."""
        if self.tap >= 0:
            os.close(self.tap)
        self._keeper.communicate(timeout=_READY_S)


_KEEP = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"


class Lan:
    """So many machines that reach each other, until somebody interferes."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        self.machines: list[Machine] = []
        self._random = Random(seed)
        self._troubles: dict[tuple[int, int], Trouble] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._carried = 0
        self._stop, self._stopping = os.pipe()
        try:
            for number in range(count):
                self.machines.append(Machine(number))
        except OSError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._carry, name="lan", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self, source: int, target: int) -> None:
        """Lose every frame from one machine to another; those the other way still arrive."""
        self.trouble(source, target, Trouble(loss=1.0))

    def isolate(self, number: int) -> None:
        """Cut a machine off from all others, both ways."""
        for other in range(len(self.machines)):
            if other != number:
                self.cut(number, other)
                self.cut(other, number)

    def trouble(self, source: int, target: int, trouble: Trouble) -> None:
        """Have this happen to frames from one machine to another from now on."""
        self._troubles = {**self._troubles, (source, target): trouble}

    def heal(self) -> None:
        """End all troubles."""
        self._troubles = {}

    def close(self) -> None:
        """Unplug everything."""
        os.write(self._stopping, b".")
        self._thread.join()
        self._release()

    def _release(self) -> None:
        for machine in self.machines:
            machine.close()
        os.close(self._stop)
        os.close(self._stopping)

    def _carry(self) -> None:
        taps = {machine.tap: number for number, machine in enumerate(self.machines)}
        poll = select.poll()
        for fd in (self._stop, *taps):
            poll.register(fd, select.POLLIN)
        while True:
            wait_s = self._late[0][0] - time.monotonic() if self._late else 1.0
            ready = [fd for fd, _ in poll.poll(max(wait_s, 0.0) * 1000)]
            if self._stop in ready:
                return
            for fd in ready:
                self._take(taps[fd])
            self._deliver_late()

    def _take(self, source: int) -> None:
        try:
            frame = os.read(self.machines[source].tap, _FRAME_BYTES)
        except BlockingIOError:
            return
        everyone = range(len(self.machines))
        for target in everyone:
            wanted = frame[:6] == _mac(target) or frame[0] & 1  # or sent to all
            if target != source and wanted:
                self._send(source, target, frame)

    def _send(self, source: int, target: int, frame: bytes) -> None:
        trouble = self._troubles.get((source, target))
        if trouble is None:
            self._deliver(target, frame)
        elif self._random.random() >= trouble.loss:
            self._carried += 1  # keeps the order of those that are due together
            due_s = time.monotonic() + trouble.delay_s
            heapq.heappush(self._late, (due_s, self._carried, target, frame))

    def _deliver_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._late)
            self._deliver(target, frame)

    def _deliver(self, target: int, frame: bytes) -> None:
        try:
            os.write(self.machines[target].tap, frame)
        except OSError:
            return  # its queue is full: lost, as in any network


def _mac(number: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, number + 1))
