"""Errors of obstore: those to retry, and those to report with a remedy."""

from __future__ import annotations

import functools
import re
from typing import Final

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    JoinError,
    NotSupportedError,
    PreconditionError,
)

from holdfast.ckpt.errors import CkptError, NotFoundError, StoreError
from holdfast.ckpt.store.cloud.config import Provider
from holdfast.ckpt.store.objects.retries import ROOM, FaultWords, OverdueError

FAILURES: Final = (BaseError, OSError)
"""The errors of obstore; a missing object is a ``FileNotFoundError``."""

_STATUS: Final = re.compile(r"status code: (\d{3})([^:\n]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>|\"reason\": ?\"(\w+)\"|\(code: (\d{3})\)")
_MESSAGE: Final = re.compile(r"<Message>([^<\n]*)|\"message\": ?\"([^\"\n]*)")
_CAUSE: Final = re.compile(r"message: \"([^\"\n]+)\"|\b(TimedOut)\b")
_TRIES: Final = re.compile(r"after (\d+) retr\w+")
_QUERY: Final = re.compile(r"\?[^\s,\"]*")

_MISSING_CONTAINER: Final = ("ContainerNotFound", "NoSuchBucket")
_GONE: Final = ("InvalidBlockList", "NoSuchUpload")
_FAILED_CONDITION: Final = ("", "BlobAlreadyExists", "ConditionNotMet", "PreconditionFailed")
_KEYS: Final = (
    "AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation",
    "AccountIsDisabled", "AuthenticationRequired", "InvalidSecurity",
)  # fmt: skip
_ABOUT_KEYS: Final = ("credential", "token", "metadata", "oauth", "must be specified")
_FULL: Final = ("QuotaExceeded", "AccountLimitExceeded", "InsufficientStorage")


def status_of(error: BaseException) -> int:
    """Return the HTTP status of a server's refusal, 0 for any other error."""
    found = _STATUS.search(_first(error))
    return int(found[1]) if found else 0


def code_of(error: BaseException) -> str:
    """Return the code of a server's refusal, "" if there is none."""
    found = _CODE.search(_first(error))
    return next(filter(None, found.groups()), "") if found else ""


def is_missing(error: BaseException) -> bool:
    """Say whether the server has no such object (a missing container is another error)."""
    return isinstance(error, FileNotFoundError) and code_of(error) not in (
        *_MISSING_CONTAINER,
        *_GONE,
    )


def is_upload_gone(error: BaseException) -> bool:
    """Say whether an upload cannot be completed because it was already, or was dropped."""
    return code_of(error) in _GONE


def is_failed_condition(error: BaseException) -> bool:
    """Say whether the server found the condition of a write false."""
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return code_of(error) in _FAILED_CONDITION
    return is_missing(error)


def is_transient(error: BaseException) -> bool:
    """Say whether the same request may succeed when it is sent again."""
    if status := status_of(error):
        return status in (408, 429) or (status >= 500 and status != 501)
    return (
        isinstance(error, BaseError)
        and not isinstance(error, NotSupportedError | JoinError)
        and "sending request" in _first(error)
        and "certificate" not in str(error)
    )


def said(error: BaseException) -> str:
    """Return the error in a few words, without the query of its URL, which may be a signature."""
    text = _first(error)
    found = _STATUS.search(text)
    tries = _TRIES.search(text)
    again = f", tried {int(tries[1]) + 1 if tries else 1} times" if is_transient(error) else ""
    if found:
        told = _MESSAGE.search(text)
        message = next(filter(None, told.groups()), "").strip().rstrip(".") if told else ""
        words = (found[1], code_of(error) or found[2].strip(), f"({message})" if message else "")
        server = "the server of the credentials" if "token request" in text else "the server"
        return f"{server} answers {' '.join(filter(None, words))}{again}"
    causes = [next(filter(None, each)) for each in _CAUSE.findall(str(error))]
    cause = f" ({causes[-1]})" if causes else ""
    return f"{_QUERY.sub('', text.rpartition(' - ')[2]).strip().rstrip('.')}{cause}{again}"


def faults_of(provider: Provider) -> FaultWords:
    """Return the errors of obstore, with a provider's remedies."""
    return FaultWords(
        failures=FAILURES,
        is_transient=is_transient,
        said=said,
        refusal=functools.partial(refusal, provider=provider),
    )


def refusal(error: BaseException, *, where: str, doing: str, provider: Provider) -> CkptError:
    """Return the error for a caller, where a retry does not help."""
    if is_missing(error):
        return NotFoundError(f"{where}: not there (cannot {doing}); check the path")
    return StoreError(f"{where}: cannot {doing}: {said(error)}; {_remedy(error, provider)}")


def _remedy(error: BaseException, provider: Provider) -> str:
    status, code, text = status_of(error), code_of(error), str(error)
    if code in _MISSING_CONTAINER:
        return f"create the {provider.container} or correct its name"
    if code in _FULL or status == 507:
        return ROOM
    if code in _KEYS or status == 401:
        return provider.keys
    if status == 403:
        return f"{provider.keys}; if that is right, {provider.rights}"
    if status == 501 or isinstance(error, NotSupportedError):
        return "the server lacks a part of the interface: use another one"
    if not status and any(word in text.lower() for word in _ABOUT_KEYS):
        return provider.keys
    if "certificate" in text:
        return "trust the server's certificate or correct the endpoint"
    if isinstance(error, OverdueError) or is_transient(error):
        names = " or ".join(provider.endpoints)
        return f"check the network, and the endpoint if {names} is set, then try again"
    return "see the server's message and try again"


def _first(error: BaseException) -> str:
    """Return the error without obstore's description of its inner structure."""
    return str(error).partition("\n\nDebug source")[0]
