"""Save, load and open checkpoints: the functions that a training script calls."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from typing_extensions import Buffer

from holdfast.ckpt import checks, torch_versions
from holdfast.ckpt.agreement import check_values
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.attempts import SaveAttempt
from holdfast.ckpt.checkpoints.catalog import (
    MAX_STEP,
    choose,
    is_removed,
    newest_first,
    step_folder,
    verified,
)
from holdfast.ckpt.checkpoints.commit import (
    PackOptions,
    WriterReceipt,
    commit,
    new_tag,
    write_parts,
)
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.collective import RankWorld
from holdfast.ckpt.convert.patterns.choice import Patterns, chosen_patterns
from holdfast.ckpt.convert.patterns.shards import shards_of
from holdfast.ckpt.errors import (
    ArgumentError,
    CkptError,
    CorruptError,
    NotFoundError,
    StateError,
    StoreError,
    VersionError,
)
from holdfast.ckpt.geometry.shard_index import ChunkRef
from holdfast.ckpt.inspect.view import Checkpoint
from holdfast.ckpt.state import plain, torch_dtypes
from holdfast.ckpt.state.capture import CapturePlan, FlatState, flatten
from holdfast.ckpt.state.copying import copy_out
from holdfast.ckpt.state.flatten import check_state
from holdfast.ckpt.state.kinds import rebuilt
from holdfast.ckpt.state.local_boxes import regions
from holdfast.ckpt.state.restore import RestoreReport, live_keys, restore
from holdfast.ckpt.state.strictness import Select, Strict, Strictness, check_patterns
from holdfast.ckpt.store.places import locate, open_store

_log = logging.getLogger(__name__)


def save(
    root: str | Path,
    state: Mapping[str, Any],
    *,
    step: int,
    compression: Mapping[str, str] | None = None,
    base: int | Literal["latest"] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> str:
    """Save ``state`` as ``step`` below ``root`` and return the step's directory.

    ``root`` is a directory, ``s3://bucket/prefix``, ``gs://bucket/prefix`` or
    ``az://container/prefix``. ``state`` maps names to modules, optimizers, objects with
    ``state_dict``/``load_state_dict``, tensors, NumPy arrays, `TensorShard`, `FlatShard`,
    `PerRank`, `Rebuilt` and plain values. With torch.distributed, every rank calls this with the
    same arguments and writes its own part; an error on one rank is raised on all. The checkpoint
    becomes visible once it is complete and durable, not before; a step that is saved again is
    entirely the old one or entirely the new one.

    ``compression`` maps glob patterns of names to codecs (``zstd``, ``zstd:9``, ``blosc-lz4``,
    ``blosc-zstd:5``, ``none``; the first match counts; nothing is compressed by default). ``base``
    is an earlier step of this root, or ``"latest"``: the checkpoint refers to its unchanged tensors
    instead of writing them again. ``mesh`` is recorded for people: the axes of the device mesh and
    their sizes.

    Raises ``ArgumentError`` for an argument of a wrong type or value, ``StateError`` for a state
    that cannot be saved, ``StoreError`` when the store refuses (full, read-only, forbidden) and
    ``VersionError`` for a torch that was never tested.
    """
    world = RankWorld()
    with world.agreed():
        _check_torch()
        step, axes = _new_step(step), _axes(mesh, world)
        check_state(state)
        _check_root(root)
        root = redirects.to_write(root)
        store, folder = open_store(root), step_folder(step)
        options = PackOptions(compression=compression or {}, base=_base(root, base, world, step))
        flat = flatten(state, rank=world.rank)
        for fqn, tensor in flat.tensors.items():
            regions(fqn, tensor)
    if flat.rebuilt:
        rebuilt.inspect(flat.rebuilt, gather=world.gather)
        flat = flatten(state, rank=world.rank)
    if len(set(steps := world.gather(step))) > 1:
        raise ArgumentError(
            f"{root}: the ranks save different steps {steps}; save the same step on every rank"
        )
    options = replace(options, base=world.gather(options.base)[0])
    check_values(flat, gather=world.gather)
    plan = CapturePlan.build(flat, rank=world.rank, world_size=world.size, gather=world.gather)
    with contextlib.ExitStack() as until_end:
        with world.agreed():  # the rank that commits: nobody has written yet
            if world.rank == 0:
                until_end.enter_context(SaveAttempt(root, step))
        with world.agreed():
            receipt = _write(root, flat, plan, step=step, options=options)
        receipts = msgspec.convert(
            world.gather(msgspec.to_builtins(receipt)), tuple[WriterReceipt, ...]
        )
        with world.agreed():
            if world.rank == 0:
                commit(root, run="", step=step, generation=0, receipts=receipts, mesh=axes)
    return store.where(folder)


def _check_torch() -> None:
    if reason := torch_versions.objection(torch.__version__, os.environ):
        raise VersionError(reason)


def _step_number(step: object, *, name: str = "step") -> int:
    """Return ``step`` as a plain integer; accept numpy integers and one-integer tensors."""
    try:
        if isinstance(step, bool):
            raise TypeError
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        found = checks.shown(step)
        raise ArgumentError(f"{name} is {found}; give a whole number, such as 100") from error


def _new_step(step: object) -> int:
    """Return ``step`` as a plain integer that a step of a checkpoint may have."""
    number = _step_number(step)
    if not 0 <= number <= MAX_STEP:
        raise ArgumentError(f"step is {checks.shown(number)}; give a number from 0 to {MAX_STEP}")
    return number


def _axes(mesh: Mapping[str, int] | None, world: RankWorld) -> dict[str, int]:
    if mesh is None:
        return {"dp": world.size}
    if not isinstance(mesh, Mapping):
        found = checks.shown(mesh)
        raise ArgumentError(f"mesh is {found}; give axes and their sizes, such as {{'dp': 2}}")
    axes: dict[str, int] = {}
    for axis, size in mesh.items():
        try:
            name = plain.check_text(str(axis), "mesh")
        except StateError as error:
            raise ArgumentError(str(error)) from error
        axes[name] = _step_number(size, name=f"mesh[{axis!r}]")
        if not -(2**63) <= axes[name] < 2**63:
            raise ArgumentError(
                f"mesh[{axis!r}] is beyond any number of ranks; give the axis's size"
            )
    return axes


def _check_root(root: str | Path) -> None:
    """Refuse the directory of one step, which `save` returns, as a root of steps."""
    _, named = locate(root)
    if named is not None:
        raise ArgumentError(f"{root}: the directory of step {named}; give the root it is in")


def _base(
    root: str | Path, base: int | Literal["latest"] | None, world: RankWorld, step: int
) -> int | None:
    """Return the step to compare with, as rank 0 finds it; None if there is none."""
    if base is None or world.rank != 0:
        return None
    if base != "latest":
        if isinstance(base, str):
            raise ArgumentError(f"base is {base!r}; give an earlier step, or 'latest'")
        return _step_number(base, name="base")
    with contextlib.suppress(CorruptError):  # no step there can be trusted: save in full
        return next((each for each in verified(root) if each != step), None)
    return None


def _write(
    root: str | Path, flat: FlatState, plan: CapturePlan, *, step: int, options: PackOptions
) -> WriterReceipt:
    """Stream this rank's tensors from their memory into its pack."""
    places = [piece.at for piece in plan.pieces]
    sources = dict(zip(places, plan.sources(flat), strict=True))
    _await_devices(sources.values())

    def payload(ref: ChunkRef) -> Buffer:
        local = sources[ref.chunk.at]
        lazy = local.is_conj() or local.is_neg()
        if local.device.type == "cpu" and local.is_contiguous() and not lazy:
            return (
                np.ascontiguousarray(torch_dtypes.as_carrier(local).numpy())
                .reshape(-1)
                .view(np.uint8)
                .data
            )
        room = bytearray(ref.chunk.nbytes)
        copy_out(local, memoryview(room))
        return room

    index = plan.index(flat, [0] * len(places), step=step)
    return write_parts(
        root, index=index, payload=payload, tag=new_tag(), verify=False, options=options
    )


def _await_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the devices of tensors: the thread that reads them has a stream of its own there."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def load(
    root: str | Path,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: Strict = "exact",
    select: Select = None,
    patterns: Patterns | str | Path | None = None,
) -> RestoreReport:
    """Load ``step`` (None: the newest that can be trusted) from ``root`` into ``state``, in place.

    ``root`` may also be the directory of one step, as `save` returns it. The state may be sharded
    over other ranks than at the save. With torch.distributed, every rank calls this; all load the
    same step or all raise. With ``step=None`` a damaged checkpoint is skipped with a warning.

    ``strict`` says which keys may differ: ``exact`` (none), ``ignore-missing`` (keys of the state
    may be missing in the checkpoint), ``ignore-extra`` (the reverse) or ``ignore`` (both), for all
    keys or as a mapping of glob patterns to levels, of which the first match counts. The report
    lists ignored keys; another dtype or shape is never accepted. ``select`` is a glob pattern, or
    several, of the keys to load (``model.*``); everything else stays as it is. ``patterns`` are the
    path of a pattern file, a shipped name or `Patterns`: the state is compared with the tensors
    that they make of the saved ones.

    Raises ``ArgumentError`` for an argument of a wrong type or value, ``NotFoundError`` listing the
    existing steps, ``MismatchError`` listing the keys that differ, and ``VersionError`` for a torch
    that was never tested, before anything is changed, and ``CorruptError`` naming the damaged file;
    the state may then be overwritten in part.
    """
    world = RankWorld()
    candidates: Iterator[int] = iter(())
    fault: CkptError | None = None
    with world.agreed():
        _check_torch()
        Strictness.of(strict)
        check_patterns(select)
        seen = None if patterns is None else chosen_patterns(patterns)
        check_state(state)
        place, named = locate(root)
        if named is not None and step is None:
            root, step = place, named
        if step is not None:
            step = _step_number(step)
        own = root
        if world.rank == 0:
            root = redirects.to_read(own, step)
            candidates = newest_first(root) if step is None else iter([choose(root, step)])
        found = flatten(state, rank=world.rank)
        mine = live_keys(found) if world.size > 1 else []
    if found.rebuilt:
        rebuilt.inspect(found.rebuilt, gather=world.gather)
    flat = None if found.rebuilt else found
    elsewhere = {key for keys in _exchanged(mine, world) for key in keys}
    while True:
        with world.agreed():
            best = next(candidates, None) if world.rank == 0 else None
        chosen, is_own = world.gather((best, root == own))[0]  # one root for all ranks
        root = own if is_own else redirects.to_write(own)
        if chosen is None:
            raise fault or CorruptError(f"{root}: no step can be loaded; save again")
        try:
            with contextlib.ExitStack() as until_end:
                with world.agreed():  # what the patterns refuse changes no rank's state
                    source = until_end.enter_context(closing(StoreSource(root, chosen)))
                    shards, told = shards_of(source, seen, rank=world.rank, ranks=world.size)
                    for words in told if world.rank == 0 else ():
                        _log.warning("%s", words)
                with world.agreed():
                    return restore(
                        state if flat is None else flat,
                        shards,
                        rank=world.rank,
                        world_size=world.size,
                        strict=strict,
                        select=select,
                        elsewhere=elsewhere,
                    )
        except (CorruptError, NotFoundError) as error:
            if step is not None:
                raise
            fault, flat = fault or error, None  # the state may have been changed in part
            if isinstance(error, NotFoundError) or _is_gone(root, chosen):
                continue  # another process removed it since it was listed
            _log.warning("step %d cannot be loaded, trying an older one: %s", chosen, error)


def _is_gone(root: str | Path, step: int) -> bool:
    with contextlib.suppress(StoreError):
        return is_removed(open_store(root), step)
    return False


def _exchanged(keys: list[str], world: RankWorld) -> list[list[str]]:
    """Return the keys of all ranks, or nothing where all have the same."""
    digest = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return []
    return world.gather(keys)


def open(root: str | Path, *, step: int | None = None) -> Checkpoint:
    """Open ``step`` (None: the newest that can be trusted) for reading, without a model.

    ``root`` may also be the directory of one step. Raises ``ArgumentError`` for an argument of a
    wrong type, ``NotFoundError`` listing the existing steps, ``CorruptError`` naming the damaged
    file.
    """
    place, named = locate(root)
    wanted = named if step is None else _step_number(step)
    return Checkpoint(StoreSource.chosen(redirects.to_read(place, wanted), wanted))
