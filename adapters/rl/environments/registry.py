"""The registry of environments: built-in ones, and any that can be imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast.adapters.rl.environments.base import NO_POLICIES, Environment, FrozenModel
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError

BUILT_IN = {
    "two_turns": "holdfast.adapters.rl.environments.two_turns:make",
    "reviewed": "holdfast.adapters.rl.environments.reviewed:make",
    "slow_tool": "holdfast.adapters.rl.environments.slow_tool:SlowTool",
    "http": "holdfast.adapters.rl.environments.remote.plain:HttpEnvironment",
    "mcp": "holdfast.adapters.rl.environments.remote.mcp:McpEnvironment",
}
"""Short names of the built-in environments."""

_POLICIES = "frozen_policies"


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment and how it is called.

    ``factory`` is "package.module:name" or a name of `BUILT_IN`; it is called with ``settings`` and
    ``seed`` (the job's ``task_seed``) by keyword and returns an `Environment`. If it takes the
    keyword ``frozen_policies``, it gets those of the job and its classifiers, by name
    (`FrozenModel`). Each rollout worker has up to ``threads`` calls in progress and lets up to
    ``waiting`` episodes wait beside those in its slots. A call may take ``limit_s`` seconds; one
    that fails or takes longer is made ``attempts`` times in all, then the episode ends with reward
    0 and the reason.

    With ``processes`` the environment runs in processes of its own in place of the threads.
    """

    factory: str
    settings: dict[str, Json] = {}
    threads: int = 8
    waiting: int = 64
    limit_s: float = 60.0
    attempts: int = 2
    processes: ProcessConfig | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, needed: at least 1")
        if self.waiting < 0:
            raise ValueError(f"waiting is {self.waiting}, needed: 0 or more")
        if self.limit_s <= 0:
            raise ValueError(f"limit_s is {self.limit_s}, needed: above 0")
        if self.processes is not None and self.processes.isolated and self._asks_network():
            raise ValueError(
                f"environment {self.factory!r} asks a service, and its processes have no network: "
                "set processes.network to true"
            )

    def _asks_network(self) -> bool:
        return self.factory == "http" or (self.factory == "mcp" and "url" in self.settings)


def make_environment(
    config: EnvironmentConfig,
    *,
    seed: int,
    frozen_policies: Mapping[str, FrozenModel] | None = NO_POLICIES,
) -> Environment:
    """Import and make the environment, which may ask ``frozen_policies``; None: they are elsewhere.

    Raises ``ConfigError`` with the reason.
    """
    factory = _imported(config.factory)
    settings = {"seed": seed, **config.settings}
    try:
        if _POLICIES in inspect.signature(factory).parameters and _POLICIES not in settings:
            if frozen_policies is None:
                raise ConfigError(
                    f"environment {config.factory!r} asks for frozen policies, which are in the "
                    "rollout worker: set environment.processes to null, so that it runs there"
                )
            settings[_POLICIES] = frozen_policies
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        raise ConfigError(
            f"environment {config.factory!r} does not take the settings {sorted(settings)}: {error}"
        ) from error
    try:
        made = factory(**settings)
    except ValueError as error:
        raise ConfigError(f"environment {config.factory!r}: {error}") from error
    if not isinstance(made, Environment):
        raise ConfigError(
            f"environment {config.factory!r} made {made!r}, needed: an object with the methods "
            "prompt and respond (see holdfast.adapters.rl.environments.base.Environment)"
        )
    return made


def module_of(path: str) -> str:
    """Return the module of a factory's path, or of a built-in environment."""
    return BUILT_IN.get(path, path).partition(":")[0]


def _imported(path: str) -> Callable[..., Any]:
    module, colon, name = BUILT_IN.get(path, path).partition(":")
    if not (module and colon and name):
        raise ConfigError(
            f"environment {path!r} is neither 'package.module:name' nor one of {[*BUILT_IN]}"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"environment {path!r} cannot be imported: {type(error).__name__}: {error}; modules "
            "are looked for where Python does: the working directory, PYTHONPATH and what is "
            "installed"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"environment {path!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"environment {path!r} is {found!r}, needed: a callable")
    factory: Callable[..., Any] = found
    return factory
