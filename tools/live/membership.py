"""Asks the coordinator of a running job why nodes that live are not let in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator
from holdfast.elastic.coordinator.service import RECORD, ServiceRecord
from holdfast.elastic.membership.records import GenerationRecord
from holdfast.elastic.membership.view import decode, generation_key
from holdfast.tools.live.asking import TIMEOUT_S, key_of


def held_off(run_dir: Path, waiting: Collection[str]) -> Mapping[str, str]:
    """Return those of ``waiting`` that are held off since they were lost before, with the reason.

    Only the coordinator that a launcher runs can be asked; of any other, and of one that does not
    answer, nothing is returned.
    """
    if not waiting or not (record := _newest(run_dir)):
        return {}
    found = {}
    for name in waiting:
        setback = record.setbacks.get(name)
        if setback is not None and name not in record.nodes:
            times = "once" if setback.losses == 1 else f"{setback.losses} times"
            found[name] = f"it was lost {times}: it is let in when it has lived for a while"
    return found


def _newest(run_dir: Path) -> GenerationRecord | None:
    try:
        data = (run_dir / RECORD).read_bytes()
        service = msgspec.json.decode(data, type=ServiceRecord)
        coordinator = EmbeddedCoordinator(service.address, key_of(run_dir), timeout_s=TIMEOUT_S)
    except (OSError, msgspec.MsgspecError, HoldfastError):
        return None
    key = generation_key(service.run)
    try:
        entry = coordinator.get(key)
        return None if entry is None else decode(key, entry.value, GenerationRecord)
    except HoldfastError:
        return None
    finally:
        coordinator.close()
