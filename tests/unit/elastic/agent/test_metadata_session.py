"""EC2's metadata service is queried with a session token, or without if it offers none."""

from __future__ import annotations

import http.server
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from holdfast.elastic.agent.notice import MetadataSession, NoticeConfig, NoticeWatch

PATH = "/latest/meta-data/spot/instance-action"
ACTION = '{"action": "terminate", "time": "2026-11-23T17:10:00Z"}'
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"


@dataclass(slots=True)
class Service:
    """A metadata service: ``refuses`` is its answer to who wants a token, 0 where it gives one.

    If it gives tokens it answers nobody without the newest, and nobody at all if it is ``deaf``.
    """

    refuses: int = 0
    deaf: bool = False
    action: str = ""
    requests: list[str] = field(default_factory=list)
    given: int = 0
    valid: str = ""
    url: str = ""

    def put(self, path: str, ttl: str | None) -> tuple[int, str]:
        self.requests.append("PUT")
        if self.refuses:
            return self.refuses, ""
        if path != "/latest/api/token" or not (ttl and 1 <= int(ttl) <= 21600):
            return 400, ""
        self.given += 1
        self.valid = f"token-{self.given}=="
        return 200, self.valid

    def get(self, path: str, token: str | None) -> tuple[int, str]:
        self.requests.append("GET")
        if self.deaf or not (self.refuses or token == self.valid):
            return 401, "Unauthorized"
        return (200, self.action) if path == PATH and self.action else (404, "Not Found")


@pytest.fixture
def service() -> Iterator[Service]:
    state = Service()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.answer(*state.put(self.path, self.headers[TTL]))

        def do_GET(self) -> None:
            self.answer(*state.get(self.path, self.headers[TOKEN]))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}{PATH}"
        yield state
        server.shutdown()
        thread.join()


@pytest.fixture
def session(service: Service) -> MetadataSession:
    found = MetadataSession.of(service.url, headers={})
    assert found is not None
    return found


def test_one_token_serves_many_questions(service: Service, session: MetadataSession) -> None:
    assert [session.ask(), session.ask()] == ["", ""]
    service.action = ACTION
    assert session.ask() == ACTION
    assert service.requests == ["PUT", "GET", "GET", "GET"]


def test_a_token_that_is_refused_is_renewed(service: Service, session: MetadataSession) -> None:
    assert session.ask() == ""
    service.valid, service.action = "of another service", ACTION
    assert session.ask() == ACTION
    assert service.requests == ["PUT", "GET", "GET", "PUT", "GET"]


def test_a_service_that_takes_no_token_of_its_own_is_not_asked_without_end(
    service: Service, session: MetadataSession
) -> None:
    service.deaf = True
    assert session.ask() == ""
    assert service.requests == ["PUT", "GET"]


@pytest.mark.parametrize("refuses", [403, 404, 405, 500])
def test_a_service_without_tokens_is_asked_without(
    service: Service, session: MetadataSession, refuses: int
) -> None:
    service.refuses, service.action = refuses, ACTION
    assert session.ask() == ACTION


def test_a_service_that_is_not_there_gives_no_notice() -> None:
    session = MetadataSession.of(f"http://127.0.0.1:9{PATH}", headers={})
    assert session is not None
    assert session.ask() == ""


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://metadata.google.internal/computeMetadata/v1/instance/preempted", {}),
        (f"http://169.254.169.254{PATH}", {"x-AWS-ec2-metadata-token": "their own"}),
    ],
)
def test_other_urls_and_tokens_of_the_users_own_need_no_session(
    url: str, headers: dict[str, str]
) -> None:
    assert MetadataSession.of(url, headers=headers) is None


def test_the_notice_reaches_the_node(service: Service) -> None:
    service.action = ACTION
    notices: queue.Queue[str] = queue.Queue()
    watch = NoticeWatch(NoticeConfig(url=service.url, every_s=0.01), node="a", notice=notices.put)
    assert notices.get(timeout=60) == f"{service.url} says {ACTION}"
    watch.close()
    assert service.given == 1
