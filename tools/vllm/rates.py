"""Tokens per second of a vLLM server: by its own route, and by a pool that logs every token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import holdfast
from holdfast import elastic
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.library import BatchPlan, Mode, Rollouts, Sample
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.faults.pauses import sampled as median_of
from holdfast.tools.bench.samples import Figure
from holdfast.tools.vllm.llama import END, LIMITS, prompt_of
from holdfast.tools.vllm.servers import SLOTS, engine_of, url_of
from holdfast.tools.vllm.spending import Spent, spent

SECTION: Final = "vllm"
PATIENCE_S: Final = 600.0
SEED: Final = 7

ALONE: Final = "vLLM alone"
WITH_LOGPROBS: Final = "vLLM alone, with log-probabilities"
ENGINE: Final = "by the engine, without a log"
POOL: Final = "by the pool, with the log"
TOGETHER: Final = 8
"""Tokens of an event, in the last of the ways."""

POOL_TOGETHER: Final = f"by the pool, {TOGETHER} tokens an event"

_GROUP: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedServer:
    """A server that answers ``groups`` prompts a round, each four times.

    It serves the model at ``model`` and samples with ``weights`` from ``folder``. ``title`` stands
    before the names of its figures. Of ``processes``, those of servers, the first one is its own.
    """

    port: int
    processes: tuple[int, ...]
    folder: WeightFolder
    model: Path
    weights: Mapping[str, Tensor]
    groups: int
    title: str = ""

    def prompts(self, first: int) -> Iterator[tuple[int, int]]:
        """Yield the ordinal and the number of each answer of a round."""
        for ordinal in range(first, first + self.groups):
            yield from ((ordinal, sample) for sample in range(_GROUP))


def rates(server: RatedServer, rounds: int, *, tell: Callable[[int], None]) -> list[Figure]:
    """Answer the same prompts in every way, in turn; return tokens per second, and what they cost.

    ``tell`` is called with the number of each measured round before it.
    """
    found: dict[str, list[Spent]] = {}

    @elastic.resilient(mesh=holdfast.Mesh(dp=1), snapshots=elastic.Snapshots(keep=2))
    def measure(run: elastic.Run) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        steps, groups = rounds + 1, len(_POOLS) * server.groups  # the first step warms up
        plan = BatchPlan(
            mode=Mode.SYNC, eta=0, groups=groups, group=_GROUP, steps=steps, limits=LIMITS
        )
        rollouts = Rollouts(run, plan, prompt_of)
        run.track(model=model, optimizer=optimizer, rollouts=rollouts)
        pools = {
            name: EnginePool([engine_of(server.port, server.folder, event_tokens=count)])
            for name, count in _POOLS.items()
        }
        for step in run.steps(steps):
            tell(step)
            now = {
                name: spent(partial(way, server, first=step * groups), servers=server.processes)
                for name, way in _WITHOUT_LOG.items()
            }
            answers = list(rollouts.samples())
            for number, (name, pool) in enumerate(pools.items()):
                pool.load(server.weights, version=answers[0].version)
                begin = (step * len(pools) + number) * server.groups
                own = [each for each in answers if 0 <= each.ordinal - begin < server.groups]
                now[name] = spent(partial(_finished, pool, own), servers=server.processes)
            for done in rollouts.batch():
                assert LIMITS.over(len(done.prompt), len(done.tokens), done.tokens[-1])
            for _ in run.microbatches():
                run.backward(model(torch.ones(1, 1)).sum())
            run.step(optimizer)
            for name, each in now.items() if step else ():
                found.setdefault(name, []).append(each)
        if wrong := rollouts.report()["violations"]:
            raise ConfigError(f"the ledger's checker found {wrong}; report this as a bug")

    measure()
    return _figures(server.title, found)


def _figures(title: str, found: Mapping[str, Sequence[Spent]]) -> list[Figure]:
    base: Figure | None = None
    figures = []
    rates = {way: [1 / each.wall_s for each in samples] for way, samples in found.items()}
    for way, samples in rates.items():
        name = f"{title}{way}: tokens/s"
        figures.append(median_of(SECTION, name, samples, unit="tokens/s", versus=base))
        base = base or figures[0]
    for pool, beside in (
        *((POOL, other) for other in (ALONE, WITH_LOGPROBS, ENGINE)),
        *((POOL_TOGETHER, other) for other in (ALONE, WITH_LOGPROBS)),
    ):
        fewer = [1 - one / other for one, other in zip(rates[pool], rates[beside], strict=True)]
        what = "protecting rollouts" if pool == POOL else f"the same, {TOGETHER} tokens an event"
        name = f"{title}{what}: fewer tokens/s than {beside}"
        figures.append(median_of(SECTION, name, fewer, unit=""))
    for way, each in found.items():
        processors = {"of the server": [one.server_s for one in each]}
        processors["of all others"] = [one.others_s for one in each]
        for whose, seconds in processors.items():
            name = f"{title}{way}: processor {whose}, a token"
            figures.append(median_of(SECTION, name, seconds))
    return figures


def _finished(pool: EnginePool, answers: Sequence[Sample]) -> int:
    pool.finish(answers)
    return sum(len(each.tokens) for each in answers)


def _by_engine(server: RatedServer, *, first: int) -> int:
    """Ask for the same answers as the pool, and keep them nowhere; return the tokens."""
    engine = engine_of(server.port, server.folder, silence_s=PATIENCE_S)

    def answer(place: tuple[int, int]) -> int:
        ordinal, sample = place
        prompt = prompt_of(ordinal)
        at = TokenPlace(seed=SEED, ordinal=ordinal, sample=sample, prompt=len(prompt))
        return sum(1 for _ in engine.generate(prompt, at))

    with ThreadPoolExecutor(SLOTS) as threads:
        return sum(threads.map(answer, server.prompts(first)))


def _plainly(server: RatedServer, *, first: int, **more: Any) -> int:
    """Ask vLLM's own route for answers to the same prompts, on threads; return the tokens."""
    import httpx2

    client = httpx2.Client(timeout=PATIENCE_S, trust_env=False)

    def answer(place: tuple[int, int]) -> int:
        count, (ordinal, sample) = 0, place
        body: dict[str, Any] = {"model": str(server.model), "seed": _GROUP * ordinal + sample}
        body |= {"prompt": list(prompt_of(ordinal)), "stream": True, "return_token_ids": True}
        body |= {"stop_token_ids": [END], "ignore_eos": True, "temperature": 1.0}
        body |= {"max_tokens": LIMITS.max_new_tokens, **more}
        url = f"{url_of(server.port)}/v1/completions"
        with client.sse(url, method="POST", json=body) as events:
            for event in events:
                if event.data != "[DONE]":
                    for choice in json.loads(event.data)["choices"]:
                        count += len(choice.get("token_ids") or ())
        return count

    with client, ThreadPoolExecutor(SLOTS) as threads:
        return sum(threads.map(answer, server.prompts(first)))


_WITHOUT_LOG: Final[Mapping[str, Callable[..., int]]] = {
    ALONE: _plainly,
    WITH_LOGPROBS: partial(_plainly, logprobs=0, return_tokens_as_token_ids=True),
    ENGINE: _by_engine,
}
_POOLS: Final = {POOL: 1, POOL_TOGETHER: TOGETHER}
