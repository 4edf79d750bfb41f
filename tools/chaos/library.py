"""Scenario files: those that come with Holdfast, found by name, and those of users."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError, parse

FOLDER: Final = Path(__file__).parent / "scenarios" / "ready"


def load(path: Path) -> Scenario:
    """Return the scenario in a file; raises ``ScenarioError`` with file, field and remedy."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: not TOML: {error}") from error
    return parse(found, source=str(path))


def ready() -> dict[str, Path]:
    """Return the files of the ready scenarios by name, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find(text: str) -> tuple[Scenario, Path]:
    """Return the scenario of a file, or the ready one of that name, with its file.

    Raises ``ScenarioError`` if there is neither.
    """
    known = ready()
    path = known.get(text) or Path(text)
    if text not in known and path.suffix != ".toml" and not path.is_file():
        close = difflib.get_close_matches(text, known) or list(known)
        raise ScenarioError(
            f"{text}: there is no such file and no included scenario of that name; choose from "
            f"{', '.join(close)} (`holdfast chaos list`)"
        )
    return load(path), path
