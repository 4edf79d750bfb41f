"""Updates through a GradScaler: one decision for all ranks, to apply the gradients or to skip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.ckpt import torch_private
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates.interposed import Interposed
from holdfast.elastic.loop.updates.tracked_objects import TrackedObjects
from holdfast.elastic.loop.user_code import user_line

FORM = "run.step(optimizer, scaler=scaler)"


class ScalerWatch:
    """The scalers of the run, and refusal of those that it does not know of.

    ``in_pass`` returns whether a pass over microbatches is under way. Every method raises
    ``ConfigError``.
    """

    def __init__(
        self, roster: TrackedObjects, interposed: Interposed, *, in_pass: Callable[[], bool]
    ) -> None:
        self._roster, self._in_pass = roster, in_pass
        self._scaled: list[GradScaler] = []
        self._applied: GradScaler | None = None
        for owner in _kinds(GradScaler):
            for name, look in (
                ("scale", self._before_scale),
                ("unscale_", self._before_unscale),
                ("step", self._before_step),
                ("update", self._before_update),
            ):
                if name in vars(owner):
                    interposed.before(owner, name, look)

    @property
    def is_used(self) -> bool:
        """True if an enabled scaler is tracked, so that an infinite gradient may be its skip."""
        return any(True for _ in self._roster.scalers())

    @property
    def has_scaled(self) -> bool:
        """True if a scaler scaled a loss since the last update."""
        return bool(self._scaled)

    def reset(self) -> None:
        """Forget which scalers were used: an update is over."""
        self._scaled = []

    def refuse_missing(self) -> None:
        """Refuse an update without a scaler if the loss was scaled by one, or unscaled."""
        touched = [s for s in self._roster.scalers() if torch_private.scaler_records(s)]
        if self._scaled or touched:
            raise ConfigError(
                f"run.step at {user_line()}: a GradScaler scaled the loss of this pass, and "
                "run.step was not given it, so that gradients stay scaled and an infinite one is "
                f"no skip: call {FORM}, in place of scaler.step and scaler.update"
            )

    def refuse_unfit(self, scaler: object, *, stages: int) -> None:
        """Refuse a scaler that run.step cannot use."""
        line = user_line()
        if not isinstance(scaler, GradScaler):
            raise ConfigError(
                f"run.step at {line}: scaler={type(scaler).__name__}: give a torch.amp.GradScaler"
            )
        if not scaler.is_enabled():
            return
        if not self._roster.has(scaler):
            raise ConfigError(_untracked(line))
        if stages > 1:
            raise ConfigError(
                f"run.step at {line}: a GradScaler does not fit pipeline stages, of which only the "
                "last has the loss: train in bfloat16, which needs no scaler"
            )
        self._refuse_idle(scaler, f"run.step at {line} was given a GradScaler that")

    def _refuse_idle(self, scaler: GradScaler, which: str) -> None:
        if all(each is not scaler for each in self._scaled):
            raise ConfigError(
                f"{which} scaled no loss of this pass: call run.backward(scaler.scale(loss)), and "
                "after the pass scaler.unscale_(optimizer), where it is needed before clipping, "
                f"and {FORM}"
            )

    def apply(
        self,
        scaler: GradScaler,
        optimizers: Sequence[Any],
        *,
        apply: Callable[[Any, Callable[[], object]], None],
        agree: Callable[[torch.Tensor], None],
    ) -> None:
        """Unscale what is not, and step all ``optimizers`` or none; then update the scale.

        ``agree`` replaces a float64 tensor by its maximum over all ranks.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"{FORM} at {user_line()} was given a {type(optimizer).__name__}: give it the "
                    "torch optimizers themselves"
                )
        with self._applying(scaler):
            for optimizer in optimizers:
                if not torch_private.is_unscaled(scaler, optimizer):
                    scaler.unscale_(optimizer)
            if not agreed_infinity(scaler, agree):
                for optimizer in optimizers:
                    apply(optimizer, functools.partial(scaler.step, optimizer))
            scaler.update()

    def drop(self, scaler: GradScaler) -> None:
        """Leave an update out for another reason than the scale's."""
        if scaler.is_enabled():
            torch_private.forget_optimizers(scaler)

    @contextmanager
    def _applying(self, scaler: GradScaler) -> Iterator[None]:
        self._applied = scaler
        try:
            yield
        finally:
            self._applied = None

    def _before_scale(self, scaler: GradScaler, *_: object, **__: object) -> None:
        if not scaler.is_enabled() or not self._in_pass():
            return
        if any(each is scaler for each in self._scaled):
            return
        if not self._roster.has(scaler):
            raise ConfigError(_untracked(user_line()))
        self._scaled.append(scaler)

    def _before_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        if not scaler.is_enabled() or not self._roster.has(scaler):
            return
        line = user_line()
        self._refuse_idle(scaler, f"{line}: this GradScaler")
        if self._in_pass():
            raise ConfigError(
                f"scaler.unscale_ at {line} is inside the pass over run.microbatches, whose "
                "gradients are still being added up: call it after the pass"
            )

    def _before_step(
        self, scaler: GradScaler, optimizer: Optimizer, *_: object, **__: object
    ) -> None:
        if scaler is self._applied or not self._roster.parameter(optimizer):
            return
        name = self._roster.name(optimizer) or "optimizer"
        raise ConfigError(
            f"scaler.step at {user_line()}: the run makes the updates of {name}, and all ranks "
            f"must skip alike: call run.step({name}, scaler=scaler) in place of scaler.step and "
            "scaler.update"
        )

    def _before_update(self, scaler: GradScaler, new_scale: object = None) -> None:
        if scaler is self._applied or new_scale is not None or not scaler.is_enabled():
            return
        if self._roster.has(scaler):
            raise ConfigError(
                f"scaler.update at {user_line()}: {FORM} updates the scale of a tracked "
                "GradScaler: remove this call"
            )


def agreed_infinity(scaler: GradScaler, agree: Callable[[torch.Tensor], None]) -> bool:
    """Return whether a gradient is not finite at any rank; write that into the scaler's notes."""
    records = torch_private.scaler_records(scaler)
    notes = [note for each in records.values() for note in each["found_inf_per_device"].values()]
    seen = torch.tensor([max((float(note) for note in notes), default=0.0)], dtype=torch.float64)
    agree(seen)
    found = seen.item() > 0
    for each in records.values():
        if not each["found_inf_per_device"]:  # no gradient at this rank
            each["found_inf_per_device"][torch.device("cpu")] = torch.zeros(())
    for each in records.values():
        for note in each["found_inf_per_device"].values():
            note.fill_(float(found))
    return found


def _kinds(of: type) -> Iterator[type]:
    yield of
    kinds: list[type] = of.__subclasses__()
    for kind in kinds:
        yield from _kinds(kind)


def _untracked(line: str) -> str:
    return (
        f"{line}: this GradScaler is not tracked, so its scale is lost in a restore: name it in "
        f"run.track, as run.track(..., scaler=scaler), and call {FORM}"
    )
