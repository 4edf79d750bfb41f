"""The page about planning shows what the command prints, and options that there are."""

from __future__ import annotations

import re
import shlex

import pytest
from tree import ROOT

from holdfast.tools import cli

PAGE = (ROOT / "docs" / "how-to" / "plan.md").read_text()


def test_the_figures_are_those_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (call,) = re.findall(r"^\$ holdfast (plan .*?) --svg", PAGE, re.MULTILINE)
    shown = PAGE.partition("```text\n")[2].partition("```")[0]
    assert cli.main([*shlex.split(call), "--config", "/dev/null"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[: len(shown.splitlines())] == shown.splitlines()


def test_every_option_on_the_page_is_one_of_the_command() -> None:
    parser = cli.build_parser("plan", cli.load("plan"))
    help_text = parser._actions[-1].choices["plan"].format_help()  # type: ignore[index,call-overload]
    for option in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        assert option in help_text
