"""The commands read `holdfast.toml`: their arguments have its values, and they say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.tools import cli
from holdfast.tools.commands import run_settings


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str) -> None:
    Path("holdfast.toml").write_text(text)


def parsed(*words: str) -> dict[str, object]:
    return vars(cli.parsed(words[0], cli.load(words[0]), words))


def test_without_a_file_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("run", "train.py")["nproc"] == 1
    assert capsys.readouterr().err == ""


def test_the_command_line_counts_before_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    write('[run]\nnproc = 2\nnodes = 3\nrole = ["a=1"]\n')
    found = parsed("run", "--nproc", "5", "--role", "b=2", "train.py", "--nodes", "9")
    assert (found["nproc"], found["nodes"], found["role"]) == (5, 3, [("b", 2)])
    assert found["args"] == ["--nodes", "9"]
    said = capsys.readouterr().err
    assert said == "holdfast: settings from ./holdfast.toml: run.nodes\n"


def test_an_option_given_with_its_default_counts_too() -> None:
    write("[run]\nnproc = 2\n")
    assert parsed("run", "--nproc", "1", "train.py")["nproc"] == 1


def test_a_command_inside_another_has_the_table_of_the_outer() -> None:
    write("[ray]\nnproc = 3\n[snapshots]\nparity = 2\n")
    args = cli.parsed("ray", cli.load("ray"), ["ray", "submit", "train.py"])
    assert args.nproc == 3
    assert run_settings.settings(args) == {"snapshots": {"parity": 2}}


def test_settings_of_the_script_go_to_it_and_options_count_more() -> None:
    write("rehearse = false\n[snapshots]\nparity = 2\nkeep = 3\n[checkpoint]\nroot = 'c'\n")
    args = cli.parsed("run", cli.load("run"), ["run", "--parity", "1", "train.py"])
    assert run_settings.settings(args) == {
        "rehearse": False,
        "snapshots": {"parity": 1, "keep": 3},
        "checkpoint": {"root": "c"},
    }


def test_many_settings_are_named_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{key} = 7" for key in ("every", "keep", "disk_every", "group")]
    write("\n".join(["[run]", "nproc=1", "nodes=1", "port=7", "world=1", "[snapshots]", *lines]))
    parsed("run", "train.py")
    assert "run.nproc, run.nodes" in (said := capsys.readouterr().err)
    assert said.count(",") == 7
    write(Path("holdfast.toml").read_text() + "\nparity = 2\n")
    parsed("run", "train.py")
    assert capsys.readouterr().err.endswith(" and 1 more\n")


def test_a_wrong_file_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    write("[run]\nnprocs = 2\n")
    assert cli.main(["run", "train.py"]) == cli.EXIT_USAGE
    expected = "error: ./holdfast.toml:2: run.nprocs: there is no such key; write nproc\n"
    assert capsys.readouterr().err == expected


def test_a_command_without_settings_reads_no_file() -> None:
    write("[nonsense]\n")
    assert "config" not in parsed("verify", "some/path")


def test_help_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    write("[nonsense]\n")
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert "--config FILE" in capsys.readouterr().out


def test_settings_lists_values_and_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write('[run]\nnproc = 2\nrole = ["a=1"]\n[status]\nwatch = 3\n')
    monkeypatch.setenv("HOLDFAST_SNAPSHOTS_PARITY", "0")
    assert cli.main(["settings", "run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["setting", "value", "origin"],
        ["run.nproc", "2", "./holdfast.toml:2"],
        ["run.role", "['a=1']", "./holdfast.toml:3"],
        ["snapshots.parity", "0", "HOLDFAST_SNAPSHOTS_PARITY"],
    ]
    assert cli.main(["settings", "--json"]) == 0
    assert '"key":"status.watch","value":3' in capsys.readouterr().out
    assert cli.main(["settings", "status", "--all"]) == 0
    assert "status.prometheus" in capsys.readouterr().out


def test_settings_without_any_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["settings"]) == 0
    assert "there is no holdfast.toml here" in capsys.readouterr().out


def test_settings_checks_the_tables_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    write("[sidecar]\nnoode = 2\n")
    assert cli.main(["settings", "run"]) == cli.EXIT_USAGE
    assert "holdfast.toml:2: sidecar.noode" in capsys.readouterr().err


def test_settings_of_a_command_that_has_none_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["settings", "prune"]) == cli.EXIT_USAGE
    assert "no command with settings; give run, ray" in capsys.readouterr().err
