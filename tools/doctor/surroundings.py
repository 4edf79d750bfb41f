"""Judgments of disks, files and addresses. Pure."""

from __future__ import annotations

import shlex
from typing import Final

from holdfast.tools.doctor.facts import AddressFacts, DiskFacts, PathFacts
from holdfast.tools.doctor.findings import Finding, failure, fine, warning
from holdfast.tools.terminal import readable

_KEPT: Final = 2
"""Checkpoints that lie on the disk while the older one is not removed yet."""

_OTHERS_READ, _OTHERS_WRITE = 0o007, 0o022


def disk(facts: DiskFacts) -> Finding:
    """Judge the room and the speed of a disk against checkpoints and their interval."""
    name = f"{facts.purpose} disk"
    if facts.error:
        return failure(
            name,
            f"{facts.place}: {facts.error}",
            why=f"{facts.purpose}s are written there",
            remedy="make room there, change its permissions, or choose another place",
        )
    rate = facts.written_bytes / facts.seconds if facts.seconds else 0.0
    found = f"{facts.place}: {readable(rate)}/s synced, {readable(facts.free_bytes)} free"
    if not facts.size_bytes:
        return fine(name, found)
    found += f"; a {facts.purpose} of this machine has {readable(facts.size_bytes)}"
    if facts.free_bytes < facts.size_bytes:
        return failure(
            name,
            found,
            why="not one has room",
            remedy="make room there or choose another place",
        )
    if facts.free_bytes < _KEPT * facts.size_bytes:
        return warning(
            name,
            found,
            why="the older one is removed only when the newer one is complete: two need room",
            remedy="make room there or choose another place; `holdfast prune` removes old ones",
        )
    took_s = facts.size_bytes / rate if rate else float("inf")
    if not facts.every_s:
        return fine(name, f"{found}, {took_s:.0f} s")
    found += f" and takes {took_s:.0f} s, every {facts.every_s:g} s"
    why = "one that is not written when the next is due delays it"
    remedy = f"an interval of {2 * took_s:.0f} s or more, a faster disk, or more nodes that write"
    if took_s > facts.every_s:
        return failure(name, found, why=why, remedy=remedy)
    if 2 * took_s > facts.every_s:
        return warning(name, found, why=why, remedy=remedy)
    return fine(name, found)


def private(facts: PathFacts) -> Finding:
    """Judge whether a key or a run directory is this user's alone."""
    name, quoted = facts.purpose, shlex.quote(facts.path)
    if not facts.there:
        return fine(name, f"{facts.path}: not there yet; it is made when it is needed")
    if facts.error:
        why = "a job that cannot read it does not start"
        remedy = "change its permissions, or name another one"
        return failure(name, f"{facts.path}: {facts.error}", why=why, remedy=remedy)
    found = f"{facts.path}: mode {facts.mode:04o}"
    if facts.owner != facts.user:
        return failure(
            name,
            f"{found}, of user {facts.owner}; this process runs as user {facts.user}",
            why="its content is trusted, so its owner must be the user who runs the job",
            remedy=f"run as that user, or choose another place, or chown {facts.user} {quoted}",
        )
    if facts.directory and facts.mode & _OTHERS_WRITE:
        return failure(
            name,
            f"{found}, so others can write there",
            why="keys and the coordinator's record in it are trusted",
            remedy=f"look at what it contains, then chmod 700 {quoted}",
        )
    if not facts.directory and facts.mode & _OTHERS_READ:
        return failure(
            name,
            f"{found}, so other users can read it",
            why="the key admits whoever has it",
            remedy=f"chmod o-rwx {quoted}",
        )
    return fine(name, found)


_WHY: Final = {
    "loopback": "the processes of a machine talk to each other there",
    "host": "other machines reach this one at that address",
    "port": "the coordinator is to listen there",
    "reach": "this machine needs it",
}
_REMEDY: Final = {
    "loopback": "ip link set lo up, as root",
    "host": "give an address that this machine has (ip addr), or open it in the firewall",
    "port": "stop the program that listens there, or choose another port",
    "reach": "start what listens there, open the port in the firewall, or correct the address",
}


def address(facts: AddressFacts) -> Finding:
    """Judge a try to listen at an address or to reach it."""
    name = {"port": "port", "reach": "reach"}.get(facts.purpose, f"{facts.purpose} address")
    if facts.error:
        return failure(
            name,
            f"{facts.address}: {facts.error}",
            why=_WHY[facts.purpose],
            remedy=_REMEDY[facts.purpose],
        )
    if facts.purpose == "port":
        return fine(name, f"{facts.address} is free")
    return fine(name, f"{facts.address} answers in {facts.seconds * 1000:.1f} ms")
