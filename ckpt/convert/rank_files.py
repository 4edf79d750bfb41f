"""A directory with one file per rank as one source: each file's name is the prefix of its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.convert.interchange import TensorSource
from holdfast.ckpt.convert.renaming import Renamed, with_prefix
from holdfast.ckpt.errors import MismatchError, NotFoundError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.types import Json

OpenFile = Callable[[Path], TensorSource]

MOST_FILES: Final = 4096
"""All files are open at once."""


class RankFilesSource(Closing):
    """Shows the tensors of several files, as in ``tp0.layers.0.weight`` for a file ``tp0.pt``.

    ``files`` are the files and the functions that open them. Patterns put the ranks' parts
    together. Raises ``NotFoundError`` if there are none.
    """

    def __init__(self, directory: str | Path, files: Mapping[Path, OpenFile]) -> None:
        self.origin = f"rank files in {directory}"
        if not files:
            raise NotFoundError(f"{directory}: no file of a rank is there; check the path")
        if len(files) > MOST_FILES:
            raise MismatchError(f"{directory}: {len(files)} files, at most {MOST_FILES} are read")
        self._sources: dict[str, Renamed] = {}
        self._opened = ExitStack()
        specs: dict[str, TensorSpec] = {}
        aliases: dict[str, str] = {}
        values: dict[str, Json] = {}
        with ExitStack() as opening:
            for path, open_file in files.items():
                if path.stem in self._sources:
                    raise MismatchError(
                        f"{directory}: two files are called {path.stem}; rename one of them"
                    )
                source = with_prefix(open_file(path), f"{path.stem}.")
                opening.callback(source.close)
                self._sources[path.stem] = source
                specs |= source.specs
                aliases |= source.aliases
                values |= source.values
            self._opened = opening.pop_all()
        self.specs: Mapping[str, TensorSpec] = specs
        self.aliases: Mapping[str, str] = aliases
        self.values: Mapping[str, Json] = values
        self._of = {fqn: source for source in self._sources.values() for fqn in source.specs}
        self.parallel = all(source.parallel for source in self._sources.values())

    def read(self, fqn: str, box: Box) -> memoryview:
        """Return a box's elements. Raises ``NotFoundError`` for a name that is not in ``specs``."""
        if fqn not in self._of:
            raise NotFoundError(f"{self.origin}: no tensor {fqn!r}; see its specs")
        return self._of[fqn].read(fqn, box)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()
