"""The settings of environments in processes of their own."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

import msgspec

from holdfast.ckpt.sizes import parse_bytes

Sandbox = Literal["try", "require", "off"]


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment processes of a rollout worker: up to ``count``, each with one call at a time.

    They are forked from one that has imported the environment's module and those of ``preload``.
    Each makes an environment of its own, within ``start_s`` seconds.

    A process may use ``memory`` (as in ``"512MiB"``; None: no limit) beyond the modules, and a call
    ``cpu_s`` seconds of processor (None: no limit). With ``yields`` they run only when nothing
    else wants the processor.

    ``sandbox`` keeps them from the network (unless ``network``), from other processes, and from
    writing files other than those below the directories ``writable``: ``try`` goes without what
    the kernel does not permit and says so, ``require`` refuses to, ``off`` does not ask for it.
    """

    count: int = 8
    memory: str | None = None
    cpu_s: float | None = None
    start_s: float = 60.0
    sandbox: Sandbox = "try"
    network: bool = False
    writable: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    yields: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}, needed: at least 1")
        if self.cpu_s is not None and self.cpu_s <= 0:
            raise ValueError(f"cpu_s is {self.cpu_s}, needed: above 0, or null")
        if self.start_s <= 0:
            raise ValueError(f"start_s is {self.start_s}, needed: above 0")
        if self.memory is not None:
            parse_bytes(self.memory)
        for each in self.writable:
            if not PurePosixPath(each).is_absolute():
                raise ValueError(f"writable has {each!r}, needed: an absolute path")

    @property
    def isolated(self) -> bool:
        """True if the processes are to have no network."""
        return self.sandbox != "off" and not self.network

    @property
    def memory_bytes(self) -> int | None:
        """The limit of memory in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)
