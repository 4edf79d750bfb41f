"""The page of the configuration names every environment variable that users may set."""

from __future__ import annotations

import re
from typing import Final

from tree import ROOT

PAGE: Final = ROOT / "docs/reference/configuration.md"
PRODUCT: Final = ("ckpt", "elastic", "adapters", "tools", "src")

INTERNAL: Final = {
    "HOLDFAST_CHAOS_ENGINES": "`holdfast chaos` sets it for the servers that it disturbs",
    "HOLDFAST_CHAOS_GATE": "`holdfast chaos` sets it for its own training programs",
    "HOLDFAST_CHAOS_ORDERS": "`holdfast chaos` sets it for the processes that it disturbs",
    "HOLDFAST_CHAOS_RULES": "`holdfast chaos` sets it for the library that it preloads",
    "HOLDFAST_CHAOS_RUN": "`holdfast chaos` marks its own processes with it",
    "HOLDFAST_SOAK_OWN_MEMORY": "the soak sets it when it starts itself in a mount namespace",
    "HOLDFAST_TRACE": "`holdfast check` sets it for the runs that it compares",
    "HOLDFAST_WORKER": "an agent sets it for its workers",
}
"""The variables that one process of Holdfast sets for another, and the reason."""


def in_code() -> set[str]:
    """Return the variables that are named by a string of the product code."""
    texts = [
        path.read_text()
        for folder in PRODUCT
        for suffix in ("py", "c")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    return {name for text in texts for name in re.findall(r'"(HOLDFAST_[A-Z_]+)"', text)}


def on_the_page() -> set[str]:
    return set(re.findall(r"`(HOLDFAST_[A-Z_]+)", PAGE.read_text()))


def test_every_variable_for_users_stands_on_the_page_and_no_other() -> None:
    assert len(in_code()) > 15
    assert on_the_page() == in_code() - INTERNAL.keys()


def test_every_internal_variable_is_one_of_the_code() -> None:
    assert INTERNAL.keys() - in_code() == set()
