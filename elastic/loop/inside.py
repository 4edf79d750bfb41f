"""The microbatch that is under way, and the refusal of the user's collectives inside it.

Ranks run different numbers of microbatches, and how many depends on the world. So a collective over
data-parallel ranks inside a microbatch has another result at every world size, and waits forever
where the shares are uneven. Along the other axes of the mesh all ranks run the same microbatches.
Holdfast's own collectives and those of FSDP2 and DDP are arranged for uneven shares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from holdfast.ckpt import torch_private
from holdfast.elastic.data.foreign import ForeignLoaders
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.collectives import InterruptibleGroup
from holdfast.elastic.groups.reform import MODEL_AXES, GenerationWorld
from holdfast.elastic.loop.user_code import is_users, line_of, user_line
from holdfast.elastic.planning.meshes import coordinates

_SOUND: Final = (
    "holdfast.",
    "torch.distributed.fsdp.",
    "torch.distributed.pipelining.",
    "torch.nn.parallel.",
)
"""Callers that know of uneven shares, by the start of their modules' names."""

_AUTOGRAD: Final = "torch.autograd.graph"
"""Module that runs the backward, and the hooks in it."""

_TRANSPARENT: Final = frozenset(
    {
        __name__,
        InterruptibleGroup.__module__,
        ForeignLoaders.__module__,
        torch_private.__name__,
        "holdfast.elastic.loop.trace.sources",  # imported only where a check watches the loop
    }
)
"""Modules that stand between the user's call and the look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersCall:
    """A line of the user's code, and the function of torch.distributed called there, or ''.

    ``in_backward``: the call comes from autograd, and no Python is between.
    """

    name: str
    line: str
    in_backward: bool = False


class Inside:
    """The microbatch that one rank runs: its number, None outside of microbatches.

    ``visits`` counts the microbatches that were begun.
    """

    def __init__(self, world: GenerationWorld) -> None:
        self._world = world
        self._model_groups: set[str] | None = None
        self.number: int | None = None
        self.visits = 0
        world.guard.look = self._look

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Refuse collectives of the user's over data-parallel ranks in the body."""
        self.number = number
        self.visits += 1
        try:
            yield
        finally:
            self.number = None

    def close(self) -> None:
        """Look at no collective any more."""
        self.number = self._world.guard.look = None

    def refuse(self, call: str) -> None:
        """Raise ``ConfigError`` inside a microbatch: ``call`` of Holdfast belongs after it."""
        if self.number is not None:
            raise ConfigError(
                f"{call} at {user_line()} inside microbatch {self.number}: call it after the loop "
                "over run.microbatches, with one value of each microbatch"
            )

    def refuse_update(self, call: str) -> None:
        """Raise ``ConfigError`` inside a microbatch: ``call`` of Holdfast needs the whole mean."""
        if self.number is not None:
            raise ConfigError(
                f"{call} at {user_line()} inside microbatch {self.number}, where the gradients of "
                "one rank's microbatches are being added up: call it after the loop over "
                "run.microbatches, before run.step"
            )

    def _look(self, group: str, ranks: Sequence[int], operation: str) -> bool:
        """Return whether this is a collective of the user's over data-parallel ranks.

        Raises ``ConfigError`` inside a microbatch.
        """
        call = call_of_users(_SOUND)
        if call is None or not self._spans_data(group, ranks):
            return False
        if self.number is not None and call.in_backward:
            raise ConfigError(
                f"{operation} in the backward at {call.line}: a DistributedDataParallel averages "
                "gradients there by itself, because it is not tracked: give run.track the wrapper, "
                "as in run.track(model=ddp), not only the module inside it"
            )
        if self.number is not None:
            raise ConfigError(
                f"{call.name or operation} at {call.line} inside microbatch {self.number}: ranks "
                "run different numbers of microbatches, so a collective over data-parallel ranks "
                "depends on the world and may wait forever. Collect one value of each microbatch "
                "and call run.gather(values) or run.reduce(values, 'sum') after the loop over "
                "run.microbatches; a loss over all samples takes two passes. Collectives along "
                "the other axes of run.mesh are sound"
            )
        return True

    def _spans_data(self, group: str, ranks: Sequence[int]) -> bool:
        """Return whether ranks of the group run different microbatches, in a world of any size.

        A group of a single rank that is no axis of the model may have more ranks in another world.
        The default group, for which no ranks are given, spans the data always.
        """
        if group in self._names_of_model_groups():
            return False
        mesh = self._world.record.mesh
        groups = {coordinates(rank, mesh).dp // mesh.ep for rank in ranks}
        return len(groups) != 1 or len(ranks) == 1

    def _names_of_model_groups(self) -> set[str]:
        if self._model_groups is None:
            mesh = self._world.mesh
            axes = MODEL_AXES.intersection(mesh.mesh_dim_names or ())
            self._model_groups = {str(mesh.get_group(axis).group_name) for axis in axes}
        return self._model_groups


def call_of_users(known: tuple[str, ...]) -> UsersCall | None:
    """Return the library call of the user's code that is running.

    None if a module whose name starts like one of ``known`` is nearer than the user's code.
    """
    name, direct, in_backward = "", True, False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if is_users(frame.f_code.co_filename):
            return UsersCall(name=name, line=line_of(frame), in_backward=in_backward)
        if f"{module}.".startswith(known) and module not in _TRANSPARENT:
            return None
        if module.startswith("torch.distributed."):
            name = _name_of(frame, module) or name
        if module == _AUTOGRAD:
            in_backward |= direct
            known = ()  # a hook of the user's, in a backward that Holdfast began
        direct &= module in _TRANSPARENT
        frame = frame.f_back
    if name or direct:  # in autograd's own thread
        return UsersCall(name=name, line="a hook" if name else "a device", in_backward=direct)
    return None


def users_line() -> str | None:
    """Return the line of the user's code that is being executed, None in code of Holdfast's."""
    call = call_of_users(("holdfast.",))
    return None if call is None else call.line


def _name_of(frame: FrameType, module: str) -> str:
    name = frame.f_code.co_name
    if name.startswith("_") or module == "torch.distributed.c10d_logger":
        return ""
    return f"dist.{name}" if module == "torch.distributed.distributed_c10d" else name
