"""The loop of an environment process: it makes its environment, and answers one call at a time."""

from __future__ import annotations

import errno
import os
import resource
from math import ceil
from pathlib import Path
from typing import Final

from holdfast.adapters.rl.environments.base import Environment, Observation, ToolError
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.processes import wire
from holdfast.adapters.rl.environments.registry import EnvironmentConfig, make_environment

_EXHAUSTED_STATUS: Final = 1
_SPARE_BYTES: Final = 1 << 20
_NO_MEMORY: Final = "can't allocate memory"


def play(connection: wire.FrameStream, number: int, config: wire.EnvironmentServerConfig) -> None:
    """Make the environment and answer until the other end is closed; this is process ``number``."""
    spare = bytearray(_SPARE_BYTES)
    try:
        _limit(config.processes)
        environment = _made(connection, number, config)
        while environment is not None and (asked := _next(connection)) is not None:
            _limit_processor(config.processes)
            connection.send(number, _answer(environment, asked))
    except MemoryError:
        del spare  # room for the last words
        _say(connection, number, wire.Exhausted())
        os._exit(_EXHAUSTED_STATUS)


def _made(
    connection: wire.FrameStream, number: int, config: wire.EnvironmentServerConfig
) -> Environment | None:
    chosen = EnvironmentConfig(factory=config.factory, settings=config.settings)
    try:
        environment = make_environment(chosen, seed=config.seed, frozen_policies=None)
    except Exception as error:  # noqa: BLE001 - the worker raises it, by its name
        _require_memory(error)
        _say(connection, number, wire.Faulty(call=None, why=_named(error)))
        return None
    _say(connection, number, wire.EnvironmentMade())
    return environment


def _next(connection: wire.FrameStream) -> wire.Question | None:
    """Wait for a call; None: there will be no more."""
    while True:
        try:
            received = connection.receive()
        except EOFError:
            return None
        for _, message in received:
            return wire.question.decode(message)


def _answer(environment: Environment, asked: wire.Question) -> bytes:
    """Return the message with the reply, or with the reason why there is none."""
    try:
        message = wire.encode(_call(environment, asked))
        if len(message) > wire.MOST_BYTES:
            raise ValueError(f"a reply of {len(message)} bytes, needed: {wire.MOST_BYTES} at most")
    except ToolError as error:
        return wire.encode(wire.ToolFailed(call=asked.call, why=str(error) or "a tool failed"))
    except Exception as error:  # noqa: BLE001 - the worker raises it, by its name
        _require_memory(error)
        return wire.encode(wire.Faulty(call=asked.call, why=f": {_named(error)}"))
    return message


def _call(environment: Environment, asked: wire.Question) -> wire.Said:
    if isinstance(asked, wire.AskPrompt):
        prompt: object = environment.prompt(asked.ordinal)
        if isinstance(prompt, str):
            return wire.Prompted(call=asked.call, prompt=prompt)
        return wire.Faulty(call=asked.call, why=f" returned {prompt!r}, needed: a text")
    found: object = environment.respond(asked.action)
    if isinstance(found, Observation):
        return wire.Replied(call=asked.call, observation=found)
    return wire.Faulty(call=asked.call, why=f" returned {found!r}, needed: an Observation")


def _say(connection: wire.FrameStream, number: int, message: wire.Said) -> None:
    connection.send(number, wire.encode(message))


def _require_memory(error: Exception) -> None:
    """Raise ``MemoryError`` for an error that says there is no memory: the kernel's, or torch's."""
    if isinstance(error, MemoryError):
        raise error
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if refused or (isinstance(error, RuntimeError) and _NO_MEMORY in str(error)):
        raise MemoryError(str(error)) from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _limit(config: ProcessConfig) -> None:
    """Limit this process's memory, and let others have the processor first."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if config.yields:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if (most := config.memory_bytes) is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most += pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_processor(config: ProcessConfig) -> None:
    """Have the kernel kill this process after ``cpu_s`` more seconds of processor."""
    if config.cpu_s is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = ceil(used.ru_utime + used.ru_stime + config.cpu_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
