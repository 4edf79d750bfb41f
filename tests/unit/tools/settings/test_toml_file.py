"""A file of settings: found, trusted, read, and the lines of its keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.elastic.errors import ConfigError
from holdfast.tools.settings import toml_file
from holdfast.tools.settings.toml_file import SettingsFile

TEXT = '''# a job
rehearse = false

[run]
nproc = 4   # per node
role = [
  "rollout=2",
]
[snapshots]
# the nodes
parity = 2
checkpoint.root = """
several
lines"""
'''


def parsed(text: str) -> SettingsFile:
    import tomllib

    return SettingsFile(path="x.toml", content=tomllib.loads(text), text=text)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("rehearse",), 2),
        (("run",), 4),
        (("run", "nproc"), 5),
        (("run", "role"), 6),
        (("snapshots", "parity"), 11),
        (("snapshots", "checkpoint", "root"), 12),
        (("snapshots", "nosuch"), 0),
    ],
)
def test_the_line_of_a_key_is_found_behind_comments_and_values_of_several_lines(
    key: tuple[str, ...], line: int
) -> None:
    assert parsed(TEXT).line(*key) == line


@given(
    before=st.lists(st.sampled_from(("", "# words = 1", "a = 1", 'b = """', "[t]")), max_size=8),
)
def test_a_line_that_is_told_is_the_one_that_has_the_key(before: list[str]) -> None:
    text = "\n".join([*before, "wanted = 3", ""])
    try:
        file = parsed(text)
    except ValueError:
        return
    path = next((p for p in ((), ("t",)) if "wanted" in _at(file, p)), None)
    if path is not None:
        assert file.line(*path, "wanted") == len(before) + 1


def _at(file: SettingsFile, path: tuple[str, ...]) -> object:
    found = file.content
    for word in path:
        found = found.get(word, {})
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_file_is_no_error(here: Path) -> None:
    assert toml_file.find(None, {}) is None


def test_the_file_of_the_working_directory_is_read_and_none_above_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "holdfast.toml").write_text("[run]\nnproc = 2\n")
    found = toml_file.find(None, {})
    assert found is not None
    assert (found.path, found.content) == ("./holdfast.toml", {"run": {"nproc": 2}})
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    assert toml_file.find(None, {}) is None


def test_the_option_counts_before_the_variable_and_that_before_the_directory(here: Path) -> None:
    for name in ("holdfast", "a", "b"):
        (here / f"{name}.toml").write_text(f'[run]\njob = "{name}"\n')
    environment = {"HOLDFAST_CONFIG": "b.toml"}
    assert toml_file.find("a.toml", environment).path == "a.toml"  # type: ignore[union-attr]
    assert toml_file.find(None, environment).path == "b.toml"  # type: ignore[union-attr]
    assert toml_file.find("/dev/null", environment).content == {}  # type: ignore[union-attr]


def test_a_file_that_others_can_write_to_is_refused_unless_it_is_named(here: Path) -> None:
    path = here / "holdfast.toml"
    path.write_text("[run]\nnproc = 2\n")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"others can write to it \(mode 0666\): chmod go-w"):
        toml_file.find(None, {})
    assert toml_file.find("holdfast.toml", {}) is not None


def test_a_file_of_another_user_is_refused_unless_it_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here / "holdfast.toml"
    path.write_text("")
    owner = path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    if owner == 0:  # a file of the administrator is trusted
        assert toml_file.find(None, {}) is not None
        return
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        toml_file.find(None, {})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"nproc = \n", r"bad\.toml: Invalid value \(at line 1, column 9\); write KEY = VALUE"),
        (b"[run]\n[run]\n", r"line 2"),
        (b"\xff\n", "UTF-8"),
        (b"#" * (1 << 19), "longer than 262144 bytes"),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_line(here: Path, raw: bytes, message: str) -> None:
    (here / "bad.toml").write_bytes(raw)
    with pytest.raises(ConfigError, match=message):
        toml_file.find("bad.toml", {})


def test_a_named_file_must_be_there(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"nosuch\.toml: No such file.*holdfast init"):
        toml_file.find("nosuch.toml", {})
