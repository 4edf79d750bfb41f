"""Bit flips in memory that holds snapshots, on disks, and in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.ckpt.memory.arena import arena_path
from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Victim
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

_COMMITS: Final[Mapping[str, str]] = {"manifest.json": "data/*.pack", ".metadata": "*.distcp"}
"""File that commits a checkpoint → its data files beside it: Holdfast's, and torch DCP's."""


def places(nbytes: int, bits: int, pick: float) -> list[tuple[int, int]]:
    """Return (byte, bit) of ``bits`` different bits of a file, determined by ``pick`` alone. Pure.

    A shorter file yields fewer.
    """
    found = random.Random(pick).sample(range(nbytes * 8), min(bits, nbytes * 8))
    return [divmod(place, 8) for place in found]


def flip(path: Path, *, bits: int, pick: float) -> None:
    """Flip bits of a file in place. Raises ``OSError``."""
    with path.open("r+b", buffering=0) as file:
        for at, bit in places(path.stat().st_size, bits, pick):
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))


def _slots(victim: Victim, site: JobAccess) -> list[Path]:
    return _in_memory(victim, site, "*.slot", "*.slot-fixed")


def _rows(victim: Victim, site: JobAccess) -> list[Path]:
    return _in_memory(victim, site, "*.row", "*.row-fixed")


def _in_memory(victim: Victim, site: JobAccess, *patterns: str) -> list[Path]:
    directory = arena_path(site.run, victim.node)
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


def _spilled(victim: Victim, site: JobAccess) -> list[Path]:
    """Return the files that the node spilled, from the folder with the newest file."""
    found = [
        path
        for pattern in ("*.slot", "*.row")
        for path in site.folder.rglob(pattern)
        if path.parent.name == victim.node
    ]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return sorted(path for path in found if newest and path.parent == newest.parent)


def _commits(site: JobAccess) -> list[Path]:
    """Return the file that commits the newest checkpoint below the run's folder."""
    found = [path for name in _COMMITS for path in site.folder.rglob(name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)[-1:]


def _manifest(victim: Victim, site: JobAccess) -> list[Path]:
    return _commits(site)


def _packs(victim: Victim, site: JobAccess) -> list[Path]:
    return sorted(
        path
        for commit in _commits(site)
        for path in commit.parent.glob(_COMMITS[commit.name])
        if path.stat().st_size
    )


_FILES: Final[Mapping[str, Callable[[Victim, JobAccess], list[Path]]]] = {
    "flip-slot": _slots,
    "flip-parity": _rows,
    "flip-spill": _spilled,
    "flip-pack": _packs,
    "flip-manifest": _manifest,
}

KINDS: Final = frozenset(_FILES)


class BitsInjector:
    """Flips bits in one picked file; ``amount`` is their number."""

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Check the amounts."""
        for strike in strikes:
            if strike.amount is not None and strike.amount < 1:
                raise ScenarioError(
                    f"strike {strike.number} ({strike.kind}): amount is {strike.amount:g} bits; "
                    "give 1 or more"
                )
        return {}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> None:
        """Flip the bits now."""
        try:
            paths = _FILES[strike.kind](victim, site)
            if not paths:
                raise MissedError(f"{victim.name}: there is no file that {strike.kind} can hit")
            path = paths[int(strike.pick * len(paths)) % len(paths)]
            flip(path, bits=int(strike.amount or 1), pick=strike.pick)
        except FileNotFoundError as error:
            raise MissedError(f"{victim.name}: {error.filename} was removed meanwhile") from error

    def close(self) -> None:
        """Do nothing: nothing is left to clean up."""
