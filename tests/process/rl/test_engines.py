"""Every engine keeps the same contract; a pool of them loses no token, whatever its servers do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest
from completion_server import FIRST, LIMITS, engine, weights_of
from engine_contract import (
    ContractedEngine,
    EngineContract,
    TokenSink,
    answers,
    of_ordinal,
    tokens_of,
)
from ports import free_ports
from tree import HELPERS

from holdfast.adapters.rl.engines.completions import CompletionServer
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import SamplingEngine
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.errors import ConfigError, JobFailedError

pytestmark = [pytest.mark.timeout(300)]

SERVER = HELPERS / "completion_server.py"
START_S = 120


def started(port: int, *flags: str) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers."""
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), *flags])
    client = httpx2.Client(
        transport=httpx2.HTTPTransport(retries=0), timeout=START_S, trust_env=False
    )
    with client:
        while True:
            try:
                client.post(f"http://127.0.0.1:{port}/resume")
            except httpx2.ConnectError:
                assert process.poll() is None, "the server ended at its start"
                threading.Event().wait(0.05)
                continue
            return process


@contextmanager
def serving(port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server while the body lasts."""
    process = started(port, *flags)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def client_of(port: int, **given: Any) -> CompletionServer:
    """Return the engine of a server, which can be told to load a version."""
    url = f"http://127.0.0.1:{port}"

    def load(_: Any, version: int) -> None:
        httpx2.post(f"{url}/load", json={"version": version}, timeout=START_S, trust_env=False)

    given = {"limits": LIMITS, "load_with": load, "by_place": True, **given}
    return CompletionServer(url=url, **given)


# -- the contract --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["built in", "server", "server of one version"])
def contracted(request: pytest.FixtureRequest) -> Iterator[ContractedEngine]:
    """Return each kind of engine, with the first version."""

    def of(subject: SamplingEngine, *, changes: bool = True) -> ContractedEngine:
        return ContractedEngine(
            engine=subject,
            limits=LIMITS,
            first=FIRST,
            weights_of=weights_of if changes else None,
            alone=lambda ids, place: list(engine().generate(ids, place)),
        )

    (port,) = free_ports(1)
    if request.param == "built in":
        yield of(engine())
    elif request.param == "server":
        with serving(port, "--pinned", "--tells"):
            yield of(client_of(port))
    else:
        with serving(port, "--pinned"):
            yield of(client_of(port, version=FIRST, load_with=None), changes=False)


class TestContract(EngineContract):
    """The included engine and two kinds of servers keep the contract."""


# -- servers that fail ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[int, ...]]:
    """Return the tokens of all answers, sampled by one engine that lives."""
    found = answers(TokenSink(LIMITS))
    EnginePool([engine()]).finish(found)
    assert all(each.finished for each in found)
    return tokens_of(found)


@pytest.mark.parametrize("fault", ["die", "hang", "garble"])
def test_another_server_goes_on_where_one_failed(
    fault: str, undisturbed: list[tuple[int, ...]]
) -> None:
    sink, ports = TokenSink(LIMITS), free_ports(2)
    with ExitStack() as stack:
        first = stack.enter_context(serving(ports[0], "--pinned", "--tells", f"--{fault}", "5"))
        stack.enter_context(serving(ports[1], "--pinned", "--tells"))
        pool = EnginePool([client_of(each, silence_s=2.0) for each in ports], retry_s=60.0)
        found = answers(sink)
        pool.finish(found)
        if fault == "die":
            assert first.wait(START_S) == -signal.SIGKILL
    assert pool.moved > 0
    assert tokens_of(found) == undisturbed
    assert len(sink.places) == len(set(sink.places)), "no token was sampled twice"


def test_a_server_that_is_restarted_gets_the_weights_again() -> None:
    (port,), flags = free_ports(1), ("--pinned", "--tells")
    alone = engine()
    alone.load(weights_of(2), version=2)
    expected = answers(TokenSink(LIMITS), version=2)
    EnginePool([alone]).finish(expected)
    sink = TokenSink(LIMITS)
    found = answers(sink, version=2)
    with ExitStack() as stack:
        first = stack.enter_context(serving(port, *flags, "--die", "7"))
        pool = EnginePool([client_of(port)], retry_s=0.1)
        pool.load({}, version=2)
        again = threading.Thread(
            target=lambda: (first.wait(), stack.enter_context(serving(port, *flags)))
        )
        again.start()
        pool.finish(found)
        again.join()
    assert tokens_of(found) == tokens_of(expected)
    assert {v for each in found for v in each.trajectory().token_versions} == {2}
    assert len(sink.places) == len(set(sink.places))


def test_versions_may_rise_within_an_answer() -> None:
    (port,) = free_ports(1)
    with serving(port, "--wait", "6", "--tells"):
        server = client_of(port)
        loads = {4: lambda: server.load({}, version=2)}
        found = answers(TokenSink(LIMITS, lambda count: loads.pop(count, lambda: None)()))
        EnginePool([server], pinned=False, retry_s=0.0).finish(found)
    versions = [each.trajectory().token_versions for each in found]
    assert all(each == sorted(each) for each in versions)
    assert {version for each in versions for version in each} == {1, 2}
    assert all(each.finished for each in found)


# -- what is refused -----------------------------------------------------------------------------


def test_an_engine_with_other_weights_samples_nothing_that_is_pinned() -> None:
    found = answers(TokenSink(LIMITS), version=2)
    pool = EnginePool([engine()], wait_s=0.3, retry_s=0.05)
    with pytest.raises(JobFailedError, match="a token of version 1 for a sample of version 2"):
        pool.finish(found)
    assert not any(each.tokens for each in found)


def test_no_engine_at_all_is_told_after_a_while() -> None:
    pool = EnginePool([client_of(free_ports(1)[0])], wait_s=0.3, retry_s=0.05)
    with pytest.raises(
        JobFailedError, match=r"no token for 0.3 s from any of 1 .*is lost.*start eng"
    ):
        pool.finish(answers(TokenSink(LIMITS)))
    with pytest.raises(ConfigError, match="give one engine or more"):
        EnginePool([])


def test_a_server_without_token_ids_is_refused() -> None:
    (port,) = free_ports(1)
    with (
        serving(port, "--mute"),
        pytest.raises(ConfigError, match="start a server that knows return_token_ids"),
    ):
        EnginePool([client_of(port)]).finish(answers(TokenSink(LIMITS)))


def test_weights_in_the_middle_of_an_answer_are_refused_where_bits_count() -> None:
    pinned = engine()
    stream = pinned.generate(*of_ordinal(1))
    next(stream)
    with pytest.raises(ConfigError, match="1 answers are in progress"):
        pinned.load(weights_of(2), version=2)
    stream.close()
    pinned.load(weights_of(2), version=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "localhost:1"}, "give http://host:port"),
        ({"version": None}, "give version=, .* or load_with="),
        ({"load_with": print}, "give version=, .* or load_with="),
        ({"capacity": 0}, "give 1 or more answers"),
        (
            {"limits": TurnLimits(end=1, context=9, max_new_tokens=3, turns=True)},
            "a server gives one turn",
        ),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CompletionServer(**{"url": "http://localhost:1", "limits": LIMITS, "version": 1, **given})


def test_a_server_that_is_not_there_is_lost() -> None:
    server = client_of(free_ports(1)[0])
    for call in (server.pause, server.resume, lambda: server.load({}, version=2)):
        with pytest.raises(PeerError, match="is lost"):
            call()


def test_a_server_whose_weights_change_must_tell_their_version() -> None:
    (port,) = free_ports(1)
    with serving(port), pytest.raises(ConfigError, match="do not tell their weight_version"):
        EnginePool([client_of(port)]).finish(answers(TokenSink(LIMITS)))
