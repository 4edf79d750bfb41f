"""The file through which a script finds its sidecar."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import msgspec
import pytest

from holdfast.ckpt.errors import UnsafePathError
from holdfast.elastic.channel.sidecar_file import SidecarFile, sidecar_file
from holdfast.elastic.errors import ConfigError

FOUND = SidecarFile(run="r", node="n", domain="d", address="tcp://h:1", key_file="k", pid=7)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sidecar.json"
    FOUND.write(path)
    assert SidecarFile.read(path) == FOUND
    assert [file.name for file in path.parent.iterdir()] == ["sidecar.json"]


def test_a_script_that_comes_first_waits(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.json"
    writer = threading.Timer(0.2, FOUND.write, [path])
    writer.start()
    assert SidecarFile.read(path, wait_s=30.0) == FOUND
    writer.join()


def test_without_a_file_the_error_says_how_to_start_a_sidecar(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holdfast sidecar start"):
        SidecarFile.read(tmp_path / "none", wait_s=0.1)


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ConfigError, match="other: not the file of a sidecar"):
        SidecarFile.read(path)


def test_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory; correct HOLDFAST_SIDECAR"):
        SidecarFile.read(tmp_path)


def test_the_option_precedes_the_environment_and_that_the_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOLDFAST_SIDECAR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert sidecar_file(None, run="r", node="n") == Path("/run/user/7/holdfast/sidecar-r-n.json")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert sidecar_file(None, run="r", node="n").name == "sidecar-r-n.json"
    monkeypatch.setenv("HOLDFAST_SIDECAR", "/named")
    assert sidecar_file(None, run="r", node="n") == Path("/named")
    assert sidecar_file("/given", run="r", node="n") == Path("/given")


def test_a_file_in_a_folder_that_others_prepared_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run and node would say which memory to drop, its pid which process to end."""
    monkeypatch.delenv("HOLDFAST_SIDECAR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = sidecar_file(None, run="job", node="n")
    FOUND.write(path)
    assert SidecarFile.read(path) == FOUND
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    with pytest.raises(UnsafePathError, match="others can write to it"):
        SidecarFile.read(path)
    with pytest.raises(UnsafePathError, match="others can write to it"):
        FOUND.write(path)


@pytest.mark.parametrize("field", ["run", "node"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "sidecar.json"
    msgspec.structs.replace(FOUND, **{field: "x/../../.."}).write(path)
    with pytest.raises(UnsafePathError, match=f"sidecar.json: the {field} 'x/../../..'"):
        SidecarFile.read(path)
