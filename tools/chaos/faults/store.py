"""Faults of an S3 store: errors, throttling, slowness, truncation, lost and stale replies.

A proxy stands between the job and its store (`holdfast.ckpt.testing.http_faults`). The job gets its
address as ``AWS_ENDPOINT_URL_S3``; the proxy forwards to the server that this process would use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from holdfast.ckpt.testing.http_faults import FaultProxy, HttpFault, HttpFaultRule
from holdfast.tools.chaos.faults.injector import JobAccess, Undo, Victim
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

ENDPOINT: Final = "AWS_ENDPOINT_URL_S3"
_ANY_SERVICE: Final = "AWS_ENDPOINT_URL"
_LISTING: Final = "^GET .*list-type=2"
_FOREVER: Final = 1 << 31
_PORT: Final = 80


def _one_in(fault: HttpFault, pattern: str = "") -> Callable[[float], tuple[HttpFaultRule, ...]]:
    """Return the function that makes rules which hit one in ``amount`` requests."""
    return lambda amount: (
        HttpFaultRule(pattern=pattern, fault=fault, times=_FOREVER, every=max(1, round(amount))),
    )


def _errors(amount: float) -> tuple[HttpFaultRule, ...]:
    error = {"status": int(amount), "code": "InternalError"}
    return (HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=_FOREVER, **error),)  # type: ignore[arg-type]


def _slow(amount: float) -> tuple[HttpFaultRule, ...]:
    """Return rules that slow both reads and writes."""
    return tuple(
        HttpFaultRule(pattern=pattern, fault=fault, times=_FOREVER, bytes_s=max(1, int(amount)))
        for pattern, fault in (("^GET ", HttpFault.DRIP), ("^(PUT|POST) ", HttpFault.SIP))
    )


_RULES: Final[Mapping[str, tuple[float, Callable[[float], tuple[HttpFaultRule, ...]]]]] = {
    "store-error": (500, _errors),
    "store-throttle": (2, _one_in(HttpFault.REFUSE)),
    "store-slow": (100_000, _slow),
    "store-truncate": (2, _one_in(HttpFault.TRUNCATE, "^GET ")),
    "store-lost-reply": (2, _one_in(HttpFault.LOSE_REPLY)),
    "store-stale-list": (1, _one_in(HttpFault.STALE_REPLY, _LISTING)),
}
"""Kind → default amount, and the rules of an amount."""

KINDS: Final = frozenset(_RULES)


def rules_of(kind: str, amount: float | None) -> tuple[HttpFaultRule, ...]:
    """Return the rules for a strike. Pure."""
    default, make = _RULES[kind]
    return make(default if amount is None else amount)


class StoreInjector:
    """Owns the proxy of a run."""

    def __init__(self) -> None:
        self._proxy: FaultProxy | None = None
        self._active: dict[int, tuple[HttpFaultRule, ...]] = {}
        self._lock = threading.Lock()

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Start the proxy. Raises ``ScenarioError`` if there is no S3 store to stand before."""
        for strike in strikes:
            if strike.amount is not None and strike.amount < 1:
                raise ScenarioError(
                    f"strike {strike.number} ({strike.kind}): amount is {strike.amount:g}; give 1 "
                    "or more"
                )
        upstream = os.environ.get(ENDPOINT) or os.environ.get(_ANY_SERVICE)
        if not upstream:
            raise ScenarioError(
                "faults of the store need an S3 server, which the job reaches through a proxy: "
                f"set {ENDPOINT} to its address, http://HOST:PORT (for a checkpoint in a folder "
                "use the kinds disk-*)"
            )
        url = urlsplit(upstream)
        if url.scheme != "http" or not url.hostname:
            raise ScenarioError(
                f"{ENDPOINT} is {upstream}: Holdfast injects faults into plain HTTP only; give a "
                "server without TLS, http://HOST:PORT"
            )
        self._proxy = FaultProxy(f"http://{url.hostname}:{url.port or _PORT}", keeps=_LISTING)
        return {ENDPOINT: self._proxy.endpoint}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Apply the strike's rules to requests from now on."""
        self._set({strike.number: rules_of(strike.kind, strike.amount)})
        return (lambda: self._set({strike.number: ()})) if strike.lasts_s else None

    def close(self) -> None:
        """End the proxy; later requests are refused."""
        if self._proxy is not None:
            self._proxy.close()

    def _set(self, change: Mapping[int, tuple[HttpFaultRule, ...]]) -> None:
        assert self._proxy is not None, "prepare was not called"
        with self._lock:
            self._active.update(change)
            self._proxy.set(*(rule for rules in self._active.values() for rule in rules))
