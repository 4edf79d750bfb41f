"""``holdfast init``: a file in which every key stands, and a job file; no file is lost."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from tree import ROOT

from holdfast.elastic.errors import ConfigError
from holdfast.tools import cli
from holdfast.tools.settings import keys, resolve
from holdfast.tools.settings.configured import CONFIGURED, leaf
from holdfast.tools.settings.init_command import job_text, settings_text
from holdfast.tools.settings.launchers import LAUNCHERS, LOCAL, at_hand
from holdfast.tools.settings.toml_file import SettingsFile

NO_VALUE = re.compile(r"^#\w+ =(  #.*)?$")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [v for each in LAUNCHERS.values() for v in each.variables]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_every_key_stands_in_the_file_and_none_is_set() -> None:
    parser = cli.whole_parser()
    text = settings_text(parser)
    content = tomllib.loads(text)
    assert all(each == {} for each in content.values())
    wanted = {name: set(fields) for name, fields in keys.groups().items() if fields}
    for table, words in CONFIGURED.items():
        if words[0] in cli.COMMANDS:
            wanted[table] = set(keys.option_keys(table, leaf(parser, words)))
    assert content.keys() == wanted.keys()
    found: dict[str, set[str]] = {}
    table = ""
    for line in text.splitlines():
        if opened := re.match(r"\[(\w+)\]", line):
            table = opened[1]
            found[table] = set()
        elif (key := re.match(r"#(\w+) =", line)) and table:
            found[table].add(key[1])
    assert found == wanted
    assert "#rehearse = true" in text


def test_the_values_in_the_file_are_the_defaults() -> None:
    parser = cli.whole_parser()
    lines = [
        line[1:] if re.match(r"#\w+ =", line) and not NO_VALUE.match(line) else line
        for line in settings_text(parser).splitlines()
    ]
    text = "\n".join(lines)
    file = SettingsFile(path="x", content=tomllib.loads(text), text=text)
    sources = resolve.SettingSources(file=file, environment={})
    resolve.check_tables(file, cli.COMMANDS)
    for table, words in CONFIGURED.items():
        if words[0] not in cli.COMMANDS:
            continue
        command = leaf(parser, words)
        for each in resolve.of_command(table, command, sources, explicit={}):
            assert each.option is not None
            default = each.option.default
            if isinstance(default, str) and each.option.type:
                default = each.option.type(default)
            assert each.value in (default, each.option.default), each.key
    for each in resolve.of_script(sources, explicit={}):
        assert each.value == keys.default(each.table, each.field), each.key


def test_files_are_written_and_the_next_steps_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", "--launcher", "slurm", "--script", "src/pretrain.py"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "wrote holdfast.toml\nwrote slurm-holdfast-run.sh\n" in said
    assert "sbatch slurm-holdfast-run.sh" in said
    assert "holdfast check src/pretrain.py" in said
    script = here / "slurm-holdfast-run.sh"
    assert "holdfast run --nproc 8 src/pretrain.py" in script.read_text()
    assert script.stat().st_mode & 0o111
    assert sorted(path.name for path in here.iterdir()) == ["holdfast.toml", script.name]


def test_nothing_is_replaced_unless_that_is_asked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "slurm-holdfast-run.sh").write_text("mine")
    assert cli.main(["init", "--launcher", "slurm"]) == cli.EXIT_USAGE
    assert "slurm-holdfast-run.sh: exists, so nothing was written" in capsys.readouterr().err
    assert not (here / "holdfast.toml").exists()
    assert cli.main(["init", "--launcher", "slurm", "--dir", "new"]) == 0
    assert cli.main(["init", "--launcher", "slurm", "--force"]) == 0
    assert (here / "slurm-holdfast-run.sh").read_text() != "mine"


def test_without_a_launcher_there_is_the_file_of_settings_only(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init"]) == 0
    said = capsys.readouterr().out
    assert "launcher: local (no other launcher was found)" in said
    assert "  holdfast run train.py\n" in said
    assert [path.name for path in here.iterdir()] == ["holdfast.toml"]
    assert cli.main(["settings"]) == 0


@pytest.mark.parametrize(
    ("environment", "programs", "launcher"),
    [
        ((), (), LOCAL),
        ((), ("kubectl", "sbatch"), "slurm"),
        (("KUBERNETES_SERVICE_HOST",), ("sbatch",), "kubernetes"),
        (("RAY_ADDRESS",), ("kubectl",), "ray"),
        (("TORCHELASTIC_RUN_ID",), (), "torchrun"),
        ((), ("sky",), "skypilot"),
    ],
)
def test_the_launcher_is_seen_by_variables_before_programs(
    environment: tuple[str, ...], programs: tuple[str, ...], launcher: str
) -> None:
    assert at_hand(environment, programs)[0] == launcher


def test_the_job_files_are_those_of_the_documentation() -> None:
    documents = {path.name for path in (ROOT / "docs" / "deploy").iterdir()}
    assert {each.source for each in LAUNCHERS.values() if each.source} == documents
    for each in LAUNCHERS.values():
        if each.source:
            text = (ROOT / "docs" / "deploy" / each.source).read_text()
            assert job_text(each.source, "train.py") == text
            changed = job_text(each.source, "x/y.py")
            assert "train.py" not in changed
            assert changed.count("x/y.py") == text.count("train.py")


def test_a_script_that_would_change_the_meaning_of_a_job_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="rename the script"):
        job_text("ray.sh", "a b; rm -rf /.py")


def test_a_file_with_every_default_set_is_read_by_a_shell_job(here: Path) -> None:
    (here / "ray.sh").write_text(job_text("ray.sh", "go.py"))
    subprocess.run(["/bin/bash", "-n", "ray.sh"], check=True, cwd=here)
