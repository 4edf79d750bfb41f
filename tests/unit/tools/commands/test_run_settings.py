"""The options of ``holdfast run`` that override the script's settings."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.config import EMBEDDED, ETCD_TIMING, LOCAL_TIMING, LaunchConfig
from holdfast.tools.commands import run


def config(tmp_path: Path, *words: str) -> LaunchConfig:
    script = tmp_path / "train.py"
    script.touch()
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    return run._config(parser.parse_args(["run", *words, str(script)]))


def settings(tmp_path: Path, *words: str) -> dict[str, object]:
    return dict(config(tmp_path, *words).settings)


def test_only_what_is_given_overrides_the_script(tmp_path: Path) -> None:
    assert settings(tmp_path) == {}
    assert settings(tmp_path, "--parity", "replicate") == {"snapshots": {"parity": "replicate"}}
    words = ("--parity", "2", "--parity-group", "6", "--memory", "12GiB")
    words += ("--disk", "/d", "--checkpoint-bandwidth", "1MB/s", "--on-checkpoint-error", "skip")
    assert settings(tmp_path, *words, "--stop-grace-s", "2") == {
        "snapshots": {"parity": 2, "group": 6, "memory": "12GiB", "disk": "/d"},
        "checkpoint": {"bandwidth": "1MB/s", "on_error": "skip"},
        "timeouts": {"stop_grace_s": 2.0},
    }


def test_an_island_gets_its_name_and_the_place_where_it_meets_others(tmp_path: Path) -> None:
    found = settings(tmp_path, "--island", "oslo", "--sea", "s3://bucket/sea")
    assert found == {"islands": {"name": "oslo", "meet": "s3://bucket/sea"}}
    with pytest.raises(ConfigError, match="Islands\\(name='a/b'\\)"):
        settings(tmp_path, "--island", "a/b")


def test_a_wrong_option_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'much' is not a size"):
        settings(tmp_path, "--memory", "much")
    with pytest.raises(ConfigError, match="give group=5 or more"):
        settings(tmp_path, "--parity", "4", "--parity-group", "4")


def test_leases_at_an_etcd_outlast_an_election(tmp_path: Path) -> None:
    here = config(tmp_path)
    assert (here.coordinator, here.timing.lease_ttl_s) == (EMBEDDED, LOCAL_TIMING.lease_ttl_s)
    there = config(tmp_path, "--coordinator", "etcd://a:1,b:1", "--min-hang-s", "7")
    assert there.coordinator == "etcd://a:1,b:1"
    assert there.timing.lease_ttl_s == ETCD_TIMING.lease_ttl_s
    assert there.timing.min_hang_s == 7


def test_a_wrong_address_of_etcd_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a:b' is not HOST:PORT"):
        config(tmp_path, "--coordinator", "etcd://a:b")


def test_detection_and_notices_are_configured(tmp_path: Path) -> None:
    words = ("--min-hang-s", "7", "--max-hang-s", "5", "--first-hang-s", "8", "--pause-s", "9")
    notices = ("--notice-url", "http://x/y", "--notice-header", "A=b=c", "--grace-s", "4")
    found = config(tmp_path, *words, *notices, "--notice-file", "/run/{node}")
    timing, notice = found.timing, found.notice
    assert (timing.min_hang_s, timing.max_hang_s) == (7, 7), "a higher floor raises the ceiling"
    assert (timing.first_hang_s, timing.pause_s) == (8, 9)
    assert (notice.url, notice.headers, notice.grace_s) == ("http://x/y", {"A": "b=c"}, 4)
    assert notice.file == "/run/{node}"
    with pytest.raises(ConfigError, match="url is 'ftp://x'"):
        config(tmp_path, "--notice-url", "ftp://x")


def test_a_secret_of_a_notice_comes_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    found = config(tmp_path, "--notice-header", f"Token=@{tmp_path / 'token'}")
    assert found.notice.headers == {"Token": "s3cret"}
    with pytest.raises(SystemExit):
        config(tmp_path, "--notice-header", f"Token=@{tmp_path / 'none'}")
    assert "cannot read the file" in capsys.readouterr().err
