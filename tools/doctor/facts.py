"""The facts that the doctor judges, as values; -1 is a number without a limit. Pure."""

from __future__ import annotations

import msgspec

UNLIMITED = -1


class ProcessLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of this process, as ``ulimit`` has it; ``used`` is what the user has of it now."""

    soft: int
    hard: int
    used: int = 0


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that the doctor runs on, as far as this process may use it.

    ``shared_bytes`` is the size of shared memory, 0 if there is none. ``control_bytes`` and
    ``control_cores`` are the limits of the control group. ``huge`` is the kernel's mode of huge
    pages for shared memory ("" if unknown). ``isal`` is the version of ISA-L, or ``isal_error``
    says why there is none. ``copy`` says if the compiled copy is in use. ``objection`` is the
    reason why this torch is not to be used. ``clock`` is the kernel's clock source, and
    ``clock_ns`` the time that reading it takes. ``unprotected`` says which protection the sandbox
    of environment processes lacks here, with the reasons.
    """

    kernel: str
    cores: int
    memory_bytes: int
    free_bytes: int
    shared_place: str
    shared_bytes: int
    shared_free_bytes: int
    files: ProcessLimit
    processes: ProcessLimit
    locked: ProcessLimit
    rdma: bool = False
    privileged: bool = False
    huge: str = ""
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    control_bytes: int = UNLIMITED
    control_used_bytes: int = 0
    control_cores: float = UNLIMITED
    control_processes: int = UNLIMITED
    isal: str = ""
    isal_error: str = ""
    copy: bool = True
    compiler: str = ""
    versions: dict[str, str] = {}
    objection: str = ""
    clock: str = ""
    clock_ns: float = 0.0
    unprotected: dict[str, str] = {}


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The job that is planned: the part of it on this machine, and the memory of a node.

    ``rank_bytes`` is the tracked state of the largest rank, 0 if it is not known. ``nodes`` of the
    job's nodes, each with ``ranks_per_node`` ranks, are on this machine. ``need_bytes`` and
    ``lent_bytes`` are those of a node, as `holdfast.memory_need` has them; ``refusal`` is its
    reason why there can be no such job. ``budget_bytes`` is ``--memory``, 0 for none.
    """

    rank_bytes: int = 0
    nodes: int = 1
    ranks_per_node: int = 1
    parity: str = "1"
    need_bytes: int = 0
    lent_bytes: int = 0
    refusal: str = ""
    budget_bytes: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks on this machine."""
        return self.nodes * self.ranks_per_node


class DiskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A place for checkpoints or snapshots: ``written_bytes`` took ``seconds``, synced.

    ``size_bytes`` is a checkpoint's part of this machine (0: unknown), ``every_s`` the interval.
    """

    purpose: str
    place: str
    free_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    size_bytes: int = 0
    every_s: float = 0.0


class PathFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A file or directory that must be private; ``mode`` are its permission bits."""

    purpose: str
    path: str
    directory: bool = False
    there: bool = True
    mode: int = 0
    owner: int = 0
    user: int = 0
    error: str = ""


class AddressFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A try to listen at an address of this machine, or to reach one of another.

    ``purpose`` is ``loopback``, ``host``, ``port`` or ``reach``; ``error`` is "" if it went well.
    """

    purpose: str
    address: str
    seconds: float = 0.0
    error: str = ""


class JobNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a running job; ``error`` is the reason why its sidecar does not answer.

    ``skew_s`` is its wall clock minus this machine's, known to ``unsure_s``; None if it does not
    tell. ``mode``, ``need_bytes``, ``held_bytes`` and ``budget_bytes`` are of its snapshots.
    """

    node: str
    error: str = ""
    troubles: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    skew_s: float | None = None
    unsure_s: float = 0.0
    mode: str = ""
    need_bytes: int = 0
    held_bytes: int = 0
    budget_bytes: int = 0
    shared_free_bytes: int = UNLIMITED
