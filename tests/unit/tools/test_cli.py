"""The `holdfast` command: quick, lazy, and without tracebacks for users' errors."""

import argparse
import errno
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata

import pytest
from tree import ROOT

from holdfast.ckpt.errors import CorruptError, InternalError
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.tools import cli
from holdfast.tools.subcommand import Subparsers


class FakeCommand:
    """A subcommand whose run does what a test wants."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def add_parser(self, subparsers: Subparsers) -> argparse.ArgumentParser:
        parser = subparsers.add_parser("inspect", help="test")
        parser.add_argument("path")
        return parser

    def run(self, args: argparse.Namespace) -> int:
        if self.error:
            raise self.error
        print(args.path)
        return 0


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> int:
    monkeypatch.setattr(cli, "load", lambda command: FakeCommand(error) if command else None)
    return cli.main(["inspect", "some/path"])


def run_as(monkeypatch: pytest.MonkeyPatch, body: Callable[[object], int]) -> int:
    command = FakeCommand()
    monkeypatch.setattr(command, "run", body)
    monkeypatch.setattr(cli, "load", lambda name: command if name else None)
    return cli.main(["inspect", "some/path"])


def printed(program: str) -> str:
    """Run a program in an interpreter of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from holdfast.tools.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'zmq', 'rich', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    said = printed(program)
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\b", said, re.MULTILINE), name


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: holdfast {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nosuch"], ["--nosuch"], ["inspect"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == cli.EXIT_USAGE


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("holdfast 0.")


def test_success_is_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(monkeypatch, None) == 0
    assert capsys.readouterr().out == "some/path\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CorruptError("pack 3:\n   CRC differs"), "error: pack 3: CRC differs\n"),
        (JobFailedError("no node is left"), "error: no node is left\n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x/y"),
            "error: x/y: No such file or directory; check the path\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "x/y"),
            "error: x/y: No space left on device; make room there or choose another place; "
            "nothing committed earlier is harmed\n",
        ),
        (
            OSError(errno.EADDRINUSE, "Address already in use"),
            "error: Address already in use; another program listens there: stop it or choose "
            "another port\n",
        ),
        (OSError("plain words"), "error: plain words\n"),
        (
            ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym.core"),
            "error: `holdfast inspect` needs the package reasoning_gym, which is not installed: "
            "pip install 'holdfast[rl]'\n",
        ),
    ],
)
def test_what_users_can_cause_is_one_paragraph_and_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
) -> None:
    assert run_with(monkeypatch, error) == cli.EXIT_FAILED
    assert capsys.readouterr().err == message


def test_a_wrong_setting_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, ConfigError("give 1 or more")) == cli.EXIT_USAGE
    assert capsys.readouterr().err == "error: give 1 or more\n"


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, KeyboardInterrupt()) == cli.EXIT_INTERRUPTED


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(InternalError):
        run_with(monkeypatch, InternalError("a signal that nothing took"))
    with pytest.raises(ModuleNotFoundError):
        run_with(monkeypatch, ModuleNotFoundError("no", name="holdfast.nosuch"))


def test_termination_is_143_and_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def run(_: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
            return 0
        finally:
            cleaned.append(True)

    assert run_as(monkeypatch, run) == cli.EXIT_TERMINATED == 143
    assert cleaned
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_breaks_under_an_interrupt_is_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos")

    assert run_as(monkeypatch, run) == cli.EXIT_INTERRUPTED


@pytest.mark.parametrize("package", cli.EXTRA_OF)
def test_a_missing_optional_package_is_told_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")
    assert run_with(monkeypatch, error) == cli.EXIT_FAILED
    assert f"pip install 'holdfast[{cli.EXTRA_OF[package]}]'" in capsys.readouterr().err


def test_no_command_needs_an_extra_before_it_is_asked_for_what_the_extra_does() -> None:
    program = (
        "import sys\n"
        "from holdfast.tools import cli\n"
        "sys.modules |= dict.fromkeys(cli.EXTRA_OF)\n"
        "for name in cli.COMMANDS: cli.build_parser(name, cli.load(name))\n"
        "import holdfast.tools.chaos.fixtures.cluster\n"
        "import holdfast.tools.chaos.real.launching.__main__\n"
    )
    printed(program)


def test_every_extra_for_users_is_named_for_each_of_its_packages() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    extras = {
        name: what
        for name, what in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
    }
    assert set(cli.EXTRA_OF.values()) == set(extras)
    imported: dict[str, set[str]] = {}
    for package, distributions in metadata.packages_distributions().items():
        for each in distributions:
            imported.setdefault(each.lower().replace("_", "-"), set()).add(package)
    for extra, requirements in extras.items():
        for requirement in requirements:
            name = re.split(r"[^a-z0-9-]", requirement.lower(), maxsplit=1)[0]
            packages = imported.get(name, {name})  # of one that is not installed, as trl, its name
            assert extra in {cli.EXTRA_OF.get(each) for each in packages}, requirement
