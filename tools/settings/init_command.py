"""``holdfast init``: a first `holdfast.toml`, and a job file for the launcher at hand."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Final

from holdfast.elastic.errors import ConfigError
from holdfast.tools.printing import say
from holdfast.tools.settings import configured
from holdfast.tools.settings.configured import CONFIGURED, NAME
from holdfast.tools.settings.launchers import LAUNCHERS, at_hand
from holdfast.tools.settings.template import template
from holdfast.tools.subcommand import HelpFormatter, Subparsers

_EXAMPLES: Final = """\
examples:
  holdfast init                              holdfast.toml, and a job file for the launcher found
  holdfast init --launcher slurm --script pretrain.py
  holdfast init --launcher local             holdfast.toml only
"""
_SCRIPT: Final = "train.py"
_EXECUTABLE: Final = 0o755


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "init",
        help="write a commented holdfast.toml, and a job file for the launcher at hand",
        description="Writes holdfast.toml, in which every setting stands with its default, "
        "commented out, and a job file for the launcher at hand. Files that exist stay.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "--launcher",
        choices=tuple(LAUNCHERS),
        help="write the job file for this launcher (default: the one found on this machine)",
    )
    add("--script", default=_SCRIPT, metavar="FILE", help="the training script (default train.py)")
    add("--dir", type=Path, default=Path(), metavar="DIR", help="write there (default: here)")
    add("--force", action="store_true", help="replace files that exist")
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the files and say what comes next; 0 if all were written."""
    launcher, why = args.launcher, "as you asked"
    if launcher is None:
        programs = {p for each in LAUNCHERS.values() for p in each.programs if shutil.which(p)}
        launcher, why = at_hand(os.environ, programs)
    job = LAUNCHERS[launcher]
    files = {NAME: settings_text(args.whole())}
    if job.source:
        files[job.source] = job_text(job.source, args.script)
    written = _write(args.dir, files, force=args.force)
    say(f"launcher: {launcher} ({why}): {job.title}")
    for path in written:
        say(f"wrote {path}")
    others = ", ".join(name for name in LAUNCHERS if name != launcher)
    start = job.start.format(file=job.source, script=args.script)
    say("")
    say("next:")
    if job.source:
        say(f"  look at {written[-1]}: nodes, processors and names are examples")
    say(f"  holdfast check {args.script}")
    say("  holdfast settings")
    say(f"  {start}")
    say(f"other launchers: holdfast init --launcher {{{others}}}")
    return 0


def settings_text(parser: argparse.ArgumentParser) -> str:
    """Return the text of the first `holdfast.toml` for the commands of a complete parser."""
    commands = configured.inner(parser)[0]
    return template(
        {
            table: configured.leaf(parser, words)
            for table, words in CONFIGURED.items()
            if words[0] in commands
        }
    )


def job_text(source: str, script: str) -> str:
    """Return a job file of the documentation for a script."""
    text = resources.files("holdfast.tools.settings").joinpath("jobs", source).read_text("utf-8")
    if script == _SCRIPT:
        return text
    if not re.fullmatch(r"[\w./+-]+", script):
        raise ConfigError(
            f"--script {script!r}: job files have no room for other characters than letters, "
            "digits and ./+-_; rename the script, or write its name into the file yourself"
        )
    return re.sub(rf"(?<![\w.-]){re.escape(_SCRIPT)}(?![\w-])", lambda _: script, text)


def _write(directory: Path, files: dict[str, str], *, force: bool) -> list[Path]:
    """Write all files, or none if one exists and is not to be replaced."""
    paths = {directory / name: text for name, text in files.items()}
    there = [str(path) for path in paths if os.path.lexists(path)]
    if there and not force:
        raise ConfigError(
            f"{', '.join(there)}: exists, so nothing was written; give --force to replace it, or "
            "--dir DIR to write elsewhere"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            fresh.chmod(_EXECUTABLE)
        fresh.replace(path)
    return list(paths)
