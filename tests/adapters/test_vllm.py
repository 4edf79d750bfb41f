"""A real vLLM server is an engine like others: no token is lost with it, none sampled twice."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import environments
import httpx2
import pytest
import torch
from engine_contract import (
    ContractedEngine,
    EngineContract,
    TokenSink,
    answers,
    of_ordinal,
    tokens_of,
)
from ports import free_ports
from vllm_parts import built_in, servers_in, weights_of

from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.elastic.errors import ConfigError
from holdfast.tools.vllm.llama import LIMITS, tiny_llama
from holdfast.tools.vllm.servers import VLLMServers, engine_of, kill, tell, url_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not environments.wanted(), reason=f"{environments.SWITCH}=1 (make adapters) runs them"
    ),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> VLLMServers:
    """Return what starts servers."""
    return servers_in(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Return the ports of two servers."""
    return free_ports(2)


@pytest.fixture(scope="module")
def two(servers: VLLMServers, ports: list[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run two servers; a test may replace a killed one."""
    with servers.serving(*ports) as started:
        yield started


@pytest.fixture(scope="module")
def folder(servers: VLLMServers) -> WeightFolder:
    """Return the folder from which the servers read."""
    return WeightFolder(servers.root)


@pytest.fixture(scope="module")
def contracted(
    servers: VLLMServers, two: Any, ports: list[int], folder: WeightFolder
) -> ContractedEngine:
    """Return the first server's engine."""
    alone = built_in(servers)
    return ContractedEngine(
        engine=engine_of(ports[0], folder),
        limits=LIMITS,
        first=1,
        weights_of=weights_of,
        alone=lambda ids, place: list(alone.generate(ids, place)),
    )


class TestContract(EngineContract):
    """A vLLM server keeps the contract, and samples the tokens of the included engine."""


def test_only_what_changed_is_read(two: Any, ports: list[int], folder: WeightFolder) -> None:
    server, weights = engine_of(ports[0], folder), dict(weights_of(1))
    server.load(weights, version=1)
    whole = sum(each.nbytes for each in weights.values())
    name = "model.layers.0.mlp.up_proj.weight"
    changed = {**weights, name: weights[name] + 1}
    server.load(changed, version=2)
    assert changed[name].nbytes <= server.loaded["read_bytes"] < whole / 5
    assert server.loaded["kept_bytes"] > whole * 0.8
    server.load(dict(changed), version=3)
    assert server.loaded["read_bytes"] == 0
    assert {each.version for each in server.generate(*of_ordinal(0))} == {3}


def test_events_may_have_several_tokens_the_same_ones(
    two: Any, ports: list[int], folder: WeightFolder
) -> None:
    one, more = (engine_of(ports[0], folder, event_tokens=count) for count in (1, 8))
    one.load(weights_of(1), version=1)
    for ordinal in range(4):
        asked = of_ordinal(ordinal)
        runs = list(more.generate_runs(*asked))
        assert [each for run in runs for each in run] == list(one.generate(*asked))
        assert [len(each) for each in runs[:-1]] == [1, *[8] * (len(runs) - 2)]
        assert 0 < len(runs[-1]) <= 8


def test_answers_go_on_under_new_weights(
    servers: VLLMServers, two: Any, ports: list[int], folder: WeightFolder
) -> None:
    server, new = engine_of(ports[0], folder, pinned=False), weights_of(2)
    server.load(weights_of(1), version=1)
    loads = {6: lambda: server.load(new, version=2)}
    found = answers(TokenSink(LIMITS, lambda count: loads.pop(count, lambda: None)()))
    pool = EnginePool([server], pinned=False)
    pool.finish(found)
    assert pool.moved == 0
    versions = [each.trajectory().token_versions for each in found]
    assert all(each == sorted(each) for each in versions)
    assert any({1, 2} <= set(each) for each in versions), "an answer has tokens of both"
    check_logprobs(servers, found)


def check_logprobs(servers: VLLMServers, found: list[Sample]) -> None:
    """Check each log-probability: that of its token's version, given all tokens before."""
    for each in found:
        done = each.trajectory()
        for version in set(done.token_versions):
            with torch.no_grad():
                logits = tiny_llama(version)(torch.tensor([each.text])).logits[0]
            rows = logits.log_softmax(-1)[len(done.prompt) - 1 : -1]
            for row, token, logprob, of in zip(
                rows, done.tokens, done.logprobs, done.token_versions, strict=True
            ):
                assert of != version or logprob == pytest.approx(float(row[token]), abs=1e-4)


def test_a_pinned_answer_breaks_off_when_the_weights_change(
    two: Any, ports: list[int], folder: WeightFolder
) -> None:
    server, other = engine_of(ports[0], folder), engine_of(ports[0], folder)
    server.load(weights_of(1), version=1)
    loads = {20: lambda: other.load(weights_of(2), version=2)}
    sink = TokenSink(LIMITS, lambda count: loads.pop(count, lambda: None)())
    found, given = answers(sink), weights_of(1)
    pool = EnginePool([server])
    pool.load(given, version=1)
    pool.finish(found)
    assert pool.moved > 0, "the pool gave the server the first version again"
    assert {v for each in found for v in each.trajectory().token_versions} == {1}
    assert len(sink.places) == len(set(sink.places))


@pytest.fixture(scope="module")
def undisturbed(servers: VLLMServers) -> list[tuple[int, ...]]:
    """Return the tokens of all answers, sampled by the included engine."""
    found = answers(TokenSink(LIMITS))
    EnginePool([built_in(servers)]).finish(found)
    return tokens_of(found)


def test_another_server_goes_on_where_one_was_killed_and_where_one_hangs(
    servers: VLLMServers,
    two: list[subprocess.Popen[bytes]],
    ports: list[int],
    folder: WeightFolder,
    undisturbed: list[tuple[int, ...]],
) -> None:
    weights = weights_of(1)
    kills = {25: lambda: kill(two[0])}
    sink = TokenSink(LIMITS, lambda count: kills.pop(count, lambda: None)())
    pool = EnginePool([engine_of(port, folder) for port in ports], retry_s=600.0)
    pool.load(weights, version=1)
    found = answers(sink)
    pool.finish(found)
    assert two[0].returncode == -signal.SIGKILL
    assert pool.moved > 0
    assert tokens_of(found) == undisturbed
    assert len(sink.places) == len(set(sink.places)), "no token was sampled twice"

    two[0] = servers.start(ports[0])
    servers.wait(ports[0], two[0])
    stops = {25: lambda: tell(two[1], signal.SIGSTOP)}
    sink = TokenSink(LIMITS, lambda count: stops.pop(count, lambda: None)())
    pool = EnginePool([engine_of(port, folder, silence_s=5.0) for port in ports], retry_s=600.0)
    pool.load(weights, version=1)
    found = answers(sink)
    pool.finish(found)
    tell(two[1], signal.SIGCONT)
    assert pool.moved > 0
    assert tokens_of(found) == undisturbed
    assert len(sink.places) == len(set(sink.places))


def test_a_restarted_server_goes_on_from_the_log_with_the_newest_weights(
    servers: VLLMServers, two: list[subprocess.Popen[bytes]], ports: list[int], folder: WeightFolder
) -> None:
    alone = built_in(servers, version=2)
    expected = answers(TokenSink(LIMITS), version=2)
    EnginePool([alone]).finish(expected)

    def restart() -> None:
        kill(two[0])
        two[0] = servers.start(ports[0])

    kills = {25: restart}
    sink = TokenSink(LIMITS, lambda count: kills.pop(count, lambda: None)())
    pool = EnginePool([engine_of(ports[0], folder)], wait_s=1200.0)
    pool.load(weights_of(2), version=2)
    found = answers(sink, version=2)
    pool.finish(found)
    assert tokens_of(found) == tokens_of(expected)
    assert {v for each in found for v in each.trajectory().token_versions} == {2}
    assert len(sink.places) == len(set(sink.places))


def test_what_a_server_cannot_do_is_refused(
    two: Any, ports: list[int], folder: WeightFolder
) -> None:
    server = engine_of(ports[0], folder)
    with pytest.raises(ConfigError, match=r"do not fit the model.*no_such_name"):
        server.load({**weights_of(1), "model.no_such_name": torch.zeros(3)}, version=4)
    with pytest.raises(ConfigError, match="no weights for"):
        server.load({"lm_head.weight": weights_of(1)["lm_head.weight"]}, version=4)
    server.load(weights_of(1), version=1)
    assert list(server.generate(*of_ordinal(0)))
    place = {"vllm_xargs": {"holdfast_place": [1, 2, 3, 4]}}
    body = {"model": "", "prompt": [1, 2], "max_tokens": 2, "temperature": 0.5, **place}
    answer = httpx2.post(f"{url_of(ports[0])}/v1/completions", json=body, trust_env=False)
    assert answer.status_code == 400
    assert "log-probabilities would not be those" in answer.text
    limits = type(LIMITS)(end=10, context=4096, max_new_tokens=4000)
    long = VLLMServer(url=url_of(ports[0]), limits=limits, weights=folder)
    with pytest.raises(ConfigError, match=r"--max-model-len is \d+"):
        list(long.generate(*of_ordinal(0)))
