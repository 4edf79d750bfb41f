"""``holdfast completion``: a script with which a shell completes commands, options and paths."""

from __future__ import annotations

import argparse
import sys
from typing import Final

import shtab

from holdfast.tools.settings import configured
from holdfast.tools.subcommand import HelpFormatter, Subparsers

_EXAMPLES: Final = """\
bash, for this user:
  mkdir -p ~/.local/share/bash-completion/completions
  holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
zsh, with DIR in fpath before compinit:
  holdfast completion zsh > DIR/_holdfast
tcsh:
  holdfast completion tcsh > ~/.holdfast.completion.tcsh
  echo 'source ~/.holdfast.completion.tcsh' >> ~/.tcshrc

The shell reads the script alone: completion starts no Python. Write it again after an update.
"""
_FILES: Final = ("FILE", "PATH", "SCRIPT", "SOURCE", "ROOT", "OTHER", "CHECKPOINT")
_FOLDERS: Final = ("DIR", "RUN_DIR")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "completion",
        help="print the completion of commands and options for a shell",
        description="Prints a script with which a shell completes the commands, options, choices "
        "and paths of `holdfast`.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the script; 0."""
    parser = args.whole()
    _name_paths(parser)
    sys.stdout.write(shtab.complete(parser, shell=args.shell))
    return 0


def _name_paths(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments that are paths, in a parser and in all below it."""
    for action in parser._actions:
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    for below in configured.inner(parser)[0].values():
        _name_paths(below)
