"""Saving and loading for strategies of the Trainer; `holdfast_strategy` mixes it in.

No part of Lightning is imported here. A path of the Trainer, such as that of a ``ModelCheckpoint``,
becomes a root with one step. Modules and optimizers are saved and filled as the live objects that
they are. All else of the Trainer's checkpoint is one tree, that of rank 0, as with Lightning.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from holdfast import ckpt
from holdfast.adapters.lightning.randomness import random_states
from holdfast.adapters.lightning.saving import OwnFormat
from holdfast.adapters.shared.buffers import settle_buffers
from holdfast.ckpt import ArgumentError, StateError
from holdfast.ckpt.checkpoints.catalog import committed
from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.collective import RankWorld
from holdfast.ckpt.store.places import open_store

_OURS: Final = ("state_dict", "optimizer_states")
"""Entries of the Trainer's checkpoint that are saved from live objects."""

_BATCHES: Final = "epoch_loop.batch_progress"


class TrainerTree:
    """The rest of a Trainer's checkpoint, as an object with a state."""

    def __init__(self, entries: dict[str, Any] | None = None) -> None:
        self.entries = entries or {}

    def state_dict(self) -> dict[str, Any]:
        """Return the entries."""
        return self.entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the entries."""
        self.entries = dict(state_dict)


class TrainerSaving(OwnFormat):
    """The parts of a Trainer's strategy that save and load, with Holdfast's checkpoints."""

    lightning_module: Any
    optimizers: Any
    root_device: Any
    _loads_from = ""
    _dumped: Mapping[str, Any] | None = None

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save a Trainer's checkpoint; every rank writes its own part.

        Raises as `holdfast.save` does, and ``StateError`` if a hook changed the weights.
        """
        world = RankWorld()
        with world.agreed():
            root = _local(filepath)
            if storage_options is not None:
                raise ArgumentError("save_checkpoint(storage_options=...): not supported")
            dumped, self._dumped = self._dumped, None
            _check_weights(checkpoint["state_dict"], dumped)
            state: dict[str, Any] = {"model": self.lightning_module}
            if "optimizer_states" in checkpoint:
                state |= {**self._own_optimizers(), "random": random_states(self.root_device)}
            if world.rank == 0:
                rest = {key: each for key, each in checkpoint.items() if key not in _OURS}
                state["trainer"] = TrainerTree(rest)
        wrapped = getattr(self, "model", None)
        given = isinstance(wrapped, DistributedDataParallel) and wrapped.broadcast_buffers
        settle_buffers({"model": self.lightning_module}, is_in_ddp=given)
        step = int(checkpoint["global_step"])
        ckpt.save(root, state, step=step)
        with world.agreed():
            if world.rank == 0:  # a path holds one checkpoint, as with Lightning
                store = open_store(root)
                remove_steps(store, [each for each in committed(store) if each != step])

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the Trainer's checkpoint without weights, which the next calls fill in place.

        Raises as `holdfast.load` does, and ``StateError`` for a checkpoint from inside an epoch.
        """
        self._loads_from, tree = os.fspath(checkpoint_path), TrainerTree()
        ckpt.load(
            self._loads_from,
            {"trainer": tree},
            select=("trainer", "trainer.*"),
            strict="ignore-extra",
        )
        if self.lightning_module.trainer.state.fn == "fit":
            _check_between_epochs(self._loads_from, tree.entries)
        found = {**tree.entries, "state_dict": {}}
        return {**found, "optimizer_states": []} if "lr_schedulers" in found else found

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: the Trainer asks for the optimizers too, with a model that is sharded."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the module."""
        ckpt.load(
            self._loads_from,
            {"model": self.lightning_module},
            select="model.*",
            strict={"model.*": "exact" if strict else "ignore", "*": "ignore-extra"},
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers, and give the rank's generators their states."""
        own = self._own_optimizers()
        ckpt.load(
            self._loads_from,
            {"model": self.lightning_module, **own, "random": random_states(self.root_device)},
            select=[*(f"{name}*" for name in own), "random*"],
            strict="ignore-extra",
        )

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the directory of a checkpoint, on rank 0."""
        if RankWorld().rank == 0 and Path(_local(filepath)).is_dir():
            shutil.rmtree(filepath)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's tensors as they are, for hooks that look at them."""
        found: dict[str, Any] = self.lightning_module.state_dict()
        self._dumped = dict(found)
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's tensors as they are."""
        found: dict[str, Any] = optimizer.state_dict()
        return found

    def _own_optimizers(self) -> dict[str, Any]:
        return {
            f"optimizer_{i}" if i else "optimizer": each for i, each in enumerate(self.optimizers)
        }


def _local(path: str | os.PathLike[str]) -> str:
    found = os.fspath(path)
    if "://" in found:
        raise ArgumentError(
            f"{found}: the Trainer's checkpoints go to directories that all nodes see; a store is "
            "not supported with the Trainer yet"
        )
    return found


def _check_weights(given: Mapping[str, Any], dumped: Mapping[str, Any] | None) -> None:
    """Refuse weights that are not the module's own: those are saved from the module itself."""
    dumped = given if dumped is None else dumped
    changed = [key for key in {**given, **dumped} if given.get(key) is not dumped.get(key)]
    if changed:
        raise StateError(
            f"on_save_checkpoint: a hook or a callback has changed {min(changed)} in "
            "checkpoint['state_dict'], which is not saved from there; keep other weights, such as "
            "averaged ones, in a module of the LightningModule or under a key of their own"
        )


def _check_between_epochs(path: str, entries: Mapping[str, Any]) -> None:
    fit = entries.get("loops", {}).get("fit_loop", {})
    batches = fit.get(_BATCHES, {})
    loader = fit.get("state_dict", {}).get("combined_loader")
    if batches.get("is_last_batch", True) or loader:
        return
    raise StateError(
        f"{path}: it was saved inside an epoch, and Lightning would begin the data from the first "
        "batch: take a checkpoint of the end of an epoch (ModelCheckpoint(every_n_epochs=1)), or a "
        "train_dataloader with state_dict()"
    )
