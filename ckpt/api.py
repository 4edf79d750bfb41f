"""Save, load and open checkpoints: what a training script calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from typing_extensions import Buffer

from ckpt import dtypes
from ckpt.capture import CapturePlan, FlatState, box_of, flatten
from ckpt.catalog import choose, locate, open_store, step_folder, verified
from ckpt.collective import World
from ckpt.copying import copy_out, local_of
from ckpt.errors import CorruptError, StateError
from ckpt.index import ChunkRef
from ckpt.persist import WriterReceipt, commit, new_tag, write_parts
from ckpt.restore import RestoreReport, restore
from ckpt.source import StoreSource
from ckpt.view import Checkpoint

_log = logging.getLogger(__name__)


def save(root: str | Path, state: Mapping[str, Any], *, step: int) -> Path:
    """Save ``state`` as ``step`` below ``root`` and return the step's directory.

    ``state`` maps names to modules, optimizers, objects with ``state_dict``/``load_state_dict``,
    tensors and plain values. With torch.distributed, every rank calls this with the same root and
    step and writes its own part; what fails on one rank is raised on all. The checkpoint is
    visible once it is complete and durable, not before; a step saved again is the old one or the
    new one, entirely.

    Raises ``StateError`` for a state that cannot be saved and ``StoreError`` when the store
    refuses (full, read-only, forbidden).
    """
    world = World()
    with world.agreed():
        store, folder = open_store(root), step_folder(step)
        flat = flatten(state)
        for fqn, tensor in flat.tensors.items():
            box_of(fqn, tensor)
    if len(set(steps := world.gather(step))) > 1:
        raise StateError(f"{root}: the ranks save different steps {steps}; agree on one")
    plan = CapturePlan.build(flat, rank=world.rank, world_size=world.size, gather=world.gather)
    with world.agreed():
        receipt = _write(root, flat, plan, step=step)
    receipts = msgspec.convert(
        world.gather(msgspec.to_builtins(receipt)), tuple[WriterReceipt, ...]
    )
    with world.agreed():
        if world.rank == 0:
            mesh = {"dp": world.size}
            commit(root, run="", step=step, generation=0, receipts=receipts, mesh=mesh)
    return Path(store.where(folder))


def _write(root: str | Path, flat: FlatState, plan: CapturePlan, *, step: int) -> WriterReceipt:
    """Stream this rank's tensors from where they are into its pack."""

    def payload(ref: ChunkRef) -> Buffer:
        local = local_of(flat.tensors[ref.fqn]).detach()
        if local.device.type == "cpu" and local.is_contiguous() and not local.is_conj():
            return (
                np.ascontiguousarray(dtypes.as_carrier(local).numpy())
                .reshape(-1)
                .view(np.uint8)
                .data
            )
        room = bytearray(ref.chunk.nbytes)
        copy_out(local, memoryview(room))
        return room

    unknown = dict.fromkeys((piece.fqn for piece in plan.pieces), 0)
    index = plan.index(flat, unknown, step=step)
    return write_parts(root, index=index, payload=payload, tag=new_tag(), verify=False)


def load(
    root: str | Path, state: Mapping[str, Any], *, step: int | None = None, strict: bool = True
) -> RestoreReport:
    """Load ``step`` (None: the newest that can be trusted) from ``root`` into ``state``, in place.

    The state may be laid out over other ranks than it was saved from. With torch.distributed,
    every rank calls this; all load the same step or all raise. With ``step=None`` a damaged
    checkpoint is passed over with a warning.

    Raises ``NotFoundError`` listing the steps there are, ``MismatchError`` listing the keys that
    differ, before anything is changed, and ``CorruptError`` naming the damaged file; the state
    may then be overwritten in part.
    """
    world = World()
    candidates: Iterator[int] = iter(())
    fault: CorruptError | None = None
    with world.agreed():
        if world.rank == 0:
            first = choose(root, step)
            candidates = iter([first]) if step is not None else verified(root)
    while True:
        with world.agreed():
            mine = next(candidates, None) if world.rank == 0 else None
        chosen = world.gather(mine)[0]
        if chosen is None:
            raise fault or CorruptError(f"{root}: no step can be loaded; save again")
        try:
            with world.agreed(), closing(StoreSource(root, chosen)) as source:
                return restore(state, source, rank=world.rank, strict=strict)
        except CorruptError as error:
            if step is not None:
                raise
            _log.warning("step %d cannot be loaded, trying an older one: %s", chosen, error)
            fault = fault or error


def open(root: str | Path, *, step: int | None = None) -> Checkpoint:
    """Open ``step`` (None: the newest that can be trusted) for reading, without a model.

    ``root`` may also be the directory of one step. Raises ``NotFoundError`` listing the steps
    there are, ``CorruptError`` naming the damaged file.
    """
    place, named = locate(root)
    return Checkpoint(StoreSource(place, choose(place, named if step is None else step)))
