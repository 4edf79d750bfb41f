"""Judgments of a machine: its memory, its limits, its kernel and its software. Pure."""

from __future__ import annotations

import re
from typing import Final

from holdfast.tools.doctor.facts import UNLIMITED, MachineFacts, PlanFacts
from holdfast.tools.doctor.findings import Finding, failure, fine, warning
from holdfast.tools.terminal import readable

LEAST_FILES: Final = 128
"""Open files without which not even a small job runs."""

_FILES_OF_NODE, _FILES_OF_RANK, _FILES_OF_JOB = 128, 64, 256
_TASKS_OF_NODE, _TASKS_OF_RANK, _TASKS_OF_JOB = 48, 32, 48
_CONTAINER_BYTES: Final = 64 << 20
_LITTLE_BYTES: Final = 1 << 30
_OLDEST_KERNEL, _FILLING_KERNEL = (5, 3), (5, 14)
_SLOW_CLOCK_NS: Final = 1000.0
_SLOW_CLOCKS: Final = frozenset({"acpi_pm", "hpet", "jiffies", "refined-jiffies"})
_LOCKED_BYTES: Final = 64 << 20


def judge_machine(machine: MachineFacts, plan: PlanFacts) -> list[Finding]:
    """Return the findings about a machine on which the plan is to run."""
    return [
        shared_memory(machine, plan),
        budget(plan),
        control_group(machine, plan),
        cores(machine, plan),
        open_files(machine, plan),
        processes(machine, plan),
        locked_memory(machine),
        huge_pages(machine),
        swap(machine),
        kernel(machine),
        clock(machine),
        torch(machine),
        erasure_coding(machine),
        native_copy(machine),
        sandbox(machine),
    ]


def shared_memory(machine: MachineFacts, plan: PlanFacts) -> Finding:
    """Judge the size of shared memory, in which snapshots and parity lie."""
    name, place = "shared memory", machine.shared_place
    need_bytes, lent_bytes = plan.nodes * plan.need_bytes, plan.nodes * plan.lent_bytes
    free_bytes = machine.shared_free_bytes
    found = f"{place}: {readable(free_bytes)} free of {readable(machine.shared_bytes)}"
    why = "snapshots and their parity lie there; what has no room is not protected"
    remedy = f"mount -o remount,size=SIZE {place}; for a container --shm-size, or in Kubernetes "
    remedy += "an emptyDir with medium: Memory there"
    if not machine.shared_bytes:
        return failure(name, f"{place} is not there", why=why, remedy="mount a tmpfs there")
    if need_bytes:
        found += f"; the plan needs {readable(need_bytes)}"
        if need_bytes > free_bytes:
            less = "; or keep fewer snapshots, less parity, or more nodes"
            return failure(name, found, why=why, remedy=remedy + less)
        if need_bytes + lent_bytes > free_bytes:
            why = f"with {readable(lent_bytes)} more, training need not wait for a slow step"
            return warning(name, found, why=why, remedy=remedy)
        return fine(name, found)
    if machine.shared_bytes <= _CONTAINER_BYTES:
        why += "; so little is a container's default"
        return failure(name, found, why=why, remedy=remedy)
    if free_bytes < _LITTLE_BYTES:
        return warning(name, found, why=why, remedy=remedy)
    return fine(name, f"{found} (--state SIZE compares it with a plan)")


def budget(plan: PlanFacts) -> Finding:
    """Judge whether the planned parity exists and fits in the declared memory."""
    name = "parity and budget"
    if plan.refusal:
        why = "no job can have such a plan"
        return failure(name, plan.refusal, why=why, remedy="change --nodes, --nnodes or --parity")
    if not plan.need_bytes:
        return fine(name, "not planned here (--state SIZE, --nnodes, --parity)")
    found = f"a node needs {readable(plan.need_bytes)} with parity {plan.parity}"
    if not plan.budget_bytes:
        return fine(name, f"{found}; no --memory limits it")
    found += f", and may use {readable(plan.budget_bytes)}"
    if plan.need_bytes > plan.budget_bytes:
        return failure(
            name,
            found,
            why="the job would be refused at its first snapshot",
            remedy=f"--memory of {readable(plan.need_bytes)} or more, less --parity, fewer kept "
            "snapshots (--keep), or the state on more ranks",
        )
    if plan.need_bytes + plan.lent_bytes > plan.budget_bytes:
        return warning(
            name,
            found,
            why="no slot can be lent: a step waits while the one before is not protected",
            remedy=f"--memory of {readable(plan.need_bytes + plan.lent_bytes)} or more",
        )
    return fine(name, found)


def control_group(machine: MachineFacts, plan: PlanFacts) -> Finding:
    """Judge the memory that this process's control group, a container's mostly, may use."""
    name = "memory limit"
    if machine.control_bytes == UNLIMITED or machine.control_bytes >= machine.memory_bytes:
        found = f"none; the machine has {readable(machine.memory_bytes)}, "
        found += f"{readable(machine.free_bytes)} available"
        left_bytes = machine.free_bytes
    else:
        left_bytes = machine.control_bytes - machine.control_used_bytes
        found = f"{readable(machine.control_bytes)}, {readable(left_bytes)} left"
    need_bytes = plan.nodes * plan.need_bytes
    wanted_bytes = need_bytes + plan.ranks * plan.rank_bytes
    why = "shared memory counts too: beyond the limit the kernel kills workers or sidecars"
    remedy = "raise the memory of the container or job, or plan with less (--state, --parity)"
    if need_bytes > left_bytes:
        found += f"; snapshots need {readable(need_bytes)}"
        return failure(name, found, why=why, remedy=remedy)
    if wanted_bytes > left_bytes:
        found += f"; snapshots and, without a GPU, the state need {readable(wanted_bytes)}"
        return warning(name, found, why=why, remedy=remedy)
    return fine(name, found)


def cores(machine: MachineFacts, plan: PlanFacts) -> Finding:
    """Judge the cores: workers that share one with a sidecar wait for it."""
    limited = machine.control_cores != UNLIMITED and machine.control_cores < machine.cores
    there = machine.control_cores if limited else float(machine.cores)
    found = f"{there:g} for {plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    if there >= plan.ranks:
        return fine("cores", found)
    return warning(
        "cores",
        found,
        why="ranks that share a core wait for each other, and heartbeats come late",
        remedy="give more cores (--cpus of a container, --cpus-per-task of Slurm), or fewer ranks",
    )


def open_files(machine: MachineFacts, plan: PlanFacts) -> Finding:
    """Judge the limit of open files; Holdfast raises the soft one itself."""
    limit = machine.files.hard
    need = _FILES_OF_JOB + plan.nodes * _FILES_OF_NODE + plan.ranks * _FILES_OF_RANK
    found = f"{_number(limit)} open files at most"
    why = "sockets, shared memory and data loaders take one each"
    remedy = f"ulimit -Hn {max(need, 65536)}, LimitNOFILE= of the service, or --ulimit nofile= of "
    remedy += "the container"
    if limit != UNLIMITED and limit < LEAST_FILES:
        return failure("open files", found, why=why, remedy=remedy)
    if limit != UNLIMITED and limit < need:
        return warning("open files", f"{found}, {need} are safe", why=why, remedy=remedy)
    return fine("open files", found)


def processes(machine: MachineFacts, plan: PlanFacts) -> Finding:
    """Judge the number of processes and threads that may still be started."""
    name = "processes"
    need = _TASKS_OF_JOB + plan.nodes * _TASKS_OF_NODE + plan.ranks * _TASKS_OF_RANK
    rooms = []
    if machine.processes.soft != UNLIMITED and not machine.privileged:
        rooms.append(machine.processes.soft - machine.processes.used)
    if machine.control_processes != UNLIMITED:
        rooms.append(machine.control_processes - machine.processes.used)
    if not rooms:
        return fine(name, "no limit")
    room = max(0, min(rooms))
    found = f"{room} more processes and threads may be started"
    why = "each worker has some dozens of threads; without room for them it does not start"
    remedy = f"ulimit -u {machine.processes.used + 4 * need}, TasksMax= of the service, or "
    remedy += "--pids-limit of the container"
    if room < need:
        return failure(name, f"{found}, the job needs about {need}", why=why, remedy=remedy)
    if room < 2 * need:
        return warning(name, f"{found}, the job needs about {need}", why=why, remedy=remedy)
    return fine(name, found)


def locked_memory(machine: MachineFacts) -> Finding:
    """Judge the limit of locked memory, which only network cards with RDMA need."""
    limit = machine.locked.hard
    found = "no limit" if limit == UNLIMITED else f"{readable(limit)} at most"
    if not machine.rdma or limit == UNLIMITED or limit >= _LOCKED_BYTES:
        return fine("locked memory", found)
    return warning(
        "locked memory",
        found,
        why="this machine has RDMA: NCCL registers its buffers as locked memory",
        remedy="ulimit -Hl unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1",
    )


def huge_pages(machine: MachineFacts) -> Finding:
    """Judge whether shared memory may have huge pages."""
    name = "huge pages"
    if not machine.huge:
        return fine(name, "the kernel does not say")
    if machine.huge not in ("never", "deny"):
        return fine(name, f"on request ({machine.huge})")
    return warning(
        name,
        f"none for shared memory ({machine.huge})",
        why="snapshots and parity are copied more slowly, and their pages take longer to make",
        remedy="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, as root",
    )


def swap(machine: MachineFacts) -> Finding:
    """Judge whether memory is swapped out."""
    used, total = machine.swap_used_bytes, machine.swap_bytes
    if not total:
        return fine("swap", "none")
    found = f"{readable(used)} used of {readable(total)}"
    if used <= total // 10:
        return fine("swap", found)
    return warning(
        "swap",
        found,
        why="snapshots can be swapped out too: copying and restoring then waits for a disk",
        remedy="free memory, or swapoff -a as root",
    )


def kernel(machine: MachineFacts) -> Finding:
    """Judge the version of the kernel."""
    release = tuple(map(int, re.findall(r"\d+", machine.kernel)[:2]))
    found = f"Linux {machine.kernel}"
    if release < _OLDEST_KERNEL:
        return failure(
            "kernel",
            found,
            why="processes are watched by pidfd_open, which came with Linux 5.3",
            remedy="use a machine or an image of a node with Linux 5.14 or newer",
        )
    if release < _FILLING_KERNEL:
        return warning(
            "kernel",
            found,
            why="pages of shared memory cannot be filled ahead (Linux 5.14): the first snapshots "
            "are slower",
            remedy="use Linux 5.14 or newer",
        )
    return fine("kernel", found)


def clock(machine: MachineFacts) -> Finding:
    """Judge the clock that leases and silences are measured by."""
    found = f"{machine.clock or 'unknown source'}, {machine.clock_ns:.0f} ns to read"
    if machine.clock not in _SLOW_CLOCKS and machine.clock_ns < _SLOW_CLOCK_NS:
        return fine("clock", found)
    return warning(
        "clock",
        found,
        why="each step and each message reads the clock; this one asks slow hardware",
        remedy="echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, as "
        "root, or another kind of machine",
    )


def torch(machine: MachineFacts) -> Finding:
    """Judge the version of torch."""
    versions = machine.versions
    if "torch" not in versions:
        return failure(
            "torch",
            "not installed in this environment",
            why="workers import it",
            remedy="install it, or call the doctor of the environment in which training runs",
        )
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if machine.objection:
        why = "Holdfast reaches into torch, and only tested versions are known to come out right"
        return failure("torch", found, why=why, remedy=machine.objection)
    return fine("torch", found)


def erasure_coding(machine: MachineFacts) -> Finding:
    """Judge whether ISA-L can be loaded, which makes checksums and parity."""
    if machine.isal:
        return fine("ISA-L", machine.isal)
    return failure(
        "ISA-L",
        machine.isal_error or "not found",
        why="it makes all checksums and all parity",
        remedy="pip install 'pyeclib>=1.8', or install the system package libisal2",
    )


def native_copy(machine: MachineFacts) -> Finding:
    """Judge whether the compiled copy is there."""
    if machine.copy:
        return fine("compiled copy", "in use")
    compiler = machine.compiler
    remedy = "install Holdfast again: its build compiles it" if compiler else "install a C compiler"
    return warning(
        "compiled copy",
        f"missing; {compiler or 'no C compiler'} is there",
        why="snapshots copy at about half the speed without it",
        remedy=remedy if compiler else f"{remedy}, then Holdfast again: its build compiles it",
    )


def sandbox(machine: MachineFacts) -> Finding:
    """Judge whether the environment processes of RL can have a sandbox."""
    name = "sandbox"
    if not machine.unprotected:
        return fine(name, "environment processes of RL can have one")
    told = "; ".join(f"{each}: {why}" for each, why in machine.unprotected.items())
    return warning(
        name,
        f"environment processes of RL lack protection ({told})",
        why="they reach the network, or write the user's files, or outlive a killed worker if they "
        "hide; a job with sandbox require is refused",
        remedy="allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile that "
        "permits unshare and mount)",
    )


def _number(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit:,}"
