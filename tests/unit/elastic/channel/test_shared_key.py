"""The key file that the launchers of one job share."""

from __future__ import annotations

import pwd
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.elastic.channel.shared_key import shared_key, shared_key_file
from holdfast.elastic.errors import ConfigError


def test_the_option_precedes_the_environment_and_that_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_KEY_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert shared_key_file() == tmp_path / "holdfast" / "key.json"
    monkeypatch.setenv("HOLDFAST_KEY_FILE", "/else/key")
    assert shared_key_file() == Path("/else/key")
    assert shared_key_file("/given/key") == Path("/given/key")


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    for name in ("HOLDFAST_KEY_FILE", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ConfigError, match="no home directory; set HOME, or name the file"):
        shared_key_file()
    with pytest.raises(ConfigError, match="~/key: this user has no home"):
        shared_key_file("~/key")
    assert shared_key_file("/given/key") == Path("/given/key")


def test_all_who_make_it_at_once_get_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.json"
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(shared_key, [path] * 32))
    assert keys == [keys[0]] * 32
    assert [file.name for file in path.parent.iterdir()] == ["key.json"]
    assert path.stat().st_mode & 0o077 == 0


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    shared_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o-rwx"):
        shared_key(path)


def test_what_is_no_key_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text("{}")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"key\.json: no usable run key"):
        shared_key(path)


def test_a_place_where_no_key_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name a key file"):
        shared_key(tmp_path / "file" / "key.json")
