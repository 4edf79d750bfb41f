"""Every engine keeps the same contract; a pool of them loses no token, whatever its servers do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest
from completion_server import FIRST, LIMITS, engine, weights_of
from ports import free_ports
from tree import HELPERS

from holdfast.adapters.rl.engines.completions import CompletionServer
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine, TokenPlace
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory, TurnLimits
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.errors import ConfigError, JobFailedError

pytestmark = [pytest.mark.timeout(300)]

SERVER = HELPERS / "completion_server.py"
SEED, START_S = 7, 120
PROMPTS = [tuple(each) for each in (b"abc>", b"zebra>", b"q>", b"xy>", b"words>", b"hello>")]


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


def of_ordinal(ordinal: int) -> tuple[tuple[int, ...], TokenPlace]:
    """Return the prompt and the place of an answer."""
    prompt = PROMPTS[ordinal % len(PROMPTS)]
    return prompt, TokenPlace(seed=SEED, ordinal=ordinal, sample=0, prompt=len(prompt))


def alike(one: Sequence[SampledToken], other: Sequence[SampledToken]) -> bool:
    """Compare tokens and versions, and log-probabilities up to rounding."""
    return [(a.token, a.version) for a in one] == [(b.token, b.version) for b in other] and [
        a.logprob for a in one
    ] == pytest.approx([b.logprob for b in other], abs=1e-5)


# -- the contract --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["built in", "server", "server of one version"])
def any_engine(request: pytest.FixtureRequest) -> Iterator[SamplingEngine]:
    """Return each kind of engine, with the first version."""
    if request.param == "built in":
        yield engine()
        return
    (port,) = free_ports(1)
    if request.param == "server":
        with serving(port, "--pinned", "--tells"):
            yield client_of(port)
    else:
        with serving(port, "--pinned"):
            yield client_of(port, version=FIRST, load_with=None)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Give the engine of a contract test the first version again."""
    if "any_engine" in request.fixturenames:
        found = request.getfixturevalue("any_engine")
        if getattr(found, "version", None) is None:
            found.load(weights_of(FIRST), version=FIRST)


def test_an_answer_has_the_tokens_of_its_place_up_to_the_limits(any_engine: Any) -> None:
    for ordinal in range(4):
        ids, place = of_ordinal(ordinal)
        found = list(any_engine.generate(ids, place))
        tokens = [each.token for each in found]
        assert LIMITS.over(len(ids), len(tokens), tokens[-1])
        assert not any(LIMITS.over(len(ids), n, tokens[n - 1]) for n in range(1, len(tokens)))
        assert {each.version for each in found} == {FIRST}
        assert alike(found, list(engine().generate(ids, place)))


def test_an_answer_goes_on_from_any_begin_of_it(any_engine: Any) -> None:
    ids, place = of_ordinal(1)
    whole = list(any_engine.generate(ids, place))
    for count in range(len(whole) + 1):
        begun = (*ids, *(each.token for each in whole[:count]))
        assert alike(list(any_engine.generate(begun, place)), whole[count:])


def test_a_stream_may_be_closed_and_its_place_is_free(any_engine: Any) -> None:
    for _ in range(2 * any_engine.capacity):
        stream = any_engine.generate(*of_ordinal(1))
        next(stream)
        stream.close()
    assert list(any_engine.generate(*of_ordinal(1)))


def in_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at the same time; return what they return."""
    found: list[Any] = [None] * len(work)

    def keep(number: int) -> None:
        found[number] = work[number]()

    threads = [threading.Thread(target=keep, args=(n,), daemon=True) for n in range(len(work))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(START_S)
    return found


def test_many_streams_at_once_are_as_each_alone(any_engine: Any) -> None:
    alone = [list(any_engine.generate(*of_ordinal(n))) for n in range(9)]
    streams = [lambda n=n: list(any_engine.generate(*of_ordinal(n))) for n in range(9)]
    for one, other in zip(in_threads(streams), alone, strict=True):
        assert alike(one, other)


def test_no_token_is_sampled_between_pause_and_resume(any_engine: Any) -> None:
    if getattr(any_engine, "version", None) is not None:
        with pytest.raises(ConfigError, match="its weights never change"):
            any_engine.load(weights_of(2), version=2)
        return
    any_engine.pause()
    found: list[SampledToken] = []
    thread = threading.Thread(
        target=lambda: found.extend(any_engine.generate(*of_ordinal(0))), daemon=True
    )
    thread.start()
    any_engine.load(weights_of(2), version=2)
    any_engine.resume()
    thread.join(START_S)
    assert {each.version for each in found} == {2}


# -- servers that fail ---------------------------------------------------------------------------


class Sink:
    """Keeps every token that is added, and calls ``after`` with their number."""

    limits, seed, generation = LIMITS, SEED, 1

    def __init__(self, after: Callable[[int], object] = lambda _: None) -> None:
        self.places: list[tuple[int, int]] = []
        self._after = after

    def added(self, sample: Sample, delta: Delta) -> None:
        """Take tokens."""
        places = range(delta.start, delta.start + len(delta.tokens))
        self.places += [(sample.ordinal, each) for each in places]
        self._after(len(self.places))


def answers(sink: Sink, count: int = 6, version: int = FIRST) -> list[Sample]:
    """Return answers that have not begun."""
    return [
        Sample(
            sink,
            Trajectory(ordinal=n, sample=0, prompt=PROMPTS[n % len(PROMPTS)]),
            version=version,
        )
        for n in range(count)
    ]


def tokens_of(found: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Return the tokens of each."""
    return [each.tokens for each in found]


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[int, ...]]:
    """Return the tokens of all answers, sampled by one engine that lives."""
    found = answers(Sink())
    EnginePool([engine()]).finish(found)
    assert all(each.finished for each in found)
    return tokens_of(found)


@pytest.mark.parametrize("fault", ["die", "hang", "garble"])
def test_another_server_goes_on_where_one_failed(
    fault: str, undisturbed: list[tuple[int, ...]]
) -> None:
    sink, ports = Sink(), free_ports(2)
    with ExitStack() as stack:
        first = stack.enter_context(serving(ports[0], "--pinned", "--tells", f"--{fault}", "5"))
        stack.enter_context(serving(ports[1], "--pinned", "--tells"))
        pool = EnginePool([client_of(each, silence_s=4.0) for each in ports], retry_s=60.0)
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
    expected = answers(Sink(), version=2)
    EnginePool([alone]).finish(expected)
    sink = Sink()
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
        found = answers(Sink(lambda count: loads.pop(count, lambda: None)()))
        EnginePool([server], pinned=False, retry_s=0.0).finish(found)
    versions = [each.trajectory().token_versions for each in found]
    assert all(each == sorted(each) for each in versions)
    assert {version for each in versions for version in each} == {1, 2}
    assert all(each.finished for each in found)


# -- what is refused -----------------------------------------------------------------------------


def test_an_engine_with_other_weights_samples_nothing_that_is_pinned() -> None:
    found = answers(Sink(), version=2)
    pool = EnginePool([engine()], wait_s=0.3, retry_s=0.05)
    with pytest.raises(JobFailedError, match="a token of version 1 for a sample of version 2"):
        pool.finish(found)
    assert not any(each.tokens for each in found)


def test_no_engine_at_all_is_told_after_a_while() -> None:
    pool = EnginePool([client_of(free_ports(1)[0])], wait_s=0.3, retry_s=0.05)
    with pytest.raises(
        JobFailedError, match=r"no token for 0.3 s from any of 1 .*is lost.*start eng"
    ):
        pool.finish(answers(Sink()))
    with pytest.raises(ConfigError, match="give one engine or more"):
        EnginePool([])


def test_a_server_without_token_ids_is_refused() -> None:
    (port,) = free_ports(1)
    with (
        serving(port, "--mute"),
        pytest.raises(ConfigError, match="start a server that knows return_token_ids"),
    ):
        EnginePool([client_of(port)]).finish(answers(Sink()))


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
        EnginePool([client_of(port)]).finish(answers(Sink()))
