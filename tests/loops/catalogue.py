"""The loops of the library, and the number of lines between a plain loop and its port.

As a program, with ``tests/loops`` on the path, it writes the table of the guide.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import io
import pkgutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import library
import pytest
import torch

from holdfast.elastic import randomness
from holdfast.elastic.seeding import seed_all

RTOL = 2e-3
"""Tolerance of losses between a twin and its port, which rounds gradients to a grid.

A loop may set its own `RTOL`. One that draws random numbers sets `NOISE`, the tolerance of the mean
loss: its port draws others. One whose result depends on the number of ranks sets `PER_RANK`.
"""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of the library: the module with ``plain`` and ``port``."""

    name: str

    @property
    def path(self) -> str:
        """The name under which a process imports the module."""
        return f"library.{self.name}"

    @property
    def module(self) -> ModuleType:
        """The module."""
        return importlib.import_module(self.path)

    @property
    def title(self) -> str:
        """The first line of the module's docstring."""
        return (self.module.__doc__ or "").splitlines()[0]

    @property
    def is_per_rank(self) -> bool:
        """True if each rank has state of its own that reaches the weights."""
        return getattr(self.module, "PER_RANK", False)

    def has_losses(self, found: list[float]) -> None:
        """Fail unless these losses of the port are those of the twin."""
        wanted = self.plain_losses()
        assert len(found) == len(wanted)
        if noise := getattr(self.module, "NOISE", 0.0):
            assert mean(found) == pytest.approx(mean(wanted), rel=noise)
        else:
            assert found == pytest.approx(wanted, rel=getattr(self.module, "RTOL", RTOL))

    def plain_losses(self) -> list[float]:
        """Return the losses that the plain twin prints, from the initial weights of the port."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        seed_all(randomness.build_seed(0))
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                self.module.plain()
        finally:
            torch.set_num_threads(threads)
        return [float(line.split()[1]) for line in printed.getvalue().splitlines()]

    def lines(self) -> tuple[int, int]:
        """Return the number of lines of the twin, and of those that differ in the port."""
        parts = getattr(self.module, "PARTS", ())
        before = _code(self.module.plain)
        after = [line for part in (*parts, self.module.port) for line in _code(part)]
        changed = sum(
            max(end - begin, end_after - begin_after)
            for kind, begin, end, begin_after, end_after in difflib.SequenceMatcher(
                None, before, after, autojunk=False
            ).get_opcodes()
            if kind != "equal"
        )
        return len(before), changed


def _code(function: Any) -> list[str]:
    """Return the lines of a function, without comments and indentation, each statement in one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


LOOPS = [Loop(found.name) for found in pkgutil.iter_modules(library.__path__)]


def table() -> str:
    """Return the table of the guide: every loop, its lines, and how many of them change."""
    rows = [(loop.title, *loop.lines(), loop.name) for loop in LOOPS]
    lines = ["| loop | lines | changed |", "|---|---|---|"]
    lines += [
        f"| {title} (`{name}`) | {count} | {changed} |" for title, count, changed, name in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table into the guide, after its last comment."""
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "port-your-loop.md"
    head, comment, _ = guide.read_text().rpartition("-->\n")
    guide.write_text(f"{head}{comment}\n{table()}")


if __name__ == "__main__":
    main()
