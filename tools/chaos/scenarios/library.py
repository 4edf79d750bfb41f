"""The scenarios that come with Holdfast, found by name."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError, load

FOLDER: Final = Path(__file__).with_name("ready")


def ready() -> dict[str, Path]:
    """Return the files of the ready scenarios by name, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find(text: str) -> tuple[Scenario, Path]:
    """Return the scenario of a file, or the ready one of that name, with its file.

    Raises ``ScenarioError`` where there is neither.
    """
    known = ready()
    path = known.get(text) or Path(text)
    if text not in known and path.suffix != ".toml" and not path.is_file():
        close = difflib.get_close_matches(text, known) or list(known)
        raise ScenarioError(
            f"{text}: no file, and no ready scenario of that name; there is {', '.join(close)} "
            "(`holdfast chaos list`)"
        )
    return load(path), path
