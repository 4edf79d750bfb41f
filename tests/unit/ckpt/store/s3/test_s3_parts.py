"""The S3 store's parts that need no server: retries, deadlines, pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.objects.limits import RequestTiming
from holdfast.ckpt.store.objects.retries import Deadline
from holdfast.ckpt.store.s3.calls import Body, S3Connection
from holdfast.ckpt.store.s3.config import S3Config
from holdfast.ckpt.store.s3.errors import is_missing, is_transient, refusal
from holdfast.ckpt.store.s3.store import S3Store
from holdfast.ckpt.store.s3.upload import _pieces

MIB = 1 << 20
SECRET = "the-secret-of-this-test"


def config(**changes: object) -> S3Config:
    base = {"endpoint_url": "http://127.0.0.1:9", "access_key": "AK", "secret_key": SECRET}
    return S3Config(**{**base, **changes})  # type: ignore[arg-type]


def refused(status: int, code: str = "", **more: str) -> boto.ClientError:
    return boto.ClientError(
        {"Error": {"Code": code, "Message": "words", **more},
         "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}},
        "Operation",
    )  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        refused(500, "InternalError"),
        refused(503, "SlowDown"),
        refused(502),
        refused(429),
        refused(400, "RequestTimeout"),
        refused(400, "BadDigest"),
        refused(409, "ConditionalRequestConflict"),
        boto.EndpointConnectionError(endpoint_url="x"),
        boto.ReadTimeoutError(endpoint_url="x"),
        boto.ConnectionClosedError(endpoint_url="x"),
        boto.HTTPClientError(error="x"),
        boto.ResponseStreamingError(error="x"),
        ConnectionResetError("x"),
        ResponseParserError("cut off"),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        refused(403, "AccessDenied"),
        refused(404, "NoSuchKey"),
        refused(412, "PreconditionFailed"),
        refused(400, "InvalidRequest"),
        refused(501, "NotImplemented"),
        boto.NoCredentialsError(),
        boto.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_what_will_not_pass_is_not(error: Exception) -> None:
    assert not is_transient(error)


def test_a_missing_object_is_told_from_a_missing_bucket() -> None:
    assert is_missing(refused(404, "NoSuchKey"))
    assert is_missing(refused(404, "404"))
    assert not is_missing(refused(404, "NoSuchBucket"))
    assert not is_missing(refused(404, "NoSuchUpload"))
    assert isinstance(refusal(refused(404, "404"), where="s3://b/k", doing="x"), NotFoundError)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused(403, "AccessDenied"), "403 AccessDenied (words); let these credentials"),
        (refused(403, "ExpiredToken"), "AWS_SESSION_TOKEN"),
        (refused(301, "PermanentRedirect", Region="eu-x"), "set AWS_REGION to the bucket's region"),
        (refused(400, "AuthorizationHeaderMalformed", Region="eu-x"), "region, eu-x"),
        (refused(403, "RequestTimeTooSkewed"), "clock"),
        (refused(501, "NotImplemented"), "use another one"),
        (refused(400, "SomethingNew"), "check the region"),
        (boto.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"), "AWS_CA_BUNDLE"),
        (boto.NoCredentialsError(), "set AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_refusal_says_where_what_and_how_on(error: Exception, words: str) -> None:
    store_error = refusal(error, where="s3://b/k", doing="read it")
    assert isinstance(store_error, StoreError)
    assert str(store_error).startswith("s3://b/k: cannot read it: ")
    assert words in str(store_error)


class Clock:
    """Virtual time in which every attempt takes ``each_s``."""

    def __init__(self, each_s: float = 0.0, chance: float = 1.0) -> None:
        self.now_s, self.each_s, self.chance = 100.0, each_s, chance
        self.pauses: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def timing(self) -> RequestTiming:
        return RequestTiming(
            now=lambda: self.now_s,
            sleep=self.sleep,
            between=lambda low, high: low + self.chance * (high - low),
        )

    def failing(self, times: int, error: Exception) -> Callable[[Deadline], str]:
        attempts = itertools.count(1)

        def request(deadline: Deadline) -> str:
            self.now_s += self.each_s
            if next(attempts) <= times:
                raise error
            return "done"

        return request


def test_pauses_double_up_to_a_limit_and_are_drawn_from_zero() -> None:
    clock = Clock()
    connection = S3Connection(config(pause_s=0.5, longest_pause_s=4.0), clock.timing())
    request = clock.failing(6, refused(503, "SlowDown"))
    assert connection.send(request, where="s3://b/k", doing="read it") == "done"
    assert clock.pauses == [1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    clock.chance, clock.pauses = 0.0, []
    connection.send(clock.failing(3, refused(503)), where="s3://b/k", doing="read it")
    assert clock.pauses == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("each_s", [0.0, 1.0, 20.0])
def test_no_attempt_begins_that_could_outlast_the_deadline(each_s: float) -> None:
    clock = Clock(each_s)
    connection = S3Connection(config(stall_s=20.0, deadline_s=100.0), clock.timing())
    with pytest.raises(StoreError, match=r"s3://b/k: cannot read it: tried \d+ times in") as caught:
        connection.send(clock.failing(10**9, refused(503)), where="s3://b/k", doing="read it")
    assert 60.0 < clock.now_s - 100.0 <= 100.0
    assert SECRET not in str(caught.value)


def test_the_failure_before_a_last_attempt_that_was_cut_off_is_reported_too() -> None:
    clock = Clock(20.0)
    connection = S3Connection(config(stall_s=20.0, deadline_s=100.0), clock.timing())

    def request(deadline: Deadline) -> str:
        clock.now_s += 20.0
        if deadline.left_s() < 45.0:
            raise boto.HTTPClientError(error="cut off")
        raise refused(400, "BadDigest")

    with pytest.raises(StoreError, match=r"in the end HTTPClientError.*before that.*BadDigest"):
        connection.send(request, where="s3://b/k", doing="write it")


def test_what_will_not_pass_is_reported_at_once() -> None:
    clock = Clock()
    connection = S3Connection(config(), clock.timing())
    with pytest.raises(StoreError, match="AccessDenied"):
        connection.send(
            clock.failing(1, refused(403, "AccessDenied")), where="s3://b/k", doing="read it"
        )
    assert clock.pauses == []


def test_when_one_of_several_fails_the_others_have_ended() -> None:
    connection, ended = S3Connection(config(threads=4)), list[int]()

    def action(number: int) -> Callable[[], int]:
        def run() -> int:
            if number == 3:
                raise StoreError("number 3")
            ended.append(number)
            return number

        return run

    assert connection.each([action(i) for i in (0, 1, 2)]) == [0, 1, 2]
    before = len(ended)
    with pytest.raises(StoreError, match="number 3"):
        connection.each([action(i) for i in range(20)])
    count = len(ended)
    assert connection.each([action(9), action(8)]) == [9, 8]
    assert len(ended) == count + 2 >= before + 2


def test_pieces_have_the_sizes_of_parts_however_the_source_is_cut() -> None:
    data = bytes(range(256)) * (MIB // 256) * 12
    for size in (4 * MIB, 5 * MIB, 5 * MIB + 1, 12 * MIB, 777_777):
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        pieces = [b"".join(piece) for piece in _pieces(parts, config(part_bytes=5 * MIB))]
        assert [len(piece) for piece in pieces] == [5 * MIB, 5 * MIB, 2 * MIB]
        assert b"".join(pieces) == data
    assert list(_pieces([b"", b""], config())) == []


def test_parts_grow_so_that_ten_thousand_hold_any_file() -> None:
    parts = config(part_bytes=32 * MIB)
    assert [parts.nbytes_of_part(n) // MIB for n in (1, 2000, 2001, 4001, 10_000)] == [
        32, 32, 64, 128, 512,
    ]  # fmt: skip
    assert sum(parts.nbytes_of_part(n) for n in range(1, 10_001)) > 1.8 * 2**40


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"endpoint_url": "127.0.0.1:80"}, "http"),
        ({"endpoint_url": f"http://me:{SECRET}@host"}, "carries credentials"),
        ({"part_bytes": MIB}, "5 MiB"),
        ({"threads": 0}, "1 to 256"),
        ({"stall_s": 100.0, "deadline_s": 120.0}, "two attempts"),
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        config(**wrong)
    assert SECRET not in str(caught.value)


def test_the_configuration_keeps_its_secrets() -> None:
    found = S3Config.from_environment(
        {
            "AWS_ACCESS_KEY_ID": "AK",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": SECRET,
            "AWS_ENDPOINT_URL": "http://all",
            "AWS_ENDPOINT_URL_S3": "http://s3",
            "AWS_DEFAULT_REGION": "eu-1",
            "AWS_REGION": "",
        }
    )
    assert (found.endpoint_url, found.region, found.secret_key) == ("http://s3", "eu-1", SECRET)
    assert SECRET not in repr(found)
    assert SECRET not in repr(S3Store("s3://b/p", found))


@pytest.mark.parametrize(
    ("root", "found", "file"),
    [
        ("s3://b", "s3://b", "s3://b/f"),
        ("s3://b/", "s3://b", "s3://b/f"),
        ("s3://b/some/where/", "s3://b/some/where", "s3://b/some/where/f"),
    ],
)
def test_roots_are_written_in_one_way(root: str, found: str, file: str) -> None:
    store = S3Store(root, config())
    assert (store.root, store.where("f")) == (found, file)


@pytest.mark.parametrize("root", ["s3://", "s3:///prefix", "/path"])
def test_a_root_needs_a_bucket(root: str) -> None:
    with pytest.raises(StoreError, match="s3://bucket/prefix"):
        S3Store(root, config())


def test_a_paced_body_is_paid_for_as_it_is_sent_and_not_as_it_is_signed() -> None:
    paid: list[int] = []
    body = Body([memoryview(bytes(100_000))], Deadline(RequestTiming(), 10.0), pay=paid.append)
    for _ in range(3):  # the signature, the request, and once more after a lost connection
        assert sum(len(piece) for piece in iter(lambda: body.read(8192), b"")) == 100_000
        body.seek(0)
    assert sum(paid) == 2 * 100_000
    assert max(paid) == 32 << 10
