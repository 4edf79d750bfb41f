"""Directories in places that others can write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.errors import UnsafePathError
from holdfast.ckpt.private import check_private, is_private, make_private, plain_name

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "above" / "mine"
    make_private(path)
    (path / "kept").touch()
    make_private(path)
    assert (mode(path), is_private(path), (path / "kept").exists()) == (0o700, True, True)


def test_one_that_others_can_only_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir(mode=0o755)
    make_private(path)
    assert mode(path) == 0o700


@pytest.mark.parametrize("open_to", [0o777, 0o720, 0o1777])
def test_one_that_others_can_write_to_is_refused(tmp_path: Path, open_to: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(open_to)
    assert not is_private(path)
    with pytest.raises(UnsafePathError, match=r"open: others can write to it .*chmod 700"):
        make_private(path)


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        assert not is_private(tmp_path / name)
        with pytest.raises(UnsafePathError, match=f"{name}: not a directory"):
            make_private(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@as_root
def test_another_users_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    assert not is_private(path)
    with pytest.raises(UnsafePathError, match=r"theirs: belongs to user 65534, .* as user 0"):
        check_private(path)


def test_what_is_not_there_is_not_private(tmp_path: Path) -> None:
    assert not is_private(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        check_private(tmp_path / "none")


@given(st.text(max_size=30))
def test_a_plain_name_stays_one_part_of_a_path(name: str) -> None:
    try:
        plain_name(name, "a name")
    except UnsafePathError:
        return
    assert Path("/root", name).parts == ("/", "root", name)
    assert not Path(name).name.startswith(".")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "/a", "a\0", "a b", "a\n", "x" * 201])
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UnsafePathError, match=r"--run .*: give up to 200 letters"):
        plain_name(name, "--run")


@pytest.mark.parametrize("name", ["job", "slurm-17", "node_3.cluster.local", "Knoten-ä"])
def test_usual_names_are_plain(name: str) -> None:
    assert plain_name(name, "--run") == name
