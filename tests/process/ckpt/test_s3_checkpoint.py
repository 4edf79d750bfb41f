"""Whole checkpoints on a real S3 server, with faults in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from numbered_states import loaded, saved
from service_fixtures import S3Place

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps, verified
from holdfast.ckpt.errors import CkptError, CorruptError
from holdfast.ckpt.testing.http_faults import FaultProxy, HttpFault, HttpFaultRule, faulty

PASSING = [
    HttpFaultRule(pattern="", fault=HttpFault.REFUSE, times=3, status=503, code="SlowDown"),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_BEFORE, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.RESET_DURING, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, times=3),
    HttpFaultRule(pattern="", fault=HttpFault.TRUNCATE, times=3),
    HttpFaultRule(pattern="PUT|POST", fault=HttpFault.FLIP_REQUEST, times=3),
]


@pytest.fixture
def proxy(s3_environment: S3Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with faulty(s3_environment.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", running.endpoint)
        yield running


def test_save_load_and_open(s3_environment: S3Place) -> None:
    root = s3_environment.url
    saved(root, 1)
    saved(root, 2)
    assert loaded(root) == 2
    assert ckpt.open(root)["w"][:1, :2].tolist() == [[2.0, 2.0]]
    saved(root, 2)  # once more over itself
    assert loaded(root) == 2


@pytest.mark.parametrize("rule", PASSING, ids=lambda rule: rule.fault.name)
def test_faults_that_pass_are_not_noticed(
    s3_environment: S3Place, proxy: FaultProxy, rule: HttpFaultRule
) -> None:
    root = s3_environment.url
    proxy.set(rule)
    saved(root, 1)
    proxy.set(rule)
    assert loaded(root) == 1
    proxy.set(rule)
    saved(root, 1)
    proxy.set(rule)
    assert loaded(root) == 1


def test_a_lost_reply_to_any_request_of_a_save(s3_environment: S3Place, proxy: FaultProxy) -> None:
    root = s3_environment.url
    for number in itertools.count(1):
        proxy.set(HttpFaultRule(pattern="", fault=HttpFault.LOSE_REPLY, first=number))
        saved(root, number)
        hits = list(proxy.hits)
        assert loaded(root) == number
        if not hits:
            return


def test_a_server_lost_at_any_request_of_a_save_leaves_old_or_new(
    s3_environment: S3Place, proxy: FaultProxy
) -> None:
    root = s3_environment.url
    saved(root, 1)
    for number in itertools.count(1):
        proxy.set(
            HttpFaultRule(
                pattern="", fault=HttpFault.REFUSE, first=number, times=10**9,
                status=403, code="AccessDenied",
            )
        )  # fmt: skip
        try:
            saved(root, number + 1)
        except CkptError as error:
            assert "s3://" in str(error)
            proxy.set()
            assert loaded(root) in (number, number + 1)
            assert loaded(root) == next(iter(verified(root)))
            saved(root, number + 1)  # what is left of the first try is no hindrance
            assert loaded(root) == number + 1
            saved_steps = committed_steps(root)
            assert saved_steps == [*range(1, number + 2)]
        else:
            assert number > 5
            return


def test_bytes_that_change_on_their_way_back_are_noticed(
    s3_environment: S3Place, proxy: FaultProxy
) -> None:
    root = s3_environment.url
    saved(root, 1)
    for pattern in (r"GET .*\.pack", r"GET .*index/", r"GET .*manifest\.json"):
        proxy.set(HttpFaultRule(pattern=pattern, fault=HttpFault.FLIP_REPLY, times=10**9))
        with pytest.raises(CorruptError, match="s3://"):
            loaded(root)
        assert proxy.hits
    proxy.set()
    assert loaded(root) == 1
