"""Figures of vLLM as an engine, with two real servers and a tiny Llama.

python tests/adapters/vllm_figures.py FOLDER [ROUNDS]

Prints JSON: tokens per second from vLLM's own completions, without log-probabilities, and by the
pool; seconds from a call of ``load`` until the server
samples with new weights, and how long requests stand still; milliseconds from an answer's last
token on one server to its next one on another; seconds from SIGKILL of a server until
every answer had another token, and the tokens that were sampled again.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import torch
from engine_contract import TokenSink, answers, of_ordinal
from ports import free_ports
from vllm_parts import END, LIMITS, SLOTS, Servers, engine_of, kill, url_of, weights_of

from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.samples.sample import Sample

ANSWERS = 24


def rate(work: Callable[[], int]) -> float:
    """Return the tokens per second of some work."""
    began_s = time.perf_counter()
    return work() / (time.perf_counter() - began_s)


def plainly(port: int, model: str) -> int:
    """Ask vLLM's own route for answers of the same prompts, on threads; return the tokens."""
    counts, numbers, lock = [0] * SLOTS, iter(range(ANSWERS)), threading.Lock()
    client = httpx2.Client(timeout=600.0, trust_env=False)

    def some(thread: int) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            body = {"model": model, "prompt": list(of_ordinal(number)[0]), "seed": number}
            body |= {"stream": True, "return_token_ids": True, "stop_token_ids": [END]}
            body |= {"max_tokens": LIMITS.max_new_tokens, "temperature": 1.0, "ignore_eos": True}
            url = f"{url_of(port)}/v1/completions"
            with client.sse(url, method="POST", json=body) as events:
                for event in events:
                    if event.data != "[DONE]":
                        for choice in json.loads(event.data)["choices"]:
                            counts[thread] += len(choice.get("token_ids") or ())

    threads = [threading.Thread(target=some, args=(n,)) for n in range(SLOTS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(counts)


def pooled(server: VLLMServer) -> int:
    """Finish the answers with a pool; return the tokens."""
    sink = TokenSink(LIMITS)
    EnginePool([server]).finish(answers(sink, ANSWERS))
    return len(sink.places)


def swap(server: VLLMServer, version: int) -> dict[str, float]:
    """Load a version while an answer is sampled; return the seconds of each part."""
    times: list[tuple[float, int]] = []

    def watch() -> None:
        for ordinal in range(3):
            for token in server.generate(*of_ordinal(ordinal)):
                times.append((time.perf_counter(), token.version))

    thread = threading.Thread(target=watch)
    thread.start()
    while len(times) < 10:
        time.sleep(0.001)
    began_s = time.perf_counter()
    server.load(weights_of(version), version=version)
    thread.join()
    first = next(at for at, of in times if of == version)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(times)]
    return {
        "to_new_weights_s": first - began_s,
        "read_s": server.loaded["read_s"],
        "swap_s": server.loaded["swap_s"],
        "longest_gap_s": max(gaps),
        "usual_gap_s": statistics.median(gaps),
    }


def moved(one: VLLMServer, other: VLLMServer, ordinal: int) -> float:
    """Move an answer in its middle; return the milliseconds without a token."""
    ids, place = of_ordinal(ordinal)
    stream = one.generate(ids, place)
    begun = [next(stream) for _ in range(10)]
    last_s = time.perf_counter()
    stream.close()
    next(other.generate((*ids, *(each.token for each in begun)), place))
    return (time.perf_counter() - last_s) * 1e3


def lost(ports: list[int], folder: WeightFolder, victim: Any) -> dict[str, float]:
    """Kill a server in the middle of its answers; return when all went on, and what was lost."""
    killed: list[float] = []
    next_s: dict[int, float] = {}
    found: list[Sample] = []

    def added(count: int) -> None:
        if count == 25:
            next_s.update({each.ordinal: math.inf for each in found if not each.finished})
            killed.append(time.perf_counter())
            kill(victim)
        elif killed:
            ordinal = sink.places[-1][0]
            if next_s.get(ordinal) == math.inf:
                next_s[ordinal] = time.perf_counter()

    sink = TokenSink(LIMITS, added)
    pool = EnginePool([engine_of(port, folder) for port in ports], retry_s=600.0)
    pool.load(weights_of(1), version=1)
    found += answers(sink)
    pool.finish(found)
    return {
        "kill_to_all_went_on_s": max(next_s.values()) - killed[0],
        "answers_moved": pool.moved,
        "tokens_resampled": len(sink.places) - len(set(sink.places)),
    }


def main(where: str, rounds: str = "5") -> None:
    """Measure, and print."""
    torch.set_num_threads(1)
    servers, ports = Servers.of(Path(where)), free_ports(2)
    folder = WeightFolder(servers.root)
    with servers.serving(*ports) as started:
        one, other = (engine_of(port, folder, silence_s=600.0) for port in ports)
        for server in (one, other):
            server.load(weights_of(1), version=1)
            list(server.generate(*of_ordinal(0)))
        rates: dict[str, list[float]] = {"plain": [], "pool": []}
        for _ in range(int(rounds)):
            rates["plain"].append(rate(lambda: plainly(ports[0], str(servers.folder / "llama"))))
            rates["pool"].append(rate(lambda: pooled(one)))
        unpinned = engine_of(ports[0], folder, pinned=False, silence_s=600.0)
        swaps = [swap(unpinned, 2 + number % 2) for number in range(int(rounds))]
        one.load(weights_of(1), version=1)
        moves = [moved(one, other, number) for number in range(2 * int(rounds))]
        loss = lost(ports, folder, started[0])
    print(
        json.dumps(
            {
                "load": os.getloadavg(),
                "tokens_per_s": rates,
                "swaps": swaps,
                "moved_ms": moves,
                "lost": loss,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
