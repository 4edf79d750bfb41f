"""The pages of the public names, and the check that each of them is documented."""

from __future__ import annotations

import importlib
import inspect
from typing import Final

from holdfast.elastic.events import KINDS

FACES: Final = {
    "holdfast": "The names a training script needs.",
    "holdfast.ckpt": "Checkpoints without the decorator, and their errors.",
    "holdfast.elastic": "The training loop, and its errors.",
    "holdfast.elastic.events": "The kinds of events, as structs.",
    "holdfast.elastic.events.log": "A reader of event files.",
    "holdfast.rl": "Reinforcement learning in a loop of your own.",
    "holdfast.chaos": "Reports of a loop to `holdfast chaos`.",
    "holdfast.adapters.dcp": "torch.distributed.checkpoint with Holdfast's format.",
    "holdfast.adapters.hf": "Trainers of transformers and TRL with Holdfast's loop.",
    "holdfast.adapters.torchtitan": "torchtitan's checkpoints in Holdfast's format.",
    "holdfast.adapters.torchtitan.override": "The same, from torchtitan's command line.",
    "holdfast.adapters.accelerate": "Checkpoints of all that an Accelerator has prepared.",
    "holdfast.adapters.lightning": "`fit` for LightningModules, checkpoints of Fabric and Trainer.",
    "holdfast.adapters.ray": "Jobs on the nodes of a Ray cluster.",
    "holdfast.adapters.trackers": "Experiment trackers that get each protected step once.",
}
"""Public module → one sentence about it. Nothing else is public."""

OPAQUE: Final = {"Loader"}
"""Public classes whose members only the training loop calls. Their pages show no members."""


KIND_OF_STRUCT: Final = {struct.__name__: kind for kind, struct in KINDS.items()}
"""Name of an event's struct → name of its kind, which has a section on the page of events."""


class UndocumentedError(Exception):
    """A public name has no docstring, so that the reference would have an empty entry."""


def names_of(face: str) -> list[str]:
    """Return the public names of a module, without those that are public modules themselves."""
    names: list[str] = importlib.import_module(face).__all__
    return [name for name in names if f"{face}.{name}" not in FACES]


def homes() -> dict[str, list[str]]:
    """Return, for every public module, the names that no earlier module has."""
    seen: list[object] = []
    home: dict[str, list[str]] = {}
    for face in FACES:
        module = importlib.import_module(face)
        home[face] = []
        for name in names_of(face):
            found = getattr(module, name)
            if not any(found is each for each in seen):
                seen.append(found)
                home[face].append(name)
    return home


def undocumented() -> list[str]:
    """Return the public names, and the public members of public classes, without a docstring."""
    lacking = []
    for face in FACES:
        module = importlib.import_module(face)
        for name in names_of(face):
            found = getattr(module, name)
            if not (callable(found) or inspect.isclass(found)):
                continue  # an alias of types or a constant: the string after it is its docstring
            if not found.__doc__:
                lacking.append(f"{face}.{name}")
            if inspect.isclass(found):
                lacking += [f"{face}.{name}.{each}" for each in _bare_members(found)]
    return lacking


def _bare_members(found: type) -> list[str]:
    return [
        name
        for name, member in vars(found).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod))
        and not inspect.getdoc(getattr(found, name))
    ]


def pages() -> dict[str, str]:
    """Return path → text of the page of every public module, and of the page that lists them."""
    if lacking := undocumented():
        raise UndocumentedError(f"public names without a docstring: {', '.join(lacking)}")
    home = homes()
    made = {f"reference/api/{face}.md": _page(face, home) for face in FACES}
    rows = [f"| [`{face}`]({face}.md) | {said} |" for face, said in FACES.items()]
    made["reference/api/index.md"] = "\n".join(
        [
            "# Python API",
            "",
            "These modules are public. Every other module is private and may change at any time.",
            "",
            "| module | purpose |",
            "|---|---|",
            *rows,
            "",
        ]
    )
    return made


def _page(face: str, home: dict[str, list[str]]) -> str:
    lines = [f"# `{face}`", "", FACES[face], ""]
    kinds = [name for name in home[face] if name in KIND_OF_STRUCT]
    if kinds:
        links = [f"[`{name}`](../events.md#{KIND_OF_STRUCT[name]})" for name in kinds]
        lines += [
            "[Events](../events.md) has the fields of every kind:",
            "",
            ", ".join(links) + ".",
            "",
        ]
    elsewhere = [name for name in names_of(face) if name not in home[face]]
    if elsewhere:
        links = []
        for name in elsewhere:
            first = next(each for each in FACES if name in home[each])
            links.append(f"[`{name}`]({first}.md#{first}.{name})")
        lines += [f"Also here: {', '.join(links)}.", ""]
    for name in home[face]:
        if name in kinds:
            continue
        options = ["    options: {members: false, show_signature: false}"] if name in OPAQUE else []
        lines += [f"::: {face}.{name}", *options, ""]
    return "\n".join(lines)
