"""The reference page of Holdfast's errors, generated from their classes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Final

from holdfast.ckpt.errors import HoldfastError

MODULES: Final = (
    "holdfast.ckpt.errors",
    "holdfast.elastic.errors",
    "holdfast.elastic.events.wire",
    "holdfast.adapters.rl.environments.base",
    "holdfast.adapters.rl.ledger.states",
    "holdfast.adapters.rl.weights.pull",
    "holdfast.tools.chaos.faults.injector",
    "holdfast.tools.chaos.judging.history",
    "holdfast.tools.chaos.judging.result",
    "holdfast.tools.chaos.scenarios.scenario",
)
"""The modules that define errors with a code."""

_HEAD: Final = """\
# Errors

Every error of Holdfast derives from `holdfast.HoldfastError`. Its message says what was found, what
was needed and what to do. Each class below has a `code`, by which the processes of a job name it to
each other. A code keeps its meaning in all versions. A class that is not listed has the code of its
parent, and is handled like it.

`holdfast.elastic.Stopped` is no error: it ends the function of a worker when the job is over. Let
it pass.

| code | class | meaning | remedy |
|---|---|---|---|
"""


def listed() -> list[type[HoldfastError]]:
    """Return the classes that define a code, in order of code."""
    for module in MODULES:
        import_module(module)
    found = {kind for kind in _tree(HoldfastError) if kind.__module__ in MODULES}
    return sorted((kind for kind in found if "code" in vars(kind)), key=lambda kind: kind.code)


def meaning(kind: type[HoldfastError]) -> str:
    """Return the first paragraph of a class's docstring, on one line."""
    return " ".join((vars(kind).get("__doc__") or "").split("\n\n")[0].split())


def errors_page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(
        f"| {kind.code} | {_class(kind)} | {meaning(kind)} | {kind.remedy} |\n" for kind in listed()
    )


def _class(kind: type[HoldfastError]) -> str:
    parent = kind.__bases__[0]
    is_branch = parent not in (Exception, HoldfastError)
    return f"`{kind.__name__}`" + (f", a `{parent.__name__}`" if is_branch else "")


def _tree(kind: type[HoldfastError]) -> Iterator[type[HoldfastError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _tree(each)
