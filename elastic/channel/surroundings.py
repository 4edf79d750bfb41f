"""A process's rank, world size and master address, as set by torchrun, Slurm or a shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.channel.slurm import SlurmStep
from holdfast.elastic.errors import ConfigError

SIDECAR_ENV: Final = "HOLDFAST_SIDECAR"
"""Environment variable that names the file of the sidecar next to this process."""

_DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """A process's ``rank`` of ``size``, and the ``host:port`` of rank 0.

    ``served``: the launcher serves a store there, so rank 0 need not. ``tied``: the process must
    end when its parent has ended.
    """

    rank: int
    size: int
    master: str
    served: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: check RANK and WORLD_SIZE")


def surroundings(environment: Mapping[str, str]) -> Surroundings:
    """Return this process's rank and world; rank 0 of 1 if no variable says otherwise.

    ``RANK`` and ``WORLD_SIZE`` (torchrun, and most other launchers) take precedence over the
    variables of ``srun``. Raises ``ConfigError`` for a value that is not a number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        host = environment.get("MASTER_ADDR", "localhost")
        return Surroundings(
            rank=_number(environment, "RANK"),
            size=_number(environment, "WORLD_SIZE"),
            master=f"{host}:{environment.get('MASTER_PORT', _DEFAULT_PORT)}",
            served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            tied="TORCHELASTIC_RUN_ID" in environment,
        )
    if step := SlurmStep.of(environment):
        host = environment.get("MASTER_ADDR") or (step.hosts[0] if step.hosts else "localhost")
        port = environment.get("MASTER_PORT", step.port)
        return Surroundings(rank=step.task, size=step.tasks, master=f"{host}:{port}")
    return Surroundings(rank=0, size=1, master="")


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether the script belongs to a sidecar that was started next to it.

    Raises ``ConfigError`` if several processes were started and no sidecar is named: each of them
    would silently train alone.
    """
    if environment.get(SIDECAR_ENV):
        return True
    if (size := surroundings(environment).size) > 1:
        raise ConfigError(
            f"this is one of {size} processes of a launcher, and {SIDECAR_ENV} names no sidecar: "
            'run eval "$(holdfast sidecar start)" on every node first, or start the script with '
            "`holdfast run`"
        )
    return False


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, a number was needed")
    return int(text)
