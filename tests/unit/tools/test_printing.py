"""Text of foreign files reaches a terminal as characters that print, by whatever way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from rich.table import Table
from rich.text import Text

from holdfast import save
from holdfast.tools.cli import main
from holdfast.tools.printing import json_text, make_logs_printable, printable, say
from holdfast.tools.subcommand import report
from holdfast.tools.terminal import console

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\u202e[/b]\u009b31m[red]:smile:\udcff"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\u202e[/b]\x9b31m[red]:smile:\udcff"


def test_what_does_not_print_is_escaped() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("ordinary … ✓ ß 語") == "ordinary … ✓ ß 語"
    assert printable("one\ntwo") == r"one\ntwo"
    assert printable("one\n\x1btwo", lines=True) == "one\n\\x1btwo"


def test_lines_errors_and_logs_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    say(HOSTILE, stderr=True)
    report(HOSTILE)
    make_logs_printable()
    assert logging.lastResort is not None
    record = logging.LogRecord("x", logging.WARNING, "", 0, "damaged: %s", (HOSTILE,), None)
    assert logging.lastResort.format(record) == f"damaged: {SHOWN}"
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\n"
    assert err == f"{SHOWN}\nerror: {SHOWN}\n"


def test_a_console_takes_text_for_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None)
    table.add_row(HOSTILE, Text(HOSTILE))
    console().print(table)
    console().print(HOSTILE, soft_wrap=True)
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 2
    assert out.count(SHOWN.partition("[2J")[2][:12]) == 3, "a styled text too"
    assert all(each.isprintable() for each in out.replace("\n", ""))


def test_json_keeps_its_meaning_in_characters_that_print() -> None:
    content = {HOSTILE.removesuffix("\udcff"): ["\x7f\u2028 ß \U000e0001"]}
    text = json_text(content)
    assert text.isprintable()
    assert json.loads(text) == content
    assert "ß" in text


@pytest.mark.parametrize(
    "words",
    [
        ["inspect"],
        ["inspect", "--tree", "--layout"],
        ["inspect", "--json"],
        ["verify", "--deep"],
        ["cat", "NAME"],
        ["cat", "VALUE"],
        ["cat", "missing"],
        ["diff", "ROOT"],
        ["convert", "OUT.safetensors"],
    ],
)
def test_no_command_prints_what_a_name_commands(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, name = tmp_path / "root", HOSTILE.removesuffix("\udcff")
    save(root, {name: torch.ones(3), f"{name} too": name}, step=1)
    save(tmp_path / "other", {name: torch.zeros(3), "more\x1b": 1}, step=1)
    names = {"NAME": name, "VALUE": f"{name} too", "ROOT": str(tmp_path / "other")}
    names["OUT.safetensors"] = str(tmp_path / "out.safetensors")
    command, *rest = words
    main([command, str(root), *(names.get(each, each) for each in rest)])
    out, err = capfd.readouterr()
    assert all(each.isprintable() for each in (out + err).replace("\n", ""))
