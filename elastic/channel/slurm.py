"""Reader of the environment variables that Slurm sets for the processes of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.elastic.errors import ConfigError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_HOSTS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """One task of a step that ``srun`` started: its number, the number of tasks, and the hosts.

    ``hosts`` are the step's hosts, in Slurm's order; ``node`` is the index of this task's host.
    """

    job: str
    task: int
    tasks: int
    node: int
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmStep | None:
        """Return the step described by the environment; None outside a step.

        A batch script is not a step: it has the job's variables, but runs once.
        """
        if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
            return None
        listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        return cls(
            job=environment.get("SLURM_JOB_ID", ""),
            task=_number(environment, "SLURM_PROCID"),
            tasks=_number(environment, "SLURM_STEP_NUM_TASKS"),
            node=_number(environment, "SLURM_NODEID"),
            hosts=tuple(expand(listed)),
        )

    @property
    def port(self) -> int:
        """A port that all tasks of this job compute alike, and that other jobs rarely share."""
        digits = "".join(filter(str.isdigit, self.job)) or "0"
        return 20_000 + int(digits) % 10_000


def expand(listed: str) -> Iterator[str]:
    """Yield the hosts of a list such as ``node[01-03,7],login``. Raises ``ConfigError``."""
    count = 0
    for pattern in _split(listed):
        for host in _hosts(pattern, listed):
            count += 1
            if count > _MAX_HOSTS:
                raise ConfigError(f"node list {listed!r} names more than {_MAX_HOSTS} hosts")
            yield host


def _split(listed: str) -> Iterator[str]:
    """Yield the parts between the commas outside brackets."""
    depth, start = 0, 0
    for at, char in enumerate(listed):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            yield listed[start:at]
            start = at + 1
    if depth:
        raise ConfigError(f"node list {listed!r}: a bracket is not closed")
    if listed[start:]:
        yield listed[start:]


def _hosts(pattern: str, listed: str) -> Iterator[str]:
    head, opening, rest = pattern.partition("[")
    if not opening:
        yield pattern
        return
    inner, _, tail = rest.partition("]")
    for part in inner.split(","):
        if (found := _RANGE.fullmatch(part)) is None:
            raise ConfigError(f"node list {listed!r}: {part!r} is neither a number nor a range")
        first, last = found[1], found[2] or found[1]
        for number in range(int(first), int(last) + 1):
            yield from _hosts(f"{head}{number:0{len(first)}d}{tail}", listed)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, a number was needed")
    return int(text)
