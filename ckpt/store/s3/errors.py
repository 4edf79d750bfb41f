"""Errors of S3 servers: those to retry, and those to report with a remedy."""

from __future__ import annotations

from typing import Any, Final

import urllib3.exceptions
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from holdfast.ckpt.errors import CkptError, NotFoundError, StoreError
from holdfast.ckpt.store.objects.retries import ROOM, FaultWords, OverdueError

FAILURES: Final = (
    boto.BotoCoreError,
    boto.ClientError,
    boto.HTTPClientError,
    urllib3.exceptions.HTTPError,
    OSError,
)
"""The errors of boto3; streams raise urllib3's own errors and the socket's."""

_TRANSIENT_CODES: Final = frozenset(
    (
        "BadDigest",
        "BandwidthLimitExceeded",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    )
)
_TRANSIENT: Final = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    urllib3.exceptions.HTTPError,
    OSError,
    ResponseParserError,  # a truncated reply
)

_NO_KEYS: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
)
_KEYS: Final = (
    "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile they "
    "come from"
)
_RIGHTS: Final = (
    "let these credentials list the bucket, read, write and delete below this prefix, and list and "
    "abort multipart uploads; or use others"
)
_REGION: Final = "set AWS_REGION to the bucket's region"
_REMEDIES: Final = {
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AccountProblem": _RIGHTS,
    "403": _RIGHTS,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": f"{_KEYS}; a proxy that changes the Host header does this too",
    "ExpiredToken": _KEYS,
    "InvalidToken": _KEYS,
    "TokenRefreshRequired": _KEYS,
    "NoSuchBucket": "create the bucket or correct its name",
    "InvalidBucketName": "correct the bucket's name",
    "QuotaExceeded": ROOM,
    "EntityTooLarge": "the server takes no file of this size: save with more writers",
    "InsufficientCapacity": ROOM,
    "XMinioStorageFull": ROOM,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "400": "check the region, the credentials and the bucket's name",
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "RequestTimeTooSkewed": "set this machine's clock",
    "NotImplemented": "the server lacks this part of S3: use another one",
    "MethodNotAllowed": "the server lacks this part of S3: use another one",
}


def code_of(error: BaseException) -> str:
    """Return the code of a server's refusal, empty for any other error."""
    if not isinstance(error, boto.ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    """Return the HTTP status of a server's refusal, 0 for any other error."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: BaseException) -> bool:
    """Say whether the server has no such object (a missing bucket is another error)."""
    return status_of(error) == 404 and code_of(error) in ("NoSuchKey", "404", "NotFound")


def is_transient(error: BaseException) -> bool:
    """Say whether the same request may succeed when it is sent again."""
    if isinstance(error, boto.ClientError):
        status = status_of(error)
        if code_of(error) in _TRANSIENT_CODES or status == 429:
            return True
        return status >= 500 and status != 501
    if isinstance(error, boto.SSLError):
        return "CERTIFICATE_VERIFY_FAILED" not in str(error)
    return isinstance(error, _TRANSIENT)


def said(error: BaseException) -> str:
    """Return the error in a few words, without keys, signatures or headers."""
    if isinstance(error, boto.ClientError):
        found: dict[str, Any] = error.response.get("Error", {})
        message = str(found.get("Message") or "").strip().rstrip(".")
        words = " ".join(filter(None, (code_of(error), f"({message})" if message else "")))
        return f"the server answers {status_of(error)} {words}".strip()
    if isinstance(error, OverdueError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(".")


def refusal(error: BaseException, *, where: str, doing: str) -> CkptError:
    """Return the error for a caller, where a retry does not help."""
    if is_missing(error):
        return NotFoundError(f"{where}: not there (cannot {doing}); check the path")
    return StoreError(f"{where}: cannot {doing}: {said(error)}; {_remedy(error)}")


def _remedy(error: BaseException) -> str:
    if isinstance(error, _NO_KEYS):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, boto.NoRegionError):
        return _REGION
    if isinstance(error, boto.SSLError):
        return "trust the server's certificate (AWS_CA_BUNDLE) or correct the endpoint"
    if isinstance(error, boto.ConnectionError | boto.HTTPClientError | OverdueError):
        return "check the endpoint (AWS_ENDPOINT_URL_S3) and the network, then try again"
    remedy = _REMEDIES.get(code_of(error)) or _REMEDIES.get(str(status_of(error)))
    if remedy == _REGION and (region := _region_of(error)):
        return f"{_REGION}, {region}"
    return remedy or "see the server's message and try again"


def _region_of(error: BaseException) -> str:
    """Return the region of the bucket, where the server names it, else ""."""
    if not isinstance(error, boto.ClientError):
        return ""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(
        error.response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or ""
    )


FAULTS: Final = FaultWords(failures=FAILURES, is_transient=is_transient, said=said, refusal=refusal)
