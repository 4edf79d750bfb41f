"""The commands of `holdfast chaos`, one module each; `tools.chaos.command` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

Add: TypeAlias = Callable[..., argparse.Action]
"""``ArgumentParser.add_argument`` of a command's parser."""


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """The help texts of a command: one line, a description, and examples after its arguments."""

    help: str
    description: str
    epilog: str = ""


class Command(Protocol):
    """A module that implements a command."""

    WORDS: Words

    def declare(self, add: Add) -> None:
        """Declare the arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""
