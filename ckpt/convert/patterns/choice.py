"""The choice of patterns that a user makes: a file or a shipped name, sizes and the direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from holdfast.ckpt import checks
from holdfast.ckpt.convert.patterns.language import PatternFile
from holdfast.ckpt.convert.patterns.pattern_files import parse
from holdfast.ckpt.errors import ArgumentError, NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """Patterns of a file, the ``sizes`` that it needs, and the direction.

    Forward, pieces become whole tensors; with ``reverse``, whole tensors become pieces.
    """

    file: PatternFile
    sizes: Mapping[str, int] = field(default_factory=dict)
    reverse: bool = False

    @classmethod
    def read(
        cls, source: str | Path, *, sizes: Mapping[str, int] | None = None, reverse: bool = False
    ) -> Patterns:
        """Return the patterns of a TOML file, or of a shipped name such as ``"megatron-llama"``.

        ``sizes`` are the numbers that the file names, such as ``{"tp": 4}``. Raises
        ``NotFoundError`` that lists the shipped names, ``ArgumentError`` for a file that is wrong.
        """
        given = dict(sizes or {})
        rule = checks.count(0, remedy="give each size as a whole number")
        checks.check("sizes", given, dict.fromkeys(given, rule), error=ArgumentError)
        text = str(source)
        if text in shipped():
            data, origin = _folder().joinpath(f"{text}.toml").read_text("utf-8"), f"{text} patterns"
        else:
            data, origin = _text(Path(source)), text
        return cls(file=parse(data, origin=origin), sizes=given, reverse=reverse)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: no text in UTF-8: {error}; give a TOML file") from error
    except OSError as error:
        raise NotFoundError(
            f"{path}: no pattern file ({error.strerror}); give a file, or one of "
            f"{', '.join(shipped())}"
        ) from error


def _folder() -> Path:
    return Path(str(files("holdfast.ckpt.convert.patterns").joinpath("shipped")))


def shipped() -> list[str]:
    """Return the names of the pattern files that Holdfast brings."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def chosen_patterns(patterns: Patterns | str | Path) -> Patterns:
    """Return ``patterns``, read where they are a name or a path."""
    if isinstance(patterns, Patterns):
        return patterns
    if isinstance(patterns, str | Path):
        return Patterns.read(patterns)
    raise ArgumentError(
        f"patterns is {checks.shown(patterns)}; give the path of a file, a shipped name, or "
        "Patterns.read(…)"
    )
