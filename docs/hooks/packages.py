"""The page of the packages, generated from the first sentence of each package's docstring."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

ORDER: Final = ("ckpt", "elastic", "adapters", "tools")
"""The folders in import order: the first imports none of the others, the last imports all."""


class UndescribedError(Exception):
    """A package's ``__init__`` has no docstring."""


def sentences(root: Path) -> dict[str, str]:
    """Return package → first paragraph of its docstring, for every package below ``root``."""
    found: dict[str, str] = {}
    for folder in ORDER:
        for path in sorted((root / folder).rglob("__init__.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            name = ".".join(path.parent.relative_to(root).parts)
            found[name] = " ".join(said.partition("\n\n")[0].split())
    return found


def pages(root: Path) -> dict[str, str]:
    """Return path → text of the page that lists the packages below ``root``."""
    found = sentences(root)
    if bare := [name for name, said in found.items() if not said]:
        raise UndescribedError(f"packages without a docstring: {', '.join(bare)}")
    lines = [
        "# Packages",
        "",
        "Imports point one way: `tools` → `adapters` → `elastic` → `ckpt`.",
        "import-linter checks that. Each sentence below is the docstring of the package.",
        "",
    ]
    for folder in ORDER:
        lines += [
            f"## `holdfast.{folder}`",
            "",
            found[folder],
            "",
            "| package | content |",
            "|---|---|",
        ]
        lines += [
            f"| `{name}` | {said} |"
            for name, said in found.items()
            if name.startswith(f"{folder}.")
        ]
        lines.append("")
    return {"explanation/packages.md": "\n".join(lines)}
