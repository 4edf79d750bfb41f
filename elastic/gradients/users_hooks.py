"""Hooks of the script's on tracked parameters: they run before the run's, and write no sums.

A tensor hook may change a microbatch's gradient; so it runs before the gradient is rounded. A hook
after the accumulation sees the sum of this rank's microbatches so far; so it may only read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from holdfast.ckpt import torch_private
from holdfast.ckpt.state.local_boxes import writes_of
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.wrapped import Parameters


class UsersHooks:
    """Keeps the hooks of tracked parameters in order; looks again when there are others."""

    def __init__(self) -> None:
        self._parameters: Parameters = []
        self._last: list[object] = []

    def begin_pass(self, parameters: Parameters) -> None:
        """Start a pass with these parameters."""
        self._parameters, self._last = parameters, []

    def begin_backward(self) -> None:
        """Arrange the hooks, if some were added since the last call."""
        last = [_last_of(hooks) for hooks in self._hooks()]
        if last == self._last:
            return
        for name, parameter in self._parameters:
            _end_with_ours(torch_private.tensor_hooks_of(parameter))
            added = torch_private.accumulated_hooks_of(parameter)
            for key, hook in (added or {}).items():
                if not _is_of(hook, "holdfast.", "torch."):
                    added[key] = _Reading(name, hook)
            _end_with_ours(added)
        self._last = [_last_of(hooks) for hooks in self._hooks()]

    def _hooks(self) -> list[Any]:
        parameters = [parameter for _, parameter in self._parameters]
        return [
            *map(torch_private.tensor_hooks_of, parameters),
            *map(torch_private.accumulated_hooks_of, parameters),
        ]


class _Reading:
    """A hook after the accumulation of a gradient that it may not change."""

    def __init__(self, name: str, hook: Callable[[torch.Tensor], None]) -> None:
        self._name, self._hook = name, hook

    def __call__(self, parameter: torch.Tensor) -> None:
        before = parameter.grad
        version = None if before is None else writes_of(before)
        self._hook(parameter)
        after = parameter.grad
        if after is not before or (after is not None and writes_of(after) != version):
            raise ConfigError(
                f"a hook that register_post_accumulate_grad_hook made changed the gradient of "
                f"{self._name}, in which the microbatches of this rank are being added up: change "
                "the gradient of each microbatch in a hook by parameter.register_hook, or the mean "
                "after the pass, before run.step"
            )


def _last_of(hooks: Any) -> object:
    return next(reversed(hooks), None) if hooks else None


def _end_with_ours(hooks: Any) -> None:
    """Move the run's own hooks behind all others."""
    keys = list(hooks or ())
    ours = [key for key in keys if _is_ours(hooks[key])]
    if ours and keys[-len(ours) :] != ours:
        for key in ours:
            hooks[key] = hooks.pop(key)


def _is_ours(hook: object) -> bool:
    return not isinstance(hook, _Reading) and _is_of(hook, "holdfast.")


def _is_of(hook: Any, *libraries: str) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(libraries)
