"""The start of a job's environment: on threads, or in processes of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from holdfast.adapters.rl.environments.base import (
    NO_POLICIES,
    Environment,
    EnvironmentCalls,
    FrozenModel,
)
from holdfast.adapters.rl.environments.calls import ThreadedCalls
from holdfast.adapters.rl.environments.processes.calls import ProcessCalls, ProcessEnvironment
from holdfast.adapters.rl.environments.processes.pool import ProcessPool
from holdfast.adapters.rl.environments.registry import EnvironmentConfig, make_environment
from holdfast.adapters.rl.environments.waits import Waits, unheard
from holdfast.elastic.events import EnvironmentUnprotected, Event

_log = logging.getLogger(__name__)


def start_calls(
    chosen: EnvironmentConfig,
    *,
    seed: int,
    owner: str,
    environment: Environment | None = None,
    frozen_policies: Mapping[str, FrozenModel] = NO_POLICIES,
    emit: Callable[[Event], None] = unheard,
) -> EnvironmentCalls:
    """Return the calls of an environment, on the threads or in the processes that it asks for.

    ``environment`` is the one that threads call, if it is made already; ``owner`` names this
    process for a reader of the process list. Only on threads it may ask ``frozen_policies``. Raises
    ``ConfigError`` if it cannot be made.
    """
    waits = Waits(emit)
    if chosen.processes is not None:
        pool = ProcessPool(chosen, seed=seed, owner=owner)
        _tell(pool, emit)
        return ProcessCalls(pool, chosen, waits=waits)
    return ThreadedCalls(
        environment or make_environment(chosen, seed=seed, frozen_policies=frozen_policies),
        threads=chosen.threads,
        limit_s=chosen.limit_s,
        attempts=chosen.attempts,
        waits=waits,
    )


def start_environment(
    chosen: EnvironmentConfig,
    *,
    seed: int,
    owner: str,
    frozen_policies: Mapping[str, FrozenModel] = NO_POLICIES,
) -> Environment:
    """Return the environment, in one process of its own if it asks for processes.

    Raises ``ConfigError`` if it cannot be made.
    """
    if chosen.processes is None:
        return make_environment(chosen, seed=seed, frozen_policies=frozen_policies)
    alone = msgspec.structs.replace(chosen.processes, count=1)
    chosen = msgspec.structs.replace(chosen, processes=alone)
    return ProcessEnvironment(ProcessPool(chosen, seed=seed, owner=owner), chosen)


def _tell(pool: ProcessPool, emit: Callable[[Event], None]) -> None:
    """Record the protection that the environment's processes lack."""
    if not pool.missing:
        return
    why = "; ".join(f"{each}: {reason}" for each, reason in pool.missing.items())
    _log.warning("the environment's processes run without a part of their sandbox: %s", why)
    emit(EnvironmentUnprotected(lacking=tuple(pool.missing), why=why))
