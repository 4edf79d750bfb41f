"""The small server of answers obeys orders, and its tokens follow from weights and places."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chaos_victims import Site, struck

from holdfast.adapters.rl.engines.completions import CompletionServer
from holdfast.adapters.rl.engines.protocol import SampledToken, TokenPlace
from holdfast.ckpt.errors import CkptError, CorruptError, PeerError
from holdfast.tools.chaos.faults.engines import ENGINES, LISTENS, EngineInjector
from holdfast.tools.chaos.faults.injector import MissedError, Victim
from holdfast.tools.chaos.workloads import answers_server
from holdfast.tools.chaos.workloads.engines import server_at

KEEPER = 4711
IDS = (1, 2, 3)
WEIGHTS = [{"w": torch.tensor([float(n)])} for n in range(3)]


class Struck:
    """A server under an injector of faults."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder)
        self.injector = EngineInjector()
        env = self.injector.prepare(self.site, ())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        words = ["--port", str(port), "--keeper", str(KEEPER), "--pace", "0.001"]
        self.process = subprocess.Popen([sys.executable, answers_server.__file__, *words], env=env)
        self.engine = server_at(f"http://127.0.0.1:{port}")

    def load(self, version: int) -> None:
        """Load weights, once the server is there."""
        while True:
            try:
                self.engine.load(WEIGHTS[version], version=version)
            except PeerError:
                assert self.process.poll() is None
                threading.Event().wait(0.02)
            else:
                return

    def strike(self, kind: str, **given: float) -> None:
        """Give an order."""
        victim = Victim(name="rollout/0", part="worker", pids=(KEEPER,))
        self.undo = self.injector.strike(struck(kind, **given), victim, self.site)

    def answer(self, ordinal: int = 0) -> list[SampledToken]:
        """Return an answer."""
        place = TokenPlace(seed=7, ordinal=ordinal, sample=0, prompt=len(IDS))
        return list(self.engine.generate(IDS, place))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Struck]:
    found = Struck(tmp_path)
    try:
        found.load(0)
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def test_tokens_follow_from_the_weights_and_the_place(server: Struck) -> None:
    one = server.answer()
    assert server.answer() == one
    assert server.answer(1) != one
    whole = [each.token for each in one]
    place = TokenPlace(seed=7, ordinal=0, sample=0, prompt=len(IDS))
    assert list(server.engine.generate((*IDS, *whole[:2]), place)) == one[2:]
    server.load(1)
    assert server.answer() != one
    assert {each.version for each in server.answer()} == {1}


def test_each_order_is_obeyed(server: Struck) -> None:
    server.load(1)
    server.strike("engine-garbage", amount=2)
    for _ in range(2):
        with pytest.raises(CorruptError, match="no chunk of an answer"):
            server.answer()
    whole = server.answer()
    server.strike("engine-stale", lasts_s=1.0)
    assert {each.version for each in server.answer()} == {0}
    assert server.undo is not None
    server.undo()
    assert server.answer() == whole
    server.strike("engine-memory", lasts_s=1.0)
    with pytest.raises(CkptError):
        server.answer()
    server.undo()
    assert server.answer() == whole
    server.strike("engine-kill")
    with pytest.raises(PeerError):
        server.answer()
    assert server.process.wait(60) == -9


def test_a_server_hangs_until_it_is_killed(server: Struck) -> None:
    server.strike("engine-hang")
    impatient = CompletionServer(
        url=server.engine.url, limits=server.engine.limits, version=0, silence_s=0.3
    )
    with pytest.raises(PeerError, match="silent"):
        list(impatient.generate(IDS, TokenPlace(seed=7, ordinal=0, sample=0, prompt=3)))
    assert server.process.poll() is None


def test_a_worker_without_such_a_server_is_missed(tmp_path: Path) -> None:
    injector, site = EngineInjector(), Site(tmp_path)
    injector.prepare(site, ())
    with pytest.raises(MissedError, match="keeps no server that listens"):
        injector.strike(
            struck("engine-kill"), Victim(name="trainer/0", part="worker", pids=(1,)), site
        )


def test_server_and_injector_agree_on_the_names() -> None:
    assert (answers_server._ORDERS, answers_server._LISTENS) == (ENGINES, LISTENS)
