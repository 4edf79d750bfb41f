"""A watch over the gradients of a pass: nothing but ``run.backward`` may change them.

Every rank runs other microbatches. If the script drops or adds gradients between two of them, each
number of ranks gives another mean, without an error. A change through ``.data`` leaves the versions
of tensors as they are, so their contents are compared as well: all of them in the first passes
(with ``exact`` the very first may keep its sums beside ``.grad``), a sample of them in some later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, is_
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.ckpt.state.local_boxes import writes_of
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.wrapped import Parameters
from holdfast.elastic.groups.contents import BLOCK_BYTES, digest, is_due, samples_of
from holdfast.elastic.groups.shards import local_of

_GRADIENT: Final = attrgetter("grad")

_WHOLE_PASSES: Final = 2
"""Passes of each phase in which all contents are compared, from the first on."""


class GradientWatch:
    """The gradients of the tracked parameters, from the beginning of a pass to the update.

    ``parameters`` returns the tracked parameters by name. ``moves`` says that FSDP2 exchanges them
    in the pass; it then adds gradients up in tensors of its own, of which some are not seen here.
    ``line`` returns the user's line that is being executed. Every method raises ``ConfigError``
    with the name of a parameter.
    """

    def __init__(
        self, parameters: Callable[[], Parameters], *, moves: bool, line: Callable[[], str]
    ) -> None:
        self._of_run, self._moves, self._line = parameters, moves, line
        self._names: Sequence[str] = ()
        self._seen: Sequence[nn.Parameter] = ()
        self.refresh()
        self._gradients: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._contents: list[int | None] = []
        self._passes: dict[int, int] = {}
        self._turn, self._noted_at = 0, ""
        self._in_pass = False
        self._made: dict[int, str] = {}
        self._zeroed: dict[int, str] = {}

    @property
    def in_pass(self) -> bool:
        """True while a pass is under way."""
        return self._in_pass

    def begin_pass(self, *, phase: int = 0, fresh: bool = True) -> None:
        """Start a pass of the step's ``phase``; a ``fresh`` one begins without gradients."""
        self._in_pass, self._made, self._zeroed = True, {}, {}
        self._turn = self._passes.get(phase, 0)
        self._passes[phase] = self._turn + 1
        self._note()
        if not fresh:
            return
        for name, gradient in zip(self._names, self._gradients, strict=True):
            if gradient is not None and bool(local_of(gradient).any()):
                raise ConfigError(
                    f"{name} has a gradient before the first run.backward of the pass, which every "
                    "rank would add to the mean: it is left from a backward() of your own; call "
                    "zero_grad() after that, before run.microbatches"
                )

    def saw_backward(self) -> None:
        """Note the gradients that a ``run.backward`` left."""
        self._note()

    def refuse_changes(self) -> None:
        """Refuse gradients that changed since the last ``run.backward``."""
        if not self._in_pass:
            return
        now = list(map(_GRADIENT, self._seen))
        same = all(map(is_, now, self._gradients)) and _versions(now) == self._versions
        contents = self._contents_of(now) if same else []
        if same and contents == self._contents:
            return
        before = dict(zip(map(id, self._present()), self._versions, strict=True))
        for at, (name, gradient, seen) in enumerate(
            zip(self._names, now, self._gradients, strict=True)
        ):
            if gradient is None and seen is not None:
                raise ConfigError(self._vanished(name, "was dropped (.grad = None)"))
            if (
                gradient is not seen
                or (gradient is not None and writes_of(gradient) != before[id(gradient)])
                or (same and contents[at] != self._contents[at])
            ):
                if seen is not None and gradient is not None and not local_of(gradient).any():
                    raise ConfigError(self._vanished(name, "was set to zero"))
                raise ConfigError(
                    f"the gradient of {name} changed inside the pass, and not by run.backward "
                    f"{self._between()}: "
                    "call run.backward(loss) in place of loss.backward(), once in each microbatch "
                    "with all its losses added up; a gradient g computed by hand goes in as "
                    "run.backward((parameter * g).sum())"
                )

    def _vanished(self, name: str, how: str) -> str:
        return (
            f"the gradient of {name} {how} between two microbatches of a pass {self._between()}, "
            "which loses what this rank's earlier ones gave: remove that; run.step drops the "
            "gradients after the update"
        )

    def _between(self) -> str:
        """Return the lines between which the change was made."""
        return f"(after {self._noted_at}, before {self._line()})"

    def zeroing(self, owner: nn.Module | Optimizer, line: str) -> None:
        """Note that ``owner.zero_grad()`` is about to run at ``line``; refuse it inside a pass."""
        if not self._in_pass and not self._made:
            return
        touched = {id(p) for p in _parameters_of(owner)}
        if not self._in_pass:
            self._zeroed.update(dict.fromkeys(touched & self._made.keys(), line))
            return
        known = zip(self._names, self._seen, strict=True)
        name = next((name for name, p in known if id(p) in touched and p.requires_grad), None)
        if name is not None:
            raise ConfigError(
                f"zero_grad() at {line} is inside the pass over run.microbatches, where it drops "
                f"the gradients of this rank's earlier microbatches, first that of {name}: remove "
                "it; run.step drops them after the update"
            )

    def end_pass(self) -> None:
        """End the pass; the mean gradients are in place."""
        if self._moves:
            self.refresh()
        self._in_pass, self._gradients, self._versions = False, [], []
        pairs = zip(self._names, self._seen, strict=True)
        self._made = {id(p): name for name, p in pairs if p.grad is not None}

    def refuse_dropped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse an update of ``parameters`` whose mean gradients were dropped after the pass.

        Gradients of some of them may be dropped, to leave those out of the update.
        """
        had = [p for p in parameters if id(p) in self._made]
        if not had or not all(p.grad is None or id(p) in self._zeroed for p in had):
            return
        name, line = self._made[id(had[0])], next(iter(self._zeroed.values()), "")
        by = f"by zero_grad() at {line} " if line else ""
        raise ConfigError(
            f"the mean gradients were dropped {by}after the pass, first that of {name}, so "
            "run.step would change nothing: remove that; run.step drops them after the update"
        )

    def reset(self) -> None:
        """Forget the pass: its update is over, or it was left."""
        self._in_pass, self._made, self._zeroed = False, {}, {}
        self._gradients, self._versions = [], []

    def refresh(self) -> None:
        """Read the parameters again: there may be others."""
        found = self._of_run()
        self._names, self._seen = [name for name, _ in found], [p for _, p in found]

    def _note(self) -> None:
        if self._moves:
            self.refresh()
        self._gradients = list(map(_GRADIENT, self._seen))
        self._versions = _versions(self._gradients)
        self._contents = self._contents_of(self._gradients)
        self._noted_at = self._line()

    def _contents_of(self, gradients: Sequence[torch.Tensor | None]) -> list[int | None]:
        """Return a digest of each gradient, or of its part in the sample; empty if none is due."""
        turn = self._turn
        if not is_due(turn):
            return []
        local = [None if each is None else _compared(each) for each in gradients]
        sizes = [each.nbytes for each in local if each is not None]
        parts = max(1, samples_of(sum(sizes), len(sizes))) if turn >= _WHOLE_PASSES else 1
        return [
            None if each is None else _digest(each, first=(turn + at) % parts, parts=parts)
            for at, each in enumerate(local)
        ]

    def _present(self) -> Collection[torch.Tensor]:
        return [gradient for gradient in self._gradients if gradient is not None]


def _versions(gradients: Iterable[torch.Tensor | None]) -> list[int]:
    return [writes_of(each) for each in gradients if each is not None]


def _compared(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the elements whose contents are compared; None for sparse ones."""
    local = local_of(gradient).detach()
    return local if local.layout is torch.strided else None


def _digest(local: torch.Tensor, *, first: int, parts: int) -> int:
    return digest(local, range(first, -(-local.nbytes // BLOCK_BYTES), parts))


def _parameters_of(owner: nn.Module | Optimizer) -> Iterable[torch.Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return (p for group in owner.param_groups for p in group["params"])
