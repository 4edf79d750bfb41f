"""The decision which checkpoint a run loads, and whether it fits the run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["holdfast", "dcp", "hf"]
"""Its format: Holdfast's, a directory of DCP as torchtitan writes it, or safetensors."""

_SHOWN: Final = 20
_DATALOADER: Final = "dataloader"


class LoadOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to load, by the address of its directory."""

    path: str
    kind: Kind
    model_only: bool = False


class StepsThere(msgspec.Struct, frozen=True, kw_only=True):
    """The steps in a run's folder: those of Holdfast that were committed, those of torchtitan.

    ``trusted`` is the newest of Holdfast's that passes the quick check.
    """

    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()
    trusted: int | None = None

    def listed(self) -> str:
        """Return the newest of them, as a message shows them."""
        every = sorted({*self.ours, *self.theirs})
        return ("… " if len(every) > _SHOWN else "") + ", ".join(map(str, every[-_SHOWN:]))


def resumed(there: StepsThere, wanted: int | None) -> tuple[Kind, int] | None:
    """Return the kind and the step from which a run goes on: ``wanted``, or the newest.

    None stands for no such step. Holdfast's counts where both formats have it.
    """
    if wanted is not None:
        if wanted in there.ours:
            return "holdfast", wanted
        return ("dcp", wanted) if wanted in there.theirs else None
    theirs = max(there.theirs, default=-1)
    if there.trusted is not None and there.trusted >= theirs:
        return "holdfast", there.trusted
    return ("dcp", theirs) if theirs >= 0 else None


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a checkpoint: its names, with the dtypes of tensors, and two numbers.

    ``dp_degree`` is the number of ranks among which its data were divided.
    """

    dtypes: Mapping[str, str]
    values: Collection[str]
    dp_degree: int | None = None


class WantedState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a run loads: the dtypes of its weights, and the keys of all other state."""

    dtypes: Mapping[str, str]
    keys: tuple[str, ...] = ()
    dp_degree: int | None = None


def objection(
    stored: StoredState, wanted: WantedState, *, step: int, others: Sequence[int], path: str
) -> str | None:
    """Say why a run cannot go on from a step, and the remedy; None if it can.

    ``others`` are the other steps there.
    """
    names = [*stored.dtypes, *stored.values]
    absent = [key for key in wanted.keys if not any(_is_below(name, key) for name in names)]
    if absent and len(absent) == len(wanted.keys):
        earlier = (
            f"--checkpoint.load_step with one of {', '.join(map(str, others))}"
            if others
            else "no other step is there"
        )
        return (
            f"step {step} has the model only, as last_save_model_only saves it, and a run cannot "
            f"go on from it. Go on from an earlier step ({earlier}), or begin a run in another "
            f"folder with --checkpoint.initial_load_path {path}"
        )
    if absent:
        return (
            f"step {step} has no {absent[0]}: give --checkpoint.exclude_from_loading "
            f"{','.join(absent)} to go on without it"
        )
    degrees = stored.dp_degree, wanted.dp_degree
    if _DATALOADER in wanted.keys and None not in degrees and degrees[0] != degrees[1]:
        return (
            f"step {step} has the places of {degrees[0]} data-parallel ranks in the data, this run "
            f"has {degrees[1]}, and torchtitan cannot divide them anew: give "
            "--checkpoint.exclude_from_loading dataloader, and the data begin from their start; or "
            f"run with {degrees[0]} data-parallel ranks"
        )
    for name, dtype in wanted.dtypes.items():
        if (was := stored.dtypes.get(name, dtype)) != dtype:
            return (
                f"{name} of step {step} is {was}, this run has {dtype}: set --training.dtype "
                f"{was}, or begin a run in another folder with --checkpoint.initial_load_path "
                f"{path}, which converts the weights"
            )
    return None


def _is_below(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")
