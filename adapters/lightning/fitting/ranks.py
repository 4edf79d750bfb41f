"""The rank as Lightning sees it: one process, whose index decides about files and prints.

Ranks run different numbers of microbatches, so nothing of Lightning may wait for other ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from holdfast.adapters.lightning.fitting.later import SavedFiles
from holdfast.elastic import ConfigError, Run

ONE_OPTIMIZER: Final = (
    "fit: configure_optimizers must return one optimizer of torch's, with parameter groups if need "
    "be; for several, as of a GAN, write the loop with run.step (docs/how-to/port-your-loop.md)"
)


class RankStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy of one process whose files wait until their step is protected."""

    def __init__(self, run: Run, files: SavedFiles) -> None:
        super().__init__(device=run.device)
        self._run, self._files = run, files
        self._is_sharded = False
        self.global_rank = self.local_rank = run.rank
        rank_zero_only.rank = run.rank

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the module configure its optimizer. Raises ``ConfigError`` unless it is one."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise ConfigError(ONE_OPTIMIZER) from error
        found = self.optimizers
        if len(found) != 1 or isinstance(found[0], _MockOptimizer):
            raise ConfigError(ONE_OPTIMIZER)

    def setup(self, trainer: Any) -> None:
        """Set up module and optimizer."""
        super().setup(trainer)
        # Later the parameters may be whole for a while, as after a forward pass of FSDP2.
        parameters = self.lightning_module.parameters()
        self._is_sharded = any(isinstance(each, DTensor) for each in parameters)

    @property
    def is_global_zero(self) -> bool:
        """True for the rank that writes."""
        return self._run.is_leader

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step; leave it as soon as the ranks change."""
        self._run.check()
        return super().validation_step(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights; those of a sharded module whole, on rank 0."""
        module = self.lightning_module
        if not self._is_sharded:
            found: dict[str, Any] = module.state_dict()
            return found
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(module, options=options)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer. Raises ``ConfigError`` if it is sharded."""
        if self._is_sharded:
            raise ConfigError(
                "fit: a checkpoint file with the states of a sharded optimizer is not supported: "
                "give ModelCheckpoint(save_weights_only=True); checkpoint=Checkpoints(...) in "
                "holdfast.resilient keeps the whole state"
            )
        found: dict[str, Any] = super().optimizer_state(optimizer)
        return found

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Let rank 0 write a file of Lightning's."""
        if storage_options is not None or "://" in os.fspath(filepath):
            raise ConfigError(
                f"trainer.save_checkpoint({os.fspath(filepath)!r}): give a path in a directory "
                "that all nodes see, without storage_options"
            )

        def write(place: Path) -> None:
            torch.save(checkpoint, place)

        path = str(Path(filepath).absolute())
        self._files.save(path, write, step=int(checkpoint["global_step"]))

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a file once the step is protected."""
        self._files.remove(str(Path(filepath).absolute()))
