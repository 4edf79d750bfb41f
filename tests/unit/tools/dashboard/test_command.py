"""The command line of the dashboard, and the address at which it serves."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest
from large_run import training, write

from holdfast.tools import cli
from holdfast.tools.dashboard import command


def parsed(*words: str) -> argparse.Namespace:
    return cli.build_parser("dashboard", cli.load("dashboard")).parse_args(["dashboard", *words])


def test_the_loopback_and_no_browser_are_the_default() -> None:
    found = parsed("runs/live")
    assert (found.host, found.port, found.browser) == ("127.0.0.1", None, False)


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_ports_that_are_none_are_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("runs/live", f"--port={port}")
    assert "is not a port from 0 to 65535" in capsys.readouterr().err


def test_a_missing_directory_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard"]) == 2
    assert "RUN_DIR is missing" in capsys.readouterr().err


def test_a_directory_without_a_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dashboard", str(tmp_path)]) == 1
    assert "no run has written events here" in " ".join(capsys.readouterr().err.split())


def test_a_run_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", training(2, steps=9))
    page = tmp_path / "page.html"
    assert cli.main(["dashboard", str(tmp_path / "run"), "--export", str(page)]) == 0
    assert "9 steps complete" in page.read_text()
    assert "page.html" in capsys.readouterr().out


def test_another_port_is_taken_only_if_none_was_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            command._listener("127.0.0.1", port)
    with command._listener("127.0.0.1", None) as found:
        assert found.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", None)]
)
def test_the_token_is_behind_the_hash_of_the_address(host: str, name: str | None) -> None:
    expected = name or socket.gethostname()
    assert command._address(host, 8765, "secret") == f"http://{expected}:8765/#secret"


def test_an_address_on_the_network_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    command._tell(parsed("runs/live", "--host", "0.0.0.0"), "runs/live", "http://head:8765/#t")
    assert "can be reached from the network" in " ".join(capsys.readouterr().err.split())
    command._tell(parsed("runs/live"), "runs/live", "http://127.0.0.1:8765/#t")
    assert capsys.readouterr().err == ""
