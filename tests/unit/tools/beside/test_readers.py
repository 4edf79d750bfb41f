"""The options of readers beside a job: addresses, refusals before it starts, processes."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path

import pytest
from ports import free_ports

from holdfast.elastic.errors import ConfigError
from holdfast.tools import cli
from holdfast.tools.beside import collector, readers
from holdfast.tools.beside.collector import collector_url
from holdfast.tools.beside.places import ServedPlace, place_of
from holdfast.tools.beside.readers import BesideReader, Readers


@pytest.mark.parametrize(
    ("text", "place", "local"),
    [
        ("9400", ServedPlace("127.0.0.1", 9400), True),
        ("localhost:0", ServedPlace("localhost", 0), True),
        ("127.0.0.2:80", ServedPlace("127.0.0.2", 80), True),
        ("[::1]:9400", ServedPlace("::1", 9400), True),
        ("0.0.0.0:9400", ServedPlace("0.0.0.0", 9400), False),
        ("node-7.cluster:9400", ServedPlace("node-7.cluster", 9400), False),
    ],
)
def test_a_place_is_a_port_of_the_loopback_or_of_a_host(
    text: str, place: ServedPlace, local: bool
) -> None:
    assert place_of(text) == place
    assert place.is_local == local
    assert place_of(str(place)) == place


@pytest.mark.parametrize("text", ["", "host", "host:", "1:2:3", "65536", "-1", "http://a:9400"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not \[HOST:\]PORT, as in 9400"):
        place_of(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://c.example/", "https://c.example/v1/traces"),
        ("https://c.example/otlp/v1/traces", "https://c.example/otlp/v1/traces"),
    ],
)
def test_a_collector_without_a_path_gets_that_of_the_protocol(text: str, url: str) -> None:
    assert collector_url(text) == url


@pytest.mark.parametrize("text", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_what_is_no_collector_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not the address of an OTLP/HTTP collector"):
        collector_url(text)


def test_a_password_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        collector_url("http://me:secret@localhost:4318")
    assert "secret" not in str(caught.value)


SCRIPT = "import sys; sys.exit('the job must not start')"


def refused(tmp_path: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    status = cli.main(["run", *options, str(script)])
    return status, capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_the_job_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refused(tmp_path, "--metrics", str(port), capsys=capsys)
    assert status == 1
    assert f"error: --metrics 127.0.0.1:{port}: Address already in use; another program" in said


def test_traces_without_a_run_directory_are_refused_before_the_job_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = refused(tmp_path, "--otlp", "http://localhost:4318", capsys=capsys)
    assert (status, "--otlp needs --run-dir DIR" in said) == (2, True)


@pytest.mark.parametrize(
    ("option", "extra"),
    [(("--metrics", "9400"), "metrics"), (("--otlp", "http://localhost:4318"), "otel")],
)
def test_an_extra_that_is_missing_is_named_before_the_job_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: tuple[str, str],
    extra: str,
) -> None:
    for module in (readers, collector):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    status, said = refused(tmp_path, *option, capsys=capsys)
    assert status == 1
    assert f"pip install 'holdfast[{extra}]'" in said


def test_a_reader_that_ends_is_named_once_and_the_job_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    words = ("metrics", readers.RUN_DIR, "--listen", "127.0.0.1:0", "--beside")
    beside = Readers((BesideReader("metrics", words, ends_itself=False),), say=said.append)
    beside.start(tmp_path / "nowhere")
    deadline_s = time.monotonic() + 120
    while not said and time.monotonic() < deadline_s:
        beside.look()
    beside.close()
    assert said == ["metrics ended (exit status 1); the job goes on without it"]


def test_readers_end_with_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    (port,) = free_ports(1)
    words = ("metrics", readers.RUN_DIR, "--listen", str(port), "--beside")
    beside = Readers((BesideReader("metrics", words, ends_itself=False),), say=said.append)
    beside.start(tmp_path)
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    beside.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert said == []
    assert "Traceback" not in capfd.readouterr().err
