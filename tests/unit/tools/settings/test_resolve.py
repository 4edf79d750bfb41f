"""The command line counts before the environment, that before the file, and values say so."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.tools import cli
from holdfast.tools.settings import keys, resolve
from holdfast.tools.settings.configured import CONFIGURED, leaf
from holdfast.tools.settings.resolve import BUILT_IN, SCRIPT, Setting, SettingSources
from holdfast.tools.settings.toml_file import SettingsFile


def parser_of(table: str) -> argparse.ArgumentParser:
    words = CONFIGURED[table]
    return leaf(cli.build_parser(words[0], cli.load(words[0])), words)


def sources(text: str = "", environment: Mapping[str, str] | None = None) -> SettingSources:
    file = SettingsFile(path="h.toml", content=tomllib.loads(text), text=text)
    return SettingSources(file=file, environment=environment or {})


def command(
    text: str,
    table: str = "run",
    environment: Mapping[str, str] | None = None,
    **explicit: Any,
) -> dict[str, Setting]:
    found = resolve.of_command(
        table, parser_of(table), sources(text, environment), explicit=explicit
    )
    return {each.key: each for each in found}


def script(
    text: str, environment: Mapping[str, str] | None = None, **explicit: Any
) -> dict[str, Setting]:
    found = resolve.of_script(sources(text, environment), explicit=explicit)
    return {each.key: each for each in found}


def test_an_option_comes_from_the_first_place_that_gives_it() -> None:
    text, variables = "[run]\nnproc = 2\n", {"HOLDFAST_RUN_NPROC": "3"}
    cases = [
        (command(""), 1, BUILT_IN),
        (command(text), 2, "h.toml:2"),
        (command(text, environment=variables), 3, "HOLDFAST_RUN_NPROC"),
        (command(text, environment=variables, nproc=4), 4, "the command line"),
    ]
    for found, value, origin in cases:
        assert (found["run.nproc"].value, found["run.nproc"].origin) == (value, origin)


def test_a_setting_of_the_script_comes_from_the_first_place_that_gives_it() -> None:
    text, variables = "[snapshots]\nparity = 2\n", {"HOLDFAST_SNAPSHOTS_PARITY": "replicate"}
    cases = [
        (script(""), 1, SCRIPT),
        (script(text), 2, "h.toml:2"),
        (script(text, variables), "replicate", "HOLDFAST_SNAPSHOTS_PARITY"),
        (script(text, variables, parity=3), 3, "the command line"),
    ]
    for found, value, origin in cases:
        setting = found["snapshots.parity"]
        assert (setting.value, setting.origin) == (value, origin)


def test_values_are_those_that_the_command_line_would_make() -> None:
    found = command(
        '[run]\nrole = ["rollout=2", "judge=1"]\nquiet = true\ngrace_s = 9\nworld = "6"\n'
    )
    values = [found[f"run.{key}"].value for key in ("role", "quiet", "grace_s", "world")]
    assert values == [[("rollout", 2), ("judge", 1)], True, 9.0, 6]


def test_variables_are_read_as_numbers_and_texts() -> None:
    variables = {
        "HOLDFAST_SNAPSHOTS_MEMORY": "12GiB",
        "HOLDFAST_SNAPSHOTS_GROUP": "6",
        "HOLDFAST_CHECKPOINT_INCREMENTAL": "true",
        "HOLDFAST_CHECKPOINT_ROOT": "17",
        "HOLDFAST_REHEARSE": "false",
    }
    found = script("", variables)
    keys = ("snapshots.memory", "snapshots.group", "checkpoint.incremental", "checkpoint.root")
    assert [found[key].value for key in keys] == ["12GiB", 6, True, "17"]
    assert found["rehearse"].value is False
    given = command("", environment={"HOLDFAST_RUN_ROLE": "a=1,b=2", "HOLDFAST_RUN_QUIET": "1"})
    assert (given["run.role"].value, given["run.quiet"].value) == ([("a", 1), ("b", 2)], True)


def test_a_variable_that_a_command_reads_by_itself_counts_before_the_file() -> None:
    found = command('[run]\ndomain = "rack1"\n', environment={"HOLDFAST_DOMAIN": "rack2"})
    assert found["run.domain"].value is None  # the command takes the variable
    assert (found["run.domain"].written, found["run.domain"].origin) == ("rack2", "HOLDFAST_DOMAIN")


def test_an_alternative_on_the_command_line_silences_that_of_the_file() -> None:
    found = command("[status]\njson = true\n", "status", prometheus=True)
    assert found["status.json"].value is False
    assert command("[status]\njson = true\n", "status")["status.json"].value is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nnprocs = 2", r"h\.toml:2: run\.nprocs: there is no such key; write nproc$"),
        ("[run]\nqqqq = 2", r"there is no such key; there is .*nproc"),
        ("[run]\nparity = 2", r"h\.toml:2: run\.parity: .*write parity below \[snapshots\]"),
        ("[run]\nparity_group = 2", r"write group below \[snapshots\]"),
        ("[run]\nbandwidth = 2", r"write it below \[checkpoint\]"),
        ("[run]\nkey_file = 'k'", r"names no key, secret or program.*--key-file"),
        ("[run]\netcd = 'k'", r"names no key, secret or program.*--etcd"),
        ("[run]\nnotice_header = ['A=@/etc/shadow']", r"names no key.*--notice-header"),
        ("[run]\nscript = 'x.py'", "there is no such key"),
        ("[run]\nnproc = 0", r"h\.toml:2: run\.nproc = '0' is not a number of at least 1"),
        ("[run]\nnproc = 1.5", r"run\.nproc = '1.5' is not a number"),
        ("[run]\nnproc = [1]", r"run\.nproc = \[1\]: give a value as for --nproc"),
        ("[run]\nnproc = true", r"run\.nproc = True: give a value as for --nproc"),
        ("[run]\nquiet = 1", r"run\.quiet = 1: give true or false"),
        ("[run]\nstop_grace_s = 1", r"write stop_grace_s below \[timeouts\]"),
        ("[run]\nreturn_s = 'x'", r"run\.return_s = 'x': give a number"),
    ],
)
def test_a_wrong_key_or_value_of_a_command_is_named_with_line_and_remedy(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        command(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[snapshots]\nparitty = 2", r"h\.toml:2: snapshots\.paritty: .*write parity$"),
        ("[snapshots]\n\nparity = 'x'", r"h\.toml:3: snapshots\.parity: Snapshots\(parity='x'\)"),
        ("[checkpoint]\nroot = 3", r"checkpoint\.root: Checkpoints\(root=3\): give a directory"),
        ("[checkpoint]\non_error = 'go'", r"give 'retry', 'skip' or 'stop'"),
        ("[timeouts]\nstop_grace_s = 60", "give 0 to 4 seconds"),
        ("[islands]\nouter = {lr = 1}", "there is no such key"),
        ("rehearse = 1", r"h\.toml:1: rehearse: resilient\(rehearse=1\): give True or False"),
        (
            "[snapshots]\nparity = 3\ngroup = 3",
            r"snapshots\.parity \(h\.toml:2\), snapshots\.group \(h\.toml:3\): .*give group=4",
        ),
    ],
)
def test_a_wrong_setting_of_the_script_is_named_with_line_and_remedy(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        script(text)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOLDFAST_RUN_NPROC": "x"}, "HOLDFAST_RUN_NPROC='x' is not a number of at least 1"),
        ({"HOLDFAST_RUN_QUIET": "maybe"}, "HOLDFAST_RUN_QUIET='maybe': give 1 or 0"),
    ],
)
def test_a_wrong_variable_is_named(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command("", environment=variables)
    with pytest.raises(ConfigError, match=r"HOLDFAST_SNAPSHOTS_EVERY: .*give 1 or more steps"):
        script("", {"HOLDFAST_SNAPSHOTS_EVERY": "often"})


def test_tables_are_those_of_commands_and_of_groups() -> None:
    good = sources("rehearse = true\n[run]\n[status]\n[snapshots]\n").file
    assert good is not None
    resolve.check_tables(good, cli.COMMANDS)
    for text, message in (
        ("[rum]", r"h\.toml:1: rum: there is no such table; write run"),
        ("[prune]\nkeep = 1", r"h\.toml:1: prune: there is no such table"),
        ("run = 2", r"a table is needed; write \[run\] above its keys"),
        ("[run]\n[rehearse]\n", ""),
    ):
        wrong = sources(text).file
        assert wrong is not None
        if message:
            with pytest.raises(ConfigError, match=message):
                resolve.check_tables(wrong, cli.COMMANDS)
        else:
            with pytest.raises(ConfigError, match=r"rehearse"):
                script(text)


def test_hidden_options_secrets_and_files_written_once_are_no_settings() -> None:
    for table, words in CONFIGURED.items():
        if words[0] in cli.COMMANDS:
            found = keys.option_keys(table, parser_of(table))
            assert not {"help", "config", "export", "bundle", "svg", *keys.SECRET} & found.keys()
            assert all(action.help != argparse.SUPPRESS for action in found.values())
            assert not any(action.required for action in found.values())


def test_what_is_given_has_the_shape_of_overrides() -> None:
    found = script("rehearse = false\n[snapshots]\nparity = 2\n[checkpoint]\nroot = 'x'\n")
    given = [each for each in found.values() if each.is_given]
    assert resolve.nested(given) == {
        "rehearse": False,
        "snapshots": {"parity": 2},
        "checkpoint": {"root": "x"},
    }


def test_no_variable_of_a_setting_is_one_that_means_something_else() -> None:
    others = {"HOLDFAST_RUN", "HOLDFAST_NODE", "HOLDFAST_CONFIG", "HOLDFAST_KEY_FILE"}
    names: set[str] = set()
    for table, words in CONFIGURED.items():
        if words[0] in cli.COMMANDS:
            names |= {
                f"HOLDFAST_{table}_{key.partition('.')[2]}".upper() for key in command("", table)
            }
    assert not names & others
