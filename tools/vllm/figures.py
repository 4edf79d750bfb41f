"""Section vllm: the cost of the pool and the log beside vLLM alone, and that of a lost server.

Two servers of a tiny Llama run on this machine. vLLM's own route and a pool that writes every token
to the log of a sidecar answer the same prompts in turn. Then the servers get new weights in the
middle of answers, answers move from one to the other, and servers are killed.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from subprocess import Popen
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast import elastic
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.library import BatchPlan, Mode, Rollouts, Sample
from holdfast.adapters.rl.samples.sample import SampleSink
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.faults.pauses import sampled as median_of
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo
from holdfast.tools.vllm.llama import END, LIMITS, VOCABULARY, save_llama, tiny_llama
from holdfast.tools.vllm.program import vllm_program
from holdfast.tools.vllm.servers import SLOTS, VLLMServers, engine_of, kill, url_of

_SECTION: Final = "vllm"
_GROUPS, _GROUP = 6, 4
_ANSWERS: Final = _GROUPS * _GROUP
_KILLS: Final = 3
_AT_TOKEN: Final = 25
_BEGUN: Final = 10
_PATIENCE_S: Final = 600.0
_SEED: Final = 7
_FIRST_SWAP: Final = 1000

ALONE: Final = "vLLM alone"
ENGINE: Final = "by the engine, without a log"
POOL: Final = "by the pool, with the log"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerPair:
    """Two servers with their processes and addresses."""

    servers: VLLMServers
    ports: tuple[int, int]
    processes: list[Popen[bytes]]
    folder: WeightFolder

    def engine(self, number: int, *, pinned: bool = True) -> VLLMServer:
        return engine_of(self.ports[number], self.folder, pinned=pinned, silence_s=_PATIENCE_S)

    def restart(self, number: int) -> None:
        """Start a server that was killed anew, and wait for it."""
        self.processes[number] = self.servers.start(self.ports[number])
        self.servers.wait(self.ports[number], self.processes[number])


def vllm(setup: BenchSetup) -> list[Figure]:
    """Measure with two servers; the size of the state does not matter.

    Raises ``ConfigError`` with the remedy if there is no vLLM.
    """
    program = vllm_program()
    torch.set_num_threads(1)
    servers = VLLMServers(
        program=program, folder=setup.directory, model=save_llama(setup.directory)
    )
    ports = _free_ports()
    kills = 1 if setup.quick else _KILLS
    with Tempo(setup, total=4 * setup.repeat + kills) as tempo:
        tempo.say("two servers of vLLM start")
        with servers.serving(*ports) as processes:
            pair = _ServerPair(
                servers=servers,
                ports=ports,
                processes=processes,
                folder=WeightFolder(servers.root),
            )
            weights = _weights(1)
            for number in (0, 1):
                pair.engine(number).load(weights, version=0)
                list(pair.engine(number).generate(*_of_ordinal(0)))
            found = _rates(pair, setup, tempo)
            found += _swaps(pair, setup, tempo)
            found += _moves(pair, setup, tempo)
            return found + _losses(pair, kills, tempo)


def _free_ports() -> tuple[int, int]:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]


def _weights(version: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = tiny_llama(version).state_dict()
    return found


def prompt_of(ordinal: int) -> tuple[int, ...]:
    """Return the tokens of a prompt."""
    draw = torch.Generator().manual_seed(ordinal)
    found = torch.randint(END + 1, VOCABULARY, (4 + ordinal % 5,), generator=draw)
    return tuple(found.tolist())


def _of_ordinal(ordinal: int) -> tuple[tuple[int, ...], TokenPlace]:
    prompt = prompt_of(ordinal)
    return prompt, TokenPlace(seed=_SEED, ordinal=ordinal, sample=0, prompt=len(prompt))


# -- tokens per second -----------------------------------------------------------------------------


def _rates(pair: _ServerPair, setup: BenchSetup, tempo: Tempo) -> list[Figure]:
    """Answer the same prompts in turn by vLLM's own route, and by a pool with the log."""
    rates: dict[str, list[float]] = {ALONE: [], ENGINE: [], POOL: []}

    @elastic.resilient(mesh=holdfast.Mesh(dp=1), snapshots=elastic.Snapshots(keep=2))
    def measure(run: elastic.Run) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        steps = setup.repeat + 1  # the first one warms up
        plan = BatchPlan(
            mode=Mode.SYNC, eta=0, groups=_GROUPS, group=_GROUP, steps=steps, limits=LIMITS
        )
        rollouts = Rollouts(run, plan, prompt_of)
        run.track(model=model, optimizer=optimizer, rollouts=rollouts)
        pool, weights = EnginePool([pair.engine(0)]), _weights(1)
        for step in run.steps(steps):
            tempo.say(f"tokens per second, {step} of {setup.repeat}")
            alone = _rate(partial(_plainly, pair, first=step * _GROUPS))
            engine = _rate(partial(_by_engine, pair, first=step * _GROUPS))
            answers = list(rollouts.samples())
            pool.load(weights, version=answers[0].version)
            pooled = _rate(partial(_finished, pool, answers))
            for done in rollouts.batch():
                assert LIMITS.over(len(done.prompt), len(done.tokens), done.tokens[-1])
            for _ in run.microbatches():
                run.backward(model(torch.ones(1, 1)).sum())
            run.step(optimizer)
            if step:
                rates[ALONE].append(alone)
                rates[ENGINE].append(engine)
                rates[POOL].append(pooled)
                tempo.beat()
        if wrong := rollouts.report()["violations"]:
            raise ConfigError(f"the ledger's checker found {wrong}; report this as a bug")

    measure()
    base = median_of(_SECTION, f"{ALONE}: tokens/s", rates[ALONE], unit="tokens/s")
    rows = [
        median_of(_SECTION, f"{way}: tokens/s", rates[way], unit="tokens/s", versus=base)
        for way in (ENGINE, POOL)
    ]
    for beside in (ALONE, ENGINE):
        fewer = [1 - one / other for one, other in zip(rates[POOL], rates[beside], strict=True)]
        name = f"protecting rollouts: fewer tokens/s than {beside}"
        rows.append(median_of(_SECTION, name, fewer, unit=""))
    return [base, *rows]


def _rate(work: Callable[[], int]) -> float:
    """Return the tokens per second of some work."""
    began_s = time.perf_counter()
    return work() / (time.perf_counter() - began_s)


def _finished(pool: EnginePool, answers: Sequence[Sample]) -> int:
    pool.finish(answers)
    return sum(len(each.tokens) for each in answers)


def _by_engine(pair: _ServerPair, *, first: int) -> int:
    """Ask for the same answers as the pool, and keep them nowhere; return the tokens."""
    engine = pair.engine(0)

    def answer(number: int) -> int:
        prompt = prompt_of(first + number // _GROUP)
        place = TokenPlace(
            seed=_SEED, ordinal=first + number // _GROUP, sample=number % _GROUP, prompt=len(prompt)
        )
        return sum(1 for _ in engine.generate(prompt, place))

    with ThreadPoolExecutor(SLOTS) as threads:
        return sum(threads.map(answer, range(_ANSWERS)))


def _plainly(pair: _ServerPair, *, first: int) -> int:
    """Ask vLLM's own route for answers to the same prompts, on threads; return the tokens."""
    import httpx2

    client = httpx2.Client(timeout=_PATIENCE_S, trust_env=False)

    def answer(number: int) -> int:
        count = 0
        body: dict[str, Any] = {"model": str(pair.servers.model), "seed": first + number}
        body |= {"prompt": list(prompt_of(first + number // _GROUP)), "stream": True}
        body |= {"return_token_ids": True, "stop_token_ids": [END], "ignore_eos": True}
        body |= {"max_tokens": LIMITS.max_new_tokens, "temperature": 1.0}
        url = f"{url_of(pair.ports[0])}/v1/completions"
        with client.sse(url, method="POST", json=body) as events:
            for event in events:
                if event.data != "[DONE]":
                    for choice in json.loads(event.data)["choices"]:
                        count += len(choice.get("token_ids") or ())
        return count

    with client, ThreadPoolExecutor(SLOTS) as threads:
        return sum(threads.map(answer, range(_ANSWERS)))


# -- new weights, and answers that move ------------------------------------------------------------


def _swaps(pair: _ServerPair, setup: BenchSetup, tempo: Tempo) -> list[Figure]:
    server = pair.engine(0, pinned=False)
    found: dict[str, list[float]] = {}
    for number in range(setup.repeat):
        tempo.say(f"new weights, {number + 1} of {setup.repeat}")
        for name, seconds in _swap(server, version=_FIRST_SWAP + number).items():
            found.setdefault(name, []).append(seconds)
        tempo.beat()
    return [median_of(_SECTION, name, samples) for name, samples in found.items()]


def _swap(server: VLLMServer, *, version: int) -> dict[str, float]:
    """Load a version while answers are sampled; return the seconds of each part."""
    times: list[tuple[float, int]] = []
    begun, over = threading.Event(), threading.Event()

    def watch() -> None:
        for ordinal in itertools.count():
            for token in server.generate(*_of_ordinal(ordinal)):
                times.append((time.perf_counter(), token.version))
                if len(times) >= _BEGUN:
                    begun.set()
            if over.is_set() and times[-1][1] == version:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    begun.wait()
    weights = _weights(version)
    began_s = time.perf_counter()
    server.load(weights, version=version)
    over.set()
    thread.join()
    first = next(at for at, of in times if of == version)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(times)]
    return {
        "new weights: until the first token of them": first - began_s,
        "new weights: reading, beside the answers": server.loaded["read_s"],
        "new weights: the swap": server.loaded["swap_s"],
        "new weights: longest time without a token": max(gaps),
    }


def _moves(pair: _ServerPair, setup: BenchSetup, tempo: Tempo) -> list[Figure]:
    one, other = pair.engine(0), pair.engine(1)
    weights = _weights(1)
    one.load(weights, version=1)
    other.load(weights, version=1)
    found = []
    for number in range(2 * setup.repeat):
        tempo.say(f"answers move, {number + 1} of {2 * setup.repeat}")
        ids, place = _of_ordinal(number)
        stream = one.generate(ids, place)
        begun = list(itertools.islice(stream, _BEGUN))
        last_s = time.perf_counter()
        stream.close()
        rest = other.generate((*ids, *(each.token for each in begun)), place)
        if next(rest, None) is not None:
            found.append(time.perf_counter() - last_s)
        rest.close()
        tempo.beat()
    return [median_of(_SECTION, "an answer moves: time without a token", found)]


# -- losses ----------------------------------------------------------------------------------------


class _Sink(SampleSink):
    """Takes every token that is added, and calls ``after`` with their number."""

    limits, seed, generation = LIMITS, _SEED, 1

    def __init__(self, after: Callable[[int], object]) -> None:
        self._after = after
        self.places: list[tuple[int, int, int]] = []

    def added(self, sample: Sample, delta: Delta) -> None:
        """Take tokens."""
        places = range(delta.start, delta.start + len(delta.tokens))
        self.places += [(sample.ordinal, sample.sample, each) for each in places]
        self._after(len(self.places))


def _losses(pair: _ServerPair, kills: int, tempo: Tempo) -> list[Figure]:
    seconds, again = [], []
    for number in range(kills):
        tempo.say(f"a server is killed, {number + 1} of {kills}")
        took_s, share = _loss(pair)
        seconds.append(took_s)
        again.append(share)
        tempo.beat()
        if number + 1 < kills:
            tempo.say("the killed server starts again")
            pair.restart(0)
    return [
        median_of(_SECTION, "a server killed: until each of its answers went on", seconds),
        median_of(_SECTION, "a server killed: tokens sampled again", again, unit=""),
    ]


def _loss(pair: _ServerPair) -> tuple[float, float]:
    """Kill a server in the middle of its answers.

    Return the seconds until every unfinished answer had another token, and the share of all tokens
    that were sampled twice.
    """
    killed_s: list[float] = []
    next_s: dict[int, float] = {}

    def added(count: int) -> None:
        if count == _AT_TOKEN:
            next_s.update({each.ordinal: math.inf for each in answers if not each.finished})
            killed_s.append(time.perf_counter())
            kill(pair.processes[0])
        elif killed_s and next_s.get(sink.places[-1][0]) == math.inf:
            next_s[sink.places[-1][0]] = time.perf_counter()

    sink = _Sink(added)
    answers = [
        Sample(sink, Trajectory(ordinal=n, sample=0, prompt=prompt_of(n)), version=1)
        for n in range(2 * SLOTS)
    ]
    pool = EnginePool([pair.engine(0), pair.engine(1)], retry_s=_PATIENCE_S)
    pool.load(_weights(1), version=1)
    pool.finish(answers)
    share = 1 - len(set(sink.places)) / len(sink.places)
    return max(next_s.values()) - killed_s[0], share


# -- output ----------------------------------------------------------------------------------------


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the figures, one a line."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "median", "min–max", "×"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for figure in figures:
        shown = [_value(each, figure.unit) for each in (figure.value, figure.low, figure.high)]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        table.add_row(figure.name, shown[0], f"{shown[1]}–{shown[2]}", ratio)
    console.print(table)


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:,.1f} {unit}" if unit else f"{value:.1%}"
