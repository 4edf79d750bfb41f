"""The dashboard answers under its own names only, and tells nothing without the token."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from holdfast.elastic.errors import ConfigError
from holdfast.tools.dashboard.guard import OPEN, Guard, token_of

TOKEN = "a-token-of-enough-characters"


def client(*hosts: str, at: str = "127.0.0.1:8765") -> TestClient:
    def answer(request: Request) -> Response:
        return PlainTextResponse("secret")

    routes = [Route(path, answer) for path in (*OPEN, "/events")]
    return TestClient(
        Guard(Starlette(routes=routes), token=TOKEN, hosts=hosts), base_url=f"http://{at}"
    )


def get(client: TestClient, path: str = "/events", token: str = TOKEN, **headers: str) -> Response:
    return client.get(path, headers={"authorization": f"Bearer {token}", **headers})  # type: ignore[return-value]


def test_the_token_opens() -> None:
    assert get(client()).status_code == 200


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN + "x", "é"])
def test_any_other_token_does_not(token: str) -> None:
    headers = {"authorization": f"Bearer {token}".encode()}
    found = client().get("/events", headers=headers)
    assert (found.status_code, "secret" in found.text) == (401, False)


def test_the_token_in_the_query_or_a_cookie_does_not_open() -> None:
    found = client().get(f"/events?token={TOKEN}", headers={"cookie": f"token={TOKEN}"})
    assert found.status_code == 401


@pytest.mark.parametrize("path", OPEN)
def test_the_page_itself_needs_none(path: str) -> None:
    assert client().get(path).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil", "", "[::2]",
     "10.0.0.1", "localhost:x", "127.0.0.1:8765:9"],
)  # fmt: skip
def test_foreign_names_are_refused_even_with_the_token(host: str) -> None:
    assert get(client(), host=host).status_code == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8765"]
)
def test_the_loopback_is_known_by_its_names_and_any_port(host: str) -> None:
    assert get(client(), host=host).status_code == 200


def test_a_server_for_all_takes_addresses_and_its_own_name_only() -> None:
    server = client("*", "head")
    assert get(server, host="10.1.2.3:8765").status_code == 200
    assert get(server, host="head:8765").status_code == 200
    assert get(server, host="evil.example").status_code == 421


def test_nothing_but_reading_is_allowed() -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert client().post("/events", headers=headers).status_code == 405


def test_every_answer_forbids_what_the_page_does_not_need() -> None:
    for found in (get(client()), get(client(), token="x"), client().get("/")):
        policy = found.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["referrer-policy"] == "no-referrer"
        assert "set-cookie" not in found.headers


def test_tokens_are_random_or_kept_in_a_file_of_ones_own(tmp_path: Path) -> None:
    assert token_of(None) != token_of(None)
    path = tmp_path / "token"
    first = token_of(path)
    assert (token_of(path), stat.S_IMODE(path.stat().st_mode)) == (first, 0o600)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read this token: chmod 600"):
        token_of(path)


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="does not hold a token of 22 characters"):
        token_of(path)
