"""torchtitan's checkpoint manager with Holdfast's format in place of DCP's files."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
    save,
)
from torchtitan.components.checkpointer.base import DATALOADER, MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.observability import structured_logger as sl
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter
from holdfast.adapters.torchtitan import finding
from holdfast.adapters.torchtitan.origin import LoadOrigin, WantedState, objection, resumed
from holdfast.adapters.torchtitan.retention import Pruner
from holdfast.ckpt.checkpoints.catalog import step_folder
from holdfast.ckpt.collective import RankWorld
from holdfast.ckpt.errors import HoldfastError, MismatchError, NotFoundError
from holdfast.ckpt.state.torch_dtypes import NAME_OF
from holdfast.ckpt.store.places import locate, open_store


class HoldfastCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """A ``CheckpointManager`` of torchtitan whose folder is a root of Holdfast's checkpoints.

    ``Config`` has the same settings. Raises ``StoreError`` for a folder that Holdfast has no store
    for.
    """

    # as after __init__, for an object whose __init__ raised: torchtitan closes it all the same
    save_future: Any = None
    staging_future: Any = None
    stager: Any = None
    _pruner: Pruner | None = None
    _begun: int | None = None  # the step whose save was begun last

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of torchtitan's ``CheckpointManager.Config``."""

    def __init__(self, config: Any, **parts: Any) -> None:
        keep_latest_k = config.keep_latest_k
        theirs = copy(config)
        theirs.keep_latest_k = 0  # no thread of theirs: it would remove by the names of folders
        super().__init__(theirs, **parts)
        if not self.enable:
            return
        self.keep_latest_k = keep_latest_k
        open_store(self.folder)
        if keep_latest_k > 0 and not self.load_only and RankWorld().rank == 0:
            self._pruner = Pruner(self.folder, keep_last=keep_latest_k)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        """Return the directory of a step, as Holdfast names it."""
        return str(filesystem.join(folder or self.folder, step_folder(step)))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = bool(super()._save(curr_step, last_step))
        if saved and last_step:
            self._purge_stale_checkpoints()
        return saved

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save ``state_dict`` as the step whose directory is ``checkpoint_id``.

        Safetensors for Hugging Face are torchtitan's own work, and lie where it puts them.
        """
        root, step = locate(checkpoint_id)
        assert step is not None, f"{checkpoint_id} is not of _create_checkpoint_id"
        if to_hf:
            theirs = super()._create_checkpoint_id(step, root)
            return super().dcp_save(state_dict, theirs, async_mode, enable_garbage_collection, True)
        writer = HoldfastWriter(root, step=step)
        saving: Any = None
        try:
            if async_mode == AsyncMode.DISABLED:
                save(state_dict, storage_writer=writer)
            else:
                saving = async_save(
                    state_dict,
                    storage_writer=writer,
                    process_group=self.pg,
                    **self._in_a_process(async_mode),
                )
        except CheckpointException as error:
            _raise_first(error)
        self._begun = step
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving

    def _in_a_process(self, async_mode: AsyncMode) -> dict[str, Any]:
        if async_mode != AsyncMode.ASYNC_WITH_PINNED_MEM:
            return {}
        return {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            "async_stager": self.stager,
        }

    def _wait_for_saving(self) -> None:
        """Wait for the save in the background; raise its own error."""
        try:
            super()._wait_for_saving()
        except CheckpointException as error:
            _raise_first(error)
        finally:
            self.save_future = None  # its error is told once
        self._purge_stale_checkpoints()

    def _purge_stale_checkpoints(self) -> None:
        """Begin to remove old steps, once the save that makes them so has been committed."""
        if self._pruner is not None and self._begun is not None and self.save_future is None:
            self._pruner.start(self._begun)

    def _close(self) -> None:
        """Wait for the save in the background and the removals; raise the error of that save."""
        try:
            self._maybe_wait_for_staging()
            self.maybe_wait_for_saving()
        finally:
            if self._pruner is not None:
                self._pruner.close()
                self._pruner = None
            super()._close()

    @sl.log_trace_span("checkpoint_load")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load ``step``, the newest one for -1, or the checkpoint that the run starts from.

        All ranks load the checkpoint that rank 0 found. Raises ``NotFoundError`` for a step or a
        path where there is none, and ``MismatchError`` for one that this run cannot go on from.
        """
        world, found = RankWorld(), None
        state = self._wanted()  # on every rank: modules gather fused weights to divide them
        with world.agreed():
            if world.rank == 0:
                found = self._origin(None if step == -1 else step, state)
        origin = msgspec.convert(world.gather(found)[0], LoadOrigin | None)
        if origin is None:
            logger.info("No checkpoint was provided, this is a fresh start.")
            return False
        logger.info("Loading the checkpoint from %s.", origin.path)
        states = self._states_to_load(origin.model_only)
        if origin.kind == "holdfast":
            self._fill(states, origin)
        else:
            quantized = origin.kind == "hf" and self.initial_load_in_hf_quantized
            self.dcp_load(states, origin.path, origin.kind == "hf", quantized)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        logger.info("Finished loading the checkpoint.")
        return True

    def _origin(self, wanted: int | None, state: WantedState) -> LoadOrigin | None:
        """Return the checkpoint to load, checked against this run; None for a fresh start."""
        there = finding.steps_there(self.folder)
        chosen = resumed(there, wanted)
        if chosen is None:
            if wanted is not None:
                raise NotFoundError(
                    f"--checkpoint.load_step={wanted}: {self.folder} has no checkpoint of that "
                    f"step; steps there: {there.listed() or 'none'}"
                )
            return self._initial(state)
        kind, step = chosen
        if kind == "dcp":
            theirs = super()._create_checkpoint_id(step)
            return LoadOrigin(path=theirs, kind="dcp", model_only=step == 0)
        origin = LoadOrigin(
            path=self._create_checkpoint_id(step), kind="holdfast", model_only=step == 0
        )
        self._check(origin, state, others=[each for each in there.ours if each != step])
        return origin

    def _initial(self, state: WantedState) -> LoadOrigin | None:
        """Return the checkpoint from which a run begins whose folder has none."""
        if self.initial_load_in_hf:
            adapter = self.sd_adapter
            path = self.initial_load_path or (adapter and adapter.hf_assets_path)
            if not path or not filesystem.isdir(path):
                raise NotFoundError(
                    f"--checkpoint.initial_load_in_hf: {path!r} is no directory of safetensors; "
                    "correct --checkpoint.initial_load_path, or --hf_assets_path without it"
                )
            return LoadOrigin(path=str(path), kind="hf", model_only=True)
        if not self.initial_load_path:
            return None
        origin = finding.named_by(self.initial_load_path, model_only=self.initial_load_model_only)
        if origin is None:
            raise NotFoundError(
                f"--checkpoint.initial_load_path={self.initial_load_path}: there is no checkpoint. "
                "Give a root or a step of Holdfast's, or one step of torchtitan's, such as "
                f"{self.initial_load_path.rstrip('/')}/step-100"
            )
        if origin.kind == "holdfast":
            self._check(origin, state, others=())
        return origin

    def _check(self, origin: LoadOrigin, state: WantedState, *, others: Sequence[int]) -> None:
        """Raise ``MismatchError`` if this run cannot go on from a checkpoint."""
        if origin.model_only:
            return  # the weights are converted, and DCP names one that is missing
        fault = objection(
            finding.stored_state(origin.path),
            state,
            step=locate(origin.path)[1] or 0,
            others=others,
            path=origin.path,
        )
        if fault:
            raise MismatchError(f"{self.folder}: {fault}")

    def _wanted(self) -> WantedState:
        weights = self.states[MODEL].state_dict()
        return WantedState(
            dtypes={
                name: NAME_OF[value.dtype]
                for name, value in weights.items()
                if isinstance(value, torch.Tensor) and value.dtype in NAME_OF
            },
            keys=tuple(
                key for key in self.states if key not in {MODEL, *self.exclude_from_loading}
            ),
            dp_degree=getattr(self.states.get(DATALOADER), "dp_world_size", None),
        )

    def _fill(self, states: dict[str, Any], origin: LoadOrigin) -> None:
        """Read a checkpoint of Holdfast's into the state of this run."""
        root, step = locate(origin.path)
        reader = HoldfastReader(root, step=step, cast=origin.model_only)
        try:
            load(states, storage_reader=reader)
        except CheckpointException as error:
            _raise_first(error)
        # the names of the weights stand in `states` by themselves; DCP fills tensors in place, and
        # replaces what is none
        self.states[MODEL].load_state_dict(states)


def _raise_first(error: CheckpointException) -> NoReturn:
    """Raise the error that DCP wrapped on every rank; of several, the first of Holdfast's.

    The wrapper is no ``Exception``, so torchtitan would not close its trainer after it.
    """
    failures = sorted(
        ((rank, found) for rank, (found, _) in error.failures.items()),
        key=lambda failure: (not isinstance(failure[1], HoldfastError), failure[0]),
    )
    if not failures:
        raise error
    rank, first = failures[0]
    first.add_note(f"on rank {rank} of {dist.get_world_size()}")
    raise first from error
