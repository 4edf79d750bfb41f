"""The etcd program is found, or the error says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.coordinator.managed.program import ETCD_ENV, etcd_program
from holdfast.elastic.errors import ConfigError


def etcd(folder: Path, version: str, name: str = "etcd") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Go Version: go1'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(ETCD_ENV, raising=False)


def test_the_option_comes_before_the_variable_and_that_before_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path, named = etcd(tmp_path / "bin", "3.4.23"), etcd(tmp_path, "3.5.9", "named")
    assert etcd_program() == on_path
    monkeypatch.setenv(ETCD_ENV, str(named))
    assert etcd_program() == named
    assert etcd_program(str(on_path)) == on_path


def test_without_one_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no etcd is on the PATH.*etcd-server.*--etcd FILE"):
        etcd_program()
    with pytest.raises(ConfigError, match=r"nowhere: not a program.*install"):
        etcd_program(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("3.3.25", "is etcd 3.3.25: install etcd 3.4 or newer"),
        ("3.5.1", "is etcd 3.5.1, whose members can come to disagree"),
        ("unknown", "does not tell the version of an etcd"),
    ],
)
def test_an_unfit_one_is_named(tmp_path: Path, version: str, error: str) -> None:
    etcd(tmp_path / "bin", version)
    with pytest.raises(ConfigError, match=error):
        etcd_program()


def test_a_program_that_cannot_run_is_named(tmp_path: Path) -> None:
    broken = etcd(tmp_path, "3.4.23")
    broken.write_text("no program\n")
    with pytest.raises(ConfigError, match="does not tell"):
        etcd_program(str(broken))
