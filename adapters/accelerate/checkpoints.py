"""`AcceleratorCheckpoints`: save and load all that an Accelerator has prepared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast import ckpt
from holdfast.adapters.shared.buffers import settle_buffers
from holdfast.adapters.shared.retention import keep_newest
from holdfast.ckpt import ArgumentError, NotFoundError, PerRank, StateError
from holdfast.ckpt.collective import RankWorld

if TYPE_CHECKING:
    from holdfast.adapters.accelerate.rank_states import RankStates

Place = str | os.PathLike[str]


class AcceleratorCheckpoints:
    """Checkpoints of what ``accelerator.prepare`` returned, in Holdfast's format.

    Make it after ``prepare``. ``root`` is a directory, ``s3://bucket/prefix``,
    ``gs://bucket/prefix`` or ``az://container/prefix``, which all nodes see. None takes
    ``<project_dir>/checkpoints`` of an Accelerator with ``automatic_checkpoint_naming``. The newest
    ``keep`` steps stay, beside pinned ones; None takes ``total_limit`` of the project's
    configuration, and without that all stay. ``compression`` and ``base`` are those of
    `holdfast.save`. Steps after the one that is saved, of a run that went back, do not count.

    Raises ``ArgumentError`` for wrong arguments, and ``StateError`` for an Accelerator, or a
    prepared data loader, of which not all state can be kept.
    """

    def __init__(
        self,
        accelerator: Any,
        root: Place | None = None,
        *,
        keep: int | None = None,
        compression: Mapping[str, str] | None = None,
        base: int | str | None = None,
    ) -> None:
        try:
            from holdfast.adapters.accelerate.rank_states import RankStates
            from holdfast.adapters.accelerate.supported import check_accelerator
        except ImportError as error:
            raise StateError(
                f"AcceleratorCheckpoints needs accelerate ({error}): pip install 'holdfast[hf]'"
            ) from error
        project = accelerator.project_configuration
        self._accelerator, self._is_named = accelerator, project.automatic_checkpoint_naming
        self._root = _root(accelerator, root)
        self._keep = _keep(project.total_limit if keep is None else keep)
        self._options: dict[str, Any] = {"compression": compression, "base": base}
        check_accelerator(accelerator)
        self._ranks: RankStates = RankStates(accelerator)
        self._ranks.adopt_loaders()

    @property
    def root(self) -> str:
        """The directory or address below which the steps are."""
        return self._root

    def save(self, step: int | None = None) -> str:
        """Save all state as ``step`` and return the step's directory.

        Every rank calls this, after an optimizer's step. ``step`` may be left out with
        ``automatic_checkpoint_naming``, which counts the saves. The checkpoint becomes visible
        once it is complete. Raises as `holdfast.save` does, and ``StateError`` while gradients are
        accumulated, and inside a loop over a loader that was not prepared by then.
        """
        from holdfast.adapters.accelerate.prepared import gives_buffers
        from holdfast.adapters.accelerate.supported import check_accelerator, check_between_steps

        accelerator, world = self._accelerator, RankWorld()
        with world.agreed():
            if step is None and not self._is_named:
                raise ArgumentError(
                    "save: give the number of the step, or ProjectConfiguration(project_dir, "
                    "automatic_checkpoint_naming=True)"
                )
            number = accelerator.save_iteration if step is None else step
            check_accelerator(accelerator)
            check_between_steps(accelerator)
            self._ranks.adopt_loaders()
            state = self._state(saves=accelerator.save_iteration + 1)
        models = {name: each for name, each in state.items() if isinstance(each, nn.Module)}
        settle_buffers(models, is_in_ddp=gives_buffers(accelerator))
        where = ckpt.save(self._root, state, step=number, **self._options)
        accelerator.project_configuration.iteration += 1
        with world.agreed():
            if self._keep is not None and world.rank == 0:
                keep_newest(self._root, self._keep, saved=number)
        return where

    def load(self, step: int | None = None, *, data: bool = True) -> int:
        """Load ``step`` (None: the newest that can be trusted) and return its number.

        Every rank calls this, before the loops over data. Returns 0, with nothing changed, if
        ``step`` is None and there is no checkpoint yet. Afterwards ``loader.iteration`` is the
        epoch, and the next loop over a prepared loader goes on with the batch after the last one
        that was trained on. With ``data=False`` loaders stay as they are. The processes may be of
        another number than at the save.

        Raises as `holdfast.load` does, and ``StateError`` inside a loop over a prepared loader, or
        if a loader cannot go on from the position.
        """
        from holdfast.adapters.accelerate.supported import check_accelerator

        accelerator, world = self._accelerator, RankWorld()
        with world.agreed():
            check_accelerator(accelerator)
            self._ranks.adopt_loaders()
            self._ranks.check_no_loop()
            state = self._state(saves=0)
        try:
            report = ckpt.load(self._root, state, step=step)
        except NotFoundError:
            if step is not None:
                raise
            return 0
        with world.agreed():
            self._ranks.put_back(data=data)
        accelerator.step = state["accelerator"]["step"]
        accelerator.project_configuration.iteration = state["accelerator"]["saves"]
        return report.step

    def _state(self, *, saves: int) -> dict[str, Any]:
        from holdfast.adapters.accelerate.prepared import prepared_state
        from holdfast.adapters.accelerate.rank_states import share_of_rank

        return {
            **prepared_state(self._accelerator),
            "accelerator": {"step": self._accelerator.step, "saves": saves},
            "loaders": self._ranks.positions,
            "random": PerRank(self._ranks, on_resize=share_of_rank),
        }


def _root(accelerator: Any, root: Place | None) -> str:
    if root is not None:
        return os.fspath(root)
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ArgumentError(
            "AcceleratorCheckpoints: give the root of the checkpoints, or "
            "ProjectConfiguration(project_dir, automatic_checkpoint_naming=True)"
        )
    return os.fspath(Path(accelerator.project_dir) / "checkpoints")


def _keep(keep: int | None) -> int | None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"AcceleratorCheckpoints(keep={keep!r}): give a number from 1 on")
    return keep
