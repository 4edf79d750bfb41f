"""Section vllm: the cost of the pool and the log beside vLLM alone, and that of a lost server.

Two servers of a tiny Llama run on this machine. vLLM's own route and a pool that writes every token
to the log of a sidecar answer the same prompts in turn. Then the servers get new weights in the
middle of answers, answers move from one to the other, and servers are killed. One of a larger Llama
answers prompts in the same ways.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import Popen
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.samples.sample import Sample, SampleSink
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory
from holdfast.tools.bench.faults.pauses import sampled as median_of
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo
from holdfast.tools.ports import free_ports
from holdfast.tools.vllm.llama import LIMITS, larger_llama, prompt_of, save_llama, tiny_llama
from holdfast.tools.vllm.program import vllm_program
from holdfast.tools.vllm.rates import PATIENCE_S, SECTION, SEED, RatedServer, rates
from holdfast.tools.vllm.servers import SLOTS, VLLMServers, engine_of, kill

_GROUPS: Final = 6
_LARGER_GROUPS: Final = 4
_KILLS: Final = 3
_AT_TOKEN: Final = 25
_BEGUN: Final = 10
_FIRST_SWAP: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerPair:
    """Two servers with their processes and addresses."""

    servers: VLLMServers
    ports: Sequence[int]
    processes: list[Popen[bytes]]
    folder: WeightFolder

    def engine(self, number: int, *, pinned: bool = True) -> VLLMServer:
        return engine_of(self.ports[number], self.folder, pinned=pinned, silence_s=PATIENCE_S)

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
    ports = free_ports(2)
    kills = 1 if setup.quick else _KILLS
    with Tempo(setup, total=(4 if setup.quick else 5) * setup.repeat + kills) as tempo:
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
            rated = RatedServer(
                port=ports[0],
                processes=tuple(each.pid for each in processes),
                folder=pair.folder,
                model=servers.model,
                weights=weights,
                groups=_GROUPS,
            )
            found = _rates(rated, setup, tempo)
            found += _swaps(pair, setup, tempo)
            found += _moves(pair, setup, tempo)
            found += _losses(pair, kills, tempo)
        return found if setup.quick else found + _larger(program, setup, tempo)


def _larger(program: str, setup: BenchSetup, tempo: Tempo) -> list[Figure]:
    """Return the rates of a server whose token takes long enough to be of use."""
    folder = setup.directory / "larger"
    folder.mkdir()
    tempo.say("a server of a larger model starts")
    servers = VLLMServers(
        program=program, folder=folder, model=save_llama(folder, make=larger_llama)
    )
    (port,) = free_ports(1)
    weights = larger_llama(1).state_dict()
    count = sum(each.numel() for each in weights.values()) / 1e6
    with servers.serving(port) as (process,):
        rated = RatedServer(
            port=port,
            processes=(process.pid,),
            folder=WeightFolder(servers.root),
            model=servers.model,
            weights=weights,
            groups=_LARGER_GROUPS,
            title=f"{count:.0f} M parameters, ",
        )
        engine_of(port, rated.folder, silence_s=PATIENCE_S).load(weights, version=0)
        return _rates(rated, setup, tempo)


def _rates(server: RatedServer, setup: BenchSetup, tempo: Tempo) -> list[Figure]:
    def tell(number: int) -> None:
        tempo.say(f"{server.title}tokens per second, {number} of {setup.repeat}")
        if number:
            tempo.beat()

    return rates(server, setup.repeat, tell=tell)


def _weights(version: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = tiny_llama(version).state_dict()
    return found


def _of_ordinal(ordinal: int) -> tuple[tuple[int, ...], TokenPlace]:
    prompt = prompt_of(ordinal)
    return prompt, TokenPlace(seed=SEED, ordinal=ordinal, sample=0, prompt=len(prompt))


# -- new weights, and answers that move ------------------------------------------------------------


def _swaps(pair: _ServerPair, setup: BenchSetup, tempo: Tempo) -> list[Figure]:
    server = pair.engine(0, pinned=False)
    found: dict[str, list[float]] = {}
    for number in range(setup.repeat):
        tempo.say(f"new weights, {number + 1} of {setup.repeat}")
        for name, seconds in _swap(server, version=_FIRST_SWAP + number).items():
            found.setdefault(name, []).append(seconds)
        tempo.beat()
    return [median_of(SECTION, name, samples) for name, samples in found.items()]


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
    return [median_of(SECTION, "an answer moves: time without a token", found)]


# -- losses ----------------------------------------------------------------------------------------


class _Sink(SampleSink):
    """Takes every token that is added, and calls ``after`` with their number."""

    limits, seed, generation = LIMITS, SEED, 1

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
        median_of(SECTION, "a server killed: until each of its answers went on", seconds),
        median_of(SECTION, "a server killed: tokens sampled again", again, unit=""),
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
    pool = EnginePool([pair.engine(0), pair.engine(1)], retry_s=PATIENCE_S)
    pool.load(_weights(1), version=1)
    pool.finish(answers)
    share = 1 - len(set(sink.places)) / len(sink.places)
    return max(next_s.values()) - killed_s[0], share


# -- output ----------------------------------------------------------------------------------------
_SHORT_S: Final = 0.1


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the figures, one a line."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "median", "min–max", "×"):
        table.add_column(title, justify="right" if title else "left", no_wrap=bool(title))
    for figure in figures:
        shown = [_value(each, figure.unit) for each in (figure.value, figure.low, figure.high)]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        table.add_row(figure.name, shown[0], f"{shown[1]}–{shown[2]}", ratio)
    console.print(table)


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.2f} ms" if value < _SHORT_S else f"{value:.2f} s"
    return f"{value:,.1f}" if unit else f"{value:.1%}"
