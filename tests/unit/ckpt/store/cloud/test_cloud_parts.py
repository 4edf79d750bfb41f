"""The parts of the stores of obstore that need no server: errors, limits, addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import MemoryStore

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.ckpt.store.cloud.calls import CloudConnection, CloudTarget
from holdfast.ckpt.store.cloud.config import AZURE, GOOGLE, CloudConfig
from holdfast.ckpt.store.cloud.errors import (
    code_of,
    is_failed_condition,
    is_missing,
    is_transient,
    refusal,
    said,
    status_of,
)
from holdfast.ckpt.store.cloud.write import write

URL = "http://host/c/k?sv=1&sig=the-signature"
MIB = 1 << 20


def refused(status: int, code: str = "", kind: type[Exception] = GenericError) -> Exception:
    body = f"<Error><Code>{code}</Code><Message>words.\nRequestId:1</Message></Error>"
    return kind(
        f"Generic X error: Error performing GET {URL} in 1ms - Server returned non-2xx status "
        f"code: {status} Odd: {body if code else ''}\n\nDebug source:\n{{ body: 599 }}"
    )


def broken(tries: int = 0) -> GenericError:
    again = f", after {tries} retries, max_retries: 9, retry_timeout: 1s " if tries else ""
    return GenericError(
        f"Generic X error: Error performing GET {URL} in 1ms{again} - HTTP error: error sending "
        'request\n\nDebug source:\nOs { code: 111, message: "Connection refused" }'
    )


@pytest.mark.parametrize(
    "error", [refused(500), refused(503, "ServerBusy"), refused(429), broken()]
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        refused(403, "AuthenticationFailed"),
        refused(404),
        refused(412),
        refused(501),
        GenericError("Generic X error: Account must be specified"),
        FileNotFoundError("x"),
    ],
)
def test_what_will_not_pass_is_not(error: Exception) -> None:
    assert not is_transient(error)


def test_a_refusal_is_read_from_its_first_paragraph() -> None:
    error = refused(403, "AuthenticationFailed")
    assert (status_of(error), code_of(error)) == (403, "AuthenticationFailed")
    assert said(error) == "the server answers 403 AuthenticationFailed (words)"
    assert (
        said(broken(3)) == "HTTP error: error sending request (Connection refused), tried 4 times"
    )


def test_a_missing_object_is_told_from_a_missing_container() -> None:
    assert is_missing(refused(404, "BlobNotFound", FileNotFoundError))
    assert is_missing(refused(404, "", FileNotFoundError))
    for code in ("ContainerNotFound", "NoSuchBucket", "NoSuchUpload"):
        assert not is_missing(refused(404, code, FileNotFoundError))
    gone = refusal(refused(404, "", FileNotFoundError), where="az://c/k", doing="x", provider=AZURE)
    assert isinstance(gone, NotFoundError)


def test_a_condition_that_failed_is_told_from_another_conflict() -> None:
    assert is_failed_condition(refused(409, "BlobAlreadyExists", AlreadyExistsError))
    assert not is_failed_condition(refused(409, "ContainerBeingDeleted", AlreadyExistsError))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused(403, "AuthenticationFailed", PermissionDeniedError), "AZURE_STORAGE_ACCOUNT_KEY"),
        (refused(403, "AuthorizationPermissionMismatch"), "Storage Blob Data Contributor"),
        (refused(404, "ContainerNotFound"), "create the container or correct its name"),
        (refused(507), "make room there"),
        (refused(501), "use another one"),
        (broken(), "AZURE_STORAGE_ENDPOINT"),
        (GenericError("Generic X error: Account must be specified"), "AZURE_STORAGE_ACCOUNT_NAME"),
        (refused(400, "SomethingNew"), "see the server's message"),
    ],
)
def test_a_refusal_says_where_what_and_how_on(error: Exception, words: str) -> None:
    found = refusal(error, where="az://c/k", doing="read it", provider=AZURE)
    assert isinstance(found, StoreError)
    assert str(found).startswith("az://c/k: cannot read it: ")
    assert words in str(found)
    assert "the-signature" not in str(found)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"part_bytes": MIB}, "5 MiB"),
        ({"threads": 0}, "1 to 256"),
        ({"stall_s": 100.0, "deadline_s": 120.0}, "two attempts"),
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        CloudConfig(provider=GOOGLE, **wrong)


def test_the_configuration_keeps_its_secrets_and_its_own_variables() -> None:
    found = CloudConfig.from_environment(
        AZURE,
        {
            "AZURE_STORAGE_ACCOUNT_KEY": "the-key",
            "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/a",
            "GOOGLE_BASE_URL": "http://other",
        },
    )
    assert "the-key" not in repr(found)
    assert [name for name, _ in found.environment] == [
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ENDPOINT",
    ]
    assert found.is_plain
    assert not CloudConfig(provider=GOOGLE).is_plain


@pytest.fixture
def connection() -> CloudConnection:
    config = CloudConfig(
        provider=GOOGLE, settings=(("bearer_token", "x"),), part_bytes=5 * MIB, threads=2
    )
    found = CloudConnection("bucket", config)
    found.store = MemoryStore()
    return found


def test_an_error_of_the_source_stays_what_it_is(connection: CloudConnection) -> None:
    target = CloudTarget(key="k", where="gs://bucket/k")

    def parts() -> Iterator[bytes]:
        yield bytes(6 * MIB)
        raise FileNotFoundError("the source's own file")

    with pytest.raises(FileNotFoundError, match="the source's own file"):
        write(connection, target, parts())
