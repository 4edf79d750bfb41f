"""The MkDocs hook that generates the pages from the code and draws the diagrams.

MkDocs puts the folder of this file, and no other, on the path while it loads it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkdocs.structure.files import File, Files

from hooks import api, commands, errors_page, events_page, packages, sequences

ROOT = Path(__file__).resolve().parents[2]
_WORDS = re.compile(r"^(```\w+) .+$", re.MULTILINE)
"""Words after a language are for the tests of the examples; the Markdown renderer rejects them."""
_FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def generated() -> dict[str, str]:
    """Return path below ``docs`` → text of every page that is generated from the code."""
    return {
        **api.pages(),
        **commands.pages(),
        "reference/events.md": events_page.events_page(),
        "reference/errors.md": errors_page.errors_page(),
        **packages.pages(ROOT),
    }


def on_files(files: Files, config: Any, **_: object) -> Files:
    """Add the generated pages to the files of the tree."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Replace every sequence diagram with its drawing."""

    def drawn(found: re.Match[str]) -> str:
        try:
            diagram = sequences.parse(found[1])
        except sequences.DiagramError as error:
            raise sequences.DiagramError(f"{page.file.src_path}: {error}") from error
        return f'<div class="diagram">{sequences.draw(diagram, title=page.title)}</div>'

    return _FENCE.sub(drawn, _WORDS.sub(r"\1", markdown))
