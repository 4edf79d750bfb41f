"""The rewriting of a checkpoint in another layout, without torch and in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.checkpoint import CheckpointSink, CheckpointSource
from holdfast.ckpt.convert.interchange import MEMORY_BYTES, Progress, Transferred, transfer
from holdfast.ckpt.convert.target_layout import TargetLayout
from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.places import open_store


def reshard(
    source: StoreSource,
    target: str | Path,
    *,
    layout: TargetLayout,
    compression: Mapping[str, str] | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress = lambda _: None,
) -> Transferred:
    """Write ``source`` again below ``target``, in another layout, within ``memory_bytes``.

    ``compression`` maps glob patterns to codecs; None compresses each tensor as before. Run,
    generation and step stay; values of a rank that is not in the new world are left out. After a
    kill, call it again: it continues behind the last complete writer, whose bytes are not in the
    result. Raises ``StoreError`` if the target has that step already.
    """
    if open_store(target).where("") == source.store.where(""):
        raise StoreError(f"{target}: source and target are the same; choose another target")
    tensors = CheckpointSource(source)
    identity = tensors.identity
    if compression is not None:
        identity = replace(identity, compression=compression)
    sink = CheckpointSink(target, layout=layout, identity=identity)
    try:
        return transfer(
            tensors, sink, memory_bytes=memory_bytes, progress=progress, step=tensors.step
        )
    finally:
        sink.close()
