"""The numbers of a plan that a checkpoint or the events of a run already tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.ckpt.checkpoints.catalog import choose, load_manifest, step_folder
from holdfast.ckpt.events import CheckpointDone
from holdfast.ckpt.store.places import locate, open_store
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import GenerationProposed, StepDone, StepProtected
from holdfast.elastic.events.log import EventReader
from holdfast.tools.commands.checkpoints import tensor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNumbers:
    """Values of fields of `PlannedJob` by name, and a line that says where they come from."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: str = ""


def known_numbers(path: str) -> KnownNumbers:
    """Return what a run directory, or a root or step of checkpoints, says about a job.

    Raises ``ConfigError`` for a run without steps, and the errors of opening a checkpoint.
    """
    if any(Path(path).glob("events-*.jsonl")):
        return _of_run(Path(path))
    root, step = locate(path)
    found = choose(root, step)
    manifest = load_manifest(open_store(root), step_folder(found))
    size = sum(tensor_bytes(manifest, fqn) for fqn in manifest.tensors)
    return KnownNumbers(values={"state_bytes": size}, origin=f"state of step {found} in {root}")


def _of_run(run_dir: Path) -> KnownNumbers:
    events = EventReader(run_dir).new()
    steps = [event.seconds for event in events if isinstance(event, StepDone) and event.seconds]
    if not steps:
        raise ConfigError(f"{run_dir}: no step was completed there; give --step-s and --state")
    values: dict[str, Any] = {"step_s": median(steps)}
    worlds = [event.ranks for event in events if isinstance(event, GenerationProposed)]
    if largest := max(worlds, key=len, default=()):
        nodes = {seat.partition("/")[0] for seat in largest}
        values |= {"nodes": len(nodes), "workers": -(-len(largest) // len(nodes))}
    if waits := [event.seconds for event in events if isinstance(event, StepProtected)]:
        values["protect_s"] = median(waits)
    written = [event for event in events if isinstance(event, CheckpointDone)]
    if written:
        values["state_bytes"] = written[-1].bytes
        values["store"] = float(median([event.bytes_per_s for event in written])) or None
    said = ", ".join(sorted(values))
    return KnownNumbers(values=values, origin=f"{said} from the events in {run_dir}")
